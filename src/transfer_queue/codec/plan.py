"""From a batch to the layout of its block, and the copies that fill it. No data is touched while planning.

`plan_batch` reads TensorDicts and mappings of columns, `plan_row` one row given as a dict, `plan_empty` a description
of columns that the caller fills in place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase

from transfer_queue.codec import lists
from transfer_queue.codec.arrays import BufferWriter, check_jagged, check_tensor, nbytes_of
from transfer_queue.codec.classes import is_tensorclass
from transfer_queue.codec.columns import rows_of
from transfer_queue.codec.dtypes import dtype_called, dtype_name
from transfer_queue.codec.filling import BlockPlan
from transfer_queue.codec.layout import Builder, Column, offsets_of
from transfer_queue.codec.nested import trimmed
from transfer_queue.codec.registry import has_functions
from transfer_queue.codec.values import pack
from transfer_queue.errors import InvalidInput, UnsupportedValue
from transfer_queue.schema import DENSE, NESTED, OBJECTS, RAGGED, VARIED

TEXT_CHARS = 256  # texts that long on average are copied straight from the strings
FEW_ROWS = 64  # fewer take less time than a thread
VALUE_NBYTES, NUMBER_NBYTES = 1024, 64  # copied in the time that one value, or one number of a list, takes
JOIN_NBYTES = 1024  # shorter messages are joined first


def plan_batch(batch: TensorDictBase | Mapping[str, Any], rows: int, allow_pickle: bool = False) -> BlockPlan:
    """Plan all columns of `batch`, each with `rows` rows.

    In a mapping, lists of numbers become dense columns and lists of number lists ragged ones; arrays of other libraries
    (DLPack) are tensors. Raises `InvalidInput`
    for a column of another length and `UnsupportedValue`, naming row, field and type of all that cannot be kept
    exactly.
    """
    if not isinstance(batch, TensorDictBase):
        batch = exchanged(batch)
    plan = BlockPlan(rows, allow_pickle, batch)
    _add_columns(plan, items_of(batch), not isinstance(batch, TensorDictBase))
    return plan


def python_nbytes(batch: TensorDictBase | Mapping[str, Any], rows: int) -> int:
    """How long it takes to plan the Python values of a batch, roughly, as the bytes copied meanwhile."""
    if rows < FEW_ROWS:
        return 0
    if isinstance(batch, LazyStackedTensorDict):  # each look at a column stacks it
        return rows * VALUE_NBYTES
    found = 0
    for _, column in items_of(batch):
        if isinstance(column, NonTensorStack) or (isinstance(column, np.ndarray) and column.dtype == object):
            found += rows * VALUE_NBYTES
        elif isinstance(column, (list, tuple)) and column:
            numbers = len(column[0]) if type(column[0]) is list else 0
            found += rows * (VALUE_NBYTES + NUMBER_NBYTES * numbers)
        elif isinstance(column, TensorDictBase):
            found += python_nbytes(column, rows)
    return found


def exchanged(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A mapping of columns with arrays of other libraries as tensors. Raises `UnsupportedValue`, naming the field."""
    found = {}
    for name, value in batch.items():
        with _named(name):
            found[name] = lists.column_of(value)
    return found


def _add_columns(plan: BlockPlan, items: Iterable[tuple[Any, Any]], numbers: bool) -> None:
    """Plan these columns. What cannot be stored is told of all fields at once, as it has to be mended in all."""
    refused: list[UnsupportedValue] = []
    for name, value in items:
        if type(name) is not str:
            raise InvalidInput(f"field names are strings, got {name!r}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"field name {name!r} has a lone surrogate, which UTF-8 does not have") from None
        try:
            plan.add_column(_column(plan, name, value, numbers))
        except UnsupportedValue as error:
            refused.append(error)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        raise UnsupportedValue("; ".join(map(str, refused)))


def items_of(batch: TensorDictBase | Mapping[str, Any]) -> Any:
    """The columns by name. Raises `UnsupportedValue` for those that a lazy stack cannot stack."""
    if isinstance(batch, TensorDictBase):
        return [(name, _stacked(batch, name)) for name in batch.keys()]  # noqa: SIM118  it iterates over rows
    return batch.items()


def _stacked(batch: TensorDictBase, name: str) -> Any:
    try:
        return batch.get(name)
    except RuntimeError as error:
        if not isinstance(batch, LazyStackedTensorDict):
            raise
        how = f"put a mapping of columns, and batch.get({name!r}, as_list=True) as this one"
        raise UnsupportedValue(f"field {name!r}: a lazy stack of rows of different shapes: {how}") from error


def plan_row(fields: Mapping[str, Any], allow_pickle: bool = False) -> BlockPlan:
    """One row, of the kind of column that `plan_batch` makes of many: a tensor, an array, a number or a list of numbers
    is a tensor, anything else is one object.

    Raises as `plan_batch`, and `InvalidInput` for a nested tensor.
    """
    columns = columns_of_row(fields)
    plan = BlockPlan(1, allow_pickle, columns)
    _add_columns(plan, columns.items(), numbers=True)
    return plan


def columns_of_row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one row as columns of one row."""
    return {name: _column_of(name, value) for name, value in fields.items()}


def _column_of(name: str, value: Any) -> Any:
    if lists.is_exporter(value):
        with _named(name):
            value = lists.exchanged(value)
    if has_functions((value,)):
        return [value]
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise InvalidInput(f"field {name!r}: a nested tensor is many rows; kv_put takes one")
        return _checked(name, value).unsqueeze(0)
    return value[None] if type(value) is np.ndarray and lists.as_tensor(value[None]) is not None else [value]


def plan_objects(name: str, values: list[Any], allow_pickle: bool = False) -> BlockPlan:
    """One column of these values as they are, whatever they are. Raises `UnsupportedValue`."""
    plan = BlockPlan(len(values), allow_pickle)
    plan.add_column(_objects(plan, name, values))
    return plan


def plan_empty(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype | str]]) -> BlockPlan:
    """Dense columns of given (shape with rows first, dtype), to be filled in place."""
    sizes: list[Any] = [size for shape, _ in specs.values() for size in shape]
    if any(isinstance(size, bool) or not isinstance(size, Integral) for size in sizes):
        raise InvalidInput(f"shapes are of ints, got {[shape for shape, _ in specs.values()]}")
    if not specs or any(not shape or min(shape) < 0 or shape[0] < 1 for shape, _ in specs.values()):
        raise InvalidInput("name at least one field, each with a shape whose first dimension is the rows")
    rows = {shape[0] for shape, _ in specs.values()}
    if len(rows) != 1:
        raise InvalidInput(f"the fields have different numbers of rows: {sorted(rows)}")
    plan = BlockPlan(rows.pop())
    for name, (shape, asked) in specs.items():
        dtype = dtype_called(asked)
        nbytes = math.prod(shape) * dtype.itemsize
        column = Column(
            name, DENSE, dtype_name(dtype), dtype.itemsize, tuple(shape[1:]), -1, [plan.add(None, nbytes)], []
        )
        plan.add_column(column)
    return plan


def _column(plan: BlockPlan, name: str, value: Any, numbers: bool) -> Column:
    """The column of `value`; `numbers`: lists of numbers are tensors rather than objects."""
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            return _dense(plan, name, value)
        if value.layout == torch.jagged:
            with _named(name):
                check_jagged(value)
        if value.layout == torch.jagged and getattr(value, "_lengths", None) is None:
            return _jagged(plan, name, value)
        return _rows(plan, name, list(value.unbind()))
    if isinstance(value, np.ndarray):
        if not value.ndim:
            raise InvalidInput(f"field {name!r}: a column has rows; got an array without dimensions")
        if isinstance(value, np.ma.MaskedArray):
            raise UnsupportedValue(f"field {name!r}: a masked array cannot be stored: fill it first")
        tensor = lists.as_tensor(value)
        return _dense(plan, name, tensor) if tensor is not None else _objects(plan, name, list(value))
    if isinstance(value, (NonTensorStack, NonTensorData)):
        return _sequence(plan, name, rows_of(value, plan.rows), numbers=False)
    if isinstance(value, TensorDictBase):
        return _nested(plan, name, value)
    if isinstance(value, (list, tuple)):
        return _sequence(plan, name, list(value), numbers)
    what = ".to_tensordict() of it" if is_tensorclass(value) else "a list of its rows"
    kind = type(value).__qualname__
    raise UnsupportedValue(f"field {name!r}: a column is a tensor, array or list, got {kind}: put {what}")


def _sequence(plan: BlockPlan, name: str, values: list[Any], numbers: bool) -> Column:
    if len(values) != plan.rows:
        raise InvalidInput(f"field {name!r} has {len(values)} rows, expected {plan.rows}")
    if has_functions(values):
        return _objects(plan, name, values)
    if values and all(isinstance(value, torch.Tensor) and not value.is_nested for value in values):
        if len({(value.dtype, value.dim()) for value in values}) == 1:
            return _rows(plan, name, values)
    elif numbers and values:
        found = lists.numbers(values)
        if found is not None:
            column = _dense(plan, name, found) if isinstance(found, torch.Tensor) else _ragged(plan, name, *found, 0)
            column.weak = column.dtype == "int64"
            return column
    return _objects(plan, name, values)


def _check_rows(plan: BlockPlan, name: str, rows: int) -> None:
    if rows != plan.rows:
        raise InvalidInput(f"field {name!r} has {rows} rows, expected {plan.rows}")


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except UnsupportedValue as error:
        raise UnsupportedValue(f"field {name!r}: {error}") from None


def _checked(name: str, value: torch.Tensor) -> torch.Tensor:
    try:  # not `_named`: this runs for every row of a list of tensors
        check_tensor(value)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"field {name!r}: {error}") from None
    return value.detach() if value.requires_grad else value


def _dense(plan: BlockPlan, name: str, value: torch.Tensor) -> Column:
    value = _checked(name, value)
    if value.dim() == 0:
        raise InvalidInput(f"field {name!r}: a column has rows; got a tensor without dimensions")
    _check_rows(plan, name, value.shape[0])
    size = value.element_size()
    part = plan.add(value, value.numel() * size)
    return Column(name, DENSE, dtype_name(value.dtype), size, tuple(value.shape[1:]), -1, [part], [])


def _jagged(plan: BlockPlan, name: str, value: Any) -> Column:
    """A jagged NestedTensor: its values lie as the column does."""
    values, offsets = trimmed(value)
    marks = offsets.detach().cpu().to(torch.int64).numpy()
    _check_rows(plan, name, len(marks) - 1)
    return _ragged(plan, name, values, marks, value._ragged_idx - 1)


def _ragged(plan: BlockPlan, name: str, values: torch.Tensor, offsets: np.ndarray[Any, Any], ragged: int) -> Column:
    values = _checked(name, values)
    size = values.element_size()
    shape = tuple(-1 if d == ragged else n for d, n in enumerate(values.shape))
    parts = [plan.add(values, values.numel() * size), plan.add(offsets, offsets.nbytes)]
    return Column(name, RAGGED, dtype_name(values.dtype), size, shape, ragged, parts, [])


def _rows(plan: BlockPlan, name: str, values: list[torch.Tensor]) -> Column:
    """Row tensors of one dtype and rank: dense, ragged or varied as their shapes are."""
    _check_rows(plan, name, len(values))
    values = [_checked(name, value) for value in values]
    shapes = [tuple(value.shape) for value in values]
    shape = tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True))
    dtype, size = dtype_name(values[0].dtype), values[0].element_size()
    differing = [d for d, n in enumerate(shape) if n == -1]
    if len(differing) == 1 and differing[0]:
        joined = torch.cat(values, dim=differing[0])
        lengths = [value.shape[differing[0]] for value in values]
        return _ragged(plan, name, joined, offsets_of(lengths), differing[0])
    part = plan.add_all([(value, value.numel() * size) for value in values])
    if not differing:
        return Column(name, DENSE, dtype, size, shape, -1, [part], [])
    if differing == [0]:
        offsets = offsets_of([s[0] for s in shapes])
        return Column(name, RAGGED, dtype, size, shape, 0, [part, plan.add(offsets, offsets.nbytes)], [])
    offsets = offsets_of([value.numel() for value in values])
    table = np.array(shapes, np.int64)
    parts = [part, plan.add(offsets, offsets.nbytes), plan.add(table, table.nbytes)]
    return Column(name, VARIED, dtype, size, shape, -1, parts, [])


def _nested(plan: BlockPlan, name: str, value: TensorDictBase) -> Column:
    if not value.batch_size or value.batch_size[0] != plan.rows:
        raise InvalidInput(
            f"field {name!r}: a TensorDict of batch size {list(value.batch_size)}, {plan.rows} rows expected"
        )
    children = []
    for child, content in items_of(value):
        try:
            children.append(_column(plan, child, content, numbers=False))
        except UnsupportedValue as error:
            raise UnsupportedValue(f"in field {name!r}: {error}") from None
    return Column(name, NESTED, "", 0, tuple(value.batch_size[1:]), -1, [], children)


def _objects(plan: BlockPlan, name: str, values: list[Any]) -> Column:
    _check_rows(plan, name, len(values))
    if set(map(type, values)) == {str} and sum(map(len, values)) >= TEXT_CHARS * len(values):
        with _named(name), contextlib.suppress(UnicodeEncodeError):  # lone surrogates take the typed path
            part, offsets = plan.add_texts(values)
            return Column(name, OBJECTS, "", 0, (), -1, [part, plan.add(offsets, offsets.nbytes)], [])
    buffers = BufferWriter()
    messages: list[bytes] = []
    ref_ends = [0]
    for number, value in enumerate(values):
        try:
            messages.append(pack(value, buffers, plan.allow_pickle))
        except UnsupportedValue as error:
            raise UnsupportedValue(f"row {number}, field {name!r}: {error}") from None
        buffers.end_row()
        ref_ends.append(len(buffers.refs))
    offsets = offsets_of(list(map(len, messages)))
    if offsets[-1] < JOIN_NBYTES * len(values):
        messages = [b"".join(messages)]
    parts = [plan.add_all([(message, len(message)) for message in messages]), plan.add(offsets, offsets.nbytes)]
    if buffers.sources:
        parts += _heap(plan, buffers, np.array(ref_ends, np.int64))
    return Column(name, OBJECTS, "", 0, (), -1, parts, [])


def _heap(plan: BlockPlan, buffers: BufferWriter, ref_offsets: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """The parts ref_offsets, refs, spans and heap (see `codec.layout`)."""
    refs = np.array(buffers.refs, np.int64)
    heap = Builder()
    spans = np.array([heap.place(nbytes_of(source)) for source in buffers.sources], np.int64)
    parts = [plan.add(array, array.nbytes) for array in (ref_offsets, refs, spans)]
    return [*parts, plan.add_heap(spans.tolist(), buffers.sources, heap.nbytes)]
