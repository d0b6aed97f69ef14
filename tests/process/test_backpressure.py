"""The byte and row budgets: puts wait for room, or fail by their deadline; memory that is not needed goes back."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from conftest import until

import transfer_queue as tq
from transfer_queue.errors import InvalidInput, StoreFull
from transfer_queue.wire import messages as m

Service = Callable[..., tq.TransferQueueClient]
Spawn = Callable[[str], Any]
MIB = 1 << 20


def store(**simple: Any) -> dict[str, Any]:
    return {"backend": {"SimpleStorage": simple}}


def put(key: str, mib: float, partition: str = "p") -> None:
    tq.kv_put(key, partition, {"x": torch.full((int(mib * MIB),), ord(key[0]), dtype=torch.uint8)})


def used(client: tq.TransferQueueClient) -> int:
    return int(client.stats()["arena_nbytes_used"])


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except StoreFull as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("mib", [0.01, 2])
def test_a_put_waits_until_another_thread_clears(service: Service, mib: float) -> None:
    client = service(**store(budget_nbytes=4 * MIB))
    put("a", 4)
    thread, outcome = in_thread(lambda: put("b", mib))
    until(lambda: client.stats()["waiting_requests"] == 1, "a waiting put")
    assert not outcome
    assert "b" not in tq.kv_list("p")["p"]
    tq.kv_clear("a", "p")
    thread.join(20)
    assert outcome == [None]
    assert int(tq.kv_batch_get("b", "p")["x"].values()[0]) == ord("b")


def test_an_overview_lists_puts_that_wait_for_memory(service: Service) -> None:
    client = service(**store(budget_nbytes=4 * MIB))
    put("a", 4)
    threads = [in_thread(lambda: put("b", 2))[0] for _ in range(2)]
    until(lambda: client.overview().num_waits == 2, "the puts in the list")
    first, _ = client.overview().waits
    assert (first.call, first.session) == ("put", client.session.ident)
    assert first.lacks.startswith(
        f"{2 * MIB} bytes do not fit: {4 * MIB} of {4 * MIB} bytes are in use, readers hold 0"
    )
    assert first.waited_s is not None
    assert 0 <= first.waited_s < first.waited_s + first.left_s
    few = client.overview(most=1)
    assert (few.num_waits, len(few.waits)) == (2, 1)
    tq.kv_clear("a", "p")
    for thread in threads:
        thread.join(20)
    assert client.overview().num_waits == 0


def test_a_put_waits_until_another_process_clears(service: Service, child: Spawn) -> None:
    client = service(**store(budget_nbytes=4 * MIB))
    put("a", 3)
    other = child("import transfer_queue as tq; tq.kv_list(); print('up', flush=True); input(); tq.kv_clear('a', 'p')")
    assert other.line() == "up"
    thread, outcome = in_thread(lambda: put("b", 3))
    until(lambda: client.stats()["waiting_requests"] == 1, "a waiting put")
    other.say()
    thread.join(20)
    assert outcome == [None]
    other.finish()


def test_a_put_has_the_memory_of_a_block_as_soon_as_its_last_rows_were_moved(service: Service) -> None:
    client = service(**store(budget_nbytes=8 * MIB), server={"notice_after_s": []})
    tq.kv_batch_put([str(row) for row in range(24)], "p", {"x": torch.ones(24, MIB // 4, dtype=torch.uint8)})
    thread, outcome = in_thread(lambda: put("b", 5))
    until(lambda: client.stats()["waiting_requests"] == 1, "a waiting put")
    tq.kv_clear([str(row) for row in range(22)], "p")
    thread.join(10)  # nobody asks the service for anything meanwhile
    assert outcome == [None], "the put waited on, with room enough"
    thread.join()


@pytest.mark.parametrize("mib", [0.01, 2])
def test_a_put_without_room_fails_by_its_deadline(service: Service, mib: float) -> None:
    client = service(**store(budget_nbytes=4 * MIB), client={"timeout_s": 0.4})
    put("a", 4)
    started = time.monotonic()
    with pytest.raises(StoreFull, match="bytes"):
        put("b", mib)
    assert 0.3 < time.monotonic() - started < 2
    assert tq.kv_list("p") == {"p": {"a": {}}}
    assert used(client) == 4 * MIB
    with pytest.raises(StoreFull):
        client.allocate({"x": ((MIB,), torch.uint8)}, timeout_s=0.1)


def test_more_than_the_budget_fails_at_once(service: Service) -> None:
    client = service(**store(budget_nbytes=4 * MIB))
    started = time.monotonic()
    with pytest.raises(StoreFull, match="exceed"):
        put("b", 5)
    with pytest.raises(StoreFull):
        client.allocate({"x": ((5 * MIB,), torch.uint8)})
    assert time.monotonic() - started < 5
    assert tq.kv_list() == {}


def test_waiting_puts_are_served_in_order(service: Service) -> None:
    client = service(**store(budget_nbytes=4 * MIB))
    put("a", 4)
    big, big_outcome = in_thread(lambda: put("big", 3))
    until(lambda: client.stats()["waiting_requests"] == 1, "the first waiter")
    small, small_outcome = in_thread(lambda: put("small", 1.5))
    until(lambda: client.stats()["waiting_requests"] == 2, "the second waiter")
    tq.kv_clear("a", "p")
    big.join(20)
    assert big_outcome == [None]
    tq.kv_clear("big", "p")
    small.join(20)
    assert small_outcome == [None]


@pytest.mark.parametrize("mib", [0.001, 1])
def test_total_storage_size_bounds_rows_in_the_same_way(service: Service, mib: float) -> None:
    client = service(**store(total_storage_size=3), client={"timeout_s": 0.4})
    for key in "abc":
        put(key, mib)
    before = used(client)
    started = time.monotonic()
    with pytest.raises(StoreFull, match="3 rows stayed in use"):
        put("d", mib)
    assert 0.3 < time.monotonic() - started < 0.75
    with pytest.raises(StoreFull):
        client.get_meta(["x"], 1, "q", mode="insert")
    assert used(client) == before
    assert set(tq.kv_list()["p"]) == {"a", "b", "c"}
    put("a", mib)  # no new row
    with pytest.raises(StoreFull):
        tq.kv_batch_put(["v", "w", "x", "y"], "q", {"x": torch.zeros(4)})
    assert "q" not in client.get_partition_list()
    assert used(client) == before


@pytest.mark.parametrize("mib", [0.001, 1])
def test_a_put_waits_for_rows(service: Service, mib: float) -> None:
    client = service(**store(total_storage_size=2))
    put("a", mib)
    put("b", mib)
    thread, outcome = in_thread(lambda: put("c", mib))
    until(lambda: client.stats()["waiting_requests"] == 1, "a waiting put")
    assert set(tq.kv_list()["p"]) == {"a", "b"}
    tq.kv_clear("a", "p")
    thread.join(20)
    assert outcome == [None]
    assert int(tq.kv_batch_get("c", "p")["x"].values()[0]) == ord("c")
    tq.kv_clear(["b", "c"], "p")
    until(lambda: used(client) == 0, "an empty store")


def test_a_client_that_dies_waiting_for_rows_holds_nothing(service: Service, child: Spawn) -> None:
    client = service(**store(total_storage_size=1))
    put("a", 0.001)
    before = used(client)
    writer = child(
        "import torch, transfer_queue as tq; tq.kv_put('b', 'p', {'x': torch.zeros(100, dtype=torch.uint8)})"
    )
    until(lambda: client.stats()["waiting_requests"] == 1, "a waiting put")
    writer.kill()
    until(lambda: client.stats()["waiting_requests"] == 0, "the end of the request")
    assert used(client) == before
    tq.kv_clear("a", "p")
    assert tq.kv_list() == {}
    put("c", 0.001)
    tq.kv_clear("c", "p")
    until(lambda: used(client) == 0, "an empty store")


def test_pinned_views_count_until_they_are_dropped(service: Service) -> None:
    client = service(**store(budget_nbytes=4 * MIB), client={"timeout_s": 0.3})
    put("a", 3)
    view = tq.kv_batch_get("a", "p")["x"].values()
    tq.kv_clear("a", "p")
    assert list(client.stats()["pinned_nbytes"].values()) == [3 * MIB]
    with pytest.raises(StoreFull):
        put("b", 3)
    assert int(view[0]) == ord("a")
    del view
    gc.collect()
    until(lambda: client.stats()["pinned_nbytes"] == {}, "the release of the pin")
    put("b", 3)


def test_a_view_dropped_elsewhere_lets_a_put_through(service: Service) -> None:
    client = service(**store(budget_nbytes=4 * MIB))
    put("a", 3)
    views = [tq.kv_batch_get("a", "p")["x"].values()]
    tq.kv_clear("a", "p")
    thread, outcome = in_thread(lambda: put("b", 3))
    until(lambda: client.stats()["waiting_requests"] == 1, "a waiting put")
    views.clear()
    gc.collect()
    thread.join(20)
    assert outcome == [None]


def test_one_surviving_row_does_not_hold_its_whole_block(client: tq.TransferQueueClient) -> None:
    keys = [f"k{i}" for i in range(32)]
    rows = torch.arange(32, dtype=torch.float32)[:, None].expand(32, 65_536).contiguous()
    fields = {"x": rows, "o": [{"t": torch.full((1000,), float(i)), "s": str(i)} for i in range(32)]}
    tq.kv_batch_put(keys, "p", fields)
    held = tq.kv_batch_get("k30", "p")["x"].values()
    assert used(client) > 8 * MIB
    tq.kv_clear([key for key in keys if key != "k7"], "p")
    del held
    gc.collect()
    until(lambda: used(client) < MIB, "compaction")
    td = tq.kv_batch_get("k7", "p")
    assert bool((td["x"].values() == 7).all())
    assert next(iter(td["o"]))["s"] == "7"
    assert next(iter(td["o"]))["t"].unique().tolist() == [7.0]
    del td
    tq.kv_clear("k7", "p")
    until(lambda: used(client) == 0, "an empty store")


def test_compaction_keeps_rows_that_are_being_rewritten(client: tq.TransferQueueClient) -> None:
    keys = [f"k{i}" for i in range(16)]
    for version in range(5):
        tq.kv_batch_put(keys, "p", {"x": torch.full((16, 65_536), float(version)), "y": torch.arange(16)})
        tq.kv_clear(keys[3:], "p")
        tq.kv_put("k0", "p", {"x": torch.full((65_536,), 100.0 + version)})
        td = tq.kv_batch_get(["k0", "k1", "k2"], "p")
        assert [float(row[0]) for row in td["x"].unbind()] == [100.0 + version, float(version), float(version)]
        assert td["y"].tolist() == [0, 1, 2]
    until(lambda: used(client) < 2 * MIB, "compaction")
    assert tq.kv_batch_get(["k2", "k1"], "p")["y"].tolist() == [2, 1]


def test_free_memory_returns_to_the_system(service: Service) -> None:
    client = service(**store(trim_after_s=0.1))
    put("a", 32)
    assert client.stats()["arena_nbytes_resident"] >= 32 * MIB
    put("b", 1)
    tq.kv_clear("a", "p")
    until(lambda: client.stats()["arena_nbytes_resident"] <= 2 * MIB, "the return of free memory")
    assert int(tq.kv_batch_get("b", "p")["x"].values().sum()) == ord("b") * MIB
    put("c", 8)
    assert int(tq.kv_batch_get("c", "p")["x"].values().sum()) == ord("c") * 8 * MIB


def test_arenas_may_lie_in_a_directory(service: Service, tmp_path: Any) -> None:
    client = service(**store(arena_dir=str(tmp_path)))
    put("a", 2)
    assert int(tq.kv_batch_get("a", "p")["x"].values().sum()) == ord("a") * 2 * MIB
    assert client.stats()["arena_nbytes_resident"] >= 2 * MIB
    assert list(tmp_path.iterdir()) == []


def test_a_commit_that_fails_gives_its_memory_back(service: Service) -> None:
    client = service(**store(total_storage_size=2), client={"timeout_s": 0.3})
    client.put({"x": torch.zeros(2)}, partition_id="full")
    batch = client.allocate({"x": ((2, 300_000), torch.float32)})
    with pytest.raises(StoreFull):
        batch.commit("p")
    with pytest.raises(InvalidInput, match="given up"):
        batch.commit("p")
    del batch
    until(lambda: used(client) < 1000, "the return of the memory")


@pytest.mark.parametrize("specs", [None, {"x": 5}, {"x": ((2, 3),)}, {"x": (5, "float32")}, {1: ((2,), "float32")}])
def test_what_is_no_shape_and_dtype_is_refused(shared: tq.TransferQueueClient, specs: Any) -> None:
    with pytest.raises(InvalidInput, match="specs: expected field names"):
        shared.allocate(specs)


def test_a_time_out_that_is_no_number_is_refused(service: Service) -> None:
    client = service()
    for ask in (
        lambda: client.take("p", ["x"], 1, "t", 60.0, math.nan),
        lambda: client.allocate({"x": ((2,), torch.float32)}, timeout_s=math.nan),
    ):
        with pytest.raises(InvalidInput, match="a number of seconds"):
            ask()
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(m.Allocate(1, 10, False, math.nan)), type=m.Allocate)
