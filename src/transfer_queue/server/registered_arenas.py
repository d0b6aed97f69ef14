"""This unit's memory as processes of other hosts read it through the job's transport, and theirs as it reads it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import ServiceUnavailable, TransferQueueError
from transfer_queue.memory.bytes import PAGE, address_of
from transfer_queue.storage.blocks import Block, Unit
from transfer_queue.storage.shm import GRAINS
from transfer_queue.storage.transports import GuardedTransport, RemoteSpan
from transfer_queue.wire import messages as m

log = logging.getLogger("transfer_queue.server")

OPEN_S, PROBE_S = 30.0, 10.0
REGISTER_S = 120.0  # pages that stay in place are touched first, 1.4 GiB of them in a second
CLOSE_S = 5.0
AGAIN_S = 1.0  # after a failure
OWNER = b"tq-transport-pull"  # of pins: no session is called so


async def opened_transport(told: Mapping[str, Any], host: str, unit: Unit, probes: bool) -> RegisteredArenas:
    """`told`: `name` and `settings`, and where the controller's server lends its page if it `probes`: a unit that
    cannot read there is none of the job. Raises `ConfigError` and `ServiceUnavailable`."""

    def opened() -> RegisteredArenas:
        transport = GuardedTransport(told["name"], told["settings"], host, OPEN_S)
        try:
            arenas = RegisteredArenas(transport, told, host, unit)
            transport.register(arenas.page, REGISTER_S)
            if probes and "page" in told:
                _probe(transport, told["page"])
        except BaseException:
            transport.close(CLOSE_S)
            raise
        return arenas

    return await asyncio.to_thread(opened)


def _probe(transport: GuardedTransport, page: Mapping[str, Any]) -> None:
    into = np.zeros(PAGE, np.uint8)
    try:
        transport.read(page["endpoint"], [RemoteSpan(page["address"], into)], [into], PROBE_S)
    except ServiceUnavailable as error:
        raise ServiceUnavailable(f"this host cannot read memory of the controller's: {error}") from error
    if xxh3_64_hexdigest(into.tobytes()) != page["digest"]:
        raise ServiceUnavailable(f"{transport.name} gives other bytes than the controller's host lends")


class RegisteredArenas:
    """The arenas of `unit`'s large blocks, registered with `transport`. Blocks that lie on a disk, and small ones, go
    over the service's connections: nobody waits long for those, and a look at a disk may fail."""

    def __init__(self, transport: GuardedTransport, told: Mapping[str, Any], host: str, unit: Unit) -> None:
        self._transport = transport
        self._told = told
        self._host = host
        self._unit = unit
        self.page = np.frombuffer(bytearray(os.urandom(PAGE)), np.uint8)  # lent for others to try
        self._registered: set[int] = set()
        self._num_seen = 0  # arenas of which none is missing
        self._registering: asyncio.Task[None] | None = None
        self._again_at = 0.0
        self._pulls: dict[int, asyncio.Event] = {}  # that write into these blocks: when the last of them has ended
        self.num_pulled = self.num_offered = 0

    def told(self) -> dict[str, Any]:
        """What clients and units need to use the same transport. `host`: this one, for clients that live here."""
        page = {
            "endpoint": self._transport.endpoint, "address": address_of(self.page),
            "digest": xxh3_64_hexdigest(self.page.tobytes()),
        }  # fmt: skip
        settings = {**self._told["settings"], "local_hostname": ""}  # that is this host's
        return {"name": self._told["name"], "settings": settings, "host": self._host, "page": page}

    def statistics(self) -> dict[str, Any]:
        return {
            "transport": self._transport.name,
            "transport_endpoint": self._transport.endpoint,
            "transport_blocks_offered": self.num_offered,
            "transport_blocks_pulled": self.num_pulled,
        }

    # offering

    def work(self) -> None:
        """Register the arenas that are new, unless that is going on or has just failed."""
        if self._missing() and time.monotonic() >= self._again_at:
            self._begin()

    def _begin(self) -> None:
        if self._registering is None or self._registering.done():
            self._again_at = time.monotonic() + AGAIN_S
            self._registering = asyncio.get_running_loop().create_task(self._register())
            self._registering.add_done_callback(_note)

    @property
    def is_ready(self) -> bool:
        """Whether every block that can be offered is."""
        return not self._missing()

    async def ready(self) -> None:
        """Wait until it is. Raises `ServiceUnavailable`."""
        if self._missing():
            self._begin()
        if self._registering is not None:
            await asyncio.shield(self._registering)

    def has(self, block: Block) -> bool:
        """Whether the transport reaches it."""
        return block.arena in self._registered

    def offer(self, block: Block) -> m.Registered | m.Remote:
        """Where readers find it."""
        if not self.has(block):
            return m.REMOTE
        self.num_offered += 1
        return m.Registered(self._transport.endpoint, address_of(self._unit.memory(block)))

    def _missing(self) -> list[int]:
        arenas = self._unit.shm.arenas
        if len(arenas) == self._num_seen:
            return []
        large = [number for number, arena in enumerate(arenas) if arena.extents.grain == GRAINS[1] and not arena.spills]
        return [number for number in large if number not in self._registered]

    async def _register(self) -> None:
        while missing := self._missing():
            count = len(self._unit.shm.arenas)
            for number in missing:
                arena = self._unit.shm.arenas[number]
                arena.is_pinned = self._transport.transport.pins_memory
                await asyncio.to_thread(self._transport.register, arena.memory, REGISTER_S)
                self._registered.add(number)
            self._num_seen = count

    # taking

    def pull(self, message: m.Pull, block: Block) -> Coroutine[Any, Any, None]:
        """Fill an unpublished block. It is held until nobody writes into it any more, however late that is and whoever
        gives it up meanwhile. A read that was asked for before, and whose asker came again, ends first: the answer says
        that the block may be published. Raises `ServiceUnavailable`."""
        self._unit.pin(block.number, OWNER)  # at once: by the time that this begins it may be another's
        return self._pull(message, block)

    async def _pull(self, message: m.Pull, block: Block) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def ended() -> None:
            self._unit.unpin(block.number, OWNER)
            done.set()
            if self._pulls.get(block.number) is done:
                del self._pulls[block.number]

        try:
            while (earlier := self._pulls.get(block.number)) is not None:
                await self._within(message, earlier)
            self._pulls[block.number] = done
            await self.ready()
        except BaseException:
            ended()
            raise
        span, endpoint = RemoteSpan(message.lies.address, self._unit.memory(block)), message.lies.endpoint

        def read() -> None:
            try:
                self._transport.transport.read(endpoint, [span])
            finally:
                with contextlib.suppress(RuntimeError):  # the server has ended
                    loop.call_soon_threadsafe(ended)

        call = BackgroundCall("tq-pull", read)
        await self._within(message, done)
        call.ended(CLOSE_S)
        try:
            call.outcome()
        except OSError as error:
            raise ServiceUnavailable(f"{self._transport.name}: {error}") from error
        self.num_pulled += 1

    async def _within(self, message: m.Pull, done: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(done.wait(), message.timeout_s)
        except asyncio.TimeoutError as error:  # until Python 3.11 another class
            raise ServiceUnavailable(
                f"{self._transport.name}: the memory at {message.lies.endpoint} was not read within "
                f"{message.timeout_s:g} s"
            ) from error

    async def close(self) -> None:
        if self._registering is not None:
            self._registering.cancel()
        try:
            await asyncio.to_thread(self._transport.close, CLOSE_S)
        except TransferQueueError as error:
            log.warning("%s", error)


def _note(done: asyncio.Task[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("arenas could not be registered: %s", error)
