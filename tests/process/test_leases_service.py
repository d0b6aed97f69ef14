"""Leases as sessions and clients see them, with consumers that are killed and frozen (R4, R5)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import freeze, until
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.client import forks
from transfer_queue.controller import Controller
from transfer_queue.errors import InvalidInput, LeaseExpired, UnknownMode
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import SequentialSampler
from transfer_queue.schema import FieldSchema
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m


@pytest.fixture
def lending() -> Iterator[Service]:
    unit = Unit(1 << 20)
    service = Service(Controller(SequentialSampler(), reserved_rows=0), unit)
    session = service.sessions.attach(b"writer", local=True)
    commit = m.Commit(1, "p", 2, None, None, [FieldSchema("x", "dense", "uint8", ())], 0, b"", None, 0.0)
    service.handle(commit, memoryview(b"ab"), session, ("link", 1), 0.0)
    yield service
    unit.close()


def send(service: Service, session: ServerSession, message: m.Request) -> Any:
    answer = service.handle(message, memoryview(b""), session, ("link", message.rid), 0.0)
    service.check_invariants()
    return None if answer is None else answer[0]


def take(rid: int, wait_s: float = 0.0, holder: bytes = b"") -> m.Fetch:
    return m.Fetch(rid, "p", ["x"], 2, "t", {}, wait_s, False, 10.0, False, holder)


def test_repeated_requests_have_their_first_outcome(lending: Service) -> None:
    session = lending.sessions.attach(b"reader", local=True)
    lent = send(lending, session, take(1))
    assert send(lending, session, take(1)) is lent
    first = send(lending, session, m.Ack(2, lent.lease, lent.rows[:8]))
    assert (first.rows, send(lending, session, m.Ack(2, lent.lease, lent.rows[:8]))) == (1, first)
    lending.expire(100.0)
    assert send(lending, session, m.Ack(2, lent.lease, lent.rows[:8])) is first
    assert send(lending, session, m.Ack(3, lent.lease, lent.rows[8:])).code == LeaseExpired.code


def test_a_cancelled_fetch_lends_nothing(lending: Service) -> None:
    session, other = lending.sessions.attach(b"reader", local=True), lending.sessions.attach(b"other", local=True)
    send(lending, session, take(1))
    assert send(lending, other, take(1, wait_s=60.0)) is None
    lending.notify(m.Cancel(1), session)
    lending.notify(m.Cancel(1), session)
    ((ticket, reply),) = lending.answered(0.0)
    assert ticket == ("link", 1)
    assert len(reply[0].rows) == 16  # type: ignore[attr-defined]


@pytest.mark.parametrize("with_data", ["carry", "locate"])
def test_a_lease_that_a_cancellation_makes_possible_lasts_as_long_as_any(lending: Service, with_data: str) -> None:
    """Nobody tells the time when rows come back: it is that of the event before, here a fetch that takes data along."""
    now, empty = 1000.0, memoryview(b"")
    session, other = lending.sessions.attach(b"reader", local=True), lending.sessions.attach(b"other", local=True)
    fetch = take(1)
    setattr(fetch, with_data, True)
    assert lending.handle(fetch, empty, session, ("link", 1), now) is not None
    assert lending.handle(take(1, wait_s=60.0), empty, other, ("waits", 1), now) is None
    written = m.Commit(3, "q", 1, None, None, [FieldSchema("x", "dense", "uint8", ())], 0, b"", None, 0.0)
    lending.handle(written, memoryview(b"c"), session, ("link", 3), now)
    again = m.Fetch(4, "q", ["x"], 1, "t", {}, 0.0, True)
    setattr(again, with_data, True)
    lending.handle(again, empty, session, ("link", 4), now)
    lending.notify(m.Cancel(1), session)
    ((_, (reply, _)),) = lending.answered(now)
    assert isinstance(reply, m.RowSet)
    lending.expire(now + 9.0)
    answer = lending.handle(m.Ack(5, reply.lease, reply.rows), empty, other, ("link", 5), now + 9.0)
    assert answer is not None
    assert isinstance(answer[0], m.Lent), answer


def test_the_last_connection_of_a_session_returns_its_rows(lending: Service) -> None:
    session = lending.sessions.attach(b"reader", local=True)
    lending.sessions.attach(b"reader", local=True)
    first = send(lending, session, take(1))
    lending.detach(session, set(), 0.0)
    assert send(lending, session, m.Renew(2, first.lease, 10.0)).rows == 2
    lending.detach(session, set(), 0.0)
    other = lending.sessions.attach(b"other", local=True)
    assert send(lending, other, take(1)).rows == first.rows


def test_a_fetch_for_a_session_that_is_gone_is_refused(lending: Service) -> None:
    session = lending.sessions.attach(b"worker", local=True)
    assert send(lending, session, take(1, holder=b"nobody")).code == LeaseExpired.code


# the client and real processes


def put(client: tq.TransferQueueClient, rows: int, partition: str = "p") -> BatchMeta:
    return client.put(TensorDict({"x": torch.arange(rows)}, batch_size=[rows]), partition_id=partition)


def test_ack_renew_and_release_from_the_client(client: tq.TransferQueueClient) -> None:
    put(client, 4)
    meta = client.get_meta(["x"], 4, "p", task_name="t", lease_s=30.0)
    assert client.renew(meta, 60.0) == 4
    assert client.ack(meta[:2]) == 2
    assert client.release(meta[2:]) == 0
    again = client.get_meta(["x"], 2, "p", task_name="t", lease_s=30.0)
    assert again.global_indexes == meta.global_indexes[2:]
    with pytest.raises(LeaseExpired):
        client.ack(meta)
    assert not client.check_consumption_status("t", "p")
    assert client.ack(again) == 0
    assert client.check_consumption_status("t", "p")


def test_a_refused_row_says_why_it_comes_again(client: tq.TransferQueueClient) -> None:
    put(client, 3)
    meta = client.get_meta(["x"], 3, "p", task_name="t", lease_s=30.0)
    assert client.nack(meta[1:2], reason="no answer from the judge") == 2
    assert client.nack(meta[2:], delay_s=0.2, reason="again later") == 1
    again, _ = client.take("p", ["x"], 1, "t", lease_s=30.0)
    assert again.redelivered == {meta.global_indexes[1]: (1, "no answer from the judge")}
    later = client.get_meta(["x"], 1, "p", task_name="t", lease_s=30.0)
    assert [(row, one.attempts, one.reason) for row, one in later.redelivered.items()] == [
        (meta.global_indexes[2], 1, "again later")
    ]


def test_dead_letters_from_a_coroutine(client: tq.TransferQueueClient) -> None:
    rows = put(client, 2)

    async def give_up() -> None:
        config = {"max_deliver": 1}
        meta = await client.async_get_meta(["x"], 2, "p", task_name="t", lease_s=30.0, sampling_config=config)
        await client.async_nack(meta[:1])
        dead = await client.async_list_dead_letters("p", "t")
        assert dead.global_indexes == rows.global_indexes[:1]
        assert (await client.async_get_data(dead))["x"].tolist() == [0]
        assert await client.async_requeue_dead_letters("p", "t", dead) == 1

    asyncio.run(give_up())
    assert client.stats()["dead_letters"] == 0


def forked(work: Callable[[], None]) -> int:
    """How a child ended that did this."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            traceback.print_exc()  # pytest shows it where the test fails
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def test_a_session_that_cannot_follow_a_fork_keeps_no_other_from_it(client: tq.TransferQueueClient) -> None:
    """A child that spoke in its parent's name would keep its leases when it is killed."""
    put(client, 1)
    broken = [Broken() for _ in range(16)]  # some come before the client's session, some after it
    forks.sessions.update(broken)

    def consume() -> None:
        tq.get_client().get_meta(["x"], 1, "p", task_name="t", lease_s=60.0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(consume) == signal.SIGKILL
    forks.sessions.difference_update(broken)
    assert client.get_meta(["x"], 1, "p", task_name="t", timeout_s=10.0).global_indexes


class Broken:
    def before_fork(self) -> None: ...
    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None:
        raise AttributeError("no such thing")


def test_a_row_that_kills_its_consumers_ends_as_a_dead_letter(client: tq.TransferQueueClient) -> None:
    put(client, 3)
    client.set_partition("p", size=3)

    def consume() -> None:
        mine = tq.get_client()
        while True:
            meta, data = mine.take("p", ["x"], 1, "t", lease_s=30.0, sampling_config={"max_deliver": 2}, timeout_s=5)
            if int(data["x"][0]) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            mine.ack(meta)
            if mine.check_consumption_status("t", "p"):
                os._exit(0)

    assert [forked(consume) for _ in range(3)] == [signal.SIGKILL, signal.SIGKILL, 0]
    dead = client.list_dead_letters("p", "t")
    assert client.get_data(dead)["x"].tolist() == [1]
    assert [tuple(one) for one in dead.redelivered.values()] == [(2, "the holder's session ended")]


def test_a_lease_is_not_shorter_than_nothing(client: tq.TransferQueueClient) -> None:
    for ask in (client.get_meta, client.take):
        with pytest.raises(InvalidInput, match="lease_s"):
            ask(data_fields=["x"], batch_size=1, partition_id="p", task_name="t", lease_s=-1.0)


def test_metadata_without_a_lease_has_nothing_to_acknowledge(client: tq.TransferQueueClient) -> None:
    put(client, 1)
    meta = client.get_meta(["x"], 1, "p", task_name="t")
    assert meta.lease == 0
    with pytest.raises(InvalidInput, match="lease"):
        client.ack(meta)
    with pytest.raises(UnknownMode):
        client.get_meta(["x"], 1, "p", mode="force_fetch", lease_s=1.0)


def test_a_lease_outlives_the_connection_it_came_by(client: tq.TransferQueueClient) -> None:
    put(client, 1)
    meta = client.get_meta(["x"], 1, "p", task_name="t", lease_s=30.0)
    for connection in client.session._idle.pop(""):
        connection.close()
    assert client.ack(meta) == 0


CONSUMER = """
    import transfer_queue as tq
    tq.init()
    client = tq.get_client()
    meta = client.get_meta(["x"], 4, "p", task_name="t", lease_s={lease_s}, timeout_s=20)
    print(*meta.global_indexes, flush=True)
    input()
    try:
        client.ack(meta)
        print("acknowledged", flush=True)
    except tq.errors.LeaseExpired:
        print("LeaseExpired", flush=True)
    tq.close()
"""


def test_the_rows_of_a_killed_consumer_come_back_at_once(
    client: tq.TransferQueueClient, child: Callable[[str], Any]
) -> None:
    put(client, 8)
    consumer = child(CONSUMER.format(lease_s=600))
    held = [int(row) for row in consumer.line().split()]
    assert len(held) == 4
    rest = client.get_meta(["x"], 4, "p", task_name="t", timeout_s=0)
    assert not set(held) & set(rest.global_indexes)
    consumer.kill()
    assert client.get_meta(["x"], 4, "p", task_name="t", timeout_s=10).global_indexes == held


def test_a_server_that_stood_still_reads_what_came_before_leases_end(client: tq.TransferQueueClient) -> None:
    put(client, 4)
    meta = client.get_meta(["x"], 4, "p", task_name="t", timeout_s=0, lease_s=0.5)
    client.overview()  # its turn with the lease is over
    server, since = client.session.server_pid, time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        freeze(server)
        try:
            renewing = threads.submit(client.renew, meta, 600)
            until(lambda: time.monotonic() > since + 2, "the end of the lease, more than a second ago")
        finally:
            os.kill(server, signal.SIGCONT)
        assert renewing.result() == 4
    assert client.ack(meta) == 0


def test_a_frozen_consumer_is_fenced(client: tq.TransferQueueClient, child: Callable[[str], Any]) -> None:
    put(client, 4)
    consumer = child(CONSUMER.format(lease_s=0.3))
    held = [int(row) for row in consumer.line().split()]
    freeze(consumer.pid)
    meta = client.get_meta(["x"], 4, "p", task_name="t", timeout_s=10, lease_s=60)
    assert meta.global_indexes == held
    os.kill(consumer.pid, signal.SIGCONT)
    consumer.say()
    assert consumer.line() == "LeaseExpired"
    assert client.ack(meta) == 0
    consumer.finish()
