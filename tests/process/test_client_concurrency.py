"""One client, many threads and event loops; calls that are cancelled; writing without a copy; polling."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import freeze, until
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.client.effects import Offload
from transfer_queue.client.transfer.read import read
from transfer_queue.errors import (
    DeadlineExceeded,
    InvalidInput,
    SchemaConflict,
    StorageKeyNotFoundError,
    StoreFull,
    UnsupportedValue,
)
from transfer_queue.wire import messages as m

Service = Callable[..., tq.TransferQueueClient]


def batch(n: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[n])


def used(client: tq.TransferQueueClient) -> int:
    return int(client.stats()["arena_nbytes_used"])


def pinned(client: tq.TransferQueueClient) -> int:
    return sum(client.stats()["pinned_nbytes"].values())


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_polling_mode_answers_at_once_with_an_empty_meta(service: Service) -> None:
    client = service(controller={"polling_mode": True})
    started = time.monotonic()
    meta = client.get_meta(["x"], 1, "p", task_name="t")
    assert time.monotonic() - started < 1
    assert (meta.size, meta.is_ready) == (0, False)
    assert client.get_meta(["x"], 1, "p", task_name="t", timeout_s=0.05).size == 0
    timer = threading.Timer(0.05, lambda: client.put(batch(1, x=torch.ones(1)), partition_id="p"))
    timer.start()
    assert client.get_meta(["x"], 1, "p", task_name="t", timeout_s=20).size == 1
    timer.join()


def test_allocate_and_commit_publish_without_a_copy(client: tq.TransferQueueClient) -> None:
    room = client.allocate({"x": ((4, 100_000), torch.float32), "n": ((4,), torch.int64)})
    room["x"].copy_(torch.arange(400_000, dtype=torch.float32).view(4, -1))
    room["n"].copy_(torch.arange(4))
    assert tq.kv_list() == {}
    meta = room.commit("p", keys=["a", "b", "c", "d"], tags=[{"i": i} for i in range(4)])
    assert meta.is_ready
    assert tq.kv_list("p") == {"p": {k: {"i": i} for i, k in enumerate("abcd")}}
    td = tq.kv_batch_get(["a", "b", "c", "d"], "p")
    assert torch.equal(td["x"].values(), torch.arange(400_000, dtype=torch.float32))
    assert td["n"].tolist() == [0, 1, 2, 3]


def test_allocated_tensors_stay_valid_after_clear(client: tq.TransferQueueClient) -> None:
    room = client.allocate({"x": ((2, 100_000), torch.float32)})
    x = room["x"].fill_(1.0)
    room.commit("p", keys=["a", "b"])
    del room
    tq.kv_clear(["a", "b"], "p")
    tq.kv_batch_put(["c", "d"], "p", batch(2, x=torch.full((2, 100_000), 2.0)))
    assert bool((x == 1).all())
    del x
    until(lambda: used(client) < 1_000_000, "the end of the first block")


def test_an_allocation_dropped_without_commit_holds_no_memory(client: tq.TransferQueueClient) -> None:
    room = client.allocate({"x": ((1, 500_000), torch.float32)})
    assert used(client) >= 2_000_000
    tensor = room["x"]
    del room
    tensor.fill_(3)
    del tensor
    until(lambda: (used(client), pinned(client)) == (0, 0), "the end of the block")
    assert tq.kv_list() == {}


def test_commit_twice_is_refused(client: tq.TransferQueueClient) -> None:
    room = client.allocate({"x": ((1,), torch.float32)})
    room.commit("p", keys=["a"])
    with pytest.raises(InvalidInput, match="committed before"):
        room.commit("p", keys=["b"])
    assert tq.kv_list() == {"p": {"a": {}}}


def test_a_refused_commit_can_be_corrected(client: tq.TransferQueueClient) -> None:
    room = client.allocate({"x": ((2,), torch.float32)})
    room["x"].copy_(torch.tensor([1.0, 2.0]))
    for wrong in ({"keys": ["a"]}, {"keys": ["a", "a"]}, {"partition_id": ""}, {"tags": [{}]}):
        with pytest.raises(InvalidInput):
            room.commit(**{"partition_id": "p", **wrong})
    room.commit("p", keys=["a", "b"])
    assert tq.kv_batch_get(["a", "b"], "p")["x"].tolist() == [1, 2]


@pytest.mark.parametrize("by", ["service", "codec"])
def test_an_allocation_whose_commit_was_refused_is_given_up(client: tq.TransferQueueClient, by: str) -> None:
    repeated = client.put({"x": torch.zeros(2, 50_000)}, partition_id="p").select_samples([0, 0])
    bad: dict[str, Any] = {"metadata": repeated} if by == "service" else {"partition_id": "p", "keys": ["a", "\ud800"]}
    room = client.allocate({"x": ((2, 50_000), torch.float32)})
    room["x"].fill_(3)
    with pytest.raises(InvalidInput):
        room.commit(**bad)
    with pytest.raises(InvalidInput, match="given up, allocate another one: its commit failed"):
        room.commit("p", keys=["a", "b"])
    client.put({"x": torch.zeros(2, 50_000)}, partition_id="p")
    assert bool((room["x"] == 3).all())
    client.clear_partition("p")
    del room
    until(lambda: used(client) == 0, "the end of the block")


def test_a_commit_that_conflicts_gives_the_memory_back(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(3)})
    before = used(client)
    room = client.allocate({"x": ((1, 50_000), torch.float64)})
    with pytest.raises(SchemaConflict):
        room.commit("p", keys=["b"], strict_schema=True)
    del room
    until(lambda: used(client) == before, "the end of the block")
    assert tq.kv_list() == {"p": {"a": {}}}


def test_commit_on_metadata_and_on_cleared_rows(client: tq.TransferQueueClient) -> None:
    meta = client.get_meta(["x"], 2, "p", mode="insert")
    room = client.allocate({"x": ((2,), torch.int64)})
    room["x"].copy_(torch.tensor([5, 6]))
    room.commit(metadata=meta)
    assert client.get_data(client.get_meta(["x"], 2, "p", task_name="t"))["x"].tolist() == [5, 6]
    client.clear_samples(meta)
    with pytest.raises(StorageKeyNotFoundError):
        client.allocate({"x": ((2,), torch.int64)}).commit(metadata=meta)


def test_bad_specs_are_refused(client: tq.TransferQueueClient) -> None:
    for specs in ({}, {"x": ((), torch.int64)}, {"x": ((1,), torch.int64), "y": ((2,), torch.int64)}):
        with pytest.raises(InvalidInput):
            client.allocate(specs)  # type: ignore[arg-type]
    assert used(client) == 0


def test_async_allocate_and_commit(client: tq.TransferQueueClient) -> None:
    async def main() -> None:
        room = await client.async_allocate({"x": ((1,), torch.int64)})
        room["x"].fill_(9)
        await room.async_commit("p", keys=["a"])
        assert (await tq.async_kv_batch_get("a", "p"))["x"].tolist() == [9]

    asyncio.run(main())


def test_threads_and_event_loops_share_one_client(client: tq.TransferQueueClient) -> None:
    errors: list[BaseException] = []

    def check(name: str, i: int, td: TensorDict) -> None:
        assert td["x"].unbind()[0].tolist() == [i] * (1 + i % 3)
        assert td["o"] == [name]

    def fields(name: str, i: int) -> dict[str, Any]:
        return {"x": torch.full((1 + i % 3,), i), "o": name}

    def plain(name: str) -> None:
        for i in range(60):
            tq.kv_put(f"{name}{i}", name, fields(name, i), tag={"i": i})
            check(name, i, tq.kv_batch_get(f"{name}{i}", name))

    async def one(name: str, i: int) -> None:
        await tq.async_kv_put(f"{name}{i}", name, fields(name, i), tag={"i": i})
        check(name, i, await tq.async_kv_batch_get(f"{name}{i}", name))

    async def many(name: str) -> None:
        await asyncio.gather(*(one(name, i) for i in range(60)))

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(lambda n=n: plain(f"plain{n}"),)) for n in range(3)]
    threads += [threading.Thread(target=guarded, args=(lambda n=n: asyncio.run(many(f"loop{n}")),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert {name: len(keys) for name, keys in tq.kv_list().items()} == {
        f"{kind}{n}": 60 for kind in ("plain", "loop") for n in range(3)
    }


def test_asyncio_run_again_and_again_leaks_no_descriptor(client: tq.TransferQueueClient) -> None:
    async def main(i: int) -> None:
        await tq.async_kv_put("k", "p", {"x": torch.tensor(i)})

    asyncio.run(main(0))
    before = num_files()
    for i in range(30):
        asyncio.run(main(i))
    assert num_files() <= before + 1
    until(lambda: client.stats()["clients"] == 1, "one session")


def test_a_loop_that_was_closed_without_care_is_forgotten(client: tq.TransferQueueClient) -> None:
    before = num_files()
    for _ in range(5):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(tq.async_kv_put("k", "p", {"x": torch.tensor(1)}))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    assert num_files() <= before + 1


def test_a_parked_fetch_does_not_delay_other_calls(client: tq.TransferQueueClient) -> None:
    async def main() -> None:
        waiting = [
            asyncio.create_task(client.async_get_meta(["x"], 1, "p", task_name=f"t{n}", timeout_s=30))
            for n in range(50)
        ]
        started = time.monotonic()
        for i in range(20):
            await tq.async_kv_put(f"k{i}", "q", {"x": torch.tensor(i)})
        assert time.monotonic() - started < 5
        assert not any(task.done() for task in waiting)
        await client.async_put(batch(1, x=torch.ones(1)), partition_id="p")
        assert {len(meta) for meta in await asyncio.gather(*waiting)} == {1}

    asyncio.run(main())


def test_a_cancelled_fetch_takes_no_rows(client: tq.TransferQueueClient) -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.async_get_meta(["x"], 1, "p", task_name="t", timeout_s=30), 0.1)
        await client.async_put(batch(1, x=torch.ones(1)), partition_id="p")
        assert (await client.async_get_meta(["x"], 1, "p", task_name="t", timeout_s=5)).size == 1

    asyncio.run(main())
    assert client.stats()["waiting_requests"] == 0


@pytest.mark.parametrize("nbytes", [1000, 20 << 20])
def test_a_cancelled_put_leaves_nothing(client: tq.TransferQueueClient, nbytes: int) -> None:
    data = torch.zeros(1, nbytes, dtype=torch.uint8)

    async def main() -> None:
        await tq.async_kv_put("k", "other", {"x": torch.tensor(1)})
        for steps in range(12):
            task = asyncio.create_task(tq.async_kv_batch_put(["a"], "p", batch(1, x=data)))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            outcome = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(outcome[0], asyncio.CancelledError):
                break
        await tq.async_kv_list()  # the server has read all that this loop sent

    asyncio.run(main())
    if "p" in tq.kv_list():  # its commit was on the way: then all of it is there
        assert tq.kv_batch_get("a", "p")["x"].values().numel() == nbytes
    tq.kv_clear(["a"], "p")
    tq.kv_clear("k", "other")
    until(lambda: (used(client), pinned(client)) == (0, 0), "the end of unfinished blocks")


class Gate:
    """Where threads wait that move bytes for an event loop."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()


@pytest.fixture
def gate(client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Threads of the session move no bytes before it is open."""
    gate, start = Gate(), client.session.mover.start

    def start_behind(work: Callable[[], Any]) -> Any:
        def pass_gate() -> Any:
            gate.reached.set()
            assert gate.opened.wait(30)
            return work()

        return start(pass_gate)

    monkeypatch.setattr(client.session.mover, "start", start_behind)
    yield gate
    gate.opened.set()


async def at_the(gate: Gate) -> asyncio.Task[Any]:
    """A put whose thread is about to write into its block."""
    task = asyncio.create_task(tq.async_kv_batch_put(["a"], "p", batch(1, x=torch.full((1, 1 << 20), 7.0))))
    await asyncio.to_thread(gate.reached.wait, 30)
    return task


async def put_another() -> None:
    await asyncio.to_thread(tq.kv_batch_put, ["b"], "p", batch(1, x=torch.ones(1, 1 << 20)))


def only_the_other_is_there() -> bool:
    assert tq.kv_list("p") == {"p": {"b": {}}}
    return bool((tq.kv_batch_get("b", "p", dense=True)["x"] == 1).all())


def test_a_put_that_is_cancelled_again_keeps_its_block_until_its_thread_has_ended(
    client: tq.TransferQueueClient, gate: Gate
) -> None:
    async def main() -> None:
        task = await at_the(gate)
        for _ in range(3):
            task.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
        assert not task.done()
        await put_another()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert only_the_other_is_there()
    tq.kv_clear("b", "p")
    until(lambda: (used(client), pinned(client)) == (0, 0), "the end of unfinished blocks")


def test_a_loop_that_ends_with_a_cancelled_put_waits_for_its_thread(gate: Gate) -> None:
    found = []

    async def at_the_end(task: asyncio.Task[Any]) -> None:
        try:
            await asyncio.Event().wait()
        finally:  # `run` has cancelled all that is left
            for _ in range(3):
                await asyncio.sleep(0)
            found.append(task.done())
            await put_another()
            gate.opened.set()

    async def main() -> None:
        task = await at_the(gate)
        last = asyncio.create_task(at_the_end(task))
        task.cancel()
        await asyncio.sleep(0)
        found.append(last.done())

    asyncio.run(main())
    assert found == [False, False]
    assert only_the_other_is_there()


def test_a_cancelled_get_releases_its_pins(client: tq.TransferQueueClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", batch(2, x=torch.zeros(2, 1 << 20)))

    async def main() -> None:
        for steps in range(8):
            task = asyncio.create_task(tq.async_kv_batch_get(["b", "a"], "p"))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task
        await tq.async_kv_list()

    asyncio.run(main())
    until(lambda: pinned(client) == 0, "the release of all pins")


def test_a_cancelled_wait_for_room_takes_no_room(service: Service) -> None:
    client = service(backend={"SimpleStorage": {"budget_nbytes": 4 << 20}})
    tq.kv_batch_put(["a"], "p", batch(1, x=torch.zeros(1, 3 << 20, dtype=torch.uint8)))

    async def main() -> None:
        put = tq.async_kv_batch_put(["b"], "p", batch(1, x=torch.zeros(1, 2 << 20, dtype=torch.uint8)))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(put, 0.1)
        await tq.async_kv_clear("a", "p")
        await asyncio.sleep(0)
        assert await tq.async_kv_list() == {}

    asyncio.run(main())
    until(lambda: used(client) == 0, "an empty store")
    with pytest.raises(StoreFull):
        client.allocate({"x": ((5 << 20,), torch.uint8)})


async def longest_standstill_share(work: Callable[[], Any]) -> float:
    """The longest time for which the running loop did nothing else during `work`, as a part of all of it."""
    gaps: list[float] = []
    started = time.monotonic()
    working = asyncio.ensure_future(work())
    while not working.done():
        at = time.monotonic()
        await asyncio.sleep(0.0005)
        gaps.append(time.monotonic() - at)
    await working
    return max(gaps) / (time.monotonic() - started)


@pytest.mark.parametrize("kind", ["put", "allocate"])
def test_the_loop_goes_on_while_large_puts_are_under_way(client: tq.TransferQueueClient, kind: str) -> None:
    columns = {f"x{number}": torch.ones(1, 4 << 20) for number in range(16)}
    held: list[Any] = []

    async def allocate() -> None:
        held.append(await client.async_allocate({"x": ((1, 4 << 20), torch.float32)}))

    async def work() -> None:
        if kind == "put":
            await asyncio.gather(*(client.async_put(batch(1, **{n: x}), partition_id=n) for n, x in columns.items()))
        else:
            await asyncio.gather(*(allocate() for _ in range(16)))

    assert asyncio.run(longest_standstill_share(work)) < 0.4


def test_async_deadline_of_a_fetch(client: tq.TransferQueueClient) -> None:
    async def main() -> None:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.async_get_meta(["x"], 1, "p", task_name="t", timeout_s=0.2)
        assert 0.19 <= time.monotonic() - started < 1.5

    asyncio.run(main())


def test_a_large_async_copy_leaves_the_loop_free(client: tq.TransferQueueClient) -> None:
    data = torch.zeros(64, 1 << 20, dtype=torch.uint8)

    async def main() -> None:
        await tq.async_kv_put("warm", "p", {"y": torch.tensor(1)})
        put = asyncio.create_task(tq.async_kv_batch_put([f"k{i}" for i in range(64)], "p", batch(64, x=data)))
        small = 0
        while not put.done():
            await tq.async_kv_put("small", "q", {"y": torch.tensor(small)})
            small += 1
        await put
        assert small > 1

    asyncio.run(main())


def test_an_operation_that_is_dropped_half_way_ends_quietly(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(1 << 18)})
    session = client.session
    operation = read(session, [m.Get(session.next_rid(), "p", ["a"], None, None, False)], copy=True)
    located = session.call(next(operation))  # type: ignore[arg-type]
    assert isinstance(operation.send(located), Offload)
    operation.close()  # raises RuntimeError when the generator goes on


def test_who_gives_up_while_the_connection_of_a_loop_is_opened_takes_no_other_call_with_it(
    client: tq.TransferQueueClient,
) -> None:
    async def both() -> tq.BatchMeta:
        hasty = asyncio.ensure_future(client.async_get_meta(["x"], 1, "p", task_name="t"))
        patient = asyncio.ensure_future(client.async_put({"x": torch.zeros(1)}, partition_id="p"))
        await asyncio.sleep(0)  # both wait for the connection, which the first one had opened
        hasty.cancel()
        return await patient

    assert asyncio.run(both()).size == 1


def test_a_tag_that_a_process_cannot_make_fails_the_call_that_asked_for_it_and_no_other(
    client: tq.TransferQueueClient, child: Callable[..., Any]
) -> None:
    child(
        """
        import transfer_queue as tq
        class Money:
            def __init__(self, number):
                self.number = number
        tq.register_type(Money, name="money", to_plain=lambda one: one.number, from_plain=Money)
        tq.kv_put("k", "other", tag={"price": Money(3)})
        tq.get_client().set_partition("other", metadata={"price": Money(4)})
        """
    ).finish()

    async def main() -> None:
        waiting = asyncio.create_task(client.async_get_meta(["x"], 1, "mine", task_name="t", timeout_s=30))
        await asyncio.to_thread(until, lambda: client.stats()["waiting_requests"], "the wait")
        with pytest.raises(UnsupportedValue, match="holds a 'money': call"):
            await tq.async_kv_list("other")
        await client.async_put(batch(1, x=torch.ones(1)), partition_id="mine")
        assert (await waiting).size == 1

    asyncio.run(main())
    with pytest.raises(UnsupportedValue, match="register_type"):
        tq.kv_list("other")
    assert tq.kv_list("mine") == {"mine": {}}
    (other,) = [one for one in client.overview().partitions if one.name == "other"]
    assert other.metadata == {"price": ("money", 4, None)}
    assert client.inspect_row("other", "k").tags == {"price": ("money", 3, None)}


def test_programs_that_are_started_get_no_descriptor_of_an_arena(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(1 << 18)})
    arenas = list(client.session.arenas._arenas.values())
    assert arenas
    assert not any(os.get_inheritable(arena.fd) for arena in arenas)


def test_a_loop_may_end_while_its_connection_is_opened(client: tq.TransferQueueClient) -> None:
    async def asked() -> None:
        await asyncio.wait_for(client.async_get_meta(["x"], 1, "p", task_name="t", timeout_s=30), 0.3)

    freeze(client.session.server_pid)
    try:
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(asked())
    finally:
        os.kill(client.session.server_pid, signal.SIGCONT)


def test_event_loops_of_uvloop_follow_each_other_and_one_that_stands_still_is_left(
    client: tq.TransferQueueClient, child: Callable[..., Any]
) -> None:
    """Ray's workers and inference engines use it; its sockets have no `shutdown`."""
    child(
        f"""
        import asyncio, uvloop
        import transfer_queue as tq
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        tq.init({{"address": {tq.address()!r}}})
        for number in range(3):
            asyncio.run(tq.async_kv_put(str(number), "p", {{"x": number}}))
        still = asyncio.new_event_loop()
        still.run_until_complete(tq.async_kv_put("3", "p", {{"x": 3}}))
        tq.close()
        still.close()
        """
    ).finish()
    assert tq.kv_batch_get([str(number) for number in range(4)], "p")["x"].tolist() == [0, 1, 2, 3]
