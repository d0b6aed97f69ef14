"""Which processes belong together: the job of this process, read from its environment and its ancestors.

    torchrun    TORCHELASTIC_RUN_ID and the agent, the nearest ancestor that is no process of the run
    Slurm       SLURM_JOB_ID and SLURM_STEP_ID, of a step of several tasks
    ranks       MASTER_ADDR, MASTER_PORT and WORLD_SIZE where somebody else set RANK
    program     a process and what it started with multiprocessing

The first one that holds counts. Nothing here starts, connects or writes.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from transfer_queue.errors import ConfigError
from transfer_queue.server import processes
from transfer_queue.server.host_registry import ServerEntry
from transfer_queue.server.processes import ProcessIdentity
from transfer_queue.wire.address import is_here, is_loopback

LINGER_S = 10.0


class HostSpan(NamedTuple):
    """How a job lies on several hosts. `here_first`: this is the host of its first process. `first`: the name of that
    host. `certain`: whether there are several; where nobody says, it is not. `attempt`: which start of the workers."""

    here_first: bool
    first: str
    certain: bool
    attempt: str = "0"


class Job(NamedTuple):
    """Processes that share a service. `title`: as a person reads it. `key`: the same in all of them on one host, and in
    no other job. `leader`: with whose end the job ends (None: with the last process that uses the service).
    `common`: the same on all hosts. `span`: None on one host."""

    title: str
    key: str
    leader: ProcessIdentity | None
    common: str = ""
    span: HostSpan | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this process leads it: then it owns what it starts."""
        return self.leader is not None and self.leader.pid == os.getpid()

    @property
    def linger_s(self) -> float | None:
        """How long its service stays without users. The first process of a host or container outlives its jobs, too."""
        return LINGER_S if self.leader is None or self.leader.pid == 1 else None


def this_job() -> Job:
    """The job of this process. Raises `ConfigError` where the environment says half of what it must."""
    environ = os.environ
    return _torchrun(environ) or _slurm(environ) or _ranks(environ) or _program()


def named(*parts: object) -> str:
    """A short name for a file or a port, of which nobody can tell the parts."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:20]


def _torchrun(environ: Mapping[str, str]) -> Job | None:
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    leader = _leader({"TORCHELASTIC_RUN_ID": run})
    common = named("torchrun", run, environ.get("MASTER_ADDR"), environ.get("MASTER_PORT"))
    span = None
    if environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE"):
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        span = HostSpan(environ.get("GROUP_RANK") == "0", environ.get("MASTER_ADDR", ""), True, attempt)
    shared = (processes.view(), *leader) if leader is not None else (common,)
    return Job(f"torchrun {run}", named("torchrun", run, *shared), leader, common, span)


def _slurm(environ: Mapping[str, str]) -> Job | None:
    ids = {name: environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")}
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    if not all(ids.values()) or "SLURM_PROCID" not in environ or tasks == "1":
        return None  # a script of `sbatch`, a shell of `salloc`, or a step that is one program
    common = named("Slurm", environ.get("SLURM_CLUSTER_NAME"), *ids.values(), environ.get("SLURM_RESTART_COUNT"))
    span = None
    if (environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1")) != "1":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
        span = HostSpan(environ.get("SLURM_NODEID") == "0", first_node(nodes), True)
    title = f"Slurm step {ids['SLURM_JOB_ID']}.{ids['SLURM_STEP_ID']}"
    return Job(title, named(common, processes.view()), _leader(ids), common, span)


def _ranks(environ: Mapping[str, str]) -> Job | None:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    found = {name: environ.get(name, "") for name in names}
    if not all(found.values()) or found["WORLD_SIZE"] == "1":
        return None
    parent = multiprocessing.parent_process()
    if parent is not None and "RANK" not in processes.environment_of(_root(parent.pid or 0)):
        return None  # a program that made its own processes ranks
    address, port, size, _ = found.values()
    common = named("ranks", address, port, size)
    span = None
    if size != environ.get("LOCAL_WORLD_SIZE", "") and not is_loopback(address):
        span = HostSpan(is_here(address), address, "LOCAL_WORLD_SIZE" in environ)
    return Job(f"ranks at {address}:{port}", named(common, processes.view()), None, common, span)


def _program() -> Job:
    parent = multiprocessing.parent_process()
    pid = os.getpid() if parent is None else _root(parent.pid or 0)
    leader = processes.identity_of(pid)
    if leader is None:  # a child that outlived its program
        leader = processes.identity_of(os.getpid()) or ProcessIdentity(os.getpid(), 0)
    return Job(f"program {leader.pid}", named("program", processes.view(), *leader), leader)


def _root(pid: int) -> int:
    """The process in which a program of several began: up from one of them, past all that multiprocessing started.

    It forks processes, which keep the command line of their parent, or starts them under its own name.
    """
    for above in processes.ancestors(pid):
        command = processes.command_of(pid)
        spawned = any(word.startswith("from multiprocessing.") for word in command[1:])
        if not spawned and (not command or command != processes.command_of(above)):
            break
        pid = above
    return pid


def _leader(marks: Mapping[str, str]) -> ProcessIdentity | None:
    """The nearest ancestor that was started without these variables: who started the processes that have them."""
    for pid in processes.ancestors(os.getpid()):
        found = processes.environment_of(pid)
        if any(found.get(name) != value for name, value in marks.items()):
            return processes.identity_of(pid)
    return None


def first_node(nodes: str) -> str:
    """The first host of a Slurm host list such as `gpu[07-09,12],login1`. Raises `ConfigError`."""
    found = re.match(r"([^,\[\]]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[\]]*))?", nodes)
    if found is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodes!r}: not a list of hosts")
    name, number, rest = found.groups(default="")
    return name + number + rest


def inherited(entries: list[ServerEntry]) -> ServerEntry | None:
    """The server of an ancestor that began after the branch of this process did: the branch could not learn of it.

    Whoever is started later learns it from TQ_ADDRESS, or was meant not to.
    """
    branch = os.getpid()
    for above in processes.ancestors(branch):
        began = processes.identity_of(branch)
        for entry in reversed(entries):
            if (
                entry.owner is not None
                and entry.owner == processes.identity_of(above)
                and began
                and began.start < entry.since
            ):
                return entry
        branch = above
    return None


def kept_by_children(entries: list[ServerEntry], job: Job) -> ServerEntry | None:
    """A server that a process started by this one began for itself."""
    for entry in entries:
        owner = entry.owner
        if owner is not None and job.is_ours and os.getpid() in processes.ancestors(owner.pid):
            return entry
    return None
