"""Finding the service of this job, or starting one.

    launcher     what `transfer_queue.init` needs of a launcher
     ├─ local    one server process on this host, shared through a run directory or the environment
     └─ ray      one server process per node of a Ray cluster, found by an actor's name; `actors` supervise them, and
                 answer what other programs ask an actor of that name (`questions`)

Nothing outside this package imports ray, and nothing here does before the process itself has initialised it.
"""

from __future__ import annotations

import sys
from typing import Any

from transfer_queue.launch.launcher import Launcher
from transfer_queue.wire.address import Address
from transfer_queue.wire.server_info import ZMQServerInfo, server_info


def choose(run_dir: str) -> Launcher:
    """Ray's launcher in a process of a Ray cluster, unless a run directory is named; otherwise the local one."""
    if not run_dir and in_ray():
        from transfer_queue.launch.ray import RayLauncher

        return RayLauncher()
    from transfer_queue.launch.local import LocalLauncher

    return LocalLauncher(run_dir)


def controller_actor() -> Any:
    """The actor of this Ray cluster's service; None without Ray, and where the cluster has no service."""
    if not in_ray():
        return None
    from transfer_queue.launch.ray import find_controller

    return find_controller()


def service_info(address: Address, controller: Any) -> ZMQServerInfo:
    """What other clients attach with to the service at `address`, which `controller` has, or nobody's actor (None)."""
    if controller is None:
        return server_info(address)
    from transfer_queue.launch.ray import server_info_of

    return server_info_of(controller)


def in_ray() -> bool:
    """Whether this process is connected to a Ray cluster. Neither imports nor initialises ray."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())
