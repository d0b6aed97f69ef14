"""A server's directory: made, held by one server at a time, and removed where that was killed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator

from transfer_queue.errors import ConfigError
from transfer_queue.server.settings import DOOR_NAME, SOCKET_NAME, clear_run_dir
from transfer_queue.wire.peer import still_listens, unsafe

VACATE_S = 5.0  # how long the server before may take to leave its run directory


async def move_in(run_dir: str) -> int:
    """Make a server's directory and hold it (flock(2)), so that of two servers one clears up before the other begins.

    Returns the descriptor that holds it. Raises `ConfigError` where it is not ours, or another server is there.
    """
    deadline = time.monotonic() + VACATE_S
    while True:
        try:
            os.makedirs(run_dir, mode=0o700, exist_ok=True)
            why = unsafe(run_dir)
            home = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and os.path.isdir(os.path.dirname(run_dir)):
                continue  # the server before has just removed it
            raise ConfigError(f"run_dir: {error}") from error
        try:
            if why:
                raise ConfigError(f"run_dir: {why}")
            paths = [os.path.join(run_dir, name) for name in (SOCKET_NAME, DOOR_NAME)]
            removed = [path for path in paths if _is_served_unseen(path)]
            if not removed and _holds(home, run_dir):
                for path in paths:  # of a server that was killed
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                return home
            if time.monotonic() > deadline:
                why = f": its socket {removed[0]} was removed, and it still runs" if removed else ""
                raise ConfigError(f"another server does not leave {run_dir}{why}")
        except BaseException:
            os.close(home)
            raise
        os.close(home)
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def taken(path: str) -> Iterator[bool]:
    """Hold a run directory, or the file of a lock, of a process that was killed. False where one that lives has it, or
    may: a server and its standbys hold their directory as long as they live, and who starts one holds its lock."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _is_left(found, path)
    finally:
        os.close(found)


def _is_left(found: int, path: str) -> bool:
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(found), os.stat(path, follow_symlinks=False))
    except OSError:  # somebody has it, or has removed it; or the file system cannot say
        return False


def vacate(path: str) -> None:
    """Remove what a killed server left of its directory, or a killed starter of its lock. What is held stays: who waits
    for it meanwhile finds it gone, and makes another one. Does not raise."""
    with taken(path) as ours, contextlib.suppress(OSError):
        if ours and stat.S_ISDIR(os.stat(path).st_mode):
            clear_run_dir(path)
        elif ours:
            os.unlink(path)


def _holds(home: int, run_dir: str) -> bool:
    """Take hold of an open directory: False when another server has it, or has removed it."""
    try:
        with contextlib.suppress(OSError):  # a file system without such locks
            try:
                fcntl.flock(home, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return os.path.samestat(os.fstat(home), os.stat(run_dir))
    except FileNotFoundError:
        return False


def _is_served_unseen(path: str) -> bool:
    """Whether a server listens there though nothing lies there: it is about to leave, or somebody removed its socket.
    Raises `ConfigError` where one listens that others can reach."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return still_listens(path)
        except ConnectionRefusedError:
            return False
    raise ConfigError(f"another server listens on {path}")
