"""Units and controllers that are killed, frozen or replaced: what is lost is told, nothing hangs, the rest goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from conftest import freeze, until
from hosts import CLIENT, LARGE, UNIT_TOKEN, Host, firsts, rows

from transfer_queue.errors import (
    DataLost,
    DeadlineExceeded,
    InvalidInput,
    ServiceRestarted,
    ServiceUnavailable,
    TransferQueueError,
)
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address
from transfer_queue.wire.aio import AsyncConnection


def test_a_killed_unit_takes_its_rows_and_that_is_told(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    address = unit.server.tcp
    meta = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    kept = head.client.put(rows(2, 2, LARGE), partition_id="p")
    os.kill(unit.server.pid, signal.SIGKILL)
    until(lambda: head.client.stats()["units"]["1"]["away"], "the loss of the unit")
    with pytest.raises(ServiceUnavailable, match="away"):
        head.client.get_data(meta)
    again = start_host(join=head.tcp, port=int(address.rpartition(":")[2]))
    with pytest.raises(DataLost, match="gone"):
        head.client.get_data(meta)
    assert head.client.get_meta(["x"], 2, "p", task_name="t").global_indexes == kept.global_indexes
    again.client.put(rows(5, 2, LARGE), metadata=meta)
    assert firsts(head.client.get_data(meta)) == [5, 5]
    with pytest.raises(TransferQueueError):
        unit.client.get_data(meta)


def test_a_second_unit_at_the_address_of_a_living_one_is_refused_and_no_row_is_lost(
    start_host: Callable[..., Host],
) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    meta = unit.client.put(rows(1, 2, LARGE), partition_id="p")

    async def second() -> Any:
        async with joined_at(head, unit.server.tcp) as answer:
            return answer

    answer = asyncio.run(second())
    assert (type(answer), answer.code) == (m.Failed, InvalidInput.code)
    assert unit.server.tcp in answer.text
    assert [one["address"] for one in head.client.stats()["units"].values()] == [unit.server.tcp]
    assert firsts(head.client.get_data(meta)) == [1, 1]


def test_a_unit_takes_the_place_of_one_whose_end_nobody_has_heard_of(start_host: Callable[..., Host]) -> None:
    """Its host lost power: it says so when something is sent to it."""
    head = start_host()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def replaced() -> None:
        told = asyncio.Event()
        async with joined_at(head, f"127.0.0.1:{port}", told) as answer:
            assert isinstance(answer, m.Joined)
            starting = asyncio.create_task(asyncio.to_thread(start_host, join=head.tcp, port=port))
            await asyncio.wait_for(told.wait(), 30.0)
        await starting

    asyncio.run(replaced())
    assert [one["away"] for one in head.client.stats()["units"].values()] == [False]


@asynccontextmanager
async def joined_at(head: Host, address: str, told: asyncio.Event | None = None) -> AsyncIterator[Any]:
    """A unit without blocks that says that it is at `address`: the answer to its join. `told`: set by any push."""
    told = told or asyncio.Event()
    connection = AsyncConnection(parse_address(head.tcp, UNIT_TOKEN), m.decode_server, lambda _: told.set())
    await connection.open(os.urandom(16), 5.0, role=handshake.UNIT)
    try:
        yield (await connection.call(m.Join(1, os.urandom(16), address, b""), None, 5.0))[0]
    finally:
        connection.close()


def test_rows_of_a_unit_that_is_away_are_handed_to_nobody(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    unit.client.put(rows(1, 2, LARGE), partition_id="p")
    kept = head.client.put(rows(2, 2, LARGE), partition_id="p")
    os.kill(unit.server.pid, signal.SIGKILL)
    until(lambda: head.client.stats()["units"]["1"]["away"], "the loss of the unit")
    taken, data = head.client.take("p", ["x"], 2, "t")
    assert (taken.global_indexes, firsts(data)) == (kept.global_indexes, [2, 2])
    with pytest.raises(DeadlineExceeded, match=r"2 on storage units that are away \(\[1\]\)"):
        head.client.get_meta(["x"], 2, "p", task_name="t", timeout_s=0.1)
    assert not head.client.check_consumption_status("t", "p")
    assert head.client.check_production_status(["x"], "p")


def test_who_waits_hears_how_many_rows_were_lost_with_their_unit(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp, away_s=0.1)
    meta = unit.client.put(rows(1.0, 3, LARGE), partition_id="p")
    head.client.put(rows(2.0, 2, LARGE), partition_id="p")
    os.kill(unit.server.pid, signal.SIGKILL)
    until(lambda: head.client.overview().partitions[0].lost == 3, "the loss of the rows")
    head.client.put(rows(3.0, 1, LARGE), metadata=meta[:1])
    said = "2 lost with the storage that held them"
    with pytest.raises(DeadlineExceeded, match=said):
        head.client.get_meta(["x"], 4, "p", task_name="t", timeout_s=0.1)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(head.client.get_meta, ["x"], 4, "p", task_name="t", timeout_s=5)
        until(lambda: said in str(head.client.overview().waits), "the word of who waits")
        head.client.put(rows(3.0, 2, LARGE), metadata=meta[1:])


def test_a_dead_controller_is_reported_at_once(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    unit.kv_put(["a"], "p", rows(1, 1))
    os.kill(head.server.pid, signal.SIGKILL)
    with pytest.raises(ServiceUnavailable):
        unit.kv_get(["a"], "p")
    with pytest.raises(ServiceUnavailable):
        unit.kv_put(["b"], "p", rows(1, 1, LARGE))


def test_a_unit_joins_the_next_controller_at_the_address_and_starts_empty(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    unit.kv_put(["a"], "p", rows(1, 1, LARGE))
    os.kill(head.server.pid, signal.SIGKILL)
    head.server._process.wait()
    second = start_host(port=int(head.tcp.rpartition(":")[2]))
    until(lambda: bool(second.client.stats()["units"]), "the unit's return")
    with pytest.raises(ServiceRestarted):
        unit.used()
    until(lambda: unit.used() == 0, "the end of the old rows")
    unit.kv_put(["a"], "p", rows(2, 1, LARGE))
    assert firsts(second.kv_get(["a"], "p")) == [2]


def test_a_client_of_a_unit_that_stays_is_not_told_that_its_server_is_gone(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    unit.client.get_partition_list()
    os.kill(head.server.pid, signal.SIGKILL)
    head.server._process.wait()
    second = start_host(port=int(head.tcp.rpartition(":")[2]))
    until(lambda: bool(second.client.stats()["units"]), "the unit's return")
    with pytest.raises(ServiceRestarted, match="another service is here now") as caught:
        unit.client.get_partition_list()
    assert "gone" not in str(caught.value)
    assert unit.client.stats()["pid"] == unit.server.pid


def test_a_put_that_waits_for_memory_of_a_unit_is_told_of_the_next_controller(start_host: Callable[..., Host]) -> None:
    patient = {"client": {**CLIENT, "timeout_s": 60.0}}
    head = start_host(**patient)
    unit = start_host(join=head.tcp, budget_nbytes=4 * LARGE * 4, notice_after_s=[])
    unit.kv_put(["a", "b", "c"], "p", rows(1.0, 3, LARGE))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(unit.kv_put, ["d", "e"], "p", rows(2.0, 2, LARGE))
        until(lambda: unit.client.stats()["waiting_requests"] == 1, "a waiting put")
        os.kill(head.server.pid, signal.SIGKILL)
        head.server._process.wait()
        start_host(port=int(head.tcp.rpartition(":")[2]), **patient)
        with pytest.raises(ServiceRestarted):
            waiting.result(timeout=20)


def test_a_stopped_unit_delays_only_its_own_readers_and_until_their_deadline(start_host: Callable[..., Host]) -> None:
    head = start_host(client={**CLIENT, "timeout_s": 1.0})
    unit = start_host(join=head.tcp)
    unit.kv_put(["far"], "p", rows(1, 1, LARGE))
    head.kv_put(["near"], "p", rows(2, 1, LARGE))
    freeze(unit.server.pid)
    try:
        with pytest.raises(TransferQueueError):
            head.kv_get(["far"], "p")
        assert firsts(head.kv_get(["near"], "p")) == [2]
    finally:
        os.kill(unit.server.pid, signal.SIGCONT)
    assert firsts(head.kv_get(["far"], "p")) == [1]


def test_a_commit_whose_answer_never_came_is_either_whole_or_leaves_nothing(start_host: Callable[..., Host]) -> None:
    head = start_host(client={**CLIENT, "timeout_s": 0.5})
    unit = start_host(join=head.tcp)
    unit.kv_put(["a"], "p", rows(1, 1))
    used = unit.used()
    freeze(head.server.pid)
    try:
        with pytest.raises(DeadlineExceeded):
            unit.kv_put(["b"], "p", rows(2, 1, LARGE))
    finally:
        os.kill(head.server.pid, signal.SIGCONT)
    until(lambda: head.client.stats()["waiting_requests"] == 0, "the head's answers")

    def settled() -> bool:
        if unit.used() == used:
            return "b" not in head.client.kv_list("p")["p"]
        return firsts(head.kv_get(["b"], "p")) == [2]

    until(settled, "the outcome")
    head.client.clear_partition("p")
    until(lambda: unit.used() == 0, "the end of all rows")
