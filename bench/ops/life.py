"""Joining and leaving a system, what a process weighs, and how long a fresh one takes to get ready."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from typing import Any

from bench import procfs
from bench.session import Session


def hello(session: Session) -> dict[str, Any]:
    """Say who answers; imports nothing of the system."""
    return {"system": session.name, "python": sys.version.split()[0], "pid": os.getpid()}


def serve(session: Session, options: dict[str, Any]) -> dict[str, Any]:
    """Start the system in this process; the answer is what `attach` needs."""
    return session.system.serve(options)


def attach(session: Session, connection: dict[str, Any]) -> dict[str, Any]:
    """Join the system that another process serves."""
    session.system.attach(connection)
    return {}


def versions(session: Session, packages: list[str]) -> dict[str, Any]:
    """Installed versions by package, absent ones left out."""
    from importlib import metadata

    found = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions()}
    answer = {name: found[name.lower()] for name in packages if name.lower() in found}
    if session.name == "ours":
        answer["transfer_queue"] = session.tq.__version__
    return answer


def own_memory(session: Session) -> dict[str, Any]:
    """This process's smaps_rollup in bytes, garbage collected first."""
    del session
    gc.collect()
    return dict(procfs.memory())


def store_memory(session: Session) -> dict[str, Any]:
    """Ours only: bytes that the store holds, its arenas' resident pages and the server's own anonymous memory."""
    stats = session.tq.get_client().stats()
    return {"arena": stats["arena_nbytes_resident"], "server": procfs.anonymous_nbytes([stats["pid"]])}


def cold_start(session: Session) -> dict[str, Any]:
    """Times in a fresh process: importing the package after torch and tensordict, and the first `init()`.

    The names that every user touches are resolved too, since the package may load them lazily. For TransferQueue
    0.1.11 a Ray cluster has to be started first; that is `cluster_s`.
    """
    import tensordict  # noqa: F401
    import torch  # noqa: F401

    seconds: dict[str, float] = {}
    start = time.perf_counter()
    tq: Any = importlib.import_module("transfer_queue")
    seconds["bare_import_s"] = time.perf_counter() - start
    names = ("kv_put", "kv_batch_get", "get_client", "TransferQueueClient", "BatchMeta", "KVBatchMeta")
    for name in names:
        getattr(tq, name)
    seconds["import_s"] = time.perf_counter() - start
    if session.name == "tq":
        from bench.ray_store import RayHead

        start = time.perf_counter()
        session.scratch["head"] = head = RayHead()
        head.serve({"num_cpus": 16})
        seconds["cluster_s"] = time.perf_counter() - start
    start = time.perf_counter()
    tq.init()
    seconds["init_s"] = time.perf_counter() - start
    tq.close()
    if session.name == "tq":
        session.scratch.pop("head").close()
    return dict(seconds)
