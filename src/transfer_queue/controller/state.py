"""What a controller knows, as one object: whoever saves or loads it needs nothing else of a controller."""

from __future__ import annotations

import secrets
from collections.abc import Hashable

from transfer_queue.controller.block_index import BlockIndex
from transfer_queue.controller.cleared_partitions import ClearedPartitions
from transfer_queue.controller.fetch import Fetching
from transfer_queue.controller.groups import GroupPools
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.lineage import Lineage
from transfer_queue.controller.locks import LockNumbers
from transfer_queue.controller.lone_blocks import LoneBlocks
from transfer_queue.controller.recent import RecentEvents
from transfer_queue.controller.series import SeriesBook
from transfer_queue.controller.table import Table
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.wire import messages as m
from transfer_queue.wire.lives import ID_NBYTES


class ControllerState:
    """Everything that outlives a request. The controller changes it; a loaded checkpoint replaces what is in it.

    `outbox`: answers to send. `payloads`: bytes that came or go with a request, by ticket. `captures`: sessions and
    their requests for a snapshot whose blocks are yet to be pinned. `max_rows`: over all partitions (None: no bound).
    The next new row gets a number of at least `next_index`. `units_away`: storage units that cannot be read now, which
    a checkpoint says nothing of. `ledger`: where it is written down what lasts (None:
    nowhere). `asked_at`: when somebody asked last, even if only to look.
    """

    def __init__(self, sampler: BaseSampler, max_rows: int | None, ledger: Ledger | None = None) -> None:
        self.tables: dict[str, Table] = {}
        self.ledger = ledger
        if ledger is not None:
            ledger.tables = self.tables
        self.outbox: list[tuple[Hashable, m.Reply]] = []
        self.payloads: dict[Hashable, memoryview] = {}
        self.captures: set[tuple[bytes, int]] = set()
        self.block_index = BlockIndex()
        self.units_away: set[int] = set()
        self.lone_blocks = LoneBlocks(self.block_index)
        self.cleared_partitions = ClearedPartitions(self.block_index.freed)
        self.lineage = Lineage(secrets.token_bytes(ID_NBYTES))
        self.recent = RecentEvents()
        self.fetching = Fetching(sampler, self.outbox, self.tables, ledger, self.recent)
        self.staleness = self.fetching.staleness
        self.groups = GroupPools(
            self.tables, self.outbox, self.fetching.unreceived, lambda: self.staleness.admissions.versions,
            lambda: self.fetching.leases.now, self.recent,
        )  # fmt: skip
        self.lock_numbers = LockNumbers(ledger)
        self.asked_at = 0.0
        self.series = SeriesBook(self.outbox, self.tables)
        self.max_rows = max_rows
        self.next_index = 0

    def end_captures(self, session: bytes, request: int = 0) -> None:
        """A session has pinned the blocks of one of its snapshots; of all of them where no request is named."""
        self.captures = {one for one in self.captures if one[0] != session or (request and one[1] != request)}

    @property
    def sampler(self) -> BaseSampler:
        return self.fetching.sampler

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self.tables.values())


class RowQuotaExceeded(Exception):
    """There is no room for new rows now (`never`: nor will there be)."""

    def __init__(self, text: str, never: bool) -> None:
        super().__init__(text)
        self.never = never
