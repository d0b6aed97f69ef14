"""The files of one process, written in a thread of its own: what waits for a disk is bounded in bytes."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process as processes
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from transfer_queue.trace import lines

log = logging.getLogger("transfer_queue")

WAITING_NBYTES = 16 << 20


class TraceChunk(NamedTuple):
    """The lines of some spans, with the names of their `threads`. `lost`: spans since the last that are in no chunk."""

    spans: int
    data: bytes
    threads: Mapping[int, str]
    lost: int


class TraceFile:
    """Holds `max_nbytes` / 2 at most: one that is full is kept beside the next, and replaced by that when the next is
    full. Spans that were not or are no longer in a file are counted in it.

    `failed` is called once, in the thread that writes, where a file cannot be written. Imports nothing once it was
    made: a child that is forked in the middle of an import never gets that module.
    """

    def __init__(self, folder: str, name: str, max_nbytes: int, failed: Callable[[], None]) -> None:
        self._ident = secrets.token_hex(8)
        self._path = Path(folder, f"{platform.node()}-{os.getpid()}-{self._ident}{lines.SUFFIX}")
        self._name, self._max_nbytes, self._failed = name, max_nbytes, failed
        self._chunks: SimpleQueue[TraceChunk | None] = SimpleQueue()
        self._added_nbytes = self._dropped = 0  # by whoever adds; what follows, by the thread that writes
        self._written_nbytes = 0  # of chunks
        self._descriptor = -1
        self._nbytes = 0
        self._spans = 0  # in the file
        self._kept_spans = 0  # in the one before
        self._lost = self._told = 0
        self._named: dict[int, str] = {}  # threads that the file names, and how
        self._thread = threading.Thread(target=self._run, name="tq-trace-disk", daemon=True)
        self._thread.start()

    @property
    def waiting_nbytes(self) -> int:
        return self._added_nbytes - self._written_nbytes

    def add(self, chunk: TraceChunk) -> None:
        """Write it soon, unless `WAITING_NBYTES` wait already. Of one thread."""
        if self.waiting_nbytes + len(chunk.data) > WAITING_NBYTES:
            self._dropped += chunk.spans + chunk.lost
            return
        self._added_nbytes += len(chunk.data)
        self._chunks.put(chunk)

    def close(self) -> None:
        """Wait until all is written."""
        self._chunks.put(None)
        self._thread.join()

    def leave(self) -> None:
        """In a forked child: the file is the parent's."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1

    def _run(self) -> None:
        try:
            os.makedirs(self._path.parent, exist_ok=True)
            self._open()
            while (chunk := self._chunks.get()) is not None:
                self._write_chunk(chunk)
                if self._chunks.empty():
                    self._tell_loss()
            self._tell_loss()
        except OSError as error:
            why = f"{self._path} cannot be written: {error}; transfer_queue.trace.start(FOLDER) begins anew"
            log.warning("this process records no trace any more: %s", why)
            self._failed()
        finally:
            self.leave()

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._nbytes = self._spans = 0
        self._named.clear()
        self._write_lines([_header(self._ident, self._name)])

    def _write_chunk(self, chunk: TraceChunk) -> None:
        new = [lines.TraceThread(*one) for one in chunk.threads.items() - self._named.items()]
        self._named |= chunk.threads
        self._write_lines([*new])
        self._write(chunk.data)
        self._written_nbytes += len(chunk.data)
        self._spans += chunk.spans
        self._lost += chunk.lost
        if self._nbytes > self._max_nbytes // 2:
            self._change()

    def _tell_loss(self) -> None:
        lost = self._lost + self._dropped
        if lost != self._told:
            self._told = lost
            self._write_lines([lines.TraceLoss(lost)])

    def _change(self) -> None:
        """Go on with a new file; the last one stays beside it."""
        os.close(self._descriptor)
        self._descriptor = -1
        os.replace(self._path, self._path.with_suffix(f".before{lines.SUFFIX}"))
        self._lost += self._kept_spans
        self._kept_spans = self._spans
        self._open()

    def _write_lines(self, written: Sequence[lines.TraceLine]) -> None:
        self._write(lines.encoded(list(written))[0])

    def _write(self, data: bytes) -> None:
        while data:
            done = os.write(self._descriptor, data)
            self._nbytes += done
            data = data[done:]


def _header(ident: str, name: str) -> lines.TraceHeader:
    boot = ""
    with contextlib.suppress(OSError):  # bytes: the codec "ascii" would be imported
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
