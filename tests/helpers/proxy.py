"""A TCP proxy that cuts, refuses and stalls connections: a network in trouble, between a client and a real server.

Its event loop runs on a thread of its own; every method may be called from anywhere and has taken effect when it
returns.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Literal

Direction = Literal["up", "down"]  # to the server, to the client
CHUNK_NBYTES = 64 << 10
RESET = struct.pack("ii", 1, 0)  # SO_LINGER, socket(7): close sends RST and drops what was not sent yet
OPEN_TIMEOUT_S = 10.0


class Carried:
    """One connection through the proxy: a socket on each side."""

    def __init__(self, near: socket.socket, far: socket.socket, left: float) -> None:
        self.near = near
        self.far = far
        self.left = left  # bytes until it is cut
        self.pumps: list[asyncio.Task[None]] = []


class Proxy:
    """Forwards `port` of 127.0.0.1 to the server at (`host`, `port_of_server`); a context manager.

    `num_cuts` counts the connections it cut, `num_opened` those it forwarded.
    """

    def __init__(self, host: str, port_of_server: int, seed: int = 0) -> None:
        self.port = 0
        self.num_cuts = self.num_opened = 0
        self._server = (host, port_of_server)
        self._rng = random.Random(seed)
        self._between: tuple[int, int] | None = None
        self._carried: set[Carried] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing: dict[Direction, asyncio.Event] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> int:
        """Cut all connections now; how many there were."""

        async def cut() -> int:
            return sum([self._cut(carried) for carried in list(self._carried)])

        return self._run(cut())

    def cut_between(self, low: int, high: int) -> None:
        """Cut every connection opened from now on after `low` to `high` bytes in both directions together, at random;
        often in the middle of a frame."""
        self._on_loop(lambda: setattr(self, "_between", (low, high)))

    def cut_after(self, nbytes: int) -> None:
        """Cut the connections there are after as many bytes more, in both directions together."""

        def limit() -> None:
            for carried in self._carried:
                carried.left = nbytes

        self._on_loop(limit)

    def leave_alone(self) -> None:
        """No more cuts, refusals and stalls, also of the connections there are."""

        def leave() -> None:
            self._between = None
            for carried in self._carried:
                carried.left = float("inf")
            for flowing in self._flowing.values():
                flowing.set()

        self._on_loop(leave)
        self.refuse(False)

    def refuse(self, refused: bool = True) -> None:
        """Whether new connections are refused, as where nothing listens."""
        self._run(self._refuse() if refused else self._listen())

    def stall(self, direction: Direction) -> None:
        """Forward nothing in one direction until `leave_alone`; the connections stay open."""
        self._on_loop(self._flowing[direction].clear)

    # on the loop

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(OPEN_TIMEOUT_S)

    def _on_loop(self, change: Callable[[], object]) -> None:
        async def run() -> None:
            change()

        self._run(run())

    async def _start(self) -> None:
        self._flowing = {"up": asyncio.Event(), "down": asyncio.Event()}
        for flowing in self._flowing.values():
            flowing.set()
        await self._listen()

    async def _listen(self) -> None:
        if self._accepting is None:
            listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            self._accepting = self._loop.create_task(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                near, _ = await self._loop.sock_accept(listener)
                near.setblocking(False)
                task = self._loop.create_task(self._carry(near))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _refuse(self) -> None:
        if self._accepting is not None:
            await _over([self._accepting])
            self._accepting = None

    async def _carry(self, near: socket.socket) -> None:
        far = socket.socket()
        with near, far:
            far.setblocking(False)
            try:
                await self._loop.sock_connect(far, self._server)
            except OSError:
                return
            for side in (near, far):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left = self._rng.randint(*self._between) if self._between is not None else float("inf")
            carried = Carried(near, far, left)
            self._carried.add(carried)
            self.num_opened += 1
            pumps: list[tuple[Direction, socket.socket, socket.socket]] = [("up", near, far), ("down", far, near)]
            carried.pumps = [self._loop.create_task(self._pump(carried, *pump)) for pump in pumps]
            try:
                await asyncio.wait(carried.pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._carried.discard(carried)
                await _over(carried.pumps)  # before their sockets are closed

    async def _pump(self, carried: Carried, direction: Direction, source: socket.socket, to: socket.socket) -> None:
        """Ends when either side does, or when the connection is cut."""
        try:
            while data := await self._loop.sock_recv(source, CHUNK_NBYTES):
                await self._flowing[direction].wait()
                whole = len(data) < carried.left
                await self._loop.sock_sendall(to, data if whole else data[: int(carried.left)])
                carried.left -= len(data)
                if not whole:
                    self._cut(carried)
                    return
        except OSError:
            return  # the other end is told by closing

    def _cut(self, carried: Carried) -> int:
        """Half of the cuts are resets, the others look like the end of a process."""
        self.num_cuts += 1
        self._carried.discard(carried)
        if self._rng.random() < 0.5:
            for side in (carried.near, carried.far):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        for pump in carried.pumps:
            pump.cancel()
        return 1

    async def _stop(self) -> None:
        await self._refuse()
        await _over(list(self._tasks))


async def _over(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
