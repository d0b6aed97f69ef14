"""How often the thread of a replica looks after it."""

from __future__ import annotations

import threading
from typing import Any

from conftest import until

from transfer_queue.errors import ServiceUnavailable
from transfer_queue.weights.fleet.monitor import MAX_REST_S, ReplicaMonitor
from transfer_queue.weights.fleet.replica import Decided, Replica, Serving

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
        self._count = count

    def newest(self) -> Decided:
        return Decided(1, "run", "1", {})

    def fence(self, one: Replica, reason: str) -> None:
        one.fence(reason)

    def admit(self, one: Replica, serving: Serving) -> bool:
        raise AssertionError("it is not well")

    def wait_for_work(self, one: Replica, timeout_s: float, seen: Decided | None) -> None:
        self.rests.append(timeout_s)
        one.left = len(self.rests) == self._count


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
