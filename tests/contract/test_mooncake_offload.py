"""Mooncake's pool with a disk behind its memory: the real engine, where TQ_ENGINES names MooncakeStore."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Child, until
from storage_engines import Intruder, MooncakeRunning

import transfer_queue as tq
from transfer_queue.errors import ConfigError, DataLost, StoreFull
from transfer_queue.storage.engines.deadline import GuardedEngine

ROWS, WIDTH = 8, 1 << 19  # of a put
PUTS = 7  # of which memory has 3; what is written or read stays there for 10 s, Mooncake's lease
SEGMENT = 64 << 20
MIB = 1 << 20
NBYTES = 16 * MIB


@pytest.fixture(scope="module", autouse=True)
def opened_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the library opens once and keeps is no leak of a test."""
    if "MooncakeStore" not in os.environ.get("TQ_ENGINES", ""):
        pytest.skip("make test-engines runs it")
    running = MooncakeRunning(tmp_path_factory.mktemp("once"))
    GuardedEngine(running.name, running.settings(), False, 20.0).close(20.0)
    running.close()


def conf(directory: Path, offload: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    wanted = {
        "enabled": True, "file_storage_path": str(directory), "heartbeat_interval_seconds": 1,
        "local_buffer_size_bytes": 64 << 20, **(offload or {}),
    }  # fmt: skip
    section = {
        "pool": True, "master_server_address": "127.0.0.1:0", "global_segment_size": SEGMENT, "offload": wanted, **more,
    }  # fmt: skip
    return {"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": section}, "client": {"timeout_s": 20.0}}


@pytest.fixture
def client(service: Callable[..., tq.TransferQueueClient], tmp_path: Path) -> tq.TransferQueueClient:
    return service(**conf(tmp_path))


@pytest.fixture
def intruder(client: tq.TransferQueueClient) -> Iterator[Intruder]:
    found = Intruder(client.session.config["engine"], client.session.service_id)
    yield found
    found.close()


def numbers(value: int) -> torch.Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) + value


def put(number: int) -> None:
    tq.kv_batch_put(keys=keys(number), partition_id=f"p{number}", fields={"x": numbers(number)})


def put_until_full(why: str) -> int:
    """How many were stored before one was refused."""
    stored: list[int] = []

    def fill() -> None:
        for number in range(PUTS):
            put(number)
            stored.append(number)

    with pytest.raises(StoreFull, match=why):
        fill()
    assert stored
    return len(stored)


def got(number: int, rows: slice = slice(None)) -> torch.Tensor:
    found = tq.kv_batch_get(keys=keys(number)[rows], partition_id=f"p{number}", select_fields=["x"])["x"]
    return torch.stack(list(found.unbind()))


def keys(number: int) -> list[str]:
    return [f"{number} {row}" for row in range(ROWS)]


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("tq-offload-*/*.bucket"))


def moved(directory: Path) -> None:
    """Rows of more than the memory has, of which the first are on the disk."""
    for number in range(PUTS):
        put(number)
    assert len(files(directory)) >= PUTS - SEGMENT // NBYTES


def test_rows_for_which_memory_has_no_room_come_back_from_the_disk(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    moved(tmp_path)
    for number in range(PUTS):
        assert torch.equal(got(number), numbers(number))
        assert torch.equal(got(number, slice(2, 3)), numbers(number)[2:3])
    assert client.stats()["engine_nbytes_used"] > SEGMENT


def test_the_files_of_what_is_cleared_are_deleted_and_the_directory_with_the_service(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    moved(tmp_path)
    for number in range(PUTS):
        client.clear_partition(f"p{number}")
    put(PUTS)
    client.clear_partition(f"p{PUTS}")
    until(lambda: not files(tmp_path), "the files deleted", 30)
    tq.close()
    assert not list(tmp_path.iterdir())


def on_disk_only(intruder: Intruder) -> int:
    """The number of a block that is no longer in memory."""
    engine: Any = intruder.engine.engine
    for block in range(1, PUTS + 1):
        if engine._on_disk([f"tq/{intruder._service.hex()}/{block}"]):
            return block
    raise AssertionError("all blocks are in memory")


def file_of(intruder: Intruder, block: int, directory: Path) -> Path:
    key = f"tq/{intruder._service.hex()}/{block}".encode() + b"\x1a"
    return next(path for path in files(directory) if key in path.with_suffix(".meta").read_bytes())


@pytest.mark.parametrize("what", ["gone", "short", "a bit"])
def test_a_file_that_is_gone_or_has_other_bytes_is_data_lost_and_others_are_not(
    client: tq.TransferQueueClient, intruder: Intruder, tmp_path: Path, what: str
) -> None:
    moved(tmp_path)
    block = on_disk_only(intruder)
    path = file_of(intruder, block, tmp_path)
    if what == "gone":
        path.unlink()
    elif what == "short":
        os.truncate(path, 8 * MIB)
    else:
        with path.open("r+b") as file:
            file.seek(8 * MIB)
            byte = file.read(1)[0]
            file.seek(8 * MIB)
            file.write(bytes([byte ^ 1]))
    with pytest.raises(DataLost, match=f"partition 'p{block - 1}'" if what != "a bit" else "p"):
        got(block - 1)
    for number in range(PUTS):
        if number != block - 1:
            assert torch.equal(got(number), numbers(number))


def test_when_the_disk_takes_no_more_puts_are_refused_and_nothing_is_lost(
    service: Callable[..., tq.TransferQueueClient], tmp_path: Path
) -> None:
    client = service(**{**conf(tmp_path), "client": {"timeout_s": 12.0}})
    folder = next(tmp_path.glob("tq-offload-*"))
    folder.rename(tmp_path / "away")
    stored = put_until_full("offload")
    (tmp_path / "away").rename(folder)
    put(PUTS)
    for number in [*range(stored), PUTS]:
        assert torch.equal(got(number), numbers(number))
    assert client.stats()["engine_nbytes_used"] >= (stored + 1) * NBYTES


def test_what_could_not_be_read_back_stays_in_memory(
    service: Callable[..., tq.TransferQueueClient], tmp_path: Path
) -> None:
    service(**{**conf(tmp_path, {"local_buffer_size_bytes": 24 * MIB}), "client": {"timeout_s": 3.0}})
    for number in range(put_until_full(None)):
        assert torch.equal(got(number), numbers(number))
    assert not files(tmp_path)


def test_many_processes_read_from_the_disk_at_once(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    moved(tmp_path)
    code = f"""
        import torch, transfer_queue as tq
        tq.init()
        wanted = torch.arange({ROWS * WIDTH}, dtype=torch.float32).view({ROWS}, {WIDTH})
        for turn in range(2):
            for number in range({PUTS}):
                keys = [f"{{number}} {{row}}" for row in range({ROWS})]
                found = tq.kv_batch_get(keys=keys, partition_id=f"p{{number}}")["x"]
                assert torch.equal(torch.stack(list(found.unbind())), wanted + number)
        print("done", flush=True)
        tq.close()
    """
    children = [Child(code) for _ in range(4)]
    for child in children:
        assert child.line() == "done"
        child.finish()


def test_a_master_that_is_not_ours_is_refused(service: Callable[..., tq.TransferQueueClient], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConfigError, match="master_server_address: one answers"):
            service(**conf(tmp_path, master_server_address=f"127.0.0.1:{port}"))
    with pytest.raises(ConfigError, match="auto_init: with offload"):
        service(**conf(tmp_path, auto_init=False, metadata_server="P2PHANDSHAKE"))
    with pytest.raises(ConfigError, match="hard_pin: what is pinned"):
        service(**conf(tmp_path, hard_pin=True))
    assert not list(tmp_path.iterdir())
