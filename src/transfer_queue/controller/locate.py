"""From rows and fields to the runs of blocks that hold them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.content_index import PRINT_NBYTES
from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.table import Table
from transfer_queue.errors import DataLost, InvalidInput, NotReady, UnknownRows
from transfer_queue.wire.messages import UNIT_SHIFT, Get, Located, Part, Piece

RUN = struct.Struct("<qqq")  # piece, first row, count


def located(message: Get, table: Table | None, slots: Slots) -> Located:
    """The reply to `message`; its pieces name blocks only, where they lie is the storage unit's to add.

    Raises `NotReady` when rows lack a field (asked for by row), or have no field in common (asked for by key).
    """
    if table is None or not len(slots):
        raise UnknownRows(f"no rows in partition {message.partition!r}")
    fields = _fields(message, table, slots)
    parts: list[Part] = []
    numbers: dict[int, int] = {}  # piece of each block
    if len(slots) == 1:
        for names, block, row in table.locate_one(slots.item(0), fields):
            parts.append(Part(names, RUN.pack(numbers.setdefault(block, len(numbers)), row, 1)))
    else:
        for names, blocks, rows in table.locate(slots, fields):
            parts.append(Part(names, _runs(blocks, rows, numbers)))
    pieces = [Piece(block) for block in numbers]
    return Located(message.rid, len(slots), pieces, [], parts, table.schema(fields))


def located_alike(message: Get, table: Table | None) -> Located:
    """The reply to a `message` with prints: where cells lie that may hold what has them, and can be looked at now."""
    prints, fields = message.prints or b"", message.fields or []
    if len(fields) != 1 or len(prints) % PRINT_NBYTES:
        raise InvalidInput(f"{len(prints)} bytes of prints of fields {fields}")
    if table is None or fields[0] not in table.fields:
        return Located(message.rid, 0, [], [], [], [])
    wanted = [prints[at : at + PRINT_NBYTES] for at in range(0, len(prints), PRINT_NBYTES)]
    found = np.array(table.contents.find(fields[0], wanted, table.blocks), np.int64).reshape(-1, 3)
    if table.away:
        found = found[~np.isin(found[:, 1] >> UNIT_SHIFT, list(table.away))]
    numbers: dict[int, int] = {}
    runs = np.empty((len(found), 3), np.int64)
    runs[:, 0] = _pieces(found[:, 1].tolist(), numbers)
    runs[:, 1], runs[:, 2] = found[:, 2], 1
    parts = [Part(fields, runs.tobytes())] if len(found) else []
    pieces = [Piece(block) for block in numbers]
    return Located(message.rid, len(found), pieces, [], parts, table.schema(fields), prints=found[:, 0].tobytes())


def _fields(message: Get, table: Table, slots: Slots) -> list[str]:
    wanted = message.fields
    if wanted is not None and len(set(wanted)) != len(wanted):
        raise InvalidInput(f"fields {wanted}: name each field once")
    if wanted and not table.lost:
        written = table.written(slots, wanted)
        if written is not None and (written.item() if len(slots) == 1 else written.all()):
            return list(wanted)
    common = set(table.common_fields(slots))
    if table.lost and (wanted is None or not common.issuperset(wanted)):
        lost = sorted(table.lost.intersection(table.index[slots].tolist()))
        if lost:
            raise DataLost(f"partition {table.name!r}: rows {lost[:8]} are gone with the storage that held them")
    if message.keys is not None and not message.strict:
        if not common:
            raise NotReady("Some fields are not ready in all the requested keys!")
        return sorted(common) if wanted is None else [name for name in wanted if name in common]
    wanted = sorted(common) if wanted is None else wanted
    missing = [name for name in wanted if name not in common]
    if missing or not wanted:
        raise NotReady(f"partition {table.name!r}: fields {missing} are not written on all of the {len(slots)} rows")
    return list(wanted)


def _runs(blocks: NDArray[np.int64], rows: NDArray[np.int32], numbers: dict[int, int]) -> bytes:
    """Runs (piece, first row, count) as int64 (k, 3); `numbers` gives each block its piece, new ones are added."""
    breaks = np.flatnonzero((blocks[1:] != blocks[:-1]) | (rows[1:] != rows[:-1] + 1)) + 1
    starts = np.concatenate([[0], breaks])
    runs: NDArray[Any] = np.empty((len(starts), 3), np.int64)
    runs[:, 0] = _pieces(blocks[starts].tolist(), numbers)
    runs[:, 1] = rows[starts]
    runs[:, 2] = np.diff(starts, append=len(blocks))
    return runs.tobytes()


def _pieces(blocks: Sequence[int], numbers: dict[int, int]) -> list[int]:
    return [numbers.setdefault(block, len(numbers)) for block in blocks]
