"""Everything in the service as of one instant, as bytes, and putting it back. Blocking; used by `checkpoint`.

The service names and pins all blocks in the step that exports its state. Blocks never change once they are published,
so they can be read at leisure while others go on working.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.client.drivers import given_back, run
from transfer_queue.client.effects import Call
from transfer_queue.client.engine import WrongBytes
from transfer_queue.client.holding import Given
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.write import send_block
from transfer_queue.errors import DataLost, ProtocolError, RowCleared, ServiceUnavailable
from transfer_queue.memory.bytes import Ints
from transfer_queue.storage.engines import BlocksMissing
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of
from transfer_queue.wire.messages.checkpoints import STATE_S

CHUNK_NBYTES = 4 << 20
READERS = 4  # requests in flight where blocks cannot be mapped


class Pinned(NamedTuple):
    """A block as it lies on the server `to`, where request `rid` pinned it."""

    piece: m.Piece
    to: str
    rid: int


class PinnedSnapshot:
    """The state and the pinned blocks of one instant. `given`: the calls that pinned them."""

    def __init__(self, session: Session, state: memoryview, given: Given) -> None:
        self.state = state
        self.pinned: deque[Pinned] = deque()
        self.layouts: list[bytes] = []
        self._session = session
        self._given = given

    def pin(self, blocks: Ints, to: str) -> None:
        """Pin blocks that lie on the server `to`."""
        if not len(blocks):
            return
        call = Call(m.Pin(self._session.next_rid(), blocks.tobytes()), to=to)
        self._given.append(call)
        taken: m.Taken = self._call(call)[0]
        for piece in taken.pieces:
            piece.layout += len(self.layouts)
            self.pinned.append(Pinned(piece, to, taken.rid))
        self.layouts += taken.layouts

    def blocks(self) -> Iterator[tuple[m.Piece, Iterator[memoryview]]]:
        """Every block and its bytes in chunks; each is there until the next is asked for, and a block's chunks must
        be consumed before the next block."""
        found = list(self.pinned)
        with contextlib.closing(self._chunks(found)) as chunks:
            for piece, _, _ in found:
                yield piece, (next(chunks) for _ in range(0, piece.nbytes, CHUNK_NBYTES))

    def unpin(self, count: int | None = None) -> None:
        """Release the first `count` of the blocks still pinned, or all."""
        released: dict[tuple[str, int], list[int]] = {}
        for _ in range(len(self.pinned) if count is None else count):
            piece, to, rid = self.pinned.popleft()
            released.setdefault((to, rid), []).append(piece.block)
        for (to, rid), blocks in released.items():
            self._session.notify(m.Unpin(rid, blocks), to)

    def check(self, count: int) -> None:
        """Raises `ServiceUnavailable` unless the first `count` of the blocks still pinned were so until now: those that
        are mapped may have become others. Pins of one session at one server are lost together, or not at all."""
        here = next((one for one in itertools.islice(self.pinned, count) if not one.to), None)
        if here is None:
            return
        self._call(Call(m.Read(self._session.next_rid(), here.piece.block, 0, 0)))

    def _call(self, call: Call) -> tuple[Any, memoryview]:
        """The answer about pinned blocks. Raises `ServiceUnavailable` where their server began anew meanwhile."""
        try:
            return self._session.call(call)
        except RowCleared as error:
            raise ServiceUnavailable(f"what was to be saved is not held any more: {error}") from error

    def _chunks(self, found: Sequence[Pinned]) -> Generator[memoryview, None, None]:
        wanted = ((one, at) for one in found for at in range(0, one.piece.nbytes, CHUNK_NBYTES))
        own = np.empty(CHUNK_NBYTES, np.uint8)
        with ThreadPoolExecutor(READERS, thread_name_prefix="tq-checkpoint") as readers:
            asked: deque[Future[memoryview]] = deque()
            for (piece, to, _), at in wanted:
                if isinstance(lies := piece.location, m.InArena):
                    if lies.digest and not at:
                        self._session.spilled.check(piece.block, lies, piece.nbytes)
                    start, nbytes = lies.offset + at, min(CHUNK_NBYTES, piece.nbytes - at)
                    while asked:
                        yield asked.popleft().result()
                    # Who filled the block may still write there: all that is made of a chunk is made of the same bytes.
                    own[:nbytes] = self._session.arenas[lies.arena].shared[start : start + nbytes]
                    yield memoryview(own[:nbytes])  # type: ignore[arg-type]
                    continue
                if isinstance(lies, m.InEngine):
                    asked.append(readers.submit(self._read_from_engine, piece, lies.key, at))
                else:
                    asked.append(readers.submit(self._read, piece, at, to))
                if len(asked) > READERS:
                    yield asked.popleft().result()
            while asked:
                yield asked.popleft().result()

    def _read_from_engine(self, piece: m.Piece, key: str, at: int) -> memoryview:
        end = min(at + CHUNK_NBYTES, piece.nbytes)
        session = self._session
        try:
            found = session.engine.chunk(piece.block, key, piece.nbytes, at, end, session.timeout_s)
        except BlocksMissing as error:
            # The server gives up the rows of what it does not find either, so that the next one can be saved.
            missing = m.ReportMissing(session.next_rid(), np.array([piece.block], np.int64).tobytes())
            session.call(Call(missing, to=session.engine.books, wait_s=session.timeout_s))
            raise DataLost(f"block {piece.block} of what is to be saved: {error}") from error
        except WrongBytes as error:
            raise DataLost(f"block {piece.block} of what is to be saved: {error}") from error
        return memoryview(found)  # type: ignore[arg-type]

    def _read(self, piece: m.Piece, at: int, to: str) -> memoryview:
        nbytes = min(CHUNK_NBYTES, piece.nbytes - at)
        request = m.Read(self._session.next_rid(), piece.block, at, nbytes)
        _, data = self._call(Call(request, to=to))
        if len(data) != nbytes:
            raise ProtocolError(f"{len(data)} bytes of block {piece.block} instead of {nbytes}")
        return data


@contextlib.contextmanager
def snapshot(session: Session) -> Iterator[PinnedSnapshot]:
    """Everything as of now; what is still pinned at the end is released. Raises `ServiceUnavailable` and such."""
    session.hold()
    with given_back(session) as given:
        asked = Call(m.Snapshot(session.next_rid()), wait_s=STATE_S)
        given.append(asked)
        captured, state = session.call(asked)
        found = PinnedSnapshot(session, state, given)
        _pin_all(found, captured, int(session.config.get("unit", 0)))
        session.call(Call(m.Recycle(session.next_rid(), asked.request.rid)))
        yield found
        found.unpin()


def _pin_all(found: PinnedSnapshot, captured: m.Captured, own: int) -> None:
    """Pin every block where it lies; none goes away meanwhile."""
    blocks = numbers_of(captured.blocks)
    units = blocks >> m.UNIT_SHIFT
    for unit in np.unique(units).tolist():
        found.pin(blocks[units == unit], "" if unit == own else captured.units.get(unit, ""))


class Refill:
    """Blocks being filled for a saved state; nobody sees them before they are published. `given`: the call for the one
    that is being filled."""

    def __init__(self, session: Session, given: Given) -> None:
        self._session = session
        self._given = given
        self._filled: list[m.Refilled] = []

    def fill(self, saved: int, layout: int, nbytes: int, write: Callable[[memoryview], None]) -> None:
        """A block of `nbytes` that `write` fills, in place of the one saved as number `saved`.

        Waits for room, then raises `StoreFull`.
        """
        session = self._session
        call = Call(m.Allocate(session.next_rid(), nbytes, False, session.timeout_s), wait_s=session.timeout_s)
        self._given[:] = [call]
        allocated: m.Allocated = session.call(call)[0]
        self._filled.append(m.Refilled(saved, allocated.block, layout))
        match allocated.location:
            case m.InEngine(key):
                deadline = time.monotonic() + session.timeout_s
                session.engine.write(allocated.block, key, nbytes, lambda into: write(memoryview(into)), deadline)  # type: ignore[arg-type]
            case m.InArena(arena=arena, offset=offset) if session.is_local:
                write(memoryview(session.arenas[arena].writable(offset, nbytes)))  # type: ignore[arg-type]
            case m.InArena():
                own = np.empty(nbytes, np.uint8)
                write(memoryview(own))  # type: ignore[arg-type]
                run(session, send_block(session, allocated.block, own))

    def first(self) -> int:
        """The number of the block that was filled first, of those that are not `published`."""
        return self._filled[0].block

    def published(self) -> None:
        """The first block was."""
        self._filled.pop(0)

    def publish(self, state: bytes, layouts: Sequence[bytes]) -> None:
        """Replace everything in the service by `state` over the filled blocks: one atomic step."""
        request = m.Restore(self._session.next_rid(), self._filled, list(layouts))
        self._session.call(Call(request, memoryview(state), STATE_S))
        self._filled = []

    def discard(self) -> None:
        for one in self._filled:
            self._session.notify(m.Discard(one.block))


@contextlib.contextmanager
def refill(session: Session) -> Iterator[Refill]:
    """Blocks to fill and publish; those not published by the end are given up."""
    session.hold()
    with given_back(session) as given:
        blocks = Refill(session, given)
        try:
            yield blocks
        finally:
            blocks.discard()
