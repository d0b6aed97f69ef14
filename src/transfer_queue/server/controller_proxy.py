"""The controller of another host, as a unit's server sees it: every request of a local client is passed on to it.

Each session has a connection of its own to the controller's server, under its own identity, so that the controller
sees the same sessions, repeats and cancellations as if the clients were connected to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Any, TypeVar

from transfer_queue.errors import (
    DeadlineExceeded,
    ServiceRestarted,
    ServiceUnavailable,
    TooManyConnections,
    TransferQueueError,
)
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address
from transfer_queue.wire.aio import AsyncConnection
from transfer_queue.wire.handshake import ANY, Life
from transfer_queue.wire.messages.checkpoints import STATE_S

T = TypeVar("T")
CONNECT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.5
REMEMBERED = 256  # messages that nobody answers, and that may have been lost with a connection
SPARE_S = 1.0  # how much later than its own deadline a request is given up here; the client waits a little longer still


class Caller:
    """The connection of one session, opened on first use and again after it was lost. `told` gets what a request that
    waits there waits for, with its ticket."""

    def __init__(self, address: Address, session: bytes, life: Life, told: Callable[[Hashable, m.Reply], None]) -> None:
        self._address = address
        self._session = session
        self._life = life
        self._told = told
        self.asking: dict[int, Hashable] = {}  # tickets of the requests under way
        self._said: deque[m.Message] = deque(maxlen=REMEMBERED)
        self._opening: asyncio.Future[AsyncConnection] | None = None
        self._is_closed = False

    async def call(self, message: m.Request, payload: memoryview | None, timeout_s: float) -> tuple[Any, memoryview]:
        """The reply. A lost connection is replaced, as often as it takes: the request keeps its id, so it has one
        outcome."""

        async def ask(left_s: float) -> tuple[Any, memoryview]:
            connection = await self.connection()
            return await connection.call(message, payload, left_s)

        return await self._until_heard(ask, timeout_s)

    async def attend(self, timeout_s: float) -> None:
        """Be connected. Raises as `connection`."""
        await self._until_heard(lambda left_s: self.connection(), timeout_s)

    async def _until_heard(self, ask: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
        """`ask` again where its connection is cut, as by the end of a server that has a standby."""
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        deadline = loop.time() + timeout_s
        while True:
            try:
                return await ask(max(0.0, deadline - loop.time()))
            except ServiceUnavailable as error:
                if self._is_closed or not _is_cut(error) or loop.time() + pause_s >= deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def connection(self) -> AsyncConnection:
        """The live connection. Raises `ServiceUnavailable`, `AccessDenied` or `DeadlineExceeded`."""
        opening = self._opening
        if opening is not None and opening.done() and not _is_open(opening):
            opening = None
        if opening is None:
            opening = self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(opening)

    async def _open(self) -> AsyncConnection:
        connection = AsyncConnection(self._address, m.decode_server, self._pushed)
        await connection.open(self._session, CONNECT_S, self._life)
        for message in self._said:  # over the connection before, which may have been cut: to say it twice does no harm
            connection.notify(message)
        return connection

    def _pushed(self, message: m.Message) -> None:
        if isinstance(message, m.Waiting) and message.rid in self.asking:
            self._told(self.asking[message.rid], message)

    def notify(self, message: m.Message) -> bool:
        """Tell the controller, if it can be told now."""
        opening = self._opening
        if opening is None or not _is_open(opening):
            return False
        opening.result().notify(message)
        return True

    def say(self, message: m.Message) -> None:
        """Tell the controller, at the latest when it can be reached again."""
        self._said.append(message)
        self.notify(message)

    def close(self) -> bool:
        """Tell the controller that this session has ended. Whether it was told."""
        self._is_closed = True
        is_told = self.notify(m.Goodbye())
        if self._opening is not None:
            self._opening.add_done_callback(_close)  # who waits for it hears that it is closed
        return is_told


def _is_cut(error: ServiceUnavailable) -> bool:
    """Whether somebody was there, who may have a standby."""
    return not isinstance(error, (ServiceRestarted, TooManyConnections)) and not isinstance(error.__cause__, OSError)


def _is_open(opening: asyncio.Future[AsyncConnection]) -> bool:
    failed = not opening.done() or opening.cancelled() or opening.exception() is not None
    return not failed and opening.result().error is None


def _close(opening: asyncio.Future[AsyncConnection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class ControllerProxy:
    """`deliver` is called when something appeared in `outbox` or `freed`. See `service.Control`."""

    def __init__(self, address: Address, deliver: Callable[[], None]) -> None:
        self.address = address
        self.life = ANY
        self.timeout_s = 30.0
        self.outbox: list[tuple[Hashable, m.Reply]] = []
        self.payloads: dict[Hashable, memoryview] = {}
        self.in_doubt: set[Hashable] = set()
        self.freed: list[int] = []
        self.unfinished = False
        self._deliver = deliver
        self._callers: dict[bytes, Caller] = {}
        self._asking: dict[Hashable, tuple[asyncio.Task[None], m.Request]] = {}
        self._inherited: set[bytes] = set()  # sessions that the controller may know, of the process before
        self._leaving: set[asyncio.Task[None]] = set()
        self._former: list[object] = []  # of event loops before: to take it apart would reach into them

    async def check(self) -> None:
        """Find out whether clients will be let in with the token of this server. Raises as `Caller.connection`."""
        caller = Caller(self.address, secrets.token_bytes(16), ANY, self._tell)
        await caller.connection()
        caller.close()

    def handle(self, message: m.Request, ticket: Hashable, session: bytes, now: float) -> m.Reply | None:
        asking = self._ask(self._caller(session), message, self.payloads.pop(ticket, None), ticket)
        task = asyncio.get_running_loop().create_task(asking)
        self._asking[ticket] = (task, message)
        return None

    def _caller(self, session: bytes) -> Caller:
        caller = self._callers.get(session)
        if caller is None:
            caller = self._callers[session] = Caller(self.address, session, self.life, self._tell)
        return caller

    async def _ask(self, caller: Caller, message: m.Request, payload: memoryview | None, ticket: Hashable) -> None:
        wait_s = STATE_S if isinstance(message, (m.Snapshot, m.Restore)) else getattr(message, "timeout_s", 0.0)
        answer = memoryview(b"")
        caller.asking[message.rid] = ticket
        try:
            if isinstance(message, m.Fetch) and message.holder:
                await self._caller(message.holder).attend(self.timeout_s)  # the controller has to know whom it lends to
            reply, answer = await caller.call(message, payload, (wait_s or self.timeout_s) + SPARE_S)
        except TransferQueueError as error:
            reply = m.Failed(message.rid, error.code, f"controller at {self.address}: {error}")
            if isinstance(error, (DeadlineExceeded, ServiceUnavailable)):
                self.in_doubt.add(ticket)
        finally:
            if caller.asking.get(message.rid) == ticket:
                del caller.asking[message.rid]
        located = reply.located if isinstance(reply, m.Handed) else reply
        if isinstance(located, (m.Located, m.Captured)):
            located.units.setdefault(0, str(self.address))
        if answer:
            self.payloads[ticket] = answer
        del self._asking[ticket]
        self._tell(ticket, reply)

    def _tell(self, ticket: Hashable, reply: m.Reply) -> None:
        self.outbox.append((ticket, reply))
        self._deliver()

    def forget(self, tickets: set[Hashable]) -> None:
        for ticket in tickets & self._asking.keys():
            task, message = self._asking.pop(ticket)
            task.cancel()
            if isinstance(message, (m.Commit, m.Restore)):
                self.in_doubt.add(ticket)

    def end_session(self, session: bytes) -> None:
        is_told = self._let_go(session)
        if session in self._inherited and not is_told:  # else the controller would wait for it for a while
            caller = Caller(self.address, session, self.life, self._tell)
            leaving = asyncio.get_running_loop().create_task(self._leave(caller))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        self._inherited.discard(session)

    def _let_go(self, session: bytes) -> bool:
        """Whether the controller was told."""
        caller = self._callers.pop(session, None)
        return caller is not None and caller.close()

    async def _leave(self, caller: Caller) -> None:
        with contextlib.suppress(TransferQueueError):
            await caller.connection()
        caller.close()

    def received(self, session: bytes, rid: int) -> None:
        self._caller(session).say(m.Received([rid]))

    def take_back(self, session: bytes, rid: int) -> None:
        self._caller(session).say(m.Cancel(rid))

    def expire(self, now: float) -> None:
        """Deadlines are kept by the connections."""

    def postpone(self, by_s: float) -> None:
        """As little as they end here."""

    def next_deadline(self) -> float | None:
        return None

    def tidy(self) -> None:
        """The controller's own server does that."""

    def statistics(self) -> dict[str, Any]:
        return {"controller": str(self.address), "waiting_requests": len(self._asking)}

    def check_invariants(self) -> None:
        assert self.in_doubt <= {ticket for ticket, _ in self.outbox}

    def begin(self, service: bytes) -> None:
        """From now on this life of the controller is meant. Calls to an earlier one fail with `ServiceRestarted`."""
        for session in list(self._callers):
            self._let_go(session)
        self.life = Life(service)

    def start_over(self, sessions: Iterable[bytes]) -> None:
        """Begin on another event loop: what was under way, and every connection, ended with the one before. The
        controller may know these sessions."""
        self._former.append((self._callers, self._asking, self._leaving))
        self._inherited, self._leaving = set(sessions), set()
        self._callers, self._asking = {}, {}
        self.outbox.clear()
        self.payloads.clear()
        self.in_doubt.clear()
        self.freed.clear()

    async def attend(self, sessions: Iterable[bytes]) -> None:
        """Be connected for these: the controller gives up sessions of other hosts that are away for long. Those for
        whom it fails connect with their next request."""
        connecting = [self._caller(session).connection() for session in sessions]
        await asyncio.gather(*connecting, return_exceptions=True)

    def close(self) -> None:
        for task, _ in self._asking.values():
            task.cancel()
        for session in list(self._callers):
            self._let_go(session)
