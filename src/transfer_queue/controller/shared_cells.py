"""Cells of which many rows have one.

A commit says of each shared cell which row of which block it is. A block of shared cells has one field. It is new with
the commit, or one that rows of the partition have already.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.controller.block_index import BlockIndex
from transfer_queue.controller.content_index import PRINT_NBYTES
from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.table import Table
from transfer_queue.errors import CellsChanged, InvalidInput
from transfer_queue.schema import FieldSchema
from transfer_queue.wire.arrays import indexes_of
from transfer_queue.wire.messages import Commit, SharedCells

MAX_ROW = 1 << 31


def shared_fields(message: Commit, table: Table | None, blocks: BlockIndex) -> list[FieldSchema]:
    """The fields of shared cells. Raises `InvalidInput` unless there is one for each row of each field, `CellsChanged`
    where a block that they name is gone."""
    own = {field.name for field in message.fields}
    covered: dict[str, list[Slots]] = {}
    new: set[int] = {message.block}
    for one in message.shared:
        name = one.field.name
        rows, places = indexes_of(one.rows), indexes_of(one.places)
        if name in own or len(rows) != len(places) or not len(rows):
            raise InvalidInput(f"field {name!r}: {len(rows)} rows with {len(places)} places")
        if rows.min() < 0 or rows.max() >= message.count or places.min() < 0 or places.max() >= MAX_ROW:
            raise InvalidInput(f"field {name!r}: places that cannot be")
        covered.setdefault(name, []).append(rows)
        if one.is_new:
            _check_new(one, new, blocks)
            new.add(one.block)
        else:
            _check_there(one, table, blocks)
    for name, parts in covered.items():
        if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(message.count)):
            raise InvalidInput(f"field {name!r}: a shared cell for each of {message.count} rows, once")
    return list({one.field.name: one.field for one in message.shared}.values())


def _check_new(one: SharedCells, new: set[int], blocks: BlockIndex) -> None:
    if one.block <= 0 or one.block in new or one.block in blocks.entries:
        raise InvalidInput(f"block {one.block} is published already")
    if len(one.prints) % PRINT_NBYTES:
        raise InvalidInput(f"prints of {len(one.prints)} bytes")


def _check_there(one: SharedCells, table: Table | None, blocks: BlockIndex) -> None:
    entry = blocks.find(one.block)
    if entry is None or table is None or entry.table is not table:
        raise CellsChanged(f"field {one.field.name!r}: the cells that were to be shared are gone")
    if table.groups[entry.group].fields != (one.field.name,):
        raise InvalidInput(f"block {one.block} has no shared cells of field {one.field.name!r}")
    there, _ = table.rows_in(entry.group, one.block, entry.first, entry.last)
    if not np.isin(indexes_of(one.places), there).all():
        raise CellsChanged(f"field {one.field.name!r}: the cells that were to be shared are gone")


def write_shared(message: Commit, table: Table, slots: Slots, blocks: BlockIndex) -> None:
    """Carry out what `shared_fields` let pass: the cells are those of `slots`, which are all rows of the message."""
    released = []
    for one in message.shared:
        of_cells = slots[indexes_of(one.rows)]
        number = table.group([one.field])
        first, last = table.between(of_cells)
        if one.is_new:
            blocks.open(one.block, len(of_cells), table, number, first, last)
            table.contents.add(one.field.name, one.prints, one.block, table.blocks)
        else:
            blocks.share(one.block, len(of_cells), first, last)
        released += table.write(of_cells, number, one.block, indexes_of(one.places))
    blocks.release(released)
