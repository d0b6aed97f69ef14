"""Writes that count only where nobody else wrote: what they were computed from must still be there."""

from __future__ import annotations

import numpy as np

from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.table import Table
from transfer_queue.errors import CellsChanged, InvalidInput
from transfer_queue.wire.arrays import indexes_of
from transfer_queue.wire.messages import Commit


def check_expected(message: Commit, blocks: bytes, table: Table | None) -> None:
    """`CellsChanged` unless every cell to be written lies in the block, and in the row of it, that the message expects.

    No block ever changes, and no number of one is used twice: the same row of a block holds the same content.
    """
    expected = indexes_of(blocks)
    num = len(message.fields) * message.count
    if len(expected) not in (num, 2 * num) or (message.rows is None and message.keys is None):
        raise InvalidInput("expected: a block and its row for every cell of rows that exist")
    slots = _slots(message, table)
    if table is None or len(slots) != message.count or (slots < 0).any():
        raise CellsChanged(f"partition {message.partition!r}: rows were cleared")
    given = expected.reshape(len(message.fields), -1, message.count)  # blocks alone, in journals of before
    for field, wanted in zip(message.fields, given, strict=True):
        if not np.array_equal(table.place_of(field.name, slots)[: len(wanted)], wanted):
            raise CellsChanged(f"partition {message.partition!r}: field {field.name!r} was written")


def _slots(message: Commit, table: Table | None) -> Slots:
    """-1 for a row that is not there."""
    if table is None:
        return np.empty(0, np.int64)
    if message.keys is not None:
        return np.array([table.keys.get(key, -1) for key in message.keys], np.int64)
    return table.slots_of(indexes_of(message.rows or b""))
