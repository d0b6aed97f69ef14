"""Writes that count only where nobody else wrote: what they were computed from must still be there."""

from __future__ import annotations

import numpy as np

from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.table import Table
from transfer_queue.errors import CellsChanged, InvalidInput
from transfer_queue.wire.arrays import indexes_of
from transfer_queue.wire.messages import Commit


def check_expected(message: Commit, blocks: bytes, table: Table | None) -> None:
    """`CellsChanged` unless every cell to be written lies in the block that the message expects.

    No block ever changes, and no number of one is used twice: the same block holds the same content.
    """
    expected = indexes_of(blocks)
    if len(expected) != len(message.fields) * message.count or (message.rows is None and message.keys is None):
        raise InvalidInput("expected: one block for every cell of rows that exist")
    slots = _slots(message, table)
    if table is None or len(slots) != message.count or (slots < 0).any():
        raise CellsChanged(f"partition {message.partition!r}: rows were cleared")
    for field, numbers in zip(message.fields, expected.reshape(-1, message.count), strict=True):
        if not np.array_equal(table.blocks_of(field.name, slots), numbers):
            raise CellsChanged(f"partition {message.partition!r}: field {field.name!r} was written")


def _slots(message: Commit, table: Table | None) -> Slots:
    """-1 for a row that is not there."""
    if table is None:
        return np.empty(0, np.int64)
    if message.keys is not None:
        return np.array([table.keys.get(key, -1) for key in message.keys], np.int64)
    return table.slots_of(indexes_of(message.rows or b""))
