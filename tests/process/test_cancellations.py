"""Cancelled tasks lose nothing: each call is cancelled wherever it waits, and just as its answer has come."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from cancellations import cancellations
from conftest import until
from leftovers import left, opens_again

import transfer_queue as tq
from transfer_queue.errors import InvalidInput

LARGE = {"x": torch.zeros(4, 100_000), "y": torch.zeros(4)}
pytestmark = pytest.mark.parametrize("late", [False, True])


@pytest.fixture
def client(service: Callable[..., tq.TransferQueueClient]) -> tq.TransferQueueClient:
    return service()


def cancel_everywhere(
    action: Callable[[], Coroutine[Any, Any, Any]], is_clean: Callable[[], bool], late: bool
) -> tuple[int, Any]:
    """How often the call was cancelled, and what it gave in the end. After each cancellation nothing may be left."""

    async def run() -> tuple[int, Any]:
        number = 0
        async for one in cancellations(action, late=late):
            if not one.at:
                return number, one.result
            number += 1
            await asyncio.to_thread(until, is_clean, f"the end of a call that was cancelled at its wait {one.at}", 10)
        raise AssertionError("the call never came to its end")

    return asyncio.run(run())


@pytest.mark.parametrize("way", ["get_meta", "take", "lease"])
def test_rows_that_nobody_got_are_offered_again(client: tq.TransferQueueClient, way: str, late: bool) -> None:
    client.put({"x": torch.zeros(2, 8)}, partition_id="p")

    def fetch() -> Coroutine[Any, Any, Any]:
        if way == "take":
            return client.async_take("p", ["x"], 2, "t")
        return client.async_get_meta(["x"], 2, "p", task_name="t", lease_s=600 if way == "lease" else None)

    def is_clean() -> bool:
        return left(client) == 2 and not client.overview().leases and not client.stats()["pinned_nbytes"]

    number, _ = cancel_everywhere(fetch, is_clean, late)
    assert number
    assert left(client) == (2 if way == "lease" else 0)


@pytest.mark.parametrize("copy", [False, True])
def test_a_read_leaves_nothing_pinned(client: tq.TransferQueueClient, copy: bool, late: bool) -> None:
    meta = client.put(LARGE, partition_id="p")
    number, data = cancel_everywhere(
        lambda: client.async_get_data(meta, copy=copy), lambda: not client.stats()["pinned_nbytes"], late
    )
    assert number
    assert len(data["x"]) == 4


@pytest.mark.parametrize("way", ["put", "kv_batch_put", "allocate"])
def test_a_write_is_whole_or_nothing(client: tq.TransferQueueClient, way: str, late: bool) -> None:
    client.put(LARGE, partition_id="other")
    before = client.stats()["arena_nbytes_used"]

    def write() -> Coroutine[Any, Any, Any]:
        if way == "put":
            return client.async_put(LARGE, partition_id="p")
        if way == "kv_batch_put":
            return tq.async_kv_batch_put(list("abcd"), "p", fields=LARGE)
        return client.async_allocate({"x": ((2, 50_000), torch.float32)})

    def is_clean() -> bool:
        found = [one for one in client.overview().partitions if one.name == "p"]
        assert all(one.written == [4, 4] for one in found if one.rows), found
        client.clear_partition("p")
        return client.stats()["arena_nbytes_used"] <= before + (1 << 16)

    assert cancel_everywhere(write, is_clean, late)[0]


def test_an_acknowledgement_counts_for_all_its_rows_or_for_none(client: tq.TransferQueueClient, late: bool) -> None:
    client.put({"x": torch.zeros(2, 8)}, partition_id="p")
    lent = [client.get_meta(["x"], 2, "p", task_name="t", lease_s=600)]

    def is_clean() -> bool:
        leases = client.overview().leases
        assert [one.rows for one in leases] in ([], [2])
        if not leases:
            client.reset_consumption("p", "t")
            lent[0] = client.get_meta(["x"], 2, "p", task_name="t", lease_s=600)
        return True

    assert cancel_everywhere(lambda: client.async_ack(lent[0]), is_clean, late)[0]


def test_rows_that_are_cleared_are_gone_for_all_or_for_none(client: tq.TransferQueueClient, late: bool) -> None:
    metas = [client.put({"x": torch.zeros(2, 8)}, partition_id="p")]

    def is_clean() -> bool:
        found = [one.rows for one in client.overview().partitions if one.name == "p"]
        assert found in ([], [0], [2])
        if found != [2]:
            metas[0] = client.put({"x": torch.zeros(2, 8)}, partition_id="p")
        return True

    assert cancel_everywhere(lambda: client.async_clear_samples(metas[0]), is_clean, late)[0]


@pytest.mark.parametrize("lock", [tq.async_kv_global_lock, tq.async_kv_local_lock])
def test_a_lock_is_held_by_nobody(client: tq.TransferQueueClient, lock: Any, late: bool) -> None:
    async def locked() -> bool:
        async with lock("k", "p", timeout=5):
            await asyncio.sleep(0)
        return True

    def is_clean() -> bool:
        if any(tq.kv_lock_list("p").values()):
            return False
        with tq.kv_local_lock("k", "p", timeout=5):
            return True

    number, result = cancel_everywhere(locked, is_clean, late)
    assert number
    assert result


def test_a_partition_that_was_opened_for_nobody_is_opened_again(client: tq.TransferQueueClient, late: bool) -> None:
    def opened() -> Coroutine[Any, Any, Any]:
        return tq.async_open_partition("p", "series", 0, timeout_s=5)

    assert cancel_everywhere(opened, lambda: opens_again(client), late)[0]


def test_who_waits_to_open_a_partition_and_leaves_is_in_nobodys_way(client: tq.TransferQueueClient, late: bool) -> None:
    tq.open_partition("first", "series", 0)

    async def leave() -> None:
        task = asyncio.create_task(tq.async_open_partition("second", "series", 0, timeout_s=30))
        await asyncio.to_thread(until, lambda: tq.series_status("series")["waiting"], "the producer that waits")
        if late:  # it gets its turn as it leaves
            client.clear_partition("first")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    until(lambda: not tq.series_status("series")["waiting"], "the end of what waited")
    client.clear_partition("first")
    if "second" in tq.series_status("series")["open"]:
        tq.open_partition("second", "series", 0, timeout_s=5)
        client.clear_partition("second")
    tq.open_partition("third", "series", 0, timeout_s=5)


def test_attempts_that_nobody_got_are_claimed_by_others(client: tq.TransferQueueClient, late: bool) -> None:
    pool = tq.group_pool("p", tq.GroupPolicy())
    groups = (f"g{number}" for number in itertools.count())
    pool.open(next(groups), 4)

    def is_clean() -> bool:
        attempts = pool.claim(max_slots=4, timeout_s=5)
        pool.finish_batch([attempt.result() for attempt in attempts], {"x": torch.zeros(len(attempts), 3)})
        pool.open(next(groups), 4)
        return len(attempts) == 4

    assert cancel_everywhere(lambda: pool.async_claim(max_slots=4), is_clean, late)[0]


def test_groups_that_nobody_got_are_selected_by_others(client: tq.TransferQueueClient, late: bool) -> None:
    pool = tq.group_pool("p", tq.GroupPolicy())
    pool.open("g", 1)
    pool.finish(pool.claim()[0], {"x": torch.zeros(1, 3)})

    def is_clean() -> bool:
        batch = pool.select(min_groups=1, timeout_s=5)
        pool.release(batch)
        return len(batch.groups) == 1

    assert cancel_everywhere(lambda: pool.async_select(min_groups=1), is_clean, late)[0]


def test_a_result_is_there_once_when_it_is_sent_again(client: tq.TransferQueueClient, late: bool) -> None:
    pool = tq.group_pool("p", tq.GroupPolicy())
    attempts: list[Any] = []

    def prepare() -> None:
        pool.open(f"g{len(attempts)}", 1)
        attempts.append(pool.claim(timeout_s=5)[0])

    def is_clean() -> bool:
        try:
            pool.finish(attempts[-1], {"x": torch.zeros(1, 3)})
        except InvalidInput as error:  # the cancelled one was whole
            if "has another result already" not in str(error):
                raise
        assert pool.status()["sealed"] == len(attempts)
        prepare()
        return True

    prepare()
    assert cancel_everywhere(lambda: pool.async_finish(attempts[-1], {"x": torch.zeros(1, 3)}), is_clean, late)[0]


def test_a_loop_that_goes_on_has_the_batches_that_it_would_have_had(client: tq.TransferQueueClient, late: bool) -> None:
    """As it begins, and as it asks for the next micro-batch, which acknowledges the one before."""
    client.put({"x": torch.arange(8)}, partition_id="p")
    everything = [[0, 1], [2, 3], [4, 5], [6, 7]]

    async def run() -> int:
        stream, number = tq.async_stream("p", ["x"], task="t", batch_size=4, micro_batch_size=2), 0

        async def two() -> bool:
            running = aiter(stream)
            return all([await anext(running) is not None for _ in range(2)])

        async for one in cancellations(two, late=late):
            rest = []
            async for item in stream:
                rest.append(item["x"].tolist())
                if rest[-1] == everything[-1]:
                    break
            assert rest == everything[-len(rest) :], one
            await stream.aclose()
            await client.async_reset_consumption("p", "t")
            stream = tq.async_stream("p", ["x"], task="t", batch_size=4, micro_batch_size=2)
            number += 1
        return number

    assert asyncio.run(run()) > 3
