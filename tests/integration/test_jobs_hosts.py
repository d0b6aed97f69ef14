"""Jobs on several hosts: nothing is configured, and there is one service."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import until
from paths import SOURCES

from tools.netns import Switch, allowed
from transfer_queue.launch import hosts
from transfer_queue.launch.job import HostSpan

needs_root = pytest.mark.skipif(not allowed(), reason="making network namespaces needs root")

RANK = """
import os, pathlib, sys, threading, torch, transfer_queue as tq
conf = tq.init()
rank, client = os.environ["RANK"], tq.get_client()
client.put({"x": torch.full((1, 4), float(rank))}, partition_id="p")
rows = client.get_meta(["x"], 2, "p", task_name=f"t{rank}", timeout_s=60)
total = float(client.get_data(rows)["x"].sum()) / 4
said = pathlib.Path(sys.argv[1])
while rank == "0" and not (said / "1").exists():  # the service ends with the first host's torchrun
    threading.Event().wait(0.05)
tq.close()
(said / rank).write_text(f"{total:g} {conf is not None}")
"""


@pytest.fixture
def switch() -> Iterator[Switch]:
    made = Switch()
    yield made
    made.close()


@needs_root
def test_torchrun_on_two_hosts_has_one_service_with_a_unit_on_each(switch: Switch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    unset = ("TQ_", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    with tempfile.TemporaryDirectory(prefix="tq-test-", dir="/tmp") as run_dir:
        agents = []
        for node in range(2):
            (own := Path(run_dir, str(node))).mkdir()
            command = [
                "ip", "netns", "exec", switch.plug_in(node + 1), sys.executable, "-m", "torch.distributed.run",
                "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "10.77.0.1",
                "--master-port", "29500", "train.py", str(tmp_path),
            ]  # fmt: skip
            own_environment = {**environment, "PYTHONPATH": SOURCES, "XDG_RUNTIME_DIR": str(own)}
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=own_environment))
        assert [agent.wait(100) for agent in agents] == [0, 0]
        until(
            lambda: not any(True for node in range(2) for _ in Path(run_dir, str(node)).iterdir()), "both servers' end"
        )
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["1 True"] * 2


def test_a_host_waits_for_the_service_that_takes_the_place_of_a_dead_one() -> None:
    from torch.distributed import HashStore

    board = hosts.StoreBoard(HashStore(), HostSpan(False, "localhost", True))
    with socket.create_server(("127.0.0.1", 0)) as dead, socket.create_server(("127.0.0.1", 0)) as alive:
        ports = [one.getsockname()[1] for one in (dead, alive)]
        left, next_one = (hosts.ServicePlace(f"tcp:127.0.0.1:{port}", "a-token-nobody-guesses") for port in ports)
        dead.close()
        board.publish(left)
        assert hosts.find(board, 0.0) is None
        with ThreadPoolExecutor() as threads:
            finding = threads.submit(hosts.find, board, 30.0)
            board.publish(next_one)
            assert finding.result(30) == next_one


STORE = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""
HOST = """
import os
os.environ.update(%r)
import transfer_queue as tq
while True:
    tq.init()
    client = tq.get_client()
    client.set_partition("of " + os.environ["RANK"], size=4)
    print(client.session.server_pid, tq.address(), *sorted(client.get_partition_list()), sep=",", flush=True)
    input()
"""


@pytest.fixture
def rank(
    fresh_child: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Callable[[], list[str]]]]:
    """Starts ranks of a job of torchrun on hosts that have a runtime directory each. What a rank gives says what it is
    attached to after another `init`: the server's process and address, and the partitions there."""
    for name in [name for name in os.environ if name.startswith(("TQ_", "SLURM_"))]:
        monkeypatch.delenv(name)
    job = {
        "TORCHELASTIC_RUN_ID": "two", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": fresh_child(STORE).line(), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    servers: set[int] = set()
    with tempfile.TemporaryDirectory(prefix="tq-test-", dir="/tmp") as run_dir:

        def start(number: int, **more: str) -> Callable[[], list[str]]:
            host = str(number // 2)
            Path(run_dir, host).mkdir(exist_ok=True)
            own = {"RANK": str(number), "GROUP_RANK": host, "XDG_RUNTIME_DIR": os.path.join(run_dir, host)}
            child = fresh_child(HOST % {**job, **own, **more})
            asked = False

            def attached() -> list[str]:
                nonlocal asked
                if asked:
                    child.say()
                asked = True
                found: list[str] = child.line().split(",")
                servers.add(int(found[0]))
                return found

            return attached

        yield start
        for pid in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        until(lambda: not [one for node in Path(run_dir).iterdir() for one in node.iterdir()], "the end of all servers")


@pytest.mark.parametrize("inherits", [False, True])
def test_the_other_hosts_of_a_job_join_the_service_that_takes_the_place_of_a_dead_one(
    rank: Callable[..., Callable[[], list[str]]], inherits: bool
) -> None:
    first, other = rank(0), rank(2)
    (server, *_), (unit, address, *shared) = first(), other()
    assert shared == ["of 0", "of 2"]
    dead = psutil.Process(int(server))
    for process in (*dead.children(), dead):
        process.kill()
        process.wait(10)
    assert first()[0] != server
    third = rank(3, TQ_ADDRESS=address) if inherits else other
    joined, *_, known, own = third()
    assert joined != unit
    assert (known, own) == ("of 0", f"of {3 if inherits else 2}")
    assert other()[0] == joined, "one unit a host"
