"""Blocks that lie elsewhere. On other hosts: one request to each unit names all that is needed of it, then the bytes
are received straight into their place, over several connections when they are many, or read over the job's transport.
In the storage engine: one read of all that is needed of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue.client.effects import Call, Notify, Offload, Operation, Together
from transfer_queue.client.engine import WrongBytes
from transfer_queue.client.images import Wanted, check_sent
from transfer_queue.client.session import Session
from transfer_queue.codec.layout import Layout, decode_layout
from transfer_queue.codec.rows import row_numbers
from transfer_queue.codec.select import NO_SLICES
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import DataLost, ProtocolError, RowCleared
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.storage.engines import BlocksMissing
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

PINNED = (m.Remote, m.InEngine, m.Registered)  # what the answer to a `Take` leaves pinned
STREAM_NBYTES = 32 << 20  # what one call moves at most


class ReceivedBlock(NamedTuple):
    """The bytes of a piece, now memory of this process."""

    layout: Layout
    data: Bytes
    is_sliced: bool = False  # of fields that parts were asked of, it has only those


def lies_elsewhere(reply: m.Located) -> bool:
    """Whether some of its pieces are to be `received`."""
    return any(isinstance(piece.location, (m.Remote, m.InEngine)) for piece in reply.pieces)


def received(
    session: Session,
    request: m.Get,
    reply: m.Located,
    slices: Mapping[str, Slice] = NO_SLICES,
    most: int | None = None,
) -> Operation[dict[int, ReceivedBlock]]:
    """The pieces of `reply`, an answer to `request`, that lie elsewhere, by their number; the runs in `reply` then
    count rows as received. Raises `TooMuch` where that is more than `most` bytes.

    Raises `RowCleared` when a block is gone: its rows were cleared, moved, or lost by the storage engine. `NotReached`
    when its unit may be gone. `DataLost` for other bytes than were written.
    """
    cuts = _cuts(reply, slices)
    if not cuts:
        return {}
    lying = _all_lying(reply, cuts)
    by_unit: dict[int, list[int]] = {}
    for piece in cuts.keys() - lying.keys():
        by_unit.setdefault(reply.pieces[piece].block >> m.UNIT_SHIFT, []).append(piece)
    servers = [reply.units.get(unit, "") for unit in by_unit]
    takes = [m.Take(session.next_rid(), [cuts[piece] for piece in pieces]) for pieces in by_unit.values()]
    sorted_out = _Pieces(session, cuts, lying, most)
    found, in_engine = sorted_out.found, dict[int, ReceivedBlock]()
    answers = yield Together([Call(take, to=to) for take, to in zip(takes, servers, strict=True)])
    pinned: list[tuple[str, m.Unpin]] = []
    try:
        for (taken, payload), pieces, to in zip(answers, by_unit.values(), servers, strict=True):
            blocks = [one.block for one in taken.pieces if isinstance(one.location, PINNED)]
            pinned.append((to, m.Unpin(taken.rid, blocks)))
            sorted_out.add(taken, payload, pieces, to)
        if sorted_out.reads:
            yield Together(sorted_out.reads)
        if sorted_out.registered:
            found |= yield from _read_registered(session, sorted_out.registered)
        if lying:
            in_engine = yield from _read_from_engine(session, request, reply, cuts, lying, most)
    finally:
        for to, unpin in pinned:
            if unpin.blocks:
                yield Notify(unpin, to)
    _recount(reply, {piece: cuts[piece].rows for piece in found}, found)
    return found | in_engine


class _Pieces:
    """What units answered: blocks that are `found`, once the `reads` have filled them, `registered` ones, and those
    that are `lying` in the storage engine."""

    def __init__(self, session: Session, cuts: dict[int, m.Cut], lying: dict[int, _Lying], most: int | None) -> None:
        self.found: dict[int, ReceivedBlock] = {}
        self.registered: dict[int, _Registered] = {}
        self.lying = lying
        self.reads: list[Call] = []
        self._session, self._cuts, self._most = session, cuts, most
        self._nbytes = 0

    def add(self, taken: m.Taken, payload: memoryview, pieces: Sequence[int], to: str) -> None:
        """Those of one unit. Raises `ProtocolError`, `TooMuch`."""
        layouts = [decode_layout(layout) for layout in taken.layouts]
        if len(taken.pieces) != len(pieces):
            raise ProtocolError(f"{len(taken.pieces)} pieces, {len(pieces)} were asked for")
        for number, (piece, one) in enumerate(zip(pieces, taken.pieces, strict=True)):
            if isinstance(one.location, m.InEngine):
                self.lying[piece] = _Lying(one, one.location, taken.layouts)
                continue
            layout = layout_of(one, layouts)
            if layout.nbytes > one.nbytes:
                raise ProtocolError(f"a block of {one.nbytes} bytes with a layout of {layout.nbytes}")
            if isinstance(one.location, m.Registered):
                wanted = _wanted(self._cuts[piece], one, layout, self._most)
                self.registered[piece] = _Registered(one.location, wanted, to)
                continue
            if isinstance(one.location, m.Inline):
                data = inline_bytes(payload, one.location.offset, one.nbytes)
            else:
                self._nbytes += one.nbytes
                check_sent(self._nbytes, self._most)
                data = self._session.pool.allocate(one.nbytes)
                self.reads += _reads(self._session, one.block, data, to)
            self.found[piece] = ReceivedBlock(layout, data, number in taken.sliced)


class _Registered(NamedTuple):
    """What is needed of a block that a transport reads, pinned by the server `to`."""

    lies: m.Registered
    wanted: Wanted
    to: str


def _wanted(cut: m.Cut, piece: m.Piece, layout: Layout, most: int | None) -> Wanted:
    """Of the block that a unit offers: what was asked for and no more, or a larger one that has it."""
    rows = numbers_of(cut.rows)
    if layout.rows == len(rows):
        rows = np.arange(layout.rows)
    elif rows[-1] >= layout.rows:
        raise ProtocolError(f"rows {rows[0]}..{rows[-1]} of a block of {layout.rows}")
    return Wanted(piece.block, piece.nbytes, layout, rows, frozenset(cut.fields), most=most)


def _read_registered(session: Session, lying: dict[int, _Registered]) -> Operation[dict[int, ReceivedBlock]]:
    """These pieces, each as a block of its size of which what the rows need is there.

    A pin may have ended while its memory was read: this process was stopped for so long that its session ended. So the
    units say afterwards whether it was held until then; pins of one session at one server are lost together.
    """
    if not session.transport:
        raise ProtocolError("memory of a transport that the server did not tell of")
    nbytes = sum(one.wanted.nbytes for one in lying.values())
    read = [(one.lies, one.wanted) for one in lying.values()]
    images = yield Offload(lambda: session.transport.read(read, session.timeout_s), nbytes)
    held = {one.to: one.wanted.block for one in lying.values()}
    yield Together([Call(m.Read(session.next_rid(), block, 0, 0), to=to) for to, block in held.items()])
    parts = zip(lying.items(), images, strict=True)
    return {piece: ReceivedBlock(one.wanted.layout, image) for (piece, one), image in parts}


class _Lying:
    """A block in the storage engine, as a server described it."""

    def __init__(self, piece: m.Piece, location: m.InEngine, layouts: Sequence[bytes]) -> None:
        self.key = location.key
        self.nbytes = piece.nbytes
        self.layout = layout_of(piece, [decode_layout(layout) for layout in layouts])
        if self.layout.nbytes > piece.nbytes:
            raise ProtocolError(f"a block of {piece.nbytes} bytes with a layout of {self.layout.nbytes}")


def _all_lying(reply: m.Located, pieces: Iterable[int]) -> dict[int, _Lying]:
    """Those of the pieces that lie in the engine."""
    named = ((piece, reply.pieces[piece]) for piece in pieces)
    return {
        piece: _Lying(one, one.location, reply.layouts) for piece, one in named if isinstance(one.location, m.InEngine)
    }


def _read_from_engine(
    session: Session,
    request: m.Get,
    reply: m.Located,
    cuts: dict[int, m.Cut],
    lying: dict[int, _Lying],
    most: int | None,
) -> Operation[dict[int, ReceivedBlock]]:
    """These pieces, each as a block of its size of which what the rows need is there."""
    wanted = [
        Wanted(cut.block, one.nbytes, one.layout, numbers_of(cut.rows), frozenset(cut.fields), one.key, most)
        for one, cut in ((one, cuts[piece]) for piece, one in lying.items())
    ]
    for one in wanted:
        if one.rows[0] < 0 or one.rows[-1] >= one.layout.rows:
            raise ProtocolError(f"rows {one.rows[0]}..{one.rows[-1]} of a block of {one.layout.rows}")
    nbytes = sum(one.nbytes for one in wanted)
    engine = session.engine
    try:
        images = yield Offload(lambda: engine.read(wanted, session.timeout_s), nbytes)
    except BlocksMissing as error:
        blocks = np.array([one.block for one in wanted], np.int64).tobytes()
        yield Call(m.ReportMissing(session.next_rid(), blocks), to=engine.books, wait_s=session.timeout_s)
        raise RowCleared(f"the storage engine does not have them any more: {error}") from error
    except WrongBytes as error:
        piece = next(piece for piece in lying if cuts[piece].block == error.block)
        raise DataLost(f"partition {request.partition!r}: {_rows_in(request, reply, piece)}: {error}") from error
    parts = zip(lying.items(), images, strict=True)
    return {piece: ReceivedBlock(one.layout, image) for (piece, one), image in parts}


def _rows_in(request: m.Get, reply: m.Located, piece: int) -> str:
    """The rows of the answer that have cells in a piece, as far as the request named them."""
    positions: set[int] = set()
    for part in reply.parts:
        table = numbers_of(part.runs, 3)
        of_rows = np.repeat(table[:, 0], table[:, 2])
        positions.update(np.flatnonzero(of_rows == piece).tolist())
    names: list[Any] = [] if request.keys is None else list(request.keys)
    if request.rows is not None:
        names = numbers_of(request.rows).tolist()
    known = [names[position] for position in sorted(positions) if position < len(names)]
    return f"rows {known[:8]}" if known else f"{len(positions)} rows"


def inline_bytes(payload: memoryview, offset: int, nbytes: int) -> Bytes:
    """A block that came with the message itself."""
    if offset < 0 or offset + nbytes > len(payload):
        raise ProtocolError(f"a block of {nbytes} bytes at {offset} of a payload of {len(payload)}")
    return np.frombuffer(payload, np.uint8)[offset : offset + nbytes]


def layout_of(piece: m.Piece, layouts: Sequence[Layout]) -> Layout:
    if not 0 <= piece.layout < len(layouts):
        raise ProtocolError(f"layout {piece.layout} of {len(layouts)}")
    return layouts[piece.layout]


def _reads(session: Session, block: int, data: Bytes, to: str) -> Iterator[Call]:
    for start in range(0, len(data), STREAM_NBYTES):
        part = memoryview(data[start : start + STREAM_NBYTES])  # type: ignore[arg-type]
        yield Call(m.Read(session.next_rid(), block, start, len(part)), to=to, into=part)


def _cuts(reply: m.Located, slices: Mapping[str, Slice]) -> dict[int, m.Cut]:
    """What is needed of every piece that lies elsewhere."""
    elsewhere = {
        number for number, piece in enumerate(reply.pieces) if isinstance(piece.location, (m.Remote, m.InEngine))
    }
    if not elsewhere:
        return {}
    runs: dict[int, list[Ints]] = {}
    fields: dict[int, dict[str, None]] = {}
    for part in reply.parts:
        table = numbers_of(part.runs, 3)
        for piece in elsewhere.intersection(np.unique(table[:, 0]).tolist()):
            runs.setdefault(piece, []).append(table[table[:, 0] == piece, 1:])
            fields.setdefault(piece, {}).update(dict.fromkeys(part.fields))
    return {
        piece: m.Cut(
            reply.pieces[piece].block,
            np.unique(row_numbers(np.concatenate(of_piece))).tobytes(),
            list(fields[piece]),
            {name: msgspec.structs.astuple(slices[name]) for name in fields[piece] if name in slices},
        )
        for piece, of_piece in runs.items()
    }


def _recount(reply: m.Located, taken: dict[int, bytes], found: dict[int, ReceivedBlock]) -> None:
    """Let the runs of cut pieces name rows of the cut; rows of a run lie together in it, too."""
    cut = {}
    for piece, data in taken.items():
        rows = numbers_of(data)
        if found[piece].layout.rows == len(rows):
            cut[piece] = rows
    for part in reply.parts:
        table = numbers_of(part.runs, 3).copy()
        for piece in cut.keys() & set(table[:, 0].tolist()):
            of_piece = table[:, 0] == piece
            table[of_piece, 1] = np.searchsorted(cut[piece], table[of_piece, 1])
        part.runs = table.tobytes()
