"""Rewriting blocks of which few cells are left, so that one surviving row does not hold the memory of its whole put."""

from __future__ import annotations

import asyncio

from transfer_queue.codec.layout import decode_layout, encode_layout
from transfer_queue.codec.select import selected
from transfer_queue.server.service import Service

MIN_NBYTES = 1 << 20
OWNER = b"compaction"


class Compactor:
    """Moves the live rows of thin blocks into blocks of their own, copying in a helper thread.

    The old block is pinned meanwhile. A cell that was overwritten or cleared during the copy stays as it is: only
    cells that still lie in the old block move.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.num_moved = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Start on the blocks that became thin since the last call."""
        thin = self._service.controller.ledger.thin
        while thin:
            number = thin.pop()
            block = self._service.unit.block(number)
            if block is not None and block.nbytes >= MIN_NBYTES:
                task = asyncio.get_running_loop().create_task(self._move(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _move(self, number: int) -> None:
        unit, controller = self._service.unit, self._service.controller
        found = controller.rows_in(number)
        block = unit.block(number)
        if found is None or block is None:
            return
        rows, fields = found
        unit.pin(number, OWNER)
        try:
            source, layout = unit.memory(block), decode_layout(block.layout)
            smaller, fill = await asyncio.to_thread(selected, layout, source, rows, fields)
            target = unit.place(max(1, smaller.nbytes), OWNER)
            if target is None:
                return  # no room for the copy now; the block stays as it is
            await asyncio.to_thread(fill, unit.memory(target))
            unit.publish(target.number, encode_layout(smaller))
            if not controller.relocate(number, target.number, rows):
                unit.drop(target.number)
                return
            self.num_moved += 1
        finally:
            unit.unpin(number, OWNER)
            self._service.settle()
