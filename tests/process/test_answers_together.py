"""Answers that one event of the server's makes leave with one call of the system for each connection: a call costs
more than the answer, and may wake a client for each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from conftest import freeze

import transfer_queue as tq
from transfer_queue.client.client import TransferQueueClient

Service = Callable[..., TransferQueueClient]
TOGETHER = 16


def num_writes(pid: int) -> int:
    """How many write calls the server made so far (proc(5): `syscw`)."""
    counts = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in counts if line.startswith("syscw")).split()[1])


async def writes_during(client: TransferQueueClient, work: Coroutine[Any, Any, Any]) -> int:
    pid = client.stats()["pid"]
    before = num_writes(pid)
    await work
    return num_writes(pid) - before


async def come_together(pid: int, first: int) -> None:
    """Puts that the server reads at once, for it stood still as they came."""
    freeze(pid)
    try:
        working = asyncio.ensure_future(puts(first))
        for _ in range(100):
            await asyncio.sleep(0)
    finally:
        os.kill(pid, signal.SIGCONT)
    await working


async def put(number: int) -> None:
    await tq.async_kv_put(key=f"k{number}", partition_id="p", fields={"x": torch.zeros(4)})


async def puts(first: int) -> None:
    await asyncio.gather(*[put(number) for number in range(first, first + TOGETHER)])


def test_requests_that_came_together_are_answered_together(service: Service) -> None:
    client = service()

    async def main() -> int:
        await puts(0)  # connects
        pid = client.stats()["pid"]  # over another connection: there are two
        return await writes_during(client, come_together(pid, TOGETHER))

    assert asyncio.run(main()) <= TOGETHER / 2
    assert len(tq.kv_list("p")["p"]) == 2 * TOGETHER


def test_a_client_that_is_alone_has_its_first_answer_before_its_last_request_is_looked_at(service: Service) -> None:
    """It works on the one while the server works on the other: on two processors twice as much gets done."""
    client = service()

    async def alone(pid: int) -> None:
        await put(0)
        await come_together(pid, TOGETHER)

    async def main() -> int:
        await puts(0)
        return await writes_during(client, alone(client.stats()["pid"]))

    assert asyncio.run(main()) > TOGETHER


def test_requests_that_one_put_ends_the_wait_of_are_answered_together(service: Service) -> None:
    client = service()

    async def main() -> int:
        waiting = [
            asyncio.ensure_future(client.async_get_meta(["x"], 1, "p", task_name=f"t{number}", timeout_s=60.0))
            for number in range(TOGETHER)
        ]
        while client.stats()["waiting_requests"] < TOGETHER:
            await asyncio.sleep(0)
        return await writes_during(client, asyncio.wait_for(_put_and(waiting), 60))

    assert asyncio.run(main()) <= TOGETHER / 2


async def _put_and(waiting: list[Any]) -> None:
    await put(0)
    assert [len(meta) for meta in await asyncio.gather(*waiting)] == [1] * TOGETHER


def test_what_a_disk_has_at_the_same_time_is_answered_together(service: Service, tmp_path: Path) -> None:
    client = service(server={"journal_dir": str(tmp_path / "journal")})

    async def main() -> int:
        await puts(0)
        return await writes_during(client, puts(TOGETHER))

    # the log itself is written as well
    assert asyncio.run(main()) <= TOGETHER / 2
