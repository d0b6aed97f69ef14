"""Waiting until keys or tags change, instead of listing again and again."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hosts import Host

import transfer_queue as tq
from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.integrations import verl_replay

CHANGES: dict[str, Callable[[], Any]] = {
    "a new key": lambda: tq.kv_put("new", "p", {"x": torch.ones(1)}),
    "a tag": lambda: tq.kv_put("a", "p", tag={"status": "finished"}),
    "a key that is gone": lambda: tq.kv_clear("a", "p"),
    "the partition is gone": lambda: tq.get_client().clear_partition("p"),
}


def watching(partition: str | None, since: Any, timeout_s: float = 20) -> tuple[threading.Thread, list[Any]]:
    """A thread that watches; when it parked."""
    found: list[Any] = []
    return parked(lambda: found.append(tq.kv_watch(partition, since, timeout_s))), found


def parked(call: Callable[[], Any]) -> threading.Thread:
    """A thread that makes this call; when it waits in the service."""
    thread = threading.Thread(target=call)
    thread.start()
    while not tq.get_client().stats()["waiting_requests"]:
        assert thread.is_alive()
    return thread


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("partition", ["p", None])
def test_a_change_ends_the_wait(client: tq.TransferQueueClient, what: str, partition: str | None) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2)})
    seen = tq.kv_watch(partition)
    thread, found = watching(partition, seen)
    CHANGES[what]()
    thread.join(10)
    assert found
    assert found[0] != seen
    assert tq.kv_watch(partition, found[0], timeout_s=0.01) == found[0]


def test_a_change_since_then_is_told_at_once(client: tq.TransferQueueClient) -> None:
    seen = tq.kv_watch("p")
    tq.kv_put("a", "p", tag={"n": 1})
    began = time.monotonic()
    assert tq.kv_watch("p", seen, timeout_s=20) != seen
    assert time.monotonic() - began < 5


def test_nothing_changes_in_time(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", tag={"n": 1})
    seen = tq.kv_watch("p")
    tq.kv_put("a", "q", tag={"n": 1})  # another partition
    tq.kv_list()
    assert tq.kv_watch("p", seen, timeout_s=0.05) == seen


def test_the_end_of_a_group_is_told_to_those_who_watch(client: tq.TransferQueueClient) -> None:
    """Rows that nobody cleared by a request of his own."""
    tq.open_partition("step_0", "series", 1, consumers=["trainer"], clear=True)
    tq.kv_put("a", "step_0", tag={"n": 1})
    seen = tq.kv_watch()
    thread, found = watching(None, seen)
    tq.finish_partition("step_0", "trainer")
    thread.join(10)
    assert found[0].versions == {}


def test_what_was_seen_of_another_service_is_nothing(start_host: Callable[..., Host]) -> None:
    first, second = start_host(), start_host()

    def watch(host: Host, since: Any = None) -> Any:
        return run(host.client.session, kv.kv_watch(host.client.session, "p", since, 20))

    for host in (first, second):
        host.kv_put(["a"], "p", {"x": torch.zeros(1)})
    seen = watch(first)
    began = time.monotonic()
    assert watch(second, seen).service_id != seen.service_id
    assert time.monotonic() - began < 5


def test_from_another_host(start_host: Callable[..., Host]) -> None:
    head = start_host()
    other = start_host(head.tcp)
    session = other.client.session
    seen = run(session, kv.kv_watch(session, "p"))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(session, kv.kv_watch(session, "p", seen, 20))))
    thread.start()
    while not head.client.stats()["waiting_requests"]:
        assert thread.is_alive()
    head.kv_put(["a"], "p", {"x": torch.zeros(1)})
    thread.join(10)
    assert list(found[0].versions) == ["p"]


class PollingBuffer:
    """verl's own, as far as it waits."""

    poll_interval = 20.0

    def _sync_metadata_from_transfer_queue(self) -> None:
        tq.kv_list()

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        assert self.poll_interval == 0.0
        return last_debug_time + 1.0


class OwnListing(PollingBuffer):
    def _sync_metadata_from_transfer_queue(self) -> None:
        tq.kv_list("train")


@pytest.mark.parametrize("kind", [PollingBuffer, OwnListing])
def test_a_buffer_of_verl_waits_each_time_also_where_its_class_lists_by_itself(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch, kind: type[PollingBuffer]
) -> None:
    module: Any = ModuleType(verl_replay.MODULE)
    module.ReplayBuffer = PollingBuffer
    monkeypatch.setitem(sys.modules, verl_replay.MODULE, module)
    for name in (verl_replay.SYNC, verl_replay.WAIT):
        monkeypatch.setattr(PollingBuffer, name, getattr(PollingBuffer, name))
    verl_replay.install()
    buffer, ended = kind(), []
    for number in range(3):
        buffer._sync_metadata_from_transfer_queue()
        thread = parked(lambda: ended.append(buffer._wait_for_next_poll("train", 1.0)))
        tq.kv_put("a", "train", tag={"n": number})
        thread.join(10)
        assert ended == [2.0] * (number + 1)
    assert buffer.poll_interval == 20.0
