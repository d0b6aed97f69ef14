"""Cutting a byte stream into frames, without I/O.

A frame is `<4-byte header length><8-byte payload length><header><payload>`. The owner of a socket receives into
`FrameReader.buffer()` and reports the count to `FrameReader.advance(n)`, which yields the frames completed. Many small
frames arrive in one system call; a large payload is received straight into the memory that `destination` names for it.

Memory grows with what was received, never with what was announced: the bytes of an unfinished header are kept, and
nothing else. The scratch memory that bytes arrive in can be shared by all readers of one thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from transfer_queue.errors import InvalidInput, ProtocolError

PREFIX = struct.Struct("<IQ")
CHUNK_NBYTES = 256 << 10
MAX_HEADER_NBYTES = 256 << 20
FRONT_NBYTES = 4 << 10  # an unfinished header up to this size is put in front of what arrives next
CHECKED_NBYTES = 64 << 10  # of a header that its sender decodes, too: for more that takes long
UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError)  # what makes no header, or of one
# What callers call the arguments that messages have under shorter names.
ARGUMENTS = {"partition": "partition_id", "fields": "data_fields", "task": "task_name", "sampling": "sampling_config"}
KIND_NBYTES = 64  # within these first bytes of a header its kind is named
M = TypeVar("M")


def frame(header: bytes, payload_nbytes: int = 0) -> bytes:
    """Prefix and header of a frame whose payload of `payload_nbytes` the caller sends right after it."""
    return PREFIX.pack(len(header), payload_nbytes) + header


def scratch() -> memoryview:
    """Memory for readers to receive into."""
    return memoryview(bytearray(CHUNK_NBYTES))


class FrameReader(Generic[M]):
    """Receives frames of messages `M`.

    `decode` turns a header into a message, and raises msgspec's errors for anything else. `destination(message,
    nbytes)` returns the writable buffer the payload goes to, or raises to refuse it. `limit(first bytes of a header)`
    is how long a header of that kind may be. Any bytes that are not this protocol raise `ProtocolError`; the reader
    must not be used afterwards.

    With a `chunk` that others use as well, what `advance` yields must be taken at once, or `keep` be called: the unread
    bytes lie in it.
    """

    def __init__(
        self,
        decode: Callable[[memoryview], M],
        destination: Callable[[M, int], memoryview],
        max_header_nbytes: int = MAX_HEADER_NBYTES,
        chunk: memoryview | None = None,
        limit: Callable[[memoryview], int] | None = None,
    ) -> None:
        self.max_header_nbytes = max_header_nbytes
        self._decode = decode
        self._destination = destination
        self._limit = limit
        self._chunk = scratch() if chunk is None else chunk
        self._rest = bytearray()  # the received part of an unfinished frame
        self._unread = self._chunk  # what is being read lies here, from `_start` to `_end`
        self._start = self._end = 0
        self._message: M | None = None  # its payload is being received
        self._payload = memoryview(b"")
        self._filled = 0

    @property
    def announced(self) -> int | None:
        """How long the payload of the unfinished frame is, as far as it says so; None between two frames."""
        if self._message is not None:
            return len(self._payload)
        return 0 if self._rest else None

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream go; never empty."""
        if self._message is not None:
            return self._payload[self._filled :]
        size = len(self._rest)
        if not 0 < size <= FRONT_NBYTES:
            return self._chunk
        self._chunk[:size] = self._rest
        return self._chunk[size:]

    def advance(self, nbytes: int) -> Iterator[tuple[M, memoryview]]:
        """Account for `nbytes` received into `buffer()`; yields each (message, payload) now complete."""
        if self._message is None:
            self._received(nbytes)
        else:
            self._filled += nbytes
            if self._filled < len(self._payload):
                return
            yield self._complete()
        while (found := self._next()) is not None:
            yield found
        self.keep()

    def _received(self, nbytes: int) -> None:
        size = len(self._rest)
        if size <= FRONT_NBYTES:
            self._unread, self._start, self._end = self._chunk, 0, size + nbytes
            return
        self._unread = self._chunk  # a bytearray that is looked at cannot grow
        self._rest += self._chunk[:nbytes]
        self._unread, self._start, self._end = memoryview(self._rest), 0, len(self._rest)

    def keep(self) -> None:
        """Hold the unread bytes where nobody else receives."""
        if self._start == self._end:
            if self._rest:
                self._rest = bytearray()
            self._unread, self._start, self._end = self._chunk, 0, 0
            return
        if self._unread.obj is self._rest and not self._start:
            return  # they are: an unfinished frame only grows
        rest = bytearray(self._unread[self._start : self._end])
        self._rest, self._unread, self._start, self._end = rest, memoryview(rest), 0, len(rest)

    def forget(self) -> None:
        """Let go of memory and of the receiver; the stream has ended."""
        self._destination = _nowhere
        self._rest, self._unread, self._payload, self._message = bytearray(), self._chunk, memoryview(b""), None
        self._start = self._end = 0

    def _complete(self) -> tuple[M, memoryview]:
        message, payload = self._message, self._payload
        assert message is not None
        self._message, self._payload = None, memoryview(b"")
        return message, payload

    def _next(self) -> tuple[M, memoryview] | None:
        available = self._end - self._start
        if available < PREFIX.size:
            return None
        header_nbytes, payload_nbytes = PREFIX.unpack_from(self._unread, self._start)
        first = self._start + PREFIX.size
        if header_nbytes > self.max_header_nbytes:
            raise ProtocolError(f"header of {header_nbytes} bytes exceeds {self.max_header_nbytes}")
        if available < PREFIX.size + header_nbytes:
            self._check_kind(header_nbytes, self._unread[first : min(self._end, first + KIND_NBYTES)])
            return None
        try:
            message = self._decode(self._unread[first : first + header_nbytes])
        except UNREADABLE as error:
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
        self._payload[:at_hand] = self._unread[self._start : self._start + at_hand]
        self._start += at_hand
        self._message, self._filled = message, at_hand
        return self._complete() if at_hand == payload_nbytes else None

    def _check_kind(self, header_nbytes: int, head: memoryview) -> None:
        """Refuse a header that is longer than its kind can need, as soon as its kind is known."""
        if self._limit is not None and len(head) == KIND_NBYTES and header_nbytes > self._limit(head):
            raise ProtocolError(f"header of {header_nbytes} bytes, at most {self._limit(head)} for its kind")


def _nowhere(_message: object, nbytes: int) -> memoryview:
    raise ProtocolError(f"a payload of {nbytes} bytes after the end of the stream")


def unsendable(message: object, error: Exception) -> InvalidInput:
    """What the caller is told whose name, key or tag UTF-8 does not have, whose number has more than 64 bits, or whose
    argument has the wrong type (`UNREADABLE`)."""
    text = str(error)
    if isinstance(error, UnicodeEncodeError):
        text = f"{error.object[:80]!r} has a lone surrogate, which no name, key or tag can hold"
    return InvalidInput(f"{type(message).__name__}: {_with_name(message, text)}")


def _with_name(message: object, text: str) -> str:
    """msgspec says where the wrong value is by its position in the message (`$[2][0]`): the name of that argument."""
    told, _, path = text.partition(" - at `$[")
    number, _, rest = path.removesuffix("`").partition("]")
    if not number.isdigit():
        return text
    name = ("kind", *getattr(message, "__struct_fields__", ()))[int(number)]
    return f"{ARGUMENTS.get(name, name)}{rest}: {told}"
