"""Getting rows: one round trip that locates and pins, then views or gathers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.arguments import flag
from transfer_queue.client.dense import Pad, check_pad, has_nested, to_dense
from transfer_queue.client.effects import Call, Notify, Offload, Operation, Trying
from transfer_queue.client.remarks import warn_once
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.located import LocatedBlock, LocatedRows
from transfer_queue.client.transfer.on_device import device_here, on_device
from transfer_queue.client.transfer.parts import sliced_fields
from transfer_queue.client.transfer.remote import lies_elsewhere, received
from transfer_queue.codec.assemble import VALUES, Assembler, Decoding
from transfer_queue.codec.collector import collector_pause
from transfer_queue.codec.plan import items_of
from transfer_queue.codec.rows import BlockBytes, Copier, row_numbers
from transfer_queue.codec.select import NO_SLICES
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import DeadlineExceeded, InvalidInput, ProtocolError, RowCleared
from transfer_queue.memory.copy import Copies
from transfer_queue.schema import NESTED, OBJECTS, FieldSchema
from transfer_queue.storage.transports import NotReached
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import Numbers, numbers_of

MAX_LOOKS = 3  # at the same blocks
FEW = 64  # up to so many rows and fields seldom make the 700 objects after which Python begins a collection
RUN_NBYTES = 24  # of one (piece, first row, number of rows)


def read(
    session: Session,
    requests: Sequence[m.Get],
    *,
    copy: bool = False,
    out: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    dense: bool = False,
    pad: Pad | None = None,
    slices: Mapping[str, Slice] = NO_SLICES,
    located: tuple[m.Located, memoryview] | None = None,
    decoding: Decoding = VALUES,
    found_rows: Sequence[LocatedRows] = (),
    most_sent: int | None = None,
) -> Operation[TensorDict]:
    """The rows of all requests, one after the other, as a TensorDict whose batch size is their number.

    `located` is the answer to the first request where it came already, `found_rows` has what the first ones located.

    Whole runs are views unless `copy`; `out` gives fields preallocated dense tensors to fill, `device` is where the
    result goes. With `dense` or `pad` the result holds no nested tensors, see `to_dense`. Of fields in `slices` only
    such parts of the rows are read. `decoding`: what Python values are made of. `most_sent`: bytes that may lie
    elsewhere, see `received`.
    """
    check_pad(pad)
    copy, dense, out = flag(copy, "copy"), flag(dense, "dense"), _targets(out)
    where = None if device is None else device_here(device)
    if slices and out and not slices.keys().isdisjoint(out):
        raise InvalidInput(f"out takes whole rows, and parts of rows of {sorted(slices.keys() & out)} are asked for")
    replies = list(found_rows)
    own = copy or bool(out)
    for request in requests[len(replies) :]:
        replies.append((yield from located_rows(session, request, own, slices, located, most_sent)))
        located = None
    gathers = own or any(len(part.runs) > RUN_NBYTES for one in replies for part in one.reply.parts)
    nbytes = sum(piece.nbytes for one in replies for piece in one.reply.pieces)
    name_row = _names([(request, one.reply.count) for request, one in zip(requests, replies, strict=True)])
    plain = dense and pad is None
    spilled = [piece for one in replies for piece in session.spilled.unknown(one.reply.pieces)]
    work = functools.partial(_assembled, session, replies, out, name_row, plain, spilled, slices, decoding)
    decoded = sum(one.values_nbytes() for one in replies)
    found: TensorDict = yield Offload(work, decoded + (nbytes if gathers or spilled else 0))
    if where is not None:
        found = yield Offload(lambda: on_device(found, where, session.mover), nbytes if where.type != "cpu" else 0)
    for one in replies:
        pinned = one.pinned()
        if pinned:
            yield Notify(m.Unpin(one.reply.rid, pinned))
    if pad is not None or (dense and has_nested(found)):
        found = yield Offload(lambda: to_dense(found, pad), nbytes)
    return found


def _targets(out: Any) -> Mapping[str, torch.Tensor]:
    """The tensors to fill, by field. Raises `InvalidInput` for what is no mapping."""
    if out is None:
        return {}
    if isinstance(out, TensorDictBase):
        return dict(items_of(out))
    if not isinstance(out, Mapping):
        raise InvalidInput(f"out is a dict of a tensor for each field, got {type(out).__qualname__}")
    return out


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
            if request.rows is not None and len(request.rows) == 8 * count:
                return f"row {numbers_of(request.rows)[position]}"
            break
        return f"row {position} of the result"

    return name


def located_rows(
    session: Session,
    request: m.Get,
    own: bool = False,
    slices: Mapping[str, Slice] = NO_SLICES,
    answer: tuple[m.Located, memoryview] | None = None,
    most_sent: int | None = None,
) -> Operation[LocatedRows]:
    """Where the rows are, pinned, with what lay elsewhere. Looks again when blocks moved meanwhile, as long as they lie
    in others each time: somebody writes them faster than they are found. Raises `DeadlineExceeded` if that goes on.
    """
    looks, before, deadline = 0, frozenset[int](), time.monotonic() + session.timeout_s
    while True:
        reply, payload = answer or (yield Call(request))
        answer = None
        if reply.note:
            warn_once(f"kv_batch_get of {request.partition!r}", reply.note)
        try:
            elsewhere = {}
            if lies_elsewhere(reply):
                elsewhere = yield Trying(received(session, request, reply, slices, most_sent))
        except (RowCleared, NotReached) as error:
            blocks = frozenset(piece.block for piece in reply.pieces)
            looks, before = (looks + 1 if blocks == before else 1), blocks
            if looks == MAX_LOOKS:
                raise
            if time.monotonic() > deadline:
                text = f"the rows lay elsewhere each time they were read, for {session.timeout_s:g} s"
                raise DeadlineExceeded(text) from error
            pinned = [piece.block for piece in reply.pieces if isinstance(piece.location, (m.InArena, m.InEngine))]
            if pinned:
                yield Notify(m.Unpin(reply.rid, pinned))
            request = msgspec.structs.replace(request, rid=session.next_rid())
        else:
            return LocatedRows(session, reply, payload, elsewhere, own)


def _assembled(
    session: Session,
    replies: list[LocatedRows],
    out: Mapping[str, torch.Tensor] | None,
    name_row: Callable[[int], str],
    plain: bool,
    spilled: list[m.Piece],
    slices: Mapping[str, Slice],
    decoding: Decoding,
) -> TensorDict:
    for piece in spilled:
        assert isinstance(piece.location, m.InArena)
        session.spilled.check(piece.block, piece.location, piece.nbytes)
    copies = Copies(session.mover)
    copier = Copier(session.pool.allocate, copies.copy, copies.take, copies.collect, copies.run)
    assembler = Assembler(copier, session.allow_pickle, out, name_row, plain, decoding)
    schema = {field.name: field for field in replies[0].reply.schema}
    if not schema:
        return TensorDict({}, batch_size=[0])
    for name in out or ():
        if name not in schema or schema[name].kind in (OBJECTS, NESTED):
            raise InvalidInput(f"out has {name!r}, which is not among the fields of tensors that are read")
    count = sum(one.reply.count for one in replies)
    parts = {name: part for name, part in slices.items() if name in schema}
    content = sliced_fields(parts, replies, copier, plain) if parts else {}
    with collector_pause if max(count, len(schema)) > FEW else nullcontext():
        if len(replies) == 1:
            content |= _fields(assembler, schema, replies[0], parts)
        else:
            content |= _joined_fields(assembler, schema, replies, parts)
    copies.run()
    return new_tensordict({name: content[name] for name in schema}, count)


def _fields(
    assembler: Assembler, schema: dict[str, FieldSchema], located: LocatedRows, apart: Collection[str]
) -> dict[str, Any]:
    """The values of fields, but for those that are read apart."""
    content: dict[str, Any] = {name: None for name in schema if name not in apart}
    for part in located.reply.parts:
        table, names = located.runs(part), [name for name in part.fields if name not in apart]
        content |= _in_one_pass(assembler, [schema[name] for name in names], located, table)
        left = [name for name in names if content[name] is None]
        if left:
            located.check(table)
            _add_runs(assembler, schema, located.blocks, table, left, content)
    if any(value is None for value in content.values()):
        raise ProtocolError("a reply without some of its fields")
    return content


def _in_one_pass(
    assembler: Assembler, fields: list[FieldSchema], located: LocatedRows, table: Numbers
) -> dict[str, Any]:
    """Those of the fields that need no look at each run: rows that lie anywhere in one block, or in many pieces."""
    if len(table) < 2:
        return {}
    if table[0, 0] != table[-1, 0] or (table[:, 0] != table[0, 0]).any():
        rows = located.many(table)
        return {} if rows is None else {field.name: assembler.many(field, rows) for field in fields}
    located.check(table)
    block, scattered = located.blocks[int(table[0, 0])].gathered, row_numbers(table[:, 1:])
    return {field.name: assembler.scattered(field, block, scattered) for field in fields}


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


def _joined_fields(
    assembler: Assembler, schema: dict[str, FieldSchema], replies: list[LocatedRows], apart: Collection[str]
) -> dict[str, Any]:
    """The rows of several partitions, one after the other."""
    located: dict[str, list[tuple[BlockBytes, int, int]]] = {name: [] for name in schema}
    for one in replies:
        for field in one.reply.schema:
            schema[field.name] = _merged(schema.get(field.name), field)
        for part in one.reply.parts:
            table = one.runs(part)
            one.check(table)
            for name in part.fields:
                located[name] += [(one.blocks[p].block_for(name, n, False), first, n) for p, first, n in table.tolist()]
    return {name: assembler.field(field, located[name]) for name, field in schema.items() if name not in apart}


def _merged(known: FieldSchema | None, field: FieldSchema) -> FieldSchema:
    if known is None:
        raise ProtocolError(f"field {field.name!r} was not in the first of several replies")
    return known.merged(field)


def new_tensordict(content: dict[str, Any], count: int) -> TensorDict:
    """A TensorDict of checked columns; the public constructor checks again, 30 microseconds a time."""
    return TensorDict._new_unsafe(content, batch_size=torch.Size([count]))
