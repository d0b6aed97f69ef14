"""Streams that ask the trainer who gives them what, in threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import until
from weights import Net, drawn, full

from transfer_queue.errors import InvalidInput, VersionGone
from transfer_queue.weights.transport.info import key_of
from transfer_queue.weights.transport.tracker import Assignment, Tracker

VERSION = full(drawn(Net(), 1), 1)
KEY = key_of(VERSION.manifest)
NUM = len(VERSION.buckets)
A, B = "tcp:a:1", "tcp:b:1"


def joined(*names: str, wanted: Any = range(NUM), **more: Any) -> Tracker:
    made = Tracker(**more)
    made.begin(VERSION.manifest)
    for name in names:
        made.join(f"link of {name}", KEY, name, wanted, 10.0)
    return made


def is_waiting(tracker: Tracker, stream: str) -> bool:
    return stream in tracker._swarms[KEY].waiting


def test_who_waits_is_answered_as_soon_as_there_is_something() -> None:
    tracker = joined(A, B, wanted=[0], uploads=1)
    assert tracker.ask("a", KEY, A, "", 5.0) == Assignment(0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tracker.ask, "b", KEY, B, "", 60.0)
        until(lambda: is_waiting(tracker, "b"), "B waits")
        assert tracker.ask("a", KEY, A, "staged", 5.0) == Assignment(is_done=True)
        assert answer.result(5) == Assignment(0, A)


def test_what_a_lost_connection_was_to_bring_is_there_for_others() -> None:
    tracker = joined(A, B, wanted=[0], uploads=1)
    assert tracker.ask("a", KEY, A, "", 5.0) == Assignment(0)
    assert tracker.ask("b", KEY, B, "", 0.0) == Assignment()
    tracker.left("a")
    assert tracker.ask("b", KEY, B, "", 5.0) == Assignment(0)


def test_a_receiver_that_left_neither_takes_nor_gives() -> None:
    tracker = joined(A, B, wanted=[0])
    tracker.ask("a", KEY, A, "", 5.0)
    tracker.ask("a", KEY, A, "staged", 5.0)
    tracker.left(f"link of {A}")
    with pytest.raises(VersionGone, match="takes no part"):
        tracker.ask("a", KEY, A, "", 5.0)
    assert tracker.ask("b", KEY, B, "", 5.0) == Assignment(0)


def test_a_receiver_that_came_back_by_another_connection_stays_when_the_first_one_ends() -> None:
    tracker = joined(A)
    tracker.join("its next link", KEY, A, range(NUM), 10.0)
    tracker.left(f"link of {A}")
    assert tracker.ask("a", KEY, A, "", 5.0).bucket >= 0


@pytest.mark.parametrize("end", [lambda tracker: tracker.end(VERSION.manifest), Tracker.close])
def test_who_waits_when_the_update_ends_is_told(end: Any) -> None:
    tracker = joined(A, B, wanted=[0], uploads=1)
    tracker.ask("a", KEY, A, "", 5.0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tracker.ask, "b", KEY, B, "", 60.0)
        until(lambda: is_waiting(tracker, "b"), "B waits")
        end(tracker)
        with pytest.raises(VersionGone):
            answer.result(5)
    with pytest.raises(VersionGone):
        tracker.join("link", KEY, A, [0], 10.0)
    tracker.left("a")
    end(tracker)


def test_what_is_no_receiver_or_no_bucket_is_refused() -> None:
    tracker = joined()
    for name, wanted in (("unix:/tmp/x", [0]), (A, [NUM]), (A, [-1])):
        with pytest.raises(InvalidInput):
            tracker.join("link", KEY, name, wanted, 10.0)
    with pytest.raises(InvalidInput, match="stall"):
        tracker.join("link", KEY, A, [0], float("nan"))
    with pytest.raises(InvalidInput, match="uploads"):
        Tracker(uploads=0)


def test_only_the_newest_updates_are_kept() -> None:
    tracker = joined(A)
    for version in range(2, 12):
        tracker.begin(full(drawn(Net(), version), version).manifest)
    with pytest.raises(VersionGone):
        tracker.ask("a", KEY, A, "", 5.0)


def test_many_streams_at_once_are_given_every_bucket_once() -> None:
    names = [f"tcp:{letter}:1" for letter in "abcdef"]
    tracker = joined(*names)
    came: dict[str, list[int]] = {name: [] for name in names}

    def stream(name: str, number: int) -> None:
        told = tracker.ask((name, number), KEY, name, "", 5.0)
        while not told.is_done:
            if told.bucket >= 0:
                came[name].append(told.bucket)
            told = tracker.ask((name, number), KEY, name, "staged", 5.0)

    threads = [threading.Thread(target=stream, args=(name, number)) for name in names for number in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    assert all(sorted(found) == list(range(NUM)) for found in came.values())
