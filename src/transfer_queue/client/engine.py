"""Blocks that lie in the service's storage engine, written and read by this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transfer_queue.codec.layout import Layout
from transfer_queue.codec.needed import all_ranges, index_ranges, value_ranges
from transfer_queue.codec.rows import BlockBytes
from transfer_queue.errors import InvalidInput, StoreFull
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.memory.copy import Mover
from transfer_queue.memory.pool import Pool
from transfer_queue.storage.engines import Span, sealed
from transfer_queue.storage.engines.deadline import GuardedEngine
from transfer_queue.storage.shm import SMALL_NBYTES

PAUSE_S = 0.05  # between two attempts to get room in an engine that is full
CLOSE_S = 5.0
_left_behind: list[GuardedEngine] = []  # of parents: their threads are not in this process, so nothing ends them


class Wanted(NamedTuple):
    """Rows (ascending, distinct) of some fields of a block."""

    block: int
    nbytes: int
    layout: Layout
    rows: Ints
    fields: frozenset[str]


class WrongBytes(Exception):
    """The engine gives other bytes than were written as `block`."""

    def __init__(self, engine: str, block: int) -> None:
        super().__init__(f"{engine} gives other bytes than were written (block {block})")
        self.block = block


class Engine:
    """The engine that the server `told` of (None: there is none), opened on first use. For many threads.

    Calls raise `ServiceUnavailable` when it does not answer in time or is not installed here, `BlocksMissing`,
    `WrongBytes`.
    """

    def __init__(self, told: Mapping[str, Any] | None, service: bytes, is_at_books: bool, mover: Mover, pool: Pool):
        self._told = told
        self._service = service
        self._opened: GuardedEngine | None = None
        self._lock = threading.Lock()
        self._mover, self._pool = mover, pool
        self.books = "" if told is None or is_at_books else str(told["books"])  # the server that has its blocks

    def server_of(self, nbytes: int) -> str:
        """Which server has the books of blocks of this size."""
        return self.books if nbytes > SMALL_NBYTES else ""

    def __bool__(self) -> bool:
        return self._told is not None

    def _open(self, timeout_s: float) -> GuardedEngine:
        with self._lock:
            if self._opened is None:
                assert self._told is not None
                self._opened = GuardedEngine(self._told["name"], self._told["settings"], False, timeout_s)
            return self._opened

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close(CLOSE_S)

    def leave_behind(self) -> None:
        """In a forked child: the parent's access to the engine is of no use here, and taking it apart would hang."""
        if self._opened is not None:
            _left_behind.append(self._opened)

    def write(self, block: int, nbytes: int, fill: Callable[[Bytes], None], deadline: float) -> None:
        """Store a block that `fill` writes. Waits for room until `deadline`, then raises `StoreFull`."""
        engine = self._open(_left(deadline))
        size = sealed.sealed_nbytes(nbytes)
        if engine.max_nbytes is not None and size > engine.max_nbytes:
            raise InvalidInput(f"{nbytes} bytes in one put: {engine.name} takes {engine.max_nbytes} at most")
        while True:
            try:
                self._write(engine, block, nbytes, fill, deadline)
                return
            except StoreFull as error:
                if time.monotonic() + PAUSE_S > deadline:
                    raise StoreFull(f"{engine.name}: {error}") from error
            time.sleep(PAUSE_S)

    def _write(
        self, engine: GuardedEngine, block: int, nbytes: int, fill: Callable[[Bytes], None], deadline: float
    ) -> None:
        room = engine.reserve(self._key(block), sealed.sealed_nbytes(nbytes), _left(deadline))
        try:
            fill(room.memory[:nbytes])
            sealed.seal(room.memory, nbytes, block, self._mover.run)
            engine.seal(room, _left(deadline))
        except BaseException:
            engine.abandon(room, CLOSE_S)
            raise

    def read(self, wanted: Sequence[Wanted], timeout_s: float) -> list[Bytes]:
        """Each block as memory of its size, of which what the rows need is there and compared."""
        engine = self._open(timeout_s)
        images = [self._pool.allocate(one.nbytes) for one in wanted]
        tails = [self._pool.allocate(end - start) for start, end in (sealed.tail_range(one.nbytes) for one in wanted)]
        spans, ranges, partial = [], [], []
        for one, image, tail in zip(wanted, images, tails, strict=True):
            whole = len(one.rows) == one.layout.rows
            first = all_ranges(one.layout, one.fields) if whole else index_ranges(one.layout, one.fields)
            ranges.append(sealed.in_grains(first, one.nbytes))
            spans += self._spans(one.block, image, ranges[-1])
            spans.append(Span(self._key(one.block), sealed.tail_range(one.nbytes)[0], tail))
            partial.append(not whole)
        engine.read(spans, timeout_s)
        self._check(engine, wanted, images, tails, ranges)
        if any(partial):
            rest = [
                sealed.in_grains(value_ranges(BlockBytes(image, one.layout, -1), one.rows, one.fields), one.nbytes)
                if is_partial
                else []
                for one, image, is_partial in zip(wanted, images, partial, strict=True)
            ]
            more = zip(wanted, images, rest, strict=True)
            engine.read([span for one, image, of_one in more for span in self._spans(one.block, image, of_one)], timeout_s)
            self._check(engine, wanted, images, tails, rest)
        return images

    def chunk(self, block: int, nbytes: int, start: int, end: int, timeout_s: float) -> Bytes:
        """Bytes of a block, from a multiple of the grain on."""
        engine = self._open(timeout_s)
        image, (tail_start, tail_end) = self._pool.allocate(nbytes), sealed.tail_range(nbytes)
        tail = self._pool.allocate(tail_end - tail_start)
        spans = [*self._spans(block, image, [(start, end)]), Span(self._key(block), tail_start, tail)]
        engine.read(spans, timeout_s)
        if not sealed.is_right(image, tail, [(start, end)], block, self._mover.run):
            raise WrongBytes(engine.name, block)
        return image[start:end]

    def _check(
        self, engine: GuardedEngine, wanted: Sequence[Wanted], images: list[Bytes], tails: list[Bytes],
        ranges: list[sealed.Ranges],
    ) -> None:  # fmt: skip
        for one, image, tail, of_one in zip(wanted, images, tails, ranges, strict=True):
            if not sealed.is_right(image, tail, of_one, one.block, self._mover.run):
                raise WrongBytes(engine.name, one.block)

    def _spans(self, block: int, image: Bytes, ranges: sealed.Ranges) -> list[Span]:
        return [Span(self._key(block), first, image[first:end]) for first, end in ranges]

    def _key(self, block: int) -> str:
        return sealed.engine_key(self._service, block)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
