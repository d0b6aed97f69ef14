"""Saving and loading a store; case 21."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.cases.batches import LONG_S, dense_nbytes, dense_spec, loader
from bench.fleet import Pair
from bench.result import Row, Samples
from bench.rounds import Bench

ROUNDS = 3
ROWS = 256
MEMORY = Path("/dev/shm")
ROOM = 4
"""Times the payload that a directory has to have free: two checkpoints, one of which is being replaced."""


def checkpoints(bench: Bench) -> list[Row]:
    """Case 21: 1.07 GB in puts of one row, to a directory on disk and to one in memory."""
    spec = dense_spec(8, 32768 if bench.options.quick else 131072, ROWS)
    rows: list[Row] = []
    for name, parent in (("disk", bench.options.out), ("/dev/shm", MEMORY)):
        if not has_room(parent, ROOM * dense_nbytes(spec)):
            rows.append(Row(case=21, what=f"checkpoint to {name}", skipped=f"less than {ROOM} times the bytes free"))
            continue
        directory = tempfile.mkdtemp(prefix="tqb-checkpoint-", dir=parent)
        try:
            rows += checkpoint_rows(saved_and_loaded(bench, spec, directory), name, dense_nbytes(spec))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    return rows


def has_room(directory: Path, nbytes: int) -> bool:
    if not directory.is_dir():
        return False
    found = os.statvfs(directory)
    in_memory = directory == MEMORY
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found.f_bavail * found.f_frsize >= nbytes and (not in_memory or available >= nbytes)


def saved_and_loaded(bench: Bench, spec: dict[str, Any], directory: str) -> Samples:
    """Rounds of a save and a load; what was loaded is checked."""
    load = loader(spec)

    def prepare(pair: Pair, system: str) -> None:
        load(pair, system)
        pair.writer.call("checkpoints.fill", LONG_S, spec=spec, partition="kept")

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        del number
        where = f"{directory}/{system}"
        saved = pair.writer.call("checkpoints.save", LONG_S, directory=where)
        loaded = pair.writer.call("checkpoints.load", LONG_S, directory=where)
        pair.reader.call("bulk.get", LONG_S, spec=spec, partition="kept")
        pair.writer.call("checkpoints.remove", LONG_S, directory=where)
        nbytes = dense_nbytes(spec)
        rates = {"save": saved["s"], "durable": saved["durable_s"], "load": loaded["s"]}
        return {name: nbytes / seconds for name, seconds in rates.items()} | {"size": saved["nbytes"] / nbytes}

    def cleanup(pair: Pair, system: str) -> None:
        del system
        pair.writer.call("calls.clear_partition", partition="kept")

    return bench.rounds(body, systems=["ours", "tq"], prepare=prepare, cleanup=cleanup, at_most=ROUNDS)


def checkpoint_rows(samples: Samples, name: str, nbytes: int) -> list[Row]:
    what = f"checkpoint of {nbytes / 1e9:.2g} GB to {name}"
    durable = samples.row(21, f"{what}: save until all files are synced", "durable", unit="B/s")
    size = [f"{system} {samples.quantile(system, 'size') or 0:.2f}" for system in samples.by_system]
    durable.notes.append("files over payload: " + ", ".join(size))
    load = samples.row(21, f"{what}: load", "load", unit="B/s")
    load.notes.append("just after saving, so from the page cache; ours verifies every byte's digest, as it always does")
    return [samples.row(21, f"{what}: save", "save", unit="B/s"), durable, load]
