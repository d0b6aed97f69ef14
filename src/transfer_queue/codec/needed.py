"""Which bytes of a block some rows of it need, so that no others are read from where it lies."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from transfer_queue.codec.layout import Column, Layout
from transfer_queue.codec.rows import BlockBytes, step_offsets
from transfer_queue.memory.bytes import Ints
from transfer_queue.schema import DENSE, NESTED, OBJECTS, RAGGED

Range = tuple[int, int]  # (first byte, the one after the last)
INDEXES = {2: (1,), 3: (1, 2), 6: (1, 2, 3, 4)}  # the parts that say where values lie, by how many parts a column has


def index_ranges(layout: Layout, fields: Collection[str]) -> list[Range]:
    """What has to be read before it is known where the values of the rows lie."""
    columns = _columns(layout.columns, fields)
    return [_range(column, number) for column in columns for number in INDEXES.get(len(column.parts), ())]


def all_ranges(layout: Layout, fields: Collection[str]) -> list[Range]:
    """What all rows need."""
    return [
        _range(column, number) for column in _columns(layout.columns, fields) for number in range(len(column.parts))
    ]


def value_ranges(block: BlockBytes, rows: Ints, fields: Collection[str]) -> Iterator[Range]:
    """What these rows (ascending, distinct) need besides the `index_ranges`, which `block` has. Raises
    `ProtocolError`."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = np.stack([rows[np.concatenate([[0], breaks])], rows[np.concatenate([breaks - 1, [-1]])] + 1], axis=1)
    for column in _columns(block.layout.columns, fields):
        if column.kind == NESTED:
            continue
        start, nbytes = column.parts[0]
        if column.kind == DENSE:
            yield from _at(start, runs * column.row_nbytes())
        elif column.kind == RAGGED and column.ragged:
            yield start, start + nbytes  # the rows lie side by side, not one after the other
        elif column.kind == RAGGED:
            step = column.row_nbytes()
            yield from _at(start, step_offsets(block, column, step)[runs] * step)
        else:
            step = 1 if column.kind == OBJECTS else column.itemsize
            yield from _at(start, block.offsets(column, 1, nbytes // step)[runs] * step)
        if len(column.parts) == 6:
            yield from _heap(block, column, runs)


def _heap(block: BlockBytes, column: Column, runs: Ints) -> Iterator[Range]:
    ends, refs, spans, _ = block.buffers(column)
    start = column.parts[5][0]
    for first, end in ends[runs].tolist():
        for at, nbytes in spans[np.unique(refs[first:end])].tolist():
            yield start + at, start + at + nbytes


def _at(start: int, ranges: Ints) -> Iterator[Range]:
    return ((start + first, start + end) for first, end in ranges.tolist())


def _range(column: Column, number: int) -> Range:
    offset, nbytes = column.parts[number]
    return offset, offset + nbytes


def _columns(columns: list[Column], fields: Collection[str] | None) -> Iterator[Column]:
    for column in columns:
        if fields is None or column.name in fields:
            yield column
            yield from _columns(column.children, None)
