"""Processes of this host: who started whom, and how one is told from a later one with the same number (proc(5))."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_DEPTH = 128
TICKS = os.sysconf("SC_CLK_TCK")


class ProcessIdentity(NamedTuple):
    """A process. `start`: when it began, in ticks since the host did; a number alone may be another's by now."""

    pid: int
    start: int

    def lives(self) -> bool:
        return identity_of(self.pid) == self


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third one on; empty for a process that has ended or is out of sight."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return [] if fields[0] in "ZX" else fields


def identity_of(pid: int) -> ProcessIdentity | None:
    """The process of that number; None when there is none, or only its remains."""
    fields = _stat(pid)
    return ProcessIdentity(pid, int(fields[19])) if fields else None


def parent_of(pid: int) -> int:
    """Who started it, or took it over; 0 where that is out of sight."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def ancestors(pid: int) -> list[int]:
    """Parent, grandparent and so on of a process, as far as they can be seen."""
    found: list[int] = []
    while (pid := parent_of(pid)) > 0 and len(found) < MAX_DEPTH:
        found.append(pid)
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The variables a process was started with, not what it set since; none of another user's process."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition("=") for item in data.decode(errors="replace").split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty when it has none, has ended, or may not be looked at."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return data.decode(errors="replace").rstrip("\0").split("\0") if data else []


def now() -> int:
    """Now, in ticks since the host began: comparable with the start of a process."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)


def view() -> str:
    """Names what process numbers mean here: this life of this host, and the namespace of its numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{boot[:12]}-{os.stat('/proc/self/ns/pid').st_ino:x}"


@contextlib.contextmanager
def ending_with(owner: int) -> Iterator[None]:
    """Until the block ends, this process ends at once when the process `owner` (0: none) does: what a user wrote runs
    in it, and may hang for ever. No thread is left then."""
    try:
        life = os.pidfd_open(owner) if owner else -1
    except ProcessLookupError:
        life = -1
    if life < 0:
        yield
        return
    ended, end = os.pipe()
    watch = threading.Thread(target=_end_with, args=(life, ended), name="tq-owner", daemon=True)
    watch.start()
    try:
        yield
    finally:
        os.close(end)
        watch.join()
        os.close(ended)
        os.close(life)


def _end_with(life: int, ended: int) -> None:
    """`ended`: a pipe whose other end is closed when there is nothing to watch any more."""
    looking = select.poll()
    looking.register(life, select.POLLIN)
    looking.register(ended, select.POLLIN)
    if all(descriptor == life for descriptor, _ in looking.poll()):
        os._exit(1)
