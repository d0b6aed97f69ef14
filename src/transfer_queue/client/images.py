"""Blocks of other processes as memory of this one, of which only what is needed is there."""

from __future__ import annotations

from typing import NamedTuple

from transfer_queue.codec.layout import Layout
from transfer_queue.codec.needed import all_ranges, index_ranges, value_ranges
from transfer_queue.codec.rows import BlockBytes
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.storage.engines.sealed import Ranges, in_grains


class Wanted(NamedTuple):
    """Rows (ascending, distinct) of some fields of a block."""

    block: int
    nbytes: int
    layout: Layout
    rows: Ints
    fields: frozenset[str]
    key: str = ""  # under which it lies in the storage engine


class Image:
    """`memory` as large as the block, or larger, of which more and more is there. What is read comes in grains: a few
    long ranges take less time than many short ones."""

    def __init__(self, wanted: Wanted, memory: Bytes) -> None:
        self.wanted = wanted
        self.memory = memory
        self._is_whole = len(wanted.rows) == wanted.layout.rows

    def first(self) -> Ranges:
        """Everything, where all rows are wanted; else what says where they lie."""
        layout, fields = self.wanted.layout, self.wanted.fields
        ranges = all_ranges(layout, fields) if self._is_whole else index_ranges(layout, fields)
        return in_grains(ranges, self.wanted.nbytes)

    def rest(self) -> Ranges:
        """What was not known to be needed before the `first` was there."""
        if self._is_whole:
            return []
        block = BlockBytes(self.memory, self.wanted.layout, -1)
        return in_grains(value_ranges(block, self.wanted.rows, self.wanted.fields), self.wanted.nbytes)
