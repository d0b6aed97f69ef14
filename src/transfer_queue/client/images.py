"""Blocks of other processes as memory of this one, of which only what is needed is there."""

from __future__ import annotations

from typing import NamedTuple

from transfer_queue.codec.layout import Layout
from transfer_queue.codec.needed import all_ranges, index_ranges, value_ranges
from transfer_queue.codec.rows import BlockBytes
from transfer_queue.errors import InvalidInput
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.storage.engines.sealed import Ranges, in_grains


class TooMuch(InvalidInput):
    """More lies elsewhere than a reader wants to have sent."""


def check_sent(nbytes: int, most: int | None) -> None:
    """`TooMuch` where that is more than is wanted at most (None: any number)."""
    if most is not None and nbytes > most:
        where = "on another host, or in the storage engine"
        raise TooMuch(f"{nbytes:,} bytes lie {where}; at most {most:,} are read for a look")


class Wanted(NamedTuple):
    """Rows (ascending, distinct) of some fields of a block. `most`: bytes that are to be read of it."""

    block: int
    nbytes: int
    layout: Layout
    rows: Ints
    fields: frozenset[str]
    key: str = ""  # under which it lies in the storage engine
    most: int | None = None


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
        self._check(ranges)
        return in_grains(ranges, self.wanted.nbytes)

    def rest(self) -> Ranges:
        """What was not known to be needed before the `first` was there."""
        if self._is_whole:
            return []
        block = BlockBytes(self.memory, self.wanted.layout, -1)
        ranges = list(value_ranges(block, self.wanted.rows, self.wanted.fields))
        self._check(ranges)
        return in_grains(ranges, self.wanted.nbytes)

    def _check(self, ranges: Ranges) -> None:
        check_sent(sum(stop - first for first, stop in ranges), self.wanted.most)
