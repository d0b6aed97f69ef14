"""Frames of the weights' servers over a blocking socket, with deadlines, and the handshake.

The peer proves that it knows the token (`wire.hello`), then asks one thing after another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from transfer_queue.errors import AccessDenied, DeadlineExceeded, ProtocolError, ServiceUnavailable, error_from_code
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, parse_address
from transfer_queue.wire.framing import FrameReader, frame

PROTOCOL = 1
MAX_HEADER_NBYTES = 64 << 10
FD_SPACE = socket.CMSG_SPACE(4)


class GetManifest(m.Message):
    """The manifest with this key, or the newest one (""), as the payload."""

    key: str


class GetBucket(m.Message):
    """A bucket, as the payload."""

    key: str
    bucket: int


class GetMemory(m.Message):
    """The memory that holds all buckets, as a descriptor. It stays as it is until this connection is closed."""

    key: str


class OutcomeMessage(m.Message):
    """How an update went: an `Outcome` as JSON."""

    body: bytes


class Sent(m.Message):
    """The answer to all of these."""


_encode = msgspec.msgpack.Encoder().encode
decode_client = msgspec.msgpack.Decoder(m.Hello | m.Proof | GetManifest | GetBucket | GetMemory | OutcomeMessage).decode
decode_server = msgspec.msgpack.Decoder(m.Challenge | m.Welcome | m.Failed | Sent).decode


def address_of(text: str, token: str) -> Address:
    """`tcp:HOST:PORT`, `unix:PATH`, or `unix:@NAME` for a name without a file (unix(7), abstract)."""
    if text.startswith("unix:@"):
        return Address(path="\0" + text[6:], token=token)
    return parse_address(text, token)._replace(token=token)


class MessageStream:
    """Messages over a connected socket, for one thread at a time. Broken for good once a call failed."""

    def __init__(self, sock: socket.socket, decode: Callable[[memoryview], m.Message]) -> None:
        self.socket = sock
        self._reader = FrameReader(decode, self._destination, MAX_HEADER_NBYTES)
        self._found: list[tuple[m.Message, memoryview]] = []
        self._into: Callable[[int], memoryview] | None = None
        self.fds: list[int] = []  # that came with the messages so far

    def send(
        self, message: m.Message, timeout_s: float, payload: memoryview | bytes = b"", fd: int | None = None
    ) -> None:
        header = frame(_encode(message), len(payload))
        try:
            self.socket.settimeout(timeout_s)
            if fd is None:
                self.socket.sendall(header)
            else:
                socket.send_fds(self.socket, [header], [fd])
            if len(payload):
                self.socket.sendall(payload)
        except TimeoutError:
            raise DeadlineExceeded("the other side does not read") from None
        except OSError as error:
            raise ServiceUnavailable(f"the connection is lost: {error}") from error

    def receive(
        self, timeout_s: float | None, into: Callable[[int], memoryview] | None = None
    ) -> tuple[m.Message, memoryview]:
        """The next message with its payload, received into what `into(nbytes)` gives (without it: refused)."""
        self._into = into
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._found:
            if end is not None and time.monotonic() >= end:
                raise DeadlineExceeded(f"no answer within {timeout_s:.3g} s")
            self._found += self._reader.advance(self._recv(end))
        return self._found.pop(0)

    def _recv(self, end: float | None) -> int:
        try:
            self.socket.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
            space = FD_SPACE if self.socket.family == socket.AF_UNIX else 0
            nbytes, extras, _, _ = self.socket.recvmsg_into([self._reader.buffer()], space, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise DeadlineExceeded("no answer in time") from None
        except OSError as error:
            raise ServiceUnavailable(f"the connection is lost: {error}") from error
        for level, kind, data in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.fds += array("i", data[: len(data) // 4 * 4])
        if not nbytes:
            raise ServiceUnavailable("the connection was closed")
        return nbytes

    def _destination(self, _message: m.Message, nbytes: int) -> memoryview:
        if self._into is None:
            raise ProtocolError(f"a payload of {nbytes} bytes where none belongs")
        return self._into(nbytes)

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Peer:
    """A connection to a server of weights, after the handshake."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        try:
            self.stream = MessageStream(address.connect(timeout_s), decode_server)
        except AccessDenied:
            raise
        except (OSError, ValueError) as error:
            raise ServiceUnavailable(f"no server of weights at {_shown(address)}: {error}") from error
        try:
            handshake.carry_out(
                handshake.greeting(address, PROTOCOL), lambda message: self._exchange(message, timeout_s)
            )
        except BaseException:  # an interrupt must not leave the connection
            self.stream.close()
            raise

    def _exchange(self, message: m.Message, timeout_s: float) -> m.Message:
        self.stream.send(message, timeout_s)
        return self.stream.receive(timeout_s)[0]

    def ask(self, message: m.Message, timeout_s: float, into: Callable[[int], memoryview] | None = None) -> memoryview:
        """The payload of the answer. Raises what the server answers instead."""
        self.stream.send(message, timeout_s)
        reply, payload = self.stream.receive(timeout_s, into)
        if isinstance(reply, m.Failed):
            raise error_from_code(reply.code, f"{_shown(self.address)}: {reply.text}")
        if not isinstance(reply, Sent):
            raise ProtocolError(f"{type(reply).__name__} instead of an answer")
        return payload

    def interrupt(self) -> None:
        """Wake up the thread that waits for an answer, which finds the connection lost. From any thread."""
        with contextlib.suppress(OSError):
            self.stream.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stream.close()


def fresh(limit: int) -> Callable[[int], memoryview]:
    """For payloads of at most `limit` bytes, into memory of their own."""

    def into(nbytes: int) -> memoryview:
        if nbytes > limit:
            raise ProtocolError(f"a payload of {nbytes} bytes, at most {limit}")
        return memoryview(bytearray(nbytes))

    return into


def exactly(memory: Any) -> Callable[[int], memoryview]:
    """For a payload that fills `memory`."""
    return lambda nbytes: memoryview(memory).cast("B")


def _shown(address: Address) -> str:
    return str(address).replace("\0", "@")
