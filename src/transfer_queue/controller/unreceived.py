"""What requests took whose askers have not said yet that they have it: until then it can be taken back.

An answer can be lost after its request had its effect: the call was cancelled or ran out of time, the connection was
cut, the process was killed. A client confirms what it received with one short message (`wire.messages.Received`). What
was not confirmed is undone when its request is cancelled or its session ends. What was confirmed stays, unless its
asker says that it never came to use it: an interrupt may strike right after the confirmation was sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.table import Table
from transfer_queue.wire.messages import Admitted

MAX_OPEN = 4096  # of one session; the oldest count as received: their asker does not confirm
MAX_RECEIVED = 4  # of one session, that a cancellation right after the confirmation may still undo


class ConsumedGrant:
    """Rows (global indexes) that a plain fetch consumed for a task, and `askers`: the fetches whose answers have them,
    as ranks share a batch. They are given back when none of these fetches was received."""

    __slots__ = ("askers", "is_received", "rows", "table", "task")

    def __init__(self, table: Table, task: str, rows: Slots) -> None:
        self.table = table
        self.task = task
        self.rows = rows
        self.askers = 1
        self.is_received = False

    def keep(self) -> None:
        """They stay consumed."""
        self.rows = self.rows[:0]


class InsertGrant:
    """New rows (global indexes) that nobody has written to: none of `fields`, or nothing at all without."""

    __slots__ = ("fields", "rows", "table")

    def __init__(self, table: Table, rows: Slots, fields: Sequence[str] = ()) -> None:
        self.table = table
        self.rows = rows
        self.fields = fields

    def unwritten(self) -> Slots:
        """Those that are there, and are still so."""
        table = self.table
        slots = table.slots_of(self.rows)
        slots = slots[slots >= 0]
        names = list(table.fields)
        places = [names.index(name) for name in self.fields or names if name in table.fields]
        return slots[(table.cells[places][:, slots] == 0).all(axis=0)]


class LeaseGrant(NamedTuple):
    """A lease, of which `holder` became one that holds it."""

    number: int
    holder: bytes


class LockGrant(int):
    """The number of a lock."""


class GroupGrant:
    """What a request got of the groups of a partition: tickets, attempts (group, slot, number), the right to open some
    in place of others, or a lease."""

    __slots__ = ("attempts", "lease", "partition", "refills", "tickets")

    def __init__(
        self,
        partition: str,
        tickets: Sequence[int] = (),
        attempts: Sequence[tuple[str, int, int]] = (),
        refills: int = 0,
        lease: int = 0,
    ) -> None:
        self.partition = partition
        self.tickets = tickets
        self.attempts = attempts
        self.refills = refills
        self.lease = lease


Grant: TypeAlias = "ConsumedGrant | InsertGrant | LeaseGrant | LockGrant | GroupGrant | Admitted"


class Unreceived:
    """Grants by the session and the request that they were made to. It keeps the books; whoever takes a grant out
    undoes it."""

    def __init__(self) -> None:
        self._by_session: dict[bytes, dict[int, Grant]] = {}
        self._received: dict[bytes, dict[int, Grant]] = {}

    def add(self, session: bytes, rid: int, grant: Grant) -> None:
        held = self._by_session.setdefault(session, {})
        held[rid] = grant
        if len(held) > MAX_OPEN:
            self.received(session, next(iter(held)))

    def received(self, session: bytes, rid: int) -> None:
        """The asker has it: the end of its session does not undo it any more, nor what others share of it."""
        grant = _pop(self._by_session, session, rid)
        if grant is None:
            return
        if isinstance(grant, ConsumedGrant):
            grant.is_received = True
            if grant.askers > 1:
                grant.keep()
                return
        lately = self._received.setdefault(session, {})
        lately[rid] = grant
        if len(lately) > MAX_RECEIVED:
            del lately[next(iter(lately))]

    def take(self, session: bytes, rid: int) -> Grant | None:
        """The grant to undo, if its asker can have made nothing of it yet."""
        grant = _pop(self._by_session, session, rid)
        return grant if grant is not None else _pop(self._received, session, rid)

    def take_all(self, session: bytes) -> list[Grant]:
        """All open grants of a session that has ended."""
        self._received.pop(session, None)
        return list(self._by_session.pop(session, {}).values())

    def clear(self) -> None:
        """The rows of all grants are gone."""
        self._by_session.clear()
        self._received.clear()

    def void(self, table: Table, task: str) -> None:
        """The task's consumption starts over: nothing of it is to be given back."""
        for grant in self._consumed(table, task):
            grant.keep()

    def sharing(self, table: Table, task: str, slots: Slots) -> ConsumedGrant | None:
        """The grant that one of these rows was consumed by, while it is open. One that was received is kept for good:
        its rows are in others' hands, too."""
        rows = table.index[slots]
        for grant in self._consumed(table, task):
            if np.isin(rows, grant.rows).any():
                if not grant.is_received:
                    return grant
                grant.keep()
        return None

    def abandoned(self, table: Table, fields: Sequence[str]) -> Slots:
        """The rows that have none of these fields, where nobody is about to write them: who inserted them was killed
        together with the service, whose checkpoint or journal has the rows, and not who asked for them."""
        for held in self._by_session.values():
            if any(isinstance(grant, InsertGrant) and grant.table is table for grant in held.values()):
                return table.live_slots()[:0]
        return InsertGrant(table, table.index[table.live_slots()], fields).unwritten()

    def _consumed(self, table: Table | None = None, task: str = "") -> Iterator[ConsumedGrant]:
        """The grants of rows, of one table's task or all; open ones first."""
        for held in itertools.chain(self._by_session.values(), self._received.values()):
            for grant in held.values():
                if isinstance(grant, ConsumedGrant) and (
                    table is None or (grant.table is table and grant.task == task)
                ):
                    yield grant

    def check_invariants(self) -> None:
        """What would be given back is consumed; tests call this after each event."""
        for grant in self._consumed():
            if grant.task in grant.table.tasks:  # the table may have been cleared
                slots = grant.table.slots_of(grant.rows)
                assert grant.table.tasks[grant.task].consumed[slots[slots >= 0]].all()


def _pop(grants: dict[bytes, dict[int, Grant]], session: bytes, rid: int) -> Grant | None:
    held = grants.get(session)
    grant = None if held is None else held.pop(rid, None)
    if held is not None and not held:
        del grants[session]
    return grant
