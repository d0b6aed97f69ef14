"""How old rows may be when a task gets them: ages, limits, and taking rows that are too old out of a task's way.

The age of a row is how many versions of the weights were announced after the oldest one that made it, which its tags
name. A row that is too old for a task counts as used by it from that moment, as if it had been handed out. It stays in
its table, for others to find. An announcement costs the rows that become too old by it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.controller.admission import Admissions
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.readiness import TOO_OLD, Slots, Task
from transfer_queue.controller.row_versions import Key
from transfer_queue.controller.table import Table
from transfer_queue.controller.unreceived import Unreceived
from transfer_queue.controller.weight_versions import FOREIGN, REMEMBERED, UNKNOWN, UNTAGGED, WeightVersions
from transfer_queue.errors import InvalidInput
from transfer_queue.sampler.base import SETTINGS
from transfer_queue.wait_queue import Waiter
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import unpack_arrays
from transfer_queue.wire.messages.staleness import Policy

VERSION, EPOCH = "weight_version", "weight_epoch"  # tags
LIMIT, BARE = SETTINGS[:2]  # in a sampling_config
REQUESTS = (m.Admit, m.GiveBack)
FORGED: Key = ("\0", 0)  # an epoch that nobody can announce
MIN_LISTED = 4096


class Limit(NamedTuple):
    """What one task accepts; `asked` by one of its requests, or the service's policy."""

    max_age: int | None
    refuses: bool
    asked: bool

    @property
    def judges(self) -> bool:
        return self.refuses or self.max_age is not None


class Staleness:
    """`rows_consumed(table, task)` is called when rows count as used."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        outbox: list[tuple[Hashable, m.Reply]],
        rows_consumed: Callable[[Table, Task], None],
        unreceived: Unreceived,
        ledger: Ledger | None = None,
    ) -> None:
        self.policy = Policy()
        self.admissions = Admissions(outbox, unreceived, ledger)
        self._num_stale: dict[str, int] = {}  # by task, of partitions that are gone
        self._tables = tables
        self._rows_consumed = rows_consumed

    def handle(self, message: m.Admit | m.GiveBack, ticket: Hashable, session: bytes, now: float) -> Any:
        """The answer, or None when it has to wait."""
        match message:
            case m.GiveBack(task=task, count=count):
                if count < 1:
                    raise InvalidInput(f"{count} rows to give back")
                self.admissions.give_back(task, count)
                return m.Done(message.rid)
        if message.max_age is None:
            message.max_age = self.policy.max_age
        if message.rows_per_version is None:
            message.rows_per_version = self.policy.rows_per_version
        return self.admissions.admit(message, Waiter(ticket, session, message, now + message.timeout_s, now))

    def announce(self, message: m.Announce) -> m.Reply:
        """Raises `InvalidInput`, and as `WeightVersions.announce`."""
        if message.epoch == FORGED[0]:
            raise InvalidInput(f"epoch {message.epoch!r}")
        if self.admissions.versions.announce(message.epoch, message.version):
            self._announced()
        return m.Counted(message.rid, self.admissions.versions.count)

    @property
    def num_stale(self) -> dict[str, int]:
        """How many rows became too old, by task; of partitions that are gone, too."""
        found = dict(self._num_stale)
        for table in self._tables.values():
            _count_stale(found, table)
        return found

    def closed(self, table: Table) -> None:
        """A partition is gone."""
        _count_stale(self._num_stale, table)

    def statistics(self) -> dict[str, Any]:
        """What was announced, and how many rows are too old."""
        versions = self.admissions.versions
        return {
            "weight_epoch": versions.epoch,
            "weight_version": versions.newest,
            "weight_announcements": versions.count,
            "stale_rows": sum(self.num_stale.values()),
        }

    # rows

    def tagged(self, table: Table, slots: Slots) -> None:
        """The tags of these rows changed."""
        keys = [_key(table.tags[slot]) for slot in slots.tolist()]
        if any(key is not None for key in keys) or bool((table.row_versions.born[slots] != UNTAGGED).any()):
            table.row_versions.set(slots, table.index[slots], keys, self.admissions.versions)
            if table.row_versions.num_listed > 3 * table.num_alive + MIN_LISTED:
                self._relist(table)
            for name, task in list(table.tasks.items()):
                if task.limit is not None and task.limit.judges:
                    self._retire(table, name, slots[self._stale(table, task, slots)])

    def written(self, table: Table, slots: Slots, touched: set[str]) -> None:
        """Fields were written: tasks that refuse rows without tags are rid of those that are ready now."""
        for name, task in list(table.tasks.items()):
            if task.limit is not None and task.limit.refuses:
                views = [view for view in task.views.values() if not touched.isdisjoint(view.fields)]
                self._retire(table, name, self._bare(table, slots, [view.fields for view in views]))

    def review(self, table: Table, name: str) -> None:
        """Judge all rows of a table for one task, which costs their number: its limit, or what it used, changed."""
        task = table.tasks[name]
        if task.limit is None or not task.limit.judges:
            return
        live = table.live_slots()
        table.row_versions.index(live, table.index[live])
        self._retire(table, name, live[self._stale(table, task, live)])
        if task.limit.refuses:
            self._retire(table, name, self._bare(table, live, list(task.views)))

    def freed(self, table: Table, name: str, slots: Slots) -> None:
        """Rows that were lent are about to be offered again."""
        task = table.tasks[name]
        if task.limit is not None and task.limit.judges:
            self._retire(table, name, slots[self._stale(table, task, slots)])

    # limits

    def govern(self, table: Table, name: str, asked: Mapping[str, Any]) -> None:
        """Hold a task to what a request asks for: of those that ask, the strictest counts; else the policy."""
        task = table.task(name)
        before = task.limit
        if LIMIT in asked or BARE in asked:
            age = asked.get(LIMIT, self.policy.max_age)
            new = Limit(age, asked.get(BARE, self.policy.untagged) == "refuse", True)
            if before is not None and before.asked:
                ages = [age for age in (before.max_age, new.max_age) if age is not None]
                new = Limit(min(ages, default=None), before.refuses or new.refuses, True)
        elif before is None:
            new = Limit(self.policy.max_age, self.policy.untagged == "refuse", False)
        else:
            return
        if new != before:
            task.limit = new
            self.review(table, name)

    def restore(self, table: Table, slots: Slots, versions: WeightVersions) -> None:
        """Enter new rows of a table that nobody uses yet, as what their tags say where `versions` were announced."""
        keys = [_key(table.tags[slot]) for slot in slots.tolist()]
        if any(key is not None for key in keys):
            table.row_versions.set(slots, table.index[slots], keys, versions)

    def check_invariants(self) -> None:
        """Rows are known as what their tags say, and none that is too old is offered; tests call this."""
        for table in self._tables.values():
            live = table.live_slots()
            keys = [_key(table.tags[slot]) for slot in live.tolist()]
            places = [UNTAGGED if key is None else self.admissions.versions.place(*key) for key in keys]
            assert table.row_versions.born[live].tolist() == places
            for task in table.tasks.values():
                assert not self._stale(table, task, task.offered(live)).any()

    # steps

    def _announced(self) -> None:
        count = self.admissions.versions.count
        for table in list(self._tables.values()):
            landed = _known(table, table.row_versions.landed(self.admissions.versions))
            if len(landed):
                self.tagged(table, landed)
            ages = [0]
            for name, task in list(table.tasks.items()):
                if task.limit is not None and task.limit.max_age is not None:
                    ages.append(task.limit.max_age)
                    slots = _known(table, table.row_versions.of(count - task.limit.max_age - 1))
                    self._retire(table, name, slots[self._stale(table, task, slots)])
            table.row_versions.drop(count - max(ages) - 1)
        self.admissions.serve()

    def _stale(self, table: Table, task: Task, slots: Slots) -> Any:
        """Which of `slots` say that they are too old."""
        born = table.row_versions.born[slots]
        if task.limit is None or task.limit.max_age is None:
            return np.zeros(len(slots), np.bool_)
        return (
            (born == UNKNOWN)
            | (born == FOREIGN)
            | ((born > 0) & (born < self.admissions.versions.count - task.limit.max_age))
        )

    def _relist(self, table: Table) -> None:
        live = table.live_slots()
        table.row_versions.unlist()
        keys = [_key(table.tags[slot]) for slot in live.tolist()]
        table.row_versions.set(live, table.index[live], keys, self.admissions.versions)

    def _bare(self, table: Table, slots: Slots, views: Sequence[tuple[str, ...]]) -> Slots:
        """Those of `slots` that say nothing and are ready in some view."""
        bare = slots[table.row_versions.born[slots] == UNTAGGED]
        ready = np.zeros(len(bare), np.bool_)
        for fields in views:
            of_view = table.written(bare, fields)
            if of_view is not None:
                ready |= of_view
        return bare[ready]

    def _retire(self, table: Table, name: str, slots: Slots) -> None:
        """Of these rows, the ones that nobody works on count as used by the task."""
        task = table.tasks[name]
        gone = task.offered(slots)
        if not len(gone):
            return
        task.consume(gone)
        task.note_fate(gone, TOO_OLD)
        self.admissions.give_back(name, task.spend(gone))
        self._rows_consumed(table, task)


def _count_stale(found: dict[str, int], table: Table) -> None:
    for name, task in table.tasks.items():
        if task.num_stale:
            found[name] = found.get(name, 0) + task.num_stale


def _known(table: Table, rows: Slots) -> Slots:
    slots = table.slots_of(rows)
    return slots[slots >= 0]


def _key(tags: Mapping[str, Any] | None) -> Key | None:
    """The oldest (epoch, version) of a row, None when it does not say."""
    if not tags or VERSION not in tags:
        return None
    version, epoch = tags[VERSION], tags.get(EPOCH, "")
    if type(version) is not int or type(epoch) is not str:
        return FORGED
    return (epoch, version)


def check_limit(asked: Mapping[str, Any]) -> None:
    """`InvalidInput` for what cannot be a limit."""
    age = asked.get(LIMIT)
    if age is not None and (type(age) is not int or not 0 <= age < REMEMBERED):
        raise InvalidInput(f"{LIMIT} {age!r}: expected a number of versions from 0 to {REMEMBERED - 1}, or None")
    if asked.get(BARE, "accept") not in ("accept", "refuse"):
        raise InvalidInput(f'{BARE} {asked[BARE]!r}: expected "accept" or "refuse"')


def for_sampler(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A sampling_config without what is not the sampler's, and with its arrays. Raises `InvalidInput` for bad ones."""
    return {name: unpack_arrays(value) for name, value in asked.items() if name not in SETTINGS}
