"""Buckets of a version from several sources: what a fetch says that did not end well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import until

from transfer_queue.errors import DeadlineExceeded, DigestMismatch, ServiceUnavailable, TooManyConnections
from transfer_queue.weights import StateDictSource, digests, plan, seal
from transfer_queue.weights.transport import fetching
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.fetching import Source, fetch
from transfer_queue.wire.address import Address

SOURCE = StateDictSource({"a": torch.zeros(4), "b": torch.ones(4)})


def num_fetching() -> int:
    return sum(thread.name == "tq-weights-fetch" for thread in threading.enumerate())


def test_a_fetch_says_what_ended_it_and_not_what_its_end_did_to_other_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meetings = iter(range(100))
    both = threading.Barrier(2)

    class Meeting:
        """The first thread's connections give damage; the second thread's one is there when that has ended it all."""

        def __init__(self, _address: Address, _timeout_s: float, begun: Callable[[Any], None]) -> None:
            if next(meetings) < 2:
                both.wait(20)
            if threading.current_thread() is not first_thread():
                until(lambda: num_fetching() == 1, "the end of the first thread", 20)
            begun(self)

        def ask(self, *_: Any) -> bytes:
            if threading.current_thread() is first_thread():
                raise DigestMismatch("not what was sent")
            raise ServiceUnavailable("this connection was interrupted")

        def interrupt(self) -> None: ...
        def close(self) -> None: ...

    threads: list[threading.Thread] = []

    def first_thread() -> threading.Thread:
        if not threads:
            threads.append(threading.current_thread())
        return threads[0]

    monkeypatch.setattr(fetching, "Peer", Meeting)
    where = plan(SOURCE.specs(), 16)
    manifest = seal(where, digests(SOURCE), version=1, epoch="e")
    sources = [Source(Address("", host="there", port=1))] * 2
    with pytest.raises(DigestMismatch):
        fetch(manifest, [0, 1], sources, lambda *_, **more: None, Deadline(30))


class Crowded:
    """A peer with room for one connection, once `num_before` were refused."""

    num_before = num_refused = 0
    inside: list[Crowded] = []  # noqa: RUF012 a test replaces it
    lock = threading.Lock()
    wait: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, _address: Address, _timeout_s: float, begun: Callable[[Any], None]) -> None:
        begun(self)
        with self.lock:
            if Crowded.num_refused < self.num_before or self.inside:
                Crowded.num_refused += 1
                raise TooManyConnections("1 connections, as many as it may")
            self.inside.append(self)

    def ask(self, *_: Any) -> bytes:
        Crowded.wait()
        return bytes(16)

    def interrupt(self) -> None: ...

    def close(self) -> None:
        self.inside.remove(self)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> type[Crowded]:
    monkeypatch.setattr(fetching, "Peer", Crowded)
    monkeypatch.setattr(Crowded, "inside", [])
    monkeypatch.setattr(Crowded, "num_refused", 0)
    return Crowded


def fetched(num_streams: int, deadline_s: float) -> list[int]:
    manifest = seal(plan(SOURCE.specs(), 16), digests(SOURCE), version=1, epoch="e")
    sources, found = [Source(Address("", host="there", port=1))] * num_streams, []
    fetch(manifest, [0, 1], sources, lambda index, *_, **more: found.append(index), Deadline(deadline_s))
    return sorted(found)


def test_a_stream_that_is_refused_leaves_the_work_to_the_other_one(
    crowded: type[Crowded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def until_the_other_has_left_or_tried_thrice() -> None:
        until(lambda: crowded.num_refused == 3 or (crowded.num_refused and num_fetching() == 1), "a refusal", 20)

    monkeypatch.setattr(crowded, "wait", staticmethod(until_the_other_has_left_or_tried_thrice))
    assert fetched(2, 30) == [0, 1]


def test_the_only_stream_waits_for_room(crowded: type[Crowded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowded, "num_before", 5)
    assert fetched(1, 30) == [0, 1]


@pytest.mark.parametrize("num_streams", [1, 2])
def test_where_no_room_is_made_the_deadline_says_why(
    crowded: type[Crowded], monkeypatch: pytest.MonkeyPatch, num_streams: int
) -> None:
    monkeypatch.setattr(crowded, "num_before", 1000)
    with pytest.raises(DeadlineExceeded, match="as many as it may"):
        fetched(num_streams, 0.5)


@pytest.mark.parametrize(("num_sources", "may_be_slow"), [(1, True), (2, False)])
def test_a_bucket_that_nobody_else_has_may_come_slowly_as_long_as_something_comes(
    num_sources: int, may_be_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, float]] = []

    class Noting:
        def __init__(self, _address: Address, _timeout_s: float, begun: Callable[[Any], None]) -> None:
            begun(self)

        def ask(self, message: Any, timeout_s: float, into: Any, body: Any, stall_s: float) -> bytes:
            asked.append((timeout_s, stall_s))
            return bytes(16)

        def interrupt(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(fetching, "Peer", Noting)
    manifest = seal(plan(SOURCE.specs(), 16), digests(SOURCE), version=1, epoch="e")
    sources = [Source(Address("", host="there", port=port)) for port in range(1, num_sources + 1)]
    fetch(manifest, [0], sources, lambda *_, **more: None, Deadline(3600), 5.0)
    ((timeout_s, stall_s),) = asked
    assert stall_s == 5.0
    assert (timeout_s > 60) == may_be_slow
