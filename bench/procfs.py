"""Memory and children of processes, read from /proc. Standard library only; used by the driver and by agents."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def memory(pid: int | str = "self") -> dict[str, int]:
    """Return bytes by name (Rss, Pss, Anonymous, Shared_Dirty, ...) from smaps_rollup; {} when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def anonymous_nbytes(pids: Iterable[int | str]) -> int:
    """Sum of the private anonymous memory of these processes; processes that are gone count nothing."""
    return sum(memory(pid).get("Anonymous", 0) for pid in pids)


def processor_s(pid: int) -> float:
    """Seconds that all threads of a process have had a processor, to within a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, without `pid` itself."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := parent_of(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def parent_of(entry: Path) -> int | None:
    """Parent of the process at /proc/PID, None when it ended meanwhile. The name may hold spaces and brackets."""
    try:
        stat = (entry / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[1])
