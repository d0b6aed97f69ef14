"""Digests of cells for writers on other hosts, who have what may be the same bytes and would rather not send them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from transfer_queue.codec.cells import cell_in, digest_of
from transfer_queue.codec.layout import decode_layout
from transfer_queue.codec.rows import BlockBytes
from transfer_queue.errors import InvalidInput, ProtocolError
from transfer_queue.memory.bytes import Bytes
from transfer_queue.server.block_requests import Answer
from transfer_queue.server.sessions import ServerSession
from transfer_queue.storage.blocks import Block, Unit
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of

MAX_CELLS = 65_536


class CellDigester:
    """Digests what lies in `unit`, in a thread; blocks are pinned meanwhile. Blocks on a disk are passed over."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def begin(
        self, message: m.DigestCells, session: ServerSession
    ) -> tuple[Coroutine[Any, Any, None], Callable[[], Answer]]:
        """What has to be done, and the answer after that. Raises `InvalidInput`."""
        blocks, rows = indexes_of(message.blocks).tolist(), indexes_of(message.rows).tolist()
        if len(blocks) != len(rows) or len(blocks) > MAX_CELLS:
            raise InvalidInput(f"{len(blocks)} blocks with {len(rows)} rows, at most {MAX_CELLS}")
        found = [b""] * len(blocks)
        digesting = self._digest(message, session, list(zip(blocks, rows, strict=True)), found)
        return digesting, lambda: (m.CellDigests(message.rid, found), ())

    async def _digest(
        self, message: m.DigestCells, session: ServerSession, cells: list[tuple[int, int]], found: list[bytes]
    ) -> None:
        for place, (number, row) in enumerate(cells):
            block = self.unit.block(number)
            if block is None or not block.published or block.is_in_engine or self.unit.is_spilled(block):
                continue
            self.unit.pin(number, session.ident, message.rid)
            try:
                found[place] = await asyncio.to_thread(_digest, self.unit.memory(block), block, message.field, row)
            finally:
                self.unit.unpin(number, session.ident, message.rid)


def _digest(memory: Bytes, block: Block, field: str, row: int) -> bytes:
    """b"" for what is not there, or was described wrongly by its writer."""
    try:
        layout = decode_layout(block.layout)
        column = layout.column(field)
        if column is None or not 0 <= row < layout.rows:
            return b""
        cell = cell_in(BlockBytes(memory, layout, -1), column, row)
    except ProtocolError:
        return b""
    return b"" if cell is None else digest_of(cell)
