"""A controller's server, units of other hosts and their clients on one clock and one network, driven by one seed.

Servers and clients are the real ones, from the protocol of a connection up; what is simulated is below that: sockets,
time, and processes that are killed or stand still (`sim_network`). A killed server goes on as its standby does, with
the state that it had (that a standby has it: `standby_sim`, `unit_sim`). `python -m cluster_sim SEED` repeats a run.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import secrets
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from sim_network import Numbered, Process, SimLoop, Stuck

from transfer_queue.client import forks
from transfer_queue.client import session as session_module
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.session import Session
from transfer_queue.errors import (
    DeadlineExceeded,
    LeaseExpired,
    ServiceRestarted,
    ServiceUnavailable,
    StoreFull,
    TransferQueueError,
)
from transfer_queue.server import process as process_module
from transfer_queue.server.connection import ServerConnection
from transfer_queue.server.connection_limit import ConnectionLimit, most_connections
from transfer_queue.server.process import Server
from transfer_queue.server.settings import ServerConfig
from transfer_queue.server.standby.returning import ReturningSessions
from transfer_queue.server.storage_node import StorageNode
from transfer_queue.server.turns import Turns
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address

TOKEN, UNIT_TOKEN = "a-token-nobody-guesses", "a-token-of-units-alone"
CLIENT = {"polling_mode": False, "timeout_s": 8.0, "spin_s": 0.0, "copy_threads": 1, "pool_nbytes": 0}
SLACK_S = 12.0  # of a call, beyond its deadline: a connection that is made anew, an answer that waits for a link
CALM_S = 200.0  # until everything that is held for those who may come back was given up


async def in_time(call: Any) -> Any:
    """A call of a client, which ends by its own deadline. Raises `TimeoutError` where it does not."""
    return await asyncio.wait_for(call, CLIENT["timeout_s"] + SLACK_S)  # type: ignore[operator]


class Node:
    """The server of a host."""

    def __init__(self, world: World, name: str, join: str = "") -> None:
        self.world = world
        self.address = f"{name}:7000"
        self.process = Process(f"server of {name}", name, world.loop.network)
        config = ServerConfig(
            run_dir="", host=name, port=7000, token=TOKEN, unit_token=UNIT_TOKEN, join=join, budget_nbytes=64 << 20,
            client=CLIENT, sampler={"class": "SequentialSampler"}, durability="process",
        )  # fmt: skip
        self.server: Server = self.process.run(Server, config)
        self.server.service.tcp = self.address
        world.loop.network.listeners[self.address] = (self.process, self.server._remote)

    async def start(self) -> None:
        role = self.server.role
        if isinstance(role, StorageNode):
            await self.process.run(self.world.loop.create_task, role.join(self.address))
            self.process.run(self.world.loop.create_task, role.stay())

    def kill(self, until_standby_s: float) -> None:
        """Its standby takes over after a while."""
        self.process.kill()
        self.world.loop.call_later(until_standby_s, self._take_over, self.process.epoch)

    def _take_over(self, epoch: int) -> None:
        if self.process.epoch == epoch:
            self.process.revive()
            self.process.run(self._start_over)

    def _start_over(self) -> None:
        """What `Server._take_over` and `_serve` do, as far as it is not of sockets and processes."""
        server, now = self.server, time.monotonic()
        server._former.append((server.connection_limit, server.turns, server._timer))
        server.connection_limit = ConnectionLimit(most_connections())
        server.turns = Turns()
        server._timer, server._tidying = None, False
        server._clock.next_look = math.inf
        server.role.start_over(now)
        server.service.takeovers += 1
        if isinstance(server.role, StorageNode):
            self._forget_replies()
            self.world.loop.create_task(server.role.stay())
        ReturningSessions(server.service, lambda: now, server.deliver).expect_all()
        server.deliver()

    def _forget_replies(self) -> None:
        """A unit's standby knows those of before it was forked, and what memory was given out since."""
        for session in self.server.service.sessions.by_ident.values():
            since = self.world.chance.randrange(len(session.replies) + 1)
            for rid, (reply, _) in list(session.replies.items())[since:]:
                if not isinstance(reply, m.Allocated):
                    session.forget(rid)

    def check(self) -> None:
        self.server.service.check_invariants()


class Handshake:
    """In place of the blocking connection over which a client learns whom it talks to."""

    world: World

    def __init__(self, address: Any, ident: bytes, timeout_s: float, spin_s: float, life: handshake.Life) -> None:
        found = self.world.loop.network.listeners.get(f"{address.host}:{address.port}")
        node = None if found is None else self.world.nodes[f"{address.host}:{address.port}"]
        if node is None or not node.process.is_alive:
            raise ServiceUnavailable(f"no server at {address}") from ConnectionRefusedError()
        self._process = node.process
        self.welcome = node.server.welcome(False)
        handshake.check_life(life, handshake.Life(self.welcome.service, self.welcome.unit))

    @property
    def is_lost(self) -> bool:
        return not self._process.is_alive

    def spin(self, _: float) -> None:
        pass

    def notify(self, _: Any) -> None:
        pass

    def close(self) -> None:
        pass


class World:
    """One run: nodes, clients with their scripts, and trouble. `wrong` is what must not be."""

    def __init__(self, seed: int, loop: SimLoop) -> None:
        self.loop = loop
        self.chance = random.Random(seed)
        self.wrong: list[str] = []
        self.nodes: dict[str, Node] = {}
        self.there: dict[float, Any] = {}  # what was put and answered, by its value
        self.unsure: set[float] = set()
        self.cleared: set[float] = set()  # perhaps, too
        self.used: dict[str, list[int]] = {"t": [], "leased": []}
        self.acknowledged: set[int] = set()  # perhaps
        self._values = itertools.count(1)
        self.log: list[str] = []

    # clients

    async def client(self, number: int, node: Node) -> None:
        client = await self._attached(node)
        for _ in range(self.chance.randrange(10, 40)):
            await asyncio.sleep(self.chance.random() * 0.05)
            script = self.chance.choice([*3 * [self._put], self._take, self._lease, self._read, self._clear])
            began = self.loop.now
            try:
                await script(client)  # type: ignore[operator]
            except (DeadlineExceeded, ServiceUnavailable, StoreFull) as error:
                self.log.append(f"{self.loop.now:.3f} client {number} {script.__name__}: {error}")
                if isinstance(error, ServiceRestarted):
                    self.wrong.append(f"client {number}: {error}")
            except asyncio.TimeoutError:
                self.wrong.append(f"client {number}: {script.__name__} since {began:.3f} s does not end")
        client.close()

    async def _attached(self, node: Node) -> TransferQueueClient:
        while True:
            try:
                return TransferQueueClient.of(Session(parse_address(f"tcp:{node.address}", TOKEN)))
            except ServiceUnavailable:
                await asyncio.sleep(0.05)

    async def _put(self, client: Any) -> None:
        value, count = float(next(self._values)), self.chance.randrange(1, 4)
        rows = {"x": torch.full((count, self.chance.choice([2, 2000])), value)}
        self.unsure.add(value)
        self.there[value] = await in_time(client.async_put(rows, partition_id="p"))
        self.unsure.discard(value)

    async def _take(self, client: Any) -> None:
        wait_s = self.chance.choice([0.0, 0.5])
        meta = await in_time(client.async_get_meta(["x"], 2, "p", task_name="t", timeout_s=wait_s))
        self.used["t"] += meta.global_indexes
        await self._look(client, meta)

    async def _lease(self, client: Any) -> None:
        lease_s = self.chance.choice([0.5, 60.0])
        meta = await in_time(client.async_get_meta(["x"], 2, "p", task_name="leased", lease_s=lease_s))
        await self._look(client, meta)
        if len(meta) and self.chance.random() < 0.7:
            self.acknowledged.update(meta.global_indexes)
            with suppress(LeaseExpired):
                await in_time(client.async_ack(meta))
                self.used["leased"] += meta.global_indexes

    async def _look(self, client: Any, meta: Any) -> None:
        """Rows are whole, or cleared meanwhile."""
        if len(meta):
            try:
                data = (await in_time(client.async_get_data(meta)))["x"]
            except TransferQueueError as error:
                if not isinstance(error, (DeadlineExceeded, ServiceUnavailable)) and not self.cleared:
                    self.wrong.append(f"rows {meta.global_indexes} that nobody cleared: {error!r}")
                return
            for row in data.unbind():
                if len(row.unique()) != 1:
                    self.wrong.append(f"rows {meta.global_indexes} are mixed")

    async def _read(self, client: Any) -> None:
        if self.there:
            value = self.chance.choice(sorted(self.there))
            await self._check(client, value)

    async def _check(self, client: Any, value: float) -> None:
        try:
            data = (await in_time(client.async_get_data(self.there[value])))["x"]
        except (DeadlineExceeded, ServiceUnavailable):
            raise
        except TransferQueueError as error:
            if value not in self.cleared:
                self.wrong.append(f"rows of {value}: {error!r}")
            return
        if any((row != value).any() for row in data.unbind()):
            self.wrong.append(f"rows of {value} have other bytes")

    async def _clear(self, client: Any) -> None:
        left = sorted(self.there.keys() - self.cleared)
        if left:
            value = self.chance.choice(left)
            self.cleared.add(value)
            await in_time(client.async_clear_samples(self.there[value]))

    # trouble

    async def trouble(self, clients: list[Process]) -> None:
        network = self.loop.network
        hosts = [node.process.host for node in self.nodes.values()]
        while True:
            await asyncio.sleep(self.chance.random() * 0.5)
            node = self.chance.choice(list(self.nodes.values()))
            kind = self.chance.choice(["kill", "kill", "kill", "freeze", "cut", "client"])
            self.log.append(f"{self.loop.now:.3f} {kind} {node.address}")
            if kind == "kill":
                node.kill(self.chance.choice([0.001, 0.01, 0.3]))
            elif kind == "freeze":
                node.process.freeze()
                self.loop.call_later(self.chance.choice([0.05, 0.5, 4.0]), node.process.thaw)
            elif kind == "cut":
                network.cut(*self.chance.sample(hosts, 2), self.chance.choice([0.1, 0.5, 3.0, 20.0]))
            elif self.chance.random() < 0.3:
                self.chance.choice(clients).kill()

    def calm(self) -> None:
        self.loop.network.heal()
        for node in self.nodes.values():
            node.process.thaw()

    # the run

    async def play(self) -> None:
        head = self.nodes["head:7000"] = Node(self, "head")
        for name in ("first", "second"):
            node = self.nodes[f"{name}:7000"] = Node(self, name, "tcp:head:7000")
            await node.start()
        processes, tasks = [], []
        for number in range(self.chance.randrange(3, 8)):
            node = self.chance.choice(list(self.nodes.values()))
            processes.append(Process(f"client {number}", node.process.host, self.loop.network))
            tasks.append(processes[-1].run(self.loop.create_task, self.client(number, node)))
        trouble = self.loop.create_task(self.trouble(processes))
        await asyncio.wait(tasks, timeout=20.0)
        trouble.cancel()
        self.calm()
        living = [task for task, process in zip(tasks, processes, strict=True) if not process.epoch]
        if living:
            await asyncio.wait(living, timeout=300.0)
        for task in living:
            if not task.done():
                self.wrong.append("a client does not end")
            elif task.exception() is not None:
                self.wrong.append(f"a client ended with {task.exception()!r}")
        await asyncio.sleep(CALM_S)
        await self._end(head)

    async def _end(self, head: Node) -> None:
        """What was answered is so, and nothing else is left."""
        process = Process("the end", "head", self.loop.network)
        await process.run(self.loop.create_task, self._last_look(head))
        await asyncio.sleep(CALM_S)
        for node in self.nodes.values():
            node.check()
            unit, service = node.server.service.unit, node.server.service
            if unit.used_nbytes or unit.pinned_nbytes():
                self.wrong.append(f"{node.address} holds {unit.used_nbytes} bytes, pinned {unit.pinned_nbytes()}")
            if service.pending.held or service.pending.in_doubt:
                self.wrong.append(f"{node.address}: {service.pending.held}, {service.pending.in_doubt} pending")
            if service.sessions.by_ident and not isinstance(node.server.role, StorageNode):
                known = {member.incarnation for member in service.members.members()}
                self.wrong += [f"session {one!r} is left" for one in service.sessions.by_ident if one not in known]

    async def _last_look(self, head: Node) -> None:
        client = await self._attached(head)
        for value in sorted(self.there):
            if value not in self.cleared:
                await self._check(client, value)
        for task, rows in self.used.items():
            twice = {row for row in rows if rows.count(row) > 1}
            if twice:
                self.wrong.append(f"task {task!r} got rows {twice} more than once")
            left = await self._left(client, task)
            there = {row for value in self.there.keys() - self.cleared for row in self.there[value].global_indexes}
            missing = there - left - set(rows) - (self.acknowledged if task == "leased" else set())
            if missing:
                self.wrong.append(f"rows {missing} are lost to task {task!r}")
        await in_time(client.async_clear_partition("p"))
        client.close()

    async def _left(self, client: Any, task: str) -> set[int]:
        """The rows that a task has not used."""
        left: set[int] = set()
        with suppress(DeadlineExceeded):
            while True:
                meta = await in_time(client.async_get_meta(["x"], 1, "p", task_name=task, timeout_s=0.0))
                left.update(meta.global_indexes)
        return left


class NumberedConnection(Numbered, ServerConnection):
    """A connection to a simulated server."""


@contextmanager
def simulated(seed: int) -> Iterator[SimLoop]:
    chance = random.Random(seed + 1)
    loop = SimLoop(chance)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(time, "monotonic", loop.time))
        stack.enter_context(mock.patch.object(time, "perf_counter", loop.time))
        stack.enter_context(mock.patch.object(time, "time", loop.wall_time))
        stack.enter_context(mock.patch.object(secrets, "token_bytes", chance.randbytes))
        stack.enter_context(mock.patch.object(random, "uniform", chance.uniform))
        stack.enter_context(mock.patch.object(session_module, "Connection", Handshake))
        stack.enter_context(mock.patch.object(forks, "sessions", weakref.WeakSet()))  # they have no descriptors
        stack.enter_context(mock.patch.object(process_module, "ServerConnection", NumberedConnection))
        stack.enter_context(mock.patch.object(Numbered, "numbers", itertools.count()))
        gc.collect()
        gc.disable()  # what is let go of a moment later is another run
        stack.callback(gc.enable)
        stack.enter_context(mock.patch("transfer_queue.wire.aio.tune"))
        stack.enter_context(mock.patch("transfer_queue.server.connection.tune"))
        yield loop


def wrong(seed: int, shows: bool = False) -> list[str]:
    """What was otherwise than promised in a run."""
    with simulated(seed) as loop:
        asyncio.set_event_loop(loop)
        world = Handshake.world = World(seed, loop)
        try:
            loop.run_until_complete(world.play())
        except Stuck:
            world.wrong.append(f"nothing goes on at {loop.now:.1f} s")
        finally:
            for node in world.nodes.values():
                node.server.service.unit.close()
            loop.bury()
            asyncio.set_event_loop(None)
        if shows:
            print(*world.log, sep="\n")
        return [f"seed {seed}: {one}" for one in world.wrong]


if __name__ == "__main__":
    print(*wrong(int(sys.argv[1]), True), sep="\n")
