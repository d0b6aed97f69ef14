"""Values packed into buffers that are there, and taken out again; and the plain copy of as many bytes."""

from __future__ import annotations

import gc
import importlib
import time
from typing import Any

import torch

from bench.session import Session

FIELDS, ROWS, WIDTH = 9, 1024, 8192
MODULES = {"ours": "transfer_queue.codec.packed", "tq": "transfer_queue.utils.serial_utils"}


def prepare(session: Session, shape: str) -> dict[str, Any]:
    """302 MB as values: the whole "batch", each of its "rows", or each of its "cells"."""
    session.scratch.clear()
    gc.collect()
    columns = [torch.arange(float(ROWS * WIDTH)).add_(field).reshape(ROWS, WIDTH) for field in range(FIELDS)]
    values: list[Any] = [{f"field{number}": column for number, column in enumerate(columns)}]
    if shape == "rows":
        values = [{name: column[row] for name, column in values[0].items()} for row in range(ROWS)]
    if shape == "cells":
        values = [column[row] for row in range(ROWS) for column in columns]
    session.scratch |= {"values": values, "columns": columns}
    encode(session, 1)
    return {"nbytes": sum(column.nbytes for column in columns), "values": len(values)}


def encode(session: Session, workers: int) -> dict[str, Any]:
    """Seconds to pack all values, into slices of one buffer, as engines register it."""
    packed = importlib.import_module(MODULES[session.name])
    start = time.perf_counter()
    buffers, _ = packed.batch_encode_into(
        session.scratch["values"], lambda sizes: _slices(session, sizes), num_workers=workers
    )
    seconds = time.perf_counter() - start
    session.scratch["buffers"] = buffers
    return {"seconds": seconds}


def _slices(session: Session, sizes: list[int]) -> list[torch.Tensor]:
    room = session.scratch.get("room")
    if room is None:
        room = session.scratch["room"] = torch.ones(sum(sizes), dtype=torch.uint8)
    return list(room.split(sizes))


def decode(session: Session, **how: Any) -> dict[str, Any]:
    """Seconds to take all values out, and whether they are what was packed."""
    packed = importlib.import_module(MODULES[session.name])
    start = time.perf_counter()
    values = packed.batch_decode_from(session.scratch["buffers"], **how)
    seconds = time.perf_counter() - start
    expected = session.scratch["values"]
    found, wanted = values[-1], expected[-1]
    same = torch.equal(found, wanted) if isinstance(found, torch.Tensor) else all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )  # fmt: skip
    return {"seconds": seconds, "same": same}


def memcpy(session: Session, threads: int) -> dict[str, Any]:
    """Seconds to copy the bytes of the columns, by as many threads, to memory that was written before."""
    from transfer_queue.memory.copy import Mover

    columns = session.scratch["columns"]
    room = session.scratch.setdefault("copies", [torch.ones_like(column) for column in columns])
    moves = [(into.data_ptr(), column.data_ptr(), column.nbytes) for into, column in zip(room, columns, strict=True)]
    mover = Mover(threads)
    mover.move(moves[:1])
    start = time.perf_counter()
    mover.move(moves)
    seconds = time.perf_counter() - start
    mover.close()
    return {"seconds": seconds}
