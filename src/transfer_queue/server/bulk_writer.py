"""Sending large answers to other hosts from threads: the event loop would be busy copying them into the network."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

BULK_NBYTES = 4 << 20
STALLED_MS = 10_000
SENDERS = 4
MAX_BEHIND = 32
Parts: TypeAlias = "Sequence[bytes | bytearray | memoryview]"

_threads = ThreadPoolExecutor(SENDERS, thread_name_prefix="tq-send")


def _start_over() -> None:
    """A forked child (a standby that takes over) has none of the threads, and an executor that believes it had."""
    global _threads
    _threads = ThreadPoolExecutor(SENDERS, thread_name_prefix="tq-send")


os.register_at_fork(after_in_child=_start_over)


class BulkWriter:
    """What one connection writes, in order: small answers through `transport`, large ones from a thread.

    A peer that takes nothing of a large answer for `STALLED_MS` is cut off: it would hold the thread. `pause` and
    `resume` are called when many answers wait behind a large one, and when fewer do again.
    """

    def __init__(self, transport: asyncio.Transport, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._transport = transport
        self._pause, self._resume = pause, resume
        self._loop = asyncio.get_running_loop()
        self._behind: list[Parts] = []  # what waits for the thread
        self._busy = False

    @property
    def is_sending(self) -> bool:
        """Whether a thread sends, which looks by itself whether the peer reads."""
        return self._busy

    def write(self, parts: Parts) -> None:
        if self._busy:
            self._behind.append(parts)
            if len(self._behind) == MAX_BEHIND:
                self._pause()
        elif sum(map(len, parts)) >= BULK_NBYTES and not self._transport.get_write_buffer_size():
            self._busy = True
            sock: socket.socket = self._transport.get_extra_info("socket")
            own = os.dup(sock.fileno())  # stays valid when the transport closes its own meanwhile
            sending = self._loop.run_in_executor(_threads, _send_all, own, parts)
            sending.add_done_callback(self._sent)
        else:
            self._transport.writelines(parts)

    def _sent(self, sending: asyncio.Future[None]) -> None:
        self._busy = False
        if sending.cancelled() or sending.exception() is not None:
            self._behind.clear()
            self._transport.abort()
            return
        crowded = len(self._behind) >= MAX_BEHIND
        while self._behind and not self._busy and not self._transport.is_closing():
            self.write(self._behind.pop(0))
        if crowded and len(self._behind) < MAX_BEHIND:
            self._resume()


def _send_all(descriptor: int, parts: Parts) -> None:
    """Send everything and close the descriptor, which does not block. Raises OSError."""
    with socket.socket(fileno=descriptor) as sock:
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        for part in parts:
            left = memoryview(part)
            while len(left):
                if not writable.poll(STALLED_MS):
                    raise TimeoutError("the peer does not read")
                try:
                    left = left[sock.send(left) :]
                except BlockingIOError:
                    continue
