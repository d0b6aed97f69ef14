"""What a server is started with."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from transfer_queue.errors import ConfigError
from transfer_queue.memory.memfd import free_nbytes, is_memory
from transfer_queue.storage.blocks import NOWHERE, SpillSpace
from transfer_queue.structs import decodable
from transfer_queue.wait_queue import NOTICE_AFTER_S
from transfer_queue.wire.messages.staleness import Policy

Durability: TypeAlias = Literal["none", "process", "machine"]
SOCKET_NAME, DOOR_NAME = "tq.sock", "door.sock"
MAX_SOCKET_PATH = 107  # bytes (unix(7))
AWAY_S, LASTING_AWAY_S = 60.0, 3600.0  # for how long the rows of a unit are waited for; with a journal
MEMORY_SHARE = 0.6
DISK_SHARE = 0.95  # of what is free where the arena files are: their books need space as well


def clear_run_dir(run_dir: str) -> None:
    """Remove a server's sockets, and the directory when nothing else is in it."""
    for name in (SOCKET_NAME, DOOR_NAME):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(run_dir, name))
    with contextlib.suppress(OSError):
        os.rmdir(run_dir)


def default_budget(root: Path = Path("/")) -> int:
    """A share of the memory this process may use: the machine's, or that of the least of its control groups."""
    return int(min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits(root)]) * MEMORY_SHARE)


def _group_limits(root: Path) -> Iterator[int]:
    """What each control group of this process and those above it may have (cgroups(7)). A container sees its own as the
    top, under whatever path; `root` has `proc` and `sys`."""
    try:
        lines = (root / "proc/self/cgroup").read_text().strip("\n").splitlines()
    except OSError:
        lines = []
    groups, found = root / "sys/fs/cgroup", {"": "/", "memory": "/"}  # the tops where nothing is listed
    found.update((kind, path) for _, kinds, path in (line.split(":", 2) for line in lines) for kind in kinds.split(","))
    for top, name, kind in (
        (groups, "memory.max", ""), (groups / "unified", "memory.max", ""),
        (groups / "memory", "memory.limit_in_bytes", "memory"),
    ):  # fmt: skip
        own = top / found[kind].lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(top):
                with contextlib.suppress(OSError, ValueError):  # it is not to be seen, or "max"
                    yield int((group / name).read_text())


def budget_of(config: ServerConfig) -> int:
    """The bytes that the blocks of a server may have: what was configured, else the default of this host.

    Arena files must fit where they lie: raises `ConfigError` when what was configured does not, or nothing does.
    """
    wanted = config.budget_nbytes or default_budget()
    free = None if config.arena_dir is None else free_nbytes(config.arena_dir)
    if free is None or (config.budget_nbytes and wanted <= free):
        return wanted
    if config.budget_nbytes or not free:
        raise ConfigError(
            f"backend.SimpleStorage.budget_nbytes: {wanted} bytes, but {config.arena_dir} (arena_dir) has {free} bytes"
            " free"
        )
    return min(wanted, int(free * DISK_SHARE))


def spill_of(config: ServerConfig) -> SpillSpace:
    """Where blocks go that have no room in memory. Raises `ConfigError` when what was configured does not fit there."""
    if config.spill_dir is None:
        return NOWHERE
    free = free_nbytes(config.spill_dir, "spill_dir")
    if free is None or is_memory(config.spill_dir):
        raise ConfigError(f"backend.SimpleStorage.spill_dir: {config.spill_dir!r} is memory, not a disk")
    if config.spill_nbytes > free or not free:
        raise ConfigError(
            f"backend.SimpleStorage.spill_nbytes: {config.spill_nbytes} bytes, but {config.spill_dir} has {free} free"
        )
    return SpillSpace(config.spill_dir, config.spill_nbytes or int(free * DISK_SHARE))


def journal_of_unit(journal_dir: str | None) -> str | None:
    """Where the unit that a job starts on this host keeps its journal: beside that of the service, which may be here
    the next time, and beside those of other hosts, for they may share the directory."""
    return None if journal_dir is None else os.path.join(journal_dir, f"unit-{socket.gethostname()}")


@decodable
class ServerConfig(msgspec.Struct, kw_only=True):
    """All settings of one server process; travels as JSON over its standard input.

    run_dir: directory (mode 0700) for its sockets. owner_pid: end when this process ends (0: standalone); owner_start:
    when that began (`processes.ProcessIdentity`; 0: not known). linger_s: end when nobody has been attached for so
    long (None: stay).
    job: for whom it was started, as a person reads it. lock: a descriptor to close once it listens (-1: none).
    host, port, token: serve TCP there, peers must know the token ("" : no TCP). unit_token: what
    servers that join as storage units must know besides (""; none may). join: the address of the controller's
    server ("tcp:HOST:PORT"), of whose service this is one more storage unit ("": this is the controller's server;
    max_rows, reserved_rows, sampler and client do not count for others). budget_nbytes: bytes of all blocks (0: see
    `budget_of`). max_rows: rows of all partitions (None: unbounded). reserved_rows: rows a partition has from the
    start. trim_after_s: free memory that was not needed for this long goes back to the system.
    arena_dir: directory of the arena files instead of anonymous memory. spill_dir: directory for blocks that have
    no room in memory (None: they have to wait). spill_nbytes: bytes of these (0: what is free there). sampler: a
    sampler's spec. client: what attaching clients learn. metrics_port: serve Prometheus metrics on this port (None:
    no metrics). metrics_host: at this address ("": `host`, but loopback where that is none or every address).
    logging_level: a level of the logging module. staleness: how old rows may be. max_deliver: how often a task has
    a row on a lease in vain before it is a dead letter (None: never). notice_after_s: when callers that wait are
    told what is missing, ascending. durability: what the rows survive: "none", or "process", the server's being
    killed, for a standby takes over; or "machine", everything but the loss of a disk, for a journal there has them.
    engine, engine_settings: where the bytes of large blocks lie ("": in arenas), a name and its settings.
    transport: how those of arenas travel between hosts, its `name` and `settings` (empty: over our connections, or as
    the controller of `join` says). backend_required: do not start where that does not work; else do without.
    journal_dir: its directory (None: there is no journal). away_s: for how long the controller waits for the rows of
    this unit when it is away. spin_s: how long it looks for the next request before it sleeps. life: a descriptor that
    stays open as long as the server or its standby lives (-1: none).
    """

    run_dir: str
    owner_pid: int = 0
    owner_start: int = 0
    linger_s: float | None = None
    job: str = ""
    lock: int = -1
    host: str = ""
    port: int = 0
    token: str = ""
    unit_token: str = ""
    join: str = ""
    budget_nbytes: int = 0
    max_rows: int | None = None
    reserved_rows: int = 1
    trim_after_s: float = 60.0
    arena_dir: str | None = None
    spill_dir: str | None = None
    spill_nbytes: int = 0
    sampler: dict[str, Any] = {}
    client: dict[str, Any] = {}
    metrics_port: int | None = None
    metrics_host: str = ""
    logging_level: str = "WARNING"
    staleness: Policy = Policy()
    max_deliver: int | None = None
    notice_after_s: tuple[float, ...] = NOTICE_AFTER_S
    durability: Durability = "none"
    journal_dir: str | None = None
    away_s: float = AWAY_S
    spin_s: float = 0.0
    engine: str = ""
    engine_settings: dict[str, Any] = {}
    transport: dict[str, Any] = {}
    backend_required: bool = True
    life: int = -1


@decodable
class NotStarted(msgspec.Struct, kw_only=True, tag=True):
    """What the server prints instead when it cannot be started like that: an error's code and text."""

    code: str
    text: str


@decodable
class Ready(msgspec.Struct, kw_only=True, tag=True):
    """What the server prints once it listens: its addresses ("" where there is none)."""

    pid: int
    unix: str = ""
    tcp: str = ""
