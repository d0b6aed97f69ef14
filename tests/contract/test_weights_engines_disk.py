"""What lies on the disk, the registry, and engines in one process."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import HELPERS
from safetensors.torch import load_file
from weights import Net, Tied, copy_of, drawn, same

from transfer_queue.errors import (
    DigestMismatch,
    InvalidInput,
    NotInitialized,
    NotOpen,
    ServiceUnavailable,
    StaleVersion,
    VersionGone,
)
from transfer_queue.weights import InPlace, ModuleSource, Receiver, SafetensorsSource, StateDictSource, Swap
from transfer_queue.weights.transport import disk as disk_transport
from transfer_queue.weights.transport.base import Engine
from transfer_queue.weights.transport.disk import DiskEngine, DiskTrainer, DiskTrainerInfo
from transfer_queue.weights.transport.shm import ShmEngine, ShmTrainer
from transfer_queue.weights.transport.tcp import TcpEngine
from transfer_queue.weights.transport.version_folders import (
    LATEST,
    VersionLease,
    newest_name,
    point_to,
    retain,
    writing,
)

ROOM_S = 20.0


class Direct:
    """The control plane to engines of this process. `info` is that of the last update."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        self.info: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for one in self.engines:
            one.init_transfer_engine(json.loads(json.dumps(init_info)))

    def start_weight_update(self) -> None:
        for one in self.engines:
            one.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.info = json.loads(json.dumps(update_info))
        for one in self.engines:
            one.update_weights(self.info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        for one in self.engines:
            one.finish_weight_update()


class Setup:
    """A disk trainer with one receiver. `weights` are changed in place."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        self.module = Net()
        self.weights = drawn(Net(), 1)
        self.engine = DiskEngine(Receiver(InPlace(self.module)))
        self.client = Direct(self.engine)
        info = {"folder": str(folder), "bucket_nbytes": 128, "epoch": "e", "sync": False, **more}
        self.trainer = DiskTrainer.trainer_init(info, client=self.client, source=StateDictSource(self.weights))

    def send(self, seed: int) -> int:
        for name, tensor in drawn(Net(), seed).items():
            self.weights[name].copy_(tensor)
        return self.trainer.send_weights(deadline_s=ROOM_S).version

    def versions(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("v*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Setup]:
    found = Setup(tmp_path / "versions")
    yield found
    found.trainer.shutdown()
    found.engine.shutdown()


def test_a_version_is_a_folder_that_other_loaders_read(disk: Setup) -> None:
    disk.send(1)
    folder = disk.folder / (disk.folder / "LATEST").read_text()
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    found = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert same(found, drawn(Net(), 1))
    assert same(dict(SafetensorsSource(folder).tensors()), drawn(Net(), 1))
    assert same(copy_of(disk.module), drawn(Net(), 1))


def test_versions_beyond_those_to_keep_are_deleted_unless_somebody_reads_them(disk: Setup) -> None:
    disk.send(1)
    reader = os.open(disk.folder / disk.versions()[0] / "lease", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    for seed in (2, 3, 4):
        disk.send(seed)
    assert disk.versions() == ["v000000000001-e", "v000000000003-e", "v000000000004-e"]
    os.close(reader)
    disk.send(5)
    assert disk.versions() == ["v000000000004-e", "v000000000005-e"]
    assert {path.name for path in disk.folder.iterdir()} == {*disk.versions(), "LATEST"}


def test_a_trainer_deletes_nothing_that_another_one_in_its_folder_is_sending_or_gives_to_late_receivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Setup(tmp_path, keep=1, epoch=name) for name in "ab")
    update = one.client.update_weights

    def meanwhile(info: dict[str, Any]) -> None:
        other.send(2)
        other.send(3)
        update(info)

    monkeypatch.setattr(one.client, "update_weights", meanwhile)
    one.send(1)
    assert same(copy_of(one.module), drawn(Net(), 1))
    other.send(4)
    late = Net()
    joined = DiskEngine(Receiver(InPlace(late)))
    assert one.trainer.join(Direct(joined), deadline_s=ROOM_S) == 1
    assert same(copy_of(late), drawn(Net(), 1))
    assert one.versions() == ["v000000000001-a", "v000000000003-b"]
    for engine in (one.engine, joined, other.engine):
        engine.shutdown()
    one.trainer.shutdown()
    other.send(5)
    assert other.versions() == ["v000000000004-b"]
    other.trainer.shutdown()


def test_a_version_that_waits_packed_stays_when_the_one_before_is_the_only_one_to_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Setup(tmp_path, keep=1)
    update, waits = disk.client.update_weights, threading.Event()

    def once_another_waits(info: dict[str, Any]) -> None:
        assert waits.wait(ROOM_S)
        update(info)

    monkeypatch.setattr(disk.client, "update_weights", once_another_waits)
    tickets = [disk.trainer.publish(deadline_s=ROOM_S) for _ in range(2)]
    waits.set()
    assert [one.result().version for one in tickets] == [1, 2]
    disk.trainer.shutdown()
    disk.engine.shutdown()


def test_a_child_that_was_forked_during_a_lease_does_not_keep_the_version(tmp_path: Path) -> None:
    (tmp_path / "lease").touch()
    lease = VersionLease(tmp_path, fcntl.LOCK_SH)
    child = os.dup(lease._fd)  # as a fork has it
    with pytest.raises(VersionGone):
        VersionLease(tmp_path, fcntl.LOCK_EX)
    lease.end()
    VersionLease(tmp_path, fcntl.LOCK_EX).end()
    os.close(child)


def test_the_oldest_versions_are_deleted_also_where_the_clock_was_put_back(disk: Setup) -> None:
    disk.send(1)
    disk.send(2)
    for name in disk.versions():
        os.utime(disk.folder / name, (2e9, 2e9))
    for seed in (3, 4, 5):
        disk.send(seed)
    assert disk.versions() == ["v000000000004-e", "v000000000005-e"]


def test_a_version_that_was_given_up_while_somebody_read_it_may_be_sent_again(
    disk: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []

    def freeze(info: dict[str, Any]) -> None:
        if "name" in info:
            readers.append(os.open(disk.folder / info["name"] / "lease", os.O_RDONLY))
            fcntl.flock(readers[-1], fcntl.LOCK_SH)
            raise ServiceUnavailable("frozen")

    with monkeypatch.context() as patch:
        patch.setattr(disk.client, "update_weights", freeze)
        with pytest.raises(ServiceUnavailable, match="frozen"):
            disk.trainer.send_weights(7, deadline_s=ROOM_S)
    assert disk.versions() == []
    assert disk.trainer.send_weights(7, deadline_s=ROOM_S).version == 7
    os.close(readers[0])
    disk.send(8)
    assert {path.name for path in disk.folder.iterdir()} == {*disk.versions(), "LATEST"}


def test_a_version_that_another_thread_gives_up_while_leftovers_are_removed_is_removed_later(disk: Setup) -> None:
    adds = disk.trainer._withdrawn.append  # as a ticket's thread has it in hand
    disk.trainer._clean()
    left = disk.folder / "tmp-left"
    left.mkdir()
    adds(left)
    disk.send(1)
    assert not left.exists()


def test_a_version_whose_writer_was_interrupted_when_it_had_its_name_is_written_anew(
    disk: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk.send(1) == 1

    @contextmanager
    def struck(folder: Path) -> Iterator[None]:
        with writing(folder):
            yield
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(disk_transport, "writing", struck)
    with pytest.raises(KeyboardInterrupt):
        disk.send(2)
    assert disk.send(3) == 2
    assert same(copy_of(disk.module), disk.weights)


@pytest.mark.parametrize("num", [0, 1])
def test_an_update_that_is_interrupted_as_latest_names_it_leaves_the_version_before_there(
    disk: Setup, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    for seed in range(num):
        disk.send(seed)

    def struck(final: Path, sync: bool) -> None:
        monkeypatch.undo()
        point_to(final, sync)
        raise KeyboardInterrupt

    monkeypatch.setattr(disk_transport, "point_to", struck)
    with pytest.raises(KeyboardInterrupt):
        disk.send(5)
    named = (disk.folder / LATEST).exists()
    assert (named, disk.versions()) == (num > 0, [newest_name(disk.folder / LATEST)] if named else [])
    disk.send(6)
    assert newest_name(disk.folder / LATEST) == disk.versions()[-1]


def test_a_trainer_made_anew_with_the_name_of_the_run_before_hears_what_to_do(disk: Setup) -> None:
    disk.send(1)
    disk.trainer.shutdown()
    again = Setup(disk.folder)
    with pytest.raises(StaleVersion, match=r"exists already: .* needs a run_id of its own .*, or goes on with higher"):
        again.send(2)
    assert again.trainer.send_weights(7, deadline_s=ROOM_S).version == 7
    again.trainer.shutdown()
    again.engine.shutdown()


def test_what_a_dead_writer_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    dead, alive = tmp_path / ".tmp-dead", tmp_path / ".tmp-alive"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "lease").touch()
        (folder / "model-00001-of-00001.safetensors").write_bytes(b"half")
    writer = os.open(alive / "lease", os.O_RDWR)
    fcntl.flock(writer, fcntl.LOCK_EX)
    trainer = DiskTrainer(DiskTrainerInfo(folder=str(tmp_path)), Direct(), ModuleSource(Net()))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-alive"]
    os.close(writer)
    trainer.shutdown()


def test_a_damaged_shard_and_a_deleted_version(disk: Setup) -> None:
    disk.send(1)
    before = copy_of(disk.module)
    real = disk.engine._find

    def damage(info: Any, deadline: Any) -> Any:
        shard = sorted((disk.folder / info.name).glob("*.safetensors"))[1]
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        return real(info, deadline)

    disk.engine._find = damage  # type: ignore[method-assign]
    with pytest.raises(DigestMismatch):
        disk.send(2)
    disk.engine._find = real  # type: ignore[method-assign]
    assert same(copy_of(disk.module), before)
    disk.engine.start_weight_update()
    with pytest.raises(VersionGone):
        disk.engine.update_weights({**disk.client.info, "abort": False, "version": 9, "name": "v9-e"})
    with pytest.raises(VersionGone):  # the same fault, until the next start
        disk.engine.finish_weight_update()
    for name in ("../v1", "LATEST", "", "v1\0"):
        disk.engine.start_weight_update()
        with pytest.raises(InvalidInput):
            disk.engine.update_weights({"version": 3, "epoch": "e", "name": name})
    disk.send(3)
    assert same(copy_of(disk.module), drawn(Net(), 3))


def test_a_damaged_latest_is_named(disk: Setup) -> None:
    disk.send(1)
    for text in (b"v1\0", b"\xff\xfe"):
        (disk.folder / "LATEST").write_bytes(text)
        with pytest.raises(InvalidInput):
            disk.engine.join(timeout_s=ROOM_S)
    assert disk.send(2) == 2


def test_version_numbers_rise(disk: Setup) -> None:
    disk.trainer.send_weights(7, deadline_s=ROOM_S)
    for version in (7, 3):
        with pytest.raises(StaleVersion):
            disk.trainer.send_weights(version, deadline_s=ROOM_S)
    assert disk.send(8) == 8


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    module = Tied()
    engine = DiskEngine(Receiver(Swap(module)))
    source = ModuleSource(Tied())
    trainer = DiskTrainer.trainer_init({"folder": str(tmp_path)}, client=Direct(engine), source=source)
    trainer.send_weights(deadline_s=ROOM_S)
    assert same(copy_of(module), {**dict(source.tensors()), "head.weight": dict(source.tensors())["embed.weight"]})
    trainer.shutdown()
    engine.shutdown()


def test_calls_out_of_order_are_refused() -> None:
    engine = TcpEngine(Receiver(InPlace(Net())))
    with pytest.raises(NotOpen, match="no update was started"):
        engine.update_weights({"version": 1})
    for call in (engine.finish_weight_update, engine.start_weight_update):
        with pytest.raises(NotInitialized, match="init_transfer_engine first"):
            call()
    engine.init_transfer_engine({"token": ""})
    engine.finish_weight_update()
    engine.start_weight_update()
    with pytest.raises(NotOpen, match="nothing was received"):
        engine.finish_weight_update()
    engine.start_weight_update()
    with pytest.raises(NotOpen, match="init_transfer_engine first"):
        engine.update_weights({"version": 1})
    for info in ({"token": 1}, [], {}):
        with pytest.raises(InvalidInput):
            engine.init_transfer_engine(info)  # type: ignore[arg-type]
    engine.shutdown()
    engine.shutdown()


def test_shared_memory_over_a_socket_with_a_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"
    module = Net()
    for _ in range(2):
        engine = ShmEngine(Receiver(InPlace(module)))
        info = {"socket": str(path)}
        trainer = ShmTrainer.trainer_init(info, client=Direct(engine), source=StateDictSource(drawn(Net(), 1)))
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(InvalidInput, match="somebody listens"):
            ShmTrainer.trainer_init(info, client=Direct(), source=StateDictSource({}))
        trainer.send_weights(deadline_s=ROOM_S)
        assert same(copy_of(module), drawn(Net(), 1))
        engine.shutdown()
        trainer.shutdown()
        assert not path.exists()


def test_a_receiver_cannot_change_what_others_see() -> None:
    modules = [Net(), Net()]
    engines = [ShmEngine(Receiver(Swap(module)), rank=rank) for rank, module in enumerate(modules)]
    trainer = ShmTrainer.trainer_init({}, client=Direct(*engines), source=StateDictSource(drawn(Net(), 1)))
    trainer.send_weights(deadline_s=ROOM_S)
    with torch.no_grad():
        modules[0].first.weight.fill_(7)
    assert same(copy_of(modules[1]), drawn(Net(), 1))
    late = Net()
    third = ShmEngine(Receiver(InPlace(late)))
    third.init_transfer_engine(trainer.receivers_info())
    third.join(timeout_s=ROOM_S)
    assert same(copy_of(late), drawn(Net(), 1))
    del modules[:]
    for one in (*engines, third):
        one.shutdown()
    trainer.shutdown()


FULL_DISK = """
import ctypes, os, resource, sys
import torch
from tests_path import *
from test_weights_engines_disk import Setup, copy_of, drawn, same, Net
from pathlib import Path
from transfer_queue.errors import StoreFull

def refused(disk, seed):
    before = sorted(os.listdir(disk.folder))
    try:
        disk.send(seed)
    except StoreFull as error:
        assert str(disk.folder) in str(error), error
        assert sorted(os.listdir(disk.folder)) == before, os.listdir(disk.folder)
        return True

def go_on(disk):
    assert same(copy_of(disk.module), drawn(Net(), 1))
    assert disk.engine.receiver.installed().version == 1
    disk.send(3)
    assert same(copy_of(disk.module), drawn(Net(), 3))
    assert sorted(os.listdir(disk.folder)) == sorted([*disk.versions(), "LATEST"])
    print(disk.versions()[-1])
    disk.trainer.shutdown()
    disk.engine.shutdown()
""".replace("from tests_path import *", f"sys.path[:0] = [{os.path.dirname(__file__)!r}, {str(HELPERS)!r}]")


def test_a_version_that_may_not_be_as_large_is_refused_by_type_and_leaves_nothing(child: Any, tmp_path: Path) -> None:
    steps = f"""
disk = Setup(Path({str(tmp_path / "versions")!r}))
disk.send(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
assert refused(disk, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
go_on(disk)
"""
    assert child(FULL_DISK + steps).finish() == "v000000000002-e"


SMALL = """
libc, where = ctypes.CDLL(None, use_errno=True), {where!r}
if (
    libc.unshare(0x20000)
    or libc.mount(b"none", b"/", None, 0x4000 | 1 << 18, None)
    or libc.mount(b"tmpfs", where.encode(), b"tmpfs", 0, b"size=256k")
):
    print("not permitted", flush=True)
    sys.exit()

def fill():
    with open(os.path.join(where, "ballast"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

disk = Setup(Path(where) / "versions")
disk.send(1)
"""


def on_a_small_disk(child: Any, tmp_path: Path, steps: str) -> str:
    """What the steps print on a file system of 256 KiB with one version on it."""
    found: str = child(FULL_DISK + SMALL.format(where=str(tmp_path)) + steps).finish()
    if found == "not permitted":
        pytest.skip("only root may mount a small file system")
    return found


MOUNTED = """
from transfer_queue.errors import ServiceUnavailable
share, folder = os.path.join(where, "share"), os.path.join(where, "mounted")
os.makedirs(share)
os.mkdir(folder)
assert not libc.mount(b"tmpfs", share.encode(), b"tmpfs", 0, b"size=1m")

def mount():
    assert not libc.mount(share.encode(), folder.encode(), None, 0x1000, None)

mount()
away = Setup(Path(folder){below})
away.send(1)
assert not libc.umount2(folder.encode(), 2)
try:
    away.send(2)
except ServiceUnavailable as error:
    assert str(away.folder) in str(error) and "mount" in str(error), error
assert os.listdir(folder) == []
mount()
away.send(3)
assert same(copy_of(away.module), drawn(Net(), 3))
print(sorted(os.listdir(away.folder)))
away.trainer.shutdown()
away.engine.shutdown()
disk.trainer.shutdown()
disk.engine.shutdown()
"""


@pytest.mark.parametrize("below", ["", " / 'versions'"], ids=["itself", "below"])
def test_nothing_is_written_where_the_file_system_of_the_folder_is_away(child: Any, tmp_path: Path, below: str) -> None:
    printed = on_a_small_disk(child, tmp_path, MOUNTED.format(below=below))
    assert printed == "['LATEST', 'v000000000001-e', 'v000000000002-e']"


def test_several_that_have_latest_name_their_versions_do_not_meet(tmp_path: Path) -> None:
    """As a trainer does, and a checkpoint that is saved to its folder."""
    names = [f"v{number:012}-run" for number in range(4)]

    def name_it(name: str) -> None:
        (tmp_path / name).mkdir()
        for _ in range(200):
            point_to(tmp_path / name, sync=False)
            assert newest_name(tmp_path / LATEST) in names

    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(name_it, names))
    assert sorted(path.name for path in tmp_path.rglob("*")) == [LATEST, *names]


def test_a_version_that_somebody_else_had_latest_name_stays_however_few_are_kept(tmp_path: Path) -> None:
    mine, older, others = (tmp_path / name for name in ("v000000000002-a", "v000000000001-a", "v000000000009-b"))
    for folder in (mine, older, others):
        folder.mkdir()
        (folder / "lease").touch()
    point_to(others)
    retain(mine, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, mine.name, others.name]


def test_a_full_disk_gives_up_the_version_and_the_next_one_is_taken_once_there_is_room(
    child: Any, tmp_path: Path
) -> None:
    steps = """
fill()
assert refused(disk, 2)
assert refused(disk, 2)
os.unlink(os.path.join(where, "ballast"))
go_on(disk)
"""
    assert on_a_small_disk(child, tmp_path, steps) == "v000000000002-e"


def test_a_disk_that_is_full_when_the_version_is_decided_gives_it_up_everywhere(child: Any, tmp_path: Path) -> None:
    steps = """
update = disk.engine.update_weights

def and_then_full(info):
    update(info)
    if not info.get("abort"):
        fill()

disk.client.update_weights = lambda info: and_then_full(info)
assert refused(disk, 2)
assert disk.engine.receiver.state.value == "installed"
del disk.client.update_weights
os.unlink(os.path.join(where, "ballast"))
go_on(disk)
"""
    assert on_a_small_disk(child, tmp_path, steps) == "v000000000003-e"
