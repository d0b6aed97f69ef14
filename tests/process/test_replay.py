"""A training loop that goes back to an earlier step, and what a step took, with and without a service."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import until
from test_cli import ENVIRONMENT
from test_cli import tq as command
from test_standby import kill, standby_of
from zygote import CHILDREN

import transfer_queue as tq
from transfer_queue.bundles import Bundle
from transfer_queue.errors import (
    CellsChanged,
    CheckpointCorrupt,
    CheckpointMissing,
    InvalidInput,
    LeaseExpired,
    RowCleared,
)

Service = Callable[..., tq.TransferQueueClient]
FIELDS = ["dense", "half", "ragged", "text", "object", "number"]


def put(client: tq.TransferQueueClient, rows: int, first: int = 0, partition: str = "train") -> None:
    """Rows with a field of every kind."""
    numbers = range(first, first + rows)
    tq.kv_batch_put(
        [f"k{number}" for number in numbers],
        partition,
        {
            "dense": torch.tensor([[n, -n] for n in numbers]),
            "half": torch.tensor([[n / 3] for n in numbers], dtype=torch.bfloat16),
            "ragged": torch.nested.as_nested_tensor([torch.arange(n % 3 + 1) for n in numbers], layout=torch.jagged),
            "text": [f"row {n}" for n in numbers],
            "object": [{"image": np.full((2, n % 2 + 1), n, np.uint16), "n": [n]} for n in numbers],
            "number": torch.tensor([float(n) for n in numbers], dtype=torch.float64),
        },
        tags=[{"weight_version": number // 4} for number in numbers],
    )


def take(client: tq.TransferQueueClient, rows: int = 4, task: str = "actor", **more: Any) -> tq.BatchMeta:
    return client.get_meta(FIELDS, rows, "train", task_name=task, **more)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and one.is_nested:
        pairs = zip(one.unbind(), other.unbind(), strict=True)
        return one.layout == other.layout and all(torch.equal(mine, its) for mine, its in pairs)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return repr(list(one)) == repr(list(other))


def assert_same(data: Any, other: Any) -> None:
    assert set(data.keys()) == set(other.keys())
    for name in set(data.keys()):
        assert same(data[name], other[name]), name


# going back


def test_a_loop_that_goes_back_gets_the_same_batches(client: tq.TransferQueueClient) -> None:
    put(client, 20)
    client.checkpoint(0, ["actor"])
    taken = []
    for step in range(1, 4):
        taken.append(take(client).global_indexes)
        client.checkpoint(step, ["actor"])
    taken.append(take(client).global_indexes)
    assert client.list_steps("actor") == [0, 1, 2, 3]
    assert client.resume(np.int64(1), ["actor"]) == (3, 12, 0, {})
    put(client, 4, first=20)
    again = [take(client).global_indexes for _ in range(5)]
    assert again[:3] == taken[1:]
    assert sorted(row for batch in (taken[0], *again) for row in batch) == sorted(
        client.get_meta(FIELDS, 24, "train", mode="force_fetch").global_indexes
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_on_a_stream_that_is_killed_goes_on_where_it_was_saved(
    client: tq.TransferQueueClient, tmp_path: Path, workers: int
) -> None:
    put(client, 24)
    client.set_partition("train", size=24)
    client.checkpoint(0, ["actor"])
    log = tmp_path / "log"

    def train(first: int, until: int | None) -> None:
        """Save after every second step; end without a word after step `until`."""
        mine = tq.get_client()
        more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        stream = tq.stream("train", ["number"], task="actor", batch_size=4, **more)
        for step, data in enumerate(stream, first):
            with log.open("a") as file:
                file.write(json.dumps([step, data["number"].tolist()]) + "\n")
            if step % 2 == 0:
                mine.checkpoint(step, ["actor"], used=stream.meta)
            if step == until:
                os._exit(0)

    pid = os.fork()
    if not pid:
        try:
            train(1, 5)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert client.list_steps("actor") == [0, 2, 4]
    until(lambda: client.stats()["clients"] == 1, "the end of the loop and its workers")
    assert client.resume(4, ["actor"]).rows >= 4
    train(5, None)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [number for number, _ in steps] == [1, 2, 3, 4, 5, 5, 6]
    assert steps[4] == steps[5], "the batch of the step that was lost"
    learned = [row for number, rows in [*steps[:4], *steps[5:]] for row in rows]
    assert learned == list(range(24)), "no row twice, and none left out"


def test_marks_go_on_when_the_server_is_killed(client: tq.TransferQueueClient) -> None:
    put(client, 12)
    standby_of(client)
    client.checkpoint(0, ["actor"])
    first = take(client).global_indexes
    client.checkpoint(1, ["actor"])
    second = take(client).global_indexes
    kill(client.stats()["pid"])
    assert [meta.global_indexes for meta in client.get_step("actor", 1)] == [first]
    assert client.resume(1, ["actor"]) == (1, 4, 0, {})
    standby_of(client)
    kill(client.stats()["pid"])
    assert take(client).global_indexes == second


def test_a_lease_that_is_over_marks_nothing(client: tq.TransferQueueClient) -> None:
    put(client, 4)
    client.checkpoint(0, ["actor"])
    meta = take(client, lease_s=0.05)
    until(lambda: not client.overview().leases, "the end of the lease")
    with pytest.raises(LeaseExpired):
        client.checkpoint(1, ["actor"], used=meta)
    assert client.list_steps("actor") == [0]
    with pytest.raises(InvalidInput):
        client.checkpoint(1, "actor")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        client.resume(7, ["actor"])


# bundles


@pytest.fixture
def step(client: tq.TransferQueueClient, tmp_path: Path) -> tuple[Path, list[Any]]:
    """A directory with a step of two batches, and what its task got for it."""
    put(client, 12)
    client.checkpoint(2, ["actor"])
    metas = [take(client, 4), take(client, 3)]
    data = [client.get_data(meta) for meta in metas]
    client.checkpoint(3, ["actor"])
    assert tq.save_step(tmp_path / "step", 3, "actor")["rows"] == 7
    return tmp_path / "step", data


def test_a_bundle_is_bit_for_bit_what_the_task_got(step: tuple[Path, list[Any]]) -> None:
    directory, data = step
    replay = tq.replay(directory)
    for _ in range(2):
        found = []
        for batch in replay:
            found.append((batch, replay.meta))
        assert [len(meta) for _, meta in found] == [4, 3]
        for (batch, _), got in zip(found, data, strict=True):
            assert_same(batch, got)
    assert found[0][1].custom_meta == [{"weight_version": 0}] * 4
    assert [row.key for row in replay.bundle.rows] == [f"k{number}" for number in range(7)]
    assert replay.bundle.settings["controller.sampler"]


def test_micro_batches_rows_and_padding_are_as_with_a_stream(step: tuple[Path, list[Any]]) -> None:
    directory, _ = step
    sizes = [len(batch) for batch in tq.replay(directory, micro_batch_size=np.int64(3))]
    assert sizes == [3, 1, 3]
    rows = [row for batch in tq.replay(directory, rows=True) for row in batch]
    assert [row["text"] for row in rows] == [f"row {number}" for number in range(7)]
    padded = next(iter(tq.replay(directory, pad=-1)))
    assert padded["ragged"].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, -1, -1]]


def saved_step(
    client: tq.TransferQueueClient, directory: Path, columns: dict[str, Any], tags: list[dict[str, Any]] | None = None
) -> tuple[Any, Any, tq.BatchMeta]:
    """(what a task got for a step, what its bundle has, the metadata of it) of three rows."""
    tq.kv_batch_put(list("abc"), "p", columns, tags=tags)
    client.checkpoint(0, ["t"])
    data = client.get_data(client.get_meta(list(columns), 3, "p", task_name="t"))
    client.checkpoint(1, ["t"])
    tq.save_step(directory, 1, "t")
    return data, *Bundle(directory).batch(0)


@pytest.mark.parametrize(
    "columns",
    [
        {"ids": [torch.arange(n) for n in (3, 5, 4)], "mask": [torch.ones(n) for n in (3, 5, 4)]},
        {"ids": torch.ones(3, 5), "mask": torch.zeros(3, 5)},
        {"a": torch.ones(3, 0), "b": torch.ones(3, 0)},
        {"twice_ragged": [torch.ones(2, 3), torch.ones(4, 1), torch.ones(0, 5)]},
        {"__metadata__": torch.arange(3.0)},
        {"__metadata__": [torch.ones(1), torch.ones(2), torch.ones(0)]},
    ],
    ids=["equal_lengths", "equal_shapes", "no_numbers", "twice_ragged", "header", "ragged_header"],
)
def test_every_step_that_was_taken_is_saved_and_read(
    client: tq.TransferQueueClient, tmp_path: Path, columns: dict[str, Any]
) -> None:
    got, found, _ = saved_step(client, tmp_path / "step", columns)
    assert_same(found, got)


def test_tags_of_a_bundle_are_what_they_were(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tags: list[dict[str, Any]] = [
        {"score": math.nan, "least": -math.inf, "shape": (1, 2), "hash": b"xy", "nested": {"ids": [{1, 2}]}},
        {"big": 2**70, "zero": -0.0, "none": None, "by_number": {1: "one"}, "list": [1, [2.5, "x"]]},
        {"plain": True},
    ]
    _, _, meta = saved_step(client, tmp_path / "step", {"x": torch.ones(3)}, tags)
    assert repr(meta.custom_meta) == repr(tags)
    lines = [json.loads(line) for line in (tmp_path / "step" / "rows.jsonl").read_text().splitlines()]
    assert lines[0]["tags"]["shape"] == [1, 2]
    assert (lines[2]["tags"], "exact_tags" in lines[2]) == ({"plain": True}, False)


def test_a_bundle_needs_no_service(step: tuple[Path, list[Any]]) -> None:
    code = f"import transfer_queue as tq; print([len(batch) for batch in tq.replay({str(step[0])!r})])"
    done = CHILDREN.run(["-c", code], ENVIRONMENT)
    assert done.stdout.strip() == "[4, 3]", done.stderr


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("bundle.json", CheckpointMissing),
        ("rows.jsonl", CheckpointMissing),
        ("batch-00001.safetensors", CheckpointMissing),
    ],
)
def test_a_missing_file_is_named(step: tuple[Path, list[Any]], name: str, error: type[Exception]) -> None:
    (step[0] / name).unlink()
    with pytest.raises(error, match=name):
        list(tq.replay(step[0]))


@pytest.mark.parametrize("name", ["bundle.json", "rows.jsonl", "batch-00001.safetensors"])
def test_what_is_no_file_is_named(step: tuple[Path, list[Any]], name: str) -> None:
    place = step[0] / name
    for make in (place.mkdir, lambda: os.mkfifo(place), lambda: place.symlink_to(name)):
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        make()
        with pytest.raises(CheckpointCorrupt, match=f"{name} is no file"):
            list(tq.replay(step[0]))


@pytest.mark.parametrize("name", ["bundle.json", "rows.jsonl", "batch-00000.safetensors"])
def test_a_damaged_file_is_named_wherever_it_is_damaged(step: tuple[Path, list[Any]], name: str) -> None:
    path = step[0] / name
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 17)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises((CheckpointCorrupt, tq.errors.CheckpointUnsupported)):
            list(tq.replay(step[0]))
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointCorrupt):
        list(tq.replay(step[0]))


def test_a_step_whose_rows_were_cleared_is_not_saved(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    put(client, 4)
    client.checkpoint(0, ["actor"])
    meta = take(client)
    client.checkpoint(1, ["actor"])
    client.clear_samples(meta[:1])
    with pytest.raises(RowCleared, match="were cleared"):
        tq.save_step(tmp_path / "step", 1, "actor")
    assert not (tmp_path / "step").exists()
    client.checkpoint(2, ["actor"])
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError):
        tq.save_step(tmp_path / "there", 2, "actor")


def test_a_step_is_not_saved_with_other_values_than_the_task_got(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    put(client, 8)
    standby_of(client)
    client.checkpoint(0, ["actor"])
    meta = take(client)
    client.checkpoint(1, ["actor"])
    tq.kv_batch_put(["k3", "k4"], "train", {"late": torch.zeros(2)}, [{"weight_version": 9}] * 2)
    tq.save_step(tmp_path / "before", 1, "actor")
    assert [row.retagged for row in Bundle(tmp_path / "before").rows] == [False, False, False, True]
    kill(client.stats()["pid"])
    tq.kv_batch_put(["k2", "k4"], "train", {"half": torch.ones(2, 1, dtype=torch.bfloat16)})
    with pytest.raises(CellsChanged, match=r"field 'half' of rows \[2\].*written anew"):
        tq.save_step(tmp_path / "after", 1, "actor")
    assert not (tmp_path / "after").exists()
    client.clear_samples(meta[:2])
    shown = command("replay", "1", "--task", "actor", "--json", "--address", tq.address())
    assert [row["key"] for row in json.loads(shown.stdout)] == ["k2", "k3"]
    for remark in ("2 rows were cleared", "1 rows have fields", "1 rows have tags"):
        assert remark in shown.stderr


# the command


def test_a_person_looks_at_a_step_and_saves_it(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    put(client, 8)
    client.checkpoint(0, ["actor"])
    meta = take(client)
    client.checkpoint(1, ["actor"])
    address, saved = tq.address(), str(tmp_path / "one")
    live = command("replay", "1", "--task", "actor", "--save", saved, "--json", "--address", address)
    assert live.returncode == 0, live.stderr
    rows = json.loads(live.stdout)
    assert [row["row"] for row in rows] == meta.global_indexes
    assert rows[1] == {"batch": 0, "partition": "train", "row": 1, "key": "k1", "tags": {"weight_version": 0}}
    tq.close()
    later = command("replay", "1", "--task", "actor", "--from", saved, "--json")
    assert json.loads(later.stdout) == rows
    assert "verified" in later.stderr
    wrong = command("replay", "2", "--task", "actor", "--from", saved)
    assert (wrong.returncode, "has step 1" in wrong.stderr) == (1, True)
    both = command("replay", "1", "--task", "actor", "--from", saved, "--save", f"{saved}-again")
    assert (both.returncode, "copy that directory" in both.stderr) == (1, True)
    shutil.rmtree(saved)
    missing = command("replay", "1", "--task", "actor", "--from", saved)
    assert "no such directory" in missing.stderr


def test_a_bundle_knows_its_digests(step: tuple[Path, list[Any]]) -> None:
    bundle = Bundle(step[0])
    assert len({bundle.digest(number) for number in range(len(bundle))}) == 2
