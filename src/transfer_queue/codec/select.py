"""Cutting rows and columns out of a block into a smaller one, at the level of bytes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np

from transfer_queue.codec.layout import Builder, Column, Layout
from transfer_queue.codec.rows import BlockBytes, Copier, Run, gather_ragged, join_offsets, take_dense, varied_parts
from transfer_queue.codec.slices import Slice, sliced, sliced_column
from transfer_queue.errors import ProtocolError
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.schema import DENSE, NESTED, RAGGED, VARIED

Fill = Callable[[Bytes], None]
NO_SLICES: Mapping[str, Slice] = MappingProxyType({})


def selected(
    layout: Layout, data: Bytes, rows: Ints, fields: Sequence[str], slices: Mapping[str, Slice] = NO_SLICES
) -> tuple[Layout, Fill]:
    """The layout of a block with only `rows` (ascending) of `fields`, and the function that writes it. Of fields in
    `slices` it has only such parts of rows.

    The function only reads `data` and may run in another thread. `ProtocolError` when that is no such block.
    """
    if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < layout.rows:
        raise ProtocolError(f"rows {rows[0]}..{rows[-1]} of a block of {layout.rows}")
    block = BlockBytes(data, layout, view_nbytes=-1)
    builder = Builder()
    writes: list[tuple[int, Bytes]] = []
    columns = []
    for column in layout.columns:
        if column.name in slices:
            columns.append(_sliced(block, column, rows, slices[column.name], builder, writes))
        elif column.name in fields:
            columns.append(_column(block, column, rows, builder, writes))

    def fill(into: Bytes) -> None:
        for offset, source in writes:
            into[offset : offset + len(source)] = source

    return Layout(len(rows), builder.nbytes, columns), fill


def _column(block: BlockBytes, column: Column, rows: Ints, builder: Builder, writes: list[tuple[int, Bytes]]) -> Column:
    children = [_column(block, child, rows, builder, writes) for child in column.children]
    parts = []
    for data in _parts(block, column, rows):
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        place = builder.place(flat.nbytes)
        writes.append((place[0], flat))
        parts.append(place)
    return msgspec.structs.replace(column, parts=parts, children=children)


def _sliced(
    block: BlockBytes, column: Column, rows: Ints, part: Slice, builder: Builder, writes: list[tuple[int, Bytes]]
) -> Column:
    made = sliced_column(column.name, column, part)
    for data in sliced(column.name, [(block, rows, part)], Copier()):
        place = builder.place(data.nbytes)
        writes.append((place[0], data.view(np.uint8)))
        made.parts.append(place)
    return made


def _parts(block: BlockBytes, column: Column, rows: Ints) -> list[np.ndarray]:
    if column.kind == NESTED:
        return []
    runs = [Run(block, column, int(row), 1) for row in rows]
    if column.kind == DENSE:
        return [take_dense(block, column, rows, Copier())]
    if column.kind == RAGGED:
        return list(gather_ragged(runs, column.ragged, Copier()))
    if column.kind == VARIED:
        values, offsets, shapes = varied_parts(block, column)
        return [_spans(values, offsets * column.itemsize, rows), _offsets(offsets, rows), shapes[rows]]
    return _objects(block, column, rows)


def _objects(block: BlockBytes, column: Column, rows: Ints) -> list[np.ndarray]:
    data = block.part(column, 0)
    offsets = block.offsets(column, 1, len(data))
    parts = [_spans(data, offsets, rows), _offsets(offsets, rows)]
    if len(column.parts) == 2:
        return parts
    ends, refs, table, heap = block.buffers(column)
    used, renumbered = np.unique(_spans(refs, ends, rows), return_inverse=True)
    builder = Builder()
    spans = np.array([builder.place(int(nbytes)) for nbytes in table[used, 1]], np.int64).reshape(-1, 2)
    packed = np.zeros(builder.nbytes, np.uint8)
    for (start, nbytes), (source, _) in zip(spans.tolist(), table[used].tolist(), strict=True):
        packed[start : start + nbytes] = heap[source : source + nbytes]
    return [*parts, _offsets(ends, rows), renumbered.astype(np.int64), spans, packed]


def _offsets(offsets: Ints, rows: Ints) -> Ints:
    return join_offsets([(offsets, int(row), 1) for row in rows])


def _spans(data: np.ndarray, offsets: Ints, rows: Ints) -> np.ndarray:
    """The spans of `rows` joined."""
    return np.concatenate([data[int(offsets[row]) : int(offsets[row + 1])] for row in rows])
