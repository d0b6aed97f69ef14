"""The blocks of an answer as memory of this process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from transfer_queue.client.session import Session
from transfer_queue.client.spilled import MAX_ARENAS
from transfer_queue.client.transfer.remote import ReceivedBlock, inline_bytes, layout_of
from transfer_queue.codec.layout import CellKind, Layout, Template, decode_layout, sizes_of, template_of
from transfer_queue.codec.lone_rows import LoneRows
from transfer_queue.codec.rows import BlockBytes, row_numbers
from transfer_queue.codec.spread_rows import BlockShare, LoneShare, SpreadRows
from transfer_queue.errors import ProtocolError
from transfer_queue.schema import MIXED, OBJECTS
from transfer_queue.storage.shm import SMALL_NBYTES
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import Numbers, numbers_of

# Smaller reads are copied: they must not hold a whole block, and tidying up after a view costs the size of its block.
VIEW_NBYTES, VIEW_SHARE, LARGE_VIEW_NBYTES = 64 << 10, 8, 32 << 20
MANY = 16  # short runs, from which on one pass over all of them costs less than a look at each
VALUE_NBYTES = 1024  # copied in the time that decoding one Python value takes
SHORT = 4  # rows, on average: longer runs are copied faster as runs


class LocatedBlock:
    """One block of a reply, as memory: inline, received, or mapped.

    A mapped block is gathered from through the shared mapping; `viewed` opens it in the private one, and from then on
    its pin ends with the last tensor over it.
    """

    def __init__(self, rid: int, piece: m.Piece, layout: Layout, gathered: BlockBytes, session: Session | None) -> None:
        self.rid = rid  # the request that pinned it
        self.piece = piece
        self.layout = layout
        self.gathered = gathered
        self._session = session  # of a mapped block
        self._viewed: BlockBytes | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether the reader has to release the pin itself, because no view does."""
        return isinstance(self.piece.location, (m.InArena, m.InEngine)) and self._viewed is None

    def block_for(self, field: str, count: int, single: bool) -> BlockBytes:
        """The block to read `count` rows of `field` from; `single`: they are all rows of the result."""
        if self._session is None or not self._worth_viewing(field, count, single):
            return self.gathered
        if self._viewed is None:
            piece, lies = self.piece, self.piece.location
            assert isinstance(lies, m.InArena)  # blocks without a session lie elsewhere
            data = self._session.views.open(self.rid, piece.block, lies.arena, lies.offset, piece.nbytes)
            self._viewed = BlockBytes(data, self.layout, VIEW_NBYTES)
        return self._viewed

    def _worth_viewing(self, field: str, count: int, single: bool) -> bool:
        column = self.layout.column(field)
        if column is None or self.piece.nbytes <= SMALL_NBYTES:
            return False  # small blocks share pages with others
        if column.kind == OBJECTS:
            return len(column.parts) == 6 and column.parts[5][1] >= VIEW_NBYTES
        if not single:
            return False
        rows = max(1, self.layout.rows)
        nbytes = sum(c.parts[0][1] for c in (column, *column.children) if c.parts) * count // rows
        return nbytes >= VIEW_NBYTES and (count * VIEW_SHARE >= rows or nbytes >= LARGE_VIEW_NBYTES)


class LocatedRows:
    """An answer to a `Get`, its `payload`, and the pieces of it that lay `elsewhere`, which are here now.

    `own`: the caller wants memory of its own, never views.
    """

    def __init__(
        self, session: Session, reply: m.Located, payload: memoryview, elsewhere: Mapping[int, ReceivedBlock], own: bool
    ) -> None:
        self.reply = reply
        self._session = session
        self._payload = payload
        self._elsewhere = elsewhere
        self._own = own

    @cached_property
    def blocks(self) -> list[LocatedBlock]:
        """The memory of every piece."""
        layouts = [decode_layout(data) for data in self.reply.layouts]
        found = []
        for number, piece in enumerate(self.reply.pieces):
            if number in self._elsewhere:
                layout, data, _ = self._elsewhere[number]
                found.append(LocatedBlock(self.reply.rid, piece, layout, BlockBytes(data, layout, 0), None))
            else:
                found.append(self._block(piece, layout_of(piece, layouts)))
        return found

    def block(self, number: int) -> LocatedBlock:
        """The memory of one piece, which is here."""
        piece = self.reply.pieces[number]
        return self._block(piece, layout_of(piece, [decode_layout(data) for data in self.reply.layouts]))

    def _block(self, piece: m.Piece, layout: Layout) -> LocatedBlock:
        """A block that lies here."""
        rid = self.reply.rid
        if layout.nbytes > piece.nbytes:
            raise ProtocolError(f"a block of {piece.nbytes} bytes with a layout of {layout.nbytes}")
        match piece.location:
            case m.Inline(offset=offset):
                data = inline_bytes(self._payload, offset, piece.nbytes)
                return LocatedBlock(rid, piece, layout, BlockBytes(data, layout, 0), None)
            case m.InArena(arena=arena, offset=offset) if offset >= 0 and 0 <= arena < MAX_ARENAS:
                data = self._session.arenas[arena].shared[offset : offset + piece.nbytes]
                if len(data) < piece.nbytes:
                    raise ProtocolError(f"a block of {piece.nbytes} bytes at {offset}, beyond its arena")
                session = None if self._own else self._session
                return LocatedBlock(rid, piece, layout, BlockBytes(data, layout, -1), session)
        raise ProtocolError(f"a block that lies nowhere: {piece.location}")

    def pinned(self) -> list[int]:
        """The blocks whose pins the reader has to release itself, because no view does."""
        if "blocks" in self.__dict__:
            return [one.piece.block for one in self.blocks if one.is_pinned]
        return [piece.block for piece in self.reply.pieces if isinstance(piece.location, (m.InArena, m.InEngine))]

    def runs(self, part: m.Part) -> Numbers:
        """Where the rows of a part are said to lie, (k, 3) of (piece, first row in it, number of rows)."""
        if not {field.name for field in self.reply.schema}.issuperset(part.fields):
            raise ProtocolError(f"fields {part.fields} without a schema")
        return numbers_of(part.runs, 3)

    def is_sliced(self, piece: int) -> bool:
        """Whether of this piece only such parts of rows came as were asked for."""
        return piece in self._elsewhere and self._elsewhere[piece].is_sliced

    def values_nbytes(self) -> int:
        """How long it takes to decode the Python values of the rows, roughly, as the bytes copied meanwhile."""
        reply, nbytes = self.reply, 0
        names = [field.name for field in reply.schema if field.kind in (OBJECTS, MIXED)]
        for piece in reply.pieces[:MANY] if names else ():
            if 0 <= piece.layout < len(reply.layouts):
                layout = decode_layout(reply.layouts[piece.layout])
                columns = (layout.column(name) for name in names)
                messages = sum(column.parts[0][1] for column in columns if column and column.kind == OBJECTS)
                nbytes += messages * min(reply.count, layout.rows) // max(1, layout.rows)
        return nbytes + len(names) * reply.count * VALUE_NBYTES

    def alike(self) -> dict[tuple[CellKind, ...], list[int]]:
        """The positions of the rows whose fields are of the same kinds, for each of these."""
        columns: list[list[tuple[CellKind, ...]]] = []
        for part in self.reply.parts:
            table = self.runs(part)
            self.check(table)
            kinds = {piece: self._kinds(piece, part.fields) for piece in np.unique(table[:, 0]).tolist()}
            columns.append([kinds[piece] for piece in np.repeat(table[:, 0], table[:, 2]).tolist()])
        found: dict[tuple[CellKind, ...], list[int]] = {}
        for position, parts in enumerate(zip(*columns, strict=True)):
            found.setdefault(tuple(itertools.chain(*parts)), []).append(position)
        return found

    def _kinds(self, piece: int, fields: list[str]) -> tuple[CellKind, ...]:
        layout = self.blocks[piece].layout
        return tuple(column.cells() for column in map(layout.column, fields) if column is not None)

    def check(self, table: Numbers) -> None:
        """`ProtocolError` unless these runs are as many rows as the reply has, each in a block that is there."""
        if not (_is_one_run if len(table) == 1 else _are_runs)(table, self.reply.count, self.blocks):
            raise ProtocolError(f"runs that are not {self.reply.count} rows of {len(self.blocks)} blocks")

    def many(self, table: Numbers) -> LoneRows | SpreadRows | None:
        """The rows of these runs, where they are many short runs and all are there; None for any others."""
        if len(table) < MANY or self._elsewhere or self.reply.count > SHORT * len(table):
            return None
        pieces, firsts, counts = table.T
        if firsts.min() < 0 or pieces.min() < 0 or pieces.max() >= len(self.reply.pieces):
            return None
        if counts.min() < 1 or counts.max() > self.reply.count or int(counts.sum()) != self.reply.count:
            return None
        layouts = [piece.layout for piece in self.reply.pieces]
        if min(layouts) < 0 or max(layouts) >= len(self.reply.layouts):
            return None
        are_lone = np.array([template_of(layout) is not None for layout in self.reply.layouts])
        rows, pieces = row_numbers(table[:, 1:]), np.repeat(pieces, counts)
        alone = are_lone[layouts][pieces]
        if rows[alone].any():
            return None
        lone = self._lone(pieces[alone].tolist()) if alone.any() else None
        if alone.all() or (lone is None and alone.any()):
            return lone
        positions = np.flatnonzero(~alone)
        shares = self._shares(pieces[positions], rows[positions], positions)
        if shares is None:
            return None
        return SpreadRows(shares, None if lone is None else LoneShare(lone, np.flatnonzero(alone)))

    def _lone(self, pieces: list[int]) -> LoneRows | None:
        """Blocks of one row each, where they are alike."""
        wanted = [self.reply.pieces[number] for number in pieces]
        used = sorted({piece.layout for piece in wanted})
        found = sizes_of([self.reply.layouts[number] for number in used])
        if found is None:
            return None
        template, numbers = found
        return self._lying(template, numbers[np.searchsorted(used, [piece.layout for piece in wanted])], wanted)

    def _shares(self, pieces: Numbers, rows: Numbers, positions: Numbers) -> list[BlockShare] | None:
        """The rows of each block, at these positions of the result; None where that is a few rows of each only, or one
        is not there."""
        used = np.unique(pieces)
        if len(used) * SHORT > len(pieces):
            return None
        shares = []
        for number in used.tolist():
            piece = self.reply.pieces[number]
            block = self._block(piece, decode_layout(self.reply.layouts[piece.layout]))
            mine = pieces == number
            if rows[mine].max() >= block.layout.rows:
                return None
            shares.append(BlockShare(block.gathered, rows[mine], positions[mine]))
        return shares

    def _lying(self, template: Template, numbers: Numbers, pieces: list[m.Piece]) -> LoneRows | None:
        """Where these rows lie: all in arenas, or all in the payload."""
        lying = [(p.location.arena, p.location.offset) for p in pieces if isinstance(p.location, m.InArena)]
        if lying:
            arenas = sorted({arena for arena, _ in lying})
            if arenas[0] < 0 or arenas[-1] >= MAX_ARENAS:
                return None
            memories = [self._session.arenas[arena].shared for arena in arenas]
            homes = {arena: home for home, arena in enumerate(arenas)}
            lying = [(homes[arena], offset) for arena, offset in lying]
        else:
            memories = [np.frombuffer(self._payload, np.uint8)]
            lying = [(0, p.location.offset) for p in pieces if isinstance(p.location, m.Inline)]
        if len(lying) < len(pieces):
            return None
        try:
            homes_of_rows, offsets = np.array(lying, np.int64).T
            nbytes = np.array([piece.nbytes for piece in pieces], np.int64)
        except OverflowError:  # damaged: `blocks` says how
            return None
        limits = np.array([len(memory) for memory in memories], np.int64)[homes_of_rows]
        if offsets.min() < 0 or nbytes.min() < 0 or bool((nbytes > limits).any() or (offsets > limits - nbytes).any()):
            return None
        return LoneRows(template, numbers, memories, homes_of_rows, offsets, nbytes)


def _is_one_run(table: Numbers, count: int, blocks: list[LocatedBlock]) -> bool:
    """As `_are_runs`, ten microseconds faster."""
    piece, first, rows = table[0].tolist()
    return 0 <= piece < len(blocks) and 0 <= first < first + rows <= blocks[piece].layout.rows and rows == count


def _are_runs(table: Numbers, count: int, blocks: list[LocatedBlock]) -> bool:
    pieces, firsts, rows = table[:, 0], table[:, 1], table[:, 2]
    if not len(table) or pieces.min() < 0 or pieces.max() >= len(blocks) or firsts.min() < 0 or rows.min() < 1:
        return False
    limits = np.array([one.layout.rows for one in blocks])[pieces]
    return not bool((rows > limits - firsts).any()) and int(rows.sum()) == count
