"""A process that has imported what children need, and forks them: an import of torch takes seconds, a fork does not.

Such a child is a process like any other, with a pid, environment, working directory and standard streams of its own.
It runs its code as `python` does and ends as an interpreter does. Its parent is the zygote, which collects it and
passes on its exit status. The zygote has no thread and no session that a fork could break.

Run as a script, `zygote.py SOCKET OWNER MODULE...` prints a line when it is ready, and ends with its owner.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import InspectLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paths import SOURCES_AND_HELPERS

MESSAGE_NBYTES, MAX_DESCRIPTORS = 1 << 17, 16
Ended = subprocess.CompletedProcess[str]


class Zygote:
    """Forks children. It is started with the first of them, and `close` ends it; children that live then go on."""

    def __init__(self, *modules: str, servers: Zygote | None = None) -> None:
        self._modules = modules
        self.servers = servers  # forks the servers that these children start (None: nobody does)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def socket(self) -> str:
        """Where other processes of this test may have children forked (`ask`)."""
        if self._process is None:
            self._begin()
        return self._socket

    def start(
        self, arguments: list[str], environment: Mapping[str, str], *, cwd: str = "", stderr: int = 2,
        own_session: bool = False, pass_fds: Sequence[int] = (),
    ) -> Forked:  # fmt: skip
        """What `subprocess.Popen` does for `python ARGUMENTS`: `-c CODE ...`, `-m MODULE ...` or `SCRIPT ...`.

        Standard input and output are pipes of bytes. The child has the descriptors `pass_fds` under the same numbers.
        """
        job = {"arguments": arguments, "environment": dict(environment), "cwd": cwd or os.getcwd(), "own": own_session}
        return ask_with_pipes(self.socket, {**job, "servers": self._where_servers_are()}, stderr, pass_fds)

    def start_on(self, terminal: int, arguments: list[str], environment: Mapping[str, str]) -> Child:
        """As `start`, with that terminal as its standard streams: it leads a session there."""
        job = {"arguments": arguments, "environment": dict(environment), "cwd": os.getcwd(), "own": True}
        job |= {"numbers": [0, 1, 2], "is_on_terminal": True, "servers": self._where_servers_are()}
        return Child(ask(self.socket, job, [terminal] * 3))

    def _where_servers_are(self) -> str | None:
        return None if self.servers is None else self.servers.socket

    def run(self, arguments: list[str], environment: Mapping[str, str], cwd: str = "") -> Ended:
        """What `subprocess.run` does, with the output as text. The test's own timeout ends it."""
        with tempfile.TemporaryFile("w+") as errors:
            child = self.start(arguments, environment, cwd=cwd, stderr=errors.fileno())
            child.stdin.close()
            try:
                with child.stdout:
                    out = child.stdout.read().decode()
                code = child.wait()
            finally:
                child.send_signal(signal.SIGKILL)
            errors.seek(0)
            return Ended(arguments, code, out, errors.read())

    def _begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tq-zygote-")
        self._socket = os.path.join(self._folder.name, "zygote.sock")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no thread that a fork would leave behind
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._socket, str(os.getpid()), *self._modules],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**environment, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None
        with self._process.stdout as out:
            assert out.readline() == b"ready\n", "the zygote did not start"

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
            self._folder.cleanup()


def ask(where: str, job: Mapping[str, Any], streams: Sequence[int]) -> socket.socket:
    """Have the zygote at that socket fork a child, which has the descriptors `streams` under the job's `numbers`, and
    enters the `namespaces` (descriptors, the last of them). The connection tells its pid, and its status."""
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    conn.connect(where)
    socket.send_fds(conn, [json.dumps(job).encode()], list(streams))
    return conn


def ask_with_pipes(where: str, job: dict[str, Any], stderr: int, pass_fds: Sequence[int]) -> Forked:
    """`ask` for a child whose standard input and output are pipes to the asker."""
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    try:
        conn = ask(where, {**job, "numbers": [0, 1, 2, *pass_fds]}, [theirs_in, theirs_out, stderr, *pass_fds])
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    return Forked(conn, ours_in, ours_out)


def descendants(pid: int) -> set[int]:
    """The processes that this one started, and those that these did. A hundredth of the time that psutil takes, which
    reads about every process of the machine."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            children = [int(one) for one in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
            found.update(children, *map(descendants, children))
    return found


class Child:
    """The part of `subprocess.Popen` that a child of a zygote has whose streams are its maker's."""

    def __init__(self, conn: socket.socket) -> None:
        self._conn = conn  # closed when the status has come
        self.returncode: int | None = None
        self.pid = int(conn.recv(MESSAGE_NBYTES))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once nothing is left of the child. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            status = select.poll()  # unlike select, it takes descriptors of any number
            status.register(self._conn, select.POLLIN)
            if not status.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"child {self.pid}", timeout or 0)
            with self._conn:
                self.returncode = int(self._conn.recv(MESSAGE_NBYTES))
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing to a child that has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it was collected just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(Child):
    """The part of `subprocess.Popen` that tests and `launch.local` use, with pipes."""

    def __init__(self, conn: socket.socket, stdin: int, stdout: int) -> None:
        super().__init__(conn)
        self.stdin = os.fdopen(stdin, "wb")
        self.stdout = os.fdopen(stdout, "rb")


SERVERS = Zygote("transfer_queue.server.process")
CHILDREN = Zygote(
    "torch",
    "tensordict",
    "torch.nested._internal.ops",
    "omegaconf",
    "transfer_queue.interface",
    "transfer_queue.dataloader",
    "transfer_queue.cli",
    "transfer_queue.weights.http",
    "transfer_queue.weights.transport.tcp",
    "transfer_queue.weights.fleet",
    servers=SERVERS,
)


# in the zygote

_TAKEN_APART = {"sys", "builtins", "__main__", "transfer_queue"}
_OTHERS: set[str] = set()  # in a child, modules that it was forked with


def serve(listener: socket.socket, owner: int) -> dict[str, Any] | None:
    """Fork a child for every request. Returns None when the owner has ended, and in a child what it has to do."""
    ended = os.pidfd_open(owner)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(ended, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in waiting.select():
            if key.fd == ended:
                return None
            if key.fileobj is not listener:
                pid, conn = children.pop(key.fd)
                waiting.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                with conn, contextlib.suppress(BrokenPipeError):
                    conn.send(b"%d" % os.waitstatus_to_exitcode(status))
                continue
            conn, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(conn, MESSAGE_NBYTES, MAX_DESCRIPTORS)
            pid = os.fork()
            if not pid:
                waiting.close()
                for descriptor in (ended, *children):
                    os.close(descriptor)
                for open_socket in (listener, conn, *(other for _, other in children.values())):
                    open_socket.close()
                return {**json.loads(message), "streams": streams}
            for descriptor in streams:
                os.close(descriptor)
            watch = os.pidfd_open(pid)
            children[watch] = (pid, conn)
            waiting.register(watch, selectors.EVENT_READ)
            conn.send(b"%d" % pid)


def end_soon() -> None:
    """Have this child end as an interpreter does, but for what costs 0.25 s of a processor and is not ours: neither
    are the zygote's modules taken apart (`_keep`), nor what C++ has made for them. Their memory would be copied."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # the last one is called first, with the status


def _keep() -> None:
    kept = [sys.modules.pop(name, None) for name in _OTHERS]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _forget_finalizers() -> None:
    """Of what was imported: torch would undo the registration of each of its operators, which takes 0.07 s."""
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.detach()


def have_servers_forked(where: Callable[[], str]) -> None:
    """The servers that this process starts come from the zygote at `where()`, as long as they inherit the same."""
    from transfer_queue.launch import local

    here, ours = _surroundings(), [sys.executable, *local.COMMAND]

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes] | Forked:
        if command != ours or _surroundings() != here:
            return subprocess.Popen(command, **options)
        job = {"arguments": command[1:], "environment": options["env"], "cwd": os.getcwd(), "own": True}
        return ask_with_pipes(where(), job, 2, options["pass_fds"])

    local.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # type: ignore[assignment]


def _surroundings() -> tuple[object, ...]:
    limits = [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)]
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "user")]
    return limits, namespaces, os.getuid(), os.nice(0)


def become(job: dict[str, Any], path: list[str]) -> None:
    """Run the code of a child, as a fresh interpreter would."""
    for _ in range(job.get("namespaces", 0)):
        entered = job["streams"].pop()
        if ctypes.CDLL(None, use_errno=True).setns(entered, 0):
            raise OSError(ctypes.get_errno(), "a namespace")
        os.close(entered)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 512) for descriptor in job["streams"]]  # out of each other's way
    for descriptor in job["streams"]:
        os.close(descriptor)
    for number, descriptor in zip(job["numbers"], moved, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if job["own"]:
        os.setsid()
    if job.get("is_on_terminal"):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", 1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    what, *more = job["arguments"]
    first = {"-c": "", "-m": os.getcwd()}.get(what, os.path.dirname(os.path.abspath(what)))
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # multiprocessing knows it by both names
    if what == "-m":
        spec = importlib.util.find_spec(more[0])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{more[0]}.__main__")
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        code = spec.loader.get_code(spec.name)
        vars(main).update(__spec__=spec, __file__=spec.origin, __package__=spec.parent, __loader__=spec.loader)
        sys.argv = [str(spec.origin), *more[1:]]
    elif what == "-c":
        code = compile(more[0], "<string>", "exec", dont_inherit=True)
        sys.argv = [what, *more[1:]]
    else:
        vars(main)["__file__"] = os.path.abspath(what)
        code = compile(Path(what).read_text(), os.path.abspath(what), "exec", dont_inherit=True)
        sys.argv = [what, *more]
    assert code is not None
    if job.get("servers"):
        have_servers_forked(lambda: job["servers"])
    exec(code, vars(main))


def main(where: str, owner: str, *modules: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's: the owner ends this process
    atexit.register(_keep)  # the first one is called last, after those that the modules register
    path = sys.path[1:]
    sys.path[:] = [*SOURCES_AND_HELPERS.split(os.pathsep), *path]
    for module in modules:
        __import__(module)
    _OTHERS.update(name for name in sys.modules if name.partition(".")[0] not in _TAKEN_APART)
    _forget_finalizers()
    gc.collect()
    gc.freeze()  # what is imported stays: no child looks through it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(where)
        listener.listen(64)
        print("ready", flush=True)
        job = serve(listener, int(owner))
    if job is not None:
        end_soon()
        become(job, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
