"""Checkpoints, dumps and steps below URLs of fsspec: an object store, its memory, and folders that it opens."""

from __future__ import annotations

import _weakrefset
import contextlib
import errno
import json
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import Child, until
from s3 import object_store
from strikes import every

import transfer_queue as tq
from transfer_queue.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ServiceUnavailable,
    StoreFull,
)
from transfer_queue.saved import remote
from transfer_queue.saved.filesystem import FileSystem
from transfer_queue.saved.places import folder_at

ROWS = {"x": torch.arange(4_000_000.0).reshape(4, -1), "y": torch.arange(4)}
Files = Any
pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture
def client(service: Callable[..., tq.TransferQueueClient]) -> tq.TransferQueueClient:
    return service()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The options of an object store."""
    with object_store(tmp_path_factory.mktemp("store")) as options:
        yield options


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.keeps_sockets)])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = uuid.uuid4().hex
    if request.param == "file":
        yield f"file://{tmp_path}/runs/7"
    elif request.param == "s3":
        monkeypatch.setitem(fsspec.config.conf, "s3", request.getfixturevalue("store"))
        yield f"s3://bucket/{name}/runs/7"
    else:
        yield f"memory://{name}/runs/7"
        with contextlib.suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


@pytest.fixture
def files(url: str) -> Files:
    return fsspec.core.url_to_fs(url)


def names(files: Files) -> list[str]:
    system, root = files
    with contextlib.suppress(FileNotFoundError):
        return sorted(one.rpartition("/")[2] for one in system.ls(root, detail=False))
    return []


def changed(files: Files, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file that lies somewhere below the URL."""
    system, root = files
    (path,) = [one for one in system.find(root) if one.endswith(name)]
    system.pipe_file(path, change(system.cat_file(path)))


def test_what_is_saved_below_a_url_comes_back(client: tq.TransferQueueClient, url: str) -> None:
    tq.kv_batch_put(list("abcd"), "p", fields=ROWS, tags=[{"n": n} for n in range(4)])
    tq.save_checkpoint(url, metadata={"step": 7})
    client.clear_partition("p")
    tq.load_checkpoint(url)
    found = tq.kv_batch_get(list("abcd"), "p")
    assert torch.equal(torch.stack(list(found["x"].unbind())), ROWS["x"])
    assert tq.kv_list("p")["p"]["c"] == {"n": 2}


def test_a_dump_and_a_step_come_back_too(client: tq.TransferQueueClient, url: str) -> None:
    tq.kv_batch_put(list("abcd"), "p", fields=ROWS)
    client.checkpoint(0, ["t"])
    client.get_meta(["x", "y"], 4, "p", task_name="t")
    client.checkpoint(1, ["t"])
    tq.dump_data_by_key(f"{url}/dump", list("abcd"), "p")
    tq.save_step(f"{url}/step", 1, "t")
    for where in ("dump", "step"):
        with pytest.raises(FileExistsError):
            tq.dump_data_by_key(f"{url}/{where}", list("abcd"), "p")
    client.clear_partition("p")
    assert set(tq.read_row_index(f"{url}/dump")["rows"]) == set("abcd")
    tq.load_data_by_key(f"{url}/dump")
    assert tq.kv_batch_get(list("abcd"), "p")["y"].tolist() == [0, 1, 2, 3]
    (batch,) = tq.replay(f"{url}/step")
    assert torch.equal(torch.stack(list(batch["x"].unbind())), ROWS["x"])


def test_the_files_of_the_checkpoint_before_are_deleted_once_they_are_replaced(
    client: tq.TransferQueueClient, url: str, files: Files
) -> None:
    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(url)
    first = names(files)
    tq.save_checkpoint(url)
    second = names(files)
    assert len(first) == len(second) == 2
    assert set(first) & set(second) == {"metadata.json"}
    tq.load_checkpoint(url)


def test_a_url_may_have_the_characters_of_patterns(client: tq.TransferQueueClient, url: str) -> None:
    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(f"{url}/lr=[0.1]*?/ck")
    first = names(fsspec.core.url_to_fs(f"{url}/lr=[0.1]*?/ck"))
    tq.save_checkpoint(f"{url}/lr=[0.1]*?/ck")
    second = names(fsspec.core.url_to_fs(f"{url}/lr=[0.1]*?/ck"))
    assert len(first) == len(second) == 2
    assert set(first) & set(second) == {"metadata.json"}
    tq.load_checkpoint(f"{url}/lr=[0.1]*?/ck")


def test_a_checkpoint_is_replaced_whether_a_path_or_a_url_led_there(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    path, url = tmp_path / "ck", f"file://{tmp_path}/ck"
    client.put(ROWS, partition_id="p")
    for n, place in enumerate([url, path, url, url, path, path]):
        tq.save_checkpoint(place, metadata={"n": n})
        assert json.loads((path / "metadata.json").read_text())["user_metadata"] == {"n": n}
        assert len(os.listdir(path)) == (2 if place == url else 4)
        tq.load_checkpoint(path)
        tq.load_checkpoint(url)


def test_a_checkpoint_that_was_copied_down_from_a_store_is_replaced(
    client: tq.TransferQueueClient, url: str, files: Files, tmp_path: Path
) -> None:
    """With what a killed writer left below it."""
    system, root = files
    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(url)
    system.makedirs(f"{root}/files-1764093000000-5f0c9a21")
    system.pipe_file(f"{root}/files-1764093000000-5f0c9a21/blocks-00000.bin", b"x")
    system.get(f"{root}/", f"{tmp_path}/down/", recursive=True)
    tq.load_checkpoint(tmp_path / "down")
    assert len(os.listdir(tmp_path / "down")) == 3
    tq.save_checkpoint(tmp_path / "down")
    tq.load_checkpoint(tmp_path / "down")
    assert not list((tmp_path / "down").glob("files-*"))


@pytest.mark.parametrize("call", ["_listed", "write_whole", "move"])
def test_of_two_that_save_at_the_same_time_the_last_is_there_whole(
    client: tq.TransferQueueClient, url: str, files: Files, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The second saves all of its own just before the first makes `call`."""
    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(url, metadata={"by": "nobody"})
    owner = {"_listed": remote.RemoteFolder, "write_whole": FileSystem, "move": FileSystem}[call]
    original = getattr(owner, call)

    def beside(*args: Any) -> Any:
        monkeypatch.setattr(owner, call, original)
        tq.save_checkpoint(url, metadata={"by": "second"})
        return original(*args)

    monkeypatch.setattr(owner, call, beside)
    tq.save_checkpoint(url, metadata={"by": "first"})
    client.clear_partition("p")
    tq.load_checkpoint(url)
    system, root = files
    assert json.loads(system.cat_file(f"{root}/metadata.json"))["user_metadata"] == {"by": "first"}
    assert tq.get_client().get_partition("p")["rows"] == 4
    left = len(names(files)) - 2
    assert left == (call != "_listed")  # files of the second, which go after a day


def test_of_two_that_dump_to_one_place_at_the_same_time_one_does(
    client: tq.TransferQueueClient, url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second dumps all of its own once the first has looked for the last time."""
    tq.kv_batch_put(list("abcd"), "p", fields=ROWS)
    listed = remote.RemoteFolder._listed

    def beside(*given: Any) -> Any:
        monkeypatch.setattr(remote.RemoteFolder, "_listed", listed)
        tq.dump_data_by_key(url, ["b"], "p")
        return listed(*given)

    monkeypatch.setattr(remote.RemoteFolder, "_listed", beside)
    with pytest.raises(FileExistsError):
        tq.dump_data_by_key(url, ["a"], "p")
    assert set(tq.read_row_index(url)["rows"]) == {"b"}
    assert len(names(files)) == 2


def test_a_store_without_modes_has_a_new_list_whole(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fsspec's own `pipe_file`, which opens the file in its place for whoever reads meanwhile."""
    memory, root, written = type(fsspec.filesystem("memory")), f"/{uuid.uuid4().hex}", list[str]()
    opened = memory._open

    def record(self: Any, path: str, mode: str = "rb", **named: Any) -> Any:
        if mode != "rb":
            written.append(path)
        return opened(self, path, mode, **named)

    monkeypatch.setattr(memory, "pipe_file", fsspec.AbstractFileSystem.pipe_file)
    monkeypatch.setattr(memory, "_open", record)
    tq.kv_batch_put(list("abcd"), "p", fields=ROWS)
    tq.dump_data_by_key(f"memory:/{root}", ["a"], "p")
    with pytest.raises(FileExistsError):
        tq.dump_data_by_key(f"memory:/{root}", ["b"], "p")
    assert written
    assert [path for path in written if not path.startswith(f"{root}/files-")] == []
    assert set(tq.read_row_index(f"memory:/{root}")["rows"]) == {"a"}
    fsspec.filesystem("memory").rm(root, recursive=True)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_disk_without_links_takes_what_is_created(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    tq.kv_batch_put(list("abcd"), "p", fields=ROWS)
    tq.dump_data_by_key(f"file://{tmp_path}/d", ["a"], "p")
    with pytest.raises(FileExistsError):
        tq.dump_data_by_key(f"file://{tmp_path}/d", ["b"], "p")
    assert set(tq.read_row_index(f"file://{tmp_path}/d")["rows"]) == {"a"}
    assert len(os.listdir(tmp_path / "d")) == 2


def test_a_first_list_that_did_not_get_its_name_is_in_nobody_s_way(
    client: tq.TransferQueueClient, url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill: what may be seen is not deleted."""
    client.put(ROWS, partition_id="p")
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "move", lambda *_: 1 / 0)
        with pytest.raises(ServiceUnavailable):
            tq.save_checkpoint(url)
    tq.save_checkpoint(url)
    tq.load_checkpoint(url)


def test_what_another_may_be_writing_stays_for_a_day(
    client: tq.TransferQueueClient, url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, root = files
    client.put(ROWS, partition_id="p")
    system.makedirs(f"{root}/files-1764093000000-5f0c9a21")
    system.pipe_file(f"{root}/files-1764093000000-5f0c9a21/blocks-00000.bin", b"x")
    monkeypatch.setattr(remote.time, "time", lambda: 1764093000.0 + 86399.0)
    tq.save_checkpoint(url)
    assert len(names(files)) == 3
    monkeypatch.setattr(remote.time, "time", lambda: 1764093000.0 + 86401.0)
    tq.save_checkpoint(url)
    assert len(names(files)) == 2


@pytest.mark.parametrize("name", ["metadata.json", "controller.msgpack", "blocks.msgpack", "blocks-00000.bin"])
def test_damage_is_found_and_changes_nothing(client: tq.TransferQueueClient, url: str, files: Files, name: str) -> None:
    client.put(ROWS, partition_id="saved")
    tq.save_checkpoint(url)
    client.clear_partition("saved")
    client.put(ROWS, partition_id="now")
    used = client.stats()["arena_nbytes_used"]
    for change in (lambda data: data[:-20] + b"#" + data[-19:], lambda data: data[:-1], lambda data: data + b" "):
        changed(files, name, change)
        with pytest.raises(CheckpointCorrupt):
            tq.load_checkpoint(url)
    assert client.get_partition_list() == ["now"]
    assert client.stats()["arena_nbytes_used"] == used


def test_a_list_leads_nowhere_else(client: tq.TransferQueueClient, url: str, files: Files) -> None:
    from transfer_queue.saved.files import Metadata, decoded, encoded

    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(url)

    def lead(data: bytes) -> bytes:
        metadata: Metadata = decoded(data, "", 1)
        metadata.folder = "files-1/../../other"
        return encoded(metadata)

    changed(files, "metadata.json", lead)
    with pytest.raises(CheckpointCorrupt, match="files below"):
        tq.load_checkpoint(url)


def test_files_that_are_not_there_are_missing(client: tq.TransferQueueClient, url: str, files: Files) -> None:
    with pytest.raises(CheckpointMissing):
        tq.load_checkpoint(url)
    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(url)
    system, root = files
    (path,) = [one for one in system.find(root) if one.endswith("blocks-00000.bin")]
    system.rm_file(path)
    with pytest.raises(CheckpointMissing):
        tq.load_checkpoint(url)


def test_a_file_that_is_deleted_while_it_is_read_is_missing_or_whole(url: str, files: Files) -> None:
    system, root = files
    system.makedirs(root)
    system.pipe_file(f"{root}/blocks.bin", bytes(100))
    source = folder_at(url).open("blocks.bin")
    system.rm_file(f"{root}/blocks.bin")
    into = memoryview(bytearray(b"x" * 100))
    try:
        assert source.readinto(into) == 100
    except CheckpointMissing:
        assert url.startswith("s3:")
    else:
        assert bytes(into) == bytes(100)
    finally:
        source.close()


def test_other_files_are_not_taken_for_a_checkpoint(client: tq.TransferQueueClient, url: str, files: Files) -> None:
    system, root = files
    system.makedirs(root)
    system.pipe_file(f"{root}/notes.txt", b"mine")
    with pytest.raises(InvalidInput, match="something else"):
        tq.save_checkpoint(url)
    with pytest.raises(FileExistsError):
        tq.dump_data_by_key(url, [], "p")
    assert names(files) == ["notes.txt"]


def test_a_list_of_another_is_not_replaced(client: tq.TransferQueueClient, url: str, files: Files) -> None:
    system, root = files
    system.makedirs(root)
    system.pipe_file(f"{root}/metadata.json", b'{"folder": "model"}')
    system.makedirs(f"{root}/model")
    system.pipe_file(f"{root}/model/weights.bin", b"mine")
    with pytest.raises(InvalidInput, match="something else"):
        tq.save_checkpoint(url)
    assert system.cat_file(f"{root}/metadata.json") == b'{"folder": "model"}'
    assert system.cat_file(f"{root}/model/weights.bin") == b"mine"


@pytest.mark.parametrize("wrong", ["nowhere://bucket/x", "gs://bucket/x"])
def test_what_fsspec_cannot_open_is_said_before_anything_is_read(client: tq.TransferQueueClient, wrong: str) -> None:
    """Nobody knows the first, and what opens the second is not installed."""
    with pytest.raises(ConfigError):
        tq.save_checkpoint(wrong)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(28, "No space left on device"), StoreFull), (PermissionError(13, "no"), ServiceUnavailable)],
)
def test_a_store_that_refuses_leaves_the_checkpoint_before(
    client: tq.TransferQueueClient,
    url: str,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    expected: type[Exception],
) -> None:
    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(url, metadata={"n": 1})
    before, opened = names(files), files[0].open

    def refuse(path: str, mode: str = "rb", *more: Any, **named: Any) -> Any:
        if "w" in mode and path.endswith("blocks-00000.bin"):
            raise error
        return opened(path, mode, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(files[0], "open", refuse)
        with pytest.raises(expected):
            tq.save_checkpoint(url, metadata={"n": 2})
    assert names(files) == before
    until(lambda: not client.stats()["pinned_nbytes"], "the end of its pins")
    tq.load_checkpoint(url)


def test_a_store_that_does_not_answer_is_given_up(
    client: tq.TransferQueueClient, url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(url)
    goes_on = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(remote, "ANSWER_S", 0.2)
        patch.setattr(files[0], "pipe_file", lambda *_, **__: goes_on.wait(20))
        with pytest.raises(DeadlineExceeded):
            tq.save_checkpoint(url)
        goes_on.set()
    tq.load_checkpoint(url)


def test_files_on_a_disk_are_there_before_those_of_the_checkpoint_before_are_gone(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may lose its power at any time."""
    url, synced, deleted = f"file://{tmp_path}/ck", set[str](), list[set[str]]()
    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(url)
    fsync, delete = os.fsync, remote.RemoteFolder._delete

    def sync(fd: int) -> None:
        fsync(fd)
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))

    def remove(*given: Any) -> None:
        deleted.append(set(synced))
        delete(*given)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(remote.RemoteFolder, "_delete", remove)
    tq.save_checkpoint(url)
    assert len(deleted) == 1
    assert deleted[0] >= {"metadata.json", "controller.msgpack", "blocks.msgpack", "blocks-00000.bin", "ck"}


def test_a_killed_writer_leaves_the_checkpoint_before(
    client: tq.TransferQueueClient, child: Callable[[str], Child], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/ck"
    client.put(ROWS, partition_id="p")
    tq.save_checkpoint(url, metadata={"n": 1})
    writer = child(f"""
        import os, sys
        os.environ["TQ_ADDRESS"] = {str(client.address)!r}
        import transfer_queue as tq
        from transfer_queue.saved.remote import _RemoteDraft
        tq.init()
        seal = _RemoteDraft.seal
        def stop(*args):
            print("written", flush=True)
            sys.stdin.readline()
        _RemoteDraft.seal = stop
        tq.save_checkpoint({url!r}, metadata={{"n": 2}})
    """)
    assert writer.line() == "written"
    os.kill(writer.pid, signal.SIGKILL)
    writer.process.wait(10)
    assert json.loads((tmp_path / "ck" / "metadata.json").read_text())["user_metadata"] == {"n": 1}
    tq.load_checkpoint(url)
    assert len(list((tmp_path / "ck").iterdir())) == 3  # what it wrote goes a day later


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_the_checkpoint_before_or_the_new_one(
    service: Callable[..., tq.TransferQueueClient], tmp_path: Path
) -> None:
    client = service(client={"spin_us": 0})
    client.put({"x": torch.zeros(4, 8)}, partition_id="p")
    url = f"file://{tmp_path}/ck"
    tq.save_checkpoint(url)

    def save() -> bool:
        tq.save_checkpoint(url)
        return True

    def is_clean() -> bool:
        tq.load_checkpoint(url)
        return not client.stats()["pinned_nbytes"]

    places = every(save, is_clean, threading.__file__, _weakrefset.__file__, step=11)  # a callback swallows interrupts
    assert len(list(places)) > 10
