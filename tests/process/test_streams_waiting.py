"""Loops over streams that wait for rows, while the service stands still or somebody closes them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from conftest import freeze, until
from streams import put, used

import transfer_queue as tq
from transfer_queue.dataloader import lease_owner, streams, worker_feed
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.wire import messages as m

Client = tq.TransferQueueClient


def xs(stream: Any) -> list[list[int]]:
    return [data["x"].tolist() for data in stream]


@pytest.mark.parametrize("kind", ["loop", "workers", "async"])
def test_a_loop_that_waits_goes_on_after_the_service_stood_still(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for module in (streams, worker_feed):
        monkeypatch.setattr(module, "WAIT_S", 0.3)
    found: list[int] = []
    terms: dict[str, Any] = {"task": "t", "batch_size": 4, "lease_s": 0.9}  # which has the loop ask every 0.3 s
    more: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "workers" else {}

    async def asynchronous() -> None:
        async for batch in tq.async_stream("p", ["x"], **terms):
            found.extend(batch["x"].tolist())

    def loop() -> None:
        if kind == "async":
            asyncio.run(asynchronous())
            return
        for batch in tq.stream("p", ["x"], **terms, **more):
            found.extend(batch["x"].tolist())

    client.set_partition("p", size=4)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(loop)
        until(lambda: client.overview().waits, "the loop to wait")
        pid = client.stats()["pid"]
        freeze(pid)
        assert wait([ended], 3).not_done, "which is longer than it gives a call with a deadline"
        os.kill(pid, signal.SIGCONT)
        put(client, 4)
        ended.result(20)
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_waits_ends_when_another_thread_closes_it_and_the_next_goes_on(
    client: Client, workers: int
) -> None:
    more: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"} if workers else {}
    put(client, 4)
    client.set_partition("p", size=8)
    stream = tq.stream("p", ["x"], task="t", batch_size=4, **more)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(xs, stream)
        until(lambda: client.overview().waits and used(client) == 4, "the loop to wait for its second batch")
        stream.close()
        assert ended.result(20) == [[0, 1, 2, 3]]
    put(client, 4, start=4)
    assert xs(stream) == [[4, 5, 6, 7]]


def test_a_loop_that_is_left_while_the_service_stands_still_ends_soon(client: Client) -> None:
    """As by Ctrl-C: its last acknowledgement was sent, and is waited for no longer than 2 s."""
    put(client, 4)
    loop: Any = iter(tq.stream("p", ["x"], task="t", batch_size=4, micro_batch_size=1))
    next(loop), next(loop)  # the first acknowledgement has made its connection
    until(lambda: used(client) == 1, "its answer")
    pid = client.stats()["pid"]
    freeze(pid)
    try:
        next(loop)
        begun = time.monotonic()
        loop.close()
        assert time.monotonic() - begun < 20, "calls take 30 s until they are given up"
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: used(client) == 2, "its acknowledgement")


def test_an_async_loop_that_is_cancelled_while_the_service_stands_still_has_acknowledged(client: Client) -> None:
    """Whichever of its connections the service reads first: one of them ends the lease of the rows."""
    put(client, 4)
    pid = client.stats()["pid"]

    async def loop(frozen: asyncio.Event) -> None:
        async for _ in tq.async_stream("p", ["x"], task="t", batch_size=4, micro_batch_size=1):
            if not frozen.is_set():
                frozen.set()
                freeze(pid)

    async def cancelled() -> None:
        frozen = asyncio.Event()
        task = asyncio.create_task(loop(frozen))
        await frozen.wait()
        task.cancel()
        await asyncio.wait([task])

    try:
        asyncio.run(cancelled())
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: used(client) == 1, "its acknowledgement")


@pytest.mark.parametrize("kind", ["loop", "async"])
def test_a_loop_that_ran_out_of_time_while_the_service_stands_still_has_acknowledged(
    service: Callable[..., Client], kind: str
) -> None:
    """Its acknowledgement was sent and not answered. What ends its leases comes over another connection, which the
    service reads first."""
    client = service(client={"timeout_s": 0.5})
    put(client, 4)
    pid = client.stats()["pid"]
    terms: dict[str, Any] = {"task": "t", "batch_size": 4, "micro_batch_size": 1}

    def stand_still() -> None:
        freeze(pid)
        (holder,) = lease_owner._HOLDERS
        holder._line.connection.notify(m.Received([]))

    async def asynchronous() -> None:
        async for _ in tq.async_stream("p", ["x"], **terms):
            stand_still()

    def loop() -> None:
        stream = iter(tq.stream("p", ["x"], **terms))
        next(stream)
        stand_still()
        next(stream), next(stream)

    try:
        with pytest.raises(DeadlineExceeded):
            asyncio.run(asynchronous()) if kind == "async" else loop()
        gc.collect()  # what the loop had: its leases end
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: bool(client.stats()), "an answer")
    until(lambda: used(client) == 1, "its acknowledgement", 10)
