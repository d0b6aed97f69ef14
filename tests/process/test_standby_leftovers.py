"""What a killed server had been told and had not read, what waited in it, and for whom: nothing of it is left over."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import freeze, until
from hosts import LARGE, Host
from test_standby import kill, replaced, server_of, standby_of

Spawn = Callable[[str], Any]
MIB = 1 << 20


@pytest.fixture(params=["server", "unit"])
def host(request: pytest.FixtureRequest, start_host: Callable[..., Host]) -> Host:
    """The controller's host, or another one."""
    head = start_host(durability="process", budget_nbytes=16 * MIB)
    return (
        head if request.param == "server" else start_host(join=head.tcp, durability="process", budget_nbytes=16 * MIB)
    )


@pytest.fixture
def frozen() -> Iterator[Callable[[int], None]]:
    """Has a process stand still; it goes on, or is killed, at the end."""
    pids: list[int] = []

    def stop(pid: int) -> None:
        pids.append(pid)
        freeze(pid)

    yield stop
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def test_a_view_that_was_given_up_just_before_is_given_up(host: Host, frozen: Callable[[int], None]) -> None:
    meta = host.client.put({"x": torch.ones(4, LARGE)}, partition_id="p")
    seen = host.client.get_data(meta, dense=True)["x"]
    assert (seen == 1).all()
    standby_of(host.client)
    pid = server_of(host.client)
    frozen(pid)
    del seen
    gc.collect()
    kill(pid)
    host.client.clear_partition("p")
    until(lambda: host.used() == 0, "the end of what was pinned")


def test_memory_that_was_given_back_just_before_is_given_back(host: Host, frozen: Callable[[int], None]) -> None:
    allocation = host.client.allocate({"x": ((4, LARGE), torch.float32)})
    standby_of(host.client)
    pid = server_of(host.client)
    frozen(pid)
    del allocation
    gc.collect()
    kill(pid)
    until(lambda: host.used() == 0, "the end of what was allocated")


def test_a_call_that_was_cancelled_just_before_took_nothing(host: Host, frozen: Callable[[int], None]) -> None:
    client = host.client
    client.put({"x": torch.arange(4)}, partition_id="p")
    standby_of(client)
    pid = server_of(client)

    async def cancelled() -> None:
        await client.async_get_meta(["x"], 1, "p", task_name="other")
        frozen(pid)
        asking = asyncio.ensure_future(client.async_get_meta(["x"], 4, "p", task_name="t", timeout_s=30.0))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        kill(pid)
        await client.async_get_meta(["x"], 1, "p", task_name="other")

    asyncio.run(cancelled())
    assert len(client.get_meta(["x"], 4, "p", task_name="t", timeout_s=5)) == 4


def test_who_got_room_before_does_not_wait_for_it_again(host: Host) -> None:
    client, column = host.client, {"x": torch.ones(1, 10 * MIB, dtype=torch.uint8)}
    first = client.put(column, partition_id="p")
    put: list[Any] = []
    writer = threading.Thread(target=lambda: put.append(client.put(column, partition_id="q")))
    before = standby_of(client)
    writer.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "the wait")
    kill(before)
    until(lambda: client.stats()["standby"] not in (0, before), "a standby that was forked meanwhile")
    client.clear_samples(first)
    writer.join()
    replaced(client)
    assert client.stats()["waiting_requests"] == 0
    client.clear_samples(put[0])
    until(lambda: host.used() == 0, "the end of all rows")


def test_a_forked_child_whose_parent_ended_keeps_what_it_looks_at(host: Host, fresh_child: Spawn) -> None:
    heir = fresh_child(f"""
        import os, sys, torch
        os.environ["TQ_ADDRESS"] = {host.server.address!r}
        import transfer_queue as tq
        torch.set_num_threads(1)  # its helpers do not outlive a fork
        tq.init()
        meta = tq.get_client().put({{"x": torch.ones(4, 300_000)}}, partition_id="v")
        seen = tq.get_client().get_data(meta, dense=True)["x"]
        if os.fork():
            os._exit(0)
        print("ready", flush=True)
        sys.stdin.readline()
        print(bool((seen == 1).all()), flush=True)
        os._exit(0)
    """)
    assert heir.line() == "ready"
    host.client.clear_partition("v")
    replaced(host.client)
    for number in range(3):
        later = host.client.put({"x": torch.zeros(4, 300_000)}, partition_id=f"w{number}")
        host.client.clear_samples(later)
    heir.say()
    assert heir.line() == "True"
    until(lambda: host.used() == 0, "the end of its views with it")


def test_what_this_process_reads_twice_is_pinned_twice(host: Host) -> None:
    """What is said again must not end a pin of somebody else."""
    meta = host.client.put({"x": torch.ones(4, LARGE)}, partition_id="p")
    first, second = (host.client.get_data(meta, dense=True)["x"] for _ in range(2))
    del first
    gc.collect()
    replaced(host.client)
    replaced(host.client)
    host.client.clear_samples(meta)
    host.client.put({"x": torch.zeros(4, LARGE)}, partition_id="q")
    assert (second == 1).all()
