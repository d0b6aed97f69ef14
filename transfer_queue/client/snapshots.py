"""Everything in the service as of one instant, as bytes, and putting it back. Blocking; used by `checkpoint`.

The service names and pins all blocks in the step that exports its state. Blocks never change once they are published,
so they can be read at leisure while others go on working.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from transfer_queue.client.connection import Connection
from transfer_queue.client.drivers import run
from transfer_queue.client.effects import Call
from transfer_queue.client.session import Session
from transfer_queue.client.writing import send_block
from transfer_queue.errors import ProtocolError
from transfer_queue.wire import messages as m

STATE_S = 300.0  # the service needs about a second per million rows to export or take a state
CHUNK_NBYTES = 4 << 20
READERS = 4  # requests in flight where blocks cannot be mapped


@contextlib.contextmanager
def _open_session(session: Session) -> Iterator[Callable[[], None]]:
    """Hold a connection that no call can break: with the last one of a session go its pins and unpublished blocks.

    The function it gives raises `ServiceUnavailable` when the connection was lost meanwhile.
    """
    connection = Connection(session.address, session.ident, session.timeout_s)

    def check() -> None:
        connection.call(m.ListPartitions(session.next_rid()), None, session.timeout_s)

    try:
        yield check
    finally:
        connection.close()


class Snapshot:
    """The state and the pinned blocks of one instant. `check` raises unless all of them were pinned until now."""

    def __init__(self, session: Session, cut: m.Cut, state: memoryview, check: Callable[[], None]) -> None:
        self.state = state
        self.pieces = cut.pieces
        self.layouts = cut.layouts
        self.check = check
        self._session = session
        self._pinned = deque(piece.block for piece in cut.pieces)

    def blocks(self) -> Iterator[tuple[m.Piece, Iterator[memoryview]]]:
        """Every block and its bytes in chunks; a block's chunks must be consumed before the next block."""
        with contextlib.closing(self._chunks()) as chunks:
            for piece in self.pieces:
                yield piece, (next(chunks) for _ in range(0, piece.nbytes, CHUNK_NBYTES))

    def unpin(self, count: int | None = None) -> None:
        """Release the first `count` of the blocks still pinned, or all."""
        count = len(self._pinned) if count is None else count
        if count:
            self._session.notify(m.Unpin([self._pinned.popleft() for _ in range(count)]))

    def _chunks(self) -> Generator[memoryview, None, None]:
        wanted = ((piece, at) for piece in self.pieces for at in range(0, piece.nbytes, CHUNK_NBYTES))
        if self._session.is_local:
            for piece, at in wanted:
                start, nbytes = piece.offset + at, min(CHUNK_NBYTES, piece.nbytes - at)
                yield memoryview(self._session.arenas[piece.arena].shared[start : start + nbytes])  # type: ignore[arg-type]
            return
        with ThreadPoolExecutor(READERS, thread_name_prefix="tq-checkpoint") as readers:
            asked: deque[Future[memoryview]] = deque()
            for piece, at in wanted:
                asked.append(readers.submit(self._read, piece, at))
                if len(asked) > READERS:
                    yield asked.popleft().result()
            while asked:
                yield asked.popleft().result()

    def _read(self, piece: m.Piece, at: int) -> memoryview:
        nbytes = min(CHUNK_NBYTES, piece.nbytes - at)
        _, data = self._session.call(Call(m.Read(self._session.next_rid(), piece.block, at, nbytes)))
        if len(data) != nbytes:
            raise ProtocolError(f"{len(data)} bytes of block {piece.block} instead of {nbytes}")
        return data


@contextlib.contextmanager
def snapshot(session: Session) -> Iterator[Snapshot]:
    """Everything as of now; what is still pinned at the end is released. Raises `ServiceUnavailable` and such."""
    with _open_session(session) as check:
        cut, state = session.call(Call(m.Snapshot(session.next_rid()), wait_s=STATE_S))
        found = Snapshot(session, cut, state, check)
        try:
            yield found
        finally:
            found.unpin()


class Refill:
    """Blocks being filled for a saved state; nobody sees them before `publish`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._filled: list[m.Refilled] = []

    def fill(self, saved: int, layout: int, nbytes: int, write: Callable[[memoryview], None]) -> None:
        """A block of `nbytes` that `write` fills, in place of the one saved as number `saved`.

        Waits for room, then raises `StoreFull`.
        """
        session = self._session
        request = m.Allocate(session.next_rid(), nbytes, False, session.timeout_s)
        allocated: m.Allocated = session.call(Call(request, wait_s=session.timeout_s))[0]
        self._filled.append(m.Refilled(saved, allocated.block, layout))
        if session.is_local:
            write(memoryview(session.arenas[allocated.arena].writable(allocated.offset, nbytes)))  # type: ignore[arg-type]
            return
        own = np.empty(nbytes, np.uint8)
        write(memoryview(own))  # type: ignore[arg-type]
        run(session, send_block(session, allocated.block, own))

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
    with _open_session(session):
        blocks = Refill(session)
        try:
            yield blocks
        finally:
            blocks.discard()
