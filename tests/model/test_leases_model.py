"""Leases against a model made of dicts, over random histories (R13); the controller's invariants hold throughout."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tables import Box, indexes

from transfer_queue.errors import DeadlineExceeded, LeaseExpired

TASKS = ["s", "t"]
MAX_DELIVER = 3
SESSIONS = [b"one", b"two", b"three"]

tasks = st.sampled_from(TASKS)
sessions = st.sampled_from(SESSIONS)


class Held:
    def __init__(self, task: str, session: bytes, deadline: float, rows: list[int]) -> None:
        self.task = task
        self.session = session
        self.deadline = deadline
        self.open = set(rows)
        self.given_back: set[int] = set()
        self.over = False


class LeasesModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.box = Box(max_deliver=MAX_DELIVER)
        self.rows: list[int] = []
        self.consumed: set[tuple[str, int]] = set()
        self.leases: dict[int, Held] = {}
        self.attempts: dict[tuple[str, int], int] = {}
        self.dead: set[tuple[str, int]] = set()
        self.delayed: dict[tuple[str, int], float] = {}

    # the model

    def live(self) -> list[Held]:
        return [held for held in self.leases.values() if not held.over]

    def free(self, task: str) -> list[int]:
        lent = {row for held in self.live() if held.task == task for row in held.open}
        used = self.consumed | self.delayed.keys()
        return [row for row in self.rows if row not in lent and (task, row) not in used]

    def tried(self, held: Held, rows: set[int], delay_s: float = 0.0) -> None:
        """These rows of a lease were not used: a dead letter counts as consumed."""
        for key in [(held.task, row) for row in rows]:
            self.attempts[key] = self.attempts.get(key, 0) + 1
            if self.attempts[key] >= MAX_DELIVER:
                self.dead.add(key)
                self.consumed.add(key)
            elif delay_s:
                self.delayed[key] = self.box.now + delay_s

    def forget(self, gone: set[tuple[str, int]]) -> None:
        self.dead -= gone
        for known in (self.attempts, self.delayed):
            for key in known.keys() & gone:
                del known[key]

    def end(self, held: Held) -> None:
        """A lease that left rows open is over; one without is settled, and acknowledging it again does nothing."""
        held.over = bool(held.open)
        self.tried(held, held.open)
        held.open.clear()

    def settled(self, task: str) -> None:
        """Every row of a task is in one state only."""
        owners = [row for held in self.live() if held.task == task for row in held.open]
        assert len(owners) == len(set(owners)), "two live leases hold one row"
        assert not {(task, row) for row in owners} & self.consumed

    # events

    @rule(count=st.integers(1, 4))
    def put(self, count: int) -> None:
        self.rows += indexes(self.box.put(count))

    @rule(task=tasks, size=st.integers(1, 4), session=sessions, lease_s=st.integers(1, 9))
    def lend(self, task: str, size: int, session: bytes, lease_s: int) -> None:
        expected = self.free(task)[:size]
        try:
            number, rows = self.box.lend(size, lease_s, task=task, session=session)
        except DeadlineExceeded:
            assert len(expected) < size
            return
        assert rows == expected
        assert number not in self.leases
        self.leases[number] = Held(task, session, self.box.now + lease_s, rows)
        self.settled(task)

    @rule(task=tasks, size=st.integers(1, 3))
    def fetch(self, task: str, size: int) -> None:
        expected = self.free(task)[:size]
        try:
            assert self.box.fetch(size, task=task) == expected
        except DeadlineExceeded:
            assert len(expected) < size
            return
        self.consumed |= {(task, row) for row in expected}

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), whole=st.booleans())
    def ack(self, data: st.DataObject, whole: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        held = self.leases[number]
        rows = None if whole or not self.rows else data.draw(st.lists(st.sampled_from(self.rows), max_size=4))
        try:
            left = self.box.ack(number, rows)
        except LeaseExpired:
            assert held.over or held.given_back & set(rows or ())
            return
        assert not held.over
        used = held.open if rows is None else held.open & set(rows)
        assert not {(held.task, row) for row in used} & self.consumed, "a row is acknowledged once"
        self.consumed |= {(held.task, row) for row in used}
        held.open -= used
        assert left == len(held.open)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), lease_s=st.integers(0, 9))
    def renew(self, data: st.DataObject, lease_s: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        held = self.leases[number]
        try:
            assert self.box.renew(number, lease_s) == len(held.open)
        except LeaseExpired:
            assert held.over
            return
        held.deadline = max(held.deadline, self.box.now + lease_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), whole=st.booleans())
    def release(self, data: st.DataObject, whole: bool) -> None:
        self.give_back(data, whole, self.box.release)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), whole=st.booleans(), delay_s=st.sampled_from([0, 0, 3]))
    def nack(self, data: st.DataObject, whole: bool, delay_s: int) -> None:
        held, back = self.give_back(data, whole, lambda number, rows: self.box.nack(number, rows, delay_s))
        self.tried(held, back, delay_s)

    def give_back(
        self, data: st.DataObject, whole: bool, call: Callable[[int, list[int] | None], int]
    ) -> tuple[Held, set[int]]:
        """The lease that it was, and what is back of it."""
        number = data.draw(st.sampled_from(sorted(self.leases)))
        held = self.leases[number]
        rows = None if whole or not self.rows else data.draw(st.lists(st.sampled_from(self.rows), max_size=4))
        try:
            left = call(number, rows)
        except LeaseExpired:
            assert held.over
            return held, set()
        back = set(held.open) if rows is None else held.open & set(rows)
        held.open -= back
        held.given_back |= back
        assert left == len(held.open)
        return held, back

    @rule(task=tasks)
    def requeue(self, task: str) -> None:
        if "p" in self.box.partitions():
            dead = {key for key in self.dead if key[0] == task}
            assert self.box.requeue(task=task) == len(dead)
            self.consumed -= dead
            self.forget(dead)

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds: int) -> None:
        self.box.expire(self.box.now + seconds)
        self.delayed = {key: due for key, due in self.delayed.items() if due > self.box.now}
        for held in self.live():
            if held.deadline <= self.box.now:
                self.end(held)

    @rule(session=sessions)
    def end_session(self, session: bytes) -> None:
        self.box.end_session(session)
        for held in self.live():
            if held.session == session:
                self.end(held)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        gone = set(data.draw(st.lists(st.sampled_from(self.rows), min_size=1, max_size=3)))
        self.box.clear(sorted(gone))
        self.rows = [row for row in self.rows if row not in gone]
        self.consumed = {(task, row) for task, row in self.consumed if row not in gone}
        self.forget({(task, row) for task in TASKS for row in gone})
        for held in self.leases.values():
            held.open -= gone

    @rule()
    def clear_partition(self) -> None:
        self.box.clear()
        self.forget({(task, row) for task in TASKS for row in self.rows})
        self.rows = []
        self.consumed = set()
        for held in self.leases.values():
            held.open.clear()

    @rule(task=tasks)
    def reset(self, task: str) -> None:
        self.box.reset(task)
        self.consumed = {(other, row) for other, row in self.consumed if other != task}
        for held in self.live():
            if held.task == task and held.open:
                self.end(held)
        self.consumed = {(other, row) for other, row in self.consumed if other != task}
        self.forget({(task, row) for row in self.rows})

    @invariant()
    def consumption_agrees(self) -> None:
        for task in TASKS:
            if "p" in self.box.partitions():
                assert self.box.consumed(task) == {row: int((task, row) in self.consumed) for row in self.rows}
                dead = {row: self.attempts[of, row] for of, row in self.dead if of == task}
                assert {row: attempts for row, (attempts, _) in self.box.dead_letters(task).items()} == dead

    def teardown(self) -> None:
        """Whatever happened: once all leases are over, every row that was not used is delivered."""
        self.box.expire(self.box.now + 100)
        for held in self.live():
            self.end(held)
        self.delayed.clear()
        for task in TASKS:
            expected = self.free(task)
            if expected:
                assert self.box.fetch(len(expected), task=task) == expected
        assert self.box.controller.next_deadline() is None


TestLeasesModel = LeasesModel.TestCase
TestLeasesModel.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
