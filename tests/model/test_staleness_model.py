"""Ages against a model of lists, over random histories: nothing older than asked is handed out, nothing fresh lost."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tables import Box, indexes, reloaded

from transfer_queue.errors import DeadlineExceeded, LeaseExpired, StaleVersion, WrongEpoch

LIMITS = {"zero": 0, "two": 2, "any": None}
EPOCHS = ["a", "b", "c"]
tasks = st.sampled_from(list(LIMITS))


class Lent:
    def __init__(self, task: str, rows: list[int]) -> None:
        self.task = task
        self.open = set(rows)


class StalenessModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.box = Box()
        self.announced: list[tuple[str, int]] = []
        self.made_by: dict[int, tuple[str, int] | None] = {}
        self.used: set[tuple[str, int]] = set()
        self.leases: dict[int, Lent] = {}
        self.governed: set[str] = set()

    # the model

    def age(self, row: int) -> float:
        made = self.made_by[row]
        if made is None or not self.announced:
            return 0
        current, newest = self.announced[-1]
        if made[0] == current and made[1] > newest:
            return 0
        before = [n for n, (epoch, version) in enumerate(self.announced, 1) if epoch == made[0] and version <= made[1]]
        return len(self.announced) - before[-1] if before else math.inf

    def lent(self, task: str) -> set[int]:
        return {row for lease in self.leases.values() if lease.task == task for row in lease.open}

    def free(self, task: str) -> list[int]:
        return [row for row in self.made_by if (task, row) not in self.used and row not in self.lent(task)]

    def judge(self) -> None:
        for task in self.governed:
            limit = LIMITS[task]
            if limit is not None:
                self.used |= {(task, row) for row in self.free(task) if self.age(row) > limit}

    def asked(self, task: str) -> dict[str, Any]:
        self.governed.add(task)
        self.judge()
        return {"max_staleness": LIMITS[task]}

    # events

    @rule(epoch=st.sampled_from(EPOCHS), version=st.integers(0, 9))
    def announce(self, epoch: str, version: int) -> None:
        epochs = [one for one, _ in self.announced]
        newest = max((v for e, v in self.announced if e == epoch), default=-1)
        try:
            self.box.announce(version, epoch)
        except WrongEpoch:
            assert epoch in epochs[:-1]
            assert epochs[-1] != epoch
            return
        except StaleVersion:
            assert version < newest
            return
        assert not epochs or epochs[-1] == epoch or epoch not in epochs
        if version != newest:
            self.announced.append((epoch, version))
        self.judge()

    @rule(epoch=st.sampled_from(EPOCHS), version=st.integers(0, 11), count=st.integers(1, 3))
    def put(self, epoch: str, version: int, count: int) -> None:
        self.made_by.update(dict.fromkeys(self.box.made_by(version, count, epoch), (epoch, version)))
        self.judge()

    @rule()
    def put_untagged(self) -> None:
        self.made_by[indexes(self.box.put(1))[0]] = None

    @precondition(lambda self: self.made_by)
    @rule(data=st.data(), epoch=st.sampled_from(EPOCHS), version=st.integers(0, 11))
    def tag(self, data: st.DataObject, epoch: str, version: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.made_by)))
        self.box.tag([row], [{"weight_epoch": epoch, "weight_version": version}])
        self.made_by[row] = (epoch, version)
        self.judge()

    @rule(task=tasks, size=st.integers(1, 3))
    def fetch(self, task: str, size: int) -> None:
        asked = self.asked(task)
        expected = self.free(task)[:size]
        try:
            found = self.box.fetch(size, task=task, **asked)
        except DeadlineExceeded:
            assert len(expected) < size
            return
        assert found == expected
        assert LIMITS[task] is None or all(self.age(row) <= LIMITS[task] for row in found)
        self.used |= {(task, row) for row in found}

    @rule(task=tasks, size=st.integers(1, 3), lease_s=st.integers(1, 9))
    def lend(self, task: str, size: int, lease_s: int) -> None:
        asked = self.asked(task)
        expected = self.free(task)[:size]
        try:
            number, found = self.box.lend(size, 100 + lease_s, task=task, **asked)
        except DeadlineExceeded:
            assert len(expected) < size
            return
        assert found == expected
        self.leases[number] = Lent(task, found)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), used=st.booleans())
    def end_lease(self, data: st.DataObject, used: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases.pop(number)
        try:
            (self.box.ack if used else self.box.release)(number)
        except LeaseExpired:
            assert not lease.open
            return
        if used:
            self.used |= {(lease.task, row) for row in lease.open}
        self.judge()

    @precondition(lambda self: self.made_by)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        gone = set(data.draw(st.lists(st.sampled_from(sorted(self.made_by)), min_size=1, max_size=3)))
        self.box.clear(sorted(gone))
        self.made_by = {row: made for row, made in self.made_by.items() if row not in gone}
        for lease in self.leases.values():
            lease.open -= gone

    @rule(task=tasks)
    def reset(self, task: str) -> None:
        self.box.reset(task)
        self.used = {(other, row) for other, row in self.used if other != task}
        for number in [number for number, lease in self.leases.items() if lease.task == task]:
            del self.leases[number]
        self.judge()

    @rule()
    def restart(self) -> None:
        self.box = reloaded(self.box)
        self.leases.clear()
        self.governed.clear()

    @invariant()
    def consumption_agrees(self) -> None:
        if "p" in self.box.partitions():
            for task in LIMITS:
                assert self.box.consumed(task) == {row: int((task, row) in self.used) for row in sorted(self.made_by)}


TestStalenessModel = StalenessModel.TestCase
TestStalenessModel.settings = settings(
    max_examples=60, stateful_step_count=30, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
