"""The columns of a rollout batch as they are stored, and back. NumPy converts, in the calling thread: what torch
converts with many threads keeps the other ranks of a host from theirs."""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from transfer_queue.bridge.schema import (
    Inferred,
    Numbers,
    Objects,
    Ragged,
    RolloutColumn,
    RolloutSchema,
    has_all_of,
    is_name,
    native,
)
from transfer_queue.codec.columns import items_in, rows_of, unsized
from transfer_queue.codec.layout import offsets_of
from transfer_queue.codec.lists import exchanged, is_exporter
from transfer_queue.codec.nested import Offsets, jagged, trimmed
from transfer_queue.codec.numbers import exact_numbers
from transfer_queue.errors import SchemaViolation, UnsupportedValue

Form: TypeAlias = Literal["tensors", "arrays", "lists"]
FORMS = ("tensors", "arrays", "lists")
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_MAY_BE_COMPLEX = {np.complex64, np.complex128, np.clongdouble, np.ndarray}
_AS_IN_NUMPY = frozenset((  # dtypes of tensors that arrays have, too: their rows come in each form
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.float32, torch.float64,
))  # fmt: skip
_AT_ONCE = ("int32", "int64", "float32", "float64")
_LETTERS = {  # of `struct`; not "?", which packs the truth of any object
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q",
    "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip


def taken_columns(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch, of whose columns each row can be taken by its place: arrays of other libraries (DLPack) are tensors,
    also as rows of lists, and a NonTensorData and an array of objects are lists. Raises `SchemaViolation`."""
    return {name: _taken_column(name, column) for name, column in batch.items()}


def _taken_column(name: str, column: Any) -> Any:
    if isinstance(column, (NonTensorStack, NonTensorData)):
        items = items_in(column) if unsized(column) else len(column)
        return column if items is None else rows_of(column, items)
    if isinstance(column, np.ma.MaskedArray):
        raise SchemaViolation(f"field {name!r}: a masked array: fill it first", None, name)
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1:
        return list(column)
    if isinstance(column, (list, tuple)) and any(map(is_exporter, column)):
        return [_exchanged(name, value, row) for row, value in enumerate(column)]
    return _exchanged(name, column, None)


def _exchanged(name: str, value: Any, row: int | None) -> Any:
    if not is_exporter(value):
        return value
    try:
        return exchanged(value)
    except UnsupportedValue as error:
        raise SchemaViolation(f"{_where(name, row)}: {error}", row, name) from None


def checked_batch(batch: Mapping[str, Any], schema: RolloutSchema) -> int:
    """How many rows it has. Raises `SchemaViolation` for columns that are missing, unknown or of different length."""
    missing = [name for name in schema.required() if batch.get(name) is None]
    unknown = [name for name in batch if schema.column(name) is None]
    unnamed = [name for name in unknown if not is_name(name)]
    if unnamed:
        raise SchemaViolation(f"columns {unnamed}: a column's name is a string that does not begin with __")
    if missing or unknown:
        raise SchemaViolation(f"columns {missing} are missing, and {unknown} are not in the schema {list(schema)}")
    single = [
        name for name, column in batch.items()
        if column is not None and not (hasattr(column, "__len__") and getattr(column, "ndim", 1) != 0)
    ]  # fmt: skip
    if single:
        raise SchemaViolation(f"columns {single} have no rows: a column has one item for each", None, single[0])
    for name, column in batch.items():
        if column is not None and not _is_column(column):
            kind = type(column).__qualname__
            text = f"field {name!r}: a column is a list, a tensor or an array, got {kind}: give a list"
            raise SchemaViolation(text, None, name)
    sizes = {name: _num_rows(column) for name, column in batch.items() if column is not None}
    if len(set(sizes.values())) != 1:
        raise SchemaViolation(f"the columns have different numbers of rows: {sizes}")
    return next(iter(sizes.values()))


def _is_column(column: Any) -> bool:
    """Whether rows are taken out of it by their place: of a mapping or a Series of pandas they are taken by a name."""
    if isinstance(column, (str, bytes, bytearray)):
        return False
    return isinstance(column, (torch.Tensor, np.ndarray, TensorDictBase, Sequence))


def _num_rows(column: Any) -> int:
    """Of a column, or how long a row is. A nested tensor of torch's strided layout has no len()."""
    return int(column.size(0)) if isinstance(column, torch.Tensor) else len(column)


def stored_columns(batch: Mapping[str, Any], schema: RolloutSchema, rows: Sequence[int]) -> dict[str, Any]:
    """These rows as columns that `TransferQueueClient.put` stores as they are. Raises `SchemaViolation`, which names
    row and field."""
    given = {name: (values, schema.column(name)) for name, values in batch.items() if values is not None}
    return {name: _stored(name, values, column, rows) for name, (values, column) in given.items() if column is not None}


def _stored(name: str, values: Any, column: RolloutColumn, rows: Sequence[int]) -> Any:
    if isinstance(column, Objects):
        return NonTensorStack(*[NonTensorData(values[row]) for row in rows])
    if isinstance(column, Inferred):
        with contextlib.suppress(SchemaViolation):  # what only looked like numbers is objects
            return _stored(name, values, _inferred(name, [values[row] for row in rows]), rows)
        return _stored(name, values, Objects(), rows)
    if isinstance(column, Numbers):
        return torch.from_numpy(_numbers(name, values, native(column.dtype), rows))
    assert isinstance(column, Ragged)
    wanted = native(column.narrow)
    if not any(isinstance(values[row], (list, tuple)) for row in rows):
        return [torch.from_numpy(_array(name, values[row], row, column.shape, wanted)) for row in rows]
    return _packed(name, values, column, wanted, rows)


def _inferred(name: str, values: list[Any]) -> RolloutColumn:
    """What these rows look like. Raises `SchemaViolation` for tensors that are no arrays."""
    if any(isinstance(value, torch.Tensor) and value.dtype not in _AS_IN_NUMPY for value in values):
        return Objects()
    if all(isinstance(value, _NUMBERS) for value in values):
        return _inferred_numbers(values)
    if all(isinstance(value, (torch.Tensor, np.ndarray)) for value in values):
        arrays = [_as_array(name, value, None) for value in values]
        kinds = {(array.dtype.name, array.shape[1:]) for array in arrays if array.ndim}
        if (
            len(kinds) == 1
            and all(array.ndim for array in arrays)
            and arrays[0].dtype.kind in "biuf"
            and arrays[0].itemsize <= 8
        ):
            dtype, shape = kinds.pop()
            return Ragged(dtype=dtype, shape=shape) if all(shape) else Objects()
        are_numbers = all(not array.ndim and array.dtype.kind in "biuf" for array in arrays)
        return _inferred_numbers(arrays) if are_numbers else Objects()
    if all(type(value) is list for value in values):
        kinds_of_items = {type(item) for value in values for item in value}
        if kinds_of_items and kinds_of_items <= {int, float}:
            if len(kinds_of_items) == 2 and _is_rounded(list(itertools.chain.from_iterable(values))):
                return Objects()
            return Ragged(dtype="float64" if float in kinds_of_items else "int64")
    return Objects()


def _inferred_numbers(numbers: list[Any]) -> RolloutColumn:
    array = np.array(numbers)
    kind = array.dtype.kind
    if kind in "fOu":  # NumPy makes floats of ints on both sides of 2**63
        items = [one.item() if isinstance(one, (np.ndarray, np.generic)) else one for one in numbers]
        if all(isinstance(item, int) for item in items):
            if max(items) < 2**63 and min(items) >= -(2**63):
                return Numbers(dtype="int64")
            return Numbers(dtype="uint64") if min(items) >= 0 and max(items) < 2**64 else Objects()
        if _is_rounded(numbers):
            return Objects()
    return Numbers(dtype={"b": "bool", "i": "int64"}.get(kind, "float64"))


def _is_rounded(numbers: list[Any]) -> bool:
    """Whether one of them is an int that float64 does not have."""
    return bool(_changed(np.array(numbers, np.float64), numbers).size)


def _numbers(name: str, values: Any, wanted: np.dtype[Any], rows: Sequence[int]) -> NDArray[Any]:
    if isinstance(values, (torch.Tensor, np.ndarray)):
        array = _as_array(name, values, None)
        if array.ndim != 1:
            raise SchemaViolation(f"field {name!r}: one number for each row, got an array of shape {array.shape}")
        return _narrowed(name, array[list(rows)], wanted, None)
    letter = _LETTERS.get(wanted.name)
    items = [values[row] for row in rows]
    with contextlib.suppress(struct.error, OverflowError, TypeError, RuntimeError):  # the last: of tensors of uint64
        if letter is not None and not _any_complex(items):
            found = np.frombuffer(bytearray(struct.pack(f"{len(items)}{letter}", *items)), wanted)
            _check_floats(name, found, [items], rows, np.arange(len(rows)))
            return found
    return _numbers_one_by_one(name, items, wanted, rows)


def _numbers_one_by_one(name: str, items: list[Any], wanted: np.dtype[Any], rows: Sequence[int]) -> NDArray[Any]:
    """As `_numbers`, of tensors and arrays without dimensions as well, or the row that has no such number."""
    found = np.empty(len(rows), wanted)
    for place, (row, value) in enumerate(zip(rows, items, strict=True)):
        is_one = isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and not value.ndim
        try:
            item = value.item() if is_one else value
        except RuntimeError as error:  # of the device meta
            raise SchemaViolation(f"row {row}, field {name!r}: no number: {error}", row, name) from None
        if not isinstance(item, (int, float)):
            raise SchemaViolation(f"row {row}, field {name!r}: a number, got {type(value).__qualname__}", row, name)
        if wanted.kind == "b" and item not in (0, 1):
            raise SchemaViolation(f"row {row}, field {name!r}: {item!r} where {wanted} is stored", row, name)
        try:
            struct.pack(_LETTERS.get(wanted.name, "e" if wanted.kind == "f" else "b"), item)
        except (struct.error, OverflowError, TypeError) as error:
            raise SchemaViolation(f"row {row}, field {name!r}: {item!r} as {wanted}: {error}", row, name) from None
        found[place] = item
        _check_floats(name, found[place : place + 1], [[item]], [row], np.zeros(1, np.int64))
    return found


def _packed(name: str, values: Any, column: Ragged, wanted: np.dtype[Any], rows: Sequence[int]) -> Any:
    """Lists of numbers as one jagged tensor: all at once, else each by `struct`, four times as fast as by NumPy."""
    letter = _LETTERS.get(wanted.name)
    for row in rows:
        if not isinstance(values[row], (list, tuple, torch.Tensor, np.ndarray)) or getattr(values[row], "ndim", 1) == 0:
            kind = type(values[row]).__qualname__
            raise SchemaViolation(f"row {row}, field {name!r}: a list of numbers or an array, got {kind}", row, name)
    if letter is None or column.shape:
        arrays = [_array(name, _from_list(name, values[row], row, wanted), row, column.shape, wanted) for row in rows]
        return [torch.from_numpy(array) for array in arrays]
    offsets = offsets_of([_num_rows(values[row]) for row in rows])
    lists = [values[row] for row in rows]
    is_plain = wanted.name in _AT_ONCE and all(type(one) is list for one in lists)
    flat = exact_numbers(lists, wanted) if is_plain else None
    if flat is None:
        flat = _row_by_row(name, values, column, wanted, rows, offsets, letter)
    _check_floats(name, flat, lists, rows, np.repeat(np.arange(len(rows)), np.diff(offsets)))
    return jagged(torch.from_numpy(flat), Offsets.of(offsets), 1)


def _row_by_row(
    name: str,
    values: Any,
    column: Ragged,
    wanted: np.dtype[Any],
    rows: Sequence[int],
    offsets: NDArray[np.int64],
    letter: str,
) -> NDArray[Any]:
    data = bytearray(int(offsets[-1]) * wanted.itemsize)
    for row, start in zip(rows, (offsets * wanted.itemsize).tolist(), strict=False):
        value = values[row]
        if not isinstance(value, (torch.Tensor, np.ndarray)) and _is_packed(value, letter, data, start):
            continue
        array = _array(name, _from_list(name, value, row, wanted), row, column.shape, wanted)
        data[start : start + array.nbytes] = array.tobytes()
    return np.frombuffer(data, wanted)


def _is_packed(numbers: Sequence[Any], letter: str, data: bytearray, start: int) -> bool:
    """Whether `struct` took them; NumPy's truth values, for one, it does not take, though they are numbers here."""
    if letter in "fd" and _any_complex(numbers):
        return False
    try:
        if letter == "B":
            data[start : start + len(numbers)] = bytes(numbers)  # in half of the time
        else:
            struct.pack_into(f"{len(numbers)}{letter}", data, start, *numbers)
    except (struct.error, OverflowError, ValueError, TypeError, RuntimeError):  # the last: of tensors of uint64
        return False
    return True


def _any_complex(numbers: Iterable[Any]) -> bool:
    """Whether NumPy's complex numbers are among them, of which `struct` would pack the real parts."""
    if _MAY_BE_COMPLEX.isdisjoint(map(type, numbers)):
        return False
    return any(isinstance(one, (np.ndarray, np.generic)) and one.dtype.kind == "c" for one in numbers)


def _check_floats(
    name: str, found: NDArray[Any], given: Iterable[Any], rows: Sequence[int], row_of: NDArray[np.int64]
) -> None:
    """Refuses finite numbers that became infinite, and ints that were rounded. `row_of`: of which row each number
    is."""
    if found.dtype.kind != "f" or not (np.abs(found) >= _least_rounded(found.dtype)).any():
        return
    numbers = list(itertools.chain.from_iterable(given))
    for place in _changed(found, numbers)[:1].tolist():
        row = rows[int(row_of[place])]
        text = f"row {row}, field {name!r}: {numbers[place]!r} is beyond {found.dtype}, or rounded by it"
        raise SchemaViolation(text, row, name)


def _least_rounded(dtype: np.dtype[Any]) -> float:
    """A floating dtype has all whole numbers below this one."""
    return float(2 << np.finfo(dtype).nmant)


def _changed(found: NDArray[Any], given: Sequence[Any]) -> NDArray[np.int64]:
    """Where floats are not the numbers that they were made of: ints that were rounded, finite ones that became
    infinite. Only the largest can be."""
    large = np.flatnonzero(np.abs(found) >= _least_rounded(found.dtype))
    return large[[not _is_kept(given[place], float(found[place])) for place in large.tolist()]] if large.size else large


def _is_kept(number: Any, found: float) -> bool:
    number = number.item() if isinstance(number, (torch.Tensor, np.ndarray, np.generic)) else number
    return number == found if isinstance(number, int) else math.isfinite(found) or not math.isfinite(number)


def _from_list(name: str, value: Any, row: int, wanted: np.dtype[Any]) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value
    try:
        array = np.array(value)
        if array.dtype.kind == "f" and wanted.name == "uint64":  # what NumPy makes of ints on both sides of 2**63
            given = np.array(value, object).ravel().tolist()
            if all(isinstance(item, int) and 0 <= item < 2**64 for item in given):
                return np.array(given, wanted).reshape(array.shape)
        if array.dtype.kind == wanted.kind == "f" and (np.abs(array) >= _least_rounded(wanted)).any():
            given = np.array(value, object).ravel().tolist()  # before NumPy made floats of ints
            with np.errstate(over="ignore"):
                _check_floats(name, array.astype(wanted).ravel(), [given], [row], np.zeros(len(given), np.int64))
        return array
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # the last: of tensors with a graph
        raise SchemaViolation(f"row {row}, field {name!r}: not an array of {wanted}: {error}", row, name) from None


def _array(name: str, value: Any, row: int, shape: tuple[int, ...], wanted: np.dtype[Any]) -> NDArray[Any]:
    """One row, (length, *shape), of the dtype that is stored."""
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        raise SchemaViolation(f"row {row}, field {name!r}: an array, got {type(value).__qualname__}", row, name)
    array = _as_array(name, value, row)
    if array.ndim != 1 + len(shape) or array.shape[1:] != shape:
        if not (array.size == 0 and array.ndim == 1):  # an empty list has no steps to say of what shape they are
            raise SchemaViolation(
                f"row {row}, field {name!r}: an array (length, {', '.join(map(str, shape))}), got {array.shape}",
                row,
                name,
            )
        array = array.reshape(0, *shape)
    return np.ascontiguousarray(_narrowed(name, array, wanted, row))


def _where(name: str, row: int | None) -> str:
    return f"field {name!r}" if row is None else f"row {row}, field {name!r}"


def _as_array(name: str, value: Any, row: int | None) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        try:
            plain = value.detach().cpu()
            found: NDArray[Any] = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
        except (RuntimeError, TypeError) as error:  # of the device meta, sparse, of a dtype that NumPy has not
            raise SchemaViolation(
                f"{_where(name, row)}: a tensor of {value.dtype} that is no array: {error}", row, name
            ) from None
        return found
    if isinstance(value, np.ma.MaskedArray):
        raise SchemaViolation(f"{_where(name, row)}: a masked array: fill it first", row, name)
    return value if value.flags.writeable else value.copy()


def _narrowed(name: str, array: NDArray[Any], wanted: np.dtype[Any], row: int | None) -> NDArray[Any]:
    """`array` in the dtype that is stored. What that does not hold is refused: whole numbers and truth values come back
    as they were, and floats are rounded to what floats are stored as."""
    if has_all_of(wanted, array.dtype) or (not array.size and array.dtype.kind in "biuf"):
        return array.astype(wanted, copy=False).view(wanted)  # torch knows one of NumPy's two names for 64 bits
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and wanted.kind != "f"):
        raise SchemaViolation(f"{_where(name, row)}: {array.dtype} where {wanted} is stored", row, name)
    if wanted.kind != "f" and array.size:
        least, most = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
        low, high = int(array.min()), int(array.max())
        if low < least or high > most:
            raise SchemaViolation(f"{_where(name, row)}: numbers from {low} to {high}, {wanted} is stored", row, name)
    with np.errstate(over="ignore"):
        found = array.astype(wanted)
    if wanted.kind == "f" and not _came_over(array, found):
        raise SchemaViolation(f"{_where(name, row)}: numbers beyond {wanted}, or whole ones that it rounds", row, name)
    return found


def _came_over(array: NDArray[Any], found: NDArray[Any]) -> bool:
    """Whether finite numbers stayed finite as these floats, and whole ones are what they were."""
    if array.dtype.kind == "f":
        return not bool((np.isinf(found) & np.isfinite(array)).any())
    if not array.size or max(-int(array.min()), int(array.max())) < _least_rounded(found.dtype):
        return True
    with np.errstate(invalid="ignore"):  # those beyond the dtype are none of its numbers: they are looked at first
        back, beyond = found.astype(array.dtype), float(np.iinfo(array.dtype).max) + 1.0
    return bool((np.isfinite(found) & (found < beyond) & (back == array)).all())


# back


def read_columns(data: Mapping[str, Any], schema: RolloutSchema, form: Form) -> dict[str, Any]:
    """The fields of a read as ranks take them: of `Numbers` one tensor, array or list, of `Ragged` a list with a
    tensor, array or list for each row, of `Objects` a list. Rows of one field lie in one memory. Raises
    `SchemaViolation` for what another schema stored, where this one's dtype has not all of its numbers."""
    return {
        name: _read(name, data[name], schema.column(name), form) for name in data if schema.column(name) is not None
    }


def _read(name: str, values: Any, column: RolloutColumn | None, form: Form) -> Any:
    if isinstance(column, Inferred):
        column = _as_stored(values)
    if isinstance(column, Objects):
        if isinstance(values, NonTensorStack):
            return values.tolist()
        return list(values.unbind() if isinstance(values, torch.Tensor) else values)
    stored = _as_stored(values)
    if type(column) is not type(stored):
        raise SchemaViolation(f"field {name!r}: {stored} is stored, the schema says {column}", None, name)
    if isinstance(column, Numbers):
        array = _widened(name, values.numpy(), column.dtype)
        return {"tensors": lambda: torch.from_numpy(array), "arrays": lambda: array, "lists": array.tolist}[form]()
    assert isinstance(column, Ragged)
    flat, offsets = _flat(values)
    flat = _widened(name, flat, column.dtype)
    bounds = offsets.tolist()
    if form == "tensors":
        tensor = torch.from_numpy(flat)
        return [tensor[a:b] for a, b in itertools.pairwise(bounds)]
    rows = [flat[a:b] for a, b in itertools.pairwise(bounds)]
    return rows if form == "arrays" else [row.tolist() for row in rows]


def _widened(name: str, stored: NDArray[Any], dtype: str) -> NDArray[Any]:
    wanted = native(dtype)
    if not has_all_of(wanted, stored.dtype):
        raise SchemaViolation(
            f"field {name!r}: {stored.dtype} is stored, {dtype} has not all of its numbers", None, name
        )
    return stored if stored.dtype == wanted else stored.astype(wanted)


def _as_stored(values: Any) -> RolloutColumn:
    if not isinstance(values, torch.Tensor) or values.dtype not in _AS_IN_NUMPY:
        return Objects()
    dtype = str(values.dtype).removeprefix("torch.")
    if values.is_nested:  # rows that differ in another dimension than their first do not lie one after the other
        is_joined = values.layout == torch.jagged and getattr(values, "_ragged_idx", 0) == 1
        return Ragged(dtype=dtype) if is_joined else Objects()
    return Numbers(dtype=dtype) if values.ndim == 1 else Ragged(dtype=dtype, shape=tuple(values.shape[2:]))


def _flat(column: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All rows one after the other, and where each begins."""
    if isinstance(column, torch.Tensor) and column.is_nested and column.layout == torch.jagged:
        values, marks = trimmed(column)
        return values.numpy(), marks.numpy()
    rows = [row.numpy() for row in (column.unbind() if isinstance(column, torch.Tensor) else column)]
    return np.concatenate(rows), offsets_of([len(row) for row in rows])
