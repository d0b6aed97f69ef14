"""The storage engine as the controller's server uses it: what no row refers to any more is deleted there, and rows
whose bytes are gone are given up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from transfer_queue.background_call import BackgroundCall
from transfer_queue.controller import Controller
from transfer_queue.errors import DataLost, TransferQueueError
from transfer_queue.server.service import Service
from transfer_queue.server.settings import ServerConfig
from transfer_queue.storage.blocks import Unit
from transfer_queue.storage.engines.deadline import GuardedEngine
from transfer_queue.storage.engines.sealed import key_prefix
from transfer_queue.storage.in_time import left_until

log = logging.getLogger("transfer_queue.server")

OPEN_S = 60.0  # what is started may take so long
DROP_S = 7.0  # when the service ends, whose starter waits 10 s for it
FOREVER_S, STEP_S = 1e6, 0.5
AGAIN_S = 1.0  # after a deletion that failed
KEYS = 4096  # in one call


async def opened_engine(config: ServerConfig, service: Service, controller: Controller) -> EngineBlocks:
    """With a journal blocks of before may be there already; what is written lasts, and stays when the service ends.
    Raises `ConfigError` and `ServiceUnavailable`; `DataLost` where this is not the place where they are."""
    is_kept = config.journal_dir is not None
    settings = {**config.engine_settings, "durable": True} if is_kept else config.engine_settings
    engine = await asyncio.to_thread(GuardedEngine, config.engine, settings, True, OPEN_S)
    opened = EngineBlocks(engine, service.unit, controller, float(config.client["timeout_s"]), is_kept)
    await opened.find_blocks_of_before()
    return opened


async def reopened(before: EngineBlocks) -> EngineBlocks:
    """In place of those of a server that was killed, in its standby. Raises as `opened_engine`."""
    told = before.told()
    engine = await asyncio.to_thread(GuardedEngine, told["name"], told["settings"], False, OPEN_S)
    return before.with_engine(engine)


class EngineBlocks:
    """`engine` has the bytes of those of `unit`'s blocks that lie in an engine. One deletion and one look at a time.

    The service is told of nothing that it did not ask: an engine that began anew and lost everything is found out by
    the first reader that misses a block, and then all of its blocks are asked for.
    """

    def __init__(
        self, engine: GuardedEngine, unit: Unit, controller: Controller, timeout_s: float, is_kept: bool = False
    ) -> None:
        """`is_kept`: the books outlive the service, and with them what is in the engine."""
        self.engine = engine
        self._unit = unit
        self._controller = controller
        self._timeout_s = timeout_s
        self._is_kept = is_kept
        self._dropping: asyncio.Task[None] | None = None
        self._check: asyncio.Task[TransferQueueError | None] | None = None
        self._failed = False
        unit.engine_prefix = key_prefix(controller.lineage.service_id)

    def with_engine(self, engine: GuardedEngine) -> EngineBlocks:
        """The same books, with another access to the same engine."""
        return EngineBlocks(engine, self._unit, self._controller, self._timeout_s, self._is_kept)

    def told(self) -> dict[str, Any]:
        """What clients need to use the same engine. Units of other hosts add `books`, the address of this server."""
        return {"name": self.engine.name, "settings": dict(self.engine.for_clients)}

    def statistics(self) -> dict[str, Any]:
        return {
            "engine": self.engine.name,
            "engine_nbytes_used": self._unit.engine_nbytes,
            "engine_blocks_to_delete": len(self._unit.left_in_engine),
        }

    # deleting

    def work(self) -> None:
        """Delete what is left, unless that is going on."""
        if self._unit.left_in_engine and (self._dropping is None or self._dropping.done()):
            self._dropping = asyncio.get_running_loop().create_task(self._drop_all())

    async def _drop_all(self) -> None:
        left = self._unit.left_in_engine
        while left:
            keys = left[:KEYS]
            try:
                await self._dropped(keys)
            except TransferQueueError as error:
                if not self._failed:
                    log.warning("%d blocks are still to be deleted: %s", len(left), error)
                self._failed = True
                await asyncio.sleep(AGAIN_S)
                continue
            self._failed = False
            del left[: len(keys)]

    async def _dropped(self, keys: list[str]) -> None:
        """However long that takes: another attempt would hang in the same place, and hold one more thread."""
        call = BackgroundCall("tq-engine", self.engine.drop, keys, FOREVER_S)
        while not await asyncio.to_thread(call.ended, STEP_S):
            continue
        call.outcome()

    # looking

    async def check(self) -> None:
        """Ask the engine for all blocks, and give up the rows of those that are gone. Who asks while it is asked gets
        the same answer. Raises `ServiceUnavailable`."""
        if self._check is None or self._check.done():
            self._check = asyncio.get_running_loop().create_task(self._look(self._timeout_s))
        failed = await asyncio.shield(self._check)
        if failed is not None:
            raise failed

    async def find_blocks_of_before(self) -> None:
        """Those of the journal, before anybody is served: what is gone is given up. Raises `DataLost` where this is
        not the place that the journal names."""
        place, unit = self.engine.place, self._unit
        if unit.engine_place not in ("", place):
            text = f"is not the place of the journal's {len(unit.in_engine())} blocks: that is {unit.engine_place}"
            raise DataLost(f"{self.engine.name}{self.engine.where}, {place}, {text}")
        unit.engine_place = place
        failed = await self._look(OPEN_S)
        if failed is not None:
            raise failed

    async def _look(self, timeout_s: float) -> TransferQueueError | None:
        """None, or why nobody knows."""
        blocks = self._unit.in_engine()
        try:
            gone = await self._missing(blocks, timeout_s)
        except TransferQueueError as error:
            return error
        if gone:
            rows = self._controller.lose_blocks(sorted(gone))
            told = ", ".join(f"{count} rows of partition {name!r}" for name, count in sorted(rows.items()))
            log.error("%s lost %d of %d blocks, and with them %s", self.engine.name, len(gone), len(blocks), told)
        return None

    async def _missing(self, blocks: Mapping[str, int], timeout_s: float) -> set[int]:
        """The numbers of those of the blocks, which are named by their keys, that the engine does not have."""
        missing = await asyncio.to_thread(self.engine.missing, list(blocks), timeout_s) if blocks else ()
        return {blocks[key] for key in missing}

    # ending

    async def close(self) -> None:
        """The service ends. Where its books end with it, everything is deleted."""
        keys = [*self._unit.left_in_engine, *([] if self._is_kept else self._unit.in_engine())]
        for task in (self._dropping, self._check):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self._close, keys)

    def _close(self, keys: list[str]) -> None:
        until, at = time.monotonic() + DROP_S, 0
        try:
            for at in range(0, len(keys), KEYS):
                self.engine.drop(keys[at : at + KEYS], left_until(until))
        except TransferQueueError as error:
            log.warning("%d blocks of this service are left there, as %s: %s", len(keys) - at, keys[at], error)
        try:
            self.engine.close(left_until(until))
        except TransferQueueError as error:
            log.warning("%s", error)
