"""A copy of rows that takes the place of where they lay, once it is kept and the controller has taken it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from transfer_queue.errors import StoreFull, TransferQueueError
from transfer_queue.server.service import Service
from transfer_queue.storage.blocks import Block

log = logging.getLogger("transfer_queue.server")


async def take_place(service: Service, copy: Block, layout: bytes, told: Awaitable[bool]) -> bool | None:
    """Publish a copy that is filled if the controller took it, else drop it. `told` tells the controller, and says
    whether it did. None where nobody knows yet: then the copy is in doubt."""
    ticket = service.pending.hold_copy(copy, layout)
    try:
        is_taken = await told
    except TransferQueueError as error:
        log.warning("block %d, a copy: %s", copy.number, error)
        service.pending.leave_in_doubt(ticket)
        return None
    service.pending.answered(ticket, is_taken)
    return is_taken


async def kept_first(service: Service, number: int) -> bool:
    """Wait until a block of its unit is where it has to be before rows may lie in it; whether it is."""
    block, journal = service.unit.block(number), service.journal
    if block is None or journal is None:
        return True
    try:
        await journal.keep(block, 0.0)
    except StoreFull:
        return False  # the rows stay where they are
    return True
