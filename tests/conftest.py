"""Fixtures: a service per test or module, real child processes that are stopped exactly, leak checks for every test."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts import Host

import transfer_queue as tq

DEADLINE_S = 30.0
MODULE_WIDE = {"shared", "cluster"}


def until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Return once `condition` holds; fail after `timeout_s`. For states of other processes, which send no event."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        threading.Event().wait(0.005)


def _open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("socket:", "/memfd:transfer_queue", "pipe:")):
            found.add(f"{name} {target}")
    return found


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("tq-")}


def _shared_memory() -> set[str]:
    """Names in /dev/shm, without those of anybody's multiprocessing, and torch's: it unlinks a tensor's file as soon
    as it is open, but a worker can be killed in between."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "psm_", "torch_"))}


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves no thread, descriptor, child process or shared-memory name behind (module-wide fixtures aside)."""
    if not MODULE_WIDE.isdisjoint(request.fixturenames):
        yield
        return  # the module's service is alive: the fixture itself checks at its end
    before = (_open_files(), _children(), _threads(), _shared_memory())
    yield
    until(lambda: _children() <= before[1], "the end of child processes", 5)
    until(lambda: _threads() <= before[2], "the end of threads", 5)
    if not _open_files() <= before[0]:
        gc.collect()  # takes a quarter of a second with torch loaded
    assert _open_files() <= before[0]
    assert _shared_memory() <= before[3]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tq.TransferQueueClient]]:
    """Starts a service with the given settings (at most once) and returns the client; ended after the test."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)

    def start(**conf: object) -> tq.TransferQueueClient:
        tq.init(conf or None)
        return tq.get_client()

    yield start
    tq.close()
    gc.collect()


@pytest.fixture
def client(service: Callable[..., tq.TransferQueueClient]) -> tq.TransferQueueClient:
    """A client of a fresh service with default settings."""
    return service()


@pytest.fixture(scope="module")
def shared() -> Iterator[tq.TransferQueueClient]:
    """One service for all tests of a module, for tests that use partitions of their own."""
    os.environ.pop("TQ_ADDRESS", None)
    before = _children()
    tq.init()
    yield tq.get_client()
    tq.close()
    gc.collect()
    until(lambda: _children() <= before, "the end of the server", 5)


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    """What starts the processes of `tests/engines.py`."""
    from engines import processes

    with processes() as found:
        yield found


@pytest.fixture
def site(context: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a trainer of weights and its receivers (`engines.Site`); all are ended after the test."""
    from engines import Site

    made: list[Site] = []

    def start(engine: str, **more: Any) -> Site:
        made.append(Site(context, engine, tmp_path / "versions", **more))
        made[-1].start_trainer()
        return made[-1]

    yield start
    for one in made:
        one.close()


class Child:
    """A Python process running some code with the service's address in its environment."""

    def __init__(self, code: str) -> None:
        root = str(Path(__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line the child prints (blocks; the test's own timeout ends it)."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def finish(self, timeout_s: float = DEADLINE_S) -> str:
        """Wait for a good end; what it printed since the last `line`."""
        out, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, f"child failed with {self.process.returncode}: {out}"
        return out.strip()


@pytest.fixture
def child() -> Iterator[Callable[[str], Child]]:
    """Starts child processes; those still running are killed after the test."""
    started: list[Child] = []

    def start(code: str) -> Child:
        started.append(Child(code))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()
        for stream in (one.process.stdin, one.process.stdout):
            if stream is not None and not stream.closed:
                stream.close()


@pytest.fixture
def start_host() -> Iterator[Callable[..., Host]]:
    """Starts hosts of a service (see `hosts.Host`); they end with the test."""
    started: list[Host] = []

    def one(*args: Any, **settings: Any) -> Host:
        started.append(Host(*args, **settings))
        return started[-1]

    yield one
    for host in reversed(started):
        host.close()
