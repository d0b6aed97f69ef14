"""What a server is started with."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec

SOCKET_NAME, DOOR_NAME = "tq.sock", "door.sock"


def clear_run_dir(run_dir: str) -> None:
    """Remove a server's sockets, and the directory when nothing else is in it."""
    for name in (SOCKET_NAME, DOOR_NAME):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(run_dir, name))
    with contextlib.suppress(OSError):
        os.rmdir(run_dir)


class ServerConfig(msgspec.Struct, kw_only=True):
    """All settings of one server process; travels as JSON over its standard input.

    run_dir: directory (mode 0700) for its sockets. owner_pid: end when this process ends (0: standalone).
    host, port, token: serve TCP there, peers must know the token ("" : no TCP). budget_nbytes: bytes of all blocks.
    max_rows: rows of all partitions (None: unbounded). reserved_rows: rows a partition has from the start.
    trim_after_s: free memory that was not needed for this long goes back to the system. arena_dir: directory of the
    arena files instead of anonymous memory. sampler: a sampler's spec. client: what attaching clients learn.
    join: tcp:HOST:PORT of a service that this server becomes a unit of, with the same token ("": a service of its own).
    """

    run_dir: str
    owner_pid: int = 0
    host: str = ""
    port: int = 0
    token: str = ""
    budget_nbytes: int
    max_rows: int | None = None
    reserved_rows: int = 1
    trim_after_s: float = 60.0
    arena_dir: str | None = None
    sampler: dict[str, Any]
    client: dict[str, Any] = {}
    join: str = ""


class Ready(msgspec.Struct, kw_only=True):
    """What the server prints once it listens: its addresses ("" where there is none)."""

    pid: int
    unix: str
    tcp: str
