"""Rows on lease: who holds them until when, and what becomes of them then.

A lease is a number and the rows that one fetch took for a task. While it lasts nobody else of the task gets them. It
ends row by row: acknowledged (consumed for good), given back or cleared; or as a whole, when its time is up or the last
session that holds it is gone, and then what was not acknowledged is offered again. From there on its number is refused
with `LeaseExpired`, so that a consumer that was away too long cannot acknowledge what somebody else is working on.

A lease all of whose rows have ended is remembered for a while: ranks that share a batch acknowledge it one after
the other, and a second acknowledgement does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from transfer_queue.controller.deadlines import NO_TIME, Deadlines
from transfer_queue.controller.readiness import NO_LEASES, Slots, Task
from transfer_queue.controller.recent import Happened, RecentEvents
from transfer_queue.controller.table import Table
from transfer_queue.controller.unreceived import LeaseGrant
from transfer_queue.errors import InvalidInput, LeaseExpired
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of

LeaseRequest: TypeAlias = "m.Ack | m.Renew | m.Release | m.Nack"
REQUESTS = (m.Ack, m.Renew, m.Release, m.Nack)
MAX_LEASE_S = 1e9
MAX_REASON = 1024  # characters, of which each row keeps a reference
REMEMBERED = 16_384
_NONE = np.empty(0, np.int64)


class FailedAttempt(NamedTuple):
    """Why rows that were tried came back, and how long it takes until they are offered again."""

    reason: str
    delay_s: float = 0.0
    is_refusal: bool = False  # their holder said so


EXPIRED, HOLDER_ENDED, UNTOLD = "the lease was over", "the holder's session ended", "refused"
UNTRIED = "given back"


class Lease:
    """`rows` are global indexes, unique for the life of the service, so a cleared row is never mistaken."""

    __slots__ = ("deadline", "given_back", "holders", "number", "partition", "rows", "task")

    def __init__(self, number: int, partition: str, task: str, rows: Slots, deadline: float) -> None:
        self.number = number
        self.partition = partition
        self.task = task
        self.rows = rows
        self.deadline = deadline
        self.holders: dict[bytes, int] = {}  # with the number of replies that made each one a holder
        self.given_back: set[int] = set()


class Leases:
    """All leases of a service. `offered(table, task name, slots)` is called when rows are free again that nobody tried,
    `came_back(table, task name, slots, attempt, now)` for those that somebody did; `rows_consumed(table, task)` when
    rows were consumed."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        offered: Callable[[Table, str, Slots], None],
        rows_consumed: Callable[[Table, Task], None],
        came_back: Callable[[Table, str, Slots, FailedAttempt, float], None],
        recent: RecentEvents,
    ) -> None:
        self.now = NO_TIME  # of the event being handled, or of the last one: what a standby repeats has it, too
        self._tables = tables
        self._offered = offered
        self._rows_consumed = rows_consumed
        self._came_back = came_back
        self._recent = recent
        self._leases: dict[int, Lease] = {}
        self._ended_ones: dict[int, Lease] = {}  # the latest of those without rows left
        self._held: dict[bytes, set[int]] = {}  # leases of each session
        self.deadlines = Deadlines(self._leases)
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._leases)

    def number_above(self, number: int) -> None:
        """Leases that begin from now on have higher numbers."""
        self._last_number = max(self._last_number, number)

    def take(self, table: Table, name: str, slots: Slots, fresh: Slots, holder: bytes, lease_s: float) -> int:
        """The number of the lease on `slots`, which the task `name` gets now: a new one for the `fresh` among them.

        Without fresh rows, of the lease that holds the first of them that is lent, renewed and held by `holder` as
        well; 0 when none is lent.
        """
        task = table.task(name)
        if not len(fresh):
            lent = task.lease[slots]
            lent = lent[lent > 0]
            if not len(lent):
                return 0
            lease = self._leases[int(lent[0])]
        else:
            self._last_number += 1
            lease = Lease(self._last_number, table.name, name, table.index[fresh], self.now + lease_s)
            self._leases[lease.number] = lease
            self.deadlines.add(lease.number)
            task.lend(fresh, lease.number)
        lease.deadline = max(lease.deadline, self.now + lease_s)
        lease.holders[holder] = lease.holders.get(holder, 0) + 1
        self._held.setdefault(holder, set()).add(lease.number)
        return lease.number

    def handle(self, message: LeaseRequest, session: bytes) -> m.Lent:
        """Raises `LeaseExpired` for a lease that is over, or for an ack of rows that were given back and are not to be
        left out."""
        if isinstance(message, m.Renew):
            return self._renew(message, session)
        lease, returned = self._live(message.lease), b""
        match message:
            case m.Ack(rows=rows):
                if message.but_returned:
                    returned = _returned(lease, rows)
                else:
                    self.check(lease.number, rows)
                self._end_rows(lease, rows, used=True)
            case m.Release(rows=rows):
                self._end_rows(lease, rows, used=False)
            case m.Nack(rows=rows, delay_s=delay_s, reason=reason):
                check_attempt(delay_s, reason)
                self._end_rows(lease, rows, used=False, attempt=FailedAttempt(reason or UNTOLD, delay_s, True))
        return m.Lent(message.rid, self._left(lease), returned)

    def check(self, number: int, rows: bytes | None) -> None:
        """`LeaseExpired` unless these rows of a lease can be acknowledged."""
        lease = self._live(number)
        if rows is not None and not lease.given_back.isdisjoint(indexes_of(rows).tolist()):
            raise LeaseExpired(f"lease {number}: some of the rows were given back")

    def _renew(self, message: m.Renew, session: bytes) -> m.Lent:
        check_lease(message.lease_s)
        numbers = [message.lease] if message.lease else list(self._held.get(session, ()))
        leases = [self._live(number) for number in numbers]
        for lease in leases:
            lease.deadline = max(lease.deadline, self.now + message.lease_s)
        return m.Lent(message.rid, sum(map(self._left, leases)))

    def _live(self, number: int) -> Lease:
        lease = self._ended_ones.get(number) or self._leases.get(number)
        if lease is None or (lease.deadline <= self.now and self._left(lease)):
            raise LeaseExpired(f"lease {number} is over: what it had not acknowledged is offered to others")
        return lease

    def _end_rows(self, lease: Lease, data: bytes | None, used: bool, attempt: FailedAttempt | None = None) -> None:
        rows = lease.rows if data is None else np.unique(indexes_of(data))
        table = self._tables.get(lease.partition)
        if table is not None and lease.task in table.tasks:
            task = table.tasks[lease.task]
            slots = table.slots_of(rows)
            held = task.take_back(slots[slots >= 0], lease.number, used)
            why = () if used else (UNTRIED if attempt is None else attempt.reason,)
            what, holder = "acknowledged" if used else "returned", next(iter(lease.holders), b"")
            self._recent.note(Happened(self.now, what, table.name, table.index[held], holder, lease.task, why))
            if not used:
                lease.given_back.update(table.index[held].tolist())
                if attempt is None:
                    self._offered(table, lease.task, held)
                else:
                    self._came_back(table, lease.task, held, attempt, self.now)
            self._rows_consumed(table, task)
        if lease.number in self._leases and not self._left(lease):
            self._drop(lease)

    def _left(self, lease: Lease) -> int:
        table = self._tables.get(lease.partition)
        task = table.tasks.get(lease.task) if table is not None else None
        return task.lent.get(lease.number, 0) if task is not None else 0

    def listed(self, holder: bytes | None = None) -> list[m.LeaseOverview]:
        """All of them, or those of one session, as they are shown; `left_s` is when they end."""
        numbers = self._leases if holder is None else sorted(self._held.get(holder, ()))
        return [
            m.LeaseOverview(
                one.number, one.partition, one.task, self._left(one), [], sorted(one.holders), one.deadline
            )
            for one in map(self._leases.__getitem__, numbers)
        ]  # fmt: skip

    def lent_to(self, holder: bytes, task: Task) -> int:
        """Rows of a task that are lent to one session."""
        return sum(task.lent.get(number, 0) for number in self._held.get(holder, ()))

    def undo(self, grant: LeaseGrant) -> None:
        """A reply that made somebody a holder of a lease reached nobody."""
        lease = self._leases.get(grant.number)
        if lease is None or grant.holder not in lease.holders:
            return
        lease.holders[grant.holder] -= 1
        if lease.holders[grant.holder]:
            return
        if len(lease.holders) == 1:
            self._end(lease)
        else:
            del lease.holders[grant.holder]
            self._let_go(lease.number, grant.holder)

    def revoke(self, task: Task) -> None:
        """The task's consumption is about to be reset: its leases are over. The rows are the caller's to offer."""
        for number in task.lent.keys() - NO_LEASES:
            self._drop(self._leases[number])

    def clear(self) -> None:
        """All leases are over. The rows are the caller's to offer."""
        for everything in (self._leases, self._ended_ones, self._held, self.deadlines):
            everything.clear()

    def end_session(self, session: bytes, attempt: FailedAttempt | None) -> None:
        """What only this session holds is offered again; None: nobody tried it."""
        for number in sorted(self._held.pop(session, ())):
            lease = self._leases[number]
            del lease.holders[session]
            if not lease.holders:
                self._end(lease, attempt)

    def expire(self) -> None:
        """End the leases whose time is up."""
        while (first := self.deadlines.first()) is not None and first[0] <= self.now:
            self._end(self._leases[first[1]], FailedAttempt(EXPIRED))

    def _end(self, lease: Lease, attempt: FailedAttempt | None = None) -> None:
        self._drop(lease)
        if self._left(lease):
            self._end_rows(lease, None, used=False, attempt=attempt)

    def _drop(self, lease: Lease) -> None:
        """The lease is over; it is remembered unless rows are left that it did not acknowledge."""
        del self._leases[lease.number]
        if not self._left(lease):
            lease.rows = _NONE
            self._ended_ones[lease.number] = lease
            if len(self._ended_ones) > REMEMBERED:
                del self._ended_ones[next(iter(self._ended_ones))]
        for holder in lease.holders:
            self._let_go(lease.number, holder)

    def _let_go(self, number: int, holder: bytes) -> None:
        """A session holds this lease no more."""
        held = self._held.get(holder)
        if held is not None:
            held.discard(number)
            if not held:
                del self._held[holder]

    def check_invariants(self) -> None:
        """Tables, leases and holders agree; tests call this after each event."""
        lent = {number for table in self._tables.values() for task in table.tasks.values() for number in task.lent}
        assert lent - NO_LEASES <= self._leases.keys(), "lent rows have a live lease"
        for number, lease in self._leases.items():
            assert lease.number == number
            assert lease.holders
            assert all(number in self._held[holder] for holder in lease.holders)
        assert {n for held in self._held.values() for n in held} <= self._leases.keys()
        assert all(self._held.values())
        assert not self._ended_ones.keys() & self._leases.keys()


def _returned(lease: Lease, rows: bytes | None) -> bytes:
    """Those of these rows of a lease, None for all, that were given back."""
    given_back = np.fromiter(sorted(lease.given_back), np.int64)
    return (given_back if rows is None else np.intersect1d(indexes_of(rows), given_back)).tobytes()


def check_lease(lease_s: float) -> None:
    """`InvalidInput` unless `lease_s` is a number of seconds, 0 or more."""
    check_seconds("lease_s", lease_s)


def check_attempt(delay_s: float, reason: str) -> None:
    """`InvalidInput` unless `delay_s` is a number of seconds, 0 or more, and the reason is short."""
    check_seconds("delay_s", delay_s)
    if len(reason) > MAX_REASON:
        raise InvalidInput(f"a reason of {len(reason)} characters, at most {MAX_REASON}")


def check_seconds(name: str, value: float) -> None:
    if math.isnan(value) or not 0 <= value < MAX_LEASE_S:
        raise InvalidInput(f"{name} {value}: expected seconds, 0 or more")
