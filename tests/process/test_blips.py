"""A network that cuts connections all the time: calls that are right succeed, each takes effect once."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import until
from histories import check_keys
from histories_rows import End, check_rows
from history_workers import TASKS, Recorder, Worker, drain, read_records
from hosts import TOKEN, Host
from proxy import Proxy

import transfer_queue as tq
from transfer_queue.errors import DeadlineExceeded, LeaseExpired, ServiceUnavailable
from transfer_queue.server.controller_proxy import Caller
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address
from transfer_queue.wire.aio import AsyncConnection
from transfer_queue.wire.handshake import ANY

CALLS, THREADS, LEAST_CUTS = 200, 3, 40


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    monkeypatch.setenv("TQ_TOKEN", TOKEN)
    made = Host()
    yield made
    made.close()


@pytest.fixture
def proxy(host: Host) -> Iterator[Proxy]:
    """In front of the host's server; this process is attached through it."""
    name, _, port = host.server.tcp.rpartition(":")
    with Proxy(name, int(port), seed=int(os.environ.get("TQ_BLIPS_SEED", "1"))) as made:
        tq.init({"address": f"tcp:127.0.0.1:{made.port}"})
        yield made
        made.leave_alone()
        tq.close()


def put(key: str, value: float, width: int = 4) -> None:
    tq.kv_put(key, "p", {"x": torch.full((width,), value)})


def values(key: str) -> list[float]:
    return tq.kv_batch_get(key, "p")["x"].values().unique().tolist()


def told(errors: list[Any]) -> dict[str, int]:
    """How often each error came, numbers and addresses aside."""
    texts = (f"{type(error).__name__}: {error}" for error in errors)
    return dict(Counter("".join(c for c in text if not c.isdigit())[:70] for text in texts).most_common())


def test_a_proxy_forwards_cuts_refuses_and_stalls(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    put("a", 1.0, 200_000)
    assert values("a") == [1.0]
    assert proxy.cut() >= 1
    assert values("a") == [1.0]
    monkeypatch.setitem(tq.get_client().session.config, "timeout_s", 0.3)
    proxy.refuse()
    proxy.cut()
    with pytest.raises((ServiceUnavailable, DeadlineExceeded)):
        tq.kv_list("p")
    proxy.leave_alone()
    assert "a" in tq.kv_list("p")["p"]
    proxy.stall("down")
    with pytest.raises(DeadlineExceeded):
        tq.kv_list("p")
    proxy.leave_alone()
    assert "a" in tq.kv_list("p")["p"]


@pytest.mark.parametrize("nbytes", [1, 20, 90_000, 1_000_000])
def test_a_put_and_a_get_whose_connections_are_cut_on_the_way_succeed(proxy: Proxy, nbytes: int) -> None:
    for round_ in range(3):
        proxy.cut_after(nbytes)
        put("a", float(round_), 300_000)
        proxy.cut_after(nbytes)
        assert values("a") == [float(round_)]
    assert proxy.num_cuts


def test_results_whose_answer_is_lost_on_the_way_are_in_once(host: Host, proxy: Proxy) -> None:
    """The client asks again over a new connection, and has the answer to what it asked first."""
    pool = tq.group_pool("train", tq.GroupPolicy())
    pool.open("g", 3)
    attempts = pool.claim(3)
    pool.fail(attempts[2])
    (again,) = pool.claim(3)
    found: list[Any] = []
    results = [one.result(reward=1.0) for one in attempts]
    writer = threading.Thread(target=lambda: found.append(pool.finish_batch(results, {"x": torch.arange(3)})))
    proxy.stall("down")
    writer.start()
    until(lambda: host.client.stats()["rows"] == 2, "the results")
    proxy.cut()
    proxy.leave_alone()
    writer.join()
    assert [one.attempt for one in found[0].refused] == [attempts[2]]
    assert host.client.stats()["rows"] == len(found[0].metadata) == 2
    pool.finish(again, {"x": torch.tensor([2])})
    assert tq.get_client().get_data(pool.select(1).metadata)["x"].flatten().tolist() == [0, 1, 2]


def work(worker: Worker, crashed: list[BaseException]) -> None:
    try:
        for _ in range(CALLS):
            worker.step()
    except BaseException as error:
        crashed.append(error)
        raise


def test_calls_over_a_network_that_cuts_connections_succeed_and_take_effect_once(
    host: Host, proxy: Proxy, tmp_path: Path
) -> None:
    workers = [Worker(Recorder(tmp_path, f"thread-{n}"), n + 1, n) for n in range(THREADS)]
    crashed: list[BaseException] = []
    proxy.cut_between(300, 2_000_000)  # the largest requests and answers get through often enough
    proxy.cut()
    threads = [threading.Thread(target=work, args=(worker, crashed)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proxy.leave_alone()
    assert not crashed
    errors = told([error for worker in workers for error in worker.errors if not isinstance(error, LeaseExpired)])
    leaving = time.monotonic()
    tq.close()
    until(lambda: host.client.stats()["clients"] == 1, "the end of the session, and of its leases")
    tq.init({"address": host.server.address})
    drain(Recorder(tmp_path, "drain"))
    ends = [End(process=worker.recorder.process, started=leaving, outcome="ok") for worker in workers]
    history = [*read_records(tmp_path), *ends]
    wrong = [*check_keys(history), *check_rows(history, TASKS)]  # tells also who was refused a lease that lived
    summary = f"{proxy.num_cuts} cuts in {len(history)} operations: {errors or 'no errors'}; {len(wrong)} wrong"
    print(summary)
    assert proxy.num_cuts > LEAST_CUTS, summary
    assert not wrong, "\n".join([summary, *map(str, wrong)])
    assert not errors, "\n".join([summary, *(str(error) for worker in workers for error in worker.errors)])


def test_what_a_unit_passes_on_is_asked_again_as_often_as_its_connection_is_cut(proxy: Proxy) -> None:
    put("a", 1.0)

    async def ask() -> Any:
        caller = Caller(parse_address(f"tcp:127.0.0.1:{proxy.port}", TOKEN), bytes(16), ANY, lambda *_: None)
        proxy.cut_between(1, 100)  # within the handshake
        asking = asyncio.ensure_future(caller.call(m.ListPartitions(1), None, 20.0))
        while proxy.num_cuts < 4:
            assert not asking.done()
            await asyncio.sleep(0.01)
        proxy.leave_alone()
        try:
            return (await asking)[0].names
        finally:
            caller.close()

    assert asyncio.run(ask()) == ["p"]


def test_a_connection_that_is_lost_before_anything_was_asked_is_noticed() -> None:
    """A server with more newcomers than it takes closes some; on a busy loop that is seen before the first message."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def turn_away() -> None:
            newcomer, _ = server.accept()
            newcomer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            newcomer.close()

        class Busy(AsyncConnection):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                guard.join()  # until the other end is closed

        async def connect() -> None:
            connection = Busy(parse_address(f"tcp:127.0.0.1:{port}", TOKEN), m.decode_server)
            with pytest.raises(ServiceUnavailable):
                await connection.open(bytes(16), 5.0)

        guard = threading.Thread(target=turn_away)
        guard.start()
        asyncio.run(connect())
