"""Frames over one blocking socket, with deadlines: the calls of clients, and both ends of a server of weights."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias

import numpy as np

from transfer_queue.errors import AccessDenied, DeadlineExceeded, ProtocolError, ServiceUnavailable
from transfer_queue.wire.address import TIMEVAL, Address, timeval
from transfer_queue.wire.arena_fds import FD_SPACE, fds_in
from transfer_queue.wire.framing import CHECKED_NBYTES, MAX_HEADER_NBYTES, UNREADABLE, FrameReader, M, frame, unsendable

JOIN_NBYTES = 256 << 10  # a payload up to this size is copied behind its header: that costs less than one more call
MAX_IN_VAIN, LOOK_AGAIN = 4, 16
MIN_WAIT_S = 0.001
NO_LIMIT = bytes(TIMEVAL.size)
MESSAGE_S, SLOWEST = 60.0, 20e6  # a message that has begun takes so long at most, and by its payload at this rate
Into: TypeAlias = Callable[[int], memoryview]


class FrameSocket(Generic[M]):
    """Messages `M` over a connected socket, for one thread at a time. Broken for good once a call failed half-way.

    `peer` names the other end in errors. For `spin_s` `receive` asks again and again before it sleeps, as long as that
    helps: waking a sleeping processor takes longer than most answers. `takes_fds`: descriptors that come along collect
    in `fds`, and are closed with the socket.

    Deadlines are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO, socket(7)): Python's own cost a system call each time. Every
    method raises `DeadlineExceeded`, or `ServiceUnavailable` when the connection is lost.
    """

    def __init__(
        self,
        sock: socket.socket,
        encode: Callable[[M], bytes],
        decode: Callable[[memoryview], M],
        peer: str,
        *,
        max_header_nbytes: int = MAX_HEADER_NBYTES,
        spin_s: float = 0.0,
        takes_fds: bool = False,
    ) -> None:
        self.socket = sock
        self.peer = peer
        self.reader = FrameReader(decode, self._destination, max_header_nbytes)
        self.fds: list[int] = []
        self.max_nbytes: Callable[[M], int] | None = None  # of the payload that may come with a message, by what it is
        self.check: Callable[[bytes], object] = len  # a decoder of what the other end takes
        self.check_long: tuple[float, Callable[[M, bytes], None]] = (math.inf, lambda message, header: None)
        self._encode = encode
        self._into: Into | None = None
        self._takes_fds = takes_fds and sock.family == socket.AF_UNIX
        self.spin_s = spin_s
        self._calls = self._in_vain = 0  # how often the answer was looked for, and not found since it last was
        self._found: deque[tuple[M, memoryview]] = deque()
        self._limit_s: float | None = None
        sock.settimeout(None)

    def send(
        self, message: M, timeout_s: float | None, payload: memoryview | bytes | None = None, fd: int | None = None
    ) -> None:
        """Takes at most `timeout_s` (None: as long as the call before might have)."""
        nbytes = 0 if payload is None else len(payload)
        self._send(frame(self._header(message), nbytes), timeout_s, payload, fd)

    def send_all(self, messages: Sequence[M]) -> None:
        """Those without payloads, with one call of the system. Takes at most as long as the call before might have."""
        self._send(b"".join([frame(self._header(message)) for message in messages]), None, None, None)

    def _send(self, frames: bytes, timeout_s: float | None, payload: memoryview | bytes | None, fd: int | None) -> None:
        try:
            if timeout_s is not None:
                self._limit(timeout_s)
            if fd is not None:
                socket.send_fds(self.socket, [frames], [fd])
            elif payload is None or len(payload) > JOIN_NBYTES:
                self.socket.sendall(frames)
            else:
                self.socket.sendall(b"".join((frames, payload)))
                return
            if payload:
                self._send_long(payload)
        except (BlockingIOError, TimeoutError):
            raise DeadlineExceeded(f"{self.peer} does not read") from None
        except OSError as error:
            raise ServiceUnavailable(f"lost {self.peer}: {error}") from error

    def _header(self, message: M) -> bytes:
        """What the other end takes of it. Raises `InvalidInput`."""
        try:
            header = self._encode(message)
            if len(header) <= CHECKED_NBYTES:
                self.check(header)
            elif len(header) > self.check_long[0]:
                self.check_long[1](message, header)
        except UNREADABLE as error:
            raise unsendable(message, error) from None
        return header

    def _send_long(self, payload: memoryview | bytes) -> None:
        """With Python's deadline, which holds for the whole: the kernel's starts anew with every piece."""
        self.socket.settimeout(self._limit_s)
        self.socket.sendall(payload)
        self.socket.settimeout(None)

    def receive(
        self, timeout_s: float | None, into: Into | None = None, what: str = "waiting", stall_s: float = math.inf
    ) -> tuple[M, memoryview]:
        """The next message with its payload, after at most `timeout_s`. None: however long it takes to begin, from then
        on as long as its payload may take (`MESSAGE_S`, `SLOWEST`). `stall_s`: how long no byte of it may come.

        `into(nbytes)` gives or refuses the memory of a payload; without it every payload is refused (`ProtocolError`).
        `what` was asked: for the error.
        """
        if self._found:
            return self._found.popleft()
        self._into = into
        is_patient = timeout_s is None
        if is_patient:
            timeout_s = self._patience()
        stall_s = max(MIN_WAIT_S, stall_s)
        self._limit(None if timeout_s is None else min(timeout_s, stall_s))
        started = time.monotonic()
        nbytes = self._spin(started + self.spin_s) if self.spin_s else None
        while True:
            nbytes = self._recv(0) if nbytes is None else nbytes
            waited_s = time.monotonic() - started
            if nbytes is None or (timeout_s is not None and waited_s > timeout_s):
                limit_s = stall_s if timeout_s is None else min(timeout_s, stall_s)
                raise DeadlineExceeded(f"{what}: no answer from {self.peer} within {limit_s:.6g} s")
            self._found.extend(self.reader.advance(nbytes))
            if self._found:
                self._into = None  # it may hold what it gave
                if is_patient:
                    self._limit(None)
                return self._found.popleft()
            if is_patient:
                if timeout_s is None:  # it began
                    started, waited_s = started + waited_s, 0.0
                timeout_s = self._patience()
            if timeout_s is not None:
                self._limit(max(MIN_WAIT_S, min(timeout_s - waited_s, stall_s)))
            nbytes = None

    def _patience(self) -> float | None:
        """How long the rest of a message may take that nobody asked for; None before it began."""
        announced = self.reader.announced
        return None if announced is None else MESSAGE_S + announced / SLOWEST

    def _limit(self, timeout_s: float | None) -> None:
        """Let no call of the system take longer."""
        if timeout_s != self._limit_s:
            value = NO_LIMIT if timeout_s is None else timeval(timeout_s)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._limit_s = timeout_s

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
            buffer = self.reader.buffer()
            nbytes = self._recv_with_fds(buffer) if self._takes_fds else self.socket.recv_into(buffer, 0, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ServiceUnavailable(f"lost {self.peer}: {error}") from error
        if not nbytes:
            raise ServiceUnavailable(f"{self.peer} closed the connection")
        return nbytes

    def _destination(self, message: M, nbytes: int) -> memoryview:
        is_too_long = self.max_nbytes is not None and nbytes > self.max_nbytes(message)
        if self._into is None or is_too_long:
            raise ProtocolError(f"a payload of {nbytes} bytes where none belongs")
        return self._into(nbytes)

    def _recv_with_fds(self, buffer: memoryview) -> int:
        nbytes, extras, _, _ = self.socket.recvmsg_into([buffer], FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        self.fds += fds_in(extras)
        return nbytes

    @property
    def is_lost(self) -> bool:
        """Of an idle one: whether the other end has closed it, or has sent what nobody asked for."""
        waiting = select.poll()
        try:
            waiting.register(self.socket, select.POLLIN)
        except ValueError:  # another thread has closed it
            return True
        return bool(waiting.poll(0))

    def shut(self) -> None:
        """End the call that another thread makes: it raises `ServiceUnavailable`."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Also closes the descriptors that nobody took out of `fds`."""
        self._into = None
        self.reader.forget()  # which knows this: else both, and what was received last, stay until a collection
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def dial(address: Address, timeout_s: float, what: str) -> socket.socket:
    """A connected socket. `ServiceUnavailable` where no `what` answers there, `AccessDenied` where it is not ours."""
    try:
        return address.connect(timeout_s)
    except AccessDenied:
        raise
    except (OSError, ValueError) as error:
        raise ServiceUnavailable(f"no {what}: {error}") from error


def at_most(limit: int) -> Into:
    """For payloads of at most `limit` bytes, into memory of their own, which the system gives as they come."""

    def into(nbytes: int) -> memoryview:
        if nbytes > limit:
            raise ProtocolError(f"a payload of {nbytes} bytes, at most {limit}")
        return np.empty(nbytes, np.uint8).data

    return into


def within(memory: memoryview | None) -> Into:
    """For payloads that fit into the front of `memory`; None: that have memory of their own."""

    def into(nbytes: int) -> memoryview:
        if memory is None:
            return memoryview(bytearray(nbytes))
        if nbytes > len(memory):
            raise ProtocolError(f"{nbytes} bytes where {len(memory)} were asked for")
        return memory[:nbytes]

    return into
