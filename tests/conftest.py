"""Fixtures: a service per test or module, real child processes that are stopped exactly, leak checks for every test."""

from __future__ import annotations

import contextlib
import gc
import io
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

import pytest
import torch
from hosts import Host
from paths import SOURCES
from zygote import CHILDREN, SERVERS, descendants, have_servers_forked

import transfer_queue as tq
from transfer_queue.launch import local

DEADLINE_S = 60.0  # an import of torch takes long on a busy machine
MODULE_WIDE = {"shared", "cluster"}
LONGEST = (
    "test_ray", "test_examples", "test_isolation", "test_network", "test_lifecycle", "test_checkpoint_faults",
    "test_demo", "test_metrics", "test_backpressure", "test_arena_limits", "test_hostile_messages",
)  # fmt: skip
PYTHON = sys.executable


def until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Return once `condition` holds; fail after `timeout_s`. For states of other processes, which send no event."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        threading.Event().wait(0.005)


def freeze(pid: int) -> None:
    """SIGSTOP, which takes effect in one thread after the other: return once all have stopped."""
    os.kill(pid, signal.SIGSTOP)
    tasks = f"/proc/{pid}/task"
    until(lambda: all(_is_stopped(f"{tasks}/{task}") for task in os.listdir(tasks)), "the stop of all threads")


def _is_stopped(task: str) -> bool:
    with open(f"{task}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


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
    return descendants(os.getpid()) - {SERVERS.pid, CHILDREN.pid}


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("tq-")}


def _shared_memory() -> set[str]:
    """Names in /dev/shm, without those of anybody's multiprocessing, and torch's: it unlinks a tensor's file as soon
    as it is open, but a worker can be killed in between. CUDA's driver leaves that of a process that was killed."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "psm_", "torch_", "cuda."))}


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TQ_")}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than processors: tests wait for other processes as often as they compute."""
    return (os.cpu_count() or 1) + 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Parallel runs hand out whole files, in this order: the longest first, so that none is left over at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_configure() -> None:
    import hypothesis  # tests with a real vLLM import this file, and have it not

    hypothesis.settings.register_profile("busy", deadline=None)  # nothing is slow because others use the processors
    hypothesis.settings.load_profile("busy")
    gc.disable()  # nothing that is imported for the tests is garbage
    have_servers_forked(lambda: SERVERS.socket)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # torch's hundred thousands of objects: a collection takes a quarter of a second with them


def pytest_unconfigure() -> None:
    local.subprocess = subprocess
    for zygote in (SERVERS, CHILDREN):
        zygote.close()


@pytest.fixture
def fresh_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are started as users start them, not forked: for tests of what a start costs."""
    monkeypatch.setattr(local, "subprocess", subprocess)
    monkeypatch.setattr(CHILDREN, "servers", None)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """What is in a cycle stays: for tests of what goes without one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A test leaves no thread, descriptor, child process or shared-memory name behind (module-wide fixtures aside)."""
    if not MODULE_WIDE.isdisjoint(request.fixturenames):
        yield
        return  # the module's service is alive: the fixture itself checks at its end
    before = (_open_files(), _children(), _threads(), _shared_memory())
    yield
    for when in ("setup", "call"):
        caplog.get_records(when).clear()  # with a traceback comes all that its frames hold
    until(lambda: _children() <= before[1], "the end of child processes", 5)
    until(lambda: _threads() <= before[2], "the end of threads", 5)
    keeps_sockets = request.node.get_closest_marker("keeps_sockets") is not None

    def left() -> set[str]:
        found = {one for one in _open_files() - before[0] if not (keeps_sockets and " socket:" in one)}
        if found:
            gc.collect()
        return found

    left()
    until(lambda: not left(), "the end of descriptors", 5)  # a thread that ends may hold the last of them
    until(lambda: _shared_memory() <= before[3], "the end of shared memory", 5)  # it may be another process's


@pytest.fixture(scope="module", autouse=True)
def no_settings_left() -> Iterator[None]:
    """The tests of a file leave no setting behind that those of the next would take for their own."""
    before = _settings()
    yield
    assert _settings() == before


@pytest.fixture
def service() -> Iterator[Callable[..., tq.TransferQueueClient]]:
    """Starts a service with the given settings (at most once) and returns the client; ended after the test."""
    os.environ.pop("TQ_ADDRESS", None)

    def start(**conf: object) -> tq.TransferQueueClient:
        tq.init(conf or None)
        return tq.get_client()

    yield start
    tq.close()
    os.environ.pop("TQ_ADDRESS", None)  # a test may have set it
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
def any_gpu() -> torch.device | None:
    """The GPU, if there is one. The first tensor there opens pipes, which no test leaves behind."""
    return torch.ones(1, device="cuda").device if torch.cuda.is_available() else None


@pytest.fixture(scope="module")
def gpu_context(any_gpu: torch.device | None) -> torch.device:
    """The GPU; tests are skipped without one."""
    return any_gpu or pytest.skip("needs a GPU")


@pytest.fixture
def gpu(gpu_context: torch.device) -> Iterator[torch.device]:
    """As `gpu_context`; the test leaves none of its memory in use."""
    before = torch.cuda.memory_allocated(gpu_context)
    yield gpu_context
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that multiplied matrices
    until(lambda: torch.cuda.memory_allocated(gpu_context) <= before, "the end of tensors on the GPU", 5)


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    """What starts the processes of `helpers/engines.py`."""
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

    def __init__(self, code: str, fresh: bool = False) -> None:
        """`fresh`: it starts from nothing, for tests of what is imported and of who started whom."""
        environment = {**os.environ, "PYTHONPATH": SOURCES, "PYTHONUNBUFFERED": "1"}
        arguments = ["-c", textwrap.dedent(code)]
        self.process: Any
        if fresh:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen([sys.executable, *arguments], env=environment, **pipes)
        else:
            self.process = CHILDREN.start(arguments, environment)
        self._stdin = io.TextIOWrapper(self.process.stdin)
        self._stdout = io.TextIOWrapper(self.process.stdout)

    @property
    def pid(self) -> int:
        return self.process.pid

    def freeze(self) -> None:
        freeze(self.pid)

    def line(self) -> str:
        """The next line the child prints (blocks; the test's own timeout ends it)."""
        return self._stdout.readline().strip()

    def say(self, text: str = "") -> None:
        self._stdin.write(text + "\n")
        self._stdin.flush()

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def finish(self, timeout_s: float = DEADLINE_S) -> str:
        """Wait for a good end; what it printed since the last `line`."""
        self._stdin.close()
        overdue = threading.Timer(timeout_s, os.kill, (self.pid, signal.SIGKILL))
        overdue.start()
        try:
            with self._stdout:
                out = self._stdout.read()
            code = self.process.wait()
        finally:
            overdue.cancel()
        assert code == 0, f"child failed with {code}: {out}"
        return out.strip()

    def close(self) -> None:
        """Kill it where it still runs."""
        if self.process.poll() is None:
            self.kill()
        with contextlib.suppress(BrokenPipeError):  # what it did not read
            self._stdin.close()
        self._stdout.close()


@pytest.fixture
def child() -> Iterator[Callable[[str], Child]]:
    """Starts child processes; those still running are killed after the test."""
    started: list[Child] = []

    def start(code: str) -> Child:
        started.append(Child(code))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def fresh_child() -> Iterator[Callable[[str], Child]]:
    """As `child`, each a new interpreter; those still running are killed after the test."""
    started: list[Child] = []

    def start(code: str) -> Child:
        started.append(Child(code, fresh=True))
        return started[-1]

    yield start
    for one in started:
        one.close()


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
