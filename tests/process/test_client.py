"""`TransferQueueClient`: metadata in three modes, put and get by metadata, statuses, partitions."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.errors import (
    BatchMismatch,
    DeadlineExceeded,
    InvalidInput,
    NotReady,
    SchemaConflict,
    StorageKeyNotFoundError,
    UnknownMode,
    UnknownRows,
    UnsupportedValue,
)


@pytest.fixture
def part(request: pytest.FixtureRequest, shared: tq.TransferQueueClient) -> Iterator[str]:
    yield request.node.name
    for suffix in ("", "2"):
        shared.clear_partition(request.node.name + suffix)


def batch(n: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[n])


def test_insert_reserves_rows_that_are_not_ready(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.get_meta(["x", "y"], 3, part, mode="insert")
    assert len(meta) == 3
    assert meta.partition_ids == [part] * 3
    assert meta.field_names == ["x", "y"]
    assert meta.production_status.tolist() == [0, 0, 0]
    assert not meta.is_ready
    assert meta.field_schema["x"]["dtype"] is None
    assert shared.get_consumption_status("t", part)[0].tolist() == meta.global_indexes


def test_insert_needs_rows_and_fields(shared: tq.TransferQueueClient, part: str) -> None:
    for fields, size in ((["x"], 0), (["x"], -1), ([], 2)):
        with pytest.raises(UnknownMode):
            shared.get_meta(fields, size, part, mode="insert")
    assert part not in shared.get_partition_list()


def test_put_with_metadata_returns_the_same_object_made_ready(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.get_meta(["x"], 2, part, mode="insert")
    back = shared.put(batch(2, x=torch.tensor([1.0, 2.0])), metadata=meta)
    assert back is meta
    assert meta.is_ready
    assert meta.field_schema["x"]["dtype"] == torch.float32
    shared.put(batch(2, y=torch.zeros(2, 3)), metadata=meta)
    assert meta.field_names == ["x", "y"]
    assert shared.get_data(meta)["x"].tolist() == [1.0, 2.0]


def test_put_without_metadata_makes_ready_rows(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(2, x=torch.tensor([1, 2])), partition_id=part)
    assert meta.is_ready
    assert len(set(meta.global_indexes)) == 2
    again = shared.put(batch(2, x=torch.tensor([3, 4])), partition_id=part)
    assert not set(meta.global_indexes) & set(again.global_indexes)


def test_fetch_hands_each_row_to_a_task_once(shared: tq.TransferQueueClient, part: str) -> None:
    shared.put(batch(4, x=torch.arange(4)), partition_id=part)
    first = shared.get_meta(["x"], 3, part, task_name="t")
    assert first.is_ready
    assert first.size == 3
    with pytest.raises(DeadlineExceeded):
        shared.get_meta(["x"], 3, part, task_name="t", timeout_s=0.05)
    second = shared.get_meta(["x"], 1, part, task_name="t", timeout_s=1)
    assert not set(first.global_indexes) & set(second.global_indexes)
    assert shared.get_meta(["x"], 4, part, task_name="other").size == 4


def test_fetch_wants_all_fields_of_a_row(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(4, x=torch.arange(4)), partition_id=part)
    shared.put(batch(2, y=torch.arange(2)), metadata=meta[1:3])
    got = shared.get_meta(["x", "y"], 2, part, task_name="t", timeout_s=1)
    assert got.global_indexes == meta.global_indexes[1:3]


def test_fetch_needs_a_task_and_a_known_mode(shared: tq.TransferQueueClient, part: str) -> None:
    with pytest.raises(UnknownMode, match="task_name"):
        shared.get_meta(["x"], 1, part)
    with pytest.raises(RuntimeError, match="mode"):
        shared.get_meta(["x"], 1, part, mode="steal", task_name="t")
    with pytest.raises(InvalidInput):
        shared.get_meta(["x"], -1, part, task_name="t")
    with pytest.raises(InvalidInput):
        shared.get_meta([], 1, part, task_name="t")
    assert shared.get_meta(["x"], 0, part, task_name="t").size == 0
    assert part not in shared.get_partition_list()


def test_force_fetch_lists_every_row_with_its_readiness(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.get_meta(["x"], 3, part, mode="insert")
    shared.put(batch(1, x=torch.tensor([1])), metadata=meta[1])
    shared.get_meta(["x"], 1, part, task_name="t")
    found = shared.get_meta(["x"], 99, part, mode="force_fetch")
    assert sorted(found.global_indexes) == meta.global_indexes
    ready = dict(zip(found.global_indexes, found.production_status.tolist(), strict=True))
    assert [ready[i] for i in meta.global_indexes] == [0, 1, 0]
    assert not found.is_ready
    with pytest.raises(UnknownRows):
        shared.get_meta(["x"], 1, "no such partition", mode="force_fetch")


def test_fetch_waits_for_the_commit_that_completes_it(shared: tq.TransferQueueClient, part: str) -> None:
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(shared.get_meta(["x"], 2, part, task_name="t", timeout_s=20)))
    waiter.start()
    shared.put(batch(1, x=torch.tensor([1])), partition_id=part)
    assert not got
    shared.put(batch(1, x=torch.tensor([2])), partition_id=part)
    waiter.join(20)
    assert shared.get_data(got[0])["x"].tolist() == [1, 2]


def test_fetch_gives_up_near_its_deadline(shared: tq.TransferQueueClient, part: str) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="fewer than 1 rows"):
        shared.get_meta(["x"], 1, part, task_name="t", timeout_s=0.3)
    assert 0.29 <= time.monotonic() - started < 1.5


def test_get_data_keeps_the_order_of_its_metadata(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(6, x=torch.arange(6), o=NonTensorStack(*"abcdef")), partition_id=part)
    picked = meta.select_samples([4, 0, 0, 5])
    td = shared.get_data(picked)
    assert td["x"].tolist() == [4, 0, 0, 5]
    assert td["o"] == ["e", "a", "a", "f"]
    meta.reorder([5, 4, 3, 2, 1, 0])
    assert shared.get_data(meta)["x"].tolist() == [5, 4, 3, 2, 1, 0]
    assert set(shared.get_data(meta.select_fields(["x"])).keys()) == {"x"}


def test_get_data_of_nothing_is_empty(shared: tq.TransferQueueClient) -> None:
    for meta in (None, tq.BatchMeta.empty()):
        assert shared.get_data(meta).batch_size == torch.Size([0])  # type: ignore[arg-type]


def test_get_data_of_unready_or_cleared_rows_raises(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.get_meta(["x"], 2, part, mode="insert")
    with pytest.raises(NotReady):
        shared.get_data(meta)
    shared.put(batch(2, x=torch.zeros(2)), metadata=meta)
    shared.clear_samples(meta[0])
    with pytest.raises(StorageKeyNotFoundError):
        shared.get_data(meta)
    shared.clear_partition(part)
    with pytest.raises(StorageKeyNotFoundError):
        shared.get_data(meta)


def test_metadata_may_span_partitions(shared: tq.TransferQueueClient, part: str) -> None:
    one = shared.put(batch(3, x=torch.arange(3)), partition_id=part)
    two = shared.put(batch(2, x=torch.arange(10, 12)), partition_id=part + "2")
    both = tq.BatchMeta.concat([one, two]).select_samples([3, 0, 4, 1])
    rows = [torch.full((n,), float(n)) for n in (1, 2, 3, 4)]
    shared.put({"y": rows, "o": ["p", "q", "r", "s"]}, metadata=both)
    td = shared.get_data(both)
    assert td["x"].tolist() == [10, 0, 11, 1]
    assert [row.tolist() for row in td["y"].unbind()] == [row.tolist() for row in rows]
    assert list(td["o"]) == ["p", "q", "r", "s"]
    assert shared.get_production_status(["y"], part)[1].tolist() == [[1], [1], [0]]
    shared.clear_samples(both)
    assert shared.get_consumption_status("t", part)[0].tolist() == one.global_indexes[2:]
    assert shared.get_consumption_status("t", part + "2")[0].tolist() == []


def test_of_a_put_over_several_partitions_that_is_refused_nothing_is_stored(
    shared: tq.TransferQueueClient, part: str
) -> None:
    metas = [shared.put({"x": torch.zeros(2, 3)}, partition_id=f"{part}-{name}") for name in "ab"]
    both = tq.BatchMeta.concat(metas)
    both.update_custom_meta([{"n": number} for number in range(4)])
    for bad in ({"x": torch.ones(4, 3), "y": [1, 2, 3, threading.Lock()]}, {"x": torch.ones(4, 3), "y": [1, 2, 3]}):
        with pytest.raises((UnsupportedValue, InvalidInput)):
            shared.put(bad, metadata=both)
    tagged = tq.BatchMeta.concat(metas)
    tagged.update_custom_meta([{"n": 1}, {}, {}, {"other": object()}])
    with pytest.raises(UnsupportedValue, match="tag 3"):
        shared.set_custom_meta(tagged)
    assert [shared.get_data(meta)["x"].sum().item() for meta in metas] == [0, 0]
    assert [shared.get_meta(["x"], 2, f"{part}-{name}", "force_fetch").custom_meta for name in "ab"] == [[{}, {}]] * 2
    assert shared.get_production_status(["y"], f"{part}-a") == (None, None)
    with pytest.raises(UnsupportedValue):
        shared.update(both, "x", {"x": torch.ones(4, 3)}, lambda was, now: threading.Lock() if now[0] else was)
    assert [shared.get_data(meta)["x"].sum().item() for meta in metas] == [0, 0]
    for name in "ab":
        shared.clear_partition(f"{part}-{name}")


def test_the_schema_of_one_meta_is_nobody_elses(shared: tq.TransferQueueClient, part: str) -> None:
    first, second = (shared.put({"x": torch.zeros(2, 3)}, partition_id=part) for _ in range(2))
    for meta in (first, second):
        shared.put({"y": torch.zeros(2, 7)}, metadata=meta)
    first.field_schema["y"]["shape"] = None
    assert second.field_schema["y"]["shape"] == (7,)
    assert shared.get_meta(["y"], 2, part, task_name="t").field_schema["y"]["shape"] == (7,)


def test_fields_are_named_by_a_list(shared: tq.TransferQueueClient, part: str) -> None:
    shared.put({"tokens": torch.zeros(2, 3)}, partition_id=part)
    with pytest.raises(InvalidInput, match="a list of names"):
        shared.get_meta("tokens", 2, part, task_name="t")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="a list of names"):
        shared.take(part, "tokens", 2, "t")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="a list of names"):
        tq.stream(part, "tokens", task="t", batch_size=2)
    with pytest.raises(InvalidInput, match="a list of names"):
        tq.async_stream(part, "tokens", task="t", batch_size=2)
    with pytest.raises(InvalidInput, match="a list of names"):
        tq.StreamingDataset(None, 2, 2, "tokens", part, "t")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tokenz", "text"])
def test_out_is_for_fields_of_tensors_that_are_read(shared: tq.TransferQueueClient, part: str, name: str) -> None:
    meta = shared.put({"tokens": torch.ones(2, 3), "text": ["a", "b"]}, partition_id=part)
    with pytest.raises(InvalidInput, match=f"out has '{name}'"):
        shared.get_data(meta, out={name: torch.zeros(2, 3)})
    assert list(shared.get_data(meta)["text"]) == ["a", "b"]


def test_a_value_for_all_rows_may_come_first(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put({"source": NonTensorData("math"), "x": torch.zeros(2)}, partition_id=part)
    assert list(shared.get_data(meta)["source"]) == ["math", "math"]


def test_a_jagged_batch_may_span_partitions(shared: tq.TransferQueueClient, part: str) -> None:
    metas = [shared.put(batch(1, x=torch.zeros(1)), partition_id=p) for p in (part, part + "2", part)]
    both = tq.BatchMeta.concat(metas)
    rows = [torch.arange(n) for n in (3, 1, 2)]
    shared.put(batch(3, y=torch.nested.nested_tensor(rows, layout=torch.jagged)), metadata=both)
    assert [row.tolist() for row in shared.get_data(both)["y"].unbind()] == [row.tolist() for row in rows]


def test_set_custom_meta_replaces_tags(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(2, x=torch.zeros(2)), partition_id=part)
    meta.update_custom_meta([{"a": 1}, {"b": 2}])
    shared.set_custom_meta(meta)
    assert shared.get_meta(["x"], 2, part, task_name="t").custom_meta == [{"a": 1}, {"b": 2}]
    meta.clear_custom_meta()
    meta.update_custom_meta([{"c": 3}, {}])
    shared.set_custom_meta(meta)
    assert shared.get_meta(["x"], 2, part, mode="force_fetch").custom_meta == [{"c": 3}, {}]


def test_set_custom_meta_of_no_rows_does_nothing(shared: tq.TransferQueueClient, part: str) -> None:
    shared.set_custom_meta(tq.BatchMeta.empty())
    assert part not in shared.get_partition_list()


def test_of_a_row_that_metadata_names_twice_a_put_keeps_the_last(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(2, x=torch.zeros(2)), partition_id=part)
    other = shared.put(batch(1, x=torch.zeros(1)), partition_id=part + "2")
    padded = tq.BatchMeta.concat([meta, other, meta])
    padded.update_custom_meta([{"n": n} for n in range(5)])
    values = NonTensorStack("a", "b", "c", "d", "e")
    assert shared.put(batch(5, x=torch.arange(5.0), y=values), metadata=padded) is padded
    assert shared.get_data(padded)["x"].tolist() == [3, 4, 2, 3, 4]
    assert list(shared.get_data(padded)["y"]) == ["d", "e", "c", "d", "e"]
    assert shared.get_meta(["y"], 2, part, mode="force_fetch").custom_meta == [{"n": 3}, {"n": 4}]


def test_a_put_brings_the_tags_that_changed_on_its_metadata(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(2, x=torch.zeros(2)), partition_id=part)
    meta.update_custom_meta([{"len": 3}, {"len": 5}])
    shared.put(batch(2, y=torch.zeros(2)), metadata=meta)
    assert shared.get_meta(["y"], 2, part, task_name="t").custom_meta == [{"len": 3}, {"len": 5}]


def test_statuses(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(3, x=torch.zeros(3)), partition_id=part)
    shared.put(batch(1, y=torch.zeros(1)), metadata=meta[1])
    shared.get_meta(["x"], 2, part, task_name="t")
    index, consumed = shared.get_consumption_status("t", part)
    assert index.tolist() == meta.global_indexes
    assert (consumed.dtype, consumed.tolist()) == (torch.int8, [1, 1, 0])
    index, produced = shared.get_production_status(["y", "x"], part)
    assert (produced.dtype, produced.tolist()) == (torch.int8, [[1, 0], [1, 1], [1, 0]])
    assert shared.get_consumption_status("t", "nowhere") == (None, None)
    assert shared.get_production_status(["x"], "nowhere") == (None, None)
    assert shared.get_production_status(["x", "unknown"], part) == (None, None)


def test_checks(shared: tq.TransferQueueClient, part: str) -> None:
    assert not shared.check_production_status(["x"], part)
    assert not shared.check_consumption_status("t", part)
    meta = shared.get_meta(["x"], 2, part, mode="insert")
    assert not shared.check_production_status(["x"], part)
    shared.put(batch(2, x=torch.zeros(2)), metadata=meta)
    assert shared.check_production_status(["x"], part)
    assert not shared.check_consumption_status("t", part)
    shared.get_meta(["x"], 2, part, task_name="t")
    assert shared.check_consumption_status("t", part)


def test_declared_size_counts_in_the_checks(shared: tq.TransferQueueClient, part: str) -> None:
    assert shared.get_partition(part) is None
    shared.set_partition(part, size=3, metadata={"step": 7})
    shared.set_partition(part, metadata={"policy": "v2"})
    shared.put(batch(2, x=torch.zeros(2)), partition_id=part)
    assert shared.get_partition(part) == {"size": 3, "metadata": {"step": 7, "policy": "v2"}, "rows": 2}
    assert not shared.check_production_status(["x"], part)
    shared.put(batch(1, x=torch.zeros(1)), partition_id=part)
    assert shared.check_production_status(["x"], part)


def test_arguments_that_are_longer_than_a_server_reads_are_refused(shared: tq.TransferQueueClient, part: str) -> None:
    long = {"prompts": "x" * (1 << 20)}
    with pytest.raises(InvalidInput, match=r"SetPartition: \d+ bytes of arguments, at most 1048576: name less"):
        shared.set_partition(part, metadata=long)

    async def beside_another() -> tq.BatchMeta:
        waiting = asyncio.create_task(shared.async_get_meta(["x"], 1, part, task_name="t", timeout_s=30))
        await asyncio.sleep(0)
        with pytest.raises(InvalidInput, match="at most 1048576"):
            await shared.async_set_partition(part, metadata=long)
        await shared.async_put({"x": torch.zeros(1)}, partition_id=part)
        return await waiting

    assert asyncio.run(beside_another()).size == 1


def test_as_many_keys_are_locked_together_as_are_put(shared: tq.TransferQueueClient, part: str) -> None:
    keys = [f"{number:020d}" for number in range(60_000)]
    with tq.kv_global_lock(keys, part, timeout=20):
        assert len(tq.kv_lock_list(part)["holders"]) == len(keys)
    assert not tq.kv_lock_list(part)["holders"]


def test_cleared_rows_count_as_rows_that_were_there(shared: tq.TransferQueueClient, part: str) -> None:
    shared.set_partition(part, size=4)
    shared.put(batch(3, x=torch.arange(3)), partition_id=part)
    shared.clear_samples(shared.get_meta(["x"], 2, part, task_name="t"))
    assert not shared.check_consumption_status("t", part)
    shared.put(batch(1, x=torch.arange(1)), partition_id=part)
    assert not shared.check_consumption_status("t", part)
    assert shared.check_production_status(["x"], part)
    shared.clear_samples(shared.get_meta(["x"], 1, part, task_name="t"))
    shared.get_meta(["x"], 1, part, task_name="t")
    assert shared.check_consumption_status("t", part)


def test_reset_consumption_offers_rows_again(shared: tq.TransferQueueClient, part: str) -> None:
    shared.put(batch(2, x=torch.zeros(2)), partition_id=part)
    for task in ("t", "u"):
        shared.get_meta(["x"], 2, part, task_name=task)
    assert shared.reset_consumption(part, "t") is True
    assert shared.get_meta(["x"], 2, part, task_name="t", timeout_s=1).size == 2
    with pytest.raises(DeadlineExceeded):
        shared.get_meta(["x"], 2, part, task_name="u", timeout_s=0.02)
    assert shared.reset_consumption(part) is True
    assert shared.get_meta(["x"], 2, part, task_name="u", timeout_s=1).size == 2
    assert shared.reset_consumption("nowhere") is True


def test_partition_list_and_clear(shared: tq.TransferQueueClient, part: str) -> None:
    shared.set_partition(part)
    assert part in shared.get_partition_list()
    shared.clear_partition(part)
    shared.clear_partition(part)
    assert part not in shared.get_partition_list()


def test_clear_samples_keeps_the_partition_and_is_idempotent(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(2, x=torch.zeros(2)), partition_id=part)
    shared.clear_samples(meta)
    shared.clear_samples(meta)
    shared.clear_samples(tq.BatchMeta.empty())
    assert part in shared.get_partition_list()
    assert shared.get_consumption_status("t", part)[0].tolist() == []


def test_retrieve_meta_and_keys(shared: tq.TransferQueueClient, part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.tensor([1, 2])), tags=[{"n": 1}, {"n": 2}])
    meta = shared.kv_retrieve_meta(["b", "nobody", "a"], part)
    assert meta.custom_meta == [{"n": 2}, {"n": 1}]
    assert shared.get_data(meta)["x"].tolist() == [2, 1]
    assert shared.kv_retrieve_keys(meta.global_indexes, part) == ["b", "a"]
    assert shared.kv_retrieve_keys(meta.global_indexes[0], part) == ["b"]
    assert shared.kv_retrieve_keys([10**9], part) == [None]
    made = shared.kv_retrieve_meta("c", part, create=True)
    assert not made.is_ready
    assert set(tq.kv_list(part)[part]) == {"a", "b", "c"}
    with pytest.raises(InvalidInput, match="names no rows"):
        shared.kv_retrieve_keys([], part)
    for bad, error in (([], InvalidInput), ([1], UnsupportedValue), (("a",), UnsupportedValue)):
        with pytest.raises(error):
            shared.kv_retrieve_meta(bad, part)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        shared.kv_retrieve_keys([0], "nowhere")


@pytest.mark.parametrize("copy", [False, True])
def test_get_data_is_writable_whatever_its_size(shared: tq.TransferQueueClient, part: str, copy: bool) -> None:
    x = torch.arange(4 * 300_000, dtype=torch.float32).view(4, -1)
    meta = shared.put(batch(4, x=x, small=torch.arange(4)), partition_id=part)
    td = shared.get_data(meta, copy=copy)
    td["x"].values().add_(1)
    td["small"].add_(1)
    again = shared.get_data(meta, copy=copy)
    assert torch.equal(again["x"].values(), x.view(-1))
    assert torch.equal(td["x"].values(), x.view(-1) + 1)
    assert again["small"].tolist() == [0, 1, 2, 3]


def test_a_copy_of_rows_of_one_shape_in_a_field_that_differs_further_in(
    shared: tq.TransferQueueClient, part: str
) -> None:
    x = torch.randn(8, 2, 9_000)
    meta = shared.put({"x": x}, partition_id=part)
    shared.put({"x": [torch.randn(2, 5), torch.randn(2, 7)]}, partition_id=part)
    rows = shared.get_data(meta, copy=True)["x"].unbind()
    assert [row.shape for row in rows] == [(2, 9_000)] * 8
    assert all(map(torch.equal, rows, x))


def test_get_data_fills_out(shared: tq.TransferQueueClient, part: str) -> None:
    x = torch.randn(6, 50_000)
    meta = shared.put(batch(6, x=x, y=torch.arange(6)), partition_id=part)
    out = {"x": torch.zeros(3, 50_000)}
    td = shared.get_data(meta.select_samples([5, 1, 2]), out=out)
    assert td["x"].data_ptr() == out["x"].data_ptr()
    assert torch.equal(out["x"], x[[5, 1, 2]])
    assert td["y"].tolist() == [5, 1, 2]
    for wrong in (torch.zeros(3, 49_999), torch.zeros(3, 50_000, dtype=torch.float64), torch.zeros(2, 50_000)):
        with pytest.raises(InvalidInput):
            shared.get_data(meta[:3], out={"x": wrong})


def test_get_data_goes_to_a_device(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(2, x=torch.ones(2, 3), o=NonTensorStack("a", "b")), partition_id=part)
    td = shared.get_data(meta, device="cpu")
    assert td["x"].device.type == "cpu"
    assert td["o"] == ["a", "b"]


def test_put_takes_plain_columns_with_lists(shared: tq.TransferQueueClient, part: str) -> None:
    columns = {"ids": [[1, 2], [3]], "r": [0.5, 1.0], "n": np.array([4, 5]), "t": torch.zeros(2, 2), "s": ["a", "b"]}
    meta = shared.put(columns, partition_id=part)
    td = shared.get_data(meta)
    assert [row.tolist() for row in td["ids"].unbind()] == [[1, 2], [3]]
    assert (td["r"].dtype, td["r"].tolist()) == (torch.float32, [0.5, 1.0])
    assert td["n"].tolist() == [4, 5]
    assert list(td["s"]) == ["a", "b"]


BAD_PUTS: dict[str, tuple[type[Exception], Callable[[tq.TransferQueueClient, str, Any], Any]]] = {
    "neither metadata nor partition": (ValueError, lambda c, p, m: c.put(batch(1, x=torch.zeros(1)))),
    "more rows than metadata": (ValueError, lambda c, p, m: c.put(batch(3, x=torch.zeros(3)), metadata=m)),
    "fewer rows than metadata": (ValueError, lambda c, p, m: c.put(batch(1, x=torch.zeros(1)), metadata=m)),
    "empty metadata": (ValueError, lambda c, p, m: c.put(batch(1, x=torch.zeros(1)), metadata=tq.BatchMeta.empty())),
    "no rows": (ValueError, lambda c, p, m: c.put(batch(0, x=torch.zeros(0)), partition_id=p + "2")),
    "no rows for metadata": (BatchMismatch, lambda c, p, m: c.put(batch(0, x=torch.zeros(0)), metadata=m)),
    "no fields": (ValueError, lambda c, p, m: c.put(batch(2), metadata=m)),
    "another dtype": (
        SchemaConflict,
        lambda c, p, m: c.put(batch(2, x=torch.ones(2).double()), metadata=m, strict_schema=True),
    ),
    "another rank": (
        SchemaConflict,
        lambda c, p, m: c.put(batch(2, x=torch.ones(2, 2)), metadata=m, strict_schema=True),
    ),
    "objects for tensors": (SchemaConflict, lambda c, p, m: c.put({"x": ["a", "b"]}, metadata=m, strict_schema=True)),
}


@pytest.mark.parametrize("what", BAD_PUTS)
def test_a_bad_put_is_refused_and_changes_nothing(shared: tq.TransferQueueClient, part: str, what: str) -> None:
    meta = shared.put(batch(2, x=torch.zeros(2)), partition_id=part)
    before = shared.stats()
    error, put = BAD_PUTS[what]
    held = pickle.loads(pickle.dumps(meta))  # noqa: S301
    held.update_custom_meta([{"n": 1}, {"n": 2}])
    with pytest.raises(error):
        put(shared, part, held)
    after = shared.stats()
    assert [after[k] for k in ("rows", "partitions", "arena_nbytes_used")] == [
        before[k] for k in ("rows", "partitions", "arena_nbytes_used")
    ]
    found = shared.get_meta(["x"], 2, part, mode="force_fetch")
    assert found.custom_meta == [{}, {}]
    assert shared.get_data(found)["x"].tolist() == [0, 0]
