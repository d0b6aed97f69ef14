"""An interrupt anywhere in a call loses nothing: clients over TCP, and those of a unit of another host.

In a few seconds each call is struck at every fifth of its places; `STEP = 1` strikes at all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import leftovers
import pytest
import strikes as strikes_at
import torch
from hosts import LARGE, TOKEN, Host

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.session import Session
from transfer_queue.wire.address import parse_address

STEP = 5
ROWS = {"x": torch.zeros(2, LARGE), "y": torch.zeros(2)}
pytestmark = strikes_at.UNCLEAN


class Hosts(NamedTuple):
    """`client` is struck, `watching` looks at what is left. Rows of `far` lie on the controller's host."""

    client: TransferQueueClient
    watching: TransferQueueClient
    far: Host
    all: list[Host]

    def used(self) -> int:
        return sum(one.used() for one in self.all)

    def left(self) -> int:
        return leftovers.left(self.watching)


@pytest.fixture(params=["tcp", "joined"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    head = Host()
    other = Host(head.tcp) if request.param == "joined" else None
    client = other.client if other else TransferQueueClient.of(Session(parse_address(head.tcp, TOKEN), 10.0))
    found = [one for one in (head, other) if one is not None]
    yield Hosts(client, head.client, head, found)
    if other is None:
        client.close()
    for one in reversed(found):
        one.close()


def every(action: Callable[[], Any], is_clean: Callable[[], bool]) -> int:
    """How many strikes there were."""
    return len(list(strikes_at.every(action, is_clean, step=STEP)))


@pytest.mark.parametrize("way", ["get_meta", "take"])
def test_rows_that_nobody_got_are_offered_again(hosts: Hosts, way: str) -> None:
    hosts.watching.put({"x": torch.zeros(2, 8)}, partition_id="p")

    def fetch() -> Any:
        if way == "take":
            return hosts.client.take("p", ["x"], 2, "t")
        return hosts.client.get_meta(["x"], 2, "p", task_name="t")

    assert every(fetch, lambda: hosts.left() == 2) > 10
    assert hosts.left() == 0


def test_a_read_leaves_nothing_pinned(hosts: Hosts) -> None:
    meta = hosts.watching.put(ROWS, partition_id="p")
    hosts.client.get_data(meta)  # the first one imports what it needs
    gc.collect()
    before = hosts.used()

    def is_clean() -> bool:
        return hosts.used() == before and not any(one.client.stats()["pinned_nbytes"] for one in hosts.all)

    assert every(lambda: hosts.client.get_data(meta), is_clean) > 10


def test_a_write_is_whole_or_nothing(hosts: Hosts) -> None:
    hosts.client.put(ROWS, partition_id="other")  # the memory's descriptor comes with the first one: it could be lost
    before = hosts.used()

    def is_clean() -> bool:
        found = [one for one in hosts.watching.overview().partitions if one.name == "p"]
        assert all(one.written == [2, 2] for one in found if one.rows), found
        hosts.watching.clear_partition("p")
        return hosts.used() <= before + (1 << 16)

    assert every(lambda: hosts.client.put(ROWS, partition_id="p"), is_clean) > 10


def test_rows_that_are_cleared_are_gone_for_all_or_for_none(hosts: Hosts) -> None:
    metas = [hosts.client.put({"x": torch.zeros(2, 8)}, partition_id="p")]

    def is_clean() -> bool:
        found = [one.rows for one in hosts.watching.overview().partitions if one.name == "p"]
        assert found in ([], [0], [2])
        if found != [2]:
            metas[0] = hosts.client.put({"x": torch.zeros(2, 8)}, partition_id="p")
        return True

    assert every(lambda: hosts.client.clear_samples(metas[0]), is_clean) > 10
