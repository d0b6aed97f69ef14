"""Spans of one process: they are handed over in memory, and made into lines in a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from multiprocessing import process as processes
from multiprocessing import util
from typing import Any, Protocol

from transfer_queue.trace import lines
from transfer_queue.trace.file import TraceChunk, TraceFile

FLUSH_S = 0.25  # what a kill costs at most, and the time of one write
PENDING = 1 << 16  # spans that wait to be made into lines
CHUNK = 64  # spans that are made into lines before others may run
MAX_NBYTES = 64 << 20
CLOSE_S = 5.0
MAX_NAMES = 8  # of the threads that had one number after the other


class SpanSource(Protocol):
    """Something that was done in a `thread`; `span` is called once, in the thread that makes lines."""

    thread: int

    def span(self) -> lines.TraceSpan: ...


class SpanRecorder:
    """Notes spans; never waits for a disk, and raises nothing that a disk is the cause of.

    Opens its file with the first span, see `TraceFile`. `failed` is called once, in another thread, where a file cannot
    be written.
    """

    def __init__(self, folder: str, name: str, max_nbytes: int, failed: Callable[[SpanRecorder], None]) -> None:
        self.folder, self.name, self.max_nbytes, self.failed = folder, name, max_nbytes, failed
        self._pending: deque[SpanSource] = deque()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._file: TraceFile | None = None
        self._lost = self._told = 0
        self._here = threading.local()  # `thread`: its number, once it is named
        self._labels: dict[int, dict[str, None]] = {}  # all names that a number had, `MAX_NAMES` at most: a number goes
        # to another thread when its own has ended

    def add(self, noted: SpanSource) -> None:
        """Write its span soon."""
        if self._thread is None:
            self._begin()
        if noted.thread != getattr(self._here, "thread", 0):
            self._name(noted.thread)
        if len(self._pending) < PENDING:
            self._pending.append(noted)
        else:
            self._lost += 1

    def _name(self, thread: int) -> None:
        """Note what this thread is called: it may have ended when its spans are written."""
        self._here.thread = thread
        name = threading.current_thread().name
        known = self._labels.get(thread, {})
        label = name if len(known) < MAX_NAMES else "..."
        self._labels[thread] = {**known, label: None}  # a new one: others may read it

    def close(self) -> None:
        """Write what is left. Waits at most `CLOSE_S`."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def leave(self) -> None:
        """In a forked child: the file and what waits are the parent's."""
        if self._file is not None:
            self._file.leave()

    def _begin(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="tq-trace", daemon=True)
                thread.start()
                self._thread = thread
                if processes.parent_process() is not None:  # such a process may end without calling `atexit`
                    util.Finalize(None, self.close, exitpriority=0)

    def _run(self) -> None:
        """Imports nothing, see `TraceFile`."""
        file = self._file = TraceFile(self.folder, self.name, self.max_nbytes, self._has_failed)
        while not self._closing.wait(FLUSH_S):
            self._hand_over(file)
        self._hand_over(file)
        file.close()

    def _has_failed(self) -> None:
        self._closing.set()
        self.failed(self)

    def _hand_over(self, file: TraceFile) -> None:
        """Make lines of what waits, a few spans at a time: the job's threads run in between."""
        while self._pending or self._lost != self._told:
            taken = [self._pending.popleft() for _ in range(min(CHUNK, len(self._pending)))]
            spans: list[Any] = [noted.span() for noted in taken]
            data, unsaid = lines.encoded(spans)
            lost, self._told = self._lost - self._told, self._lost
            threads = {span.thread: ", ".join(self._labels[span.thread]) for span in spans}
            file.add(TraceChunk(len(spans) - unsaid, data, threads, lost + unsaid))
