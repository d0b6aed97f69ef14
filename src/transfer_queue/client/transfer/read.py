"""Getting rows: one round trip that locates and pins, then views or gathers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.client.dense import Pad, check_pad, to_dense
from transfer_queue.client.effects import Call, Notify, Offload, Operation
from transfer_queue.client.remarks import warn_once
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.remote import inline_bytes, layout_of, received
from transfer_queue.codec.assemble import Assembler
from transfer_queue.codec.collector import collector_pause
from transfer_queue.codec.layout import Layout, decode_layout
from transfer_queue.codec.rows import BlockBytes, Copier, row_numbers
from transfer_queue.errors import ProtocolError, RowCleared
from transfer_queue.memory.copy import Copies
from transfer_queue.schema import OBJECTS, FieldSchema
from transfer_queue.storage.shm import SMALL_NBYTES
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import Numbers, numbers_of

# Smaller reads are copied: they must not hold a whole block, and tidying up after a view costs the size of its block.
VIEW_NBYTES, VIEW_SHARE, LARGE_VIEW_NBYTES = 64 << 10, 8, 32 << 20
MAX_LOOKS = 3
FEW_ROWS = 64  # up to so many seldom make the 700 objects after which Python begins a collection
MAX_ARENAS = 1 << 16
RUN_NBYTES = 24  # of one (piece, first row, number of rows)


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
        return isinstance(self.piece.location, m.InArena) and self._viewed is None

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


def read(
    session: Session,
    requests: Sequence[m.Get],
    *,
    copy: bool = False,
    out: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    dense: bool = False,
    pad: Pad | None = None,
    located: tuple[m.Located, memoryview] | None = None,
) -> Operation[TensorDict]:
    """The rows of all requests, one after the other, as a TensorDict whose batch size is their number.

    `located` is the answer to the first request where it came already.

    Whole runs are views unless `copy`; `out` gives fields preallocated dense tensors to fill, `device` is where the
    result goes. With `dense` or `pad` the result holds no nested tensors, see `to_dense`.
    """
    check_pad(pad)
    replies: list[tuple[m.Located, list[LocatedBlock]]] = []
    own = copy or bool(out)
    for request in requests:
        replies.append((yield from _located(session, request, own, located)))
        located = None
    gathers = own or any(len(part.runs) > RUN_NBYTES for reply, _ in replies for part in reply.parts)
    nbytes = sum(piece.nbytes for reply, _ in replies for piece in reply.pieces) if gathers else 0
    name_row = _names([(request, reply.count) for request, (reply, _) in zip(requests, replies, strict=True)])
    found: TensorDict = yield Offload(lambda: _assembled(session, replies, out, name_row), nbytes)
    if device is not None:
        found = found.to(device)
    for reply, blocks in replies:
        pinned = [one.piece.block for one in blocks if one.is_pinned]
        if pinned:
            yield Notify(m.Unpin(reply.rid, pinned))
    if dense or pad is not None:
        found = yield Offload(lambda: to_dense(found, pad), sum(p.nbytes for reply, _ in replies for p in reply.pieces))
    return found


def _names(parts: Sequence[tuple[m.Get, int]]) -> Callable[[int], str]:
    """What row number so and so of the result is called in an error: by its key or global index where it is known.

    `parts`: each request and how many rows it gave. It holds none of their memory.
    """

    def name(position: int) -> str:
        for request, count in parts:
            if position >= count:
                position -= count
                continue
            if request.keys is not None and len(request.keys) == count:
                return f"row {request.keys[position]!r}"
            if request.rows is not None:
                return f"row {numbers_of(request.rows)[position]}"
            break
        return f"row {position} of the result"

    return name


def _located(
    session: Session, request: m.Get, own: bool, answer: tuple[m.Located, memoryview] | None
) -> Operation[tuple[m.Located, list[LocatedBlock]]]:
    """Where the rows are, and their blocks as memory of this process. Looks again when blocks moved meanwhile."""
    looks = MAX_LOOKS
    while True:
        reply, payload = answer or (yield Call(request))
        answer = None
        if reply.note:
            warn_once(f"kv_batch_get of {request.partition!r}", reply.note)
        try:
            elsewhere = yield from received(session, reply)
            layouts = [decode_layout(data) for data in reply.layouts]
            blocks = []
            for number, piece in enumerate(reply.pieces):
                if number in elsewhere:
                    layout, data = elsewhere[number]
                    blocks.append(LocatedBlock(reply.rid, piece, layout, BlockBytes(data, layout, 0), None))
                else:
                    blocks.append(_located_block(session, reply.rid, piece, layout_of(piece, layouts), payload, own))
        except RowCleared:
            looks -= 1
            if not looks:
                raise
            pinned = [piece.block for piece in reply.pieces if isinstance(piece.location, m.InArena)]
            if pinned:
                yield Notify(m.Unpin(reply.rid, pinned))
            request = msgspec.structs.replace(request, rid=session.next_rid())
        else:
            return reply, blocks


def _located_block(
    session: Session, rid: int, piece: m.Piece, layout: Layout, payload: memoryview, own: bool
) -> LocatedBlock:
    """The memory of one piece of this host: in the payload, or mapped."""
    if layout.nbytes > piece.nbytes:
        raise ProtocolError(f"a block of {piece.nbytes} bytes with a layout of {layout.nbytes}")
    match piece.location:
        case m.Inline(offset=offset):
            data = inline_bytes(payload, offset, piece.nbytes)
            return LocatedBlock(rid, piece, layout, BlockBytes(data, layout, 0), None)
        case m.InArena(arena=arena, offset=offset) if offset >= 0 and 0 <= arena < MAX_ARENAS:
            data = session.arenas[arena].shared[offset : offset + piece.nbytes]
            if len(data) < piece.nbytes:
                raise ProtocolError(f"a block of {piece.nbytes} bytes at {offset}, beyond its arena")
            return LocatedBlock(rid, piece, layout, BlockBytes(data, layout, -1), None if own else session)
    raise ProtocolError(f"a block that lies nowhere: {piece.location}")


def _assembled(
    session: Session,
    replies: list[tuple[m.Located, list[LocatedBlock]]],
    out: Mapping[str, torch.Tensor] | None,
    name_row: Callable[[int], str],
) -> TensorDict:
    copies = Copies(session.mover)
    copier = Copier(session.pool.allocate, copies.copy, copies.take, copies.collect)
    assembler = Assembler(copier, session.allow_pickle, out, name_row)
    schema = {field.name: field for field in replies[0][0].schema}
    if not schema:
        return TensorDict({}, batch_size=[0])
    count = sum(reply.count for reply, _ in replies)
    with collector_pause if count > FEW_ROWS else nullcontext():
        if len(replies) == 1:
            content = _fields(assembler, schema, *replies[0])
        else:
            content = _joined_fields(assembler, schema, replies)
    copies.run()
    return new_tensordict(content, count)


def _fields(
    assembler: Assembler, schema: dict[str, FieldSchema], reply: m.Located, blocks: list[LocatedBlock]
) -> dict[str, Any]:
    content: dict[str, Any] = dict.fromkeys(schema)
    for part in reply.parts:
        table = _runs(part, reply, blocks)
        if len(table) > 1 and table[0, 0] == table[-1, 0] and bool((table[:, 0] == table[0, 0]).all()):
            block, rows = blocks[int(table[0, 0])].gathered, row_numbers(table[:, 1:])
            found = {name: assembler.scattered(schema[name], block, rows) for name in part.fields}
            content |= found
            left = [name for name, value in found.items() if value is None]
        else:
            left = part.fields
        if left:
            _add_runs(assembler, schema, blocks, table, left, content)
    if any(value is None for value in content.values()):
        raise ProtocolError("a reply without some of its fields")
    return content


def _add_runs(
    assembler: Assembler,
    schema: dict[str, FieldSchema],
    blocks: list[LocatedBlock],
    table: Numbers,
    names: list[str],
    content: dict[str, Any],
) -> None:
    """The fields `names`, run by run."""
    runs = table.tolist()
    single = len(runs) == 1
    gathered = [] if single else [(blocks[p].gathered, first, n) for p, first, n in runs]
    for name in names:
        located = gathered
        if single or (schema[name].kind == OBJECTS and _has_buffers(name, blocks, runs)):
            located = [(blocks[p].block_for(name, n, single), first, n) for p, first, n in runs]
        content[name] = assembler.field(schema[name], located)


def _has_buffers(field: str, blocks: list[LocatedBlock], runs: list[list[int]]) -> bool:
    """Whether some values of an objects column have bytes outside their messages, which may be worth a view."""
    columns = (blocks[piece].layout.column(field) for piece in {piece for piece, _, _ in runs})
    return any(column is not None and len(column.parts) == 6 for column in columns)


def _runs(part: m.Part, reply: m.Located, blocks: list[LocatedBlock]) -> Numbers:
    """Where the rows of a part lie: as many as the reply has, each in a block that is there."""
    table = numbers_of(part.runs, 3)
    if not (_is_one_run if len(table) == 1 else _are_runs)(table, reply.count, blocks):
        raise ProtocolError(f"runs that are not {reply.count} rows of {len(blocks)} blocks")
    if not {field.name for field in reply.schema}.issuperset(part.fields):
        raise ProtocolError(f"fields {part.fields} without a schema")
    return table


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


def _joined_fields(
    assembler: Assembler, schema: dict[str, FieldSchema], replies: list[tuple[m.Located, list[LocatedBlock]]]
) -> dict[str, Any]:
    """The rows of several partitions, one after the other."""
    located: dict[str, list[tuple[BlockBytes, int, int]]] = {name: [] for name in schema}
    for reply, blocks in replies:
        for field in reply.schema:
            schema[field.name] = _merged(schema.get(field.name), field)
        for part in reply.parts:
            runs = _runs(part, reply, blocks).tolist()
            for name in part.fields:
                located[name] += [(blocks[p].block_for(name, n, False), first, n) for p, first, n in runs]
    return {name: assembler.field(field, located[name]) for name, field in schema.items()}


def _merged(known: FieldSchema | None, field: FieldSchema) -> FieldSchema:
    if known is None:
        raise ProtocolError(f"field {field.name!r} was not in the first of several replies")
    return known.merged(field)


def new_tensordict(content: dict[str, Any], count: int) -> TensorDict:
    """A TensorDict of checked columns; the public constructor checks again, 30 microseconds a time."""
    return TensorDict._new_unsafe(content, batch_size=torch.Size([count]))
