"""The file of one process: spans are handed over in memory, and written in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import process as processes
from multiprocessing import util
from pathlib import Path
from typing import Any, Protocol

from transfer_queue.trace import lines

log = logging.getLogger("transfer_queue")

FLUSH_S = 0.25  # what a kill costs at most, and the time of one write
PENDING = 1 << 16  # spans that wait to be written
CHUNK = 64  # spans that are made into lines before others may run
MAX_NBYTES = 64 << 20
CLOSE_S = 5.0


class SpanSource(Protocol):
    """Something that was done in a `thread`; `span` is called once, in the thread that writes."""

    thread: int

    def span(self) -> lines.TraceSpan: ...


class SpanRecorder:
    """Notes spans; never waits for a disk, and raises nothing that a disk is the cause of.

    Opens its file with the first span. The file holds `max_nbytes` / 2 at most: one that is full is kept beside the
    next, and replaced by that when the next is full. `failed` is called once, in the thread, where a file cannot be
    written. Spans that were not or are no longer in a file are counted in it.
    """

    def __init__(self, folder: str, name: str, max_nbytes: int, failed: Callable[[SpanRecorder], None]) -> None:
        self.folder, self.name, self.max_nbytes, self.failed = folder, name, max_nbytes, failed
        self._pending: deque[SpanSource] = deque()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._file = -1
        self._nbytes = 0
        self._spans = 0  # in the file
        self._kept_spans = 0  # in the one before
        self._lost = self._told = 0
        self._names: dict[int, str] = {}  # of threads
        self._named: set[int] = set()  # of those, the ones that the file names

    def add(self, noted: SpanSource) -> None:
        """Write its span soon."""
        if self._thread is None:
            self._begin()
        if noted.thread not in self._names:  # it may have ended when this is written
            self._names[noted.thread] = threading.current_thread().name
        if len(self._pending) < PENDING:
            self._pending.append(noted)
        else:
            self._lost += 1

    def close(self) -> None:
        """Write what is left. Waits at most `CLOSE_S`."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def leave(self) -> None:
        """In a forked child: the file and what waits are the parent's."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)

    def _begin(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="tq-trace", daemon=True)
                thread.start()
                self._thread = thread
                if processes.parent_process() is not None:  # such a process may end without calling `atexit`
                    util.Finalize(None, self.close, exitpriority=0)

    def _run(self) -> None:
        """Imports nothing: a child that is forked in the middle of an import never gets that module."""
        self._ident = secrets.token_hex(8)
        self._path = Path(self.folder, f"{platform.node()}-{os.getpid()}-{self._ident}{lines.SUFFIX}")
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._open()
            while not self._closing.wait(FLUSH_S):
                self._flush()
            self._flush()
        except OSError as error:
            log.warning("this process records no trace any more: %s", error)
            self._closing.set()
            self.failed(self)
            self._pending.clear()
        finally:
            self.leave()
            self._file = -1

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._nbytes = self._spans = 0
        self._named.clear()
        self._write([_header(self._ident, self.name)])

    def _flush(self) -> None:
        """Write what waits, a few spans at a time: the job's threads run in between."""
        while self._pending:
            chunk = [self._pending.popleft() for _ in range(min(CHUNK, len(self._pending)))]
            spans = [noted.span() for noted in chunk]
            self._write([*self._new_threads(spans), *spans])
            self._spans += len(spans)
            if self._nbytes > self.max_nbytes // 2:
                self._change()
        if self._lost != self._told:
            self._told = self._lost
            self._write([lines.TraceLoss(self._lost)])

    def _new_threads(self, spans: list[lines.TraceSpan]) -> list[lines.TraceThread]:
        """The names of those that the file has not named yet."""
        new = {span.thread for span in spans} - self._named
        self._named |= new
        return [lines.TraceThread(ident, self._names[ident]) for ident in new]

    def _change(self) -> None:
        """Go on with a new file; the last one stays beside it."""
        os.close(self._file)
        self._file = -1
        os.replace(self._path, self._path.with_suffix(f".before{lines.SUFFIX}"))
        self._lost += self._kept_spans
        self._kept_spans = self._spans
        self._open()

    def _write(self, written: list[Any]) -> None:
        data, lost = lines.encoded(written)
        self._lost += lost
        while data:
            done = os.write(self._file, data)
            self._nbytes += done
            data = data[done:]


def _header(ident: str, name: str) -> lines.TraceHeader:
    boot = ""
    with contextlib.suppress(OSError):  # bytes: the codec "ascii" would be imported, see `SpanRecorder._run`
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().decode("utf-8").strip()
    command = " ".join(sys.argv).encode("utf-8", "replace").decode()[:1024]
    now = time.monotonic_ns(), time.time_ns()
    return lines.TraceHeader(lines.FORMAT, ident, os.getpid(), platform.node(), boot, name or _name(), command, *now)


def _name() -> str:
    """What a person would call this process."""
    name = processes.current_process().name
    if name == "MainProcess":
        name = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c") else "python"
    rank = os.environ.get("RANK", "")
    return f"{name} rank {rank}" if rank else name
