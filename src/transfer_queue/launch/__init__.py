"""Finding the service of this job, or starting one.

    launcher           what `transfer_queue.init` needs of a launcher
     ├─ local          one server process on this host, shared through a run directory that its users name
     ├─ shared         one per job and host
     │   ├─ job        which processes belong together
     │   └─ hosts      how the hosts of a job find each other
     └─ ray            one server process per node of a Ray cluster, found by an actor's name
         ├─ actors     supervise the servers
         └─ questions  what other programs ask an actor of that name

Who shares a service without saying so: the ranks of torchrun (one agent), the tasks of a Slurm step, ranks by
MASTER_ADDR and MASTER_PORT, a program and what it started with multiprocessing. The job's key names a run directory
in the private one of the user (`server/host_registry.py`); its lock, which the new server holds until it listens, lets
one of them start. The service of torchrun and Slurm ends with the job's leader, their agent or step, which outlives a
restart of workers; that of a program with the program; that of bare ranks when nobody has been attached for a while.
Keys and owners are process numbers with start times, keys also with the namespace of these numbers, so neither the
remains of a dead job nor another container attract anybody. A process that was
started before an ancestor's `init` finds that ancestor's server in the register; one started later has TQ_ADDRESS, or
was meant not to. On several hosts the first one listens on TCP and leaves address and tokens in torch's store, or all
have TQ_TOKEN and reckon the port; other hosts join a unit, or attach by TCP. Where neither is possible nothing
starts: `ConfigError`.

Nothing here imports ray before the process itself has initialised it. Nothing else in the package imports it but the
storage engine RayStore, where that was chosen.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from transfer_queue.launch.launcher import Launcher
from transfer_queue.server import host_registry
from transfer_queue.wire.address import Address
from transfer_queue.wire.server_info import ZMQServerInfo, server_info


def choose(run_dir: str, joins: bool = False, recovers: bool = False) -> Launcher:
    """The launcher of a run directory that is named; else Ray's in a process of a Ray cluster; else that of this job.

    `joins`: this process asks for a unit of a service elsewhere, which is its own. `recovers`: the service has a
    journal to read. Raises `ConfigError` where the environment says half of what a job must.
    """
    if not run_dir and in_ray():
        from transfer_queue.launch.ray import RayLauncher

        return RayLauncher(recovers)
    if run_dir or joins:
        from transfer_queue.launch.local import LocalLauncher

        return LocalLauncher(run_dir)
    from transfer_queue.launch.job import this_job
    from transfer_queue.launch.shared import JobLauncher

    return JobLauncher(this_job())


def left_behind(address: Address) -> bool:
    """Whether the server at an address is a unit of this job on this host whose service died, while the first host has
    another one by now. Raises `ConfigError` where the environment says half of what a job must."""
    if not address.is_local or os.path.dirname(os.path.dirname(address.path)) != host_registry.private_path():
        return False
    from transfer_queue.launch.job import this_job
    from transfer_queue.launch.shared import JobLauncher

    return JobLauncher(this_job()).left_behind(address) is not None


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
