"""Rows that lie anywhere in several blocks: one pass per field and block. No torch.

It reads what `LoneRows` reads: tensors of one dtype and rank that differ in length in their first dimension at most, or
values without buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transfer_queue.codec.layout import Column, ColumnTemplate
from transfer_queue.codec.lone_rows import LoneRows
from transfer_queue.codec.rows import BlockBytes, Copier, collected, row_places
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.schema import DENSE, OBJECTS, RAGGED


class BlockShare(NamedTuple):
    """`rows` of one block, which are there, and where in the result each of them comes."""

    block: BlockBytes
    rows: Ints
    positions: Ints


class LoneShare(NamedTuple):
    """Rows that were put alone, and where in the result each of them comes."""

    rows: LoneRows
    positions: Ints


class SpreadRows:
    """Every position of the result is in exactly one share."""

    def __init__(self, shares: Sequence[BlockShare], lone: LoneShare | None) -> None:
        self._shares = shares
        self._lone = lone
        self._count = sum(len(share.positions) for share in shares) + (0 if lone is None else len(lone.positions))

    def __len__(self) -> int:
        return self._count

    def plain(self, name: str) -> SpreadColumn | None:
        """The column, where it is plain: see the module."""
        columns = [share.block.layout.column(name) for share in self._shares]
        if any(column is None for column in columns):
            return None
        found = SpreadColumn(self, [column for column in columns if column is not None])
        return found if found.fill(self._lone, name) else None

    @property
    def shares(self) -> Sequence[BlockShare]:
        return self._shares


class SpreadColumn:
    """A plain column: row i has the shape `shapes[i]`."""

    def __init__(self, rows: SpreadRows, columns: Sequence[Column]) -> None:
        self._rows = rows
        self._columns = columns
        first = columns[0]
        rank = len(first.shape)
        kind = OBJECTS if first.kind == OBJECTS else DENSE
        self.template = ColumnTemplate(first.name, kind, first.dtype, first.itemsize, rank, -1, 1, first.weak)
        self.shapes = np.zeros((len(rows), rank), np.int64)
        self._sources = np.zeros(len(rows), np.int64)
        self._sizes = np.zeros(len(rows), np.int64)
        self._messages: list[memoryview] = []
        self._owners: list[object] = [share.block for share in rows.shares]

    def values(self, copier: Copier) -> Bytes:
        """The bytes of all rows, one after the other."""
        return collected(self._sources.tolist(), self._sizes.tolist(), self._owners, copier)

    def messages(self) -> list[memoryview]:
        """The data of each row of an objects column."""
        return self._messages

    def fill(self, lone: LoneShare | None, name: str) -> bool:
        """Find where each row lies. False where the column is not plain."""
        if not all(map(self._is_alike, self._columns)):
            return False
        alone = None
        if lone is not None:
            alone = lone.rows.plain(name)
            if alone is None or not self._is_alike_alone(alone.template):
                return False
        if self.template.kind == OBJECTS:
            self._messages = [memoryview(b"")] * len(self._rows)
            for share, column in zip(self._rows.shares, self._columns, strict=True):
                self._put_messages(share.positions, share.block.messages(column, share.rows))
            if lone is not None and alone is not None:
                self._put_messages(lone.positions, alone.messages())
            return True
        for share, column in zip(self._rows.shares, self._columns, strict=True):
            sources, lengths, step = row_places(share.block, column, share.rows)
            self._sources[share.positions], self._sizes[share.positions] = sources, lengths * step
            self.shapes[share.positions] = column.shape
            if column.shape:
                self.shapes[share.positions, 0] = lengths
        if lone is not None and alone is not None:
            self._sources[lone.positions], self._sizes[lone.positions] = alone.sources, alone.sizes
            self.shapes[lone.positions] = alone.shapes
            self._owners.append(lone.rows.memories)
        return True

    def _put_messages(self, positions: Ints, messages: Sequence[memoryview]) -> None:
        for position, message in zip(positions.tolist(), messages, strict=True):
            self._messages[position] = message

    def _is_alike(self, column: Column) -> bool:
        made = self.template
        if (column.dtype, column.itemsize, column.weak) != (made.dtype, made.itemsize, made.weak):
            return False
        if made.kind == OBJECTS:
            return column.kind == OBJECTS and len(column.parts) == 2
        is_flat = column.kind == DENSE or (column.kind == RAGGED and column.ragged == 0)
        return is_flat and len(column.shape) == made.num_dims

    def _is_alike_alone(self, one: ColumnTemplate) -> bool:
        made = self.template
        mine = (made.kind, made.dtype, made.itemsize, made.num_dims, made.weak)
        return mine == (one.kind, one.dtype, one.itemsize, one.num_dims, one.weak)
