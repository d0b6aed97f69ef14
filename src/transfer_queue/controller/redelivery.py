"""Rows that came back: how often a task has had each one and not used it, when it gets it again, and when never.

An attempt is a lease that ended without an acknowledgement: its time was up, its holder's session ended, or the holder
refused the row. A row that was released, or whose answer reached nobody, was not tried. A row with as many attempts as
its task allows is a dead letter: it counts as used by the task, so that its streams end, and stays where it is until
somebody queues it again or clears it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.controller.deadlines import NO_TIME
from transfer_queue.controller.leases import FailedAttempt
from transfer_queue.controller.readiness import DELAYED, Returned, Slots, Task
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.errors import InvalidInput, UnknownRows
from transfer_queue.names import unknown_partition
from transfer_queue.sampler.base import SETTINGS
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of

REQUESTS = (m.ListDeadLetters, m.Requeue)
MAX_DELIVER = SETTINGS[2]  # in a sampling_config


class Delay(NamedTuple):
    """`rows` (global indexes) are offered again at `due`."""

    due: float
    number: int
    table: Table
    task: str
    rows: Slots


MIN_KEPT = 1024
MAX_NUMBER = 1 << 31


def _waits(delay: Delay) -> bool:
    slots = delay.table.slots_of(delay.rows)
    return bool((delay.table.tasks[delay.task].lease[slots[slots >= 0]] == DELAYED).any())


class Redelivery:
    """`offered(table, task name, slots)` is called for rows that came back, after those that nobody is to get now were
    marked; `given_up(task name, count)` for dead letters that have an admission to give back;
    `refused(table, task name, slots)` before `offered`, for rows that their holder refused. `max_deliver` is for tasks
    that ask for nothing else."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        offered: Callable[[Table, str, Slots], None],
        given_up: Callable[[str, int], None],
        refused: Callable[[Table, str, Slots], None],
    ) -> None:
        self.max_deliver: int | None = None
        self._tables = tables
        self._offered = offered
        self._given_up = given_up
        self._refused = refused
        self._delays: list[Delay] = []  # a heap
        self._numbers = itertools.count()
        self._num_kept = MIN_KEPT  # how many were left when they were looked through

    def govern(self, task: Task, asked: Mapping[str, Any]) -> None:
        """Hold a task to what a request asks for."""
        number = asked.get(MAX_DELIVER)
        if number is not None:
            task.allow(number)

    def came_back(self, table: Table, name: str, slots: Slots, attempt: FailedAttempt, now: float) -> None:
        """A lease on these rows of a task ended, and nobody used them."""
        task = table.tasks[name]
        allowed = task.max_deliver or self.max_deliver or math.inf
        dead, due = np.zeros(len(slots), np.bool_), now + attempt.delay_s
        for place, slot in enumerate(slots.tolist()):
            before = task.returned.get(slot)
            attempts = 1 if before is None else before.attempts + 1
            dead[place] = attempts >= allowed
            task.returned[slot] = Returned(attempts, attempt.reason, due, bool(dead[place]), attempt.delay_s)
        task.touch(slots)
        task.consume(slots[dead])
        self._given_up(name, task.spend(slots[dead]))
        late = slots[~dead]
        if attempt.delay_s > 0 and len(late):
            task.reserve(late, DELAYED)
            self._wait(due, table, name, late)
            if len(self._delays) > 2 * self._num_kept:
                self._forget_the_gone()
        if attempt.is_refusal:
            self._refused(table, name, slots)
        self._offered(table, name, slots)

    def _wait(self, due: float, table: Table, name: str, slots: Slots) -> None:
        heapq.heappush(self._delays, Delay(due, next(self._numbers), table, name, table.index[slots]))

    def resume(self, now: float) -> None:
        """Of rows that came with a saved state or from a journal: those that were held back are so from now on, for as
        long as was asked. Before the first event, at `NO_TIME`, from that event on."""
        for table in self._tables.values():
            for name, task in table.tasks.items():
                if DELAYED in task.lent:
                    self._begin(now, table, name, np.flatnonzero(task.lease == DELAYED))

    def _begin(self, now: float, table: Table, name: str, slots: Slots) -> None:
        task = table.tasks[name]
        delays = np.array([task.delay_of(slot) for slot in slots.tolist()])
        for delay_s in np.unique(delays).tolist():
            late = slots[delays == delay_s]
            for slot in late.tolist():
                task.returned[slot] = task.returned[slot]._replace(due=now + delay_s)
            self._wait(now + delay_s, table, name, late)

    def next_deadline(self) -> float | None:
        """When the first of the rows that wait is offered again."""
        return self._delays[0].due if self._delays else None

    def expire(self, now: float) -> None:
        """Offer the rows again whose time has come."""
        while self._delays and self._delays[0].due <= now:
            begins, _, table, name, rows = heapq.heappop(self._delays)
            if self._tables.get(table.name) is not table:
                continue
            task, slots = table.tasks[name], table.slots_of(rows)
            slots = slots[slots >= 0]
            if begins == NO_TIME:
                fresh = [task.delay_of(slot) > 0 and task.returned[slot].due == NO_TIME for slot in slots.tolist()]
                self._begin(now, table, name, slots[np.array(fresh, np.bool_)])
                continue
            due = [slot in task.returned and task.returned[slot].due <= now for slot in slots.tolist()]
            free = task.take_back(slots[np.array(due, np.bool_)], DELAYED, used=False)
            if len(free):
                self._offered(table, name, free)

    def _forget_the_gone(self) -> None:
        """Leave out what waits for nothing any more: rows that were cleared, or offered again by a reset."""
        self._delays = [one for one in self._delays if self._tables.get(one.table.name) is one.table and _waits(one)]
        heapq.heapify(self._delays)
        self._num_kept = max(MIN_KEPT, len(self._delays))

    def clear(self) -> None:
        """All rows are gone."""
        self._delays.clear()

    # dead letters

    def handle(self, message: m.ListDeadLetters | m.Requeue) -> m.Reply:
        """Raises `UnknownRows` for a partition that does not exist."""
        table = self._tables.get(message.partition)
        if table is None:
            raise UnknownRows(unknown_partition(message.partition, self._tables))
        task = table.tasks.get(message.task)
        slots = np.empty(0, np.int64) if task is None else task.dead_letters()
        if isinstance(message, m.ListDeadLetters):
            fields = table.common_fields(slots)
            told = [] if task is None else redelivered(task, slots) or []
            tags = table.tags_of(slots)
            return m.RowSet(
                message.rid, rows_bytes(table.index[slots]), tags, table.schema(fields), None, loads=table.loads,
                redelivered=told,
            )  # fmt: skip
        if message.rows is not None:
            slots = slots[np.isin(table.index[slots], indexes_of(message.rows))]
        if task is not None and len(slots):
            for slot in slots.tolist():
                del task.returned[slot]
            self._offered(table, message.task, task.give_back(slots))
        return m.Requeued(message.rid, len(slots))

    @property
    def num_dead(self) -> int:
        """Dead letters of all tasks."""
        tasks = (task for table in self._tables.values() for task in table.tasks.values() if task.returned)
        return sum(len(task.dead_letters()) for task in tasks)

    def check_invariants(self) -> None:
        """Dead letters are consumed, and what waits has an entry here; tests call this after each event."""
        for table in self._tables.values():
            for name, task in table.tasks.items():
                assert bool(task.consumed[task.dead_letters()].all())
                waiting = set(table.index[np.flatnonzero(task.lease == DELAYED)].tolist())
                known = [one.rows.tolist() for one in self._delays if one.table is table and one.task == name]
                assert waiting <= {row for rows in known for row in rows}


def redelivered(task: Task, slots: Slots) -> list[tuple[int, int, str]] | None:
    """(position, attempts, reason of the last) of those of `slots` that came back before; None where none did."""
    if not task.returned:
        return None
    found = [(place, task.returned.get(slot)) for place, slot in enumerate(slots.tolist())]
    return [(place, one.attempts, one.reason) for place, one in found if one is not None] or None


def check_max_deliver(asked: Mapping[str, Any]) -> None:
    """`InvalidInput` for what cannot be a number of deliveries."""
    number = asked.get(MAX_DELIVER)
    if number is not None and (type(number) is not int or not 1 <= number < MAX_NUMBER):
        raise InvalidInput(f"{MAX_DELIVER} {number!r}: expected a number of deliveries from 1, or None")
