"""Forks of a server: a copy of its state that looks at nothing else of it."""

from __future__ import annotations

import contextlib
import os
import stat


def disconnect(kept: set[int]) -> list[int]:
    """Every other descriptor above standard error leads to /dev/null: peers see that the server is gone when it is, and
    no number is free to be closed by its former owner when it is somebody else's. Returns those that were connections,
    or watched a process: their owners are never taken apart (`gc.freeze`), so they may be closed once the server is
    gone."""
    lost = []
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept and number != nowhere:
            with contextlib.suppress(OSError):  # that of the listing itself
                kind, is_watch = os.fstat(number).st_mode, "[pidfd]" in os.readlink(f"/proc/self/fd/{name}")
                if not stat.S_ISCHR(kind):
                    os.dup2(nowhere, number, inheritable=False)
                if stat.S_ISSOCK(kind) or is_watch:
                    lost.append(number)
    return lost
