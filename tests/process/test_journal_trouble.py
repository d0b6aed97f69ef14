"""Journals that cannot be kept, or not be read: damage, missing files, other services, full disks, no directory."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import until
from hosts import CLIENT, LARGE, Host, firsts
from test_arena_limits import SMALL_DISK
from test_journal import Machine, Start, fetch, lose_power, put
from test_standby import kill, standby_of

from transfer_queue import checkpoint
from transfer_queue.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    JournalCorrupt,
    JournalInUse,
    JournalUnsupported,
    StoreFull,
)
from transfer_queue.server.journal.files import Head, framed


@pytest.fixture
def machine(start_host: Start, tmp_path: Path) -> Machine:
    return Machine(start_host, tmp_path / "journal")


# what is refused


def test_a_journal_has_one_server(machine: Machine) -> None:
    standby_of(machine.host.client)
    with pytest.raises(JournalInUse, match=str(machine.directory)):
        Host(host="", durability="machine", journal_dir=str(machine.directory))
    kill(machine.host.client.stats()["pid"])
    with pytest.raises(JournalInUse):
        Host(host="", durability="machine", journal_dir=str(machine.directory))
    put(machine.host.client, 1.0)


def test_a_write_that_was_not_finished_is_left_out(machine: Machine) -> None:
    meta = put(machine.host.client, 1.0)
    machine.lose_power()
    with open(machine.files("log")[-1], "ab") as file:
        file.write(b"TQJ\n" + bytes(300))
    assert firsts(machine.boot().client.get_data(meta)) == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["log", "snapshot", "blocks"])
def test_a_damaged_file_is_named_and_left_as_it_is(machine: Machine, kind: str) -> None:
    for number in range(3):
        put(machine.host.client, float(number), width=LARGE)
    machine.lose_power()
    path = machine.files(kind)[0]
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalCorrupt, match=str(path)):
        machine.boot()
    assert path.read_bytes() == bytes(data)
    data[600] ^= 1
    path.write_bytes(data)
    assert len(fetch(machine.boot().client, 6).global_indexes) == 6


@pytest.mark.parametrize("kind", ["log", "snapshot", "blocks"])
def test_a_missing_file_is_named(machine: Machine, kind: str, tmp_path: Path) -> None:
    put(machine.host.client, 1.0, width=LARGE)
    machine.lose_power()
    path = machine.files(kind)[0]
    path.rename(tmp_path / "aside")
    with pytest.raises(JournalCorrupt, match="missing"):
        machine.boot()
    (tmp_path / "aside").rename(path)
    assert len(fetch(machine.boot().client, 2).global_indexes) == 2


def test_another_format_is_refused(machine: Machine) -> None:
    machine.lose_power()
    path = machine.files("snapshot")[0]
    path.write_bytes(b"".join(framed(0, [msgspec.msgpack.encode(Head(9, "snapshot", 0, 0, 1))])))
    with pytest.raises(JournalUnsupported, match="format 9"):
        machine.boot()


def test_another_sampler_is_refused(machine: Machine) -> None:
    put(machine.host.client, 1.0)
    machine.lose_power()
    with pytest.raises(InvalidInput, match=f"journal in {machine.directory} .* sampler"):
        machine.boot(sampler={"class": "RankAwareSampler"})


@pytest.mark.parametrize("removed", ["runs/journal", "runs"])
def test_a_journal_that_is_removed_promises_nothing_and_the_rows_can_be_saved(
    start_host: Start, tmp_path: Path, removed: str
) -> None:
    settings = {"client": {**CLIENT, "timeout_s": 1.0}}
    machine = Machine(lambda **more: start_host(**{**settings, **more}), tmp_path / "runs" / "journal")
    client = machine.host.client
    meta = put(client, 1.0)
    standby_of(client)
    shutil.rmtree(tmp_path / removed)
    with pytest.raises(DeadlineExceeded):  # it is there, and not on the disk
        put(client, 2.0, partition="q")
    for turn in range(2):
        with pytest.raises(StoreFull, match="was removed"):
            put(client, 2.0, partition="q")
        assert firsts(client.get_data(meta)) == [1.0, 1.0]
        checkpoint.save(client.session, tmp_path / "saved")
        if not turn:
            kill(client.stats()["pid"])
            until(lambda: client.stats()["takeovers"] == 1, "the standby")
    host = machine.reboot()
    checkpoint.load(host.client.session, tmp_path / "saved")
    assert firsts(host.client.get_data(fetch(host.client, 2))) == [1.0, 1.0]


def test_a_journal_whose_lock_was_cleared_away_goes_on_also_after_a_takeover(machine: Machine) -> None:
    client = machine.host.client
    put(client, 1.0)
    standby_of(client)
    (machine.directory / "lock").unlink()
    put(client, 2.0)
    kill(client.stats()["pid"])
    until(lambda: client.stats()["takeovers"] == 1, "the standby")
    put(client, 3.0)
    assert len(fetch(machine.reboot().client, 6).global_indexes) == 6


def test_a_journal_that_is_back_after_a_takeover_is_taken_up_again(machine: Machine, tmp_path: Path) -> None:
    client = machine.host.client
    put(client, 1.0)
    cleared = put(client, 2.0, width=LARGE)
    standby_of(client)
    machine.directory.rename(tmp_path / "away")
    kill(client.stats()["pid"])
    until(lambda: client.stats()["takeovers"] == 1, "the standby")
    with pytest.raises(StoreFull, match="was removed"):
        put(client, 3.0, width=LARGE)
    with ThreadPoolExecutor(1) as threads:
        clearing = threads.submit(client.clear_samples, cleared)
        (tmp_path / "away").rename(machine.directory)
        clearing.result()
    metas = [put(client, 4.0), put(client, 5.0, width=LARGE)]
    client = machine.reboot().client
    assert [firsts(client.get_data(meta)) for meta in metas] == [[4.0, 4.0], [5.0, 5.0]]
    assert len(fetch(client, 6).global_indexes) == 6, "and what was there before"


def test_who_takes_over_leaves_the_journal_alone_that_another_server_began_in_its_place(machine: Machine) -> None:
    first = machine.host
    put(first.client, 1.0)
    standby_of(first.client)
    shutil.rmtree(machine.directory)
    second = machine.boot()
    meta = put(second.client, 2.0)
    kill(first.client.stats()["pid"])
    until(lambda: first.client.stats()["takeovers"] == 1, "the standby")
    with pytest.raises(StoreFull, match="was removed"):
        put(first.client, 3.0)
    lose_power(first)
    assert firsts(machine.reboot().client.get_data(meta)) == [2.0, 2.0]


def test_a_journal_and_the_policy_go_together(service: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.journal_dir"):
        service(server={"durability": "machine"})
    with pytest.raises(ConfigError, match=r"server\.journal_dir.*machine, or null"):
        service(server={"durability": "process", "journal_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"server\.journal_dir: an empty path"):
        service(server={"journal_dir": ""})


FULL_DISK = """
import contextlib

def start():
    tq.init(dict(server=dict(journal_dir=os.path.join(where, "journal")), client=dict(timeout_s=2.0)))
    return tq.get_client()

def put(name, nbytes):
    client.put({{"x": torch.full((8, int(nbytes) // 8), ord(name), dtype=torch.uint8)}}, partition_id=name)

def total(name):
    meta = client.get_meta(["x"], 8, name, task_name="look")
    client.reset_consumption(name, "look")
    return sum(int(row.sum(dtype=torch.int64)) for row in client.get_data(meta)["x"]) // ord(name)

def refused(call):
    try:
        call()
    except StoreFull as error:
        assert "disk of the journal" in str(error), error
        return True
"""


def test_a_full_disk_refuses_rows_and_keeps_promises(child: Any, tmp_path: Path) -> None:
    code = """
client = start()
put("a", 16 * MIB)
put("b", 16 * MIB)
put("c", 16 * MIB)
assert refused(lambda: put("d", 16 * MIB))
assert sorted(client.get_partition_list()) == ["a", "b", "c"], "what was refused left nothing"
meta = client.get_meta(["x"], 4, "a", task_name="t", lease_s=60)
client.ack(meta)
client.clear_partition("b")
put("d", 16 * MIB)
tq.kv_put("key", "keyed", {"x": torch.zeros(1)})
pool = tq.group_pool("groups")
fill("other", 64 * MIB)
for number in range(2000):
    if refused(lambda: client.put({"x": torch.zeros(1, 60000, dtype=torch.uint8)}, partition_id="small")):
        break
assert 0 < number < 2000, number
assert refused(lambda: pool.open("group", 2, prompt={"text": "x" * 100000})), "it would take the room of others"
assert len(client.kv_retrieve_meta(["key"], "keyed")) == 1, "what is there can be read"
client.ack(client.get_meta(["x"], 4, "a", task_name="t", lease_s=60))
kept, stats = total("d"), client.stats()
pids = stats["standby"], stats["pid"]
for pid in pids:
    os.kill(pid, 9)
empty("other")
for pid in pids:
    while os.path.exists(f"/proc/{pid}/fd/0"):
        pass
tq.init()
tq.close()
client = start()
assert total("d") == 16 * MIB == kept
assert len(client.get_meta(["x"], 1, "small", task_name="t").global_indexes) == 1
with contextlib.suppress(TimeoutError):
    client.get_meta(["x"], 1, "a", task_name="t", timeout_s=0)
    raise SystemExit("acknowledged rows came again")
tq.close()
print("good", flush=True)
"""
    process = child(SMALL_DISK.format(where=str(tmp_path)) + FULL_DISK.format() + code)
    printed = process.finish()
    if printed == "not permitted":
        pytest.skip("file systems cannot be mounted here")
    assert printed == "good"
