"""Rewriting blocks of which few cells are left, so that one surviving row does not hold the memory of its whole put.

The controller's server finds the sparse blocks; each unit rewrites its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from transfer_queue.codec.layout import decode_layout, encode_layout
from transfer_queue.codec.select import selected
from transfer_queue.controller import Controller
from transfer_queue.errors import DataLost, ProtocolError
from transfer_queue.memory.bytes import Ints
from transfer_queue.server.copies import take_place
from transfer_queue.server.service import Service
from transfer_queue.server.unit_registry import UnitRegistry, unit_of
from transfer_queue.wire import messages as m

log = logging.getLogger("transfer_queue.server")

MIN_NBYTES = 1 << 20
OWNER = b"compaction"


class Compactor:
    """Moves the live rows of sparse blocks into blocks of their own, copying in a helper thread.

    The old block is pinned meanwhile. A cell that was overwritten or cleared during the copy stays as it is: only
    cells that still lie in the old block move. `moved(block, target, rows)` tells the controller, and returns False
    when nothing was left to move.
    """

    def __init__(self, service: Service, moved: Callable[[int, int, Ints], Awaitable[bool]]) -> None:
        self._service = service
        self._moved = moved
        self.num_moved = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, number: int, rows: Ints, fields: Sequence[str]) -> None:
        """Rewrite a block, unless it is small, or lies in a storage engine: its bytes are not here."""
        block = self._service.unit.block(number)
        if block is not None and block.nbytes >= MIN_NBYTES and not block.is_in_engine:
            task = asyncio.get_running_loop().create_task(self._move(number, rows, fields))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _move(self, number: int, rows: Ints, fields: Sequence[str]) -> None:
        unit = self._service.unit
        block = unit.block(number)
        if block is None:
            return
        unit.pin(number, OWNER)
        try:
            layout = decode_layout(block.layout)
            source = await asyncio.to_thread(unit.content, block)
            smaller, fill = await asyncio.to_thread(selected, layout, source, rows, fields)
            target = unit.place(max(1, smaller.nbytes), OWNER)
            if target is None:
                return  # no room for the copy now; the block stays as it is
            await asyncio.to_thread(fill, unit.memory(target))
            moved = self._moved(number, target.number, rows)
            is_moved = await take_place(self._service, target, encode_layout(smaller), moved)
            self.num_moved += bool(is_moved)  # after the wait: others move blocks meanwhile
        except DataLost as error:
            log.error("block %d stays as it is: %s", number, error)
        except ProtocolError as error:
            log.warning("block %d stays as it is, its writer described it wrongly: %s", number, error)
        finally:
            unit.unpin(number, OWNER)
            self._service.publish_outcomes()  # who waits for memory may have that of the block


def start_compaction(controller: Controller, members: UnitRegistry, compactor: Compactor) -> None:
    """Have the blocks rewritten that became sparse since the last call, each where it lies."""
    sparse = controller.block_index.sparse
    while sparse:
        number = sparse.pop()
        found = controller.rows_in(number)
        if found is None:
            continue
        rows, fields = found
        if unit_of(number):
            members.push(unit_of(number), m.SparseBlock(number, rows.tobytes(), fields))
        else:
            compactor.start(number, rows, fields)
