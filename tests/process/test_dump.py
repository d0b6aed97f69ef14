"""dump_data_by_key and load_data_by_key: chosen rows as files and back, verified, nothing half-done."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.client.effects import Call
from transfer_queue.client.operations.update import rows_of
from transfer_queue.client.session import Session
from transfer_queue.errors import CheckpointCorrupt, InvalidInput, RowCleared, SchemaConflict
from transfer_queue.wire import messages as m


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "dumps" / "one"


def put(partition: str, keys: list[str]) -> None:
    ids = torch.arange(3 * len(keys)).view(len(keys), 3)
    fields = TensorDict({"ids": ids, "mask": torch.ones(len(keys), 3)}, batch_size=len(keys))
    tq.kv_batch_put(keys, partition, fields, tags=[{"idx": row} for row in range(len(keys))])


def rows(keys: list[str], partition: str, field: str) -> list[Any]:
    found = rows_of(tq.kv_batch_get(keys, partition, select_fields=field, strict=True).get(field))
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in found]


def test_only_the_chosen_rows_come_back_with_fields_and_tags(shared: tq.TransferQueueClient, place: Path) -> None:
    keys = [f"k{n}" for n in range(6)]
    put("basic", keys)
    report = tq.dump_data_by_key(place, ["k4", "k1", "k4"], "basic")
    assert report == {"keys": 2, "rows_with_data": 2, "shards": 1, "bytes": report["bytes"]}
    assert report["bytes"] > 0
    assert list(tq.kv_list("basic")["basic"]) == keys, "the live partition is untouched"
    shared.clear_partition("basic")
    assert tq.load_data_by_key(place) == {"k4": {"idx": 4}, "k1": {"idx": 1}}
    assert tq.kv_list("basic") == {"basic": {"k4": {"idx": 4}, "k1": {"idx": 1}}}
    assert rows(["k1", "k4"], "basic", "ids") == [[3, 4, 5], [12, 13, 14]]


def test_values_of_every_kind_come_back_as_they_were(shared: tq.TransferQueueClient, place: Path) -> None:
    keys = ["a", "b", "c"]
    fields = {
        "dense": torch.rand(3, 2, 2), "flat": torch.arange(3), "ragged": [torch.arange(n + 1) for n in range(3)],
        "varied": [torch.ones(n + 1, 3 - n) for n in range(3)], "text": ["x", "y" * 1000, ""],
        "objects": [{"n": [1, 2], "t": torch.ones(2)}, None, (1, 2)], "large": torch.rand(3, 50_000),
        "nested": TensorDict({"x": torch.arange(6).view(3, 2)}, batch_size=3),
    }  # fmt: skip
    tq.kv_batch_put(keys, "kinds", fields)
    before = tq.kv_batch_get(keys, "kinds")
    kinds = shared.kv_retrieve_meta(keys, "kinds").field_schema
    tq.dump_data_by_key(place, keys, "kinds")
    shared.clear_partition("kinds")
    tq.load_data_by_key(place)
    after = tq.kv_batch_get(keys, "kinds")
    assert shared.kv_retrieve_meta(keys, "kinds").field_schema == kinds
    for name in fields:
        for old, new in zip(rows_of(before.get(name)), rows_of(after.get(name)), strict=True):
            if isinstance(old, dict):
                assert old["n"] == new["n"]
                assert torch.equal(old["t"], new["t"])
            elif isinstance(old, torch.Tensor):
                assert torch.equal(old, new)
                assert old.dtype == new.dtype
            else:
                assert bool((old == new).all()) if isinstance(old, TensorDict) else old == new


def test_rows_with_other_fields_or_none_keep_what_they_have(shared: tq.TransferQueueClient, place: Path) -> None:
    put("mixed", ["h0", "h1"])
    tq.kv_put("h1", "mixed", fields={"extra": torch.tensor([7, 8])})
    tq.kv_put("tagged", "mixed", tag={"only": "tag"})
    shared.kv_retrieve_meta(["bare"], "mixed", create=True)
    report = tq.dump_data_by_key(place, ["h0", "h1", "tagged", "bare"], "mixed")
    assert (report["keys"], report["rows_with_data"], report["shards"]) == (4, 2, 2)
    index = tq.read_row_index(place)
    assert index["partition_id"] == "mixed"
    assert {key: row["fields"] for key, row in index["rows"].items()} == {
        "h0": ["ids", "mask"], "h1": ["extra", "ids", "mask"], "tagged": [], "bare": [],
    }  # fmt: skip
    assert index["rows"]["tagged"]["tag"] == {"only": "tag"}
    known = shared.kv_retrieve_meta(["h0", "h1"], "mixed").global_indexes
    assert [index["rows"][key]["global_index"] for key in ("h0", "h1")] == known
    shared.clear_partition("mixed")
    tq.load_data_by_key(place)
    assert sorted(tq.kv_list("mixed")["mixed"]) == ["bare", "h0", "h1", "tagged"]
    assert rows(["h1"], "mixed", "extra") == [[7, 8]]
    assert shared.get_production_status(["extra"], "mixed")[1].sum() == 1  # type: ignore[union-attr]


def test_rows_that_have_not_the_same_fields_come_back_in_the_order_of_the_dump(
    shared: tq.TransferQueueClient, place: Path
) -> None:
    keys = [f"{prompt}/{sample}" for prompt in range(3) for sample in range(2)]
    put("order", keys)
    tq.kv_batch_put(keys[1:3], "order", {"reward": torch.ones(2)})
    tq.kv_put("bare", "order", tag={"idx": 6})
    put("order", ["last"])
    tq.dump_data_by_key(place, [*keys, "bare", "last"], "order")
    listed = tq.kv_list("order")
    shared.clear_partition("order")
    tq.load_data_by_key(place)
    assert list(tq.kv_list("order")["order"].items()) == list(listed["order"].items())
    found = shared.get_meta(["ids"], 4, "order", task_name="actor")
    assert [row[0].item() for row in rows_of(shared.get_data(found)["ids"])] == [0, 3, 6, 9]


def test_loading_merges_by_key_and_leaves_all_else_alone(shared: tq.TransferQueueClient, place: Path) -> None:
    put("merge", ["a", "b"])
    put("bystander", ["x"])
    tq.dump_data_by_key(place, ["a"], "merge")
    (number,) = shared.kv_retrieve_meta(["a"], "merge").global_indexes
    tq.kv_put("a", "merge", fields={"ids": torch.zeros(3, dtype=torch.int64), "new": torch.ones(1)}, tag={"keep": 1})
    tq.kv_put("c", "merge", fields={"new": torch.ones(1)})
    for _ in range(2):  # a repeated load changes nothing
        tq.load_data_by_key(place)
        assert shared.kv_retrieve_meta(["a"], "merge").global_indexes == [number]
        assert tq.kv_list("merge")["merge"] == {"a": {"idx": 0, "keep": 1}, "b": {"idx": 1}, "c": {}}
        assert rows(["a", "b"], "merge", "ids") == [[0, 1, 2], [3, 4, 5]]
        assert rows(["a"], "merge", "new") == [[1.0]]
    assert rows(["x"], "bystander", "ids") == [[0, 1, 2]]


def test_many_rows_go_into_several_shards(shared: tq.TransferQueueClient, place: Path) -> None:
    keys = [f"k{n}" for n in range(600)]
    put("many", keys)
    assert tq.dump_data_by_key(place, keys, "many")["shards"] == 3
    shared.clear_partition("many")
    tq.load_data_by_key(place)
    assert rows(keys[::7], "many", "ids") == [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(0, 600, 7)]


def test_a_field_of_whole_and_other_numbers_is_read_whole_after_a_load(
    shared: tq.TransferQueueClient, place: Path
) -> None:
    keys = [f"k{n}" for n in range(300)]
    tq.kv_batch_put(keys[:256], "rewards", {"reward": [1] * 256})
    tq.kv_batch_put(keys[256:], "rewards", {"reward": [0.5] * 44})
    before = tq.kv_batch_get(keys, "rewards")["reward"]
    tq.dump_data_by_key(place, keys, "rewards")
    shared.clear_partition("rewards")
    tq.load_data_by_key(place)
    after = tq.kv_batch_get(keys, "rewards")["reward"]
    assert after.dtype == before.dtype
    assert torch.equal(after, before)


def test_rows_of_several_dtypes_come_back_each_as_it_was(shared: tq.TransferQueueClient, place: Path) -> None:
    values = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64), "c": torch.ones(2), "d": 7}
    for key, value in values.items():
        tq.kv_put(key, "dtypes", {"x": value})
    assert tq.dump_data_by_key(place, list(values), "dtypes")["shards"] == 3
    tq.load_data_by_key(place)  # beside what is there
    shared.clear_partition("dtypes")
    tq.load_data_by_key(place)
    assert [tq.kv_batch_get(key, "dtypes")["x"].dtype for key in values] == [
        torch.float32, torch.float64, torch.float32, torch.int64
    ]  # fmt: skip
    assert rows(["a", "c"], "dtypes", "x") == [[0.0, 0.0], [1.0, 1.0]]


def test_a_dump_of_several_dtypes_is_refused_where_puts_are_strict(
    shared: tq.TransferQueueClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, dtype in (("a", torch.float32), ("b", torch.float64)):
        tq.kv_put(key, "twofold", {"x": torch.zeros(2, dtype=dtype)})
    tq.dump_data_by_key(place, ["a", "b"], "twofold")
    shared.clear_partition("twofold")
    monkeypatch.setitem(shared.session.config, "strict_schema", True)
    with pytest.raises(SchemaConflict, match="'x' holds dtype float32"):
        tq.load_data_by_key(place)
    assert "twofold" not in shared.get_partition_list()


def test_no_keys_make_an_empty_dump(shared: tq.TransferQueueClient, place: Path) -> None:
    assert tq.dump_data_by_key(place, [], "nothing") == {"keys": 0, "rows_with_data": 0, "shards": 0, "bytes": 0}
    assert tq.load_data_by_key(place) == {}
    assert "nothing" not in shared.get_partition_list()


@pytest.mark.parametrize("keys", [["e0", "nope"], ["e0"]])
def test_unknown_keys_and_partitions_leave_no_directory(
    shared: tq.TransferQueueClient, place: Path, keys: list[str]
) -> None:
    put("known", ["e0"])
    partition, match = ("known", "keys not found") if len(keys) == 2 else ("never", "does not exist[:;]")
    with pytest.raises(RuntimeError, match=match):
        tq.dump_data_by_key(place, keys, partition)
    assert not place.parent.exists()


@pytest.mark.parametrize("cleared", ["a", "b", "c", "abc"])
def test_rows_that_are_cleared_while_they_are_dumped_are_named(
    shared: tq.TransferQueueClient, place: Path, monkeypatch: pytest.MonkeyPatch, cleared: str
) -> None:
    put("beside", ["a", "b", "c"])
    asked = Session.call

    def beside(session: Session, call: Call) -> Any:
        if isinstance(call.request, m.Production):
            tq.kv_clear(list(cleared), "beside")
        return asked(session, call)

    monkeypatch.setattr(Session, "call", beside)
    with pytest.raises(RowCleared, match=re.escape(str(list(cleared)))):
        tq.dump_data_by_key(place, ["c", "a", "b"] if len(cleared) == 1 else ["a", "b", "c"], "beside")
    assert not place.exists()


def test_a_folder_of_another_where_the_draft_would_lie_stays(shared: tq.TransferQueueClient, place: Path) -> None:
    put("beside", ["s0"])
    other = place.with_name("one.tmp")
    other.mkdir(parents=True)
    (other / "precious.txt").touch()
    for call in (lambda: tq.dump_data_by_key(place, ["s0"], "beside"), lambda: tq.export_table("beside", place)):
        with pytest.raises(InvalidInput, match=r"one\.tmp.*move it away"):
            call()
    assert os.listdir(other) == ["precious.txt"]
    assert os.listdir(place.parent) == ["one.tmp"]


def test_a_directory_that_exists_is_refused(shared: tq.TransferQueueClient, place: Path) -> None:
    put("exists", ["s0"])
    tq.dump_data_by_key(place, ["s0"], "exists")
    with pytest.raises(FileExistsError):
        tq.dump_data_by_key(place, ["s0"], "exists")
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_a_dump_that_fails_half_way_leaves_nothing(
    shared: tq.TransferQueueClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("fails", ["s0"])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tq.dump_data_by_key(place, ["s0"], "fails")
    assert list(place.parent.iterdir()) == []


def shard_of(place: Path) -> Path:
    return place / "shards" / "shard_00000.bin"


def test_an_incomplete_dump_is_a_missing_file(shared: tq.TransferQueueClient, place: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tq.read_row_index(place)
    with pytest.raises(FileNotFoundError):
        tq.load_data_by_key(place)
    put("incomplete", ["m0"])
    tq.dump_data_by_key(place, ["m0"], "incomplete")
    shard_of(place).unlink()
    with pytest.raises(FileNotFoundError, match="shard"):
        tq.load_data_by_key(place)
    (place / "dump_info.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"dump_info.json"):
        tq.load_data_by_key(place)


@pytest.mark.parametrize("name", ["dump_info.json", "row_index.msgpack", "shards/shard_00000.bin"])
def test_a_damaged_byte_is_found_before_anything_changes(
    shared: tq.TransferQueueClient, place: Path, name: str
) -> None:
    partition = f"damaged {name}"
    put(partition, ["m0", "m1"])
    tq.dump_data_by_key(place, ["m0", "m1"], partition)
    shared.clear_partition(partition)
    data = bytearray((place / name).read_bytes())
    data[len(data) // 2] ^= 1
    (place / name).write_bytes(data)
    with pytest.raises(ValueError):
        tq.load_data_by_key(place)
    assert partition not in shared.get_partition_list()


def test_dumps_of_other_formats_are_refused(shared: tq.TransferQueueClient, place: Path) -> None:
    put("format", ["v0"])
    tq.dump_data_by_key(place, ["v0"], "format")
    info = json.loads((place / "dump_info.json").read_text())
    (place / "dump_info.json").write_text(json.dumps({**info, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        tq.load_data_by_key(place)
    (place / "row_index.pt").touch()
    with pytest.raises(ValueError, match="pickle"):
        tq.load_data_by_key(place)


def test_types_that_conflict_are_refused_before_anything_changes(shared: tq.TransferQueueClient, place: Path) -> None:
    put("types", ["a", "b"])
    tq.kv_put("b", "types", fields={"x": torch.tensor([3])})
    tq.dump_data_by_key(place, ["a", "b"], "types")
    shared.clear_partition("types")
    tq.kv_put("b", "types", fields={"x": torch.tensor([1.5])})
    with pytest.raises(SchemaConflict, match="'x' holds dtype"):
        tq.load_data_by_key(place)
    assert tq.kv_list("types") == {"types": {"b": {}}}
    assert rows(["b"], "types", "x") == [[1.5]]


def test_rows_of_several_kinds_are_completed_where_some_of_them_are_there(
    shared: tq.TransferQueueClient, place: Path
) -> None:
    values: dict[str, Any] = {"a": "text", "b": torch.tensor([3]), "c": torch.tensor([1.5])}
    for key, value in values.items():
        tq.kv_put(key, "kinds", fields={"x": value})
    tq.dump_data_by_key(place, list(values), "kinds")
    for left in values:  # as a load does that failed in between
        shared.clear_partition("kinds")
        tq.kv_put(left, "kinds", fields={"x": values[left]})
        tq.load_data_by_key(place)
        assert tq.kv_batch_get("a", "kinds").get("x").tolist() == ["text"]
        assert [rows([key], "kinds", "x") for key in ("b", "c")] == [[[3]], [[1.5]]]


def test_a_load_that_finds_damage_late_gives_its_blocks_back(shared: tq.TransferQueueClient, place: Path) -> None:
    keys = [f"k{n}" for n in range(600)]
    put("late", keys)
    tq.dump_data_by_key(place, keys, "late")
    shared.clear_partition("late")
    used = shared.stats()["arena_nbytes_used"]
    last = place / "shards" / "shard_00002.bin"
    last.write_bytes(bytes(last.stat().st_size))
    with pytest.raises(CheckpointCorrupt):
        tq.load_data_by_key(place)
    assert "late" not in shared.get_partition_list()
    assert shared.stats()["arena_nbytes_used"] == used


def test_a_published_dump_is_read_where_nothing_can_be_written(shared: tq.TransferQueueClient, place: Path) -> None:
    put("readonly", ["s0"])
    tq.dump_data_by_key(place, ["s0"], "readonly")
    before = sorted(path.name for path in place.rglob("*"))
    place.chmod(0o555)
    try:
        tq.load_data_by_key(place)
    finally:
        place.chmod(0o755)
    assert sorted(path.name for path in place.rglob("*")) == before


def test_without_a_service_it_is_a_runtime_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer_queue import interface

    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    monkeypatch.setattr(interface, "_TQ_CLIENT", None)
    monkeypatch.setattr(interface, "_attach", lambda *_: False)  # nor does it find that of the other tests
    with pytest.raises(RuntimeError, match="not initialized"):
        tq.dump_data_by_key(tmp_path / "x", ["a"], "p")
    with pytest.raises(RuntimeError, match="not initialized"):
        tq.load_data_by_key(tmp_path / "x")
