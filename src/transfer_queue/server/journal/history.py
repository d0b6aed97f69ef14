"""What happened to rows lately, in two files beside a journal, so that the next service on it can tell of a row.

Nothing rests on it and nobody waits for it: what the last second had, or a full disk did not take, is a gap in what is
told. The journal itself says what lasts; a snapshot of it has no events, and what is in a log says not who asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator

import msgspec
import numpy as np

from transfer_queue.controller import Controller
from transfer_queue.controller.recent import Happened
from transfer_queue.controller.table import rows_bytes
from transfer_queue.memory.memfd import write_file
from transfer_queue.server.journal.files import FRAME, frame_at, framed
from transfer_queue.structs import decodable
from transfer_queue.wire.arrays import indexes_of

log = logging.getLogger("transfer_queue.server")

NAMES = ("history.before", "history")  # the older one first
MAX_NBYTES = 8 << 20  # of a file
FLUSH_NBYTES, FLUSH_S = 256 << 10, 0.5
CLOSE_S = 1.0  # how long a write may take in the end


@decodable
class WrittenEvent(msgspec.Struct, array_like=True):
    """An event of rows that had their numbers in this `life` (`Lineage`): `count` of them from `first` on, or `rows`;
    `at`: time.time()."""

    life: bytes
    at: float
    what: str
    partition: str
    first: int
    count: int
    rows: bytes
    session: bytes
    task: str
    detail: tuple[str, ...]
    runs: tuple[tuple[str, int], ...]


_decode = msgspec.msgpack.Decoder(WrittenEvent).decode


class History:
    """Of the rows of a controller. `directory`: the journal's, as a descriptor that stays open: it may be moved."""

    def __init__(self, directory: int, controller: Controller) -> None:
        self._directory = directory
        self._lineage, self._recent = controller.lineage, controller.state.recent
        self._pid = 0  # of the process that writes: a standby notes what another one did
        self._frames: list[bytes] = []
        self._nbytes = 0  # of these
        self._file: int | None = None
        self._flushing: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None  # one at a time, in a thread
        self._has_failed = False

    def recall(self) -> None:
        """The controller, which came back from the journal, knows what is written down."""
        ahead_s = time.time() - time.monotonic()
        for name in NAMES:
            for one in self._read(name):
                rows = np.arange(one.first, one.first + one.count) if one.count else indexes_of(one.rows)
                here = self._lineage.are_here(one.life, rows)
                if here.any() and (here.all() or not one.runs):  # else nothing tells which rows each is of
                    at = min(one.at - ahead_s, time.monotonic())  # where the clock was put back since
                    told = (one.session, one.task, one.detail, one.runs)
                    self._recent.note(Happened(at, one.what, one.partition, rows[here], *told))

    def begin(self) -> None:
        """In the process that serves from now on. A descriptor of the one before is not its own."""
        self._pid = os.getpid()
        self._frames, self._nbytes, self._file = [], 0, None
        self._flushing, self._writing, self._has_failed = None, None, False
        self._recent.keepers = [self._note]

    async def close(self) -> None:
        """Write what there is; on a disk that hangs some of it is not."""
        self._recent.keepers = []
        for _ in range(2):  # what is under way, and the rest
            if self._writing is None:
                self._flush()
            if self._writing is not None:
                await asyncio.wait([self._writing], timeout=CLOSE_S)
        if self._writing is None:
            self._let_go()

    def look(self) -> None:
        """Events are over: what they noted is written soon."""
        if not self._frames or self._writing is not None:
            return
        if self._nbytes >= FLUSH_NBYTES:
            self._flush()
        elif self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _note(self, event: Happened) -> None:
        if self._pid != os.getpid() or self._nbytes > MAX_NBYTES:  # the disk hangs
            return
        at, rows = event.at + (time.time() - time.monotonic()), event.rows
        is_run = len(rows) == 1 or (len(rows) > 1 and bool((np.diff(rows) == 1).all()))
        first, count, named = (int(rows[0]), len(rows), b"") if is_run else (0, 0, rows_bytes(rows))
        noted = WrittenEvent(
            self._lineage.life, at, event.what, event.partition, first, count, named, event.session, event.task,
            event.detail, event.runs,
        )  # fmt: skip
        body = msgspec.msgpack.encode(noted)
        self._frames += framed(0, [body])
        self._nbytes += len(body)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._frames and self._writing is None:
            self._writing = asyncio.get_running_loop().run_in_executor(None, self._append, self._taken())
            self._writing.add_done_callback(self._written)

    def _taken(self) -> bytes:
        data, self._frames, self._nbytes = b"".join(self._frames), [], 0
        return data

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing = None
        error = writing.exception()
        if error is not None and not self._has_failed:
            log.warning("what happens to rows is not written down: %s", error)
        self._has_failed = error is not None
        self.look()

    def _append(self, data: bytes) -> None:
        before, name = NAMES
        if self._file is not None and os.fstat(self._file).st_size > MAX_NBYTES:
            self._let_go()
            os.replace(name, before, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        if self._file is None:
            self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        end = os.fstat(self._file).st_size
        try:
            write_file(self._file, end, data)
        except OSError:
            os.ftruncate(self._file, end)  # else nothing after it could be read
            raise

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self, name: str) -> Iterator[WrittenEvent]:
        """The events of a file, up to a place that is torn or damaged; what comes after it is taken off."""
        with contextlib.suppress(OSError), open(name, "r+b", opener=self._open) as file:
            data, at = file.read(), 0
            with contextlib.suppress(msgspec.DecodeError):
                while frame := frame_at(at, len(data), lambda start, nbytes: data[start : start + nbytes]):
                    yield _decode(frame.payload)
                    at += FRAME.size + len(frame.payload)
            file.truncate(at)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags, dir_fd=self._directory)
