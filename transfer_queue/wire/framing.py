"""Cutting a byte stream into frames, without I/O.

A frame is `<4-byte header length><8-byte payload length><header><payload>`. The owner of a socket receives into
`FrameReader.buffer()` and reports the count to `FrameReader.advance(n)`, which yields the frames completed. Small
frames share one buffer, so many arrive in one system call; a large payload is received straight into the
memory that `destination` names for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from transfer_queue.errors import ProtocolError

PREFIX = struct.Struct("<IQ")
CHUNK_NBYTES = 256 << 10
MAX_HEADER_NBYTES = 256 << 20
M = TypeVar("M")


def frame(header: bytes, payload_nbytes: int = 0) -> bytes:
    """Prefix and header of a frame whose payload of `payload_nbytes` the caller sends right after it."""
    return PREFIX.pack(len(header), payload_nbytes) + header


class FrameReader(Generic[M]):
    """Receives frames of messages `M`.

    `decode` turns a header into a message, and raises msgspec's errors for anything else. `destination(message,
    nbytes)` returns the writable buffer the payload goes to, or raises to refuse it. Any bytes that are not this
    protocol raise `ProtocolError`; the reader must not be used afterwards.
    """

    def __init__(
        self,
        decode: Callable[[memoryview], M],
        destination: Callable[[M, int], memoryview],
        max_header_nbytes: int = MAX_HEADER_NBYTES,
    ) -> None:
        self.max_header_nbytes = max_header_nbytes
        self._decode = decode
        self._destination = destination
        self._chunk = memoryview(bytearray(CHUNK_NBYTES))
        self._start = self._end = 0  # the unread bytes of the chunk
        self._message: M | None = None  # its payload is being received
        self._payload = memoryview(b"")
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream go; never empty."""
        if self._message is not None:
            return self._payload[self._filled :]
        return self._chunk[self._end :]

    def advance(self, nbytes: int) -> Iterator[tuple[M, memoryview]]:
        """Account for `nbytes` received into `buffer()`; yields each (message, payload) now complete."""
        if self._message is None:
            self._end += nbytes
        else:
            self._filled += nbytes
            if self._filled < len(self._payload):
                return
            yield self._complete()
        while (found := self._next()) is not None:
            yield found
        self._compact()

    def _complete(self) -> tuple[M, memoryview]:
        message, payload = self._message, self._payload
        assert message is not None
        self._message, self._payload = None, memoryview(b"")
        return message, payload

    def _next(self) -> tuple[M, memoryview] | None:
        available = self._end - self._start
        if available < PREFIX.size:
            return None
        header_nbytes, payload_nbytes = PREFIX.unpack_from(self._chunk, self._start)
        if header_nbytes > self.max_header_nbytes:
            raise ProtocolError(f"header of {header_nbytes} bytes exceeds {self.max_header_nbytes}")
        first = self._start + PREFIX.size
        if available < PREFIX.size + header_nbytes:
            return None
        try:
            message = self._decode(self._chunk[first : first + header_nbytes])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"not a message: {error}") from None
        self._start = first + header_nbytes
        if not payload_nbytes:
            return message, memoryview(b"")
        try:
            self._payload = self._destination(message, payload_nbytes)
        except (OverflowError, MemoryError):
            raise ProtocolError(f"no memory for a payload of {payload_nbytes} bytes") from None
        if len(self._payload) != payload_nbytes:
            raise ProtocolError(f"payload of {payload_nbytes} bytes, {len(self._payload)} expected")
        at_hand = min(payload_nbytes, self._end - self._start)
        self._payload[:at_hand] = self._chunk[self._start : self._start + at_hand]
        self._start += at_hand
        self._message, self._filled = message, at_hand
        return self._complete() if at_hand == payload_nbytes else None

    def _compact(self) -> None:
        """Make room for the rest of a frame that the chunk holds in part."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._chunk) > CHUNK_NBYTES:
                self._chunk = memoryview(bytearray(CHUNK_NBYTES))
            return
        needed = CHUNK_NBYTES
        if self._end - self._start >= PREFIX.size:
            needed = max(needed, PREFIX.size + PREFIX.unpack_from(self._chunk, self._start)[0])
        if needed <= len(self._chunk) - self._start and self._end < len(self._chunk):
            return
        rest = bytes(self._chunk[self._start : self._end])
        if needed > len(self._chunk):
            self._chunk = memoryview(bytearray(needed))
        self._chunk[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def owned_buffer(_message: object, nbytes: int) -> memoryview:
    """The usual destination: fresh memory of the receiver."""
    return memoryview(bytearray(nbytes))
