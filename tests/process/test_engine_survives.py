"""Rows that lie in an engine besides the server survive it: a standby takes over, and a journal brings them back."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import Child, until
from fsspec.implementations.local import LocalFileSystem
from hosts import LARGE, Host, firsts, rows
from s3 import object_store
from test_journal import lose_power
from test_standby import kill, standby_of

from transfer_queue import checkpoint
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run
from transfer_queue.client.engine import EngineAccess
from transfer_queue.client.operations.kv import kv_clear
from transfer_queue.client.session import Session
from transfer_queue.errors import ConfigError, DataLost, ServiceUnavailable
from transfer_queue.server.journal.files import numbers
from transfer_queue.storage.engines import engine_class
from transfer_queue.wire.address import parse_address

Start = Callable[..., Host]
SEED, TURNS = int(os.environ.get("TQ_JOURNAL_SEED", "7")), int(os.environ.get("TQ_JOURNAL_TURNS", "6"))


class Site:
    """A host with a directory for the engine's files, and one for the journal, that loses its power."""

    def __init__(self, start: Start, directory: Path) -> None:
        self._start = start
        self.files = directory / "files"
        self.files.mkdir()
        self.url = f"file://{self.files}"
        self.journal = directory / "journal"
        self.host: Host

    def settings(self) -> dict[str, Any]:
        return {"engine": "Files", "engine_settings": {"url": self.url}, "host": ""}

    def boot(self, **more: Any) -> Host:
        self.host = self._start(
            **{**self.settings(), "durability": "machine", "journal_dir": str(self.journal), **more}
        )
        return self.host

    def block(self, number: int) -> Path:
        """The file of the first life's block of that number."""
        return next(self.files.glob(f"tq-*-{number}"))

    def lose_power(self) -> None:
        lose_power(self.host)

    def reboot(self, **more: Any) -> Host:
        self.lose_power()
        return self.boot(**more)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.files.glob("tq-*"))


@pytest.fixture
def site(start_host: Start, tmp_path: Path) -> Site:
    return Site(start_host, tmp_path)


@pytest.fixture(params=["files", pytest.param("store", marks=pytest.mark.keeps_sockets)])
def any_site(request: pytest.FixtureRequest, site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """With the files in a directory, or in an object store, which has them in one."""
    if request.param == "files":
        yield site
        return
    with object_store(site.files.parent / "store") as options:
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        monkeypatch.setenv("FSSPEC_S3", json.dumps(options))
        site.url, site.files = "s3://bucket/tq", site.files.parent / "store" / "bucket" / "tq"
        site.files.mkdir()
        yield site
        site.host.close()


def put(host: Host, value: float, partition: str = "p", **more: Any) -> Any:
    return host.client.put(rows(value, 2, LARGE), partition_id=partition, **more)


def found(host: Host, meta: Any) -> list[float]:
    return firsts(host.client.get_data(meta))


# a standby


def test_a_server_that_is_killed_loses_no_row_and_its_clients_go_on(any_site: Site, start_host: Start) -> None:
    site = any_site
    host = site.host = start_host(**site.settings(), durability="process")
    metas = [put(host, 1.0), put(host, 2.0)]
    for turn in range(3):
        standby_of(host.client)
        kill(host.client.stats()["pid"])
        metas.append(put(host, 3.0 + turn))
    assert [found(host, meta) for meta in metas] == [[value, value] for value in (1.0, 2.0, 3.0, 4.0, 5.0)]
    host.client.clear_partition("p")
    until(lambda: not site.names(), "the deletion of all blocks, those of before the kills as well")


def test_a_place_below_the_directory_of_the_server_is_the_same_for_clients_elsewhere(
    site: Site, start_host: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(site.files.parent)
    settings = {**site.settings(), "engine_settings": {"url": site.files.name}}
    host = site.host = start_host(**settings, durability="process")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    meta = put(host, 1.0)
    kill(host.client.stats()["pid"])
    assert found(host, meta) == [1.0, 1.0]
    assert len(site.names()) == 1


def test_a_put_that_is_amid_its_writing_when_the_server_is_killed_is_carried_out(site: Site, start_host: Start) -> None:
    host = site.host = start_host(**site.settings(), durability="process")
    standby_of(host.client)
    child = Child(f"""
        import torch, transfer_queue as tq
        from transfer_queue.client.client import TransferQueueClient
        from transfer_queue.client.session import Session
        from transfer_queue.storage.engines import sealed
        from transfer_queue.wire.address import parse_address
        client = TransferQueueClient.of(Session(parse_address({host.server.address!r})))
        seal = sealed.seal
        def wait(*args):
            print("in the middle", flush=True)
            input()
            seal(*args)
        sealed.seal = wait
        client.put({{"x": torch.full((2, {LARGE}), 6.0)}}, partition_id="q")
        print("put", flush=True)
        client.close()
    """)
    assert child.line() == "in the middle"
    kill(host.client.stats()["pid"])
    child.say("go on")
    assert child.line() == "put"
    child.finish()
    assert found(host, host.client.get_meta(["x"], 2, "q", task_name="t")) == [6.0, 6.0]


def test_blocks_of_a_client_that_died_with_the_server_are_deleted(site: Site, start_host: Start) -> None:
    host = site.host = start_host(**site.settings(), durability="process", away_s=0.5)
    standby_of(host.client)
    child = Child(f"""
        import time, torch, transfer_queue as tq
        from transfer_queue.client.client import TransferQueueClient
        from transfer_queue.client.engine import EngineAccess
        from transfer_queue.client.session import Session
        from transfer_queue.wire.address import parse_address
        client = TransferQueueClient.of(Session(parse_address({host.server.address!r})))
        write = EngineAccess.write
        def stop(*args):
            write(*args)
            print("written", flush=True)
            time.sleep(100)
        EngineAccess.write = stop
        client.put({{"x": torch.zeros(2, {LARGE})}}, partition_id="q")
    """)
    assert child.line() == "written"
    assert len(site.names()) == 1
    kill(host.client.stats()["pid"])
    child.close()
    until(lambda: not site.names(), "the deletion of a block that nobody will commit", 30)
    assert host.client.stats()["engine_nbytes_used"] == 0


def test_rows_that_the_engine_lost_are_lost_in_the_standby_too_and_new_ones_are_not(
    site: Site, start_host: Start
) -> None:
    host = site.host = start_host(**site.settings(), durability="process")
    standby_of(host.client)
    lost, kept = put(host, 1.0), put(host, 2.0)
    site.block(1).unlink()
    with pytest.raises(DataLost):
        found(host, lost)
    offered = host.client.get_meta(["x"], 2, "p", task_name="t")
    kill(host.client.stats()["pid"])
    assert found(host, kept) == [2.0, 2.0]
    assert offered.indexes.tolist() == kept.indexes.tolist()
    with pytest.raises(DataLost):
        found(host, lost)
    more = put(host, 3.0)
    assert host.client.get_meta(["x"], 2, "p", task_name="t").indexes.tolist() == more.indexes.tolist()


def test_a_directory_that_is_away_for_a_while_loses_no_row(site: Site, start_host: Start) -> None:
    host = site.host = start_host(**site.settings(), durability="process")
    meta = put(host, 1.0)
    cleared = put(host, 2.0, "q")
    away = site.files.rename(site.files.parent / "away")
    for other in ("nothing", "an empty directory", "another place"):
        if other != "nothing":
            site.files.mkdir(exist_ok=True)
        if other == "another place":
            (site.files / ".tq-place").write_text("0123456789abcdef")
        with pytest.raises(ServiceUnavailable, match="is a mount away"):
            found(host, meta)
    host.client.clear_samples(cleared)
    until(lambda: host.client.stats()["engine_blocks_to_delete"] == 1, "the block that cannot be deleted")
    shutil.rmtree(site.files)
    away.rename(site.files)
    assert found(host, meta) == [1.0, 1.0]
    until(lambda: len(site.names()) == 1, "the deletion of what was cleared meanwhile")


@pytest.fixture
def apart(site: Site, start_host: Start) -> Path:
    """The mount of `site.host`'s client alone is away: this empty directory is in its place."""
    host = site.host = start_host(**site.settings(), durability="process")
    mount_point = site.files.parent / "mount point"
    mount_point.mkdir()
    told = host.client.session.config["engine"]
    away = {**told, "settings": {**told["settings"], "url": f"file://{mount_point}"}}
    host.client.session.engine = EngineAccess(away, host.client.session.pool)
    return mount_point


def test_a_put_of_a_client_whose_mount_is_away_is_an_error_and_leaves_nothing(site: Site, apart: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="is a mount away"):
        put(site.host, 1.0)
    assert list(apart.iterdir()) == []


def test_a_client_whose_mount_is_away_is_not_told_that_rows_are_gone(site: Site, apart: Path, tmp_path: Path) -> None:
    with closing(TransferQueueClient.of(Session(parse_address(site.host.server.address)))) as other:
        meta = other.put(rows(1.0, 2, LARGE), partition_id="p")
        with pytest.raises(ServiceUnavailable, match="is a mount away"):
            site.host.client.get_data(meta)
        with pytest.raises(ServiceUnavailable, match="is a mount away"):
            checkpoint.save(site.host.client.session, tmp_path / "saved")
        assert firsts(other.get_data(meta)) == [1.0, 1.0]


def test_what_a_checkpoint_misses_is_given_up_so_that_the_next_one_is_saved(
    site: Site, start_host: Start, tmp_path: Path
) -> None:
    host = site.host = start_host(**site.settings(), durability="process")
    lost, kept = put(host, 1.0), put(host, 2.0)
    site.block(1).unlink()
    with pytest.raises(DataLost):
        checkpoint.save(host.client.session, tmp_path / "saved")
    checkpoint.save(host.client.session, tmp_path / "saved")
    with pytest.raises(DataLost):
        found(host, lost)
    assert found(host, kept) == [2.0, 2.0]


def test_an_operator_says_that_a_directory_is_gone_for_good(site: Site, start_host: Start) -> None:
    host = site.host = start_host(**site.settings(), durability="process")
    meta = put(host, 1.0)
    shutil.rmtree(site.files)
    with pytest.raises(ServiceUnavailable) as told:
        found(host, meta)
    place = re.search(r"write (\w+) into that file", str(told.value))
    assert place is not None
    site.files.mkdir()
    (site.files / ".tq-place").write_text(place[1] + "\n")
    with pytest.raises(DataLost):
        found(host, meta)
    assert found(host, put(host, 2.0)) == [2.0, 2.0]


def test_a_look_that_is_not_permitted_is_no_loss(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_class("Files")({"url": site.url}, True)
    room = engine.reserve("key", 8)
    room.seal()

    def refused(path: str, **more: Any) -> Any:
        raise PermissionError(path)

    monkeypatch.setattr(LocalFileSystem, "info", lambda self, path, **more: refused(path))
    with pytest.raises(PermissionError):
        engine.missing(["key"])


def test_rows_of_an_engine_that_were_put_alone_stay_there(site: Site, start_host: Start) -> None:
    """Columns are made of what lies in memory: of the small rows, which are looked at in the same rounds."""
    host = site.host = start_host(**site.settings(), durability="process")
    for number in range(100):
        host.kv_put([f"k{number}"], "p", {"x": torch.full((1, 20_000), float(number))})
        host.kv_put([f"k{number}"], "small", {"x": torch.full((1, 4_000), float(number))})
    until(lambda: host.client.stats()["blocks"] < 150, "the columns made of small rows")
    for number in range(100):
        assert bool((host.kv_get([f"k{number}"], "p")["x"][0] == number).all())
    assert len(site.names()) == 100


# a journal


def test_rows_come_back_after_a_loss_of_power_and_new_ones_lie_apart(any_site: Site) -> None:
    site = any_site
    host = site.boot()
    first = put(host, 1.0)
    host.kv_put(["a", "b"], "keyed", {"x": torch.full((2, LARGE), 7.0)}, [{"n": 1}, {"n": 2}])
    small = host.client.put(rows(3.0, 2), partition_id="small")
    before = site.names()
    host = site.reboot()
    assert found(host, first) == [1.0, 1.0]
    assert [row[0].item() for row in host.kv_get(["b", "a"], "keyed")["x"]] == [7.0, 7.0]
    assert found(host, small) == [3.0, 3.0]
    second = put(host, 2.0)
    assert set(before) < set(site.names()), "what is new has a name that nothing had in the life before"
    host = site.reboot()
    assert [found(host, meta) for meta in (first, second)] == [[1.0, 1.0], [2.0, 2.0]]
    host.client.clear_partition("p")
    host.client.clear_partition("keyed")
    until(lambda: not site.names(), "the deletion of blocks of three lives")


def test_a_writer_of_the_life_before_that_is_late_changes_nothing(site: Site) -> None:
    host = site.boot()
    key = f"tq/{host.client.session.service_id.hex()}/1"
    host = site.reboot()
    meta = put(host, 2.0)
    engine = engine_class("Files")({"url": f"file://{site.files}"}, False)
    room = engine.reserve(key, 4 << 20)
    room.memory[:] = 9
    room.seal()
    assert found(host, meta) == [2.0, 2.0]


def test_a_service_that_ends_in_good_order_is_there_again_with_its_journal(site: Site) -> None:
    meta = put(site.boot(), 1.0)
    site.host.close()
    assert site.names()
    assert found(site.boot(), meta) == [1.0, 1.0]


def test_what_was_cleared_is_deleted_once_the_journal_has_that(site: Site) -> None:
    host = site.boot()
    host.kv_put(["a"], "p", {"x": torch.full((1, LARGE), 1.0)})
    host.kv_put(["a"], "p", {"x": torch.full((1, LARGE), 2.0)})
    until(lambda: len(site.names()) == 1, "the deletion of what was overwritten")
    host = site.reboot()
    assert host.kv_get(["a"], "p")["x"][0][0].item() == 2.0
    host.client.clear_partition("p")
    until(lambda: not site.names(), "the deletion of what was cleared")


def test_what_was_not_deleted_before_the_power_went_is_deleted_after_it(site: Site) -> None:
    host = site.boot()
    put(host, 1.0)
    kept = put(host, 2.0, "q")
    file = site.block(1)
    aside = file.rename(site.files.parent / "aside")
    file.mkdir()
    host.client.clear_partition("p")
    until(lambda: host.client.stats()["engine_blocks_to_delete"] == 1, "the block that cannot be deleted")
    host = site.reboot()  # which writes a snapshot
    until(lambda: host.client.stats()["engine_blocks_to_delete"] == 1, "the attempt after the start")
    site.lose_power()
    file.rmdir()
    aside.rename(file)
    host = site.boot()
    until(lambda: len(site.names()) == 1, "the deletion after the start")
    assert found(host, kept) == [2.0, 2.0]


def test_snapshots_have_the_blocks_and_what_is_still_to_be_deleted(site: Site) -> None:
    host = site.boot()
    metas = [put(host, 1.0 + number) for number in range(3)]
    for number in range(40):
        host.client.put({"y": torch.zeros(1, 60_000)}, partition_id=f"much {number}")
        host.client.clear_partition(f"much {number}")
    before = max(numbers(site.journal, "snapshot"))
    host = site.reboot()
    assert max(numbers(site.journal, "snapshot")) > before, "a start writes one"
    host = site.reboot()
    assert [found(host, meta) for meta in metas] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    until(lambda: len(site.names()) == 3, f"{site.names()} the deletion of all but three")


def test_a_block_that_is_cleared_while_somebody_reads_it_is_deleted_by_the_next_service(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = site.boot()
    read, reads, goes_on = EngineAccess.read, threading.Event(), threading.Event()

    def late(*args: Any) -> Any:
        reads.set()
        goes_on.wait(60)
        return read(*args)

    meta = put(host, 1.0)
    put(host, 2.0, "q")
    monkeypatch.setattr(EngineAccess, "read", late)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(host.client.get_data, meta)
        assert reads.wait(60)
        host.client.clear_partition("p")
        before = max(numbers(site.journal, "snapshot"))
        standby_of(host.client)
        kill(host.client.stats()["pid"])  # whoever takes over writes a snapshot
        until(lambda: max(numbers(site.journal, "snapshot"), default=0) > before, "the snapshot")
        site.lose_power()
        goes_on.set()
        reading.exception()
    site.boot()
    until(lambda: len(site.names()) == 1, "the deletion of what was cleared")


def test_a_standby_with_a_journal_takes_over_and_the_journal_goes_on(site: Site) -> None:
    host = site.boot()
    first = put(host, 1.0)
    standby_of(host.client)
    kill(host.client.stats()["pid"])
    second = put(host, 2.0)
    host.client.clear_samples(first)
    until(lambda: len(site.names()) == 1, "the deletion by the standby")
    standby_of(host.client)
    kill(host.client.stats()["pid"])
    assert found(host, second) == [2.0, 2.0]
    assert found(site.reboot(), second) == [2.0, 2.0]


def test_another_place_than_the_journal_names_is_refused_and_nothing_is_lost(site: Site, tmp_path: Path) -> None:
    meta = put(site.boot(), 1.0)
    site.lose_power()
    (tmp_path / "other").mkdir()
    with pytest.raises(DataLost, match="is not the place of the journal's 1 blocks"):
        site.boot(engine_settings={"url": f"file://{tmp_path / 'other'}"})
    with pytest.raises(ConfigError, match="storage_backend"):
        site.boot(engine="", engine_settings={})
    assert found(site.boot(), meta) == [1.0, 1.0]


def test_a_copy_of_a_journal_deletes_nothing_that_the_journal_needs(
    site: Site, start_host: Start, tmp_path: Path
) -> None:
    host = site.boot()
    meta, other = put(host, 1.0), put(host, 2.0, "q")
    shutil.copytree(site.journal, tmp_path / "copy")
    before = site.names()
    settings = {**site.settings(), "durability": "machine", "journal_dir": str(tmp_path / "copy")}
    for partition in ("p", "q"):
        copy = start_host(**settings)
        copy.client.clear_partition(partition)
        put(copy, 3.0, "r")
        copy.client.clear_partition("r")  # what is deleted is so in order
        until(lambda: site.names() == before, "the deletion of the copy's own block")
        lose_power(copy)
    assert [found(host, one) for one in (meta, other)] == [[1.0, 1.0], [2.0, 2.0]]
    host = site.reboot()
    host.client.clear_partition("p")
    until(lambda: len(site.names()) == 1, "the deletion by the journal itself")


def test_some_files_that_are_gone_are_rows_that_are_lost_and_no_others(site: Site) -> None:
    host = site.boot()
    first, second = put(host, 1.0), put(host, 2.0)
    site.lose_power()
    site.block(1).unlink()
    host = site.boot()
    with pytest.raises(DataLost):
        found(host, first)
    assert found(host, second) == [2.0, 2.0]
    site.block(2).unlink()
    with pytest.raises(DataLost):
        found(host, second)
    host = site.reboot()
    with pytest.raises(DataLost):
        found(host, second)
    assert found(host, put(host, 3.0)) == [3.0, 3.0], "that nothing of before is there was known"


def test_a_file_of_a_machine_that_may_lose_power_is_synced_before_the_put_returns(site: Site) -> None:
    told = site.boot().client.session.config["engine"]
    assert told["settings"]["durable"] is True


def test_a_checkpoint_that_was_loaded_comes_back(site: Site, tmp_path: Path) -> None:
    host = site.boot()
    meta = put(host, 1.0)
    checkpoint.save(host.client.session, tmp_path / "saved")
    host.client.clear_partition("p")
    put(host, 2.0, "q")
    checkpoint.load(host.client.session, tmp_path / "saved")
    host = site.reboot()
    assert found(host, meta) == [1.0, 1.0]
    until(lambda: len(site.names()) == 1, f"{site.names()} the deletion of what was there before")


def test_nothing_that_was_answered_is_lost_at_random_moments(site: Site) -> None:
    dice = random.Random(SEED)
    host = site.boot()
    kept: dict[str, float] = {}
    for turn in range(TURNS):
        for _ in range(dice.randrange(1, 5)):
            keys = sorted({f"k{dice.randrange(6)}" for _ in range(dice.randrange(1, 4))})
            if dice.random() < 0.3:
                run(host.client.session, kv_clear(host.client.session, keys, "p"))
                for key in keys:
                    kept.pop(key, None)
            else:
                value = float(dice.randrange(1000))
                width = dice.choice([4, LARGE])
                host.kv_put(keys, "p", {"x": torch.full((len(keys), width), value)})
                kept.update(dict.fromkeys(keys, value))
        if dice.random() < 0.4:
            standby_of(host.client)
            kill(host.client.stats()["pid"])
        else:
            host = site.reboot()
        found = {key: host.kv_get([key], "p")["x"][0][0].item() for key in kept}
        assert found == kept, f"turn {turn} of seed {SEED}"
    host.client.clear_partition("p")
    until(lambda: not site.names(), "the deletion of everything")
