"""Blocks that lie in the service's storage engine, written and read by this process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from transfer_queue.client.images import Image, Wanted
from transfer_queue.codec.layout import Layout
from transfer_queue.errors import InvalidInput, ServiceUnavailable, StoreFull
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.memory.pool import Pool
from transfer_queue.storage.engines import ReadSpan, sealed
from transfer_queue.storage.engines.deadline import GuardedEngine
from transfer_queue.storage.engines.sealed import Ranges
from transfer_queue.storage.in_time import OpenedOnce, left_until

PAUSE_S = 0.05  # between two attempts to get room in an engine that is full
CLOSE_S = 5.0
NO_ROWS: Ints = np.empty(0, np.int64)
_left_behind: list[GuardedEngine] = []  # of parents: their threads are not in this process, so nothing ends them


class _SealedImage(Image):
    """With the digests behind the block."""

    def __init__(self, wanted: Wanted, memory: Bytes) -> None:
        super().__init__(wanted, memory)
        self._has_digests = False

    def to_read(self, grains: Ranges) -> Ranges:
        if self._has_digests:
            return grains
        self._has_digests = True
        start, end = sealed.tail_range(self.wanted.nbytes)
        if grains and grains[-1][1] == self.wanted.nbytes:  # it lies right behind, but for a few zeros
            return [*grains[:-1], (grains[-1][0], end)]
        return [*grains, (start, end)]


class WrongBytes(Exception):
    """The engine gives other bytes than were written as `block`."""

    def __init__(self, engine: str, block: int) -> None:
        super().__init__(f"{engine} gives other bytes than were written (block {block})")
        self.block = block


def _opened(told: Mapping[str, Any] | None, timeout_s: float) -> GuardedEngine:
    assert told is not None
    return GuardedEngine(told["name"], told["settings"], False, timeout_s)


class EngineAccess:
    """The engine that the server `told` of (None: there is none), opened on first use. For many threads.

    `books` is the server whose unit has the books of the large blocks ("": this process's own).

    Calls raise `ServiceUnavailable` when it does not answer in time or is not installed here, `BlocksMissing`,
    `WrongBytes`.
    """

    def __init__(self, told: Mapping[str, Any] | None, pool: Pool):
        self._told = told
        self._engine = OpenedOnce("" if told is None else str(told["name"]), functools.partial(_opened, told))
        self._pool = pool
        self.books = "" if told is None else str(told.get("books", ""))

    def __bool__(self) -> bool:
        return self._told is not None

    def close(self) -> None:
        opened = self._engine.taken()
        if opened is not None:
            opened.close(CLOSE_S)

    def leave_behind(self) -> None:
        """In a forked child: the parent's access to the engine is of no use here, and taking it apart would hang."""
        if self._engine.opened is not None:
            _left_behind.append(self._engine.opened)

    def write(self, block: int, key: str, nbytes: int, fill: Callable[[Bytes], None], deadline: float) -> None:
        """Store a block that `fill` writes, once, under its key. Waits for room until `deadline`, then raises
        `StoreFull`."""
        engine = self._engine.get(left_until(deadline))
        size = sealed.sealed_nbytes(nbytes)
        if engine.max_nbytes is not None and size > engine.max_nbytes:
            raise InvalidInput(f"{nbytes} bytes in one put: {engine.name} takes {engine.max_nbytes} at most")
        full: StoreFull | None = None
        filled: list[Bytes] = []
        while full is None or time.monotonic() + PAUSE_S < deadline:
            try:
                self._write(engine, block, key, nbytes, fill, filled, deadline)
                return
            except StoreFull as error:
                full = error
            except ServiceUnavailable:  # it was full before: that is why there is no time left
                if full is None or time.monotonic() < deadline:
                    raise
            time.sleep(PAUSE_S)
        raise StoreFull(f"{engine.name}: {full}") from full

    def _write(
        self, engine: GuardedEngine, block: int, key: str, nbytes: int, fill: Callable[[Bytes], None],
        filled: list[Bytes], deadline: float,
    ) -> None:  # fmt: skip
        """`filled` has what lay in the room of an attempt for which there was no place after all."""
        room = engine.reserve(key, sealed.sealed_nbytes(nbytes), left_until(deadline))
        try:
            if filled:
                room.memory[:] = filled[0]
            else:
                fill(room.memory[:nbytes])
                sealed.seal(room.memory, nbytes, block)
            try:
                engine.seal(room, key, left_until(deadline))
            except StoreFull:
                filled[:] = [room.memory.copy()]  # who fills it may read a file, which is at its end now
                raise
        except BaseException:
            engine.abandon(room, CLOSE_S)
            raise

    def read(self, wanted: Sequence[Wanted], timeout_s: float) -> list[Bytes]:
        """Each block as memory of its size, of which what the rows need is there and compared."""
        deadline = time.monotonic() + timeout_s
        engine = self._engine.get(timeout_s)
        images = [_SealedImage(one, self._pool.allocate(sealed.sealed_nbytes(one.nbytes))) for one in wanted]
        self._fetch(engine, images, [image.first() for image in images], left_until(deadline))
        rest = [image.rest() for image in images]
        if any(rest):
            self._fetch(engine, images, rest, left_until(deadline))
        return [image.memory[: image.wanted.nbytes] for image in images]

    def chunk(self, block: int, key: str, nbytes: int, start: int, end: int, timeout_s: float) -> Bytes:
        """Bytes of a block, from a multiple of the grain on."""
        wanted = Wanted(block, nbytes, Layout(0, nbytes, []), NO_ROWS, frozenset(), key)
        image = _SealedImage(wanted, np.empty(sealed.sealed_nbytes(nbytes), np.uint8))
        deadline = time.monotonic() + timeout_s
        self._fetch(self._engine.get(timeout_s), [image], [[(start, end)]], left_until(deadline))
        return image.memory[start:end]

    def _fetch(
        self, engine: GuardedEngine, images: Sequence[_SealedImage], ranges: Sequence[Ranges], timeout_s: float
    ) -> None:
        """Read these grains of each image, with its digests the first time, and compare them."""
        spans = []
        for image, grains in zip(images, ranges, strict=True):
            key, memory = image.wanted.key, image.memory
            spans += [ReadSpan(key, first, memory[first:end]) for first, end in image.to_read(grains)]
        engine.read(spans, timeout_s)
        for image, grains in zip(images, ranges, strict=True):
            if not sealed.is_right(image.memory, image.wanted.nbytes, grains, image.wanted.block):
                raise WrongBytes(engine.name, image.wanted.block)
