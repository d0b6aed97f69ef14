"""Plain Python lists, numpy arrays, and arrays of other libraries (DLPack) as tensor columns.

Many ints of 32 bits, or floats, are converted at once (`codec.numbers`). Others `struct` packs, which refuses what does
not fit instead of rounding it. That every item is a number of the list's type is looked at before, which takes as long
again: it would take a Decimal, or a member of an enum, for one. Both are faster than `torch.tensor`
(docs/benchmarks.md).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from transfer_queue.codec.dtypes import lying_as
from transfer_queue.codec.layout import offsets_of
from transfer_queue.codec.numbers import exact_numbers
from transfer_queue.codec.registry import registered
from transfer_queue.errors import UnsupportedValue
from transfer_queue.memory.bytes import Ints

FLOAT32_INTS = 1 << 24  # it holds all ints up to this one
FLOAT32_MAX = float(np.finfo(np.float32).max)
_FORMATS = {int: ("q", torch.int64), float: ("f", torch.float32), bool: ("?", torch.bool)}


def as_tensor(value: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """A tensor over the memory of `value`, or None where torch has no such dtype."""
    if value.dtype.kind not in "biufc" or not value.dtype.isnative or not value.ndim:
        return None
    try:
        return torch.from_numpy(value if value.flags.writeable and value.flags.c_contiguous else value.copy())
    except TypeError:
        return None


def is_exporter(value: Any) -> bool:
    """Whether it is an array of another library, which says so by `__dlpack__`; not of a type that was registered."""
    kind = type(value)
    if not hasattr(kind, "__dlpack__") or isinstance(value, (torch.Tensor, np.ndarray)):
        return False
    return hasattr(kind, "__dlpack_device__") and registered(kind) is None


def exchanged(value: Any) -> torch.Tensor:
    """A tensor over the memory of an exporter, on its device; nobody writes to it. What is read-only may be copied.

    Raises `UnsupportedValue` where neither torch nor numpy takes it.
    """
    try:
        return from_dlpack(value)
    except BufferError as error:  # exporters of the first version of the protocol cannot say that memory is read-only
        reason: Exception = error
    except _REFUSALS as error:
        raise _refused(value, error) from None
    try:
        found = np.from_dlpack(value)
        tensor = torch.from_numpy(found if found.flags.writeable else found.copy())
    except _REFUSALS:
        raise _refused(value, reason) from None
    return tensor


_REFUSALS = (BufferError, RuntimeError, TypeError, ValueError, AttributeError)


def _refused(value: Any, error: Exception) -> UnsupportedValue:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return UnsupportedValue(f"a {name} gives no tensor by DLPack ({error}): put a copy of it")


def column_of(value: Any) -> Any:
    """A column, of which arrays of other libraries are tensors; anything else as it is."""
    if is_exporter(value):
        return exchanged(value)
    if type(value) in (list, tuple) and value and is_exporter(value[0]) and all(map(is_exporter, value)):
        return list(map(exchanged, value))
    return value


def numbers(values: Sequence[Any]) -> torch.Tensor | tuple[torch.Tensor, Ints] | None:
    """Numbers as a dense (n,) tensor; lists of numbers as (joined values, offsets); None for anything else.

    int gives int64, bool bool, float float32 (the precision training uses); a mix of int and float is float32,
    where that holds the ints.
    """
    kind = type(values[0])
    if kind in _FORMATS:
        found = _at_once([values], kind) if type(values) is list else None
        if found is not None:
            return found
        packed = _pack(values, _kind(values))
        return None if packed is None else torch.frombuffer(packed[0], dtype=packed[1])
    if kind is not list:
        return None
    if any(type(row) is not list for row in values):
        return None
    return _joined(values)


def _joined(rows: Sequence[list[Any]]) -> tuple[torch.Tensor, Ints] | None:
    first = next((row[0] for row in rows if row), None)
    kind: type | None = type(first)
    if first is None or kind not in _FORMATS:
        return None
    found = _at_once(rows, kind)
    if found is not None:
        return found, offsets_of([len(row) for row in rows])
    parts = []
    for row in rows:
        packed = _pack(row, kind)
        if packed is None:
            if kind is float or (kind := _kind_of_all(rows)) is None:
                return None
            return _joined_as(rows, kind)
        parts.append(packed[0])
    return _assemble(rows, parts, kind)


def _at_once(rows: Sequence[list[Any]], kind: type) -> torch.Tensor | None:
    found = exact_numbers(rows, lying_as(_FORMATS[kind][1])[0])
    if found is None or (kind is float and _overflowed(found, itertools.chain.from_iterable(rows))):
        return None
    return torch.from_numpy(found)


def _joined_as(rows: Sequence[list[Any]], kind: type) -> tuple[torch.Tensor, Ints] | None:
    parts = [_pack(row, kind) for row in rows]
    if any(part is None for part in parts):
        return None
    return _assemble(rows, [part[0] for part in parts if part is not None], kind)


def _assemble(rows: Sequence[list[Any]], parts: list[bytearray], kind: type) -> tuple[torch.Tensor, Ints]:
    offsets = offsets_of([len(row) for row in rows])
    data = bytearray().join(parts)
    dtype = _FORMATS[kind][1]
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")), offsets


def _kind_of_all(rows: Sequence[list[Any]]) -> type | None:
    kinds = {kind for row in rows for kind in map(type, row)}
    return float if kinds == {int, float} else None


def _kind(values: Sequence[Any]) -> type:
    """The one type of all values; `object` for a mix that only looks like numbers of one type, such as bool and int."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        return kinds.pop()
    return float if kinds == {int, float} else object


def _pack(row: Sequence[Any], kind: type) -> tuple[bytearray, torch.dtype] | None:
    """The numbers of `row` as machine values, or None when one is not of `kind`, or would change."""
    if kind not in _FORMATS or not _are_of(row, kind):
        return None
    letter, dtype = _FORMATS[kind]
    out = bytearray(len(row) * dtype.itemsize)
    try:
        struct.pack_into(f"{len(row)}{letter}", out, 0, *row)
    except (struct.error, OverflowError):
        return None
    if kind is float and _overflowed(np.frombuffer(out, np.float32), row):
        return None
    return out, dtype


def _are_of(row: Sequence[Any], kind: type) -> bool:
    """Whether all are numbers of this type, Python's or NumPy's; ints that a float32 holds are floats, too. `struct`
    takes whatever can be made such a number: a Decimal, a member of an enum, a tensor."""
    types = list(map(type, row))
    if types.count(kind) == len(types):
        return True
    kinds = set(types)
    if kind is bool:
        return False
    if kind is int:
        return all(one is int or issubclass(one, np.integer) for one in kinds)
    inexact = {one for one in kinds if one is float or issubclass(one, np.floating)}
    if not all(one is int or issubclass(one, np.integer) for one in kinds - inexact):
        return False
    return all(type(item) in inexact or -FLOAT32_INTS <= item <= FLOAT32_INTS or _is_held(item) for item in row)


def _is_held(number: Any) -> bool:
    return bool(float(np.float32(number)) == number)


def _overflowed(found: np.ndarray[Any, Any], numbers: Iterable[float]) -> bool:
    """Whether finite ones of these numbers are beyond float32, as which they were `found`."""
    return bool(np.isinf(found).any()) and any(FLOAT32_MAX < abs(number) < math.inf for number in numbers)
