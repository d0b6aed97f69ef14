"""What partitions that are gone leave behind: blocks to free, and the memory of their rows.

A partition is gone at once, however large; what is left of it is taken apart in slices, between requests.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from transfer_queue.controller.block_index import BlockEntry
from transfer_queue.controller.changes import ChangeLog
from transfer_queue.controller.content_index import ContentIndex
from transfer_queue.controller.readiness import ReadyView, Task
from transfer_queue.controller.row_versions import RowVersions
from transfer_queue.controller.table import ColumnGroup, Table

# Work is counted in rows, of which each takes 0.1 to 1 us.
SLICE = 512
AT_ONCE = 32 * SLICE
OF_BLOCK = 16  # the work to free one block, here and in its unit
PAGE_SHIFT = 12  # to give back a page of memory is as much work as one row
OBJECTS = frozenset({RowVersions, ChangeLog, ContentIndex, ColumnGroup, Task, ReadyView})
CONTAINERS = frozenset({dict, list, set, deque, np.ndarray})


class ClearedPartitions:
    """`freed` gets the blocks. `slice` does a bounded piece of the work and says whether more is left. What is less
    work than `at_once` is not put off."""

    def __init__(self, freed: list[int]) -> None:
        self.freed = freed
        self.at_once = AT_ONCE
        self._blocks: deque[tuple[set[int], dict[int, BlockEntry]]] = deque()
        self._parts: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._blocks or self._parts)

    def add(self, table: Table, entries: dict[int, BlockEntry]) -> None:
        """Take everything out of a table, whose blocks are in `entries`. A small one is freed before this returns."""
        work = table.size + OF_BLOCK * len(table.blocks)
        held = table.take_all()
        self._blocks.append((held.pop("blocks"), entries))
        del held["metadata"]  # replies that may be sent again refer to it
        self._parts.append(held)
        if work <= self.at_once:
            while self.slice():
                pass

    def hold(self, part: dict[Any, Any]) -> None:
        """Free the memory of something that nobody else refers to."""
        self._parts.append(part)

    def blocks(self) -> set[int]:
        """The blocks that are yet to be freed."""
        return {block for blocks, _ in self._blocks for block in blocks}

    def slice(self) -> bool:
        left = SLICE
        while self._blocks and left > 0:
            left -= self._free_blocks(left)
        while self._parts and left > 0:
            left -= self._take_apart(left)
        return bool(self)

    def _free_blocks(self, work: int) -> int:
        blocks, entries = self._blocks[0]
        count = min(len(blocks), 1 + work // OF_BLOCK)
        for _ in range(count):
            block = blocks.pop()
            del entries[block]
            self.freed.append(block)
        if not blocks:
            self._blocks.popleft()
        return 1 + OF_BLOCK * count

    def _take_apart(self, work: int) -> int:
        """Free up to `work` entries of one part; parts found in it come next."""
        part = self._parts[-1]
        if isinstance(part, np.ndarray):
            self._parts.pop()
            return 1 + (part.nbytes >> PAGE_SHIFT)
        count = min(len(part), work)
        if isinstance(part, list):
            found = part[len(part) - count :]
            del part[len(part) - count :]
        elif isinstance(part, dict):
            found = [part.popitem()[1] for _ in range(count)]
        else:
            found = [part.pop() for _ in range(count)]
        if not part:
            self._parts.pop()
        if isinstance(part, dict):
            self._parts += [one for one in found if type(one) in CONTAINERS and len(one)]
        self._parts += [vars(one) for one in found if type(one) in OBJECTS]
        return 1 + count
