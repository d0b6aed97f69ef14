"""Saving a store to a directory and loading it again."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from bench.session import Session, spec_name


def fill(session: Session, spec: dict[str, Any], partition: str) -> dict[str, Any]:
    """Put every row of a batch by itself.

    TransferQueue 0.1.11 pickles, for each row, the whole memory that came with it: of a put of 1024 rows in two units,
    its files are 512 times the payload.
    """
    batch, keys = session.payloads[spec_name(spec)], session.keys(spec["rows"])
    for row, key in enumerate(keys):
        session.system.put(partition, [key], batch[row : row + 1])
    return {}


def save(session: Session, directory: str) -> dict[str, Any]:
    """Seconds of saving; `durable_s` until every file was also forced to the disk; and the files' bytes."""
    start = time.perf_counter()
    session.tq.save_checkpoint(directory)
    saved = time.perf_counter()
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    durable = time.perf_counter()
    nbytes = sum(path.stat().st_size for path in files)
    return {"s": saved - start, "durable_s": durable - start, "nbytes": nbytes}


def load(session: Session, directory: str) -> dict[str, Any]:
    """Seconds of loading into a service that holds the same."""
    start = time.perf_counter()
    session.tq.load_checkpoint(directory)
    return {"s": time.perf_counter() - start}


def remove(session: Session, directory: str) -> dict[str, Any]:
    """Remove the files."""
    del session
    shutil.rmtree(directory, ignore_errors=True)
    return {}
