"""What went wrong in TransferQueue 0.1.11 (reference/traps.md), one test a row. None of it may come back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.errors import (
    DeadlineExceeded,
    InvalidInput,
    SchemaConflict,
    StorageKeyNotFoundError,
    UnsupportedValue,
)

Client = tq.TransferQueueClient


@pytest.fixture
def part(request: pytest.FixtureRequest, shared: Client) -> Iterator[str]:
    yield request.node.name
    for suffix in ("", "2"):
        shared.clear_partition(request.node.name + suffix)


def batch(n: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[n])


def values(client: Client, meta: tq.BatchMeta, field: str = "x") -> list[float]:
    return client.get_data(meta)[field].tolist()  # type: ignore[no-any-return]


def test_T01_a_blocked_fetch_holds_up_nobody_and_gets_its_rows(shared: Client, part: str) -> None:
    got: list[tq.BatchMeta] = []
    waiter = threading.Thread(target=lambda: got.append(shared.get_meta(["x"], 2, part, task_name="t", timeout_s=20)))
    waiter.start()
    started = time.monotonic()
    shared.put(batch(1, x=torch.tensor([1.0])), partition_id=part)
    shared.get_partition_list()
    shared.put(batch(1, x=torch.tensor([2.0])), partition_id=part)
    assert time.monotonic() - started < 2
    waiter.join(20)
    assert values(shared, got[0]) == [1.0, 2.0]


def test_T02_rows_are_never_handed_out_without_their_tags(shared: Client, part: str) -> None:
    tags: list[dict[str, Any]] = []

    def consume() -> None:
        while len(tags) < 100:
            tags.extend(shared.get_meta(["x"], 1, part, task_name="t", timeout_s=20).custom_meta)

    consumer = threading.Thread(target=consume)
    consumer.start()
    for i in range(50):
        tq.kv_put(f"k{i}", part, {"x": torch.tensor(1.0)}, tag={"i": i})
        meta = shared.get_meta(["x"], 1, part, mode="insert")
        meta.update_custom_meta([{"i": i}])
        shared.put(batch(1, x=torch.tensor([1.0])), metadata=meta)
    consumer.join(20)
    assert len(tags) == 100
    assert all("i" in tag for tag in tags)


def test_T03_another_dtype_is_never_cast(shared: Client, part: str) -> None:
    shared.put(batch(1, x=torch.tensor([1.0])), partition_id=part)
    for other in (torch.tensor([1.0], dtype=torch.float64), torch.tensor([16777217])):
        with pytest.raises(SchemaConflict, match="dtype"):
            shared.put(batch(1, x=other), partition_id=part, strict_schema=True)
        meta = shared.put(batch(1, x=other), partition_id=part)
        got = shared.get_data(meta)["x"]
        assert (got.dtype, got.tolist()) == (other.dtype, other.tolist())
    with pytest.raises(SchemaConflict, match=r"float32 in row \d+; float64 in row \d+; int64 in row \d+"):
        shared.get_data(shared.get_meta(["x"], 3, part, mode="force_fetch"))


def test_T04_a_late_put_never_lands_on_rows_of_others(shared: Client, part: str) -> None:
    late = shared.get_meta(["x"], 4, part, mode="insert")
    shared.clear_partition(part)
    theirs = shared.put(batch(4, x=torch.full((4,), 7.0)), partition_id=part + "2")
    assert not set(late.global_indexes) & set(theirs.global_indexes)
    with pytest.raises(StorageKeyNotFoundError):
        shared.put(batch(4, x=torch.full((4,), -1.0)), metadata=late)
    assert values(shared, theirs) == [7.0] * 4
    assert part not in shared.get_partition_list()


def test_T05_reserved_rows_can_be_cleared(shared: Client, part: str) -> None:
    meta = shared.get_meta(["x"], 2, part, mode="insert")
    assert shared.get_production_status(["x"], part) == (None, None)
    shared.clear_samples(meta[0])
    shared.clear_partition(part)
    assert part not in shared.get_partition_list()


def test_T06_an_empty_partition_can_be_cleared(shared: Client, part: str) -> None:
    shared.set_partition(part)
    shared.clear_partition(part)
    assert part not in shared.get_partition_list()


def test_T07_duplicate_keys_store_nothing(shared: Client, part: str) -> None:
    with pytest.raises(ValueError, match="Got duplicated keys"):
        tq.kv_batch_put(["a", "a"], part, batch(2, x=torch.zeros(2)))
    with pytest.raises(DeadlineExceeded):
        shared.get_meta(["x"], 1, part, task_name="t", timeout_s=0.05)
    assert tq.kv_list(part) == {}


def test_T08_strict_turns_partial_results_into_errors(shared: Client, part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.zeros(2)))
    assert len(tq.kv_batch_get(["a", "MISSING", "b"], part)) == 2
    with pytest.raises(ValueError, match="MISSING"):
        tq.kv_batch_get(["a", "MISSING", "b"], part, strict=True)


def test_T09_no_fields_hand_out_no_rows(shared: Client, part: str) -> None:
    shared.put(batch(2, x=torch.zeros(2)), partition_id=part)
    shared.get_meta(["y"], 3, part + "2", mode="insert")
    with pytest.raises(InvalidInput):
        shared.get_meta([], 2, part + "2", task_name="t", timeout_s=0.05)
    found = shared.get_meta([], 2, part + "2", mode="force_fetch")
    assert set(found.partition_ids) == {part + "2"}
    assert not found.is_ready


def test_T16_metadata_of_two_partitions_marks_rows_in_both(shared: Client, part: str) -> None:
    one = shared.get_meta(["x"], 2, part, mode="insert")
    two = shared.get_meta(["x"], 2, part + "2", mode="insert")
    shared.put(batch(4, x=torch.arange(4.0)), metadata=tq.BatchMeta.concat([one, two]))
    for partition, expected in ((part, [0.0, 1.0]), (part + "2", [2.0, 3.0])):
        assert values(shared, shared.get_meta(["x"], 2, partition, task_name="t", timeout_s=1)) == expected


def test_T17_tags_of_others_survive_a_put_with_old_metadata(shared: Client, part: str) -> None:
    mine = shared.put(batch(1, x=torch.zeros(1)), partition_id=part)
    theirs = shared.get_meta(["x"], 1, part, mode="force_fetch")
    theirs.update_custom_meta([{"reward": 1.0}])
    shared.set_custom_meta(theirs)
    shared.put(batch(1, y=torch.zeros(1)), metadata=mine)
    assert shared.get_meta(["x"], 1, part, mode="force_fetch").custom_meta == [{"reward": 1.0}]


def test_T17_a_refused_put_leaves_tags_it_would_have_replaced(shared: Client, part: str) -> None:
    rows = shared.put(batch(1, x=torch.zeros(1)), partition_id=part)
    rows.update_custom_meta([{"old": 1}])
    shared.set_custom_meta(rows)
    rows.clear_custom_meta()
    rows.update_custom_meta([{"new": 2}])
    with pytest.raises(SchemaConflict):
        shared.put(batch(1, x=torch.zeros(1, dtype=torch.float64)), metadata=rows, strict_schema=True)
    assert shared.get_meta(["x"], 1, part, mode="force_fetch").custom_meta == [{"old": 1}]
    shared.put(batch(1, x=torch.ones(1)), metadata=rows)
    assert shared.get_meta(["x"], 1, part, mode="force_fetch").custom_meta == [{"new": 2}]


def test_T17_concurrent_tag_updates_all_count(shared: Client, part: str) -> None:
    tq.kv_put("a", part, tag={})
    writers = [
        threading.Thread(target=lambda n=n: [tq.kv_put("a", part, tag={f"{n}-{i}": i}) for i in range(20)])
        for n in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(20)
    assert len(tq.kv_list(part)[part]["a"]) == 80


def test_T22_what_a_parser_returns_is_checked_before_it_is_stored(shared: Client, part: str) -> None:
    with pytest.raises(UnsupportedValue):
        tq.kv_batch_put(
            ["a"], part, batch(1, x=torch.zeros(1)), data_parser=lambda c: {"x": c["x"].unsqueeze(1).to_sparse()}
        )
    assert tq.kv_list(part) == {}
    tq.kv_put("a", part, {"x": torch.zeros(1)})


class Local:
    """Known to this module only."""


def test_T23_a_class_of_ones_own_is_refused_at_the_caller(shared: Client, part: str) -> None:
    with pytest.raises(UnsupportedValue, match=r"field 'x'.*Local.*allow_pickle"):
        tq.kv_put("a", part, {"x": Local()})
    assert tq.kv_list(part) == {}


def test_T25_the_thread_count_of_torch_is_left_alone(shared: Client, part: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        asyncio.run(tq.async_kv_put("a", part, {"x": torch.zeros(1 << 20)}))
        tq.kv_batch_get("a", part, copy=True)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_T27_a_waiter_wakes_at_once(shared: Client, part: str) -> None:
    woken: list[float] = []

    def wait() -> None:
        shared.get_meta(["x"], 1, part, task_name="t", timeout_s=20)
        woken.append(time.monotonic())

    delays = []
    for _ in range(7):
        waiter = threading.Thread(target=wait)
        waiter.start()
        while not shared.stats()["waiting_requests"]:
            pass
        shared.put(batch(1, x=torch.zeros(1)), partition_id=part)
        at = time.monotonic()
        waiter.join(20)
        delays.append(woken[-1] - at)
    assert sorted(delays)[3] < 0.2


def test_T28_many_calls_of_one_loop_are_in_flight_at_once(shared: Client, part: str) -> None:
    async def main() -> None:
        waiting = [
            asyncio.create_task(shared.async_get_meta(["x"], 1, part, task_name=str(i), timeout_s=20))
            for i in range(64)
        ]
        await asyncio.wait_for(shared.async_put(batch(1, x=torch.zeros(1)), partition_id=part), 10)
        assert len(await asyncio.gather(*waiting)) == 64

    asyncio.run(main())


def test_T29_clearing_while_others_write_and_list_is_safe(shared: Client, part: str) -> None:
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(40):
                tq.kv_put(f"{n}-{i}", part, {"x": torch.tensor(i)})
                tq.kv_list(part)
                if i % 10 == n:
                    shared.clear_partition(part)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
