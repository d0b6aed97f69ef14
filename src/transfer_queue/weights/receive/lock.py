"""Many readers or one writer, with deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from transfer_queue.errors import DeadlineExceeded, InvalidInput


class SharedLock:
    """A writer that waits holds off new readers, but not a thread that reads already (it may enter again). Tasks of one
    loop are not told apart: one that waited here would keep the loop from ending what the writer waits for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers = 0  # one writes, or waits for the readers to leave
        self._mine = threading.local()

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[None]:
        """Blocks while somebody writes; `DeadlineExceeded` after `timeout_s`."""
        depth = getattr(self._mine, "depth", 0)
        with self._changed:
            if not depth and not self._changed.wait_for(lambda: not self._writers, timeout_s):
                raise DeadlineExceeded(f"the weights were being written for {timeout_s} s")
            self._readers += 1
        self._mine.depth = depth + 1
        try:
            yield
        finally:
            self._mine.depth -= 1
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self, timeout_s: float) -> Iterator[float]:
        """Blocks until all readers left (yields how many seconds that took); `DeadlineExceeded` after `timeout_s`.

        `InvalidInput` in a thread that reads: it would wait for itself.
        """
        if getattr(self._mine, "depth", 0):
            raise InvalidInput("this thread is reading the weights that it wants to replace")
        start = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._writers, timeout_s):
                raise DeadlineExceeded(f"somebody else wrote the weights for {timeout_s} s")
            self._writers = 1
            left_s = timeout_s - (time.monotonic() - start)
            if not self._changed.wait_for(lambda: not self._readers, left_s):
                self._leave()
                raise DeadlineExceeded(f"{self._readers} forward passes did not end within {timeout_s} s")
        try:
            yield time.monotonic() - start
        finally:
            with self._changed:
                self._leave()

    def _leave(self) -> None:
        self._writers = 0
        self._changed.notify_all()
