"""Finding the service of this job, or starting one.

    launcher     what `transfer_queue.init` needs of a launcher
     ├─ local    one server process on this host, shared through a run directory or the environment
     └─ ray      one server process per node of a Ray cluster, found by an actor's name; `actors` supervise them

Nothing outside this package imports ray, and nothing here does before the process itself has initialised it.
"""

from __future__ import annotations

import sys

from transfer_queue.launch.launcher import Launcher


def choose(run_dir: str) -> Launcher:
    """Ray's launcher in a process of a Ray cluster, unless a run directory is named; otherwise the local one."""
    if not run_dir and in_ray():
        from transfer_queue.launch.ray import RayLauncher

        return RayLauncher()
    from transfer_queue.launch.local import LocalLauncher

    return LocalLauncher(run_dir)


def in_ray() -> bool:
    """Whether this process is connected to a Ray cluster. Neither imports nor initialises ray."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())
