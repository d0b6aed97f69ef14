"""How many live cells every block holds, so that a block is recycled exactly when its last cell is gone."""

from __future__ import annotations

from collections.abc import Iterable

from transfer_queue.controller.table import MAX_INDEX, Table


class BlockEntry:
    """One block: its live and original cells, and where its locations are written down. Its rows have indexes from
    `first` to `last`."""

    __slots__ = ("first", "group", "last", "live", "table", "total")

    def __init__(self, cells: int, table: Table, group: int, first: int = 0, last: int = MAX_INDEX) -> None:
        self.live = self.total = cells
        self.table = table
        self.group = group
        self.first = first
        self.last = last


class BlockIndex:
    """Live cells by block. Blocks that reach zero go to `freed`, sparse ones to `sparse`; the server empties both.

    `entries` also has the blocks of partitions that are gone, until `ClearedPartitions` frees them: their table lists
    them no longer.
    """

    def __init__(self, sparse_fraction: float = 0.25) -> None:
        self.entries: dict[int, BlockEntry] = {}
        self.freed: list[int] = []
        self.sparse: set[int] = set()
        self._sparse_fraction = sparse_fraction

    def find(self, block: int) -> BlockEntry | None:
        """The entry of a block with live cells; None when no row refers to it."""
        entry = self.entries.get(block)
        return entry if entry is not None and block in entry.table.blocks else None

    def open(self, block: int, cells: int, table: Table, group: int, first: int = 0, last: int = MAX_INDEX) -> None:
        self.entries[block] = BlockEntry(cells, table, group, first, last)
        table.blocks.add(block)

    def share(self, block: int, cells: int, first: int, last: int) -> None:
        """More cells, of rows with these indexes and those between, are what a block with live cells holds already."""
        entry = self.entries[block]
        entry.live += cells
        entry.total += cells
        entry.first, entry.last = min(entry.first, first), max(entry.last, last)

    def lose(self, blocks: Iterable[int]) -> dict[str, int]:
        """Their bytes are gone: their cells are absent again. How many rows of each partition had some."""
        rows: dict[str, int] = {}
        for block in blocks:
            entry = self.find(block)
            if entry is not None:
                before = len(entry.table.lost)
                self.release(entry.table.lose(entry.group, block, entry.first, entry.last))
                rows[entry.table.name] = rows.get(entry.table.name, 0) + len(entry.table.lost) - before
        return rows

    def replace(self, entries: dict[int, BlockEntry]) -> None:
        """Only `entries` count from now on."""
        self.sparse = set()
        self.entries = entries

    def release(self, released: Iterable[tuple[int, int]]) -> None:
        """Take (block, number of cells) pairs off the books."""
        for block, cells in released:
            entry = self.entries[block]
            entry.live -= cells
            if entry.live == 0:
                del self.entries[block]
                entry.table.blocks.discard(block)
                self.sparse.discard(block)
                self.freed.append(block)
            elif entry.live <= entry.total * self._sparse_fraction:
                self.sparse.add(block)

    def check_invariants(self, tables: Iterable[Table], gone: set[int]) -> None:
        """`gone` are the blocks that are yet to be freed."""
        live: dict[int, int] = {}
        for table in tables:
            cells: dict[int, int] = {}
            for block, number in table.release(table.live_slots(), range(len(table.fields))):
                cells[block] = cells.get(block, 0) + number
            assert cells.keys() == table.blocks
            assert all(self.entries[block].table is table for block in cells)
            live |= cells
        assert live == {block: entry.live for block, entry in self.entries.items() if block not in gone}
        assert gone.isdisjoint([*self.freed, *live])
