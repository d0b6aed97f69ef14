"""Checkpoints interrupted, damaged, cut short or hostile: the earlier one stays, the service is untouched."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Child, until
from xxhash import xxh3_128_hexdigest

import transfer_queue as tq
from transfer_queue import checkpoint
from transfer_queue.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    CheckpointUnsupported,
    InvalidInput,
    ServiceUnavailable,
    StoreFull,
)
from transfer_queue.saved import files
from transfer_queue.saved.places import folder_at

Service = Callable[..., tq.TransferQueueClient]


def version() -> int:
    """Which `put_version` the service holds; all of it, with nothing else."""
    assert tq.kv_list() == {"p": {"a": {"v": tq.kv_list("p")["p"]["a"]["v"]}}}
    found = tq.kv_batch_get("a", "p", copy=True)["x"][0]
    assert bool((found == tq.kv_list("p")["p"]["a"]["v"]).all())
    return int(found[0])


def put_version(number: int) -> None:
    tq.kv_put("a", "p", {"x": torch.full((40_000,), number)}, tag={"v": number})


def released(client: tq.TransferQueueClient) -> None:
    until(lambda: client.stats()["pinned_nbytes"] == {}, "the release of all pins")


# a saving process that is killed


class Saver:
    """A child process that saves to `target` and halts before the `count`-th call of a function of POINTS."""

    def __init__(self, target: Path, call: str, count: int) -> None:
        said, says = os.pipe()
        hears, self._told = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.close(self._told)
                halt(call, count, lambda: (os.write(says, b"halted"), os.read(hears, 1)))
                tq.save_checkpoint(target)
                status = 0
            finally:
                os._exit(status)
        os.close(says)
        os.close(hears)
        assert os.read(said, 6) == b"halted"
        os.close(said)

    def end(self, kill: bool) -> None:
        """Kill it, or let it save and wait for that."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self._told)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == (-signal.SIGKILL if kill else 0)


def halt(wanted: str, count: int, then: Callable[[], Any]) -> None:
    seen: list[str] = []
    for module, name in CALLS:
        original = getattr(module, name)

        def call(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            seen.append(name)
            if name == wanted and seen.count(name) == count:
                then()
            return original(*args, **kwargs)

        setattr(module, name, call)


CALLS = ((os, "fsync"), (os, "rename"), (shutil, "rmtree"))
# what is saved before the point is reached; after the second rename it is the new checkpoint
POINTS = [
    ("fsync", 1, 1), ("fsync", 2, 1), ("fsync", 3, 1), ("fsync", 4, 1), ("fsync", 5, 1), ("rename", 1, 1),
    ("rename", 2, 1), ("fsync", 6, 2), ("rename", 3, 2), ("rmtree", 1, 2),
]  # fmt: skip


@pytest.mark.parametrize(("call", "count", "survives"), POINTS)
def test_a_saver_killed_at_any_point_leaves_a_whole_checkpoint(
    client: tq.TransferQueueClient, tmp_path: Path, call: str, count: int, survives: int
) -> None:
    target = tmp_path / "ck"
    put_version(1)
    tq.save_checkpoint(target)
    put_version(2)
    Saver(target, call, count).end(kill=True)
    released(client)
    put_version(3)
    tq.load_checkpoint(target)
    assert version() == survives
    put_version(4)
    tq.save_checkpoint(target)
    assert os.listdir(tmp_path) == ["ck"]
    put_version(5)
    tq.load_checkpoint(target)
    assert version() == 4


def test_the_points_above_are_all_there_are(client: tq.TransferQueueClient, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    put_version(1)
    tq.save_checkpoint(tmp_path / "ck")
    seen: list[str] = []
    for module, name in CALLS:
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, name=name, original=original, **k: (seen.append(name), original(*a, **k))[1]
        )
    tq.save_checkpoint(tmp_path / "ck")
    assert seen == ["fsync"] * 5 + ["rename", "rename", "fsync", "rename", "rmtree"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_swap_that_fails_puts_the_earlier_one_back(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    target = tmp_path / "ck"
    put_version(1)
    tq.save_checkpoint(target)
    calls: list[Any] = []
    rename = os.rename

    def refuse(*args: Any) -> None:
        calls.append(args)
        if len(calls) == failing:
            raise PermissionError("not now")
        rename(*args)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError, match="not now"):
        tq.save_checkpoint(target)
    assert os.listdir(tmp_path) == ["ck"]
    tq.load_checkpoint(target)
    assert version() == 1


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_pins(
    client: tq.TransferQueueClient, child: Callable[[str], Child], tmp_path: Path
) -> None:
    put_version(1)
    tq.save_checkpoint(tmp_path / "ck")
    put_version(2)
    saver = child(f"""
        import resource, transfer_queue as tq
        tq.init()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            tq.save_checkpoint("{tmp_path / "ck"}")
        except OSError as error:
            print(type(error).__name__, error.errno, tq.get_client().stats()["pinned_nbytes"])
    """)
    assert saver.finish() == "OSError 27 {}"
    assert os.listdir(tmp_path) == ["ck"]
    tq.load_checkpoint(tmp_path / "ck")
    assert version() == 1


def test_two_savers_of_one_directory_do_not_mix(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    put_version(1)
    saver = Saver(tmp_path / "ck", "fsync", 3)
    with pytest.raises(FileExistsError, match="another process"):
        tq.save_checkpoint(tmp_path / "ck")
    saver.end(kill=False)
    tq.load_checkpoint(tmp_path / "ck")
    assert version() == 1


def test_a_load_in_the_middle_of_a_swap_waits_for_its_end(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    put_version(1)
    tq.save_checkpoint(tmp_path / "ck")
    put_version(2)
    saver = Saver(tmp_path / "ck", "rename", 2)
    put_version(3)
    loading = threading.Thread(target=tq.load_checkpoint, args=(tmp_path / "ck",))
    loading.start()
    saver.end(kill=False)
    loading.join()
    assert version() == 2


LISTED = files.Metadata("", 1, True, {}, {})


@pytest.mark.parametrize("has_draft", [True, False])
def test_two_that_find_an_interrupted_swap_put_it_right_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_draft: bool
) -> None:
    """With the lock, where there is one to be had."""
    (tmp_path / "ck.tq-old-5f0c9a21").mkdir()
    (tmp_path / "ck.tq-old-5f0c9a21" / "metadata.json").write_bytes(files.encoded(LISTED))
    if has_draft:
        (tmp_path / "ck.tmp").mkdir()
        (tmp_path / "ck.tmp" / ".tq-lock").touch()
    rename, is_locked = os.rename, []

    def behind_another(*given: Any) -> None:
        rename(*given)
        if has_draft:
            with open(tmp_path / "ck.tmp" / ".tq-lock", "rb") as lock, contextlib.suppress(BlockingIOError):
                is_locked.append(False)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            is_locked[:] = [True]
        rename(*given)

    monkeypatch.setattr(os, "rename", behind_another)
    folder_at(tmp_path / "ck").repair("metadata.json")
    assert (tmp_path / "ck" / "metadata.json").exists()
    assert is_locked == [True] * has_draft


@pytest.mark.parametrize("gone", ["blocks-00000.bin", "metadata.json"])
def test_a_half_of_what_was_replaced_does_not_come_back(
    client: tq.TransferQueueClient, tmp_path: Path, gone: str
) -> None:
    """What an older version was deleting when it was killed."""
    target, half = saved(tmp_path), tmp_path / "ck.tq-old-5f0c9a21"
    target.rename(half)
    (half / gone).unlink()
    with pytest.raises(FileNotFoundError):
        tq.load_checkpoint(target)
    assert os.listdir(tmp_path) == [half.name]
    for _ in range(2):
        tq.save_checkpoint(target)
        tq.load_checkpoint(target)
    assert os.listdir(tmp_path) == ["ck"]


def test_what_is_deleted_is_not_taken_for_what_was_replaced(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        tq.save_checkpoint(target)
    target.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        tq.load_checkpoint(target)
    (tmp_path / "elsewhere").rename(target)
    tq.save_checkpoint(target)
    assert os.listdir(tmp_path) == ["ck"]


def test_a_link_to_nowhere_hides_nothing_that_was_replaced(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    target = saved(tmp_path)
    target.rename(tmp_path / "ck.tq-old-5f0c9a21")
    (tmp_path / "ck.tq-old-00000000").symlink_to("nowhere")
    tq.load_checkpoint(target)
    assert version() == 1


# what an older version left behind: its lock was `.lock`, and what it replaced `<dir>.old`


def test_an_unfinished_draft_of_an_older_version_is_removed(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    target, draft = saved(tmp_path), tmp_path / "ck.tmp"
    draft.mkdir()
    (draft / ".lock").touch()
    (draft / "controller.msgpack").write_bytes(b"x")
    tq.save_checkpoint(target, metadata={"step": 2})
    assert os.listdir(tmp_path) == ["ck"]
    assert sorted(os.listdir(target)) == ["blocks-00000.bin", "blocks.msgpack", "controller.msgpack", "metadata.json"]


def test_an_older_version_that_is_saving_keeps_its_lock(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    target, draft = saved(tmp_path), tmp_path / "ck.tmp"
    draft.mkdir()
    with open(draft / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (draft / "controller.msgpack").touch()
        with pytest.raises(FileExistsError, match="another process"):
            tq.save_checkpoint(target)
    assert (draft / "controller.msgpack").exists()
    tq.save_checkpoint(target)


def test_a_lock_of_an_older_version_in_a_checkpoint_is_not_in_its_way(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    target = saved(tmp_path)
    (target / ".lock").touch()
    tq.save_checkpoint(target)
    assert not (target / ".lock").exists()


def test_a_swap_of_an_older_version_that_was_interrupted_is_put_right(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    target = saved(tmp_path)
    target.rename(tmp_path / "ck.old")
    tq.save_checkpoint(tmp_path / "ck.tmp")
    (tmp_path / "ck.tmp" / ".lock").touch()
    tq.load_checkpoint(target)
    assert version() == 1
    tq.save_checkpoint(target)
    assert os.listdir(tmp_path) == ["ck"]


def test_a_backup_beside_an_unfinished_draft_of_an_older_version_stays(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    target, backup = saved(tmp_path), tmp_path / "ck.old"
    target.rename(backup)
    (tmp_path / "ck.tmp").mkdir()
    (tmp_path / "ck.tmp" / ".lock").touch()
    tq.save_checkpoint(target, metadata={"step": 2})
    assert '"step": 1' in (backup / "metadata.json").read_text()


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_mixed_with_the_next(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FILE_NBYTES", 1)
    for value in (1, 2):
        client.put({"x": torch.full((1, 1000), value)}, partition_id=f"p{value}")
    tq.save_checkpoint(tmp_path / "ck")
    read = checkpoint._read_blocks

    def replaced_first(*given: Any) -> None:
        monkeypatch.setattr(checkpoint, "_read_blocks", read)
        client.put({"x": torch.full((1, 1000), 3)}, partition_id="p3")
        client.clear_partition("p1")
        tq.save_checkpoint(tmp_path / "ck")
        read(*given)

    monkeypatch.setattr(checkpoint, "_read_blocks", replaced_first)
    with pytest.raises(CheckpointMissing):
        tq.load_checkpoint(tmp_path / "ck")
    assert sorted(client.get_partition_list()) == ["p2", "p3"]
    tq.load_checkpoint(tmp_path / "ck")


def test_a_server_that_ends_during_a_save_fails_it(service: Service, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    client = service(client={"timeout_s": 5.0})
    put_version(1)
    tq.save_checkpoint(tmp_path / "ck")
    pid, fsync = client.stats()["pid"], os.fsync

    def killing(descriptor: int) -> None:
        os.kill(pid, 9)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", killing)
    with pytest.raises((ServiceUnavailable, ProcessLookupError)):
        tq.save_checkpoint(tmp_path / "ck")
    monkeypatch.setattr(os, "fsync", fsync)
    assert os.listdir(tmp_path) == ["ck"]
    tq.close()
    tq.init()
    tq.load_checkpoint(tmp_path / "ck")
    assert version() == 1


# files that are not what was saved


def saved(tmp_path: Path) -> Path:
    """A small checkpoint of version 1; the service then holds version 2."""
    tq.kv_batch_put(["a"], "p", {"x": torch.full((1, 2), 1)}, tags=[{"v": 1}])
    tq.save_checkpoint(tmp_path / "ck", metadata={"step": 1})
    tq.kv_batch_put(["a"], "p", {"x": torch.full((1, 2), 2)}, tags=[{"v": 2}])
    return tmp_path / "ck"


def refused(target: Path, *errors: type[Exception], match: str | None = None) -> None:
    with pytest.raises(errors or CheckpointCorrupt, match=match):
        tq.load_checkpoint(target)


def untouched(client: tq.TransferQueueClient) -> None:
    assert version() == 2
    until(lambda: client.stats()["arena_nbytes_used"] == 64, "the release of what was loaded")


@pytest.mark.parametrize("name", ["metadata.json", "controller.msgpack", "blocks.msgpack", "blocks-00000.bin"])
def test_every_flipped_byte_is_found(client: tq.TransferQueueClient, tmp_path: Path, name: str) -> None:
    target = saved(tmp_path)
    content = (target / name).read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        (target / name).write_bytes(damaged)
        refused(target, CheckpointCorrupt, CheckpointUnsupported, match=name)
    untouched(client)
    (target / name).write_bytes(content)
    tq.load_checkpoint(target)
    assert version() == 1


@pytest.mark.parametrize("name", ["metadata.json", "controller.msgpack", "blocks.msgpack", "blocks-00000.bin"])
def test_a_file_that_is_cut_short_longer_or_missing_is_named(
    client: tq.TransferQueueClient, tmp_path: Path, name: str
) -> None:
    target = saved(tmp_path)
    content = (target / name).read_bytes()
    for other in (b"", content[:-1], content[: len(content) // 2], content + b"\0"):
        (target / name).write_bytes(other)
        refused(target, match=name)
    (target / name).unlink()
    refused(target, FileNotFoundError, match=name)
    refused(target, CheckpointMissing)
    untouched(client)


def test_files_of_another_checkpoint_are_refused(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    target = saved(tmp_path)
    for name in ("controller.msgpack", "blocks.msgpack", "blocks-00000.bin"):
        tq.save_checkpoint(tmp_path / "other")
        shutil.copy(tmp_path / "other" / name, target / name)
    refused(target)
    untouched(client)


def test_an_unknown_format_is_refused(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    target = saved(tmp_path)
    text = (target / "metadata.json").read_text()
    (target / "metadata.json").write_text(text.replace('"format": 1', '"format": 2'))
    refused(target, CheckpointUnsupported, match="format 2")
    untouched(client)


def reseal(target: Path, name: str, content: bytes) -> None:
    """Replace a file, with digests that fit."""
    (target / name).write_bytes(content)
    metadata = json.loads((target / "metadata.json").read_bytes())
    metadata["files"][name] = {"nbytes": len(content), "xxh3_128": xxh3_128_hexdigest(content)}
    sealed = files.encoded(msgspec.convert(metadata, files.Metadata))
    (target / "metadata.json").write_bytes(sealed)


@pytest.mark.parametrize("change", [{"file": 1}, {"file": -1}, {"offset": 64}, {"offset": -64}, {"nbytes": 0},
                                    {"nbytes": 1 << 40}, {"nbytes": -1}, {"block": 99}])  # fmt: skip
def test_an_index_that_lies_is_refused(client: tq.TransferQueueClient, tmp_path: Path, change: dict[str, Any]) -> None:
    target = saved(tmp_path)
    index = msgspec.msgpack.decode((target / "blocks.msgpack").read_bytes(), type=checkpoint.Index)
    index.blocks[0] = msgspec.structs.replace(index.blocks[0], **change)
    reseal(target, "blocks.msgpack", msgspec.msgpack.encode(index))
    refused(target)
    untouched(client)


def test_a_layout_that_does_not_exist_is_refused(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    target = saved(tmp_path)
    index = msgspec.msgpack.decode((target / "blocks.msgpack").read_bytes(), type=checkpoint.Index)
    index.layouts = []
    reseal(target, "blocks.msgpack", msgspec.msgpack.encode(index))
    refused(target, InvalidInput)
    untouched(client)


class Gadget:
    """Unpickling this creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["metadata.json", "controller.msgpack", "blocks.msgpack", "blocks-00000.bin"])
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_no_file_is_ever_unpickled(client: tq.TransferQueueClient, tmp_path: Path, name: str, how: str) -> None:
    target, marker = saved(tmp_path), tmp_path / "marker"
    if how == "pickle":
        content = pickle.dumps(Gadget(str(marker)))
    else:
        torch.save(Gadget(str(marker)), buffer := io.BytesIO())
        content = buffer.getvalue()
    if name == "metadata.json":
        (target / name).write_bytes(content)
    else:
        reseal(target, name, content)
    refused(target, CheckpointCorrupt)
    assert not marker.exists()
    untouched(client)


def test_a_checkpoint_of_0_1_11_is_named_and_never_read(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    old, marker = tmp_path / "old", tmp_path / "marker"
    (old / "simple_storage").mkdir(parents=True)
    (old / "metadata.json").write_text('{"storage_saved": true, "user_metadata": {}}')
    (old / "controller_state.pkl").write_bytes(pickle.dumps(Gadget(str(marker))))
    refused(old, CheckpointUnsupported, match=r"0\.1\.11.*pickle")
    assert not marker.exists()
    with pytest.raises(InvalidInput, match="controller_state"):
        tq.save_checkpoint(old)
    assert len(os.listdir(old)) == 3


# a service that cannot take it


def test_a_store_without_room_is_left_as_it_is(service: Service, tmp_path: Path) -> None:
    tq.init()
    tq.kv_put("big", "p", {"x": torch.zeros(1 << 20)})
    tq.save_checkpoint(tmp_path / "ck")
    tq.close()
    budget = {"storage_backend": "SimpleStorage", "SimpleStorage": {"budget_nbytes": 5 << 20}}
    client = service(backend=budget, client={"timeout_s": 0.3})
    tq.kv_put("own", "q", {"x": torch.ones(1 << 19)})
    used = client.stats()["arena_nbytes_used"]
    with pytest.raises(StoreFull):
        tq.load_checkpoint(tmp_path / "ck")
    assert tq.kv_list() == {"q": {"own": {}}}
    assert client.stats()["arena_nbytes_used"] == used
    tq.kv_clear("own", "q")
    tq.load_checkpoint(tmp_path / "ck")
    assert tq.kv_list() == {"p": {"big": {}}}


def test_another_sampler_is_refused_and_nothing_changes(service: Service, tmp_path: Path) -> None:
    tq.init()
    put_version(1)
    tq.save_checkpoint(tmp_path / "ck")
    tq.close()
    client = service(controller={"sampler": "GRPOGroupNSampler"})
    put_version(2)
    used = client.stats()["arena_nbytes_used"]
    with pytest.raises(InvalidInput, match="SequentialSampler"):
        tq.load_checkpoint(tmp_path / "ck")
    assert version() == 2
    until(lambda: client.stats()["arena_nbytes_used"] == used, "the release of what was loaded")
