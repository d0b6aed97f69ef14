"""A new file that a thread writes and brings to the disk, while its caller makes the bytes that follow."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

HELD_NBYTES = 64 << 20  # given and not written: the caller waits with more
STARTED_NBYTES = 16 << 20  # the kernel is asked for so many at a time: left alone it begins when all is written


class WrittenBehind:
    """A binary file for writers of Arrow, which end with it; one thread at a time may use it.

    `write` blocks while more than `HELD_NBYTES` are waiting, and keeps what it is given until that is written: it must
    not change. Raises OSError for what went wrong with bytes given before. `close(True)` returns when every byte is on
    the disk, `close(False)` when the thread has ended, with as much written as there is by then.
    """

    def __init__(self, path: Path) -> None:
        self.nbytes = 0  # given so far
        self.closed = False
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._parts: deque[memoryview] = deque()
        self._held_nbytes = 0
        self._ended = False
        self._failed: OSError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tq-export", daemon=True)
        self._thread.start()

    def write(self, data: Any) -> int:
        part = memoryview(data).cast("B")
        with self._changed:
            while self._held_nbytes > HELD_NBYTES and self._failed is None:
                self._changed.wait()
            if self._failed is not None:
                raise self._failed
            self._parts.append(part)
            self._held_nbytes += len(part)
            self._changed.notify()
        self.nbytes += len(part)
        return len(part)

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        """Nothing: `close` does."""

    def close(self, whole: bool) -> None:
        self.closed = True
        with self._changed:
            self._ended = True
            if not whole:
                self._parts.clear()
            self._changed.notify()
        self._thread.join()
        with self._file:
            if whole and self._failed is not None:
                raise self._failed
            if whole:
                os.fsync(self._file.fileno())

    def _run(self) -> None:
        started = done = 0
        try:
            while (part := self._next()) is not None:
                at = 0
                while at < len(part):
                    at += os.write(self._file.fileno(), part[at:])
                done += at
                if done - started >= STARTED_NBYTES:  # begins to write those pages, and waits for none
                    os.posix_fadvise(self._file.fileno(), started, done - started, os.POSIX_FADV_DONTNEED)
                    started = done
                with self._changed:
                    self._held_nbytes -= at
                    self._changed.notify()
        except OSError as error:
            with self._changed:
                self._failed = error
                self._parts.clear()
                self._changed.notify()

    def _next(self) -> memoryview | None:
        """None when the file is to end."""
        with self._changed:
            while not self._parts and not self._ended:
                self._changed.wait()
            return self._parts.popleft() if self._parts else None
