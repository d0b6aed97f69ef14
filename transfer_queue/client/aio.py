"""One connection of an event loop: many requests in flight, answered in any order."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple, cast

from transfer_queue.client.address import Address
from transfer_queue.client.connection import decode_reply, proof_of, welcome_of
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable, TransferQueueError
from transfer_queue.wire import hello
from transfer_queue.wire import messages as m
from transfer_queue.wire.framing import FrameReader, frame, owned_buffer


class Waiting(NamedTuple):
    """A request in flight."""

    future: asyncio.Future[tuple[Any, memoryview]]
    deadline: float
    request: m.Request
    timeout_s: float


class AsyncConnection(asyncio.BufferedProtocol):
    """A socket of one event loop after the handshake; lives until the loop shuts down or the session closes it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.error: TransferQueueError | None = None
        self._reader = FrameReader(decode_reply, owned_buffer)
        self._waiting: dict[int, Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_check = math.inf
        self._outgoing: list[bytes | memoryview] = []
        self._hello: asyncio.Future[tuple[Any, memoryview]] | None = None
        self._transport: asyncio.Transport
        self._until_shutdown: AsyncGenerator[None, None] | None = None

    @classmethod
    async def open(cls, address: Address, session: bytes, timeout_s: float) -> AsyncConnection:
        """Connect and shake hands. Raises `ServiceUnavailable`, `AccessDenied` or `DeadlineExceeded`."""
        loop = asyncio.get_running_loop()
        try:
            if address.path:
                _, protocol = await loop.create_unix_connection(lambda: cls(address), address.path)
            else:
                _, protocol = await loop.create_connection(lambda: cls(address), address.host, address.port)
        except OSError as error:
            raise ServiceUnavailable(f"no server at {address}: {error}") from error
        try:
            nonce = hello.nonce()
            challenge = await protocol._greet(m.Hello(m.PROTOCOL_VERSION, session, nonce), timeout_s)
            welcome_of(await protocol._greet(proof_of(challenge, address, nonce), timeout_s))
        except BaseException:
            protocol.close()
            raise
        # asyncio closes every live asynchronous generator of a loop when it shuts the loop down
        protocol._until_shutdown = protocol._close_with_loop()
        await protocol._until_shutdown.__anext__()
        return protocol

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.close()

    async def _greet(self, message: m.Message, timeout_s: float) -> m.Message:
        self._hello = self.loop.create_future()
        self._transport.write(frame(m.encode(message)))
        try:
            reply, _ = await asyncio.wait_for(self._hello, timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"no answer from {self.address} within {timeout_s:g} s") from None
        finally:
            self._hello = None
        return cast(m.Message, reply)

    async def call(self, request: m.Request, payload: memoryview | None, timeout_s: float) -> tuple[Any, memoryview]:
        """The reply and its payload. Raises `DeadlineExceeded` or `ServiceUnavailable`."""
        if self.error is not None:
            raise self.error
        future: asyncio.Future[tuple[Any, memoryview]] = self.loop.create_future()
        deadline = self.loop.time() + timeout_s
        self._waiting[request.rid] = Waiting(future, deadline, request, timeout_s)
        if deadline < self._next_check:
            self._check_at(deadline)
        header = m.encode(request)
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
        for future, deadline, request, timeout_s in list(self._waiting.values()):
            if deadline <= now and not future.done():
                text = f"{type(request).__name__}: no answer from {self.address} within {timeout_s:g} s"
                future.set_exception(DeadlineExceeded(text))
        later = [one.deadline for one in self._waiting.values() if one.deadline > now]
        if later:
            self._check_at(min(later))

    def notify(self, message: m.Message) -> None:
        if self.error is None:
            self._write(frame(m.encode(message)))

    def _write(self, *parts: bytes | memoryview) -> None:
        """Send at once when nothing else is in flight, else together with what this turn of the loop still writes."""
        if len(self._waiting) > 1 or self._outgoing:
            if not self._outgoing:
                self.loop.call_soon(self._flush)
            self._outgoing += parts
        else:
            self._transport.writelines(parts)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and not self._transport.is_closing():
            self._transport.writelines(outgoing)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for found in self._reader.advance(nbytes):
                future = self._hello
                if future is None:
                    waiting = self._waiting.pop(getattr(found[0], "rid", -1), None)
                    future = None if waiting is None else waiting.future
                if future is not None and not future.done():
                    future.set_result(found)
        except TransferQueueError as error:
            self._fail(error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        reason = f": {error}" if error else ""
        self._fail(ServiceUnavailable(f"lost the server at {self.address}{reason}"))

    def _fail(self, error: TransferQueueError) -> None:
        self.error = self.error or error
        waiting, self._waiting = self._waiting, {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._next_check = None, math.inf
        for future in [one.future for one in waiting.values()] + ([self._hello] if self._hello is not None else []):
            if not future.done():
                future.set_exception(self.error)

    def close(self) -> None:
        """Close from the loop's own thread."""
        self._fail(ServiceUnavailable("the client was closed"))
        self._flush()
        self._transport.close()

    def abandon(self) -> None:
        """Close from outside: the loop is closed, or runs in another thread."""
        if self.loop.is_closed():
            self._fail_quietly()
        else:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.close)

    def _fail_quietly(self) -> None:
        self.error = self.error or ServiceUnavailable("the event loop of this connection is closed")
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(2)
