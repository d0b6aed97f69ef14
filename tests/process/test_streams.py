"""tq.stream, tq.async_stream and client.take: one line each, on leases, and nothing is lost when they are left."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import until
from streams import put, used
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.dataloader import lease_owner
from transfer_queue.dataloader.chunking import bounds, chunk_batch_fn
from transfer_queue.errors import DeadlineExceeded, InvalidInput
from transfer_queue.metadata import BatchMeta

Client = tq.TransferQueueClient


def left(client: Client, partition: str = "p") -> int:
    """How many rows are on offer; they are lent for a moment only."""
    try:
        meta = client.get_meta(["x"], 1, partition, task_name="t", timeout_s=0, lease_s=60)
    except DeadlineExceeded:
        return 0
    rest = left(client, partition)
    client.release(meta)
    return 1 + rest


def xs(stream: Any) -> list[list[int]]:
    return [data["x"].tolist() for data in stream]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_gets_every_row_and_ends(client: Client, workers: int) -> None:
    put(client, 10)
    more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    client.set_partition("p", size=10)
    stream = tq.stream("p", ["x"], task="t", batch_size=4, micro_batch_size=2, **more)
    assert xs(stream) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert used(client) == 10
    assert xs(stream) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", ["closed", "asked on"])
def test_a_loop_that_another_one_followed_takes_nothing_from_it(client: Client, workers: int, way: str) -> None:
    put(client, 12)
    client.set_partition("p", size=12)
    more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    stream = tq.stream("p", ["x"], task="t", batch_size=4, **more)
    older = iter(stream)
    assert next(older)["x"].tolist() == [0, 1, 2, 3]
    newer = iter(stream)
    assert next(newer)["x"].tolist() == [0, 1, 2, 3], "the older loop had not acknowledged them"
    if way == "closed":
        older.close()
    assert list(older) == []
    assert xs(newer) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert used(client) == 12


def test_an_asynchronous_loop_ends_the_one_before_and_does_not_wait_for_its_rows(client: Client) -> None:
    put(client, 4)
    client.set_partition("p", size=4)
    stream = tq.async_stream("p", ["x"], task="t", batch_size=4)

    async def nested() -> list[list[int]]:
        return [data["x"].tolist() async for _ in stream async for data in stream]

    assert asyncio.run(asyncio.wait_for(nested(), 20)) == [[0, 1, 2, 3]]
    assert used(client) == 4


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("way", ["sys.exit(0)", "next(rows)", "stream.close()", "next(iter(stream))"])
def test_a_forked_child_that_leaves_its_parents_loop_leaves_the_rows_to_it(
    client: Client, child: Callable[[str], Any], workers: int, way: str
) -> None:
    put(client, 16)
    client.set_partition("p", size=16)
    parent = child(f"""
        import os, sys
        import transfer_queue as tq
        stream = tq.stream("p", ["x"], task="t", batch_size=4, micro_batch_size=2, num_workers={workers})
        rows, seen = iter(stream), []
        seen += next(rows)["x"].tolist()
        seen += next(rows)["x"].tolist()
        if not os.fork():
            try:
                {way}
            except tq.errors.InvalidInput as error:
                assert "forked" in str(error)
            del rows
            sys.exit(0)
        status = os.wait()[1]
        seen += [x for data in rows for x in data["x"].tolist()]
        print(status, seen)
    """)
    status, _, seen = parent.finish().partition(" ")
    assert status == "0"
    assert sorted(json.loads(seen)) == list(range(16))
    assert used(client) == 16


@pytest.mark.parametrize("dp_size", [None, 1])
def test_leaving_the_loop_gives_everything_back_that_was_not_used(client: Client, dp_size: int | None) -> None:
    put(client, 16)
    stream = tq.stream("p", ["x"], task="t", batch_size=4, micro_batch_size=2, dp_size=dp_size)
    for number, data in enumerate(stream):
        assert stream.meta.global_indexes == data["x"].tolist()
        if number == 1:
            break
    assert (used(client), left(client)) == (2, 14)
    assert xs(stream) == [[n, n + 1] for n in range(2, 16, 2)], "the next loop goes on there"


@pytest.mark.parametrize("kind", ["loop", "workers", "async"])
def test_a_long_lease_is_renewed_while_the_session_of_a_lost_connection_would_be_waited_for(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(lease_owner, "GRACE_S", 0.6)
    put(client, 4)

    def is_renewed() -> None:
        before = client.overview().leases[0].left_s
        until(lambda: client.overview().leases[0].left_s > before, "a renewal")

    async def loop() -> None:
        async with tq.async_stream("p", ["x"], task="t", batch_size=4, lease_s=600) as stream:
            async for _ in stream:
                await asyncio.to_thread(is_renewed)
                break

    if kind == "async":
        asyncio.run(loop())
        return
    more = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "workers" else {}
    with tq.stream("p", ["x"], task="t", batch_size=4, lease_s=600, **more) as stream:
        each = iter(stream)
        next(each)
        is_renewed()


@pytest.mark.parametrize("way", [Client.nack, Client.release])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_a_loop_gave_back_is_not_acknowledged_when_the_loop_goes_on(
    client: Client, way: Callable[..., int], workers: int
) -> None:
    put(client, 4)
    client.set_partition("p", size=4)
    more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    stream = tq.stream("p", ["x"], task="t", batch_size=4, micro_batch_size=1, **more)
    for number, _ in enumerate(stream):
        if number == 0:
            way(client, stream.meta)
        if number == 2:
            break
    assert sorted(xs(stream)) == [[0], [2], [3]]
    assert used(client) == 4


def test_a_place_names_the_rows_that_a_loop_gave_back_apart_from_those_that_it_used(client: Client) -> None:
    put(client, 4)
    client.set_partition("p", size=4)
    stream = tq.stream("p", ["x"], task="t", batch_size=4, micro_batch_size=1)
    for number, _ in enumerate(stream):
        if number == 0:
            client.release(stream.meta)
        if number == 2:
            break
    place = stream.state_dict()
    assert [len(place[name]) for name in ("used_rows", "returned_rows")] == [1, 1]
    other = tq.stream("p", ["x"], task="t", batch_size=4, micro_batch_size=1)
    other.load_state_dict(place)
    assert sorted(xs(other)) == [[0], [2], [3]]


def test_an_async_loop_that_goes_on_gets_the_row_that_it_gave_back(client: Client) -> None:
    put(client, 3)
    client.set_partition("p", size=3)
    stream = tq.async_stream("p", ["x"], task="t", batch_size=3, micro_batch_size=1)

    async def loop(until_last: bool) -> list[int]:
        found = []
        async for data in stream:
            found.append(int(data["x"]))
            if not until_last and len(found) == 1:
                await client.async_release(stream.meta)
            if not until_last and len(found) == 3:
                break
        await stream.aclose()
        return found

    async def both() -> list[list[int]]:
        return [await loop(False), await loop(True)]

    assert asyncio.run(both()) == [[0, 1, 2], [0, 2]]


def test_a_rank_that_goes_on_gets_as_many_micro_batches_as_the_others_and_uses_no_row_that_it_gave_back(
    client: Client,
) -> None:
    put(client, 6)
    client.set_partition("p", size=6)
    first, second = (
        tq.stream("p", ["x"], task="t", batch_size=3, micro_batch_size=1, dp_rank=rank, dp_size=2) for rank in (0, 1)
    )
    for number, _ in enumerate(first):
        if number == 0:
            client.release(first.meta)
        if number == 2:
            break
    assert xs(first) == [[2]], "of three; the row that it gave back is others'"
    assert xs(second) == [[3], [4], [5]]
    assert xs(tq.stream("p", ["x"], task="t", batch_size=1)) == [[0]]


@pytest.mark.parametrize("way", [Client.nack, Client.release])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_in_hand_that_is_refused_or_released_comes_again_and_the_others_count_as_used(
    client: Client, workers: int, way: Callable[[Client, BatchMeta], int]
) -> None:
    put(client, 8)
    client.set_partition("p", size=8)
    more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    stream = tq.stream("p", ["x"], task="t", batch_size=4, **more)
    found = []
    for data in stream:
        found.append(data["x"].tolist())
        if len(found) == 1:
            way(client, stream.meta[1:2])
    assert found == [[0, 1, 2, 3], [1, 4, 5, 6], [7]]
    assert used(client) == 8


def test_an_async_loop_goes_on_after_a_row_that_it_refused(client: Client) -> None:
    put(client, 4)
    client.set_partition("p", size=4)
    stream = tq.async_stream("p", ["x"], task="t", batch_size=4)

    async def loop() -> list[list[int]]:
        found = []
        async for data in stream:
            found.append(data["x"].tolist())
            if len(found) == 1:
                await asyncio.to_thread(client.nack, stream.meta[1:2])
        return found

    assert asyncio.run(loop()) == [[0, 1, 2, 3], [1]]
    assert used(client) == 4


def test_a_with_block_gives_rows_back_at_its_end(client: Client) -> None:
    put(client, 4)
    with tq.stream("p", ["x"], task="t", batch_size=4) as stream:
        loop = iter(stream)
        next(loop)
        assert left(client) == 0
    assert left(client) == 4


def test_a_stream_without_ranks_fetches_nothing_ahead(client: Client) -> None:
    put(client, 8)
    loop = iter(tq.stream("p", ["x"], task="t", batch_size=4))
    next(loop)
    assert left(client) == 4
    loop.close()


def test_workers_without_ranks_fetch_nothing_ahead(client: Client) -> None:
    put(client, 16)
    more = {"num_workers": 2, "multiprocessing_context": "fork"}
    stream = tq.stream("p", ["x"], task="t", batch_size=4, micro_batch_size=4, **more)
    loop = iter(stream)
    assert next(loop)["x"].tolist() == [0, 1, 2, 3]
    assert left(client) == 12
    assert next(loop)["x"].tolist() == [4, 5, 6, 7]
    assert left(client) == 8
    assert [data["x"].tolist() for data in loop] == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_stream_ends_when_its_partition_is_cleared(client: Client) -> None:
    put(client, 4)
    client.set_partition("p", size=8)
    loop = iter(tq.stream("p", ["x"], task="t", batch_size=4))
    next(loop)
    client.clear_partition("p")
    with pytest.raises(StopIteration):
        next(loop)


@pytest.mark.parametrize("size", [10, None])
@pytest.mark.parametrize("by", ["rows", "keys"])
def test_a_loop_may_clear_what_it_used(client: Client, size: int | None, by: str) -> None:
    count = size or 8
    if size is not None:
        client.set_partition("p", size=size)
    keys = [f"k{row}" for row in range(count)]
    tq.kv_batch_put(keys, "p", fields={"x": torch.arange(count)})
    stream, got = tq.stream("p", ["x"], task="t", batch_size=4), []
    for batch in stream:
        got.append(batch["x"].tolist())
        if by == "rows":
            client.clear_samples(stream.meta)
        else:
            tq.kv_clear([keys[row] for row in got[-1]], "p")
    assert got == [list(range(count))[at : at + 4] for at in range(0, count, 4)]


def test_a_stream_outlives_the_keys_it_cleared_while_more_rows_are_to_come(client: Client) -> None:
    client.set_partition("p", size=8)
    stream, got = tq.stream("p", ["x"], task="t", batch_size=4), []
    tq.kv_batch_put([f"k{row}" for row in range(4)], "p", fields={"x": torch.arange(4)})
    for batch in stream:
        got.append(batch["x"].tolist())
        tq.kv_clear([f"k{row}" for row in got[-1]], "p")
        assert tq.kv_list("p") in ({}, {"p": {}})
        if len(got) == 1:
            tq.kv_batch_put([f"k{row}" for row in range(4, 8)], "p", fields={"x": torch.arange(4, 8)})
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_come_as_dicts(client: Client) -> None:
    ragged = torch.nested.as_nested_tensor([torch.arange(1), torch.arange(3)], layout=torch.jagged)
    inner = TensorDict({"a": torch.arange(2), "b": ["u", "v"]}, batch_size=[2])
    client.put({"x": torch.arange(2), "ragged": ragged, "text": ["one", "two"], "inner": inner}, partition_id="p")
    (rows,) = tq.stream("p", ["x", "ragged", "text", "inner"], task="t", batch_size=2, rows=True)
    assert [row["x"].item() for row in rows] == [0, 1]
    assert [row["ragged"].tolist() for row in rows] == [[0], [0, 1, 2]]
    assert [row["text"] for row in rows] == ["one", "two"]
    assert [(row["inner"]["a"].item(), row["inner"]["b"]) for row in rows] == [(0, "u"), (1, "v")]


def test_its_length_is_told_where_it_is_known(client: Client) -> None:
    put(client, 4)
    stream = tq.stream("p", ["x"], task="t", batch_size=4, micro_batch_size=3, dp_rank=0, dp_size=2)
    with pytest.raises(TypeError, match="not known"):
        len(stream)
    client.set_partition("p", size=16)
    assert len(stream) == 4
    client.set_partition("p", size=15)
    with pytest.raises(TypeError):
        len(stream)
    assert stream, "is true whatever its length"
    assert "partition_id='p'" in repr(stream)
    assert "dp_size=2" in repr(stream)


def test_streams_and_loaders_are_shown_by_what_they_do(client: Client) -> None:
    stream = tq.StreamingDataset(None, 4, 2, ["x"], "p", "t")
    assert repr(stream) == (
        "StreamingDataset(partition_id='p', task_name='t', data_fields=['x'], batch_size=4, micro_batch_size=2, "
        "batch_index=0)"
    )
    with tq.StreamingDataLoader(stream) as loader:
        assert repr(loader) == f"StreamingDataLoader({stream!r}, num_workers=0)"
    assert str(client.address) in repr(client)


# ranks


@pytest.mark.parametrize(
    "bad", [{"dp_rank": 2, "dp_size": 2}, {"dp_size": 2}, {"dp_size": 0}, {"dp_rank": -1}, {"dp_rank": 0, "dp_size": 0}]
)
def test_a_rank_that_cannot_be_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidInput):
        tq.stream("p", ["x"], task="t", batch_size=4, **bad)


def test_only_ranks_that_say_how_many_they_are_fetch_ahead() -> None:
    terms = (None, 4, 2, ["x"], "p", "t")
    assert not tq.StreamingDataset(*terms).prefetch
    assert not tq.StreamingDataset(*terms, 0).prefetch
    assert tq.StreamingDataset(*terms, 0, dp_size=2).prefetch
    assert tq.StreamingDataset(*terms, dp_size=1).prefetch
    assert tq.StreamingDataset(*terms, 0, prefetch=True).prefetch
    assert not tq.StreamingDataset(*terms, 0, dp_size=2, prefetch=False).prefetch


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("rest", [0, 1, 2, 5, 6, 7])
def test_ranks_of_a_last_batch_get_the_same_number_of_micro_batches(client: Client, size: int, rest: int) -> None:
    put(client, 12 + rest)
    client.set_partition("p", size=12 + rest)
    streams = [
        tq.stream("p", ["x"], task="t", batch_size=6, micro_batch_size=size, dp_rank=rank, dp_size=2) for rank in (0, 1)
    ]
    found: list[list[list[int]]] = [[], []]
    repeated = 0
    for both in itertools.zip_longest(*streams):
        for rank, (data, stream) in enumerate(zip(both, streams, strict=True)):
            assert data is not None, "the ranks take the same number of steps"
            found[rank].append(data["x"].tolist())
            repeated += stream.meta.extra_info.get("repeated", 0)
    rows = list(itertools.chain.from_iterable(itertools.chain.from_iterable(found)))
    assert set(rows) == set(range(12 + rest))
    assert len(rows) - (12 + rest) == repeated <= (1 if size == 1 or rest == 1 else 0)
    assert used(client) == 12 + rest


@pytest.mark.parametrize("total", range(1, 20))
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_number_of_parts_does_not_depend_on_what_may_be_left_out(total: int, size: int) -> None:
    counts = set()
    for own in range(total + 1):
        parts = bounds(total, own, size)
        counts.add(len(parts))
        assert parts[0][0] == 0
        assert own <= parts[-1][1] <= total
        assert all(0 < stop - start <= size for start, stop in parts)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert counts == {-(-total // size)}


def test_parts_say_which_of_their_rows_are_repeated() -> None:
    meta = BatchMeta([1, 2, 1], ["p"] * 3, extra_info={"repeated": 1})
    data = TensorDict({"x": torch.tensor([1, 2, 1])}, batch_size=[3])
    parts = chunk_batch_fn(data, meta, 1)
    assert [(part["x"].tolist(), info.extra_info) for part, info in parts] == [
        ([1], {}), ([2], {}), ([1], {"repeated": 1}),
    ]  # fmt: skip
    assert [part["x"].tolist() for part, _ in chunk_batch_fn(data, meta, 2)] == [[1], [2]]


def test_rows_of_joined_metas_are_left_out_at_the_end_only() -> None:
    shares = [BatchMeta([row, row], ["p"] * 2, extra_info={"repeated": 1}) for row in (1, 2)]
    data = TensorDict({"x": torch.tensor([1, 1, 2, 2])}, batch_size=[4])
    parts = chunk_batch_fn(data, BatchMeta.concat(shares), 2)
    assert [(part["x"].tolist(), info.extra_info) for part, info in parts] == [([1, 1], {"repeated": 1}), ([2], {})]


def test_an_own_function_gets_as_many_rows_in_every_rank(client: Client) -> None:
    put(client, 5)
    client.set_partition("p", size=5)

    def process(td: TensorDict, meta: BatchMeta, micro_batch_size: int) -> Any:
        return [(td["x"].tolist(), meta.extra_info.get("repeated", 0))]

    streams = [
        tq.StreamingDataset(None, 4, 2, ["x"], "p", "t", rank, True, process_batch_fn=process, dp_size=2)
        for rank in (0, 1)
    ]
    assert [list(stream) for stream in streams] == [[([0, 1, 2], 0)], [([3, 4, 3], 1)]]
    assert used(client) == 5


# take


@pytest.mark.parametrize("lease_s", [None, 60])
def test_take_gives_metadata_and_data_at_once(client: Client, lease_s: float | None) -> None:
    put(client, 4)
    meta, data = client.take("p", ["x"], 3, "t", lease_s=lease_s)
    assert (meta.size, data["x"].tolist(), bool(meta.lease)) == (3, [0, 1, 2], lease_s is not None)
    assert used(client) == (0 if lease_s else 3)
    assert client.take("p", ["x"], 0, "t")[0].size == 0
    with pytest.raises(DeadlineExceeded):
        client.take("p", ["x"], 3, "t", timeout_s=0)
    with pytest.raises(InvalidInput):
        client.take("p", ["x"], 3, "")


def test_take_of_a_rank_gives_its_share(client: Client) -> None:
    put(client, 4)
    config = {"dp_rank": 1, "dp_size": 2, "batch_index": 0}
    assert asyncio.run(client.async_take("p", ["x"], 2, "t", sampling_config=config))[1]["x"].tolist() == [2, 3]


def test_take_under_polling_is_empty(service: Callable[..., Client]) -> None:
    client = service(controller={"polling_mode": True})
    meta, data = client.take("p", ["x"], 3, "t")
    assert (len(meta), len(data)) == (0, 0)


def test_a_client_in_a_with_block_is_closed(client: Client) -> None:
    from transfer_queue.client.session import Session

    with tq.TransferQueueClient.of(Session(client.address)) as other:
        assert other.get_partition_list() == []
    with pytest.raises(ConnectionError):
        other.get_partition_list()
    assert "closed" in repr(other)


# asyncio


@pytest.mark.parametrize("dp_size", [None, 1])
def test_an_async_loop_gets_every_row_and_ends(client: Client, dp_size: int | None) -> None:
    put(client, 10)
    client.set_partition("p", size=10)
    stream = tq.async_stream("p", ["x"], task="t", batch_size=4, micro_batch_size=2, dp_size=dp_size)

    async def loop() -> list[list[int]]:
        found = []
        async for data in stream:
            assert stream.meta.global_indexes == data["x"].tolist()
            found.append(data["x"].tolist())
        return found

    assert asyncio.run(loop()) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert used(client) == 10


def test_an_async_loop_that_is_left_gives_its_rows_back(client: Client) -> None:
    put(client, 8)

    async def loop() -> None:
        async with tq.async_stream("p", ["x"], task="t", batch_size=4, micro_batch_size=2, dp_size=1) as stream:
            async for data in stream:
                if data["x"].tolist() == [2, 3]:
                    break
        rest = await client.async_get_meta(["x"], 6, "p", task_name="t", timeout_s=0, lease_s=60)
        assert rest.redelivered == {}, "nobody tried them"
        await client.async_release(rest)
        async for data in stream:
            assert data["x"].tolist() == [2, 3], "goes on there"
            await stream.aclose()

    asyncio.run(loop())
    assert used(client) == 2


def test_an_async_loop_that_is_just_left_gives_its_rows_back_without_a_garbage_collection(client: Client) -> None:
    put(client, 4)
    stream = tq.async_stream("p", ["x"], task="t", batch_size=4, micro_batch_size=2)

    async def first() -> list[int]:
        async for data in stream:
            return data["x"].tolist()
        return []

    async def main() -> None:
        assert [await first(), await first()] == [[0, 1], [0, 1]], "the second waits for what the first has on lease"
        while client.overview().leases:
            await asyncio.sleep(0.01)

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(main(), 10))
    finally:
        gc.enable()


def test_a_cancelled_async_loop_gives_its_rows_back_and_blocks_nobody(client: Client) -> None:
    put(client, 4)
    client.set_partition("p", size=8)
    ticks = 0

    async def consume() -> None:
        async for _ in tq.async_stream("p", ["x"], task="t", batch_size=4, micro_batch_size=2, lease_s=1.2):
            await asyncio.sleep(1.5)  # longer than the lease, which is renewed

    async def main() -> None:
        nonlocal ticks
        task = asyncio.create_task(consume())
        while client.stats()["waiting_requests"] < 1:  # for the second batch
            await asyncio.sleep(0.01)
            assert not task.done(), task
            ticks += 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ticks > 20, "the loop went on"
    assert used(client) == 4
    until(lambda: client.stats()["waiting_requests"] == 0, "the end of the fetch")


def test_streams_leave_no_thread_and_no_lease(client: Client) -> None:
    put(client, 8)
    for _ in tq.stream("p", ["x"], task="t", batch_size=4, dp_size=1):
        break
    gc.collect()
    assert left(client) == 8


def test_a_bad_padding_is_refused_before_rows_are_taken(client: tq.TransferQueueClient) -> None:
    with pytest.raises(InvalidInput, match="number"):
        tq.stream("p", ["n"], task="t", batch_size=1, pad="0")  # type: ignore[arg-type]
