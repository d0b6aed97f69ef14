"""Rows that were put alone, written as columns of one block, a little at a time. No torch.

The columns are those that a put of these rows together would have made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from transfer_queue.codec.layout import Builder, Column, Layout, offsets_of
from transfer_queue.codec.lone_rows import LoneColumn, LoneRows
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.memory.copy import carry_out, moves_into
from transfer_queue.schema import DENSE, OBJECTS, RAGGED, VARIED

STEP_NBYTES = 1 << 20
STEP_MOVES = 256


class RowValues(NamedTuple):
    """The values of one column: where in the new block they go, and the address and size of each row's."""

    offset: int
    sources: list[int]
    sizes: list[int]


class RowJoin:
    """The block in the making of `rows`, column after column. The rows stay where they are until it is written."""

    def __init__(self, rows: LoneRows) -> None:
        self._rows = rows
        self._columns: list[Column] = []
        self._builder = Builder()
        self._values: list[RowValues] = []
        self._indexes: list[tuple[int, Bytes]] = []

    @property
    def nbytes(self) -> int:
        return self._builder.nbytes

    def layout(self) -> Layout:
        return Layout(len(self._rows), self.nbytes, self._columns)

    def add(self, name: str) -> bool:
        """Add a column. False, and nothing is of use, where these rows cannot be joined: see `LoneRows.plain`; or they
        differ in length along one dimension that is not the first."""
        column = self._rows.plain(name)
        form = None if column is None else _form(column)
        if column is None or form is None:
            return False
        kind, shape, indexes = form
        place = self._builder.place(int(column.sizes.sum()))
        self._values.append(RowValues(place[0], column.sources.tolist(), column.sizes.tolist()))
        parts = [place, *map(self._add_index, indexes)]
        made = column.template
        ragged = 0 if kind == RAGGED else -1
        self._columns.append(Column(name, kind, made.dtype, made.itemsize, shape, ragged, parts, [], made.weak))
        return True

    def _add_index(self, numbers: Ints) -> tuple[int, int]:
        place = self._builder.place(numbers.nbytes)
        self._indexes.append((place[0], np.ascontiguousarray(numbers).view(np.uint8).reshape(-1)))
        return place

    def write(self, into: Bytes) -> Iterator[None]:
        """Fill the block at `into` (uint8, `nbytes`), in steps of about `STEP_NBYTES`."""
        for offset, index in self._indexes:
            into[offset : offset + len(index)] = index
        for offset, sources, sizes in self._values:
            first = nbytes = 0
            for last, size in enumerate(sizes, 1):
                nbytes += size
                if nbytes >= STEP_NBYTES or last - first == STEP_MOVES or last == len(sizes):
                    moves = moves_into(into[offset : offset + nbytes], sources[first:last], sizes[first:last])
                    carry_out(moves, ())
                    offset, first, nbytes = offset + nbytes, last, 0
                    yield


def _form(column: LoneColumn) -> tuple[str, tuple[int, ...], list[Ints]] | None:
    """Kind, shape of a row, and the index parts of the joined column."""
    if column.template.kind == OBJECTS:
        return OBJECTS, (), [offsets_of(column.sizes)]
    shapes = column.shapes
    shape = tuple(np.where((shapes == shapes[0]).all(axis=0), shapes[0], -1).tolist())
    differing = [dim for dim, size in enumerate(shape) if size == -1]
    if not differing:
        return DENSE, shape, []
    if differing == [0]:
        return RAGGED, shape, [offsets_of(shapes[:, 0])]
    if len(differing) == 1:
        return None
    return VARIED, shape, [offsets_of(shapes.prod(axis=1)), shapes]
