"""Readers, writers and trainers that use one folder of versions at the same moment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from transfer_queue.weights import InPlace, Receiver
from transfer_queue.weights.dcp import VersionReader, VersionWriter, writer
from transfer_queue.weights.transport.disk import DiskEngine
from transfer_queue.weights.transport.version_folders import (
    LATEST,
    TEMPORARY,
    newest_name,
    point_to,
    remove_leftovers,
    remove_version,
    retain,
    version_name,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
RUN = "run"


def write(root: Path, version: int) -> Path:
    state = {"weight": torch.full((1, 1), float(version))}
    dcp.save(state, storage_writer=VersionWriter(root, version=version, run_id=RUN))
    return root / version_name(version, RUN)


def loaded(root: Path) -> float:
    state = {"weight": torch.zeros(1, 1)}
    dcp.load(state, storage_reader=VersionReader(root))
    return state["weight"].item()


def joined(root: Path) -> float:
    module = torch.nn.Linear(1, 1, bias=False)
    engine = DiskEngine(Receiver(InPlace(module)))
    engine.init_transfer_engine({"folder": str(root)})
    engine.join(timeout_s=20)
    engine.shutdown()
    return module.weight.item()


@pytest.mark.parametrize("read", [loaded, joined])
def test_who_reads_latest_just_before_that_version_is_deleted_has_the_next_one(
    read: Callable[[Path], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write(tmp_path, 1)
    read_bytes = Path.read_bytes

    def look(path: Path) -> bytes:
        found = read_bytes(path)
        if path.name == LATEST and old.exists():
            write(tmp_path, 2)
            remove_version(old)
        return found

    monkeypatch.setattr(Path, "read_bytes", look)
    assert read(tmp_path) == 2
    assert not old.exists()


def test_an_interrupt_of_a_save_that_was_named_already_leaves_a_version_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def struck(final: Path) -> None:
        point_to(final)
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "point_to", struck)
    with pytest.raises((KeyboardInterrupt, CheckpointException)):
        write(tmp_path, 2)
    assert loaded(tmp_path) == 2


def test_a_trainer_does_not_delete_a_version_that_is_about_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = write(tmp_path, 9)

    def decide(final: Path) -> None:
        retain(newest, 1)
        point_to(final)

    monkeypatch.setattr(writer, "point_to", decide)
    write(tmp_path, 1)
    assert loaded(tmp_path) == 1


def test_a_trainer_does_not_delete_a_version_that_was_named_while_it_deletes_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, newest = (write(tmp_path, version) for version in (1, 2, 3))
    rmtree = shutil.rmtree

    def remove(path: Path, **more: Any) -> None:
        rmtree(path, **more)
        point_to(second)

    monkeypatch.setattr(shutil, "rmtree", remove)
    retain(newest, 1)
    assert not first.exists()
    assert newest_name(tmp_path / LATEST) == second.name
    assert loaded(tmp_path) == 2


def test_a_folder_that_another_writer_takes_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    mkdir = Path.mkdir

    def make(path: Path, *args: Any, **more: Any) -> None:
        mkdir(path, *args, **more)
        if path.name.startswith(TEMPORARY):
            made.append(path)
            if len(made) == 1:
                remove_leftovers(tmp_path)

    monkeypatch.setattr(Path, "mkdir", make)
    write(tmp_path, 1)
    assert len(made) == 2
    assert loaded(tmp_path) == 1
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))
