"""A client has several connections, and a service that stood still reads that one first which was served last, or of
which something came first: what was said over another one before may come later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from conftest import freeze, until

import transfer_queue as tq
from transfer_queue.client.one_way import REMEMBERED, OneWay
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.wire import messages as m

Client = tq.TransferQueueClient


@pytest.fixture
def client(service: Callable[..., Any]) -> Client:
    found: Client = service(client={"timeout_s": 0.5})
    return found


@contextlib.contextmanager
def standing_still(client: Client) -> Iterator[None]:
    """The service stands still, and will read one connection before all others. Calls take it when others are broken or
    busy: another thread has said something over it, and given it back."""
    session, pid = client.session, client.stats()["pid"]
    first = session.connect()
    freeze(pid)
    try:
        first.notify(m.Received([]))
        session._idle[""].insert(0, first)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def locked(client: Client) -> int:
    found: int = client.stats()["locks"]
    return found


def test_a_lock_that_was_given_back_as_the_service_stood_still_is_free(client: Client) -> None:
    with contextlib.ExitStack() as frozen:
        with tq.kv_global_lock("k", "p", lease_s=600):
            frozen.enter_context(standing_still(client))
        with pytest.raises(DeadlineExceeded):
            client.stats()
    until(lambda: locked(client) == 0, "the end of the lock", 10)


def test_rows_that_were_given_back_as_the_service_stood_still_are_offered_again(client: Client) -> None:
    client.put({"x": torch.arange(2)}, partition_id="p")
    meta = client.get_meta(["x"], 2, "p", task_name="t", lease_s=600)
    with standing_still(client):
        with pytest.raises(DeadlineExceeded):
            client.release(meta)
        with pytest.raises(DeadlineExceeded):
            client.stats()
    assert client.get_meta(["x"], 2, "p", task_name="t", timeout_s=10).global_indexes == meta.global_indexes


def test_what_was_called_off_as_the_service_stood_still_is_not_done_later(client: Client) -> None:
    """Here the cancellation comes before its call."""
    tq.kv_put("k", "p", fields={"x": torch.tensor([1])})
    with standing_still(client):
        with pytest.raises(DeadlineExceeded):
            tq.kv_clear("k", "p")
        with pytest.raises(DeadlineExceeded):
            client.stats()
    until(lambda: bool(client.stats()), "an answer")
    assert "k" in tq.kv_list("p")["p"]


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_a_call_that_ran_out_of_time_changes_nothing_after_the_next_one(client: Client, kind: str) -> None:
    """Where that comes over a third connection, and the cancellation over another one: of a thread or an event loop."""
    session = client.session
    tq.kv_put("k", "p", fields={"x": torch.tensor([1])})
    second = session.connect()

    async def clear() -> None:
        await client.async_get_partition_list()  # the loop has its connection before the service stands still
        frozen.enter_context(standing_still(client))
        await tq.async_kv_clear("k", "p")

    with contextlib.ExitStack() as frozen, ThreadPoolExecutor(1) as pool:
        if kind == "async":
            with pytest.raises(DeadlineExceeded):
                asyncio.run(clear())
            session._idle[""].append(session._idle[""].pop(0))  # the next call takes the one that is read first
            second.close()
        else:
            frozen.enter_context(standing_still(client))
            session._idle[""].insert(1, second)
            with pytest.raises(DeadlineExceeded):
                tq.kv_clear("k", "p")
            with pytest.raises(DeadlineExceeded):
                pool.submit(client.stats).result(20)
        session.config["timeout_s"] = 20
        put = pool.submit(tq.kv_put, "k", "p", fields={"x": torch.tensor([2])})
        assert wait([put], 0.2).not_done
        frozen.close()
        put.result(20)
    assert client.stats()["rows"] == 1


def test_a_call_whose_connection_was_cut_is_answered_over_the_next_one(client: Client) -> None:
    """The service reads the request over the one that is left first, and over the one that was cut after that."""
    session = client.session
    client.set_partition("p")
    with ThreadPoolExecutor(1) as pool:
        with standing_still(client):
            found = pool.submit(client.get_meta, ["x"], 2, "p", task_name="t", timeout_s=30)
            until(lambda: bool(session._waiting), "the call")
            ((rid, connection),) = session._waiting.items()
            connection.shut()
            until(lambda: session._waiting.get(rid) not in (None, connection), "the next attempt")
        for _ in range(3):
            assert client.stats(), "by then it has read that the first one is gone"
        until(lambda: client.stats()["waiting_requests"] == 1, "the wait", 10)
        client.put({"x": torch.arange(2)}, partition_id="p")
        assert len(found.result(10)) == 2


def test_polling_by_short_timeouts_leaves_nothing_to_say(client: Client) -> None:
    """No call is answered: what is off is said once, not with each call after it."""
    client.set_partition("p")

    async def poll() -> None:
        for _ in range(20):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(client.async_get_meta(["x"], 2, "p", task_name="t", timeout_s=30), 0.01)

    asyncio.run(poll())
    assert list(client.session._one_way.owed) == []


def test_of_many_calls_without_an_answer_the_last_are_called_off_again() -> None:
    said: list[int] = []
    one_way = OneWay()
    for rid in range(2 * REMEMBERED):
        one_way.owe_cancel(rid, "", unanswered=True)
        one_way.pay(lambda message, to: None)
    told = one_way.pay_one("", lambda message: said.append(message.rid))  # type: ignore[attr-defined]
    assert said == list(range(REMEMBERED, 2 * REMEMBERED))
    one_way.heard_from("", told)
    assert list(one_way.owed) == []
