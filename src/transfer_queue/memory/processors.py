"""How many processors this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_processors(groups: Path = GROUPS, mine: Path = MINE) -> float:
    """Those that it may run on (taskset, Slurm), or as many as the quotas of its control groups are worth (containers),
    which need not be whole. `groups` and `mine`: where the kernel says so, see cgroups(7)."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(groups, mine)])


def _quotas(groups: Path, mine: Path) -> Iterator[float]:
    """In processors; of each group that this process is in and that has one."""
    with contextlib.suppress(OSError):
        for line in mine.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = groups / "cpu" if controllers else groups  # the first version of control groups, the second
            group = top / path.lstrip("/")
            for one in (group, *group.parents):
                if one.is_relative_to(top):
                    yield from _quota(one)


def _quota(group: Path) -> Iterator[float]:
    """`group` may be named as the host sees it, and not be there: its limits are at the top then."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()
        yield int(quota) / int(period)  # "max" is no number
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / int(period)
