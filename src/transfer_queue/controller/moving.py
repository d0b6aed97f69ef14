"""Cells that lie elsewhere from now on: those of a block that is moved, and those of many blocks that become one."""

from __future__ import annotations

import numpy as np

from transfer_queue.controller.facts import CellsGathered, CellsMoved
from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.state import ControllerState
from transfer_queue.controller.table import rows_bytes
from transfer_queue.errors import ProtocolError
from transfer_queue.wire import messages as m


def relocate(state: ControllerState, block: int, target: int, rows: Slots) -> bool:
    """See `Controller.relocate`."""
    entry = state.block_index.find(block)
    if entry is None:
        return False
    between = (entry.first, entry.last)
    is_other = state.block_index.find(target) is not None or target >> m.UNIT_SHIFT != block >> m.UNIT_SHIFT
    if len(rows) and not is_other:
        left, _ = entry.table.rows_in(entry.group, block, *between)
        is_other = bool((rows[1:] <= rows[:-1]).any()) or not np.isin(left, rows).all()
    if is_other:
        raise ProtocolError(f"block {target} does not have what is left of block {block}")
    if state.ledger is not None:
        state.ledger.note(CellsMoved(block, target, rows_bytes(rows)))
    entry.table.relocate(entry.group, block, target, rows, *between)
    state.block_index.open(target, entry.live, entry.table, entry.group, *between)
    state.block_index.release([(block, entry.live)])
    return True


def gather(state: ControllerState, target: int, blocks: Slots, rows: Slots) -> bool:
    """See `Controller.gather`."""
    entry = next((found for block in blocks.tolist() if (found := state.block_index.find(block))), None)
    if entry is None:
        return False
    units = {block >> m.UNIT_SHIFT for block in blocks.tolist()}
    is_other = state.block_index.find(target) is not None or units != {target >> m.UNIT_SHIFT}
    if is_other or len(rows) != len(blocks) or bool((rows[1:] <= rows[:-1]).any()):
        raise ProtocolError(f"block {target} does not have what lies in {len(blocks)} blocks")
    moved = entry.table.gather(entry.group, target, blocks, rows)
    if not moved:
        return False
    if state.ledger is not None:
        state.ledger.note(CellsGathered(target, rows_bytes(blocks), rows_bytes(rows)))
    cells = len(entry.table.groups[entry.group].fields)
    between = (int(rows[0]), int(rows[-1]))
    state.block_index.open(target, cells * len(moved), entry.table, entry.group, *between)
    state.block_index.release([(block, cells) for block in moved])
    return True
