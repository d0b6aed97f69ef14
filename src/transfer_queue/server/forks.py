"""Forks of a server: a copy of its state that looks at nothing else of it."""

from __future__ import annotations

import contextlib
import os
import signal
import stat

# Of processes that were watched, and of event loops. Not the pipes of those: libuv writes there in handlers of signals.
UNUSED = {f"anon_inode:[{kind}]" for kind in ("pidfd", "eventpoll", "eventfd", "io_uring")}


def watch(pid: int) -> int:
    """A descriptor that is readable when this fork has ended (pidfd_open(2)). Raises `OSError` where there is none to
    be had; then the fork is gone, for nobody would hear of its end."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def disconnect(kept: set[int]) -> list[int]:
    """Every other descriptor above standard error leads to /dev/null: peers see that the server is gone when it is, and
    no number is free to be closed by its former owner when it is somebody else's. Returns those that were connections,
    or `UNUSED`: their owners are never taken apart (`gc.freeze`), so they may be closed once the server is gone."""
    lost = []
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept and number != nowhere:
            with contextlib.suppress(OSError):  # that of the listing itself
                kind, is_unused = os.fstat(number).st_mode, os.readlink(f"/proc/self/fd/{name}") in UNUSED
                if not stat.S_ISCHR(kind):
                    os.dup2(nowhere, number, inheritable=False)
                if stat.S_ISSOCK(kind) or is_unused:
                    lost.append(number)
    os.close(nowhere)
    return lost
