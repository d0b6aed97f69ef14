"""What a case is, and how a result becomes something that JSON can hold and two packages can be compared by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq

CASES: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES.append(function)
    return function


def plain(value: Any) -> Any:
    """A value as JSON can hold it, with the type a caller would notice."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            rows = [[str(row.dtype), list(row.shape), row.tolist()] for row in value.unbind()]
            return [f"nested {str(value.layout).removeprefix('torch.')}", rows]
        return ["tensor", str(value.dtype), value.tolist()]
    if isinstance(value, NonTensorStack):
        return ["stack", [plain(item) for item in value.tolist()]]
    if isinstance(value, TensorDict):
        return {"size": list(value.batch_size), **{name: plain(value.get(name)) for name in sorted(value.keys())}}
    if isinstance(value, tq.KVBatchMeta):
        return ["keys", value.keys, plain(value.tags), value.partition_id, value.fields, value.extra_info, value.size]
    if isinstance(value, tq.BatchMeta):
        status = np.asarray(value.production_status).tolist()
        return [
            "rows",
            value.size,
            value.field_names,
            value.is_ready,
            value.partition_ids,
            status,
            plain(value.custom_meta),
        ]
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value if type(value) in (str, int, float, bool, type(None)) else f"{type(value).__name__} {value}"


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call returns, or the builtin exceptions that would catch its error, the nearest first."""
    try:
        return plain(function(*args, **kwargs))
    except Exception as error:  # noqa: BLE001  what is raised is what is compared
        bases = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
        return {"raises": bases[: bases.index("Exception")]}


def batch(size: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=size)


def jagged(*rows: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


@contextmanager
def rows(partition: str, count: int, **columns: Any) -> Iterator[list[str]]:
    """Some rows under keys r0, r1, ..., cleared afterwards."""
    keys = [f"r{number}" for number in range(count)]
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=batch(count, **columns))
    yield keys
    tq.kv_clear(keys=keys, partition_id=partition)


def outcome(function: Callable[[], Any]) -> Any:
    """What a case gave, or why it could not be run to its end."""
    try:
        return plain(function())
    except Exception as error:  # noqa: BLE001  the other cases go on
        return f"not run to its end: {type(error).__name__}: {error}"
