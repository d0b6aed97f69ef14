"""From located rows of blocks to the values a caller gets.

| rows of the field | result |
|---|---|
| tensors without dimensions | dense tensor (n,) |
| tensors that agree in all dimensions but at most one | jagged NestedTensor; ragged dimension 1 when uniform |
| tensors that differ in several dimensions | strided NestedTensor |
| TensorDicts | TensorDict of batch size (n, ...) |
| anything else | NonTensorStack |

A field of one run is a view of its block where the block allows it; every other result is memory of the caller's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue.codec.arrays import BufferReader
from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.codec.layout import Bytes, Column
from transfer_queue.codec.nested import jagged
from transfer_queue.codec.rows import Block, Copier, Run, gather_dense, gather_ragged, varied_parts
from transfer_queue.codec.values import Lifting
from transfer_queue.errors import InvalidInput, ProtocolError
from transfer_queue.schema import DENSE, NESTED, OBJECTS, FieldSchema

Located = Sequence[tuple[Block, int, int]]  # (block, first row, number of rows), in result order


class Assembler:
    """Turns runs into values; `out` maps fields to preallocated dense tensors (n, *row shape)."""

    def __init__(self, copier: Copier, allow_pickle: bool, out: Mapping[str, torch.Tensor] | None = None) -> None:
        self.copier = copier
        self.allow_pickle = allow_pickle
        self.out = out or {}
        self._offsets: dict[object, torch.Tensor] = {}

    def field(self, schema: FieldSchema, located: Located) -> Any:
        """The rows of one field."""
        runs = []
        for block, start, count in located:
            column = block.layout.column(schema.name)
            if column is None or start < 0 or start + count > block.layout.rows:
                raise ProtocolError(f"field {schema.name!r}: rows {start}..{start + count} are not in their block")
            runs.append(Run(block, column, start, count))
        return self._value(schema.name, schema.shape, runs, nested=False)

    def _value(self, name: str, shape: tuple[int, ...], runs: list[Run], nested: bool) -> Any:
        column = runs[0].column
        if column.kind == OBJECTS:
            return stack(self.objects(runs))
        if column.kind == NESTED:
            return self._tensordict(runs)
        merged = shape if shape == column.shape and len(runs) == 1 else merged_shape(shape, runs)
        ragged = [d for d, size in enumerate(merged) if size == -1] if -1 in merged else []
        if name in self.out and not nested:
            return self._into(self.out[name], name, merged, runs)
        if len(ragged) > 1:
            return torch.nested.nested_tensor(self._row_tensors(runs))
        dtype = torch_dtype(column.dtype)
        if ragged:
            data, offsets = gather_ragged(runs, ragged[0], self.copier)
            values = _typed(data, dtype, (*merged[: ragged[0]], int(offsets[-1]), *merged[ragged[0] + 1 :]))
            marks = self._offsets.setdefault(offsets.tobytes(), torch.from_numpy(offsets))
            return jagged(values, marks, ragged[0] + 1)
        count = sum(run.rows for run in runs)
        data = gather_dense(runs, self.copier)
        if nested or not merged:
            return _typed(data, dtype, (count, *merged))
        return jagged(_typed(data, dtype, (count * merged[0], *merged[1:])), self._uniform(count, merged[0]), 1)

    def _uniform(self, count: int, length: int) -> torch.Tensor:
        """Offsets of `count` rows of `length`. Fields of equal lengths share them: torch combines only such fields."""
        found = self._offsets.get((count, length))
        if found is None:
            found = torch.arange(count + 1, dtype=torch.int64) * length
            self._offsets[count, length] = found
        return found

    def _into(self, target: torch.Tensor, name: str, shape: tuple[int, ...], runs: list[Run]) -> torch.Tensor:
        expected = (sum(run.rows for run in runs), *shape)
        dtype = torch_dtype(runs[0].column.dtype)
        if -1 in shape or tuple(target.shape) != expected or target.dtype != dtype:
            raise InvalidInput(
                f"out[{name!r}] is {target.dtype} {tuple(target.shape)}; the rows are {dtype} {expected}"
            )
        at = 0
        for run in runs:
            rows = _typed(gather_dense([run], self.copier), dtype, (run.rows, *shape))
            target[at : at + run.rows].copy_(rows)
            at += run.rows
        return target

    def _row_tensors(self, runs: Sequence[Run]) -> list[torch.Tensor]:
        """One tensor a row, whatever the kind of the column it lies in."""
        rows: list[torch.Tensor] = []
        for run in runs:
            block, column, start, count = run
            dtype = torch_dtype(column.dtype)
            if column.kind == DENSE:
                rows += _typed(gather_dense([run], self.copier), dtype, (count, *column.shape)).unbind()
            elif column.ragged >= 0:
                data, offsets = gather_ragged([run], column.ragged, self.copier)
                shape = tuple(int(offsets[-1]) if size == -1 else size for size in column.shape)
                lengths = np.diff(offsets).tolist()
                rows += _typed(data, dtype, shape).split(lengths, dim=column.ragged)
            else:
                values, offsets, shapes = varied_parts(block, column)
                size = column.itemsize
                for row in range(start, start + count):
                    span = values[int(offsets[row]) * size : int(offsets[row + 1]) * size]
                    rows.append(_typed(span.copy(), dtype, tuple(shapes[row].tolist())))
        return rows

    def _tensordict(self, runs: list[Run]) -> TensorDict:
        count = sum(run.rows for run in runs)
        content: dict[str, Any] = {}
        for child in runs[0].column.children:
            inner = []
            for run in runs:
                column = next((c for c in run.column.children if c.name == child.name), None)
                if column is None:
                    raise ProtocolError(f"field {run.column.name!r}: a row lacks {child.name!r}")
                inner.append(run._replace(column=column))
            content[child.name] = self._value(child.name, child.shape, inner, nested=True)
        return TensorDict(content, batch_size=[count, *runs[0].column.shape])

    def objects(self, runs: Sequence[Run]) -> list[Any]:
        """The Python values of an objects column."""
        values: list[Any] = []
        for block, column, start, count in runs:
            if column.kind != OBJECTS:
                raise ProtocolError(f"field {column.name!r}: objects and tensors mixed")
            data = block.part(column, 0)
            marks = block.offsets(column, 1, len(data))[start : start + count + 1].tolist()
            message = memoryview(data)  # type: ignore[arg-type]
            spans = [message[a:b] for a, b in itertools.pairwise(marks)]
            if len(column.parts) == 2:
                values += map(Lifting(allow_pickle=self.allow_pickle).unpack, spans)
            else:
                values += self._with_buffers(block, column, start, spans)
        return values

    def _with_buffers(self, block: Block, column: Column, start: int, spans: list[memoryview]) -> list[Any]:
        refs = block.ints(column, 3)
        ends = block.offsets(column, 2, len(refs)).tolist()
        table = block.ints(column, 4).reshape(-1, 2)
        heap = block.part(column, 5)

        def span(number: int) -> Bytes:
            first, nbytes = table[number].tolist()
            if first < 0 or nbytes < 0 or first + nbytes > len(heap):
                raise ProtocolError(f"field {column.name!r}: buffer {number} outside its heap")
            found = heap[first : first + nbytes]
            if block.may_view(nbytes):
                return found
            own = self.copier.allocate(nbytes)
            self.copier.copy(own, found)
            return own

        reader = BufferReader(span)
        unpack = Lifting(reader.lift, self.allow_pickle).unpack
        values = []
        for row, message in enumerate(spans, start):
            reader.begin_row(refs[ends[row] : ends[row + 1]].tolist())
            values.append(unpack(message))
        return values


def merged_shape(shape: tuple[int, ...], runs: Sequence[Run]) -> tuple[int, ...]:
    """Row shape over all runs, -1 where rows differ.

    `shape` is what is known of the whole field: when exactly one of its dimensions differs, that one stays the
    ragged dimension even where these rows happen to be uniform.
    """
    shapes = {run.column.shape for run in runs} if len(runs) > 1 else {runs[0].column.shape}
    if len({len(found) for found in shapes}) != 1:
        raise ProtocolError(f"field {runs[0].column.name!r}: rows of different rank")
    merged = tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True))
    if len(shape) == len(merged) and shape.count(-1) == 1 and merged.count(-1) == 0:
        return tuple(-1 if known == -1 else size for known, size in zip(shape, merged, strict=True))
    return merged


def stack(values: list[Any]) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(value) for value in values])


def _typed(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    flat = torch.from_numpy(data).view(dtype)
    return flat if len(shape) == 1 else flat.view(shape)
