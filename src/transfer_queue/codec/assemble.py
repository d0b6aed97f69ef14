"""From located rows of blocks to the values a caller gets.

| rows of the field | result |
|---|---|
| tensors without dimensions | dense tensor (n,) |
| tensors that agree in all dimensions but at most one | jagged NestedTensor; ragged dimension 1 when uniform |
| tensors that differ in several dimensions | strided NestedTensor |
| tensors of different rank | NonTensorStack of the tensors |
| TensorDicts | TensorDict of batch size (n, ...) |
| anything else | NonTensorStack |

A field of one run is a view of its block where the block allows it; every other result is memory of the caller's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.codec import mixing
from transfer_queue.codec.arrays import BufferReader
from transfer_queue.codec.columns import rows_of
from transfer_queue.codec.dtypes import lying_as, torch_dtype
from transfer_queue.codec.layout import DAMAGED, Column, ColumnTemplate, offsets_of
from transfer_queue.codec.lone_rows import LoneRows
from transfer_queue.codec.nested import Offsets, jagged, strided
from transfer_queue.codec.rows import (
    BlockBytes,
    Copier,
    Run,
    gather_dense,
    gather_ragged,
    gather_varied,
    take_dense,
    take_ragged,
    varied_spans,
)
from transfer_queue.codec.spread_rows import SpreadRows
from transfer_queue.codec.stacks import stack
from transfer_queue.codec.values import Lifting
from transfer_queue.errors import InvalidInput, ProtocolError, SchemaConflict
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.schema import DENSE, NESTED, OBJECTS, RAGGED, FieldSchema

AT_ONCE = 1024  # values that one call decodes at most: another thread can have the interpreter in between
Located = Sequence[tuple[BlockBytes, int, int]]  # (block, first row, number of rows), in result order


class Decoding(NamedTuple):
    """What decodes the Python values of a column, and the arrays and images in them."""

    lifting: type[Lifting]
    reader: type[BufferReader]


VALUES = Decoding(Lifting, BufferReader)  # as they were put


class Assembler:
    """Turns runs into values; `out` maps fields to preallocated dense tensors (n, *row shape). `name_row` says what row
    number so and so of the result is called. `plain`: rows of one shape become a plain tensor, (n, *row shape).
    `decoding`: what Python values are made of."""

    def __init__(
        self,
        copier: Copier,
        allow_pickle: bool,
        out: Mapping[str, torch.Tensor] | None = None,
        name_row: Callable[[int], str] = "row {}".format,
        plain: bool = False,
        decoding: Decoding = VALUES,
    ) -> None:
        self.copier = copier
        self.allow_pickle = allow_pickle
        self.out = out or {}
        self.name_row = name_row
        self.plain = plain
        self.decoding = decoding
        self._offsets: dict[object, Offsets] = {}

    def scattered(self, schema: FieldSchema, block: BlockBytes, rows: Ints) -> Any:
        """Rows of one field that lie anywhere in one block, in one pass; None where there is no such pass."""
        column = block.layout.column(schema.name)
        if self.out or column is None or column.shape != schema.shape or column.ragged > 0:
            return None
        if rows.min() < 0 or rows.max() >= block.layout.rows:
            raise ProtocolError(f"field {schema.name!r}: rows that are not in their block")
        if column.kind == DENSE:
            return self._dense(take_dense(block, column, rows, self.copier), _dtype(column), len(rows), column.shape)
        if column.kind == RAGGED:
            return self._jagged(*take_ragged(block, column, rows, self.copier), _dtype(column), column.shape, 0)
        if column.kind == OBJECTS and len(column.parts) == 2:
            return self._stacked(schema.name, block.messages(column, rows))
        return None

    def many(self, schema: FieldSchema, rows: LoneRows | SpreadRows) -> Any:
        """One field of rows that lie in many pieces, in one pass; None where there is no such pass."""
        column = None if self.out else rows.plain(schema.name)
        if column is None:
            return None
        if column.template.kind == OBJECTS:
            return self._stacked(schema.name, column.messages())
        sizes = column.shapes
        merged = np.where((sizes == sizes[0]).all(axis=0), sizes[0], -1)
        shape = _known_shape(schema.shape, tuple(merged.tolist()))
        if -1 in shape[1:]:
            return None
        dtype = _dtype(column.template)
        data = column.values(self.copier)
        if shape and shape[0] == -1:
            return self._jagged(data, offsets_of(sizes[:, 0]), dtype, shape, 0)
        return self._dense(data, dtype, len(rows), shape)

    def field(self, schema: FieldSchema, located: Located) -> Any:
        """The rows of one field."""
        runs: list[Run] = []
        name, place = schema.name, 0  # where the first block has the column
        for block, start, count in located:
            layout = block.layout
            columns = layout.columns
            column = columns[place] if place < len(columns) and columns[place].name == name else layout.column(name)
            if column is None or start < 0 or count < 1 or start + count > layout.rows:
                raise ProtocolError(f"field {name!r}: rows {start}..{start + count} are not in their block")
            if not runs and len(located) > 1:
                place = columns.index(column)
            runs.append(Run(block, column, start, count))
        column = runs[0].column
        if len(runs) == 1 and column.kind == DENSE and column.shape == schema.shape and not self.out:
            return self._dense(gather_dense(runs, self.copier), _dtype(column), runs[0].rows, column.shape)
        return self._value(name, schema.shape, runs, None)

    def _value(self, name: str, shape: tuple[int, ...], runs: list[Run], inner: tuple[int, ...] | None) -> Any:
        """The rows of one column. `inner`: it lies in a TensorDict of that batch shape beyond the rows."""
        column = runs[0].column
        columns = _distinct(runs) if len(runs) > 1 else [column]
        if not mixing.are_alike(columns):
            return self._mixed(name, runs, inner)
        if column.kind in (OBJECTS, NESTED):
            return self._objects(runs, inner) if column.kind == OBJECTS else self._tensordict(runs)
        common = mixing.common_dtype(columns, converts=inner is None and self.decoding is VALUES)
        if common is None:
            raise mixing.several_dtypes(runs, self.name_row)
        merged = shape if shape == column.shape and len(runs) == 1 else merged_shape(shape, runs)
        if any(each.dtype != common for each in columns):
            return self._widened(name, common, merged, runs, inner)
        dtype, *_ = map(_dtype, columns)
        ragged = [d for d, size in enumerate(merged) if size == -1] if -1 in merged else []
        if name in self.out and inner is None:
            return self._into(self.out[name], name, merged, runs)
        if len(ragged) > 1:
            return self._varied(runs, dtype, inner)
        if ragged:
            return self._jagged(*gather_ragged(runs, ragged[0], self.copier), dtype, merged, ragged[0], inner)
        count = sum(run.rows for run in runs)
        data = gather_dense(runs, self.copier)
        return self._dense(data, dtype, count, merged) if inner is None else typed(data, dtype, (count, *merged))

    def _jagged(
        self,
        data: Bytes,
        offsets: Ints,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        ragged: int,
        inner: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Rows joined along their dimension `ragged`. Fields of equal offsets share them. `inner`: see `_value`."""
        if self.plain and inner is None and len(offsets) == 2:
            return typed(data, dtype, (1, *shape[:ragged], int(offsets[1]), *shape[ragged + 1 :]))
        place = offsets.tobytes()
        if place not in self._offsets:
            self._offsets[place] = Offsets.of(offsets)
        values = typed(data, dtype, (*shape[:ragged], int(offsets[-1]), *shape[ragged + 1 :]))
        return jagged(values, self._offsets[place], ragged + 1)

    def _objects(self, runs: list[Run], inner: tuple[int, ...] | None) -> Any:
        rows = self.objects(runs)
        if inner is None and mixing.are_tensors(rows):
            return mixing.joined(self._now().objects(runs))
        return stack(rows, inner or ())

    def _stacked(self, name: str, messages: list[memoryview]) -> Any:
        """The values of a column without buffers: none of them is a tensor."""
        lifting = self._lifting()
        values: list[Any] = []
        try:
            for at in range(0, len(messages), AT_ONCE):
                some = messages[at : at + AT_ONCE]
                found = lifting.unpack_all(some, len(some))
                values += map(lifting.unpack, some) if found is None else found
            return stack(values)
        except DAMAGED as error:
            raise damaged(name, error) from None

    def _lifting(self) -> Lifting:
        """Decodes values that refer to no buffer."""
        return self.decoding.lifting(self.decoding.reader(_no_buffer).lift, self.allow_pickle)

    def _now(self) -> Assembler:
        """One whose values can be looked at before `Copies.run`."""
        return Assembler(Copier(self.copier.allocate), self.allow_pickle, decoding=self.decoding)

    def _mixed(self, name: str, runs: list[Run], inner: tuple[int, ...] | None) -> Any:
        """Rows that were put as columns of several kinds, as they are."""
        if inner is not None:
            raise SchemaConflict(
                f"field {name!r}: its TensorDicts hold tensors in some rows and other things in others"
            )
        if name in self.out:
            raise InvalidInput(f"out[{name!r}]: the rows are of several kinds")
        rows = [row for run in runs for row in self._rows(name, run)]
        if mixing.are_tensors(rows):
            now = self._now()
            return mixing.joined([row for run in runs for row in now._rows(name, run)])
        return stack(rows)

    def _rows(self, name: str, run: Run) -> list[Any]:
        if run.column.kind == OBJECTS:
            return self.objects([run])
        return rows_of(self._value(name, run.column.shape, [run], None))

    def _widened(
        self, name: str, dtype: str, shape: tuple[int, ...], runs: list[Run], inner: tuple[int, ...] | None
    ) -> torch.Tensor:
        """Numbers as `dtype`, of which some were whole numbers of another one."""
        now = self._now()
        rows = [row for run in runs for row in now._rows(name, run)]
        wide = mixing.widened(rows, dtype)
        if isinstance(wide, int):
            raise mixing.does_not_fit(runs, wide, dtype, self.name_row)
        if name in self.out:
            self._check_out(name, (len(wide), *shape), wide[0].dtype)
            return self.out[name].copy_(torch.stack(wide))
        return mixing.joined(wide) if inner is None else torch.stack(wide)

    def _check_out(self, name: str, expected: tuple[int, ...], dtype: torch.dtype) -> None:
        target = self.out[name]
        if not isinstance(target, torch.Tensor):
            raise InvalidInput(f"out[{name!r}] is a {type(target).__qualname__}, expected a tensor to fill")
        if -1 in expected or tuple(target.shape) != expected or target.dtype != dtype:
            raise InvalidInput(
                f"out[{name!r}] is {target.dtype} {tuple(target.shape)}; the rows are {dtype} {expected}"
            )
        if target.is_meta or any(n > 1 and not step for n, step in zip(target.shape, target.stride(), strict=True)):
            raise InvalidInput(f"out[{name!r}] has not memory of its own for each value")
        if target.requires_grad and torch.is_grad_enabled():
            raise InvalidInput(f"out[{name!r}] requires grad: give its detach(), or read under torch.no_grad()")

    def _dense(self, data: Bytes, dtype: torch.dtype, count: int, shape: tuple[int, ...]) -> torch.Tensor:
        if not shape or self.plain:
            return typed(data, dtype, (count, *shape))
        return jagged(typed(data, dtype, (count * shape[0], *shape[1:])), self._uniform(count, shape[0]), 1)

    def _uniform(self, count: int, length: int) -> Offsets:
        """Offsets of `count` rows of `length`. Fields of equal lengths share them: torch combines only such fields."""
        found = self._offsets.get((count, length))
        if found is None:
            found = self._offsets[count, length] = Offsets.uniform(count, length)
        return found

    def _into(self, target: torch.Tensor, name: str, shape: tuple[int, ...], runs: list[Run]) -> torch.Tensor:
        dtype = torch_dtype(runs[0].column.dtype)
        self._check_out(name, (sum(run.rows for run in runs), *shape), dtype)
        at = 0
        for run in runs:
            row = run.column.row_nbytes()
            span = run.block.part(run.column, 0)[run.start * row : (run.start + run.rows) * row]
            rows = typed(span, dtype, (run.rows, *shape))
            target[at : at + run.rows].copy_(rows)
            at += run.rows
        return target

    def _varied(self, runs: Sequence[Run], dtype: torch.dtype, inner: tuple[int, ...] | None) -> torch.Tensor:
        """Rows of a column that differ in several dimensions. Of those that are asked for, fewer may."""
        spans, shapes = varied_spans(runs)
        differing = np.flatnonzero((shapes != shapes[0]).any(axis=0)).tolist() if inner is None else []
        numel = int(shapes.prod(axis=1).sum())
        if inner is None and not differing:
            data = gather_varied(runs, spans, self.copier)
            return self._dense(data, dtype, len(shapes), tuple(shapes[0].tolist()))
        if len(differing) == 1:
            values = typed(gather_varied(runs, spans, self._now().copier), dtype, (numel,))
            parts = values.split(shapes.prod(axis=1).tolist())
            return mixing.joined([part.view(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)])
        values = typed(gather_varied(runs, spans, self.copier), dtype, (numel,))
        return strided(values, torch.from_numpy(np.ascontiguousarray(shapes)))

    def _tensordict(self, runs: list[Run]) -> TensorDict:
        first = runs[0].column
        names = [child.name for child in first.children]
        content: dict[str, Any] = {}
        for column in (run.column for run in runs[1:]):
            if column.shape != first.shape or {child.name for child in column.children} != set(names):
                raise SchemaConflict(f"field {first.name!r}: rows hold TensorDicts of different batch shape or keys")
        for number, child in enumerate(first.children):
            inner = []
            for run in runs:
                column = run.column.children[number]
                if column.name != child.name:
                    column = next(c for c in run.column.children if c.name == child.name)
                inner.append(run._replace(column=column))
            content[child.name] = self._value(child.name, child.shape, inner, first.shape)
        return TensorDict(content, batch_size=[sum(run.rows for run in runs), *first.shape])

    def objects(self, runs: Sequence[Run]) -> list[Any]:
        """The Python values of an objects column."""
        values: list[Any] = []
        readers = self._readers(runs)
        lifting = self._lifting()
        try:
            for run in runs:
                block, column, start, count = run
                try:
                    if len(column.parts) == 2 and count == 1:
                        values.append(lifting.unpack(block.message(column, start)))
                    elif len(column.parts) == 2:
                        values += _decoded_run(lifting, run)
                    else:
                        values += self._decoded(run, readers[id(block), column.name])
                except DAMAGED as error:
                    raise damaged(column.name, error) from None
        finally:
            for reader in readers.values():
                reader.close()
        return values

    def _readers(self, runs: Sequence[Run]) -> dict[tuple[int, str], BufferReader]:
        """Of each block and column that has buffers; blocks of equal layout share their columns.

        The buffers are there when this returns: an image, a jagged tensor or a type of the user's looks at its bytes
        when it is made.
        """
        readers: dict[tuple[int, str], BufferReader] = {}
        for block, column, start, count in runs:
            if len(column.parts) == 2:
                continue
            place = (id(block), column.name)
            if place not in readers:
                readers[place] = self.decoding.reader(self._span_of(block, column))
            buffers = block.buffers(column)
            first, last = buffers.ends[[start, start + count]].tolist()
            readers[place].fetch(buffers.refs[first:last].tolist())
        if readers:
            self.copier.settle()
        return readers

    def _decoded(self, run: Run, reader: BufferReader) -> Iterable[Any]:
        """The values of a column that has buffers."""
        block, column, start, count = run
        spans = _messages(run)
        unpack = self.decoding.lifting(reader.lift, self.allow_pickle).unpack
        buffers = block.buffers(column)
        ends = buffers.ends[start : start + count + 1].tolist()
        values = []
        for message, (first, last) in zip(spans, itertools.pairwise(ends), strict=True):
            reader.begin_row(buffers.refs[first:last].tolist())
            values.append(unpack(message))
        return values

    def _span_of(self, block: BlockBytes, column: Column) -> Callable[[int], Bytes]:
        """Gives the bytes of a buffer of the column: a view where the block allows it."""

        def span(number: int) -> Bytes:
            buffers = block.buffers(column)
            first, nbytes = buffers.spans[number].tolist()
            found = buffers.heap[first : first + nbytes]
            if block.may_view(nbytes):
                return found
            own = self.copier.allocate(nbytes)
            self.copier.copy(own, found)
            return own

        return span


def damaged(field: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"field {field!r}: a damaged value: {error}")


def _distinct(runs: Sequence[Run]) -> list[Column]:
    """A column of each kind, dtype and rank there is: rows that were put alone mostly differ in their lengths only."""
    columns = [run.column for run in runs]
    return list({(c.kind, c.dtype, c.itemsize, len(c.shape), c.weak): c for c in columns}.values())


def _decoded_run(lifting: Lifting, run: Run) -> list[Any]:
    """The values of rows that lie one after the other, in a column without buffers."""
    block, column, start, count = run
    data = memoryview(block.part(column, 0))  # type: ignore[arg-type]
    marks = block.offsets(column, 1, len(data))
    values: list[Any] = []
    for at in range(start, start + count, AT_ONCE):
        some = run._replace(start=at, rows=min(AT_ONCE, start + count - at))
        first, last = marks[[at, at + some.rows]].tolist()
        found = lifting.unpack_all([data[first:last]], some.rows)
        values += map(lifting.unpack, _messages(some)) if found is None else found
    return values


def _messages(run: Run) -> Iterator[memoryview]:
    """The data of each row of an objects column; never many at once, which the garbage collector would look at."""
    block, column, start, count = run
    data = block.part(column, 0)
    marks = block.offsets(column, 1, len(data))[start : start + count + 1].tolist()
    message = memoryview(data)  # type: ignore[arg-type]
    return (message[a:b] for a, b in itertools.pairwise(marks))


def _no_buffer(number: int) -> Bytes:
    raise ProtocolError(f"buffer {number} of a column that has none")


def _dtype(column: Column | ColumnTemplate) -> torch.dtype:
    """The dtype of a column of tensors."""
    dtype = torch_dtype(column.dtype)
    if column.itemsize != dtype.itemsize:
        raise ProtocolError(f"field {column.name!r}: {column.itemsize} bytes an element of {column.dtype}")
    return dtype


def merged_shape(shape: tuple[int, ...], runs: Sequence[Run]) -> tuple[int, ...]:
    """Row shape over all runs, -1 where rows differ.

    `shape` is what is known of the whole field: when exactly one of its dimensions differs, that one stays the
    ragged dimension even where these rows happen to be uniform.
    """
    shapes = {run.column.shape for run in runs} if len(runs) > 1 else {runs[0].column.shape}
    if len({len(found) for found in shapes}) != 1:
        raise ProtocolError(f"field {runs[0].column.name!r}: rows of different rank")
    return _known_shape(shape, tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True)))


def _known_shape(shape: tuple[int, ...], merged: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == len(merged) and shape.count(-1) == 1 and merged.count(-1) == 0:
        return tuple(-1 if known == -1 else size for known, size in zip(shape, merged, strict=True))
    return merged


def typed(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    plain, is_same = lying_as(dtype)
    found = torch.from_numpy(data.view(plain).reshape(shape))  # a fifth of the time of views by torch
    return found if is_same else found.view(dtype)
