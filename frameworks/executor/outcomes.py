"""Results as plain data that two packages can be compared by: values with their types, metadata, errors."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

import transfer_queue as tq

# What the tests of TransferQueue 0.1.11, and frameworks, look for in the texts of errors.
TEXTS = (
    "must have same length", "Got duplicated", "do not match", "not found in current batch", "duplicate",
    "select_fields.*not found", "keys or partition were not found!",
    "Some fields are not ready in all the requested keys!",
)  # fmt: skip


class Names:
    """Names for the rows and partitions of one program, the same in both packages, which number rows differently.

    Rows are numbered as they are first seen; those first seen together by their global index.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._rows: dict[int, int] = {}

    def rows(self, indexes: list[int]) -> list[int]:
        for index in sorted(set(indexes) - self._rows.keys()):
            self._rows[index] = len(self._rows)
        return [self._rows[index] for index in indexes]

    def partition(self, name: str) -> str:
        return self.prefix + name

    def shown(self, partition: str) -> str:
        return partition.removeprefix(self.prefix)


def error(raised: Exception) -> dict[str, Any]:
    """The classes that catch an error and have a public name, the nearest first, and which known texts it has."""
    public = [c.__name__ for c in type(raised).__mro__ if c.__module__ == "builtins" or getattr(tq, c.__name__, 0) is c]
    return {
        "raises": public[: public.index("Exception")],
        "texts": [one for one in TEXTS if re.search(one, str(raised))],
    }


def plain(result: Any, names: Names) -> Any:
    """A result as JSON can hold it, with every type that a caller would notice."""
    if isinstance(result, torch.Tensor):
        return _tensor(result)
    if isinstance(result, (NonTensorStack, NonTensorData)):
        return {"kind": type(result).__name__, "rows": plain(result.tolist(), names)}
    if isinstance(result, TensorDictBase):
        fields = {name: plain(result.get(name), names) for name in result.keys()}  # noqa: SIM118  no mapping
        return {"kind": "batch", "size": list(result.batch_size), "order": list(fields), "fields": fields}
    if isinstance(result, tq.KVBatchMeta):
        return _keys(result, names)
    if isinstance(result, tq.BatchMeta):
        return _rows(result, names)
    if isinstance(result, np.ndarray):
        content = plain(result.tolist(), names) if result.dtype == object else str(result.tolist())
        return {"kind": "array", "dtype": str(result.dtype), "shape": list(result.shape), "values": content}
    if isinstance(result, list):
        return [plain(item, names) for item in result]
    if isinstance(result, dict):
        return {"items": [[plain(k, names), plain(v, names)] for k, v in result.items()]}
    if type(result) in (str, int, bool, type(None)):
        return result
    if isinstance(result, type(threading.Lock())):
        return "lock"
    return (
        f"{type(result).__name__} {result!r}"
        if not isinstance(result, tuple)
        else {"tuple": plain(list(result), names)}
    )


def _tensor(result: torch.Tensor) -> Any:
    if result.is_nested:
        layout = str(result.layout).removeprefix("torch.")
        return {"kind": f"nested {layout}", "rows": [_tensor(row) for row in result.unbind()]}
    dtype = str(result.dtype).removeprefix("torch.")
    return {"kind": "tensor", "dtype": dtype, "shape": list(result.shape), "values": str(result.tolist())}


def _rows(meta: tq.BatchMeta, names: Names) -> dict[str, Any]:
    schema = meta.field_schema
    return {
        "kind": "BatchMeta",
        "rows": names.rows([int(index) for index in meta.global_indexes]),
        "partitions": [names.shown(partition) for partition in meta.partition_ids],
        "names": list(meta.field_names),
        "ready": [bool(meta.is_ready), np.asarray(meta.production_status).tolist()],
        "dtypes": {name: str(spec.get("dtype")) for name, spec in schema.items()},
        "shapes": {name: plain(_shapes(meta, name), names) for name in schema},
        "no tensors": {name: bool(spec.get("is_non_tensor")) for name, spec in schema.items()},
        "tags": plain(list(meta.custom_meta), names),
        "extra": plain(dict(sorted(meta.extra_info.items())), names),  # joined in the order of a Python set there
        "size": [meta.size, len(meta)],
    }


def _shapes(meta: tq.BatchMeta, name: str) -> list[Any]:
    return [None if one is None else list(one) for one in meta.get_shapes(name)]


def _keys(meta: tq.KVBatchMeta, names: Names) -> dict[str, Any]:
    return {
        "kind": "KVBatchMeta",
        "keys": list(meta.keys),
        "tags": plain(meta.tags, names),
        "partition": meta.partition_id and names.shown(meta.partition_id),
        "names": meta.fields,
        "extra": plain(meta.extra_info, names),
        "size": [meta.size, len(meta)],
    }
