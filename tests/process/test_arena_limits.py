"""Arenas on a file system that is full, and arenas that somebody tries to truncate: nobody dies, nothing is lost."""

from __future__ import annotations

import errno
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from units import LARGE, Shell

import transfer_queue as tq
from transfer_queue.errors import ConfigError, StoreFull
from transfer_queue.memory import memfd
from transfer_queue.wire.messages import Allocated

Service = Callable[..., tq.TransferQueueClient]
Spawn = Callable[[str], Any]
MIB = 1 << 20


def store(**simple: Any) -> dict[str, Any]:
    return {"backend": {"SimpleStorage": simple}}


# ---- a real file system of 64 MiB ----

SMALL_DISK = """
import ctypes, errno, os, sys, threading
import torch
import transfer_queue as tq
from transfer_queue.errors import StoreFull
libc, where, MIB = ctypes.CDLL(None, use_errno=True), {where!r}, 1 << 20
NEWNS, REC, PRIVATE = 0x20000, 0x4000, 1 << 18
if (
    libc.unshare(NEWNS)
    or libc.mount(b"none", b"/", None, REC | PRIVATE, None)
    or libc.mount(b"tmpfs", where.encode(), b"tmpfs", 0, b"size=64m")
):
    print("not permitted", flush=True)
    sys.exit()
os.environ.pop("TQ_ADDRESS", None)

def start(**simple):
    tq.init(dict(backend=dict(SimpleStorage=dict(arena_dir=where, **simple)), client=dict(timeout_s=1.0)))
    return tq.get_client()

def put(key, nbytes):
    tq.kv_put(key, "p", {{"x": torch.full((int(nbytes),), ord(key[0]), dtype=torch.uint8)}})

def refused(key, nbytes):
    try:
        put(key, nbytes)
    except StoreFull as error:
        assert f"the file system of {{where}} is full" in str(error), error
        return True

def total(key):
    return int(tq.kv_batch_get(key, "p")["x"].sum()) // ord(key[0])

def fill(name, nbytes):
    with open(os.path.join(where, name), "wb", buffering=0) as file:
        try:
            for _ in range(0, nbytes, 4096):
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC

def empty(name):
    os.unlink(os.path.join(where, name))
"""


@pytest.fixture
def on_small_disk(child: Spawn, tmp_path: Path) -> Callable[[str], str]:
    """Runs code in a process whose arena directory is a file system of 64 MiB; what it printed."""

    def run(code: str) -> str:
        process = child(SMALL_DISK.format(where=str(tmp_path)) + textwrap.dedent(code))
        printed: str = process.finish()
        if printed == "not permitted":
            pytest.skip("file systems cannot be mounted here")
        return printed

    return run


def test_a_full_file_system_is_store_full_and_kills_nobody(on_small_disk: Callable[[str], str]) -> None:
    printed = on_small_disk("""
        client = start(budget_nbytes=60 * MIB)
        pid = client.stats()["pid"]
        fill("other", 40 * MIB)
        put("a", 16 * MIB)
        assert refused("b", 16 * MIB) and refused("b", 24 * MIB)
        assert total("a") == 16 * MIB and list(tq.kv_list("p")["p"]) == ["a"]
        empty("other")
        put("b", 24 * MIB)
        assert (total("a"), total("b")) == (16 * MIB, 24 * MIB)
        assert client.stats()["pid"] == pid
        tq.close()
        print("good")
    """)
    assert printed == "good"


def test_an_inline_put_on_a_full_file_system_is_store_full(on_small_disk: Callable[[str], str]) -> None:
    printed = on_small_disk("""
        start(budget_nbytes=60 * MIB)
        put("a", 16 * MIB)
        fill("other", 64 * MIB)
        assert refused("b", 1000)
        empty("other")
        put("b", 1000)
        assert (total("a"), total("b")) == (16 * MIB, 1000)
        tq.close()
        print("good")
    """)
    assert printed == "good"


def test_a_put_waits_for_space_of_the_file_system(on_small_disk: Callable[[str], str]) -> None:
    printed = on_small_disk("""
        client = start(budget_nbytes=60 * MIB)
        client.session.config["timeout_s"] = 60.0
        put("a", 30 * MIB)
        fill("other", 64 * MIB)
        waiting = threading.Thread(target=put, args=("b", 30 * MIB))
        waiting.start()
        while not client.stats()["waiting_requests"]:
            pass
        tq.kv_clear("a", "p")
        waiting.join()
        assert total("b") == 30 * MIB
        tq.close()
        print("good")
    """)
    assert printed == "good"


def test_space_that_free_ranges_hold_is_used_for_others(on_small_disk: Callable[[str], str]) -> None:
    printed = on_small_disk("""
        start(budget_nbytes=56 * MIB)
        for number in range(28):
            put(chr(65 + number), 2 * MIB)
        for number in range(0, 28, 2):
            tq.kv_clear(chr(65 + number), "p")
        fill("other", 64 * MIB)
        put("z", 20 * MIB)
        assert total("z") == 20 * MIB
        assert all(total(chr(65 + number)) == 2 * MIB for number in range(1, 28, 2))
        tq.close()
        print("good")
    """)
    assert printed == "good"


def test_the_default_budget_is_what_the_file_system_has(on_small_disk: Callable[[str], str]) -> None:
    printed = on_small_disk("""
        fill("other", 24 * MIB)
        print(start().stats()["arena_nbytes_budget"])
        put("a", 37 * MIB)
        assert total("a") == 37 * MIB
        tq.close()
    """)
    assert 37 * MIB < int(printed) < 40 * MIB


# ---- at the start ----


def test_a_budget_beyond_the_file_system_is_a_config_error(service: Service, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        service(**store(arena_dir=str(tmp_path), budget_nbytes=1 << 60))
    found = os.statvfs(tmp_path)
    assert str(1 << 60) in str(error.value)
    assert str(tmp_path) in str(error.value)
    named = int(str(error.value).split(" has ")[1].split()[0])
    assert abs(named - found.f_bavail * found.f_frsize) < 1 << 30


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_an_arena_dir_that_is_none_is_a_config_error(service: Service, tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"arena_dir.*{kind}"):
        service(**store(arena_dir=str(tmp_path / kind)))


# ---- how often space is asked for ----


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes for which the file system was asked, by mode 0 of fallocate(2). Appending to `full` makes it full."""
    sizes: list[int] = []
    real = memfd._fallocate

    def fallocate(fd: int, mode: int, start: int, nbytes: int) -> None:
        if mode == 0:
            sizes.append(nbytes)
            if FULL in sizes:
                raise OSError(errno.ENOSPC, "full")
        real(fd, mode, start, nbytes)

    monkeypatch.setattr(memfd, "_fallocate", fallocate)
    return sizes


FULL = -1


def test_a_block_in_the_place_of_another_asks_for_no_space(asked: list[int], tmp_path: Path) -> None:
    shell = Shell(64 * MIB, str(tmp_path))
    for size in (LARGE, 3 * MIB, 64):
        shell.unit.drop(shell.published(size))
    before = len(asked)
    assert before
    for size in (LARGE, 3 * MIB, 64, 1000):
        shell.unit.drop(shell.published(size))
    assert len(asked) == before
    shell.unit.close()


def test_space_that_was_trimmed_is_asked_for_again(asked: list[int], tmp_path: Path) -> None:
    shell = Shell(64 * MIB, str(tmp_path))
    kept = shell.published(LARGE, 3)
    shell.unit.drop(shell.published(3 * MIB))
    shell.unit.trim(0)
    before = len(asked)
    shell.published(MIB, 7)
    assert len(asked) > before
    assert bool((shell.bytes_of(kept) == 3).all())
    shell.unit.close()


def test_memory_without_a_directory_is_not_reserved(asked: list[int]) -> None:
    shell = Shell(64 * MIB)
    shell.published(MIB)
    assert asked == []
    shell.unit.close()


def test_who_waits_for_space_asks_again_only_when_some_is_released(asked: list[int], tmp_path: Path) -> None:
    shell = Shell(64 * MIB, str(tmp_path))
    first = shell.published(MIB)
    asked.append(FULL)
    assert shell.allocate(8 * MIB, ticket="w", wait_s=9) is None
    before = len(asked)
    for _ in range(100):
        shell.unit.retry()
    assert len(asked) == before
    shell.unit.drop(first)
    shell.unit.retry()
    assert len(asked) > before
    asked.remove(FULL)
    assert shell.answers() == []
    shell.unit.expire(1)
    assert shell.answers() == [("w", Allocated)]
    shell.unit.close()


def test_who_waits_for_space_has_it_within_a_second_when_others_made_room(asked: list[int], tmp_path: Path) -> None:
    shell = Shell(64 * MIB, str(tmp_path))
    asked.append(FULL)
    assert shell.allocate(8 * MIB, ticket="w", wait_s=9) is None
    assert shell.unit.next_deadline() == 1
    shell.unit.expire(1)
    assert shell.answers() == []
    asked.remove(FULL)
    assert shell.unit.next_deadline() == 2
    shell.unit.expire(2)
    assert shell.answers() == [("w", Allocated)]
    assert shell.unit.next_deadline() is None
    shell.unit.close()


def test_a_file_system_that_has_less_is_not_asked_to_reserve_it(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell(64 * MIB, str(tmp_path))
    asked.append(FULL)
    shell.allocate(8 * MIB, ticket="w", wait_s=9)
    monkeypatch.setattr(shell.unit.shm, "has_space", lambda nbytes: nbytes < 8 * MIB)
    before = len(asked)
    shell.unit.expire(1)
    assert len(asked) == before
    shell.unit.close()


def test_what_waited_for_space_in_vain_is_told_so(asked: list[int], tmp_path: Path) -> None:
    shell = Shell(64 * MIB, str(tmp_path))
    asked.append(FULL)
    with pytest.raises(StoreFull, match=f"the file system of {tmp_path} is full"):
        shell.allocate(MIB)
    shell.allocate(MIB, ticket="w", wait_s=3)
    shell.unit.expire(3)
    ((_, reply),) = shell.unit.outbox
    assert f"the file system of {tmp_path} is full" in reply.text  # type: ignore[attr-defined]
    shell.unit.close()


# ---- limits of a client ----


def test_a_client_that_may_not_map_an_arena_is_told_why_and_keeps_no_descriptor(service: Service, child: Spawn) -> None:
    service()
    tq.kv_put("a", "p", {"x": torch.zeros(4 * MIB, dtype=torch.uint8)})
    found = child("""
        import os, resource, torch
        import transfer_queue as tq
        from transfer_queue.errors import ConfigError
        tq.init()
        tq.kv_list("p")
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), resource.RLIM_INFINITY))
        before = len(os.listdir("/proc/self/fd"))
        for turn in range(3):
            for call in (lambda: tq.kv_batch_get("a", "p"), lambda: tq.kv_put("b", "p", {"x": torch.zeros(1 << 20)})):
                try:
                    call()
                except ConfigError as error:
                    assert "8 GiB of addresses (ulimit -v)" in str(error)
                    print("told")
        print(len(os.listdir("/proc/self/fd")) - before, "more")
    """)
    assert found.finish().split() == ["told"] * 6 + ["0", "more"]


# ---- seals ----


def test_a_client_cannot_change_the_size_of_an_arena(service: Service, child: Spawn) -> None:
    client = service()
    tq.kv_put("a", "p", {"x": torch.full((MIB,), 7, dtype=torch.uint8)})
    view = tq.kv_batch_get("a", "p")["x"]
    vandal = child("""
        import os, torch
        import transfer_queue as tq
        tq.init()
        tq.kv_put("b", "p", {"x": torch.ones(1 << 20, dtype=torch.uint8)})
        tq.kv_batch_get("a", "p")
        for arena in tq.get_client().session.arenas._arenas.values():
            for size in (0, 4096, arena.size - 1, arena.size + 4096):
                try:
                    os.ftruncate(arena.fd, size)
                except OSError as error:
                    print(error.errno)
    """)
    refusals = vandal.finish().split()
    assert len(refusals) >= 4
    assert set(refusals) == {str(errno.EPERM)}
    assert int(view.sum()) == 7 * MIB
    assert int(tq.kv_batch_get("a", "p")["x"].sum()) == 7 * MIB
    tq.kv_put("c", "p", {"x": torch.ones(MIB, dtype=torch.uint8)})
    assert client.stats()["arena_nbytes_resident"] >= 3 * MIB
