"""Buckets of a version from several sources: what a fetch says that did not end well."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conftest import until

from transfer_queue.errors import DigestMismatch, ServiceUnavailable
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

        def __init__(self, *_: Any) -> None:
            if next(meetings) < 2:
                both.wait(20)
            if threading.current_thread() is first_thread():
                return
            until(lambda: num_fetching() == 1, "the end of the first thread", 20)

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
