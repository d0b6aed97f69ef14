"""Copying and comparing plain per-row and per-batch dicts, and joining them without losing a conflict."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from transfer_queue.arguments import items
from transfer_queue.errors import InvalidInput

T = TypeVar("T")
_ATOMS = frozenset({str, int, float, bool, bytes, complex, type(None)})


def copy_dict(row: Mapping[str, Any]) -> dict[str, Any]:
    """An independent copy; values that cannot be changed in place are shared, which is most of them."""
    if isinstance(row, dict) and type(row) is not dict:
        return copy.deepcopy(row)  # an OrderedDict stays one
    return {key: value if type(value) in _ATOMS else copy.deepcopy(value) for key, value in row.items()}


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are of the same type and equal, arrays and tensors by content, also inside containers.

    Values that refuse to be compared count as different.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    try:
        if hasattr(a, "shape") and hasattr(a, "dtype"):
            return bool(a.shape == b.shape and a.dtype == b.dtype and np.all(_plain_bool(a == b)))
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


def _plain_bool(equal: Any) -> Any:
    """The result of `==` between two arrays, as one bool when it is a tensor (which may be on a device)."""
    return bool(equal.all()) if hasattr(equal, "all") else equal


def common_service(ids: Iterable[bytes], what: str) -> bytes:
    """The one life of a service that rows are of, as far as it is known. InvalidInput for rows of several."""
    known = set(ids) - {b""}
    if len(known) > 1:
        raise InvalidInput(f"{what}: the rows are of different lives of the service; those of all but one are lost")
    return known.pop() if known else b""


def merge_extra_info(infos: Iterable[Mapping[str, Any] | None], what: str) -> dict[str, Any]:
    """The union of `infos`.

    Raises:
        InvalidInput: two of them give one key different values; `what` names the operation in the message.
    """
    merged: dict[str, Any] = {}
    for position, info in enumerate(infos):
        for key, value in (info or {}).items():
            if key in merged and not same_value(merged[key], value):
                raise InvalidInput(
                    f"{what}: extra_info {key!r} has conflicting values, {merged[key]!r} before "
                    f"chunk {position} and {value!r} in it"
                )
            merged.setdefault(key, value)
    return merged


def check_kind(data: Any, kind: type[T]) -> list[T]:
    """Those of the metas in `data` that have rows; None counts as one without. `InvalidInput` where one is something
    else, such as one by keys among those by rows."""
    metas = [meta for meta in items(data, "data") if meta is not None]
    for meta in metas:
        if not isinstance(meta, kind):
            raise InvalidInput(f"concat: expected only {kind.__name__}, got {type(meta).__qualname__}")
    return [meta for meta in metas if meta]


def chunk_bounds(size: int, chunks: int) -> list[tuple[int, int]]:
    """(start, stop) of each of `chunks` pieces; the first `size % chunks` get one row more. ZeroDivisionError for 0,
    InvalidInput for what is no whole number."""
    try:
        chunks = operator.index(chunks)
    except TypeError:
        raise InvalidInput(f"chunks is a number of parts, got {chunks!r:.200}") from None
    base, extra = divmod(size, chunks)
    starts = [base * i + min(i, extra) for i in range(chunks + 1)]
    return list(pairwise(starts))
