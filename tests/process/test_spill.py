"""Rows that have no room in memory lie on a disk (R8), and are read as all others are."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import until
from hosts import Host
from test_standby import kill

import transfer_queue as tq
from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.errors import ConfigError, DataLost, StoreFull

MIB = 1 << 20
BUDGET = 64 * MIB
ROWS = 8
Service = Callable[..., tq.TransferQueueClient]


@pytest.fixture
def client(service: Service, tmp_path: Path) -> tq.TransferQueueClient:
    """A client of a service with 64 MiB of memory and a disk."""
    return service(**store(spill_dir=str(tmp_path)), client={"timeout_s": 20.0})


def store(**simple: Any) -> dict[str, Any]:
    return {"backend": {"SimpleStorage": {"budget_nbytes": BUDGET, **simple}}}


def column(number: int, nbytes: int = 8 * MIB) -> torch.Tensor:
    """Rows that no other number gives."""
    values = np.random.default_rng(number).integers(0, 255, nbytes, np.uint8)
    return torch.from_numpy(values).view(ROWS, -1)


def put(client: tq.TransferQueueClient, numbers: range) -> None:
    for number in numbers:
        client.put({"x": column(number)}, partition_id=f"p{number}")


def rows_of(client: tq.TransferQueueClient, number: int) -> tq.BatchMeta:
    return client.get_meta(["x"], ROWS, f"p{number}", mode="force_fetch")


def read(client: tq.TransferQueueClient, number: int, **more: Any) -> torch.Tensor:
    data = client.get_data(rows_of(client, number), dense=True, **more)
    column: torch.Tensor = data["x"]
    return column


def check(client: tq.TransferQueueClient, numbers: range) -> None:
    for number in numbers:
        assert torch.equal(read(client, number), column(number)), number


def on_disk(client: tq.TransferQueueClient) -> int:
    found: int = client.stats()["spill_nbytes_used"]
    return found


def used(client: tq.TransferQueueClient) -> int:
    """Bytes in memory and on the disk; a block that is being moved is in both."""
    stats = client.stats()
    found: int = stats["arena_nbytes_used"] + stats["spill_nbytes_used"]
    return found


def test_four_times_the_memory_is_stored_and_read_back(client: tq.TransferQueueClient) -> None:
    put(client, range(32))
    assert client.stats()["arena_nbytes_used"] <= BUDGET
    until(lambda: used(client) == 32 * 8 * MIB, "the end of spilling")
    check(client, range(32))
    check(client, range(32))


def test_rows_of_a_disk_are_views_that_nobody_else_sees_changed(client: tq.TransferQueueClient) -> None:
    put(client, range(12))
    until(lambda: on_disk(client) > 0, "spilling")
    mine = read(client, 0)
    mine.zero_()
    assert torch.equal(read(client, 0), column(0))
    some = client.get_data(rows_of(client, 0).select_samples([5, 1]), dense=True)["x"]
    assert torch.equal(some, column(0)[[5, 1]])
    assert torch.equal(read(client, 0, copy=True), column(0))


def test_cleared_rows_give_the_disk_back(client: tq.TransferQueueClient) -> None:
    put(client, range(16))
    for number in range(16):
        client.clear_partition(f"p{number}")
    until(lambda: on_disk(client) == 0, "the end of what was moved")
    put(client, range(16, 32))
    check(client, range(16, 32))


def test_a_put_fails_only_when_memory_and_disk_are_full(service: Service, tmp_path: Path) -> None:
    client = service(**store(spill_dir=str(tmp_path), spill_nbytes=4 * 8 * MIB), client={"timeout_s": 5.0})
    put(client, range(12))
    with pytest.raises(StoreFull, match=str(tmp_path)):
        put(client, range(12, 13))
    assert on_disk(client) == 4 * 8 * MIB
    check(client, range(12))
    client.clear_partition("p3")
    put(client, range(12, 13))
    check(client, range(4, 13))


def test_what_readers_hold_stays_in_memory_and_the_others_move(client: tq.TransferQueueClient) -> None:
    put(client, range(4))
    held = [read(client, number) for number in range(4)]
    put(client, range(4, 20))
    for number, column_held in enumerate(held):
        assert torch.equal(column_held, column(number))
    check(client, range(20))


def test_a_server_that_is_killed_while_it_moves_loses_nothing(client: tq.TransferQueueClient) -> None:
    until(lambda: client.stats()["standby"] != 0, "the standby")
    writer = threading.Thread(target=put, args=(client, range(24)))
    writer.start()
    until(lambda: on_disk(client) > 0, "spilling")
    kill(client.stats()["pid"])
    writer.join()
    check(client, range(24))
    assert client.stats()["takeovers"] == 1
    put(client, range(24, 32))
    check(client, range(32))


def test_bytes_that_a_disk_changed_are_not_given_out(client: tq.TransferQueueClient) -> None:
    put(client, range(16))
    until(lambda: on_disk(client) > 0, "spilling")
    moved = [number for number in range(16) if _damaged(client, number)]
    assert moved
    for number in moved:
        with pytest.raises(DataLost, match="other bytes"):
            read(client, number)


def test_rows_that_were_put_alone_are_compared_as_well(service: Service, tmp_path: Path) -> None:
    client = service(**store(spill_dir=str(tmp_path), budget_nbytes=8 * MIB))
    keys = [str(number) for number in range(200)]
    for number, key in enumerate(keys):
        tq.kv_put(key, "p", {"x": column(number, 100_000).view(-1)})
    until(lambda: on_disk(client) > 0, "spilling")
    found = tq.kv_batch_get(keys, "p")["x"]
    assert all(torch.equal(row, column(number, 100_000).view(-1)) for number, row in enumerate(found.unbind()))
    spilled = (key for number, key in enumerate(keys) if _damaged(client, number, 100_000, 70_000))
    damaged = list(itertools.islice(spilled, 31))  # each looks through all that lies on the disk
    assert len(damaged) == 31
    with tq.TransferQueueClient.of(Session(client.address)) as other, pytest.raises(DataLost, match="other bytes"):
        run(other.session, kv.kv_batch_get(other.session, damaged, "p"))


def test_a_checkpoint_of_what_a_disk_changed_is_not_written(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    put(client, range(12))
    until(lambda: on_disk(client) > 0, "spilling")
    assert any(_damaged(client, number) for number in range(12))
    with pytest.raises(DataLost, match="other bytes"):
        tq.save_checkpoint(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def _damaged(client: tq.TransferQueueClient, number: int, nbytes: int = 8 * MIB, place: int = 100_000) -> bool:
    """Change a byte of a column where it lies on the disk; False where it does not lie there."""
    wanted = column(number, nbytes).numpy().tobytes()[:64]
    server = f"/proc/{client.stats()['pid']}/fd"
    for name in os.listdir(server):
        if "memfd" in os.readlink(f"{server}/{name}") or "deleted" not in os.readlink(f"{server}/{name}"):
            continue
        with open(f"{server}/{name}", "r+b", buffering=0) as file:
            for start, data in _written(file.fileno()):
                at = data.find(wanted)
                if at >= 0:
                    (byte,) = os.pread(file.fileno(), 1, start + at + place)
                    os.pwrite(file.fileno(), bytes([byte ^ 1]), start + at + place)
                    return True
    return False


def _written(file: int) -> Iterator[tuple[int, bytes]]:
    """What was written to a file that is mostly holes, and where it begins."""
    end = 0
    with contextlib.suppress(OSError):  # nothing but holes follows
        while True:
            start = os.lseek(file, end, os.SEEK_DATA)
            end = os.lseek(file, start, os.SEEK_HOLE)
            yield start, os.pread(file, end - start, start)


def test_a_checkpoint_has_what_was_moved(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    put(client, range(12))
    until(lambda: on_disk(client) > 0, "spilling")
    tq.save_checkpoint(str(tmp_path / "saved"))
    for number in range(12):
        client.clear_partition(f"p{number}")
    tq.load_checkpoint(str(tmp_path / "saved"))
    check(client, range(12))


def test_small_rows_that_cannot_be_moved_go_to_the_disk_themselves(client: tq.TransferQueueClient) -> None:
    held = [column(number) for number in range(8)]
    metas = [client.put({"x": one}, partition_id="held") for one in held]
    views = [client.get_data(meta, dense=True)["x"] for meta in metas]
    fits = BUDGET - client.stats()["arena_nbytes_used"]
    small = torch.ones(2, 16_000)
    for number in range(fits // small.nbytes + 8):
        tq.kv_put(str(number), "small", {"x": small + number})
    assert on_disk(client) > 0
    assert torch.equal(tq.kv_batch_get(str(number), "small")["x"][0], small + number)
    assert all(torch.equal(mine, one) for mine, one in zip(views, held, strict=True))


# several hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """A controller's server and a unit, both with a disk."""
    spill = {"budget_nbytes": BUDGET, "spill_dir": str(tmp_path)}
    first = Host(**spill)
    second = Host(join=first.tcp, **spill)
    yield first, second
    second.close()
    first.close()


def test_units_have_disks_of_their_own_and_others_read_from_there(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    put(second.client, range(12))
    until(lambda: on_disk(second.client) > 0, "spilling of the unit")
    assert on_disk(first.client) == 0
    check(first.client, range(12))
    put(first.client, range(12, 24))
    until(lambda: on_disk(first.client) > 0, "spilling of the controller's host")
    check(second.client, range(24))


def test_other_hosts_are_not_given_what_a_disk_changed(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    put(second.client, range(12))
    until(lambda: on_disk(second.client) > 0, "spilling of the unit")
    moved = [number for number in range(12) if _damaged(second.client, number)]
    some = [rows_of(first.client, number).select_samples([0, 3]) for number in moved]
    for meta in some:
        with pytest.raises(DataLost, match="other bytes"):
            first.client.get_data(meta)
    check(first.client, range(moved[-1] + 1, 12))


# settings


def test_a_disk_that_is_none_or_too_small_is_refused_at_the_start(service: Service, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="spill_dir"):
        service(**store(spill_dir=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="spill_nbytes"):
        service(**store(spill_dir=str(tmp_path), spill_nbytes=1 << 60))
    with pytest.raises(ConfigError, match="where to"):
        service(**store(spill_nbytes=1 << 20))
    with pytest.raises(ConfigError, match="is memory"):
        service(**store(spill_dir="/dev/shm"))


def test_a_put_that_is_larger_than_memory_goes_to_the_disk(client: tq.TransferQueueClient) -> None:
    large = column(1, 2 * BUDGET)
    meta = client.put({"x": large}, partition_id="large")
    assert torch.equal(client.get_data(meta, dense=True)["x"], large)
    put(client, range(12))
    check(client, range(12))
