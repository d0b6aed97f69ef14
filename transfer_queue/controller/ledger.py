"""How many live cells every block holds, so that a block is recycled exactly when its last cell is gone."""

from __future__ import annotations

from collections.abc import Iterable


class Entry:
    """One block: its live and original cells, and where its locations are written down."""

    __slots__ = ("group", "live", "partition", "total")

    def __init__(self, cells: int, partition: str, group: int) -> None:
        self.live = self.total = cells
        self.partition = partition
        self.group = group


class Ledger:
    """Live cells by block. Blocks that reach zero go to `freed`, thinly used ones to `thin`; the shell empties both."""

    def __init__(self, thin_fraction: float = 0.25) -> None:
        self.entries: dict[int, Entry] = {}
        self.freed: list[int] = []
        self.thin: set[int] = set()
        self._thin_fraction = thin_fraction

    def open(self, block: int, cells: int, partition: str, group: int) -> None:
        self.entries[block] = Entry(cells, partition, group)

    def replace(self, entries: dict[int, Entry]) -> None:
        """Only `entries` count from now on; the blocks held so far are freed."""
        self.freed.extend(self.entries)
        self.thin.clear()
        self.entries = entries

    def release(self, released: Iterable[tuple[int, int]]) -> None:
        """Take (block, number of cells) pairs off the books."""
        for block, cells in released:
            entry = self.entries[block]
            entry.live -= cells
            if entry.live == 0:
                del self.entries[block]
                self.thin.discard(block)
                self.freed.append(block)
            elif entry.live <= entry.total * self._thin_fraction:
                self.thin.add(block)
