"""A new file that a thread writes and brings to the disk, while its caller makes the bytes that follow."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from queue import SimpleQueue
from typing import Any

HELD_NBYTES = 64 << 20  # given and not written: the caller waits with more
STARTED_NBYTES = 16 << 20  # the kernel is asked for so many at a time: left alone it begins when all is written


class WrittenBehind:
    """A binary file for writers of Arrow, which end with it; one thread at a time may use it.

    `write` blocks while more than `HELD_NBYTES` are waiting, and keeps what it is given until that is written: it must
    not change. Raises OSError for what went wrong with bytes given before. `close(True)` returns when every byte is on
    the disk, `close(False)` when the thread has ended, with as much written as there is by then. One that nobody has
    any more, as an interrupt struck, ends as well.
    """

    def __init__(self, path: Path) -> None:
        self.nbytes = 0  # given so far
        self.closed = False
        self._parts = WaitingParts(path)
        weakref.finalize(self, self._parts.leave)
        self._thread = threading.Thread(target=self._parts.write, name="tq-export", daemon=True)
        self._thread.start()

    def write(self, data: Any) -> int:
        part = memoryview(data).cast("B")
        self._parts.add(part)
        self.nbytes += len(part)
        return len(part)

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        """Nothing: `close` does."""

    def drop(self) -> None:
        """Write nothing any more, also of what is given yet; and wait for nothing."""
        self._parts.drop()

    def close(self, whole: bool) -> None:
        self.closed = True
        if not whole:
            self.drop()
        self._parts.end()
        is_over = False
        try:
            self._thread.join()
            is_over = True
        finally:
            if not is_over:  # an interrupt: what waits is in vain
                self._parts.leave()
        self._parts.finish(whole)


class WaitingParts:
    """What is to be written to a new file, between two threads. Without locks: an interrupt may strike as Python has
    taken one, and its thread then holds it for good."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._given: SimpleQueue[memoryview | None] = SimpleQueue()
        self._done: SimpleQueue[int] = SimpleQueue()  # how long those are that were written
        self._held_nbytes = 0  # as far as who gives has heard
        self._is_dropped = self._is_left = False
        self._failed: OSError | None = None

    def add(self, part: memoryview) -> None:
        while self._held_nbytes > HELD_NBYTES and self._failed is None and not self._is_dropped:
            self._held_nbytes -= self._done.get()
        if self._failed is not None:
            raise self._failed
        if not self._is_dropped:
            self._given.put(part)
            self._held_nbytes += len(part)

    def drop(self) -> None:
        """Nothing is written any more, also of what comes yet."""
        self._is_dropped = True

    def end(self) -> None:
        """No more will come."""
        self._given.put(None)

    def leave(self) -> None:
        """Nobody will ask what became of it: the thread that writes ends, and closes the file."""
        self._is_left = True
        self.drop()
        self.end()

    def finish(self, whole: bool) -> None:
        """Close the file, which is brought to the disk before where it is to be whole. The other thread has ended."""
        with self._file:
            if whole and self._failed is not None:
                raise self._failed
            if whole:
                os.fsync(self._file.fileno())

    def write(self) -> None:
        """All that comes, until the end."""
        started = done = 0
        try:
            while (part := self._given.get()) is not None:
                at = len(part) if self._is_dropped else 0
                while at < len(part):
                    at += os.write(self._file.fileno(), part[at:])
                done += at
                if done - started >= STARTED_NBYTES:  # begins to write those pages, and waits for none
                    os.posix_fadvise(self._file.fileno(), started, done - started, os.POSIX_FADV_DONTNEED)
                    started = done
                self._done.put(at)
        except OSError as error:
            self._failed = error
            self._done.put(0)  # who waits looks again
        finally:
            if self._is_left:
                self._file.close()
