"""The calling end of a connection on an event loop: many requests in flight, answered in any order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple, TypeAlias, cast

from transfer_queue.errors import DeadlineExceeded, ProtocolError, ServiceUnavailable, TransferQueueError, kept
from transfer_queue.wire import handshake, notices
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, tune
from transfer_queue.wire.framing import CHECKED_NBYTES, UNREADABLE, FrameReader, frame, unsendable
from transfer_queue.wire.peer import check_peer

log = logging.getLogger("transfer_queue")

CONFIRM_S = 0.001
QUEUE_S = 0.01  # how often a full queue is looked at again
Found: TypeAlias = tuple[Any, memoryview]


class PendingCall(NamedTuple):
    """A request in flight."""

    future: asyncio.Future[Found]
    deadline: float
    request: m.Request
    timeout_s: float
    into: memoryview | None


class AsyncConnection(asyncio.BufferedProtocol):
    """A socket of one event loop after the handshake; lives until the loop shuts down or its owner closes it.

    `pushed` gets the messages that answer no request, and what requests wait for (without it, the log does). `lost` is
    called once when the connection is gone.
    """

    def __init__(
        self,
        address: Address,
        decode: Callable[[memoryview], Any],
        pushed: Callable[[m.Message], None] | None = None,
        lost: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.error: TransferQueueError | None = None
        self.welcome: m.Welcome
        self._pushed = pushed
        self._lost = lost
        self._reader = FrameReader(decode, self._destination)
        self._waiting: dict[int, PendingCall] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_check = math.inf
        self._outgoing: list[bytes | memoryview] = []
        self._confirmed: list[int] = []  # requests whose answers were received: said with what is sent next
        self._hello: asyncio.Future[Found] | None = None
        self._transport: asyncio.Transport
        self._until_shutdown: AsyncGenerator[None, None] | None = None

    async def open(
        self, session: bytes, timeout_s: float, life: handshake.Life = handshake.ANY, role: int = handshake.CLIENT
    ) -> AsyncConnection:
        """Connect and shake hands with a server of `life`.

        Raises `ServiceUnavailable`, `ServiceRestarted`, `AccessDenied` or `DeadlineExceeded`.
        """
        address, loop = self.address, self.loop
        try:
            if address.path:
                connecting: Any = self._connect_here()
            else:
                connecting = loop.create_connection(lambda: self, address.host, address.port)
            await asyncio.wait_for(connecting, timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"no connection to {address} within {timeout_s:g} s") from None
        except OSError as error:
            raise ServiceUnavailable(f"no server at {address}: {error}") from error
        try:
            if address.path:
                check_peer(address.path, self._transport.get_extra_info("socket"))
            steps = handshake.greeting(address, m.PROTOCOL_VERSION, session, life, role)
            self.welcome = await self._carry_out(steps, timeout_s)
        except BaseException:
            self.close()
            raise
        # asyncio closes every live asynchronous generator of a loop when it shuts the loop down
        self._until_shutdown = self._close_with_loop()
        await self._until_shutdown.__anext__()
        return self

    @property
    def own_host(self) -> str:
        """The address of this host that a connection by TCP comes from."""
        return str(self._transport.get_extra_info("sockname")[0])

    async def _connect_here(self) -> None:
        """Connect to a unix socket, and wait for a place where its queue is full: nothing else tells of one."""
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                self.address.reach(sock)
                await self.loop.create_unix_connection(lambda: self, sock=sock)
                return
            except BlockingIOError:
                sock.close()
            except BaseException:
                sock.close()
                raise
            await asyncio.sleep(QUEUE_S)

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.close()

    async def _carry_out(self, steps: handshake.Greeting, timeout_s: float) -> m.Welcome:
        message = next(steps)
        while True:
            reply = await self._greet(message, timeout_s)
            try:
                message = steps.send(reply)
            except StopIteration as stop:
                return cast(m.Welcome, stop.value)

    async def _greet(self, message: m.Message, timeout_s: float) -> m.Message:
        if self.error is not None:  # lost since the answer before: nobody would tell this one
            raise kept(self.error)
        self._hello = self.loop.create_future()
        self._transport.write(frame(m.encode(message)))
        try:
            reply, _ = await asyncio.wait_for(self._hello, timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"no answer from {self.address} within {timeout_s:g} s") from None
        finally:
            self._hello = None
        return cast(m.Message, reply)

    async def call(
        self, request: m.Request, payload: memoryview | None, timeout_s: float, into: memoryview | None = None
    ) -> Found:
        """The reply and its payload, received straight into `into` when given.

        Raises `DeadlineExceeded`, `ServiceUnavailable`, or `InvalidInput` for what cannot be sent.
        """
        if self.error is not None:
            raise kept(self.error)
        try:
            header = m.encode(request)
            if len(header) <= CHECKED_NBYTES:
                m.decode_client(header)
            elif len(header) > m.SMALL_HEADER_NBYTES:
                m.check_length(request, header)
        except UNREADABLE as error:
            raise unsendable(request, error) from None
        future: asyncio.Future[Found] = self.loop.create_future()
        deadline = self.loop.time() + timeout_s
        self._waiting[request.rid] = PendingCall(future, deadline, request, timeout_s, into)
        if deadline < self._next_check:
            self._check_at(deadline)
        if payload is None:
            self._write(frame(header))
        else:
            self._write(frame(header, len(payload)), payload)
        try:
            return await future
        except BaseException:
            self.notify(m.Cancel(request.rid))
            raise
        finally:
            self._waiting.pop(request.rid, None)

    def _check_at(self, deadline: float) -> None:
        """One timer serves all requests: it looks at the earliest deadline, and most are answered long before."""
        if self._timer is not None:
            self._timer.cancel()
        self._next_check = deadline
        self._timer = self.loop.call_at(deadline, self._check)

    def _check(self) -> None:
        self._timer, self._next_check = None, math.inf
        now = self.loop.time()
        for future, deadline, request, timeout_s, _ in list(self._waiting.values()):
            if deadline <= now and not future.done():
                text = f"{type(request).__name__}: no answer from {self.address} within {timeout_s:g} s"
                future.set_exception(DeadlineExceeded(text))
        later = [one.deadline for one in self._waiting.values() if one.deadline > now]
        if later:
            self._check_at(min(later))

    def notify(self, message: m.Message) -> None:
        if self.error is None:
            self._write(frame(m.encode(message)))

    def confirm(self, rid: int) -> None:
        """Say that the answer to `rid` was received, with what is sent next or after `CONFIRM_S`."""
        if self.error is None:
            self._confirmed.append(rid)
            if len(self._confirmed) == 1:
                self.loop.call_later(CONFIRM_S, self._flush)

    def _confirmation(self) -> list[bytes]:
        rids, self._confirmed = self._confirmed, []
        return [frame(m.encode(m.Received(rids)))] if rids else []

    def _write(self, *parts: bytes | memoryview) -> None:
        """Send at once when nothing else is in flight, else together with what this turn of the loop still writes."""
        if len(self._waiting) > 1 or self._outgoing:
            if not self._outgoing:
                self.loop.call_soon(self._flush)
            self._outgoing += parts
        elif not self._transport.is_closing():  # lost, and not told yet
            self._transport.writelines([*self._confirmation(), *parts] if self._confirmed else parts)

    def _flush(self) -> None:
        outgoing, self._outgoing = [*self._confirmation(), *self._outgoing], []
        if outgoing and not self._transport.is_closing():
            self._transport.writelines(outgoing)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self.address.path:
            tune(transport.get_extra_info("socket"))

    def _destination(self, message: m.Message, nbytes: int) -> memoryview:
        """Where the payload of an answer goes. One that nobody waits for any more goes nowhere."""
        waiting = self._waiting.get(getattr(message, "rid", -1))
        if waiting is None or waiting.into is None:
            return memoryview(bytearray(nbytes))
        if nbytes > len(waiting.into):
            raise ProtocolError(f"{nbytes} bytes where {len(waiting.into)} were asked for")
        return waiting.into[:nbytes]

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for found in self._reader.advance(nbytes):
                message = found[0]
                future = self._hello
                if isinstance(message, m.Waiting):
                    self._told(message)
                    continue
                if future is None and self._pushed is not None and not isinstance(message, m.Reply):
                    self._pushed(message)
                    continue
                if future is None:
                    waiting = self._waiting.pop(getattr(message, "rid", -1), None)
                    future = None if waiting is None else waiting.future
                if future is not None and not future.done():
                    future.set_result(found)
        except TransferQueueError as error:
            self._fail(error)
            self._transport.abort()

    def _told(self, message: m.Waiting) -> None:
        """A request waits on, as before: its asker learns for what."""
        if self._pushed is not None:
            self._pushed(message)
        elif message.rid in self._waiting:
            notices.say(self.welcome.service, message.text)

    def connection_lost(self, error: Exception | None) -> None:
        reason = f": {error}" if error else ""
        self._fail(ServiceUnavailable(f"lost the server at {self.address}{reason}"))
        self._reader.forget()  # which knows this: what it was receiving would stay until a collection
        if self._lost is not None:
            self._lost()

    def _fail(self, error: TransferQueueError) -> None:
        self.error = self.error or error
        waiting, self._waiting = self._waiting, {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._next_check = None, math.inf
        for future in [one.future for one in waiting.values()] + ([self._hello] if self._hello is not None else []):
            if not future.done():
                future.set_exception(kept(self.error))

    def close(self, reason: TransferQueueError | None = None) -> None:
        """Close from the loop's own thread; calls in flight raise `reason`."""
        self._fail(reason or ServiceUnavailable("the client was closed"))
        self._flush()
        self._transport.close()

    def abandon(self, reason: TransferQueueError | None = None) -> None:
        """Close from outside: the loop is closed, stands still, or runs in another thread."""
        if self.loop.is_closed():
            self.error = self.error or ServiceUnavailable("the event loop of this connection is closed")
        else:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.close, reason)
        if not self.loop.is_running():  # the other end is to hear of it all the same
            self._shut()

    def _shut(self) -> None:
        sock = self._transport.get_extra_info("socket")
        descriptor = -1 if sock is None else sock.fileno()
        if descriptor >= 0:
            # A copy: what uvloop hands out cannot be shut down.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                copy.shutdown(socket.SHUT_RDWR)


def opened(opening: asyncio.Task[AsyncConnection] | None) -> AsyncConnection | None:
    """What it has opened, if it is done and that went well."""
    if opening is None or not opening.done() or opening.cancelled() or opening.exception() is not None:
        return None
    return opening.result()
