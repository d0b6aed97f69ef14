"""Moving blocks to a disk before writers have to wait for memory.

The longest unread large blocks go first. A block is written by a helper thread while it stays readable where it is;
then its rows are said to lie in the copy, and its memory is free. Who kills the server meanwhile loses the copy only.
The copy is a file that clients map like any arena, and the system's page cache keeps what is read often.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from transfer_queue.codec.layout import decode_layout
from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.memory import memfd
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.server.service import Service
from transfer_queue.storage.blocks import Block

log = logging.getLogger("transfer_queue.server")

BATCH_NBYTES = 128 << 20  # moved together: memory is given free in such steps
AGAIN_S = 1.0  # after the disk was full or failed
OWNER = b"spilling"


class Copy(NamedTuple):
    """A block and the place for it on the disk; its rows are numbered alike there."""

    block: Block
    target: Block
    num_rows: int


class Spiller:
    """Moves blocks of `service`'s unit. `moved(block, target, rows)` tells the controller, and returns False when
    nothing was left to move."""

    def __init__(self, service: Service, moved: Callable[[int, int, Ints], Awaitable[bool]]) -> None:
        self._service = service
        self._unit = service.unit
        self._moved = moved
        self._task: asyncio.Task[None] | None = None
        self._next_s = 0.0
        self._closed = False
        self._unit.is_spilling = False  # a server that was killed may have left it so
        self.num_moved = 0

    def look(self) -> None:
        """Begin to move blocks where that is due."""
        unit = self._unit
        if self._task is None and unit.surplus_nbytes() and unit.can_spill and time.monotonic() >= self._next_s:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        self._unit.is_spilling = True
        try:
            while surplus := self._unit.surplus_nbytes():
                victims = self._unit.longest_unread(min(surplus, BATCH_NBYTES))
                if not victims:
                    return
                if not await self._move(victims):
                    self._next_s = time.monotonic() + AGAIN_S
                    asyncio.get_running_loop().call_later(AGAIN_S, self._service.deliver)
                    return
        finally:
            self._task, self._unit.is_spilling = None, False
            self._tell()  # whoever waits need not wait for memory any more

    async def _move(self, blocks: list[Block]) -> bool:
        """Whether some of them lie on the disk now."""
        for block in blocks:
            self._unit.pin(block.number, OWNER)
        copies = self._placed(blocks)
        left = {copy.target.number for copy in copies}
        try:
            digests = await asyncio.to_thread(self._write, copies)
            for copy, digest in zip(copies, digests, strict=True):
                left.discard(copy.target.number)
                await self._switch(copy, digest)
        except OSError as error:
            log.error("%s: blocks stay in memory: %s", self._unit.spill.directory, str(error))
            return False
        finally:
            for number in left:
                self._unit.drop(number)
            for block in blocks:
                self._unit.unpin(block.number, OWNER)
            self._tell()
        return bool(copies)

    def _tell(self) -> None:
        """Memory was given free: answer who waits for it."""
        if not self._closed:
            self._service.apply_outcomes()
            self._service.deliver()

    def _placed(self, blocks: list[Block]) -> list[Copy]:
        copies = []
        for block in blocks:
            try:
                num_rows = decode_layout(block.layout).rows
            except ProtocolError as error:
                log.warning("block %d stays in memory, its writer described it wrongly: %s", block.number, error)
                continue
            target = self._unit.place(block.nbytes, OWNER, spills=True)
            if target is None:
                break
            copies.append(Copy(block, target, num_rows))
        return copies

    def _write(self, copies: list[Copy]) -> list[int]:
        """In a helper thread: the bytes of all, and their digests. Raises `OSError`."""
        arenas, memory = self._unit.shm.arenas, self._unit.memory
        return [_written(arenas[one.target.arena].fd, one.target, memory(one.block)) for one in copies]

    async def _switch(self, copy: Copy, digest: int) -> None:
        """The rows lie in the copy from now on, unless somebody reads them where they were, or they are gone."""
        unit, (block, target, num_rows) = self._unit, copy
        if block.dropped or block.pins > 1:
            unit.drop(target.number)
            return
        unit.publish(target.number, block.layout, digest)
        try:
            taken = await self._moved(block.number, target.number, np.arange(num_rows))
        except TransferQueueError as error:
            log.warning("block %d: %s", block.number, error)
            self._service.in_doubt.append(target.number)
            return
        if taken:
            self.num_moved += 1
        else:
            unit.drop(target.number)


def _written(fd: int, target: Block, data: Bytes) -> int:
    """Write a block, and return its digest. Raises `OSError`."""
    view = memoryview(data)  # type: ignore[arg-type]
    at = 0
    while at < len(view):
        count = os.pwrite(fd, view[at:], target.offset + at)
        if not count:
            raise OSError(errno.EIO, "nothing was written")
        at += count
    memfd.start_writing(fd, target.offset, len(view))
    return xxh3_64_intdigest(view)
