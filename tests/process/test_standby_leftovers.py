"""What a killed server had been told and had not read, what waited in it, and for whom: nothing of it is left over."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from conftest import freeze, until
from hosts import CLIENT, LARGE, Host
from test_standby import kill, replaced, server_of, standby_of

from transfer_queue.launch import local
from transfer_queue.memory.memfd import is_of_this_host
from transfer_queue.server import home, host_registry, processes
from transfer_queue.server.processes import ProcessIdentity
from transfer_queue.server.settings import ServerConfig

Spawn = Callable[[str], Any]
MIB = 1 << 20


@pytest.fixture(params=["server", "unit"])
def host(request: pytest.FixtureRequest, start_host: Callable[..., Host]) -> Host:
    """The controller's host, or another one."""
    head = start_host(durability="process", budget_nbytes=16 * MIB)
    return (
        head if request.param == "server" else start_host(join=head.tcp, durability="process", budget_nbytes=16 * MIB)
    )


@pytest.fixture
def frozen() -> Iterator[Callable[[int], None]]:
    """Has a process stand still; it goes on, or is killed, at the end."""
    pids: list[int] = []

    def stop(pid: int) -> None:
        pids.append(pid)
        freeze(pid)

    yield stop
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def test_a_view_that_was_given_up_just_before_is_given_up(host: Host, frozen: Callable[[int], None]) -> None:
    meta = host.client.put({"x": torch.ones(4, LARGE)}, partition_id="p")
    seen = host.client.get_data(meta, dense=True)["x"]
    assert (seen == 1).all()
    standby_of(host.client)
    pid = server_of(host.client)
    frozen(pid)
    del seen
    gc.collect()
    kill(pid)
    host.client.clear_partition("p")
    until(lambda: host.used() == 0, "the end of what was pinned")


def test_memory_that_was_given_back_just_before_is_given_back(host: Host, frozen: Callable[[int], None]) -> None:
    allocation = host.client.allocate({"x": ((4, LARGE), torch.float32)})
    standby_of(host.client)
    pid = server_of(host.client)
    frozen(pid)
    del allocation
    gc.collect()
    kill(pid)
    until(lambda: host.used() == 0, "the end of what was allocated")


def test_a_call_that_was_cancelled_just_before_took_nothing(host: Host, frozen: Callable[[int], None]) -> None:
    client = host.client
    client.put({"x": torch.arange(4)}, partition_id="p")
    standby_of(client)
    pid = server_of(client)

    async def cancelled() -> None:
        await client.async_get_meta(["x"], 1, "p", task_name="other")
        frozen(pid)
        asking = asyncio.ensure_future(client.async_get_meta(["x"], 4, "p", task_name="t", timeout_s=30.0))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        kill(pid)
        await client.async_get_meta(["x"], 1, "p", task_name="other")

    asyncio.run(cancelled())
    assert len(client.get_meta(["x"], 4, "p", task_name="t", timeout_s=5)) == 4


def test_who_got_room_before_does_not_wait_for_it_again(host: Host) -> None:
    client, column = host.client, {"x": torch.ones(1, 10 * MIB, dtype=torch.uint8)}
    first = client.put(column, partition_id="p")
    put: list[Any] = []
    writer = threading.Thread(target=lambda: put.append(client.put(column, partition_id="q")))
    before = standby_of(client)
    writer.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "the wait")
    kill(before)
    until(lambda: client.stats()["standby"] not in (0, before), "a standby that was forked meanwhile")
    client.clear_samples(first)
    writer.join()
    replaced(client)
    assert client.stats()["waiting_requests"] == 0
    client.clear_samples(put[0])
    until(lambda: host.used() == 0, "the end of all rows")


def test_a_forked_child_whose_parent_ended_keeps_what_it_looks_at(host: Host, fresh_child: Spawn) -> None:
    heir = fresh_child(f"""
        import os, sys, torch
        os.environ["TQ_ADDRESS"] = {host.server.address!r}
        import transfer_queue as tq
        torch.set_num_threads(1)  # its helpers do not outlive a fork
        tq.init()
        meta = tq.get_client().put({{"x": torch.ones(4, 300_000)}}, partition_id="v")
        seen = tq.get_client().get_data(meta, dense=True)["x"]
        if os.fork():
            os._exit(0)
        print("ready", flush=True)
        sys.stdin.readline()
        print(bool((seen == 1).all()), flush=True)
        os._exit(0)
    """)
    assert heir.line() == "ready"
    host.client.clear_partition("v")
    replaced(host.client)
    for number in range(3):
        later = host.client.put({"x": torch.zeros(4, 300_000)}, partition_id=f"w{number}")
        host.client.clear_samples(later)
    heir.say()
    assert heir.line() == "True"
    until(lambda: host.used() == 0, "the end of its views with it")


def test_what_this_process_reads_twice_is_pinned_twice(host: Host) -> None:
    """What is said again must not end a pin of somebody else."""
    meta = host.client.put({"x": torch.ones(4, LARGE)}, partition_id="p")
    first, second = (host.client.get_data(meta, dense=True)["x"] for _ in range(2))
    del first
    gc.collect()
    replaced(host.client)
    replaced(host.client)
    host.client.clear_samples(meta)
    host.client.put({"x": torch.zeros(4, LARGE)}, partition_id="q")
    assert (second == 1).all()


# Files of services of which nothing is left


PROGRAM = """
import transfer_queue as tq
tq.init(%s)
while True:
    print(tq.get_client().stats()["pid"], flush=True)
    input()
"""
DURABLE = "{'server': {'durability': 'process'}}"


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the run directories of jobs and of the register."""
    with tempfile.TemporaryDirectory(prefix="tq-test-", dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.delenv("TQ_ADDRESS", raising=False)
        yield Path(host_registry.private_dir())


def directories(private: Path) -> set[Path]:
    return {path for path in private.iterdir() if path.is_dir()}


def test_what_a_service_that_was_killed_whole_left_goes_with_the_next_start_and_nothing_of_others(
    private: Path, fresh_child: Spawn
) -> None:
    if not is_of_this_host(str(private)):
        pytest.skip("other hosts may have /tmp, too")
    dead = fresh_child(PROGRAM % DURABLE)
    server = psutil.Process(int(dead.line()))
    until(lambda: server.children(), "the standby")
    (left,) = directories(private)
    for one in (*server.children(), server):
        kill(one.pid)
    dead.kill()
    assert (left / "tq.sock").exists()
    left.with_suffix(".lock").touch()
    starters = [fresh_child(PROGRAM % "") for _ in range(3)]
    assert len({starter.line() for starter in starters}) == 3
    kept = directories(private)
    assert left not in kept
    assert len(kept) == 3
    assert not left.with_suffix(".lock").exists()
    for starter in starters:
        starter.say()
        assert starter.line()
        starter.kill()
    until(lambda: not private.exists(), "the end of the services, and of the directory")


def entered(private: Path, name: str, run_dir: Path) -> Path:
    """An entry as of a server of another life of the host, or of another host."""
    entry = host_registry.ServerEntry(server=ProcessIdentity(1, 0), address=f"unix:{run_dir}/tq.sock", token="secret")
    path = private / f"{name}.server"
    path.write_bytes(msgspec.json.encode(entry))
    return path


@pytest.mark.parametrize("shared", [False, True])
def test_what_earlier_lives_of_the_host_left_goes_unless_somebody_holds_it_or_other_hosts_may_have_it(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(host_registry, "is_of_this_host", lambda directory: not shared)
    (held := private / "held").mkdir()
    (free := tmp_path / "free").mkdir()
    lock = private / "held.lock"
    lock.touch()
    past = [entered(private, "0-1-1-0", tmp_path / "gone"), entered(private, "0-1-2-0", free)]
    living = entered(private, "0-1-3-0", held)
    container = entered(private, f"{processes.view()}0-4-0", tmp_path / "of its own")
    before = set(private.iterdir())
    with home.taken(str(held)) as ours, home.taken(str(lock)) as locked:
        assert ours
        assert locked
        host_registry.sweep(str(private))
        assert set(private.iterdir()) == (before if shared else {held, lock, living, container})
    host_registry.sweep(str(private))
    assert set(private.iterdir()) == (before if shared else {container})
    assert free.exists(), "a directory that a user named"
    assert all(path.exists() == shared for path in past)


def test_a_server_waits_while_its_directory_is_cleared_and_makes_another_one(tmp_path: Path) -> None:
    (run_dir := tmp_path / "run").mkdir(mode=0o700)

    async def moving_in() -> int:
        with home.taken(str(run_dir)) as ours:
            assert ours
            moving = asyncio.ensure_future(home.move_in(str(run_dir)))
            await asyncio.sleep(0)
            assert not moving.done()
            run_dir.rmdir()
        return await moving

    held = asyncio.run(moving_in())
    home.vacate(str(run_dir))
    assert run_dir.exists()
    os.close(held)
    home.vacate(str(run_dir))
    assert not run_dir.exists()


def test_an_owner_whose_server_was_killed_leaves_the_next_one_its_sockets(tmp_path: Path) -> None:
    config = ServerConfig(
        run_dir=str(tmp_path / "run"), owner_pid=os.getpid(), budget_nbytes=1 << 26, durability="none",
        sampler={"class": "SequentialSampler"}, client=CLIENT,
    )  # fmt: skip
    dead = local.start(config)
    kill(dead.pid)
    alive = local.start(config)
    dead.stop()
    assert local.answers(alive.addresses[0])
    kill(alive.pid)
    alive.stop()
    assert not (tmp_path / "run").exists()
