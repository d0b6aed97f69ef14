"""Arguments that have no truth, no length or another type than was asked for: named, before anything is sent."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.bridge import Numbers, RolloutBridge, RolloutSchema
from transfer_queue.client.groups import GroupPool
from transfer_queue.errors import InvalidInput, UnsupportedValue


@pytest.fixture
def part(shared: tq.TransferQueueClient) -> Iterator[str]:
    yield "arguments"
    shared.clear_partition("arguments")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dense", lambda c, p, one: c.take(p, ["x"], 1, "t", dense=one)),
        ("copy", lambda c, p, one: c.get_data(c.get_meta(["x"], 2, p, "force_fetch"), copy=one)),
        ("strict", lambda _, p, one: tq.kv_batch_get("k", p, strict=one)),
        ("empty", lambda _, p, one: tq.kv_update("k", p, "x", 1, "replace", empty=one)),
        ("prefetch", lambda _, p, one: tq.stream(p, ["x"], task="t", batch_size=1, prefetch=one)),
        ("rows", lambda _, p, one: tq.stream(p, ["x"], task="t", batch_size=1, rows=one)),
        ("clear", lambda _, p, one: tq.open_partition(f"{p}_1", p, 1, clear=one)),
        ("include_storage", lambda _, p, one: tq.save_checkpoint("/nowhere", include_storage=one)),
        ("overwrite", lambda _, p, one: tq.export_table(p, "/nowhere/a.parquet", overwrite=one)),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_flag_that_says_neither_yes_nor_no_is_refused_before_anything_is_taken(
    shared: tq.TransferQueueClient, part: str, name: str, call: Any
) -> None:
    tq.kv_put("k", part, {"x": 1})
    for wrong in (np.array([1, 0]), torch.ones(2), np.empty(0), "false", 2, []):
        with pytest.raises(InvalidInput, match=f"{name} is True or False, got"):
            call(shared, part, wrong)
    assert len(shared.get_meta(["x"], 1, part, task_name="t")) == 1


@pytest.mark.parametrize("name", ["dedupe", "strict_schema"])
def test_a_flag_of_a_put_is_refused_before_anything_is_there(
    shared: tq.TransferQueueClient, part: str, name: str
) -> None:
    wrong: dict[str, Any] = {name: torch.tensor([1, 0])}
    with pytest.raises(InvalidInput, match=f"{name} is True or False, got"):
        shared.put({"x": torch.ones(2)}, partition_id=part, **wrong)
    assert shared.get_partition(part) is None


@pytest.mark.parametrize("yes", [True, np.True_, torch.tensor(True), np.array(True), 1], ids=repr)
def test_a_flag_of_another_library_counts(shared: tq.TransferQueueClient, part: str, yes: Any) -> None:
    tq.kv_batch_put(["a", "b"], part, {"x": [[1], [2]]}, dedupe=yes)
    assert not tq.kv_batch_get(["a", "b"], part, dense=yes, copy=yes, strict=yes)["x"].is_nested
    assert tq.stream(part, ["x"], task="t", batch_size=1, prefetch=yes)._dataset.prefetch is True


ARRAY = np.array([1, 0])
BRIDGE = partial(RolloutBridge, schema=RolloutSchema({"x": Numbers()}))


@pytest.mark.parametrize(
    ("told", "call"),
    [
        ("partition_id is a string", lambda c: c.get_meta(["x"], 1, ARRAY, task_name="t")),
        ("partition_id is a string", lambda c: c.put({"x": torch.ones(2)}, partition_id=ARRAY)),
        ("partition_id is a string", lambda _: tq.kv_list([])),  # type: ignore[arg-type]
        ("task_name is a string", lambda c: c.take("p", ["x"], 1, ["t"])),
        ("mode array", lambda c: c.get_meta(["x"], 1, "p", mode=ARRAY)),
        ("batch_size must be an int", lambda c: c.take("p", ["x"], ARRAY, "t")),
        ("lease_s: expected a number", lambda c: c.take("p", ["x"], 1, "t", lease_s={})),
        ("a time-out: expected a number", lambda c: c.take("p", ["x"], 1, "t", timeout_s=ARRAY)),
        ("a time-out: expected a number", lambda _: tq.kv_watch("p", timeout_s=[])),  # type: ignore[arg-type]
        ("a metadata is a dict", lambda c: c.set_partition("p", metadata=0)),
        ("out is a dict", lambda c: c.get_data(c.put({"x": torch.ones(2)}, partition_id="odd"), out=[])),
        ("prompt is a dict", lambda _: tq.group_pool("odd").open("g", 1, prompt=ARRAY)),  # type: ignore[arg-type]
        ("ticket is a GroupTicket", lambda _: tq.group_pool("odd").open("g", 1, ticket=5)),  # type: ignore[arg-type]
        ("attempt is a SlotAttempt", lambda _: tq.group_pool("odd").finish(None, {"x": [1]})),  # type: ignore[arg-type]
        ("results, place 0, is a", lambda _: tq.group_pool("odd").finish_batch([1], {"x": [1]})),  # type: ignore[list-item]
        ("tickets is a list", lambda _: tq.group_pool("odd").return_tickets(5)),  # type: ignore[arg-type]
        ("tickets, place 0, is a GroupTicket", lambda _: tq.group_pool("odd").return_tickets([5])),  # type: ignore[list-item]
        ("slices is a dict", lambda _: tq.kv_batch_get("k", "odd", slices=5)),  # type: ignore[arg-type]
        ("slices is a dict", lambda c: BRIDGE(c).fetch("odd", "t", slices=5)),
        ("schedule is a Schedule", lambda c: BRIDGE(c).put("odd", {"x": [1]}, schedule={"partitions": [[0]]})),
        ("fetched is a Fetched", lambda c: BRIDGE(c).ack(c.put({"x": torch.ones(2)}, partition_id="odd"))),
        ("columns is a dict", lambda _: RolloutSchema(["x"])),  # type: ignore[arg-type]
        ("batch is a dict", lambda c: BRIDGE(c).put("odd", [{"x": 1}])),
        ("priorities is a dict", lambda _: tq.group_pool("odd").set_priorities([1])),  # type: ignore[arg-type]
        ("consumers is a list, not one str", lambda _: tq.open_partition("p_0", "p", 1, "actor")),
        ("what is a string", lambda _: tq.overview_table([])),  # type: ignore[arg-type]
        ("columns is a list of strings", lambda c: [tq.kv_put("k", "odd", {"x": 1}), tq.table("odd").select([1])]),
    ],
)
def test_what_has_no_truth_or_no_length_is_named(shared: tq.TransferQueueClient, told: str, call: Any) -> None:
    with pytest.raises(InvalidInput, match=told):
        call(shared)


@pytest.mark.parametrize("wrong", [5, None, b"x", "\ud800"])
def test_a_directory_that_is_none_is_refused(shared: tq.TransferQueueClient, wrong: Any) -> None:
    for call in (tq.read_row_index, tq.load_checkpoint, tq.save_checkpoint, tq.load_data_by_key, tq.replay):
        with pytest.raises((UnsupportedValue, InvalidInput), match=r"a directory is|no directory can"):
            call(wrong)


def test_rows_are_found_by_one_index_of_numpy(shared: tq.TransferQueueClient, part: str) -> None:
    tq.kv_put("k", part, {"x": 1})
    row = shared.get_meta(["x"], 1, part, "force_fetch").indexes[0]
    assert shared.kv_retrieve_keys(row, part) == ["k"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "target"),
    [
        ("not memory of its own", torch.zeros(2, 2, device="meta")),
        ("not memory of its own", torch.zeros(1, 2).expand(2, 2)),
        ("requires grad", torch.zeros(2, 2, requires_grad=True)),
    ],
)
def test_a_place_that_cannot_be_filled_is_refused(
    shared: tq.TransferQueueClient, part: str, told: str, target: torch.Tensor
) -> None:
    metadata = shared.put({"x": torch.ones(2, 2)}, partition_id=part)
    with pytest.raises(InvalidInput, match=told):
        shared.get_data(metadata, out={"x": target})


def test_places_are_filled_under_no_grad_and_in_a_tensordict(shared: tq.TransferQueueClient, part: str) -> None:
    metadata = shared.put({"x": torch.ones(2, 2)}, partition_id=part)
    weights, places = torch.zeros(2, 2, requires_grad=True), TensorDict({"x": torch.zeros(2, 2)}, batch_size=[2])
    with torch.no_grad():
        shared.get_data(metadata, out={"x": weights})
    shared.get_data(metadata, out=places)  # type: ignore[arg-type]
    assert bool((weights == 1).all())
    assert bool((places["x"] == 1).all())


def test_a_device_that_is_not_there_is_refused(shared: tq.TransferQueueClient, part: str) -> None:
    tq.kv_put("k", part, {"x": torch.ones(2)})
    with pytest.raises(InvalidInput, match="device 'cuda:99'"):
        tq.kv_batch_get("k", part, device="cuda:99")
    with pytest.raises(InvalidInput, match="device 'cuda:99'"):
        shared.get_data(shared.get_meta(["x"], 1, part, "force_fetch"), device="cuda:99")


@pytest.mark.parametrize("count", [np.int64(0), torch.tensor(0), np.int32(1)], ids=repr)
def test_workers_are_counted_by_an_integer_of_another_library(
    shared: tq.TransferQueueClient, part: str, count: Any
) -> None:
    tq.kv_batch_put(["a", "b"], part, {"x": torch.arange(2)})
    shared.set_partition(part, size=2)
    with tq.stream(part, ["x"], task="t", batch_size=2, num_workers=count) as stream:
        assert [batch["x"].tolist() for batch in stream] == [[0, 1]]


@pytest.mark.parametrize(
    ("told", "more"),
    [
        ("batch_size must be >= 1", {"batch_size": 0}),
        ("num_workers is 0 or more", {"batch_size": 1, "num_workers": -1}),
    ],
)
def test_a_size_of_a_stream_that_is_none_is_refused_by_its_name(
    shared: tq.TransferQueueClient, told: str, more: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput, match=f"^{told}"):
        tq.stream("p", ["x"], task="t", **more)


def test_a_state_of_a_stream_names_a_batch(shared: tq.TransferQueueClient) -> None:
    names: dict[str, Any] = {"data_fields": ["x"], "partition_id": "p", "task_name": "t"}
    dataset = tq.StreamingDataset(None, 1, 1, **names)
    for number in (-1, 1 << 70):
        with pytest.raises(InvalidInput, match="batch_index of a state"):
            dataset.load_state_dict({"partition_id": "p", "batch_index": number, "used_rows": []})


# what groups carry along

KEPT = {
    "tuple": (1, 2), "set": {1, 2}, "time": datetime.datetime(2024, 2, 29), "decimal": decimal.Decimal("1.10"),
    "bytes": bytearray(b"a"), "large": 1 << 70, "path": Path("a"), "deep": [{"a": (1,)}], "nothing": None,
}  # fmt: skip


@pytest.fixture
def pool(part: str) -> Iterator[GroupPool]:
    made = tq.group_pool(part, tq.GroupPolicy())
    yield made
    made.remove(discard=True)


def test_prompts_and_infos_of_groups_come_back_as_they_were(pool: GroupPool) -> None:
    for _ in range(2):  # the same group again changes nothing
        pool.open("a", 1, prompt=KEPT)
    (attempt,) = pool.claim()
    rows = pool.finish(attempt, {"x": torch.ones(1)}, info=KEPT)
    pool.finish(attempt, rows, info=KEPT)  # the same result
    (group,) = pool.select(1).groups
    for found in (attempt.prompt, group.prompt, group.members[0].info):
        assert (found, list(map(type, found.values()))) == (KEPT, list(map(type, KEPT.values())))


def test_a_prompt_or_info_that_cannot_be_kept_is_refused_by_name(
    shared: tq.TransferQueueClient, pool: GroupPool
) -> None:
    with pytest.raises(UnsupportedValue, match=r"prompt, name 'image': .*tolist"):
        pool.open("a", 1, prompt={"image": np.ones(2)})
    pool.open("a", 1)
    (attempt,) = pool.claim()
    with pytest.raises(UnsupportedValue, match=r"info, name 'image': .*tolist"):
        pool.finish(attempt, {"x": torch.ones(1)}, info={"image": np.ones(2)})
    assert shared.get_partition(pool.partition_id) is None
    assert pool.status()["running"] == 1


def test_a_pool_of_groups_has_a_name(shared: tq.TransferQueueClient) -> None:
    with pytest.raises(InvalidInput, match="partition_id is a string, got 5"):
        tq.group_pool(5)  # type: ignore[arg-type]
