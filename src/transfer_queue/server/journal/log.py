"""Facts of many events in one write and one sync, by a thread of its own; answers that wait until theirs is done."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from transfer_queue.memory import memfd
from transfer_queue.server.journal.files import FORMAT, Head, framed, headed, name_of, write_all

log = logging.getLogger("transfer_queue.server")

AHEAD_NBYTES = 4 << 20  # of the disk, kept for what was already promised when it is full
AGAIN_S = 0.5


class LogFile:
    """One log. `nbytes`: how long it is; up to `reserved` the disk has space for it."""

    def __init__(self, directory: Path, number: int, position: int, follows: bool) -> None:
        """It is on the disk, with its head. Raises `OSError`."""
        self.number = number
        self.path = directory / name_of("log", number)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.reserved = 0
        self._seed = secrets.randbits(63)
        head = Head(FORMAT, "log", number, position, self._seed, follows)
        try:
            self.nbytes = write_all(self.fd, headed(head), 0)
            os.fdatasync(self.fd)
            memfd.sync_directory(directory)
        except BaseException:
            os.close(self.fd)
            self.path.unlink()
            raise

    def reserve(self, nbytes: int) -> bool:
        """Whether the disk has space for so many bytes more, and for what others may still want."""
        if self.is_removed:
            return False
        wanted = self.nbytes + nbytes
        if wanted + AHEAD_NBYTES // 2 > self.reserved:
            if not memfd.reserve_ahead(self.fd, self.reserved, wanted + AHEAD_NBYTES - self.reserved):
                return False
            self.reserved = wanted + AHEAD_NBYTES
        return True

    @property
    def is_removed(self) -> bool:
        return not os.fstat(self.fd).st_nlink

    def write(self, position: int, payload: list[bytes]) -> None:
        """Blocks until the frame is on the disk. Raises `OSError`, and then it may be written again."""
        end = write_all(self.fd, framed(position, payload, self._seed), self.nbytes)
        os.fdatasync(self.fd)
        self.nbytes = end


class DiskLog:
    """The log that is written now. `position` is the number of the next event, `synced` of the first that is not on the
    disk.

    `broken(error)` is called when the disk fails: nothing after that is promised to anybody.
    """

    def __init__(self, file: LogFile | None, position: int, broken: Callable[[OSError], None]) -> None:
        """`file` is None where there will be one later (`go_on_in`); nothing is appended before."""
        self.position = self.synced = position
        self.is_full = file is None or not file.reserve(0)  # the disk has no space for more than was promised
        self.pending_nbytes = 0
        self._file = file
        self._broken = broken
        self._later: deque[tuple[int, LogFile]] = deque()  # the files of later events, and the first one of each
        self._since = 0.0  # when the first event was appended of those that are not on the disk
        self._began = 0.0  # the write that is going on
        self._gate: int | None = None  # answers above this position wait for more than the log
        self._events: deque[bytes] = deque()
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self._thread = ThreadPoolExecutor(1, "journal")
        self._writing: Future[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        return self.pending_nbytes + (0 if self._file is None else self._file.nbytes)

    def look_again(self) -> None:
        """Whether the disk is full still."""
        if self.is_full:
            self._look()

    def _look(self) -> None:
        newest = self._later[-1][1] if self._later else self._file
        try:
            self.is_full = newest is None or not newest.reserve(self.pending_nbytes)
        except OSError as error:
            self._failed(error)

    @property
    def lag_s(self) -> float:
        """For how long the first event has waited for the disk; 0 when none does."""
        return 0.0 if self.synced == self.position else time.monotonic() - self._since

    @property
    def kept(self) -> int:
        """All events below this number last, whatever becomes of the machine."""
        return self.synced if self._gate is None else min(self.synced, self._gate)

    def append(self, event: bytes) -> None:
        """It happened; a write begins when this turn of the loop is over."""
        self._events.append(event)
        if self.position == self.synced:
            self._since = time.monotonic()
        self.position += 1
        self.pending_nbytes += len(event)
        if self._idle.is_set():
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._write)

    def hold(self, send: Callable[[], None]) -> bool:
        """Whether `send` is kept until all that was appended so far is on the disk; else it is there already."""
        if self.synced == self.position and self._gate is None:
            return False
        self._held.append((self.position, send))
        return True

    def shut(self, before: bool = False) -> None:
        """Answers about events from here on wait until `open`, too; `before`: also those about earlier ones."""
        gate = self.position - before
        self._gate = gate if self._gate is None else min(gate, self._gate)

    def open(self) -> None:
        self._gate = None
        self._release()

    def go_on_in(self, file: LogFile) -> None:
        """What is appended from now on goes to this file."""
        self._later.append((self.position, file))

    def _write(self) -> None:
        if self._is_closed:
            return
        while self._later and self.synced == self._later[0][0]:
            if self._file is not None:
                os.close(self._file.fd)
            self._file = self._later.popleft()[1]
        until = self._later[0][0] if self._later else self.position
        count = until - self.synced
        if not count or self._file is None:
            self._idle.set()
            return
        if not self._later and self._file.is_removed:  # an earlier one may be: a snapshot has what is in it
            self._wait(FileNotFoundError(errno.ENOENT, "it was removed", str(self._file.path)))
            return
        events = [self._events[place] for place in range(count)]
        loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._writing = self._thread.submit(self._file.write, self.synced, events)
        self._writing.add_done_callback(lambda done: loop.call_soon_threadsafe(self._written, done, count))

    def _written(self, done: Future[None], count: int) -> None:
        if self._is_closed:
            return
        error = done.exception()
        if error is not None:
            self._failed(error if isinstance(error, OSError) else OSError(str(error)))
            return
        for _ in range(count):
            self.pending_nbytes -= len(self._events.popleft())
        self.synced += count
        self._since = self._began  # at the latest
        self._look()
        self._write()
        self._release()

    def _failed(self, error: OSError) -> None:
        """The log could not be written, or what comes next could not: that may go by, or nothing is written any more.
        What is on the disk is told first, as far as that still leaves: whoever hears nothing asks again."""
        if error.errno in memfd.NO_SPACE:
            self._wait(error)
            return
        self._is_closed = True
        self._release()
        self._broken(error)

    def _wait(self, error: OSError) -> None:
        """Try again later; nobody is told anything meanwhile."""
        if not self.is_full:
            log.critical("nothing can be promised now, answers wait: %s", error)
        self.is_full = True
        asyncio.get_running_loop().call_later(AGAIN_S, self._write)

    def _release(self) -> None:
        while self._held and self._held[0][0] <= self.kept:
            self._held.popleft()[1]()

    async def flush(self) -> None:
        """Wait until all that was appended is on the disk."""
        await self._idle.wait()

    def close(self) -> None:
        """Nothing more is written, whatever the event loop has yet to call."""
        self._is_closed = True
        self._thread.shutdown()
        self.close_files()

    def close_files(self) -> None:
        """All that is to be done in a fork, which has no such thread."""
        for file in (self._file, *(file for _, file in self._later)):
            if file is not None:
                os.close(file.fd)
