"""Rows that were put alone become columns: when nobody waits, blocks of one row each are written anew as one block, so
that a second reader gets views, or copies long spans.

The controller's server finds them; each unit writes its own. All of it runs on the event loop, in steps of less than
about a millisecond: a thread would take the interpreter from the loop for five at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np

from transfer_queue.codec.joining import RowJoin
from transfer_queue.codec.layout import encode_layout, sizes_of, template_of
from transfer_queue.codec.lone_rows import LoneRows
from transfer_queue.controller import Controller
from transfer_queue.controller.lone_blocks import MIN_ROWS
from transfer_queue.errors import ProtocolError
from transfer_queue.memory.bytes import Ints
from transfer_queue.server.copies import take_place
from transfer_queue.server.service import Service
from transfer_queue.server.unit_registry import UnitRegistry, unit_of
from transfer_queue.storage.blocks import Block
from transfer_queue.wire import messages as m

log = logging.getLogger("transfer_queue.server")

EVERY_S = 0.5  # rows stay alone for one to two of these
QUIET_S = 0.002  # so long nobody asked for anything: nobody waits
BUSY_S = 0.05  # on a server that is never quiet a step is done after this
STEP_S = 0.0005
MAX_ROW_NBYTES = 1 << 20  # a row that is larger is read at memory speed as it is
MAX_NBYTES = 128 << 20
OWNER = b"gathering"


class Gathering(NamedTuple):
    """Blocks that hold rows alike, one each, and the indexes of the rows."""

    blocks: list[Block]
    rows: Ints

    @property
    def numbers(self) -> Ints:
        return np.array([block.number for block in self.blocks], np.int64)


class Gatherer:
    """Writes blocks of one row each as one block. They are pinned meanwhile, and a row that was overwritten or cleared
    stays as it is. `gathered(target, blocks, rows)` tells the controller, and returns False when none was left."""

    def __init__(self, service: Service, gathered: Callable[[int, Ints, Ints], Awaitable[bool]]) -> None:
        self._service = service
        self._gathered = gathered
        self.num_rows = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._step_began = 0.0

    def start(self, blocks: Ints, rows: Ints) -> None:
        """`gather` in the background."""
        task = asyncio.get_running_loop().create_task(self.gather(blocks, rows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Leave what runs in the background."""
        for task in self._tasks:
            task.cancel()

    async def gather(self, blocks: Ints, rows: Ints) -> None:
        """Write what lies in these blocks as few ones; `rows` are the indexes of the rows that they hold."""
        for part in self._alike(blocks, rows):
            await self._rest()
            try:
                await self._gather(part)
            except ProtocolError as error:
                log.warning("%d rows stay alone, their writer described them wrongly: %s", len(part.rows), error)

    def _alike(self, blocks: Ints, rows: Ints) -> list[Gathering]:
        """Those that are there and not large, by what their layouts have in common, not too many bytes together."""
        found: list[Gathering] = []
        by_template: dict[bytes, tuple[int, list[Block], list[int]]] = {}
        for number, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            block = self._service.unit.block(number)
            if block is None or not block.published or block.dropped or block.nbytes > MAX_ROW_NBYTES:
                continue
            if block.is_in_engine or self._service.unit.is_spilled(block):
                continue
            try:
                template = template_of(block.layout)
            except ProtocolError:
                continue
            if template is None:
                continue
            nbytes, alike, indexes = by_template.pop(template, (0, [], []))
            alike.append(block)
            indexes.append(row)
            nbytes += block.nbytes
            if nbytes > MAX_NBYTES:
                found.append(Gathering(alike, np.array(indexes, np.int64)))
            else:
                by_template[template] = nbytes, alike, indexes
        found += [Gathering(alike, np.array(indexes, np.int64)) for _, alike, indexes in by_template.values()]
        return [one for one in found if len(one.rows) >= MIN_ROWS]

    async def _gather(self, part: Gathering) -> None:
        unit = self._service.unit
        pinned: list[Block] = []
        rows: list[int] = []
        try:
            for block, row in zip(part.blocks, part.rows.tolist(), strict=True):
                if unit.block(block.number) is block:  # it was not cleared meanwhile
                    unit.pin(block.number, OWNER)
                    pinned.append(block)
                    rows.append(row)
                await self._breathe()
            if len(pinned) >= MIN_ROWS:
                await self._write(Gathering(pinned, np.array(rows, np.int64)))
            while pinned:  # which frees them
                unit.unpin(pinned.pop().number, OWNER)
                await self._breathe()
        finally:
            for block in pinned:
                unit.unpin(block.number, OWNER)
            self._service.publish_outcomes()

    async def _write(self, part: Gathering) -> None:
        unit, service = self._service.unit, self._service
        rows = _lying(service, part.blocks)
        join = RowJoin(rows)
        for name in rows.names:
            if not join.add(name):
                return
            await self._breathe()
        if unit.num_waiting or unit.used_nbytes + 2 * join.nbytes > unit.budget_nbytes:
            return  # the copy must not take the room that a writer needs; the rows stay as they are
        target = unit.place(max(1, join.nbytes), OWNER)
        if target is None:
            return
        for _ in join.write(unit.memory(target)):
            await self._breathe()
        gathered = self._gathered(target.number, part.numbers, part.rows)
        if await take_place(service, target, encode_layout(join.layout()), gathered):
            self.num_rows += len(part.rows)

    async def _breathe(self) -> None:
        """Let others go first when this step has taken its time."""
        if time.perf_counter() - self._step_began > STEP_S:
            await self._rest()

    async def _rest(self) -> None:
        """Wait until nobody has asked for anything for `QUIET_S`, `BUSY_S` at the longest."""
        until = time.perf_counter() + BUSY_S
        asked = -1
        while asked != self._service.num_requests and time.perf_counter() < until:
            asked = self._service.num_requests
            await asyncio.sleep(QUIET_S)
        self._step_began = time.perf_counter()


def _lying(service: Service, blocks: list[Block]) -> LoneRows:
    """These blocks of one row each, alike, as a matrix."""
    found = sizes_of([block.layout for block in blocks])
    if found is None:
        raise ProtocolError("a layout that is longer or shorter than others of its template")
    memories = [arena.memory for arena in service.unit.shm.arenas]
    places = np.array([(block.arena, block.offset, block.nbytes) for block in blocks], np.int64)
    return LoneRows(*found, memories, *places.T)


async def gather_lone_rows(controller: Controller, members: UnitRegistry, gatherer: Gatherer) -> None:
    """Have rows gathered where they lie, as long as any were put alone."""
    lone_blocks = controller.state.lone_blocks
    while lone_blocks.is_due:
        await asyncio.sleep(EVERY_S)
        for batch in lone_blocks.round():
            if batch is None:
                await asyncio.sleep(0)
                continue
            unit = unit_of(int(batch.blocks[0]))
            if unit:
                members.push(unit, m.GatherRows(batch.blocks.tobytes(), batch.rows.tobytes()))
            else:
                await gatherer.gather(batch.blocks, batch.rows)
