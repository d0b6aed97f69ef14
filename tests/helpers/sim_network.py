"""An event loop whose clock jumps to whatever happens next, and a network of hosts whose processes can be killed or
frozen and whose links can be cut. Nothing of it is real: a run takes as long as its callbacks.

A process is a context: whatever is called from a callback of it, tasks included, belongs to it and is gone when it is
killed. Connections are what asyncio's protocols see of them; bytes take a while, arrive in order and in pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import itertools
import math
import random
import selectors
from collections import deque
from collections.abc import Callable
from typing import Any

PROCESS: contextvars.ContextVar[tuple[Process, int] | None] = contextvars.ContextVar("PROCESS", default=None)
PEER_TIMEOUT_S = 15.0  # after so long without a link both ends lose their connections, see `wire.address.tune`
HORIZON_S = 3600.0


class Stuck(Exception):
    """Nothing will ever happen again."""


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    loop: SimLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck
        self.loop.now += max(0.0, timeout)
        if self.loop.now > HORIZON_S:
            raise Stuck
        return []


class Numbered:
    """A set of such has the same order in every run of a seed; one of others is in the order of their addresses."""

    numbers = itertools.count()

    def __init__(self, *args: Any, **more: Any) -> None:
        self._number = next(Numbered.numbers)
        super().__init__(*args, **more)

    def __hash__(self) -> int:
        return self._number


class SimTask(Numbered, asyncio.Task):  # type: ignore[type-arg]
    """What runs on a simulated loop."""


class SimLoop(asyncio.SelectorEventLoop):
    """Callbacks run at once, at the time they are due. Work for other threads is done on the spot."""

    def __init__(self, chance: random.Random) -> None:
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.network = Network(self, chance)
        self.tasks: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._task)

    def time(self) -> float:
        return self.now

    def wall_time(self) -> float:
        return 1.7e9 + self.now

    def _task(self, loop: Any, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        task = SimTask(coroutine, loop=loop, **more)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # those of killed processes end like that
        self.tasks.append(task)
        return task

    def bury(self) -> None:
        """Let go of what was left half done, above all by processes that were killed, and close."""
        for task in self.tasks:
            if not task.done():
                asyncio._set_running_loop(self)
                with contextlib.suppress(BaseException):
                    task.get_coro().close()  # type: ignore[union-attr]
                asyncio._set_running_loop(None)
        self.tasks.clear()
        self.close()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon(_guarded(callback, context), *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_at(when, _guarded(callback, context), *args, context=context)

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001  whoever waits gets it
            future.set_exception(error)
        return future

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:  # type: ignore[override]
        return await self.network.connect(factory, f"{host}:{port}")


def _guarded(callback: Any, context: contextvars.Context | None) -> Any:
    """`callback`, unless its process was killed meanwhile; later, if it is frozen."""
    found = PROCESS.get() if context is None else context.get(PROCESS)
    if found is None:
        return callback
    process, epoch = found

    def run(*args: Any) -> None:
        if process.epoch != epoch:
            return
        if process.is_frozen:
            process.held.append((contextvars.copy_context(), callback, args))
        else:
            callback(*args)

    return run


class Process:
    """A process of a host. Its second life, after it was killed, has another epoch."""

    def __init__(self, name: str, host: str, network: Network) -> None:
        self.name = name
        self.host = host
        self.epoch = 0
        self.is_frozen = False
        self.is_alive = True
        self.held: list[tuple[contextvars.Context, Any, tuple[Any, ...]]] = []
        self.transports: dict[SimTransport, None] = {}  # in the order that they were made: a set's is another each time
        self._network = network
        self.context = self._context()

    def _context(self) -> contextvars.Context:
        context = contextvars.copy_context()
        context.run(PROCESS.set, (self, self.epoch))
        return context

    def run(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Call something in this process, from outside of all processes."""
        return self.context.copy().run(callback, *args)

    def kill(self) -> None:
        """Nothing of it goes on. What it had sent may still arrive."""
        self.epoch += 1
        self.is_alive = self.is_frozen = False
        self.held.clear()
        self.context = self._context()
        for transport in list(self.transports):
            transport.die()

    def revive(self) -> None:
        self.is_alive = True

    def freeze(self) -> None:
        self.is_frozen = self.is_alive

    def thaw(self) -> None:
        self.is_frozen = False
        held, self.held = self.held, []
        for context, callback, args in held:
            context.run(self._network.loop.call_soon, callback, *args)
        for transport in list(self.transports):
            self.run(transport.pump)


class Network:
    """Who listens where, and which links are cut until when."""

    def __init__(self, loop: SimLoop, chance: random.Random) -> None:
        self.loop = loop
        self.chance = chance
        self.listeners: dict[str, tuple[Process, Callable[[], Any]]] = {}
        self._cuts: dict[frozenset[str], tuple[float, float]] = {}  # from when until when
        self._transports: list[SimTransport] = []

    def latency_s(self) -> float:
        return self.chance.choice([0.0001, 0.0002, 0.001, 0.02])

    def cut(self, one: str, other: str, seconds: float) -> None:
        now = self.loop.now
        self._cuts[frozenset((one, other))] = (now, now + seconds)
        if seconds > PEER_TIMEOUT_S:
            self.loop.call_at(now + PEER_TIMEOUT_S, self._give_up, frozenset((one, other)))

    def heal(self) -> None:
        self._cuts.clear()

    def cut_until(self, one: str, other: str) -> float:
        """When bytes can pass again; 0 when they can now."""
        until = self._cuts.get(frozenset((one, other)), (0.0, 0.0))[1] if one != other else 0.0
        return until if until > self.loop.now else 0.0

    def _give_up(self, link: frozenset[str]) -> None:
        if link in self._cuts:
            for transport in self._transports:
                if frozenset((transport.process.host, transport.peer.process.host)) == link:
                    transport.lose(TimeoutError(errno.ETIMEDOUT, "timed out"))

    async def connect(self, factory: Callable[[], Any], address: str) -> Any:
        """As asyncio's `create_connection`: in the process that calls."""
        found = PROCESS.get()
        assert found is not None
        process = found[0]
        await asyncio.sleep(self.latency_s())
        while True:
            listener = self.listeners.get(address)
            if listener is None:
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {address}")
            until = self.cut_until(process.host, listener[0].host)
            if not until and listener[0].is_alive:  # a killed one's standby has its listener, and will accept
                break
            await asyncio.sleep(max(0.001, until - self.loop.now))
        near, far = SimTransport(self, process), SimTransport(self, listener[0])
        near.peer, far.peer = far, near
        self._transports += [near, far]
        far.process.run(lambda: far.open(listener[1]()))
        near.open(factory())
        return near, near.protocol


class Socket:
    """What code asks of the socket below a transport."""

    def setsockopt(self, *_: Any) -> None:
        pass

    def fileno(self) -> int:
        """Closed: what has not arrived by the end of a connection never does."""
        return -1


class SimTransport(asyncio.Transport):
    """One end of a connection."""

    peer: SimTransport

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        self.process = process
        self.protocol: Any = None
        self._network = network
        self._inbox: deque[bytes | OSError | None] = deque()  # None: the peer has closed
        self._is_paused = self._is_closing = self._is_gone = self._pumping = False
        self._next_arrival = 0.0
        self._under_way: deque[asyncio.TimerHandle] = deque()
        self._waiting: list[bytes | OSError | None] = []  # for the link
        process.transports[self] = None

    def open(self, protocol: Any) -> None:
        self.protocol = protocol
        protocol.connection_made(self)

    # what protocols call

    def write(self, data: Any) -> None:
        if data and not self._is_closing:
            self._send(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._network.loop.call_soon(self.pump)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": Socket(), "peername": (self.peer.process.host, 1)}.get(name, default)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send(None)
            self._network.loop.call_soon(self._lost, None)

    abort = close

    # what happens to it

    def die(self) -> None:
        """Its process was killed: it may not have come to send the last of what it meant to."""
        if not self._is_closing:
            for _ in range(self._network.chance.choice([0, 0, 1, 3, len(self._under_way)])):
                if self._under_way:
                    self._under_way.pop().cancel()
            self._send(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        self._is_closing = self._is_gone = True
        self.process.transports.pop(self, None)

    def lose(self, error: OSError) -> None:
        """The connection is lost at this end."""
        if not self._is_gone:
            self._inbox.clear()
            self._inbox.append(error)
            self.process.run(self.pump)

    def _send(self, data: bytes | OSError | None) -> None:
        loop = self._network.loop
        when = max(loop.now + self._network.latency_s(), self._next_arrival)
        self._next_arrival = when
        self._under_way.append(contextvars.Context().run(loop.call_at, when, self._arrive, data))

    def _arrive(self, data: bytes | OSError | None) -> None:
        """At the other end, when the link lets it pass."""
        self._under_way.popleft()
        peer, loop = self.peer, self._network.loop
        until = self._network.cut_until(self.process.host, peer.process.host)
        if until or self._waiting:
            self._waiting.append(data)
            if len(self._waiting) == 1:
                loop.call_at(until, self._pass_on)
            return
        self._hand_over(data)

    def _pass_on(self) -> None:
        until = self._network.cut_until(self.process.host, self.peer.process.host)
        if until:
            self._network.loop.call_at(until, self._pass_on)
            return
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self._hand_over(data)

    def _hand_over(self, data: bytes | OSError | None) -> None:
        peer = self.peer
        if not peer._is_gone:
            peer._inbox.append(data)
            peer.process.run(peer.pump)

    def pump(self) -> None:
        """Give the protocol what is there."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._inbox and not self._is_paused and not self.process.is_frozen and not self._is_gone:
                data = self._inbox.popleft()
                if not isinstance(data, bytes):
                    self._is_closing = True
                    self._lost(data)
                elif not self._is_closing:
                    self._feed(data)
        finally:
            self._pumping = False

    def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._is_closing:
            into = self.protocol.get_buffer(-1)
            count = min(len(into), len(view), self._network.chance.choice([7, 100, math.inf]))
            into[:count] = view[:count]
            view = view[count:]
            self.protocol.buffer_updated(count)
            if self._is_paused and view:
                self._inbox.appendleft(bytes(view))
                return

    def _lost(self, error: OSError | None) -> None:
        if not self._is_gone:
            self._is_gone = True
            self.process.transports.pop(self, None)
            self.protocol.connection_lost(error)
