"""One blocking connection: one request at a time, with a deadline."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from typing import Any

import msgspec

from transfer_queue.codec.values import Lifting
from transfer_queue.errors import AccessDenied, DeadlineExceeded, ProtocolError, ServiceUnavailable
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, timeval
from transfer_queue.wire.framing import FrameReader, frame

log = logging.getLogger("transfer_queue")

_lifting = Lifting()
decode_reply = msgspec.msgpack.Decoder(m.ServerMessage, ext_hook=_lifting._lift).decode
JOIN_NBYTES = 256 << 10
MAX_IN_VAIN, LOOK_AGAIN = 4, 16
MIN_WAIT_S = 0.001


class Connection:
    """A socket after the handshake. Not for concurrent use; broken for good once a call failed half-way.

    Deadlines are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO, socket(7)): Python's own cost a system call each time. For
    `spin_s` the receiver asks again and again before it sleeps, as long as that helps: waking a sleeping processor
    takes longer than most answers. Raises `ServiceRestarted` when the server is of another life than `life`.
    """

    def __init__(
        self,
        address: Address,
        session: bytes,
        timeout_s: float,
        spin_s: float = 0.0,
        life: handshake.Life = handshake.ANY,
    ) -> None:
        self.address = address
        self.spin_s = spin_s
        try:
            self._socket = address.connect(timeout_s)
        except AccessDenied:
            raise
        except (OSError, ValueError) as error:
            raise ServiceUnavailable(f"no server at {address}: {error}") from error
        self._reader = FrameReader(decode_reply, self._destination)
        self._into: memoryview | None = None
        self._calls = self._in_vain = 0  # how often the answer was looked for, and not found since it last was
        self._timeout_s = 0.0
        try:
            self._socket.settimeout(None)
            self._limit(timeout_s)
            steps = handshake.greeting(address, m.PROTOCOL_VERSION, session, life)
            self.welcome = handshake.carry_out(steps, lambda message: self._exchange(message, timeout_s))
        except BaseException:
            self._socket.close()
            raise

    def _exchange(self, message: m.Message, timeout_s: float) -> m.Message:
        self._send(m.encode(message), None)
        return self._receive("connect", timeout_s)[0]

    def _limit(self, timeout_s: float) -> None:
        """Let no send or receive take longer."""
        if timeout_s != self._timeout_s:
            value = timeval(timeout_s)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._timeout_s = timeout_s

    def call(
        self, request: m.Request, payload: memoryview | None, timeout_s: float, into: memoryview | None = None
    ) -> tuple[Any, memoryview]:
        """The reply and its payload, received straight into `into` when given.

        Raises `DeadlineExceeded` or `ServiceUnavailable`; close the connection then.
        """
        self._into = into
        self.post(request, payload, timeout_s)
        return self.answer(request, timeout_s)

    def post(self, request: m.Request, payload: memoryview | None, timeout_s: float) -> None:
        """Send a request without waiting. Its `answer` has to be taken before the next is posted."""
        self._limit(timeout_s)
        self._send(m.encode(request), payload)

    def answer(self, request: m.Request, timeout_s: float) -> tuple[Any, memoryview]:
        """Wait for the answer to what was posted. Raises as `call`."""
        reply, data = self._receive(type(request).__name__, timeout_s)
        if getattr(reply, "rid", None) != request.rid:
            raise ProtocolError(f"answer {reply!r} to another request")
        return reply, data

    def _destination(self, _message: m.Message, nbytes: int) -> memoryview:
        if self._into is None:
            return memoryview(bytearray(nbytes))
        if nbytes > len(self._into):
            raise ProtocolError(f"{nbytes} bytes where {len(self._into)} were asked for")
        return self._into[:nbytes]

    def notify(self, message: m.Message) -> None:
        self._send(m.encode(message), None)

    def _send(self, header: bytes, payload: memoryview | None) -> None:
        try:
            if payload is None:
                self._socket.sendall(frame(header))
            elif len(payload) <= JOIN_NBYTES:
                self._socket.sendall(b"".join((frame(header, len(payload)), payload)))
            else:
                self._socket.sendall(frame(header, len(payload)))
                self._socket.sendall(payload)
        except BlockingIOError:
            raise DeadlineExceeded(f"the server at {self.address} does not read") from None
        except OSError as error:
            raise ServiceUnavailable(f"lost the server at {self.address}: {error}") from error

    def _receive(self, what: str, timeout_s: float) -> tuple[m.Message, memoryview]:
        started = time.monotonic()
        nbytes = self._spin(started + self.spin_s)
        while True:
            if nbytes is None:
                nbytes = self._recv(0)
            if nbytes is None or time.monotonic() - started > timeout_s:
                raise DeadlineExceeded(f"{what}: no answer from {self.address} within {timeout_s:g} s")
            for found in list(self._reader.advance(nbytes)):
                if not isinstance(found[0], m.Waiting):
                    return found
                log.warning("%s", found[0].text)
                self._limit(max(MIN_WAIT_S, started + timeout_s - time.monotonic()))
            nbytes = None

    def _spin(self, until: float) -> int | None:
        """What `_recv` finds without sleeping, by `until`.

        Where that found nothing several times in a row (more processes than processors, or answers that take longer)
        it only looks again once in a while: looking takes the processor from those who would answer.
        """
        self._calls += 1
        if self._in_vain >= MAX_IN_VAIN and self._calls % LOOK_AGAIN:
            return None
        while time.monotonic() < until:
            nbytes = self._recv(socket.MSG_DONTWAIT)
            if nbytes is not None:
                self._in_vain = 0
                return nbytes
        self._in_vain += 1
        return None

    def _recv(self, flags: int) -> int | None:
        """Bytes received into the reader's buffer; None when there are none (in time)."""
        try:
            nbytes = self._socket.recv_into(self._reader.buffer(), 0, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ServiceUnavailable(f"lost the server at {self.address}: {error}") from error
        if not nbytes:
            raise ServiceUnavailable(f"the server at {self.address} closed the connection")
        return nbytes

    def shut(self) -> None:
        """End the call that another thread makes: it raises `ServiceUnavailable`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
