"""Blocks of one row each, in the order of their puts: those that stay are worth being gathered into larger ones.

Whoever gathers them goes through a `round` every now and then. A block is looked at in the second round after its put,
because most rows that are put and cleared at once are gone by then. It waits there for others like it: for `MAX_ROWS`,
or until a round brought no more of them, or for `MAX_ROUNDS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from transfer_queue.controller.block_index import BlockIndex
from transfer_queue.controller.table import Table
from transfer_queue.memory.bytes import Ints
from transfer_queue.wire.messages import UNIT_SHIFT

MIN_ROWS = 64
MAX_ROWS = 1024
MAX_ROUNDS = 10
MAX_NOTED = 1 << 17  # older ones stay as they are
LOOKS = 256  # without a pause

Place = tuple[Table, int, int]  # and group, and unit


class LoneBatch(NamedTuple):
    """Blocks of one unit that hold the same fields: `blocks[i]` those of the row with index `rows[i]`, which ascend."""

    blocks: Ints
    rows: Ints


class Noted(NamedTuple):
    table: Table
    group: int
    row: int
    block: int


class Candidates:
    """(row, block) of one place that wait for others, since how many rounds, and whether this one brought some."""

    __slots__ = ("found", "grew", "rounds")

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []
        self.rounds = 0
        self.grew = True

    def are_due(self) -> bool:
        return len(self.found) >= MIN_ROWS and (not self.grew or self.rounds >= MAX_ROUNDS)


class LoneBlocks:
    """`is_due`: another round may find some."""

    def __init__(self, block_index: BlockIndex) -> None:
        self._block_index = block_index
        self._noted: deque[Noted] = deque(maxlen=MAX_NOTED)
        self._ripe = 0  # how many, from the oldest on, were noted before the last round began
        self._waiting: dict[Place, Candidates] = {}
        self.is_due = False

    def note(self, table: Table, group: int, row: int, block: int) -> None:
        """`block` holds the fields of `group` of one row."""
        self._noted.append(Noted(table, group, row, block))
        self.is_due = True

    def round(self) -> Iterator[LoneBatch | None]:
        """What is worth being gathered now. None: others may go first; whatever they do meanwhile counts."""
        ripe, self._ripe = self._ripe, len(self._noted) - self._ripe
        for number in range(ripe):
            yield from self._look(self._noted.popleft())
            if number % LOOKS == 0:
                yield None
        for place, waiting in list(self._waiting.items()):
            if waiting.are_due():
                yield self._batch(place)
            waiting.grew = False
            waiting.rounds += 1
        self._forget_the_gone()

    def _look(self, noted: Noted) -> Iterator[LoneBatch | None]:
        table, group, row, block = noted
        if self._is_whole(table, block):
            place = (table, group, block >> UNIT_SHIFT)
            waiting = self._waiting.setdefault(place, Candidates())
            waiting.found.append((row, block))
            waiting.grew = True
            if len(waiting.found) == MAX_ROWS:
                yield self._batch(place)

    def _batch(self, place: Place) -> LoneBatch | None:
        """All that wait there, unless too few of them are left."""
        found = self._waiting.pop(place).found
        whole = sorted(one for one in found if self._is_whole(place[0], one[1]))
        if len(whole) < MIN_ROWS:
            return None
        rows, blocks = np.array(whole, np.int64).T
        return LoneBatch(np.ascontiguousarray(blocks), np.ascontiguousarray(rows))

    def _forget_the_gone(self) -> None:
        """Places of partitions that are gone, or empty."""
        self._waiting = {place: waiting for place, waiting in self._waiting.items() if place[0].blocks}
        enough = any(len(waiting.found) >= MIN_ROWS for waiting in self._waiting.values())
        self.is_due = enough or bool(self._noted)

    def _is_whole(self, table: Table, block: int) -> bool:
        entry = self._block_index.find(block)
        return entry is not None and entry.table is table and entry.live == entry.total
