"""The storage engine as the controller's server uses it: what no row refers to any more is deleted there, and rows
whose bytes are gone are given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from transfer_queue.controller import Controller
from transfer_queue.errors import TransferQueueError
from transfer_queue.server.service import Service
from transfer_queue.server.settings import ServerConfig
from transfer_queue.storage.blocks import Unit
from transfer_queue.storage.engines.deadline import GuardedEngine
from transfer_queue.storage.engines.sealed import engine_key

log = logging.getLogger("transfer_queue.server")

OPEN_S = 60.0  # what is started may take so long
DROP_S = 30.0
AGAIN_S = 1.0  # after a deletion that failed
KEYS = 4096  # in one call


async def opened_engine(config: ServerConfig, service: Service, controller: Controller) -> EngineBlocks:
    """Raises `ConfigError` and `ServiceUnavailable`."""
    engine = await asyncio.to_thread(GuardedEngine, config.engine, config.engine_settings, True, OPEN_S)
    return EngineBlocks(engine, service.unit, controller, float(config.client["timeout_s"]))


class EngineBlocks:
    """`engine` has the bytes of those of `unit`'s blocks that lie in an engine. One deletion and one look at a time.

    The service is told of nothing that it did not ask: an engine that began anew and lost everything is found out by
    the first reader that misses a block, and then all of its blocks are asked for.
    """

    def __init__(self, engine: GuardedEngine, unit: Unit, controller: Controller, timeout_s: float) -> None:
        self.engine = engine
        self._unit = unit
        self._controller = controller
        self._timeout_s = timeout_s
        self._dropping: asyncio.Task[None] | None = None
        self._check: asyncio.Task[TransferQueueError | None] | None = None
        self._failed = False
        unit.has_engine = True

    def told(self) -> dict[str, Any]:
        """What clients need to use the same engine. Units of other hosts add `books`, the address of this server."""
        return {"name": self.engine.name, "settings": dict(self.engine.engine.for_clients)}

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
            blocks = left[:KEYS]
            try:
                await asyncio.to_thread(self.engine.drop, self._keys(blocks), DROP_S)
            except TransferQueueError as error:
                if not self._failed:
                    log.warning("%d blocks are still to be deleted: %s", len(left), error)
                self._failed = True
                await asyncio.sleep(AGAIN_S)
                continue
            self._failed = False
            del left[: len(blocks)]

    # looking

    async def check(self) -> None:
        """Ask the engine for all blocks, and give up the rows of those that are gone. Who asks while it is asked gets
        the same answer. Raises `ServiceUnavailable`."""
        if self._check is None or self._check.done():
            self._check = asyncio.get_running_loop().create_task(self._look())
        failed = await asyncio.shield(self._check)
        if failed is not None:
            raise failed

    async def _look(self) -> TransferQueueError | None:
        """None, or why nobody knows."""
        blocks = self._unit.in_engine()
        gone: set[int] = set()
        for at in range(0, len(blocks), KEYS):
            by_key = {self._key(block): block for block in blocks[at : at + KEYS]}
            try:
                missing = await asyncio.to_thread(self.engine.missing, list(by_key), self._timeout_s)
            except TransferQueueError as error:
                return error
            gone.update(by_key[key] for key in missing)
        if gone:
            rows = self._controller.block_index.lose(gone)
            told = ", ".join(f"{count} rows of partition {name!r}" for name, count in sorted(rows.items()))
            log.error("%s lost %d of %d blocks, and with them %s", self.engine.name, len(gone), len(blocks), told)
        return None

    def _keys(self, blocks: Sequence[int]) -> list[str]:
        return [self._key(block) for block in blocks]

    def _key(self, block: int) -> str:
        return engine_key(self._controller.lineage.service_id, block)

    # ending

    async def close(self) -> None:
        """Delete everything: the service ends, and with it the books."""
        blocks = [*self._unit.in_engine(), *self._unit.left_in_engine]
        for task in (self._dropping, self._check):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self._close, blocks)

    def _close(self, blocks: list[int]) -> None:
        try:
            for at in range(0, len(blocks), KEYS):
                self.engine.drop(self._keys(blocks[at : at + KEYS]), DROP_S)
        except TransferQueueError as error:
            log.warning("%d blocks of this service are left there: %s", len(blocks), error)
        try:
            self.engine.close(DROP_S)
        except TransferQueueError as error:
            log.warning("%s", error)
