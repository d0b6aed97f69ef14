"""Versions in a folder for other sites: what a trainer's updates leave there, and those who follow it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import Child, until
from hypothesis import given
from hypothesis import strategies as st
from s3 import object_store
from test_weights_ranks import TOKEN, Ranks
from weights import drawn, root, same
from weights_ranks import WORLD, nudged
from weights_ranks import drawn as model_of

from transfer_queue.errors import (
    ConfigError,
    DigestMismatch,
    InvalidInput,
    NotSupported,
    ServiceUnavailable,
    TransferQueueError,
    VersionGone,
)
from transfer_queue.weights import Control, Gate, InPlace, Receiver, StateDictSource, VersionInfo, plan, seal
from transfer_queue.weights.archive import Archive, ArchiveReceiver, ArchiveSource
from transfer_queue.weights.archive.folder import ArchivedVersion, missing_version, path_to_newest
from transfer_queue.weights.archive.writing import _Came
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient, serve
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.transport import registry

DEADLINE_S = 30.0


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(300, 40)
        self.second = torch.nn.Linear(40, 7, dtype=torch.bfloat16)


class Site:
    """A trainer, a server of its own site, and an archive."""

    def __init__(self, url: str, keep: int = 2, transport: str = "tcp", pause: Mode | None = None, **info: Any) -> None:
        self.archive = Archive(url)
        self.weights = drawn(Net(), 1)
        self.live = Net()
        self.receiver = ArchiveReceiver(self.archive, keep=keep)
        here = Receiver(InPlace(self.live), adapter=lambda tensors, manifest: None)
        self.engines = [registry.engine(transport)(one) for one in (here, self.receiver)]
        server = Control(self.engines[0], here, generation=Gate())
        self.fleet = Fleet({"here": server, "archive": Control(self.engines[1], self.receiver)}, pause=pause)
        told = {"anchor_every": 3, **info}
        self.trainer = registry.trainer(transport).trainer_init(
            told, client=self.fleet, source=StateDictSource(self.weights)
        )

    def send(self, **more: Any) -> Any:
        """An element changes, and the version is in the archive."""
        self.weights["first.weight"].view(-1)[self.trainer.version] += 1
        report = self.trainer.send_weights(deadline_s=DEADLINE_S, **more)
        self.receiver.flush(DEADLINE_S)
        return report

    def close(self) -> None:
        self.trainer.shutdown()
        self.fleet.close()
        for one in self.engines:
            one.shutdown()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The options of an object store."""
    with object_store(tmp_path_factory.mktemp("store")) as options:
        yield options


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(url: str = "", **more: Any) -> Site:
        made.append(Site(url or f"file://{tmp_path}/archive", **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def has(source: ArchiveSource, weights: dict[str, torch.Tensor]) -> bool:
    return same(dict(source.tensors()), weights)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_another_site_follows_version_by_version(site: Callable[..., Site], transport: str) -> None:
    here = site(transport=transport)
    there = ArchiveSource(here.archive)
    with pytest.raises(VersionGone, match="no version in"):
        there.advance(timeout_s=DEADLINE_S)
    fetched = []
    for number, kind in enumerate(["full", "delta", "delta", "full", "delta"], 1):
        report = here.send()
        assert not here.fleet.last.missed
        before = there.num_fetched_nbytes
        assert there.advance(timeout_s=DEADLINE_S)
        fetched.append(there.num_fetched_nbytes - before)
        assert report.kind == kind
        assert (there.version, there.run_id, there.root) == (number, here.trainer.run_id, report.root)
        assert has(there, here.weights)
        assert not there.advance(timeout_s=DEADLINE_S)
    assert max(fetched[1], fetched[2], fetched[4]) < min(fetched[0], fetched[3]) / 20


def test_a_fleet_that_pauses_its_servers_around_a_commit_has_differences_in_the_archive(
    site: Callable[..., Site], tmp_path: Path
) -> None:
    here = site(pause="keep")
    for _ in range(2):
        here.send()
        assert here.fleet.last.committed == ("here", "archive")
    assert [one.kind for one in here.archive.entries(timeout_s=DEADLINE_S)] == ["full", "delta"]


def test_requests_are_not_for_an_archive_and_it_alone_decides_nothing(site: Callable[..., Site]) -> None:
    here = site()
    here.send()
    assert here.fleet.ready() == ["here"]
    assert {one.name for one in here.fleet.status() if one.ready} == {"here", "archive"}
    with serve(Control(here.engines[1], here.receiver), port=0, token=TOKEN) as server:
        assert not WeightSyncClient(server.url, TOKEN).status().answers
    here.live.first.weight.data = torch.empty(3)  # no version fits it now
    with pytest.raises(TransferQueueError, match="0 of 1 replicas have verified it"):
        here.send()
    assert [one.version for one in here.archive.entries(timeout_s=DEADLINE_S)] == [1]
    here.fleet.leave("here")
    assert here.send().version == 3  # an archive without servers is what its trainer is for
    assert here.fleet.ready() == []


def test_who_comes_late_or_was_away_takes_the_shortest_way(site: Callable[..., Site]) -> None:
    here = site(anchor_every=10)
    early, late = ArchiveSource(here.archive), ArchiveSource(here.archive)
    here.send()
    early.advance(timeout_s=DEADLINE_S)
    whole = early.num_fetched_nbytes
    for _ in range(4):
        here.send()
    for one in (early, late):
        assert one.advance(timeout_s=DEADLINE_S)
        assert one.version == 5
        assert has(one, here.weights)
    assert early.num_fetched_nbytes - whole < whole / 5
    assert late.num_fetched_nbytes == early.num_fetched_nbytes


def test_a_site_gives_what_it_follows_to_servers_of_its_own(site: Callable[..., Site]) -> None:
    here = site()
    here.send()
    there = ArchiveSource(here.archive)
    there.advance(timeout_s=DEADLINE_S)
    live = Net()
    receiver = Receiver(InPlace(live))
    engine = registry.engine("shm")(receiver)
    relay = registry.trainer("shm").trainer_init(
        {"anchor_every": 3, "run_id": there.run_id}, client=Control(engine, receiver), source=there
    )
    try:
        assert relay.send_weights(there.version, deadline_s=DEADLINE_S).root == there.root
        here.send()
        there.advance(timeout_s=DEADLINE_S)
        report = relay.send_weights(there.version, deadline_s=DEADLINE_S)
        assert (report.kind, report.version) == ("delta", 2)
        assert same(dict(live.state_dict()), here.weights)
        assert receiver.installed().root == there.root == root(here.weights)
    finally:
        relay.shutdown()
        engine.shutdown()


def test_the_shards_of_several_ranks_become_whole_elsewhere(child: Callable[[str], Child], tmp_path: Path) -> None:
    archive = Archive(f"file://{tmp_path}/archive")
    receiver = ArchiveReceiver(archive)
    engine = registry.engine("tcp")(receiver)
    there = ArchiveSource(archive)
    with serve(Control(engine, receiver), port=0, token=TOKEN) as server:
        ranks = Ranks(child, server.url, "fsdp_tp", info={"anchor_every": 10})
        for step, kind in (("train 5", "full"), ("nudge 3", "delta"), ("nudge 4", "delta")):
            ranks.tell(step)
            assert [one["kind"] for one in ranks.send()] == [kind] * WORLD
            receiver.flush(DEADLINE_S)
            there.advance(timeout_s=DEADLINE_S)
    wanted = StateDictSource(dict(nudged(nudged(model_of(5), 3), 4).state_dict()))
    assert same(dict(there.tensors()), dict(wanted.tensors()))
    assert there.aliases() == wanted.aliases()
    engine.shutdown()


def test_only_the_newest_full_versions_stay_with_what_follows_them(site: Callable[..., Site], tmp_path: Path) -> None:
    here = site(keep=1)
    behind = ArchiveSource(here.archive)
    here.send()
    behind.advance(timeout_s=DEADLINE_S)
    for _ in range(4):
        here.send()
    found = here.archive.entries(timeout_s=DEADLINE_S)
    assert [(one.version, one.kind, one.base) for one in found] == [(4, "full", 0), (5, "delta", 4)]
    assert len(files(tmp_path)) == 4
    behind.advance(timeout_s=DEADLINE_S)
    assert has(behind, here.weights)


def test_what_is_not_the_archives_own_stays_and_is_not_in_the_way(site: Callable[..., Site], tmp_path: Path) -> None:
    root = tmp_path / "archive"
    others = [
        root / ".gitkeep",
        root / "0-notes" / "thesis.txt",
        root / ".config" / "keys",
        root / ".cache" / "deep" / "x",
    ]
    here = site(keep=1, anchor_every=1)
    here.send()
    (folder,) = root.iterdir()
    others += [folder / "000000000001-notes.txt", root / "0-notes" / "000000000001-full-0-abc.json"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    for _ in range(3):
        here.send()
    assert [one.version for one in here.archive.entries(timeout_s=DEADLINE_S)] == [4]
    assert {path.read_text() for path in others} == {"mine"}


def test_old_versions_that_cannot_be_deleted_do_not_keep_new_ones(
    site: Callable[..., Site], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = site(keep=1, anchor_every=1)
    here.send()
    (folder,) = (tmp_path / "archive").iterdir()
    (folder / "000000000000-full-0-abc.00000").mkdir()  # no file, so it cannot be deleted as one
    for number in (2, 3):
        assert here.send().version == number
        assert here.receiver.installed().version == number
    assert "could not be deleted" in caplog.text
    there = ArchiveSource(here.archive)
    there.advance(timeout_s=DEADLINE_S)
    assert has(there, here.weights)


def test_a_trainer_that_is_started_anew_is_followed(site: Callable[..., Site]) -> None:
    one = site(run_id="first")
    there = ArchiveSource(one.archive)
    one.send()
    there.advance(timeout_s=DEADLINE_S)
    other = site(run_id="second")
    other.weights["second.bias"] += 2
    other.send()
    assert there.advance(timeout_s=DEADLINE_S)
    assert (there.run_id, there.version) == ("second", 1)
    assert has(there, other.weights)


def test_a_trainer_that_is_started_anew_under_the_same_name_is_followed_to_the_same_number(
    site: Callable[..., Site],
) -> None:
    one = site(run_id="run")
    there = ArchiveSource(one.archive)
    one.send()
    there.advance(timeout_s=DEADLINE_S)
    other = site(run_id="run")
    other.weights["second.bias"] += 2
    other.send()
    assert there.advance(timeout_s=DEADLINE_S)
    assert has(there, other.weights)
    assert not there.advance(timeout_s=DEADLINE_S)


def test_a_trainer_whose_clock_is_behind_the_one_before_is_followed(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = site(run_id="before", anchor_every=1)
    there = ArchiveSource(before.archive)
    for _ in range(3):
        before.send()
    there.advance(timeout_s=DEADLINE_S)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 7200)
    after = site(run_id="after", anchor_every=1)
    after.weights["second.bias"] += 2
    for version in (1, 2, 3):
        after.send()
        assert there.advance(timeout_s=DEADLINE_S)
        assert (there.run_id, there.version) == ("after", version)
        assert has(there, after.weights)
    assert [one[1:3] for one in after.archive.entries(timeout_s=DEADLINE_S)] == [("after", 2), ("after", 3)]


def test_what_is_deleted_while_it_is_read_is_left_for_what_is_newer(site: Callable[..., Site]) -> None:
    here = site(keep=1)
    here.send()
    there = ArchiveSource(here.archive)
    bucket = here.archive.bucket

    def late(entry: ArchivedVersion, index: int, **more: Any) -> Any:
        here.archive.bucket = bucket  # type: ignore[method-assign]
        here.send(full=True)
        return bucket(entry, index, **more)

    here.archive.bucket = late  # type: ignore[method-assign]
    assert there.advance(timeout_s=DEADLINE_S)
    assert there.version == 2
    assert has(there, here.weights)


@pytest.mark.parametrize("suffix", [".00000", ".json"])
def test_damaged_files_change_nothing(site: Callable[..., Site], tmp_path: Path, suffix: str) -> None:
    here = site()
    here.send()
    there = ArchiveSource(here.archive)
    there.advance(timeout_s=DEADLINE_S)
    before = {name: tensor.clone() for name, tensor in there.tensors()}
    here.send()
    (path,) = tmp_path.rglob(f"*delta*{suffix}")
    good = path.read_bytes()
    damaged = bytearray(good)
    damaged[good.index(b'"version":2') + 10 if suffix == ".json" else 30] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DigestMismatch):
        there.advance(timeout_s=DEADLINE_S)
    assert there.version == 1
    assert has(there, before)
    path.write_bytes(good)
    assert there.advance(timeout_s=DEADLINE_S)
    assert has(there, here.weights)


def test_a_version_that_cannot_be_written_is_told_and_the_next_is_full(
    site: Callable[..., Site], tmp_path: Path
) -> None:
    here = site(anchor_every=10)
    here.send()
    (folder,) = (tmp_path / "archive").iterdir()
    away = folder.rename(tmp_path / "away")
    folder.write_text("in the way")
    with pytest.raises(ServiceUnavailable, match="writing a bucket"):
        here.send()
    folder.unlink()
    away.rename(folder)
    there = ArchiveSource(here.archive)
    there.advance(timeout_s=DEADLINE_S)
    assert there.version == 1
    report = here.send()
    until(lambda: here.receiver.installed().version == report.version, "what the archive lacks")
    here.receiver.flush(DEADLINE_S)
    assert there.advance(timeout_s=DEADLINE_S)
    assert there.version == report.version
    assert has(there, here.weights)
    assert same(dict(here.live.state_dict()), here.weights)


def test_what_was_being_written_when_its_process_was_killed_is_not_there(
    child: Callable[[str], Child], tmp_path: Path
) -> None:
    writer = child(f"""
        import torch
        from transfer_queue.weights import StateDictSource, plan, seal, pack
        from transfer_queue.weights.archive import Archive
        source = StateDictSource({{str(n): torch.zeros(1 << 18) for n in range(400)}})
        where = plan(source.specs(), 1 << 20)
        digests, buckets = {{}}, {{}}
        for packed in pack(source, where):
            digests.update(packed.digests)
            buckets[packed.bucket] = packed.data.clone()
        print("ready", flush=True)
        Archive("file://{tmp_path}/archive").put(seal(where, digests, version=1, epoch="e"), buckets, 1.0, timeout_s=60)
        print("done", flush=True)
    """)
    assert writer.line() == "ready"
    until(lambda: len(files(tmp_path)) > 3, "the first files")
    os.kill(writer.pid, signal.SIGKILL)
    archive = Archive(f"file://{tmp_path}/archive")
    assert len(files(tmp_path)) > 3
    assert archive.entries(timeout_s=DEADLINE_S) == []
    with pytest.raises(VersionGone):
        ArchiveSource(archive).advance(timeout_s=DEADLINE_S)


@pytest.mark.keeps_sockets
@pytest.mark.parametrize("url", ["memory://weights/archive", "s3://bucket/weights/archive"])
def test_a_store_of_another_kind(
    site: Callable[..., Site], url: str, store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", store)
    here = site(url, keep=1)
    there = ArchiveSource(here.archive)
    for _ in range(5):
        here.send()
        there.advance(timeout_s=DEADLINE_S)
        assert has(there, here.weights)
    assert len(here.archive.entries(timeout_s=DEADLINE_S)) == 2


def test_a_file_of_a_listed_version_that_is_missing_is_named_and_not_asked_for_without_end(
    site: Callable[..., Site], tmp_path: Path
) -> None:
    here = site()
    here.send()
    (bucket,) = tmp_path.rglob("*full*.00000")
    away = bucket.rename(tmp_path / "away")
    there, listed, entries = ArchiveSource(here.archive), [0], here.archive.entries

    def count(**more: Any) -> list[ArchivedVersion]:
        listed[0] += 1
        return entries(**more)

    here.archive.entries = count  # type: ignore[method-assign]
    with pytest.raises(VersionGone, match=bucket.name):
        there.advance(timeout_s=5.0)
    assert listed[0] == 2
    with pytest.raises(VersionGone, match=bucket.name):
        there.advance(timeout_s=5.0, wait_s=0.1, every_s=0.1)
    assert listed[0] <= 7
    away.rename(bucket)
    assert there.advance(timeout_s=DEADLINE_S)


def test_on_a_disk_buckets_are_synced_before_their_manifest(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", note)
    site().send()
    names = [one.rpartition(".")[2] for one in synced if "-full-" in one]
    assert (names[0], names[-1]) == ("00000", "json")


def test_an_adapter_for_the_servers_does_not_put_an_archive_out_of_its_fleet(
    site: Callable[..., Site], tmp_path: Path
) -> None:
    here = site(anchor_every=20)
    here.send()
    tensors = StateDictSource({"a": torch.ones(2)})
    here.trainer.send_adapter("math", tensors, {}, for_base=False, deadline_s=DEADLINE_S)
    for _ in range(2):
        here.send()
        assert here.fleet.last is not None
        assert set(here.fleet.last.committed) == {"here", "archive"}
    assert [one.ready for one in here.fleet.status()] == [True, True]
    assert len(list(tmp_path.rglob("*-delta-*.json"))) == 2


def test_waiting_for_a_version_ends_with_it(site: Callable[..., Site]) -> None:
    here = site()
    there = ArchiveSource(here.archive)
    here.send()
    assert there.advance(timeout_s=DEADLINE_S, wait_s=10.0)
    assert not there.advance(timeout_s=DEADLINE_S, wait_s=0.05, every_s=0.01)


def test_what_an_archive_cannot_do_is_said(tmp_path: Path, site: Callable[..., Site]) -> None:
    with pytest.raises(ConfigError, match="gopher"):
        Archive("gopher://there")
    with pytest.raises(InvalidInput, match="0 full versions"):
        ArchiveReceiver(Archive(f"file://{tmp_path}"), keep=0)
    with pytest.raises(VersionGone, match="advance"):
        next(ArchiveSource(Archive(f"file://{tmp_path}")).tensors())
    here = site()
    here.send()
    control = Control(here.engines[1], here.receiver)
    with pytest.raises(NotSupported):
        control.compute_weight_checksums()


@pytest.mark.timeout(20)
def test_names_that_lead_in_a_circle_lead_nowhere() -> None:
    entries = [
        ArchivedVersion(1, "r", *one, "") for one in ((4, "full", 0), (5, "delta", 5), (5, "delta", 4), (6, "delta", 6))
    ]
    assert path_to_newest(sorted(entries), "r", 5) == []
    entries = [ArchivedVersion(1, "r", *one, "") for one in ((4, "delta", 5), (5, "delta", 4), (6, "full", 0))]
    assert [one.version for one in path_to_newest(sorted(entries), "r", 4)] == [6]


@given(st.data())
def test_the_way_to_the_newest_version_is_whole(data: st.DataObject) -> None:
    """From full versions and differences, of which some were deleted or never written."""
    count = data.draw(st.integers(1, 12))
    entries = []
    for version in range(1, count + 1):
        kinds = data.draw(st.sets(st.sampled_from(["full", "delta"])))
        entries += [
            ArchivedVersion(1, "r", version, kind, version - 1 if kind == "delta" else 0, "") for kind in sorted(kinds)
        ]
    at = data.draw(st.none() | st.integers(1, count))
    path = path_to_newest(sorted(entries), "r", at)
    newest = max((one.version for one in entries), default=at)
    bases = {one.version for one in entries if one.kind == "full"} | ({at} if at else set())
    by_base = {one.base: one.version for one in entries if one.kind == "delta"}
    reached = {at or 0}
    for base in bases:
        while base != newest and base in by_base:
            base = by_base[base]
        reached.add(base)
    if path:
        first, *rest = path
        assert first.kind == "full" or first.base == at
        assert all(one.kind == "delta" and one.base == before.version for before, one in zip(path, rest, strict=False))
        assert path[-1].version == (newest if newest in reached else max(reached))
    else:
        assert at == newest or (newest not in reached and max(reached) == (at or 0))
    assert (missing_version(sorted(entries), at) is None) == (newest in reached or newest is None)


def test_a_version_that_is_missing_on_the_way_is_named_and_what_is_before_it_is_taken(
    site: Callable[..., Site], tmp_path: Path
) -> None:
    here = site(anchor_every=20)
    for _ in range(3):
        here.send()
    early = ArchiveSource(here.archive)
    assert early.advance(timeout_s=DEADLINE_S)
    before = [tensor.clone() for tensor in here.weights.values()]
    for _ in range(2):
        here.send()
    (hole,) = tmp_path.rglob("*000004-delta-3-*.json")
    away = hole.rename(tmp_path / "away")
    late = ArchiveSource(here.archive)
    assert late.advance(timeout_s=DEADLINE_S)
    for source in (early, late):
        assert source.version == 3
        assert has(source, dict(zip(here.weights, before, strict=True)))
        with pytest.raises(VersionGone, match=r"version 4 of run .* is missing .* version 5"):
            source.advance(timeout_s=DEADLINE_S)
    away.rename(hole)
    assert early.advance(timeout_s=DEADLINE_S)
    hole.unlink()
    here.send(full=True)
    assert late.advance(timeout_s=DEADLINE_S)
    assert (early.version, late.version) == (5, 6)


def test_who_sees_a_version_at_the_archive_can_wait_until_it_is_written(tmp_path: Path) -> None:
    """However soon: the version is said to be there when its upload is known."""
    writing = ArchiveReceiver(Archive(f"file://{tmp_path}"))._writing
    seen: list[bool] = []

    class Watched(type(writing)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "tag":
                seen.append(self._upload is not None)
            super().__setattr__(name, value)

    writing.__class__ = Watched
    manifest = seal(plan([]), {}, version=1, epoch="e")
    writing.commit(_Came(manifest, {}), VersionInfo(version=1), 1.0)
    writing.settle(DEADLINE_S)
    assert seen == [True]


def test_an_engine_that_is_shut_down_has_written_its_last_version(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site()
    put, leaving = here.archive.put, threading.Event()

    def put_then(*args: Any, **more: Any) -> None:
        assert leaving.wait(DEADLINE_S)
        put(*args, **more)

    monkeypatch.setattr(here.archive, "put", put_then)
    here.trainer.send_weights(deadline_s=DEADLINE_S)
    flush = here.receiver.flush
    monkeypatch.setattr(here.receiver, "flush", lambda timeout_s: (leaving.set(), flush(timeout_s)))
    here.engines[1].shutdown()
    leaving.set()
    assert [one.version for one in here.archive.entries(timeout_s=DEADLINE_S)] == [1]
