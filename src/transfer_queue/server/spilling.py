"""Moving blocks to a disk before writers have to wait for memory.

The longest unread large blocks go first. A block is written by a helper thread while it stays readable where it is;
then its rows are said to lie in the copy, and its memory is free. Who kills the server meanwhile loses the copy only.
The copy is a file that clients map like any arena, and the system's page cache keeps what is read often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64

from transfer_queue.memory import memfd
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.server.copies import take_place
from transfer_queue.server.service import Service
from transfer_queue.storage.blocks import Block

log = logging.getLogger("transfer_queue.server")

BATCH_NBYTES, BATCH_BLOCKS = 128 << 20, 256  # moved together at most: memory is given free in such steps
CHUNK_NBYTES = 1 << 20
STEP_S = 0.001
AGAIN_S = 1.0  # after the disk was full or failed
OWNER = b"spilling"


AS_THEY_ARE = np.empty(0, np.int64)  # the rows of a copy, which has all of them, see `Controller.relocate`


class Copy(NamedTuple):
    """A block and the place for it on the disk."""

    block: Block
    target: Block


class Spiller:
    """Moves blocks of `service`'s unit. `moved(block, target, rows)` tells the controller, and returns False when
    nothing was left to move."""

    def __init__(self, service: Service, moved: Callable[[int, int, Ints], Awaitable[bool]]) -> None:
        self._service = service
        self._unit = service.unit
        self._moved = moved
        self._task: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None  # after nothing could be moved
        self._waits_for_room = False  # that was because the disk was full: then it also ends when room is given back
        self._closed = False
        self._step_began = 0.0
        self._unit.is_spilling = False  # a server that was killed may have left it so
        self.num_moved = 0

    def look(self) -> None:
        """Begin to move blocks where that is due."""
        unit = self._unit
        if self._task is not None or not unit.can_spill or self._service.pending.in_doubt:
            return
        if self._pause is not None and (unit.disk_is_short or not self._waits_for_room):
            return
        if unit.surplus_nbytes():
            self._end_pause()
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        self._closed = True
        self._end_pause()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        self._unit.is_spilling = True
        try:
            while surplus := self._unit.surplus_nbytes():
                blocks = self._unit.longest_unread(min(surplus, BATCH_NBYTES))[:BATCH_BLOCKS]
                if not blocks:
                    return
                if not await self._move(blocks):
                    self._waits_for_room = self._unit.disk_is_short
                    self._pause = asyncio.get_running_loop().call_later(AGAIN_S, self._go_on)
                    return
        finally:
            self._task, self._unit.is_spilling = None, False
            self._tell()  # whoever waits need not wait for memory any more

    def _go_on(self) -> None:
        """The pause is over. Nothing compares clocks: an event loop may call a little early by another one."""
        self._end_pause()
        self._tell()

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    async def _move(self, blocks: list[Block]) -> bool:
        """Whether some of them lie on the disk now."""
        before, left = self.num_moved, set[int]()
        for block in blocks:
            self._unit.pin(block.number, OWNER)
        try:
            copies = await self._placed(blocks, left)
            digests = await asyncio.to_thread(self._write, copies)
            for copy, digest in zip(copies, digests, strict=True):
                left.discard(copy.target.number)
                await self._switch(copy, digest)
                await self._breathe()
        except OSError as error:
            log.error("%s: blocks stay in memory: %s", self._unit.spill.directory, str(error))
        finally:
            for number in left:
                self._unit.drop(number)
            for block in blocks:
                self._unit.unpin(block.number, OWNER)
            self._tell()
        return self.num_moved > before

    def _tell(self) -> None:
        """Memory was given free: answer who waits for it."""
        if not self._closed:
            self._service.publish_outcomes()

    async def _breathe(self) -> None:
        """Let others go first when this step has taken its time."""
        if time.perf_counter() - self._step_began > STEP_S:
            self._service.apply_outcomes()
            await asyncio.sleep(0)
            self._step_began = time.perf_counter()

    async def _placed(self, blocks: list[Block], placed: set[int]) -> list[Copy]:
        """A place for each that there is room for; their numbers are in `placed`."""
        copies = []
        self._step_began = time.perf_counter()
        for block in blocks:
            target = self._unit.place(block.nbytes, OWNER, spills=True)
            if target is None:
                self._unit.disk_is_short = True
                continue
            placed.add(target.number)
            copies.append(Copy(block, target))
            await self._breathe()
        return copies

    def _write(self, copies: list[Copy]) -> list[int]:
        """In a helper thread: the bytes of all, and their digests. Raises `OSError`."""
        arenas, memory = self._unit.shm.arenas, self._unit.memory
        return [_written(arenas[one.target.arena].fd, one.target, memory(one.block)) for one in copies]

    async def _switch(self, copy: Copy, digest: int) -> None:
        """The rows lie in the copy from now on, unless somebody reads them where they were, or they are gone."""
        unit, (block, target) = self._unit, copy
        if block.dropped or block.pins > 1:
            unit.drop(target.number)
            return
        target.digest = digest
        moved = self._moved(block.number, target.number, AS_THEY_ARE)
        is_taken = await take_place(self._service, target, block.layout, moved)
        if is_taken is not None:
            block.stays = True  # no rows lie in it any more, and it is gone in a moment
            self.num_moved += is_taken


def _written(fd: int, target: Block, data: Bytes) -> int:
    """Write a block, and return its digest. Raises `OSError`."""
    view, digest = memoryview(data), xxh3_64()  # type: ignore[arg-type]
    for at in range(0, len(view), CHUNK_NBYTES):
        part = bytes(view[at : at + CHUNK_NBYTES])  # whoever maps it may write into it, and then neither fits
        memfd.write_file(fd, target.offset + at, part)
        digest.update(part)
    memfd.start_writing(fd, target.offset, len(view))
    return digest.intdigest()
