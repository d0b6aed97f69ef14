"""One server process on this host, started by whoever needs it first and ended with its owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from transfer_queue.errors import AccessDenied, ConfigError, ServiceUnavailable, TransferQueueError, error_from_code
from transfer_queue.sampler.script import refuse_while_running
from transfer_queue.server import host_registry
from transfer_queue.server.home import vacate
from transfer_queue.server.processes import ProcessIdentity
from transfer_queue.server.settings import NotStarted, Ready, ServerConfig, clear_run_dir
from transfer_queue.wire.address import Address, parse_address

START_TIMEOUT_S = 30.0
RECOVERY_TIMEOUT_S = 600.0  # where a journal is read first: 100 GB of rows at 0.2 GB/s
OPEN_TIMEOUT_S = 160.0  # of a storage engine or a transport: what they are given to begin, and to register memory
STOP_TIMEOUT_S = 10.0
LOCK_INTERVAL_S = 0.01


class LocalServer:
    """A server process this process started: its child, or an orphan of its own choosing (see `start`)."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: str, life: int) -> None:
        """One that may not listen yet: `listens` says so. `life`: the end of a pipe that is at its end when neither the
        server nor a standby of it is left."""
        self._process = process
        self._run_dir = run_dir
        self._owner = os.getpid()
        self._life = life

    def listens(self, ready: Ready) -> None:
        self.address = f"unix:{ready.unix}"
        self.addresses = (parse_address(self.address),)
        self.tcp = ready.tcp
        self.pid = ready.pid

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, at the latest after `timeout_s` (None: blocks until then)."""
        return is_readable(self._life, timeout_s)

    def stop(self) -> None:
        """End it and wait; nothing of it is left. A forked child of the owner leaves it alone."""
        if os.getpid() != self._owner or self._life < 0:
            return
        had_ended = self.wait(0)
        self._signal(signal.SIGTERM)
        if not self.wait(STOP_TIMEOUT_S):
            self._signal(signal.SIGKILL)
            self.wait(STOP_TIMEOUT_S)
        self._process.wait()
        self.release()
        if had_ended:  # it was killed: its sockets are still there, or those of the next one
            vacate(self._run_dir)
        else:
            clear_run_dir(self._run_dir)

    def give_up(self, fresh: bool) -> None:
        """It does not listen: end it at once. Its run directory goes too if it is `fresh`: else it may be another's."""
        for kill in (os.killpg, os.kill):  # with all of its session; it may not have one yet
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.release()
        if fresh:
            clear_run_dir(self._run_dir)

    def release(self) -> None:
        """Let it live on without this process; only for an orphan."""
        os.close(self._life)
        self._life = -1

    def _signal(self, number: signal.Signals) -> None:
        """To the server and its standby: they are a process group of their own, whose number is nobody else's as long
        as one of them lives."""
        if not self.wait(0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class LocalLauncher:
    """Starts one server on this host. With a run directory, all processes that name it share that server."""

    has_hosts = False

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir

    def find(self) -> Sequence[Address]:
        address = parse_address(self._run_dir) if self._run_dir else None
        return [address] if address is not None and answers(address) else []

    def launch(self, config: ServerConfig) -> LocalServer | None:
        if not self._run_dir:
            return start(config)
        with lock(self._run_dir, start_s=start_timeout_s(config)) as held:
            return None if self.find() else start(config, lock=held)


def answers(address: Address, timeout_s: float = 1.0) -> bool:
    """Whether something listens at `address`. Raises `AccessDenied` where that may be another user's."""
    try:
        address.connect(timeout_s).close()
    except AccessDenied:
        raise
    except (OSError, ValueError):
        return False
    return True


def new_run_dir() -> str:
    """A fresh directory of mode 0700 with a short path: a unix socket's may have 107 bytes."""
    return tempfile.mkdtemp(prefix="tq-", dir=host_registry.base())


@contextlib.contextmanager
def lock(run_dir: str, keep: bool = True, start_s: float = START_TIMEOUT_S) -> Iterator[int]:
    """Hold the lock of a run directory, so that of many processes one starts the server; its descriptor.

    A server that got the descriptor holds the lock as well, until it listens: who kills its starter lets nobody start
    another one meanwhile. `keep`: leave the file of the lock. `start_s`: how long the start may take; the file's time
    says until when, for others, who may know nothing of the settings.

    Raises `ServiceUnavailable` when another process holds it for longer than its start may take, `ConfigError` when its
    file is not ours or cannot be made.
    """
    path = run_dir.rstrip("/") + ".lock"
    deadline = time.monotonic() + start_s + STOP_TIMEOUT_S
    while True:
        try:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir: {error}") from error
        try:
            opened = _lock_file(path)
        except FileNotFoundError:
            continue  # somebody who left has just removed the empty directory
        with opened as file:
            while not _locked(file):
                if time.monotonic() > deadline and not _is_expected(file):
                    raise ServiceUnavailable(f"another process has been starting a server in {run_dir} for too long")
                select.select([], [], [], LOCK_INTERVAL_S)  # flock(2) has no deadline of its own
            if not _is_at(file, path):
                continue  # who had it before removed it
            until = time.time() + start_s + STOP_TIMEOUT_S
            with contextlib.suppress(PermissionError):  # root's
                os.utime(file.fileno(), (until, until))
            try:
                yield file.fileno()
            finally:
                if not keep:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
            return


def _is_expected(file: IO[bytes]) -> bool:
    """Whether who holds the lock may still be at its start."""
    return 0 < os.fstat(file.fileno()).st_mtime - time.time() <= RECOVERY_TIMEOUT_S + STOP_TIMEOUT_S + OPEN_TIMEOUT_S


def _is_at(file: IO[bytes], path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _lock_file(path: str) -> IO[bytes]:
    """The file of a lock, made if need be. What lies there already is neither followed nor changed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.fdopen(os.open(path, flags, 0o600), "rb", buffering=0)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(f"run_dir: cannot use the lock {path}: {why}") from error
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        file.close()
        raise ConfigError(f"run_dir: cannot use the lock {path}: it is not a file of this user")
    return file


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


COMMAND = ("-m", "transfer_queue.server")
ORPHAN_COMMAND = ("-c", "import os; os.fork() and os._exit(0); from transfer_queue.server.process import main; main()")


def start_timeout_s(config: ServerConfig) -> float:
    """How long a server with these settings may take until it listens, or says why it does not."""
    timeout_s = START_TIMEOUT_S if config.journal_dir is None else RECOVERY_TIMEOUT_S
    return timeout_s + OPEN_TIMEOUT_S if config.engine or config.transport else timeout_s


def start(config: ServerConfig, orphan: bool = False, lock: int = -1) -> LocalServer:
    """Start a server and wait until it listens. Raises `ServiceUnavailable` when it does not, or the error it ends
    with: `ConfigError` for a setting or sampler it cannot work with.

    Its run directory is a fresh one when `config` names none. `orphan`: it is no child of this process, for hosts of
    processes that kill all children of theirs at once; give it an `owner_pid`, so that it ends by itself.
    `lock`: a descriptor that the server holds open until it listens (see `lock`).
    """
    refuse_while_running()
    fresh = not config.run_dir
    life, theirs = os.pipe()
    config = msgspec.structs.replace(config, run_dir=config.run_dir or new_run_dir(), lock=lock, life=theirs)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        process = subprocess.Popen(
            [sys.executable, *(ORPHAN_COMMAND if orphan else COMMAND)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            pass_fds=(theirs,) if lock < 0 else (theirs, lock),
            start_new_session=True,
        )
    except BaseException:
        os.close(life)
        if fresh:
            clear_run_dir(config.run_dir)
        raise
    finally:
        os.close(theirs)
    server = LocalServer(process, config.run_dir, life)
    try:
        answer = _told(process, config)
        if not isinstance(answer, Ready):
            raise _not_started(answer, start_timeout_s(config))
        if orphan:
            process.wait()  # the one in between
        server.listens(answer)
    except BaseException:  # an interrupt too: nobody else would know of it
        server.give_up(fresh)
        raise
    return server


def _told(process: subprocess.Popen[bytes], config: ServerConfig) -> Ready | NotStarted | None:
    """What the process says once it was told its settings; None when it ends, or says nothing for too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(msgspec.json.encode(config))
        line = _first_line(process.stdout.fileno(), start_timeout_s(config))
    return msgspec.json.decode(line, type=Ready | NotStarted) if line else None


def _not_started(answer: Ready | NotStarted | None, timeout_s: float) -> TransferQueueError:
    if isinstance(answer, NotStarted):
        return error_from_code(answer.code, answer.text)
    return ServiceUnavailable(f"the server ended or took more than {timeout_s:g} s to start; see its messages above")


def end(server: ProcessIdentity) -> None:
    """End a server that another process started, and wait, at most some seconds: its standby ends with it."""
    try:
        watch = os.pidfd_open(server.pid)
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if server.lives():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(server.pid), number)  # the group that `start` gave it
                is_readable(watch, STOP_TIMEOUT_S)
    finally:
        os.close(watch)


def is_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Whether there is something to read, or the other end is closed, at the latest after `timeout_s` (None: blocks).
    Of any descriptor: select(2) knows 1,024 of them."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else 1000 * timeout_s))


def _first_line(descriptor: int, timeout_s: float) -> bytes:
    """What is written to a pipe up to the first newline; empty when it closes or the time is up first."""
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        is_ready = is_readable(descriptor, max(0.0, deadline - time.monotonic()))
        data = os.read(descriptor, 4096) if is_ready else b""
        if not data:
            return b""
        line += data
    return line
