"""How often the thread of a replica looks after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import until

from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable
from transfer_queue.weights.fleet.monitor import MAX_REST_S, ReplicaMonitor
from transfer_queue.weights.fleet.replica import Decided, Replica, Serving, at_once
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.reports import Reports
from transfer_queue.weights.version.sources import StateDictSource

HEARTBEAT_S, CALL_TIMEOUT_S = 2.0, 0.02


class Member:
    """A server that `serves` at once, fails, or does not answer before `answers` is set."""

    def __init__(self, fault: Exception | None) -> None:
        self.fault = fault
        self.answers = threading.Event()

    def get_weight_version(self) -> str:
        return "1"

    def status(self) -> Any:
        if self.fault is not None:
            raise self.fault
        self.answers.wait(60)
        raise ServiceUnavailable("it has just woken up")


class Watched:
    """A fleet that counts how long its monitor would rest, and lets it end after `count` rests."""

    heartbeat_s, call_timeout_s, catch_up_timeout_s = HEARTBEAT_S, CALL_TIMEOUT_S, 1.0
    fence_mode = None
    publisher = None

    def __init__(self, count: int) -> None:
        self.rests: list[float] = []
        self.fences: list[bool] = []  # which wake it up at once
        self._count = count

    def newest(self) -> Decided:
        return Decided(1, "run", "1", {})

    def fence(self, one: Replica, reason: str) -> None:
        one.fence(reason)

    def admit(self, one: Replica, serving: Serving) -> bool:
        raise AssertionError("it is not well")

    def wait_for_work(self, one: Replica, timeout_s: float, seen: Decided | None, was_ready: bool | None) -> None:
        self.rests.append(timeout_s)
        self.fences.append(was_ready is True and not one.ready)
        one.left = len(self.rests) == self._count


def test_a_replica_that_is_found_anew_is_brought_up_without_a_rest() -> None:
    fleet, one = Watched(3), Replica("a", Member(ServiceUnavailable("it was started anew")))
    one.ready = True
    monitor = ReplicaMonitor(fleet, one)  # type: ignore[arg-type]
    until(lambda: len(fleet.rests) == 3, "three looks at the replica")
    monitor.close(5)
    assert fleet.fences == [True, False, False]


def rests_of(member: Member) -> list[float]:
    fleet = Watched(6)
    monitor = ReplicaMonitor(fleet, Replica("a", member))  # type: ignore[arg-type]
    until(lambda: len(fleet.rests) == 6, "six looks at the replica")
    member.answers.set()
    monitor.close(5)
    return fleet.rests


def test_a_replica_that_fails_is_asked_ever_more_rarely() -> None:
    assert rests_of(Member(ServiceUnavailable("no"))) == [4.0, 8.0, 16.0, MAX_REST_S, MAX_REST_S, MAX_REST_S]


def test_a_replica_that_is_frozen_is_found_awake_within_a_heartbeat_however_long_it_was() -> None:
    assert rests_of(Member(None)) == [4.0, *[HEARTBEAT_S] * 5]


class Frozen:
    """A server that does not say how many silent workers it has before `wakes` is set."""

    def __init__(self) -> None:
        self.wakes = threading.Event()
        self.num_answers = 0
        self.introduced: list[Any] = []

    def silent_workers(self) -> int:
        self.wakes.wait(20)
        self.num_answers += 1
        return 0

    def init_weight_transfer_engine(self, *info: Any) -> None:
        self.introduced.append(info)

    start_weight_update = update_weights = finish_weight_update = init_weight_transfer_engine


class Publisher:
    reports = Reports("127.0.0.1")


def no_calls_run() -> bool:
    return not any(one.name == "tq-weights-call" for one in threading.enumerate())


@pytest.fixture
def frozen() -> Iterator[Frozen]:
    made = Frozen()
    yield made
    made.wakes.set()
    until(no_calls_run, "the calls to end")


def test_a_meeting_that_was_given_up_introduces_nobody_later(frozen: Frozen) -> None:
    one, deadline = Replica("a", frozen), Deadline(0.2)  # type: ignore[arg-type]
    publisher: Any = Publisher()
    failed = at_once([one], lambda one: one.meet(publisher, deadline, {}), deadline, "the meeting with")
    assert isinstance(failed[one], DeadlineExceeded)
    frozen.wakes.set()
    until(no_calls_run, "the calls to end")
    assert frozen.introduced == []


def test_a_server_that_is_frozen_holds_up_no_trainer_beyond_its_deadline(frozen: Frozen) -> None:
    source = StateDictSource({})
    with pytest.raises(DeadlineExceeded):
        registry.trainer("tcp").trainer_init({"timeout_s": 0.2}, client=frozen, source=source)
    assert frozen.num_answers == 0
    trainer = registry.trainer("tcp").trainer_init({"silent": 0}, client=frozen, source=source)
    trainer.send_weights(deadline_s=20)
    del frozen.introduced[:]
    with pytest.raises(DeadlineExceeded):
        trainer.join(frozen, deadline_s=0.2)
    assert (frozen.introduced, frozen.num_answers) == ([], 0)
    trainer.shutdown()
