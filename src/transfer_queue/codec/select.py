"""Cutting rows and columns out of a block into a smaller one, at the level of bytes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from transfer_queue.codec.layout import Builder, Column, Layout, decode_layout, encode_layout
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


class DenseSpan(NamedTuple):
    """Of a dense column: where its rows begin in the block, bytes of one of them, and where they go."""

    source: int
    row_nbytes: int
    into: int


class CutOut(NamedTuple):
    """Rows of a block that follow each other, as a block of their own: its layout, its bytes, and what writes them."""

    layout: bytes
    nbytes: int
    fill: Fill


def cut_out(layout: bytes, data: Bytes, first: int, count: int, fields: Sequence[str]) -> CutOut:
    """`count` rows of `fields` from `first` on. Raises as `selected`.

    Rows of dense columns are spans whose places are the same for every row, so they are found once.
    """
    whole, dense = decode_layout(layout), _dense_spans(layout, count, tuple(fields))
    if dense is None or whole.nbytes > len(data) or not 0 <= first <= first + count <= whole.rows:
        made, fill = selected(whole, data, np.arange(first, first + count), fields)
        return CutOut(encode_layout(made), made.nbytes, fill)
    encoded, nbytes, spans = dense

    def copy(into: Bytes) -> None:
        for source, row_nbytes, place in spans:
            begin, length = source + first * row_nbytes, count * row_nbytes
            into[place : place + length] = data[begin : begin + length]

    return CutOut(encoded, nbytes, copy)


@lru_cache(maxsize=1024)
def _dense_spans(layout: bytes, count: int, fields: tuple[str, ...]) -> tuple[bytes, int, list[DenseSpan]] | None:
    """The layout of so many rows of these fields, its bytes, and where they come from; None where one is not dense."""
    builder = Builder()
    columns, spans = [], []
    for column in decode_layout(layout).columns:
        if column.name not in fields:
            continue
        if column.kind != DENSE:
            return None
        row_nbytes = column.row_nbytes()
        place = builder.place(count * row_nbytes)
        spans.append(DenseSpan(column.parts[0][0], row_nbytes, place[0]))
        columns.append(msgspec.structs.replace(column, parts=[place]))
    return encode_layout(Layout(count, builder.nbytes, columns)), builder.nbytes, spans


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
    if column.kind == DENSE:
        return [take_dense(block, column, rows, Copier())]
    if column.kind == RAGGED:
        runs = [Run(block, column, row, 1) for row in rows.tolist()]
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
