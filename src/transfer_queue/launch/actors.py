"""The Ray actors of a service: each supervises one server process on its node and hands out where to attach.

No request and no payload goes through them. They are ordinary classes here; `launch/ray.py` makes actors of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import threading
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from transfer_queue.errors import ServiceUnavailable, TransferQueueError
from transfer_queue.launch import local
from transfer_queue.launch.questions import ActorPlace, Questions
from transfer_queue.server.settings import ServerConfig, journal_of_unit
from transfer_queue.wire.address import Address, parse_address

CONTROLLER, UNIT, NAMESPACE = "TransferQueueController", "TransferQueueUnit", "transfer_queue"
UNIT_START_TIMEOUT_S = 45.0
STOP_TIMEOUT_S = local.STOP_TIMEOUT_S + 5.0


class Supervisor:
    """A server process on this node. It ends with this actor's process, however that ends, and this actor with it."""

    def __init__(self, config: ServerConfig) -> None:
        self._ip = ray.util.get_node_ip_address()
        config = msgspec.structs.replace(
            config,
            run_dir="",
            owner_pid=os.getpid(),
            host=config.host or self._ip,
            token=config.token or secrets.token_hex(32),
            unit_token=config.unit_token or secrets.token_hex(32),  # to other supervisors only, within their settings
        )
        self._config = config
        self._is_stopping = False
        self._failure: TransferQueueError | None = None
        try:
            # Ray kills the children of an actor's process together with it; an orphan sees the end and tidies up.
            self._server = local.start(config, orphan=True)
        except TransferQueueError as error:
            self._failure = error  # raised here, Ray would make a text of it
        else:
            threading.Thread(target=self._watch, daemon=True, name="tq-watch").start()

    def _watch(self) -> None:
        self._server.wait()
        if not self._is_stopping:
            print(f"transfer_queue: server process {self._server.pid} ended unexpectedly", file=sys.stderr, flush=True)
            os._exit(1)  # callers see a dead actor at once, and its name is free again

    async def here(self) -> ActorPlace:
        """Raises what the server's start raised, and `ServiceUnavailable` once it is being stopped."""
        if self._failure is not None:
            raise self._failure
        if self._is_stopping:
            raise ServiceUnavailable("the service is being closed")
        tcp = self._server.tcp.replace("0.0.0.0", self._ip)  # listening everywhere, reached at one address
        return ActorPlace(self._server.address, f"tcp:{tcp}", self._config.token)

    async def ended(self) -> None:
        """Never returns: the call fails when this actor ends."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """End the server and wait, at most `local.STOP_TIMEOUT_S`; the actor itself is ended by its owner."""
        self._is_stopping = True
        if self._failure is None:
            await asyncio.to_thread(self._server.stop)


class TransferQueueUnit(Supervisor):
    """The server of a node without the controller: a unit that joined it."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(msgspec.structs.replace(config, journal_dir=journal_of_unit(config.journal_dir)))


class TransferQueueController(Supervisor, Questions):
    """The server with the controller, and the units of the other nodes, which end with it."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._node = ray.get_runtime_context().get_node_id()
        self._units: dict[str, asyncio.Task[ActorPlace | None]] = {}
        self._actors: dict[str, Any] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    async def addresses(self, node: str) -> list[Address]:
        """Where a process on that node attaches: its own node's server, else the controller's over TCP.

        Starts a unit on every node that has none, and waits for that of `node`.
        """
        home = await self.here()
        for other in {found["NodeID"] for found in ray.nodes() if found["Alive"]} - {self._node, *self._units}:
            self._units[other] = asyncio.create_task(self._start_unit(other, home))
        place = home if node == self._node else await self._units[node] if node in self._units else None
        remote = parse_address(home.tcp, home.token)
        return [remote] if place is None else [parse_address(place.unix), remote]

    async def _start_unit(self, node: str, home: ActorPlace) -> ActorPlace | None:
        """The unit of a node; None when it cannot start, and clients there use TCP."""
        timeout_s = UNIT_START_TIMEOUT_S - local.START_TIMEOUT_S + local.start_timeout_s(self._config)
        actor = (
            ray.remote(TransferQueueUnit)
            .options(
                name=f"{UNIT}:{node}:{os.getpid()}",
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(self._unit_config(home))
        )
        self._actors[node] = actor
        try:
            place: ActorPlace = await asyncio.wait_for(actor.here.remote(), timeout_s)
        except (RayError, asyncio.TimeoutError) as error:
            why = getattr(error, "cause", None) or error or f"not up within {timeout_s:g} s"
            print(f"transfer_queue: no unit on node {node}, its clients use TCP: {why!r}", file=sys.stderr, flush=True)
            ray.kill(self._actors.pop(node))
            return None
        watcher = asyncio.create_task(self._replace(node, actor))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return place

    def _unit_config(self, home: ActorPlace) -> ServerConfig:
        """Settings of a unit; its budget is that of its own host unless one was configured."""
        configured = self._config.client["settings"].get("backend.SimpleStorage.budget_nbytes")
        return msgspec.structs.replace(
            self._config, host="", port=0, join=home.tcp, metrics_port=None, budget_nbytes=configured or 0
        )

    async def _replace(self, node: str, actor: Any) -> None:
        """Forget a unit that ended, so that the next process of its node gets a new one."""
        try:
            await actor.ended.remote()
        except RayError:
            self._units.pop(node, None)
            self._actors.pop(node, None)

    async def stop(self) -> None:
        units = list(self._actors.values())
        stopping = asyncio.gather(*(unit.stop.remote() for unit in units), return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopping, STOP_TIMEOUT_S)
        for unit in units:
            ray.kill(unit)
        await super().stop()
