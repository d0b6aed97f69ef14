"""What sessions do with the blocks of this server's unit: fill them, pin them, read them, take parts of them."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from transfer_queue.codec.layout import Layout, decode_layout, encode_layout
from transfer_queue.codec.needed import all_ranges
from transfer_queue.codec.select import CutOut, cut_out, selected
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import InvalidInput, RowCleared, ServiceUnavailable, StoreFull
from transfer_queue.memory.bytes import Ints
from transfer_queue.server.sessions import ServerSession
from transfer_queue.storage.blocks import Block, Unit
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

REMOTE_INLINE_NBYTES = 1 << 20
MAX_STATE_NBYTES = 8 << 30
MAX_CUT_ROWS = 8192  # of a block, for the offsets of all of its rows are looked at
ALIGN = 64
Payload: TypeAlias = "Sequence[bytes | bytearray | memoryview]"
Answer: TypeAlias = "tuple[m.Reply, Payload]"


class ArenasLike(Protocol):
    """The unit's memory as the job's transport reads it."""

    @property
    def is_ready(self) -> bool: ...
    async def ready(self) -> None: ...
    def pull(self, message: m.Pull, block: Block) -> Coroutine[Any, Any, None]: ...
    def has(self, block: Block) -> bool: ...
    def offer(self, block: Block) -> m.Registered | m.Remote: ...
    def statistics(self) -> dict[str, Any]: ...


class EngineLike(Protocol):
    """Where the bytes of large blocks are that the unit has the books of."""

    async def check(self) -> None: ...
    def statistics(self) -> dict[str, Any]: ...


class BlockRequests:
    """`unit`'s blocks on behalf of sessions."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.engine: EngineLike | None = None
        self.registered: ArenasLike | None = None

    def statistics(self) -> dict[str, Any]:
        parts = [part.statistics() for part in (self.engine, self.registered) if part is not None]
        return {name: value for part in parts for name, value in part.items()}

    def waits(self, message: m.Request, session: ServerSession) -> Coroutine[Any, Any, None] | None:
        """What others have to do before this request can be answered; None: nothing."""
        if isinstance(message, m.Take) and self.registered is not None and not self.registered.is_ready:
            return self.registered.ready()
        if isinstance(message, m.Pull):
            return self._pulled(message, session)
        if isinstance(message, m.ReportMissing):
            if self.engine is None:
                raise InvalidInput("this service has no storage engine")
            return self.engine.check()
        return None

    # filling

    def inline(self, payload: memoryview) -> Block:
        """A block made of the payload of a message."""
        nbytes = max(1, len(payload))
        block = self.unit.place_anywhere(nbytes, None)
        if block is None:
            raise StoreFull(self.unit.full(nbytes))
        self.unit.memory(block)[: len(payload)] = payload
        return block

    def destination(self, message: m.Message, nbytes: int, session: ServerSession) -> memoryview:
        """Where the payload of `message` is received; raises to refuse it."""
        if isinstance(message, m.Write):
            block = self.unit.unpublished(message.block, session.ident)
            if block.is_in_engine:
                raise InvalidInput(f"block {message.block} lies in the storage engine")
            if message.offset < 0 or message.offset + nbytes > block.nbytes:
                raise InvalidInput(f"bytes {message.offset}..{message.offset + nbytes} of a block of {block.nbytes}")
            return memoryview(self.unit.memory(block))[message.offset : message.offset + nbytes]  # type: ignore[arg-type]
        if isinstance(message, m.Commit) and message.block == 0 and nbytes <= REMOTE_INLINE_NBYTES:
            return memoryview(bytearray(nbytes))
        if isinstance(message, m.Restore) and nbytes <= MAX_STATE_NBYTES:
            return memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]  # zeroing much takes long
        raise InvalidInput(f"{type(message).__name__} with a payload of {nbytes} bytes")

    def done(self, message: m.Request, session: ServerSession) -> Answer:
        """What it asks for was done before: see `destination` and `waits`."""
        return m.Done(message.rid), ()

    def _pulled(self, message: m.Pull, session: ServerSession) -> Coroutine[Any, Any, None]:
        """Take what the client lends."""
        if self.registered is None:
            raise ServiceUnavailable("this unit has no transport, or could not open it again")
        block = self.unit.unpublished(message.block, session.ident)
        if block.is_in_engine:
            raise InvalidInput(f"block {message.block} lies in the storage engine")
        if not 0 <= message.lies.address < 1 << 63 or not 0 <= message.timeout_s < threading.TIMEOUT_MAX:
            raise InvalidInput(f"memory at {message.lies.address}, within {message.timeout_s} s")
        return self.registered.pull(message, block)

    # reading

    def present(self, reply: m.Located, payload: Payload, session: ServerSession) -> Answer:
        """Complete a controller's reply with what lies here: small blocks ride along, others are pinned to be mapped,
        or read from the storage engine.

        A reader that cannot map them takes them with a request of its own.
        """
        found = self.unit.describe(reply.pieces, reply.layouts)
        here = [piece for piece in found if isinstance(piece.location, m.InArena)]
        if _aligned_nbytes(here) <= (m.INLINE_NBYTES if session.local else REMOTE_INLINE_NBYTES):
            payload = self._riding(here, payload)
        left = [piece for piece in found if not isinstance(piece.location, m.Inline)]
        if session.local and left:
            self._pin_all(reply.rid, [piece.block for piece in left], session)
        else:
            _leave(left)
        return reply, payload

    def carried(self, reply: m.Located, payload: Payload) -> Answer | None:
        """A controller's reply with all that it names; None where some of it lies elsewhere, or is too much."""
        missing = sum(piece.location == m.REMOTE for piece in reply.pieces)
        here = self.unit.describe(reply.pieces, reply.layouts)
        nbytes = _aligned_nbytes(here) + sum(len(part) for part in payload)
        if len(here) < missing or any(isinstance(piece.location, m.InEngine) for piece in here):
            return None
        if nbytes > m.CARRIED_NBYTES:
            return None if payload else self._cut_out(reply)
        return reply, self._riding(here, payload)

    def _cut_out(self, reply: m.Located) -> Answer | None:
        """A reply whose pieces are large blocks that lie here, with the rows that it names and no others, where they
        follow each other in their blocks and are small; else None, and `reply` is of no use any more."""
        made: dict[int, CutOut] = {}
        for part in reply.parts:
            runs = numbers_of(part.runs, 3)
            number, first, count = runs[0].tolist()
            block = self.unit.block(reply.pieces[number].block)
            assert block is not None
            if block.digest:
                return None  # the reader compares it
            layout = decode_layout(block.layout)
            share = block.nbytes * count // max(1, layout.rows)
            if len(runs) > 1 or number in made or layout.rows > MAX_CUT_ROWS or share > 2 * m.CARRIED_NBYTES:
                return None
            made[number] = cut_out(block.layout, self.unit.memory(block), first, count, part.fields)
            part.runs = np.array([number, 0, count], np.int64).tobytes()
        reply.layouts, at = [], 0
        for number, cut in made.items():
            piece = reply.pieces[number]
            piece.location, piece.nbytes, piece.layout = m.Inline(at), cut.nbytes, len(reply.layouts)
            reply.layouts.append(cut.layout)
            at += cut.nbytes
        if at > m.CARRIED_NBYTES:
            return None
        own, at = np.empty(at, np.uint8), 0
        for cut in made.values():
            cut.fill(own[at : at + cut.nbytes])
            at += cut.nbytes
        return reply, (memoryview(own),)  # type: ignore[arg-type]

    def _riding(self, pieces: list[m.Piece], payload: Payload) -> Payload:
        """`payload` with the bytes of `pieces` appended."""
        before = sum(len(part) for part in payload)
        at = -(-before // ALIGN) * ALIGN
        start, parts = at, []
        for piece in pieces:
            block = self.unit.block(piece.block)
            assert block is not None
            parts.append((at - start, block))
            piece.location = m.Inline(at)
            at += -(-block.nbytes // ALIGN) * ALIGN
        own = bytearray(at - start)
        for offset, block in parts:
            own[offset : offset + block.nbytes] = memoryview(self.unit.content(block))  # type: ignore[arg-type]
        return [*payload, bytes(start - before), own] if before else (own,)

    def take(self, message: m.Request, session: ServerSession) -> Answer:
        """Whole blocks, or cuts of them, for a reader on another host."""
        assert isinstance(message, m.Take)
        pieces = [m.Piece(cut.block) for cut in message.cuts]
        reply = m.Taken(message.rid, pieces, [])
        self.unit.unpin_request(session.ident, message.rid)  # asked again
        if len(self.unit.describe(pieces, [])) < len(pieces):
            raise RowCleared("the blocks lay on a unit that is not here any more")
        try:
            for number, (cut, piece) in enumerate(zip(message.cuts, pieces, strict=True)):
                piece.block = self._cut(cut, session, message.rid)
                piece.location = m.REMOTE
                if cut.slices and piece.block != cut.block:
                    reply.sliced.append(number)
            found = self.unit.describe(pieces, reply.layouts, dropped=True)
        except BaseException:
            self.unit.unpin_request(session.ident, message.rid)
            raise
        here = [piece for piece in found if isinstance(piece.location, m.InArena)]
        if len(here) < len(found) or _aligned_nbytes(here) > REMOTE_INLINE_NBYTES:
            self._offer(here)
            return reply, ()
        payload = self._riding(here, ())
        self.unit.unpin_request(session.ident, message.rid)
        return reply, payload

    def _offer(self, pieces: Sequence[m.Piece]) -> None:
        """Where the reader finds them: over the transport, or by requests."""
        _leave(pieces)
        if self.registered is None:
            return
        for piece in pieces:
            block = self.unit.block(piece.block)
            assert block is not None
            piece.location = self.registered.offer(block)

    def _is_offered(self, block: Block, layout: Layout, rows: Ints, fields: Sequence[str]) -> bool:
        """Whether the reader takes these rows out of the whole block, over the transport: they follow each other, and
        are more than rides along with an answer."""
        if self.registered is None or rows[-1] - rows[0] >= len(rows):
            return False
        nbytes = sum(end - first for first, end in all_ranges(layout, fields))
        return nbytes * len(rows) > REMOTE_INLINE_NBYTES * layout.rows and self.registered.has(block)

    def _cut(self, cut: m.Cut, session: ServerSession, rid: int) -> int:
        """The pinned block of what `cut` asks for; the block itself when that is all, or when there is no room."""
        block = self.unit.block(cut.block)
        assert block is not None
        layout, rows = decode_layout(block.layout), numbers_of(cut.rows)
        if not len(rows) or rows[0] < 0 or rows[-1] >= layout.rows or (np.diff(rows) <= 0).any():
            raise InvalidInput(f"rows of a block of {layout.rows}: ascending and distinct")
        self.unit.pin(block.number, session.ident, rid)
        if block.is_in_engine:
            return block.number  # the reader takes what it needs from there
        slices = _slices(cut, layout)
        if not slices and len(rows) == layout.rows and {column.name for column in layout.columns} <= set(cut.fields):
            return block.number
        if not slices and self._is_offered(block, layout, rows, cut.fields):
            return block.number
        smaller, fill = selected(layout, self.unit.content(block), rows, cut.fields, slices)
        part = self.unit.place(max(1, smaller.nbytes), None)
        if part is None:
            return block.number
        fill(self.unit.memory(part))
        self.unit.publish(part.number, encode_layout(smaller))
        self.unit.pin(part.number, session.ident, rid)
        self.unit.drop(part.number)  # lives as long as its pin
        self.unit.unpin(block.number, session.ident, rid)
        return part.number

    def read(self, message: m.Request, session: ServerSession) -> Answer:
        assert isinstance(message, m.Read)
        block = self.unit.pinned(message.block, session.ident)
        end = message.offset + message.nbytes
        if block.is_in_engine:
            if message.nbytes:
                raise InvalidInput(f"block {message.block} lies in the storage engine")
            return m.Data(message.rid), ()  # it is still pinned: that is all that was asked
        if message.offset < 0 or message.nbytes < 0 or end > block.nbytes:
            raise InvalidInput(f"bytes {message.offset}..{end} of a block of {block.nbytes}")
        data = memoryview(self.unit.content(block, message.offset, end))  # type: ignore[arg-type]
        return m.Data(message.rid), (data,)  # the reader keeps its pin until it has everything

    # pins

    def _pin_all(self, rid: int, blocks: list[int], session: ServerSession) -> None:
        """Pin what a reply names, in place of what an earlier reply to the same request named."""
        before = self.unit.pins_of(session.ident, rid)
        for block in blocks:
            self.unit.pin(block, session.ident, rid)
        for block in before:
            self.unit.unpin(block, session.ident, rid)

    def pin(self, message: m.Request, session: ServerSession) -> Answer:
        """Pin whole blocks, to be mapped or read."""
        assert isinstance(message, m.Pin)
        pieces = [m.Piece(block) for block in numbers_of(message.blocks).tolist()]
        reply = m.Taken(message.rid, pieces, [])
        if len(self.unit.describe(pieces, reply.layouts)) < len(pieces):
            raise RowCleared("the blocks lay on a unit that is not here any more")
        self._pin_all(message.rid, [piece.block for piece in pieces], session)
        if not session.local:
            _leave([piece for piece in pieces if isinstance(piece.location, m.InArena)])
        return reply, ()

    def unpin_all(self, rid: int, blocks: Sequence[int], session: ServerSession) -> None:
        for block in blocks:
            self.unit.unpin(block, session.ident, rid)

    def adopt(self, message: m.Request, session: ServerSession) -> Answer:
        assert isinstance(message, m.Adopt)
        self.unit.adopt(session.ident, message.session)
        return m.Done(message.rid), ()


def _slices(cut: m.Cut, layout: Layout) -> dict[str, Slice]:
    """Raises `InvalidInput` for what rows of the block have no such parts of."""
    found = {}
    for name, numbers in cut.slices.items():
        column = layout.column(name)
        if column is not None:
            found[name] = Slice(*numbers)
            found[name].check(column.schema())
    return found


def _aligned_nbytes(pieces: Sequence[m.Piece]) -> int:
    return sum(-(-piece.nbytes // ALIGN) * ALIGN for piece in pieces)


def _leave(pieces: Sequence[m.Piece]) -> None:
    """Where they lie in this host's memory is of no use to the reader."""
    for piece in pieces:
        piece.location = m.REMOTE
