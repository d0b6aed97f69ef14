"""A field as a column of Arrow: its type, and what a get returned as an array of that type.

| rows of the field | column |
|---|---|
| numbers | numbers; float16, bfloat16 and float8 as float32, which is exact |
| tensors of one shape | `fixed_size_list` of all elements in row-major order |
| tensors whose shapes differ | a `list` for each dimension that differs, a `fixed_size_list` for each other one |
| complex numbers | one dimension more, of size 2 |
| anything else, and rows of several kinds | text, or bytes where that was asked for |

The metadata of a column of Arrow has `tq.field`, `tq.dtype` and `tq.shape` (JSON, -1 where rows differ).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from transfer_queue.codec.columns import rows_of
from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.codec.nested import trimmed
from transfer_queue.errors import SchemaConflict
from transfer_queue.memory.bytes import Ints
from transfer_queue.schema import MIXED, NESTED, OBJECTS, FieldSchema
from transfer_queue.tables import texts

MAX_LIST = (1 << 31) - 1
TYPES = {
    "bool": pa.bool_(), "uint8": pa.uint8(), "int8": pa.int8(), "int16": pa.int16(), "uint16": pa.uint16(),
    "int32": pa.int32(), "uint32": pa.uint32(), "int64": pa.int64(), "uint64": pa.uint64(),
    "float32": pa.float32(), "float64": pa.float64(), "complex64": pa.float32(), "complex128": pa.float64(),
}  # fmt: skip


def is_numeric(field: FieldSchema) -> bool:
    """Whether the rows are tensors that a column of numbers can have."""
    if field.kind in (OBJECTS, NESTED, MIXED):
        return False
    dtype = torch_dtype(field.dtype)
    is_number = field.dtype in TYPES or (dtype.is_floating_point and not field.dtype.startswith("float4"))  # two in one
    return is_number and math.prod(_shape(field)) <= MAX_LIST


def _shape(field: FieldSchema) -> tuple[int, ...]:
    """The shape of a row, the parts of complex numbers included."""
    return (*field.shape, 2) if field.dtype.startswith("complex") else field.shape


def type_of(field: FieldSchema, as_bytes: bool) -> pa.DataType:
    """The type of the column. Texts and bytes are of the large kind: a batch may have more than 2 GiB of them."""
    if not is_numeric(field):
        return pa.large_binary() if as_bytes else pa.large_string()
    found = TYPES.get(field.dtype, pa.float32())
    shape = _shape(field)
    for size in reversed(_dims(shape)):
        found = pa.list_(found, size)  # -1: of any size
    return found


def _dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of the lists of a row, from the outermost. One of size 0 may have any: Parquet has none of size 0."""
    if -1 not in shape:
        shape = (math.prod(shape),) if shape else ()
    return tuple(size or -1 for size in shape)


def described_as(name: str, field: FieldSchema, as_bytes: bool) -> pa.Field:
    """The column called `name`."""
    about = {"tq.field": texts.clean(field.name), "tq.dtype": field.dtype, "tq.shape": json.dumps(list(field.shape))}
    return pa.field(name, type_of(field, as_bytes), metadata=about)


def numbers(field: FieldSchema, column: Any, count: int) -> pa.Array:
    """The column of `count` rows that a get returned as `column`.

    Raises `SchemaConflict` where they are not what the field was when the table was made.
    """
    shape = _shape(field)
    try:
        values, shapes = _flat(column, count)
        if shapes.shape[1] != len(shape) or any(
            (shapes[:, at] != size).any() for at, size in enumerate(shape) if size != -1
        ):
            raise _changed(field.name)
        base = TYPES.get(field.dtype, pa.float32())
        flat = pa.array(values)
        if _may_change(flat.type, base):
            raise _changed(field.name)
        flat = flat if flat.type == base else flat.cast(base)  # refuses integers and fractions that would change
        if -1 not in shape and shape:
            shapes = np.full((count, 1), math.prod(shape))
        return _lists(flat, _dims(shape), shapes)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaConflict(f"field {field.name!r:.200}: {error}") from None


def _may_change(found: pa.DataType, base: pa.DataType) -> bool:
    """Whether a cast may change values without an error: it rounds floats, and makes numbers of truth values."""
    are_truths = pa.types.is_boolean(found), pa.types.is_boolean(base)
    return found != base and (any(are_truths) or (found == pa.float64() and base == pa.float32()))


def _changed(name: str) -> SchemaConflict:
    return SchemaConflict(
        f"field {name!r:.200} got rows of another kind while the table was read: make the table again"
    )


def _flat(column: Any, count: int) -> tuple[np.ndarray[Any, Any], Ints]:
    """(all elements of all rows in order, the shape of each row)."""
    if not isinstance(column, torch.Tensor):
        parts = rows_of(column)
        if not all(isinstance(part, torch.Tensor) for part in parts) or len({part.dim() for part in parts}) > 1:
            return np.empty(0, np.int8), np.empty((count, 0), np.int64) - 1
        return _joined(parts)
    if not column.is_nested:
        return _elements(column), np.tile(np.array(_real(column).shape[1:], np.int64), (count, 1))
    nested: Any = column
    if nested.layout == torch.jagged and nested._ragged_idx == 1:
        values, offsets = trimmed(nested)
        real = _real(values)
        shapes = np.tile(np.array(real.shape, np.int64), (count, 1))
        shapes[:, 0] = np.diff(offsets.numpy())
        return _elements(values), shapes
    return _joined(list(column.unbind()))


def _joined(parts: list[torch.Tensor]) -> tuple[np.ndarray[Any, Any], Ints]:
    shapes = np.array([_real(part).shape for part in parts], np.int64).reshape(len(parts), -1)
    return _elements(torch.cat([part.reshape(-1) for part in parts])), shapes


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _elements(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements of a tensor in row-major order, of a dtype that Arrow has."""
    real = _real(tensor).reshape(-1)
    narrow = real.dtype.is_floating_point and real.dtype not in (torch.float32, torch.float64)
    found: np.ndarray[Any, Any] = (real.float() if narrow else real).numpy()
    return found


def _lists(values: pa.Array, dims: Sequence[int], shapes: Ints) -> pa.Array:
    """Lists in lists, made from the innermost dimension outwards."""
    for at in range(len(dims) - 1, -1, -1):
        outer = shapes[:, :at].prod(axis=1) if at else np.ones(len(shapes), np.int64)
        if dims[at] != -1:
            values = pa.FixedSizeListArray.from_arrays(values, dims[at])
            continue
        ends = np.concatenate(([0], np.cumsum(np.repeat(shapes[:, at], outer))))
        if ends[-1] > MAX_LIST:
            raise pa.ArrowInvalid("a batch has more than 2**31 elements")
        values = pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values)
    return values


def others(values: Sequence[Any], as_bytes: bool, max_chars: int | None) -> pa.Array:
    """The column of values that are no numbers."""
    if as_bytes:
        return pa.array([texts.bytes_of(value) for value in values], pa.large_binary())
    return pa.array([texts.text_of(value, max_chars) for value in values], pa.large_string())


def spread(found: pa.Array, places: Ints, count: int) -> pa.Array:
    """`found` at its places among `count` rows, null elsewhere."""
    if len(places) == count:
        return found
    order = np.zeros(count, np.int64)
    order[places] = np.arange(len(places))
    absent = np.ones(count, np.bool_)
    absent[places] = False
    return pc.take(found, pa.array(order, mask=absent))
