"""A call whose answer nobody got took nothing: it was cancelled, interrupted, cut off, or its process killed."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import secrets
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Child, freeze, until
from hosts import LARGE, TOKEN, Host, rows
from tables import Box, indexes

import transfer_queue as tq
from transfer_queue.client.connection import Connection
from transfer_queue.client.views import BlockView
from transfer_queue.controller.unreceived import MAX_RECEIVED
from transfer_queue.memory.bytes import Anchor, address_of
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.server.controller_proxy import Caller
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address
from transfer_queue.wire.handshake import ANY

Spawn = Callable[[str], Child]


def fetch(rid: int, partition: str = "p", wait_s: float = 0.0, lease_s: float = 0.0, size: int = 1) -> m.Fetch:
    return m.Fetch(rid, partition, ["x"], size, "t", {}, wait_s, False, lease_s)


def left(client: tq.TransferQueueClient, partition: str = "p") -> int:
    """How many ready rows the task has not taken."""
    _, status = client.get_consumption_status("t", partition)
    assert status is not None
    return int((status == 0).sum())


# the controller


def test_a_fetch_that_was_not_received_is_undone_and_wakes_who_waits() -> None:
    box = Box()
    put = indexes(box.put(2))
    assert box.fetch(2, rid=7, received=False) == put
    assert box.fetch(2, ticket="waits", wait_s=9.0, session=b"other") is None
    box.controller.take_back(b"session", 7)
    assert box.answers() == [("waits", put)]


def test_a_fetch_that_was_received_stays_taken() -> None:
    box = Box()
    box.put(2)
    box.fetch(2, rid=7)
    box.end_session()
    box.controller.take_back(b"session", 7)
    assert box.fetch(1, empty=True) == []


def test_a_fetch_whose_asker_was_interrupted_right_after_it_confirmed_is_undone() -> None:
    box = Box()
    put = indexes(box.put(2))
    box.fetch(2, rid=7)
    box.controller.take_back(b"session", 7)
    assert box.fetch(2, rid=8) == put
    box.controller.take_back(b"session", 7)
    assert box.fetch(1, empty=True) == []


def test_only_the_last_few_confirmed_fetches_of_a_session_are_undone() -> None:
    box = Box()
    put = indexes(box.put(MAX_RECEIVED + 1))
    for rid in range(MAX_RECEIVED + 1):
        box.fetch(1, rid=rid)
    for rid in range(MAX_RECEIVED + 1):
        box.controller.take_back(b"session", rid)
    assert box.fetch(MAX_RECEIVED, empty=True) == put[1:]


def test_a_confirmed_batch_that_another_rank_has_too_stays_taken() -> None:
    box = Box(GRPOGroupNSampler(2))
    put = indexes(box.put(2))
    terms = {"dp_rank": 0, "batch_index": 0}
    for session in (b"one", b"two"):
        assert box.fetch(2, session=session, **terms) == put
    box.controller.take_back(b"one", 1)
    assert box.fetch(2, empty=True, dp_rank=0, batch_index=1) == []


def test_the_end_of_a_session_undoes_what_it_had_not_received() -> None:
    box = Box()
    put = indexes(box.put(4))
    assert box.fetch(2, rid=1) == put[:2]
    assert box.fetch(2, rid=2, received=False) == put[2:]
    box.end_session()
    assert box.fetch(2, session=b"other") == put[2:]


def test_a_batch_that_one_rank_received_stays_with_it() -> None:
    box = Box(GRPOGroupNSampler(2))
    put = indexes(box.put(4))
    terms = {"dp_rank": 0, "batch_index": 0}
    for session, received in ((b"one", False), (b"two", True)):
        assert box.fetch(2, session=session, received=received, **terms) == put[:2]
    box.end_session(b"one")
    assert box.fetch(2, session=b"two", dp_rank=0, batch_index=1) == put[2:]
    assert box.fetch(2, empty=True, dp_rank=0, batch_index=2) == []


def test_a_batch_that_no_rank_received_is_offered_again() -> None:
    box = Box(GRPOGroupNSampler(2))
    put = indexes(box.put(2))
    terms = {"dp_rank": 0, "batch_index": 0}
    for session in (b"one", b"two"):
        assert box.fetch(2, session=session, received=False, **terms) == put
    box.end_session(b"one")
    assert box.fetch(2, empty=True, session=b"three", dp_rank=1, batch_index=5) == []
    box.end_session(b"two")
    assert box.fetch(2, session=b"three", dp_rank=1, batch_index=5) == put


def test_nothing_is_undone_after_the_consumption_was_reset() -> None:
    box = Box()
    put = indexes(box.put(1))
    box.fetch(1, rid=1, received=False)
    box.reset()
    assert box.fetch(1, rid=2, session=b"other") == put
    box.controller.take_back(b"session", 1)
    assert box.fetch(1, empty=True) == []


def test_rows_cleared_meanwhile_are_not_offered() -> None:
    box = Box()
    put = indexes(box.put(2))
    box.fetch(2, rid=1, received=False)
    box.clear(put[:1])
    box.controller.take_back(b"session", 1)
    assert box.fetch(1) == put[1:]


def test_inserted_rows_that_nobody_knows_are_removed_unless_written() -> None:
    box = Box()
    known = indexes(box.insert(3))
    box.put(known[:1])
    box.controller.take_back(b"session", 1)
    assert box.controller.tables["p"].num_rows == 1


def test_an_admission_that_was_not_received_is_given_back() -> None:
    box = Box()
    assert box.admit(4)
    assert not box.admit(4, wait_s=1.0, ticket="waits")
    box.end_session()
    assert [ticket for ticket, _ in box.answers()] == ["waits"]


# over a socket


@pytest.mark.parametrize("lease_s", [0.0, 60.0])
def test_the_rows_of_an_asker_that_died_before_it_confirmed_come_back(
    client: tq.TransferQueueClient, lease_s: float
) -> None:
    client.put({"x": torch.zeros(3)}, partition_id="p")
    asker = Connection(client.address, secrets.token_bytes(16), 5.0)
    for rid in (1, 2):
        asker.call(fetch(rid, lease_s=lease_s), None, 5.0)
    asker.notify(m.Received([1]))
    asker.close()
    until(lambda: client.get_meta(["x"], 1, "p", task_name="t", timeout_s=5).size == 1, "the row that came back")
    assert client.get_meta(["x"], 1, "p", task_name="t", timeout_s=5).size == 1
    meta = (
        client.get_meta(["x"], 1, "p", task_name="t", timeout_s=1 if lease_s else 0, sampling_config={})
        if (lease_s)
        else None
    )
    assert meta is None or meta.size == 1, "a lease that was received ends with its session all the same"


@pytest.mark.parametrize("lease_s", [None, 60.0])
def test_a_wait_that_times_out_as_rows_arrive_takes_none_or_returns_them(
    client: tq.TransferQueueClient, lease_s: float | None
) -> None:
    """Every row is in somebody's hands or still on offer, wherever the time-out strikes."""
    count = 100
    got: list[int] = []

    async def one(number: int) -> None:
        fetching = client.async_get_meta(
            ["x"], 1, f"p{number}", task_name="t", timeout_s=30, **({"lease_s": lease_s} if lease_s else {})
        )
        waiting = asyncio.ensure_future(asyncio.wait_for(fetching, 0.02))
        await asyncio.sleep(0.02 - 0.0005 * (number % 5))
        await client.async_put({"x": torch.zeros(1)}, partition_id=f"p{number}")
        try:
            if (await waiting).size:
                got.append(number)
        except asyncio.TimeoutError:
            pass

    async def all_of_them() -> None:
        for start in range(0, count, 10):
            await asyncio.gather(*(one(number) for number in range(start, start + 10)))

    asyncio.run(all_of_them())
    for number in range(count):
        if number not in got:
            assert client.get_meta(["x"], 1, f"p{number}", task_name="t", timeout_s=5).size == 1


def test_a_cancel_that_crosses_the_answer_gives_the_rows_back(client: tq.TransferQueueClient) -> None:
    client.put({"x": torch.zeros(1)}, partition_id="p")
    asker = Connection(client.address, secrets.token_bytes(16), 5.0)
    for rid in range(1, 40):
        asker.call(fetch(rid), None, 5.0)  # the answer is here, but its asker is gone
        asker.notify(m.Cancel(rid))
    asker.call(m.ListPartitions(100), None, 5.0)
    assert client.get_consumption_status("t", "p")[1].tolist() == [0]
    asker.close()


@pytest.mark.parametrize("lease_s", [0.0, 60.0])
@pytest.mark.parametrize("waits", [False, True])
def test_a_cancel_is_heard_although_its_connection_was_closed_before_the_answer_was_sent(
    client: tq.TransferQueueClient, lease_s: float, waits: bool
) -> None:
    """As an event loop leaves it that ends with the call's time-out. The session lives on by another connection. An
    answer that `waits` fails before the cancellation is read; another one has been read together with it."""
    client.put({"x": torch.zeros(1)}, partition_id="p")
    session = secrets.token_bytes(16)
    kept, asker = (Connection(client.address, session, 5.0) for _ in range(2))
    if waits:
        kept.call(fetch(10), None, 5.0)
        asker.post(fetch(1, wait_s=30.0, lease_s=lease_s), None, 5.0)
        until(lambda: client.stats()["waiting_requests"] == 1, "the parked fetch")
    freeze(client.session.server_pid)
    try:
        kept.notify(m.Cancel(10))  # of which the server reads first
        asker._frames.socket.sendall((b"" if waits else _framed(fetch(1, lease_s=lease_s))) + _framed(m.Cancel(1)))
        asker.close()
    finally:
        os.kill(client.session.server_pid, signal.SIGCONT)
    try:
        assert client.get_meta(["x"], 1, "p", task_name="t", timeout_s=10).size == 1
    finally:
        kept.close()


@pytest.mark.parametrize("kind", ["get", "fetch", "allocate"])
def test_a_request_that_its_cancellation_overtook_is_not_begun(client: tq.TransferQueueClient, kind: str) -> None:
    """They come over two connections, as after an interrupt, and the server may look at the second one first."""
    large = client.put(rows(1, 2, LARGE), partition_id="p")
    used = client.stats()["arena_nbytes_used"]
    request = {
        "get": m.Get(1, "p", None, large.indexes.tobytes(), ["x"], True),
        "fetch": fetch(1),
        "allocate": m.Allocate(1, 1 << 20, False, 0.0),
    }[kind]
    session = secrets.token_bytes(16)
    asker, other = (Connection(client.address, session, 5.0) for _ in range(2))
    frames = _framed(request)
    asker._frames.socket.sendall(frames[:-1])
    other.notify(m.Cancel(1))
    other.call(m.ListPartitions(2), None, 5.0)
    asker._frames.socket.sendall(frames[-1:])
    assert isinstance(asker._frames.receive(5.0)[0], m.Failed)
    assert left(client) == 2
    assert client.stats()["pinned_nbytes"] == {}
    assert client.stats()["arena_nbytes_used"] == used
    for connection in (asker, other):
        connection.close()


def test_a_request_whose_connection_is_newer_than_its_cancellation_is_begun(client: tq.TransferQueueClient) -> None:
    """As a unit asks again for a client that came back over another connection."""
    client.put({"x": torch.zeros(1)}, partition_id="p")
    session = secrets.token_bytes(16)
    one = Connection(client.address, session, 5.0)
    one.notify(m.Cancel(1))
    one.call(m.ListPartitions(2), None, 5.0)
    two = Connection(client.address, session, 5.0)
    assert isinstance(two.call(fetch(1), None, 5.0)[0], m.RowSet)
    assert left(client) == 0
    for connection in (one, two):
        connection.close()


def test_a_cancel_that_overtakes_the_answer_of_a_waiting_request_gives_everything_back(
    client: tq.TransferQueueClient,
) -> None:
    """The put that completes a fetch and the fetch's cancellation are handled before any answer is sent."""
    asker = Connection(client.address, secrets.token_bytes(16), 5.0)
    asker.post(fetch(1, wait_s=30.0), None, 5.0)
    until(lambda: client.stats()["waiting_requests"] == 1, "the parked fetch")
    frames = b"".join(_framed(one) for one in (m.Insert(2, "p", 1, ["x"], 0.0), m.SetPartition(3, "p", 1, {})))
    asker._frames.socket.sendall(frames + _framed(m.Cancel(1)) + _framed(m.ListPartitions(4)))
    until(lambda: client.stats()["waiting_requests"] == 0, "the end of the fetch")
    asker.close()


def _framed(message: Any) -> bytes:
    from transfer_queue.wire.framing import frame

    return frame(m.encode(message))


def test_a_received_fetch_survives_its_process(client: tq.TransferQueueClient, child: Spawn) -> None:
    client.put({"x": torch.zeros(4)}, partition_id="p")
    taker = child(
        """
        import transfer_queue as tq
        tq.init()
        print(tq.get_client().get_meta(["x"], 3, "p", task_name="t").size, flush=True)
        input()
        """
    )
    assert taker.line() == "3"
    taker.kill()
    until(lambda: client.stats()["clients"] == 1, "the end of its session")
    assert left(client) == 1


INTERRUPTED = """
import ctypes, gc, os, random, signal, sys, threading, time
import torch, transfer_queue as tq
tq.init()
client = tq.get_client()
chance = random.Random({seed})
small, large = {{"x": torch.zeros(4, 8)}}, {{"x": torch.zeros(4, 100_000)}}
client.put(large, partition_id="kept")
def work():
    meta = client.put(large if chance.random() < 0.7 else small, partition_id="p")
    client.get_data(meta)
    client.get_data(meta, copy=True)
    got = client.get_meta(["x"], 2, "p", task_name="t", timeout_s=5)
    client.get_data(got)
    client.allocate({{"x": ((2, 50_000), torch.float32)}})
    client.clear_samples(meta)
for _ in range(20):
    work()
client.clear_partition("p")
def strike():
    for _ in range({count}):
        go.wait()
        go.clear()
        deadline = time.perf_counter() + chance.random() * {span}
        while time.perf_counter() < deadline:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        while not struck.wait(0.3):  # a callback of the collector swallowed it
            os.kill(os.getpid(), signal.SIGINT)
        struck.clear()
go, struck = threading.Event(), threading.Event()
threading.Thread(target=strike, daemon=True).start()
others = {{}}
for number in range({count}):
    try:
        try:
            go.set()
            while True:
                work()
        except KeyboardInterrupt:
            struck.set()
    except KeyboardInterrupt:  # a second one, sent as the first one took its time
        struck.set()
    except BaseException as error:
        others[type(error).__name__] = others.get(type(error).__name__, 0) + 1
        struck.set()
client.clear_partition("p")
gc.collect()
print(others, flush=True)
input()
"""


def test_an_interrupted_call_leaves_nothing_pinned_or_allocated(client: tq.TransferQueueClient, child: Spawn) -> None:
    seed = random.randrange(1 << 30)
    worker = child(INTERRUPTED.format(seed=seed, count=100, span=0.01))
    assert worker.line() == "{}", f"seed {seed}"
    kept = 4 * 100_000 * 4
    until(lambda: sum(client.stats()["pinned_nbytes"].values()) == 0, f"the release of all pins (seed {seed})", 10)
    assert client.stats()["arena_nbytes_used"] < kept + (1 << 16), f"seed {seed}"
    worker.say()
    worker.finish()


# other hosts


def test_what_a_unit_passed_on_and_nobody_received_comes_back(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    head.client.put(rows(1, 2), partition_id="p")
    asker = Connection(unit.client.address, secrets.token_bytes(16), 5.0)
    asker.call(fetch(1), None, 5.0)
    asker.call(fetch(2), None, 5.0)
    asker.notify(m.Received([1]))
    asker.call(m.ListPartitions(3), None, 5.0)
    asker.close()
    until(lambda: left(head.client) == 1, "the undoing of the second fetch")


def test_what_was_confirmed_while_the_controller_could_not_be_told_stays_taken(start_host: Callable[..., Host]) -> None:
    head = start_host()
    head.client.put(rows(1, 2), partition_id="p")

    async def take_one() -> None:
        caller = Caller(parse_address(head.tcp, TOKEN), secrets.token_bytes(16), ANY, lambda ticket, reply: None)
        await caller.call(fetch(7), None, 5.0)
        connection = await caller.connection()
        connection.close()
        caller.say(m.Received([7]))
        await caller.connection()
        assert caller.close()

    before = head.client.stats()["clients"]
    asyncio.run(take_one())
    until(lambda: head.client.stats()["clients"] == before, "the end of its session")
    assert left(head.client) == 1


def test_a_reader_over_tcp_loses_no_pin_to_a_cut_connection(start_host: Callable[..., Host]) -> None:
    host = start_host()
    meta = host.client.put(rows(1, 2, LARGE), partition_id="p")
    tcp = host.tcp.removeprefix("tcp:").rpartition(":")
    from hosts import TOKEN

    from transfer_queue.wire.address import Address

    far = Address(host=tcp[0], port=int(tcp[2]), token=TOKEN)
    ident = secrets.token_bytes(16)
    before = Connection(far, ident, 5.0)
    located = before.call(m.Get(1, "p", None, meta.indexes.tobytes(), ["x"], True), None, 5.0)[0]
    block = located.pieces[0].block
    before.call(m.Take(2, [m.Cut(block, torch.arange(2).numpy().tobytes(), ["x", "n"])]), None, 5.0)
    before.close()
    until(lambda: host.client.stats()["clients"] >= 1, "the cut")
    after = Connection(far, ident, 5.0)
    reply, data = after.call(m.Read(3, block, 0, 4096), None, 5.0)
    assert isinstance(reply, m.Data), reply
    assert len(data) == 4096
    after.notify(m.Goodbye())
    after.close()
    until(lambda: host.client.stats()["pinned_nbytes"] == {}, "the end of its pins")


def test_a_view_that_was_given_up_half_made_keeps_no_other_from_ending(client: tq.TransferQueueClient) -> None:
    views = client.session.views
    meta = client.put(rows(1, 2, LARGE), partition_id="p")
    client.get_data(meta)
    memory = np.zeros(8, np.uint8)
    half_made = BlockView(Anchor(address_of(memory), 8, memory), views._notes.put)  # an interrupt came before the rest
    assert half_made() is None
    client.get_data(meta)
    gc.collect()
    until(lambda: client.stats()["pinned_nbytes"] == {}, "the end of both pins")
