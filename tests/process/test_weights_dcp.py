"""Versions as checkpoints of `torch.distributed.checkpoint`: ranks on gloo save and load them, one process does too."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import weights_checkpoint_ranks
import weights_ranks
from conftest import Child
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from weights import root
from weights_ranks import Model, drawn

from transfer_queue.errors import (
    BadManifest,
    DigestMismatch,
    InvalidInput,
    NotSupported,
    ShapeMismatch,
    StaleVersion,
    TransferQueueError,
    UnsupportedValue,
    VersionGone,
)
from transfer_queue.weights import Control, ModuleSource, Receiver, Swap
from transfer_queue.weights.dcp import VersionReader, VersionWriter
from transfer_queue.weights.http import serve
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.version_folders import remove_version

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
ROOM_S = 20.0
TOKEN = "only for these tests"
Tensors = dict[str, torch.Tensor]


class Ranks:
    """Processes of one group, each of which answers what it was told."""

    def __init__(self, start: Callable[[str], Child], code: str, world: int, **setting: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.all = [start(code.format(rank)) for rank in range(world)]
        for one in self.all:
            one.say(json.dumps({"port": port, "world": world, **setting}))
        assert [one.line() for one in self.all] == ["ready"] * world

    def do(self, **command: Any) -> list[Any]:
        """The same at all ranks; what each answers."""
        for one in self.all:
            one.say(json.dumps(command))
        return [json.loads(one.line()) for one in self.all]

    def save(self, folder: Path, seed: int, version: int = 1, **more: Any) -> list[Any]:
        writer = {"folder": str(folder), "version": version, "run_id": "run", "bucket_nbytes": 256}
        return self.do(do="save", seed=seed, writer=writer, **more)

    def load(self, asked: list[int], **reader: Any) -> list[Any]:
        """Into other weights (seed 1); which of the ones `asked` for each rank has then."""
        return self.do(do="load", before=1, asked=asked, reader=reader)


Start = Callable[..., Ranks]


@pytest.fixture
def start(child: Callable[[str], Child]) -> Start:
    def one(mesh: str, world: int) -> Ranks:
        return Ranks(child, weights_checkpoint_ranks.CODE, world, mesh=mesh)

    return one


def state_of(seed: int) -> Tensors:
    return dict(drawn(seed).state_dict())


def written(folder: Path, state: dict[str, Any], version: int = 1, bucket_nbytes: int = 256) -> Path:
    """Saved by this process; the version's folder."""
    writer = VersionWriter(folder, version=version, run_id="run", bucket_nbytes=bucket_nbytes)
    dcp.save(state, storage_writer=writer)
    return folder / (folder / "LATEST").read_text()


def loaded(like: Tensors, **reader: Any) -> Tensors:
    found = {name: torch.full_like(tensor, 3) for name, tensor in like.items()}
    dcp.load(found, storage_reader=VersionReader(**reader))
    return found


def damage(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[0] ^= 1
    path.write_bytes(body)


def fault(call: Callable[[], object]) -> TransferQueueError:
    """What torch says that went wrong at rank 0."""
    with pytest.raises(CheckpointException) as caught:
        call()
    found = caught.value.failures[0][0]
    assert isinstance(found, TransferQueueError)
    return found


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "dim1", "fsdp_tp"])
def test_what_four_ranks_save_is_loaded_by_one_process(start: Start, tmp_path: Path, mesh: str) -> None:
    assert {one["text"] for one in start(mesh, 4).save(tmp_path, 5)} == {""}
    wanted = state_of(5)
    assert root(loaded(wanted, folder=tmp_path)) == root(wanted)


def test_what_four_ranks_save_is_loaded_by_two_of_another_mesh(start: Start, tmp_path: Path) -> None:
    start("fsdp", 4).save(tmp_path, 5)
    two = start("dim1", 2)
    assert [one["has"] for one in two.load([5], folder=str(tmp_path))] == [[5], [5]]


def test_what_one_process_saves_is_loaded_by_four_ranks(start: Start, tmp_path: Path) -> None:
    folder = written(tmp_path, state_of(5))
    assert [one["has"] for one in start("fsdp_tp", 4).load([5], folder=str(folder))] == [[5]] * 4


def test_a_folder_of_the_disk_engine_is_loaded(start: Start, tmp_path: Path) -> None:
    receiver = Receiver(Swap(Model()))
    engine = registry.engine("disk")(receiver)
    client = SimpleNamespace(
        init_weight_transfer_engine=engine.init_transfer_engine,
        start_weight_update=engine.start_weight_update,
        update_weights=engine.update_weights,
        finish_weight_update=lambda weight_version=None: engine.finish_weight_update(),
    )
    source = ModuleSource(drawn(5))
    assert source.aliases() == {"head.weight": "embed.weight"}
    info = {"folder": str(tmp_path), "bucket_nbytes": 256}
    registry.trainer("disk").trainer_init(info, client=client, source=source).send_weights(deadline_s=ROOM_S)
    assert root(loaded(state_of(5), folder=tmp_path)) == receiver.installed().root
    assert [one["has"] for one in start("dim1", 2).load([5], folder=str(tmp_path))] == [[5], [5]]


def test_a_version_of_four_ranks_is_loaded_from_the_running_trainer(
    child: Callable[[str], Child], start: Start
) -> None:
    receiver = Receiver(Swap(Model()))
    engine: Any = registry.engine("tcp")(receiver)
    with serve(Control(engine, receiver), port=0, token=TOKEN) as server:
        trainer = Ranks(child, weights_ranks.CODE, 4, mesh="fsdp", urls=server.url, token=TOKEN)
        for one in trainer.all:
            one.say("train 6")
            one.say(f"send {ROOM_S}")
        assert [json.loads(one.line())["version"] for one in trainer.all] == [1] * 4
        told = engine._control.address
        reader = {"address": f"tcp:{told.host}:{told.port}", "token": told.token}
        assert root(loaded(state_of(6), **reader)) == root(state_of(6))
        assert [one["has"] for one in start("dim1", 2).load([6], **reader)] == [[6], [6]]
        fault(lambda: loaded(state_of(6), **{**reader, "token": "another token than that"}))
    engine.shutdown()


def test_a_server_takes_a_checkpoint_as_its_version(start: Start, tmp_path: Path) -> None:
    start("fsdp", 4).save(tmp_path, 5)
    module = Model()
    engine = registry.engine("disk")(Receiver(Swap(module)))
    engine.init_transfer_engine({"folder": str(tmp_path)})
    engine.join(timeout_s=ROOM_S)
    engine.shutdown()
    assert root(dict(module.state_dict())) == root(state_of(5))


def test_a_damaged_byte_leaves_the_weights_of_all_ranks(start: Start, tmp_path: Path) -> None:
    start("fsdp", 4).save(tmp_path, 5)
    damage(next(tmp_path.glob("v*/rank-00003-*.bucket")))
    assert isinstance(fault(lambda: loaded(state_of(5), folder=tmp_path)), DigestMismatch)
    for one in start("dim1", 2).load([1, 5], folder=str(tmp_path)):
        assert one["errors"] == ["DigestMismatch"]
        assert one["has"] == [1]


@pytest.mark.parametrize("kept", [0, 3])
def test_a_bucket_that_is_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    path = next(written(tmp_path, state_of(5)).glob("*.bucket"))
    path.write_bytes(path.read_bytes()[:kept])
    assert isinstance(fault(lambda: loaded(state_of(5), folder=tmp_path)), DigestMismatch)


def test_only_buckets_that_have_something_wanted_are_read(tmp_path: Path) -> None:
    state = state_of(5)
    folder = written(tmp_path, state, bucket_nbytes=1)
    for path in sorted(folder.glob("*.bucket"))[1:]:
        path.unlink()
    first = {name: state[name] for name in list(state)[:1]}
    assert root(loaded(first, folder=tmp_path)) == root(first)
    assert isinstance(fault(lambda: loaded(state, folder=tmp_path)), TransferQueueError)


def test_a_rank_that_is_killed_while_it_writes_leaves_no_version(start: Start, tmp_path: Path) -> None:
    written(tmp_path, state_of(1))
    before = sorted(path.name for path in tmp_path.iterdir())
    ranks = start("fsdp", 4)
    writer = {"folder": str(tmp_path), "version": 2, "run_id": "run", "bucket_nbytes": 64}
    for rank, one in enumerate(ranks.all):
        one.say(json.dumps({"do": "save", "seed": 5, "writer": writer, "die": rank == 2}))
    for rank in (3, 1, 0):  # gloo tells the neighbours in its ring; who fails leaves, as programs do
        assert json.loads(ranks.all[rank].line())["errors"] == ["RuntimeError"]
        if rank:
            ranks.all[rank].kill()
    visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".tmp-")]
    assert sorted(visible) == before
    ranks.all[0].kill()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]
    written(tmp_path, state_of(5), version=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*before, "v000000000002-run"]
    assert root(loaded(state_of(5), folder=tmp_path)) == root(state_of(5))


def test_what_is_no_tensor_is_refused_by_its_name_before_anything_is_written(start: Start, tmp_path: Path) -> None:
    for one in start("dim1", 2).save(tmp_path / "here", 5, more={"epoch": 3}):
        assert one["errors"] == ["UnsupportedValue"]
        assert "'epoch'" in one["text"]
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("value", [b"bytes", "text", torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_nothing_is_left_of_a_state_dict_that_cannot_be_saved(tmp_path: Path, value: object) -> None:
    writer = VersionWriter(tmp_path, version=1, run_id="run")
    found = fault(lambda: dcp.save({"ours": torch.ones(2), "theirs": value}, storage_writer=writer))
    assert isinstance(found, UnsupportedValue)
    assert "'theirs'" in str(found)
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_another_dtype_is_refused_and_nothing_is_copied(tmp_path: Path) -> None:
    written(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    state = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}
    found = fault(lambda: dcp.load(state, storage_reader=VersionReader(tmp_path)))
    assert isinstance(found, ShapeMismatch)
    assert "'b'" in str(found)
    assert not state["a"].any()


def test_a_tensor_whose_elements_share_memory_is_refused_and_nothing_is_copied(tmp_path: Path) -> None:
    written(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    state = {"a": torch.zeros(2), "b": torch.zeros(1).expand(2)}
    found = fault(lambda: dcp.load(state, storage_reader=VersionReader(tmp_path)))
    assert isinstance(found, NotSupported)
    assert "'b'" in str(found)
    assert not state["a"].any()


def test_rows_that_do_not_lie_together_are_refused_as_torch_would_mix_them_up(start: Start, tmp_path: Path) -> None:
    reader = {"folder": str(written(tmp_path, state_of(5)))}
    for one in start("dim1", 2).do(do="load", before=1, reader=reader, strided=True):
        assert one["errors"] == ["NotSupported"]


def test_ranks_that_find_different_versions_load_none(start: Start, tmp_path: Path) -> None:
    ranks = start("dim1", 2)
    for rank, one in enumerate(ranks.all):
        folder = written(tmp_path, state_of(5), version=rank)
        one.say(json.dumps({"do": "load", "before": 1, "asked": [1, 5], "reader": {"folder": str(folder)}}))
    for one in ranks.all:
        answer = json.loads(one.line())
        assert (answer["errors"], answer["has"]) == (["VersionGone"], [1])


def test_latest_names_the_version_that_was_saved_last(tmp_path: Path) -> None:
    first = written(tmp_path, {"a": torch.ones(2)}, version=1)
    written(tmp_path, {"a": torch.full((2,), 2.0)}, version=2)
    like = {"a": torch.ones(2)}
    reader = VersionReader(tmp_path)
    for _ in range(2):
        found = {"a": torch.zeros(2)}
        dcp.load(found, storage_reader=reader)
        assert found["a"].tolist() == [2, 2]
    assert loaded(like, folder=first)["a"].tolist() == [1, 1]


def test_a_version_that_is_there_stays(tmp_path: Path) -> None:
    written(tmp_path, {"a": torch.ones(2)})
    assert isinstance(fault(lambda: written(tmp_path, {"a": torch.zeros(2)})), StaleVersion)
    assert loaded({"a": torch.ones(2)}, folder=tmp_path)["a"].tolist() == [1, 1]


def test_a_version_that_is_not_there_or_unreadable_is_named(tmp_path: Path) -> None:
    like = {"a": torch.ones(2)}
    assert isinstance(fault(lambda: loaded(like, folder=tmp_path)), VersionGone)
    with pytest.raises(VersionGone):
        _ = VersionReader(tmp_path).read_metadata().state_dict_metadata
    (written(tmp_path, like) / "manifest.json").write_text("{}")
    assert isinstance(fault(lambda: loaded(like, folder=tmp_path)), BadManifest)
    for text in (b"../elsewhere", b"v1\0", b"\xff"):
        (tmp_path / "LATEST").write_bytes(text)
        assert isinstance(fault(lambda: loaded(like, folder=tmp_path)), InvalidInput)


def test_a_checkpoint_of_another_kind_is_told_from_a_folder_without_versions(tmp_path: Path) -> None:
    like = {"a": torch.ones(2)}
    plain, files = tmp_path / "plain", tmp_path / "files"
    dcp.save(like, checkpoint_id=plain)
    files.mkdir()
    save_file(like, files / "model.safetensors")
    for folder, remedy in ((plain, "checkpoint_id"), (files, "SafetensorsSource")):
        found = fault(lambda folder=folder: loaded(like, folder=folder))
        assert isinstance(found, InvalidInput)
        assert str(folder) in str(found)
        assert remedy in str(found)


def test_a_reader_needs_one_place_and_a_writer_a_name_for_the_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        VersionReader()
    with pytest.raises(InvalidInput):
        VersionReader(tmp_path, address="tcp:127.0.0.1:1")
    with pytest.raises(InvalidInput):
        VersionWriter(tmp_path, version=1, run_id="../elsewhere")


def test_a_version_may_have_the_number_of_an_array(tmp_path: Path) -> None:
    writer = VersionWriter(tmp_path, version=np.int64(7), run_id="r")  # type: ignore[arg-type]
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    state = {"a": torch.zeros(2)}
    dcp.load(state, storage_reader=VersionReader(tmp_path))
    assert torch.equal(state["a"], torch.ones(2))


@pytest.mark.parametrize("version", [7.0, "7", None, 10**20])
def test_a_number_that_no_version_can_have_is_refused_before_anything_is_written(tmp_path: Path, version: Any) -> None:
    with pytest.raises(InvalidInput, match="a version"):
        VersionWriter(tmp_path, version=version, run_id="r")


@pytest.mark.parametrize("run_id", [5, None, b"r", "r" * 300])
def test_what_cannot_name_a_run_is_refused_by_the_name_of_the_argument(tmp_path: Path, run_id: Any) -> None:
    with pytest.raises(InvalidInput, match="run_id"):
        VersionWriter(tmp_path, version=1, run_id=run_id)


def test_weights_are_imported_without_checkpoints(fresh_child: Callable[[str], Child]) -> None:
    code = "import sys, transfer_queue.weights; print('torch.distributed.checkpoint' in sys.modules)"
    assert fresh_child(code).finish() == "False"


def test_a_version_is_not_deleted_while_it_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path, {"a": torch.ones(2)})
    reader = VersionReader(folder)
    reader.read_metadata()
    remove_version(folder)
    assert folder.exists()
    reader.close()
    remove_version(folder)
    assert not folder.exists()
