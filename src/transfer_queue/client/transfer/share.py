"""Storing what many cells hold once: within a batch, and with what was put into the partition before.

Large cells of a batch are named by prints, which read little of them. Cells of the partition with the same print are
compared byte by byte where this process can map them, and by SHA-256 where they lie on another host. Those that are the
same are shared; each of the others is stored once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transfer_queue.client.effects import Call, Notify, Offload, Operation, Together
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.located import LocatedRows
from transfer_queue.client.transfer.write import TargetRows, commit, filled_block, noted, store
from transfer_queue.codec.cells import are_same, cell_in, checked_row, digest_of
from transfer_queue.codec.column_cells import DistinctCells, distinct_cells, may_share
from transfer_queue.codec.filling import BlockPlan
from transfer_queue.codec.layout import Column
from transfer_queue.codec.plan import items_of, plan_batch, plan_objects
from transfer_queue.errors import CellsChanged, DeadlineExceeded, RowCleared, ServiceUnavailable
from transfer_queue.memory.bytes import Ints
from transfer_queue.schema import OBJECTS
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import Numbers, numbers_of

Places = dict[int, tuple[int, int]]  # of distinct cells, by their number: block and row
LOOK_S = 1.0  # how long another host may take for its digests: what it has is stored here again then


class SharedColumn(NamedTuple):
    """A column whose large cells are stored once each."""

    column: Column
    cells: DistinctCells


def store_shared(
    session: Session, plan: BlockPlan, rows: TargetRows, tags: list[m.Tags] | None
) -> Operation[m.Committed]:
    """As `store` of a planned batch; large cells that are the same are stored once.

    What lies in a storage engine is not shared.
    """
    columns: list[SharedColumn] = []
    if not session.engine:
        columns = yield Offload(lambda: _columns(plan), plan.nbytes)
    if not columns:
        return (yield from store(session, plan, rows, tags))
    deadline = time.monotonic() + session.timeout_s
    rest = plan.without({one.column.name for one in columns})
    found = yield from _found(session, rows.partition, columns)
    try:
        return (yield from _store(session, rest, columns, found, rows, tags, deadline))
    except CellsChanged:  # what was found was cleared meanwhile: this time nobody's cells are counted on
        return (yield from _store(session, rest, columns, [{} for _ in columns], rows, tags, deadline))


def _columns(plan: BlockPlan) -> list[SharedColumn]:
    values = dict(items_of(plan.batch))
    found = []
    for column in plan.columns:
        if may_share(column, plan.rows):
            cells = distinct_cells(values[column.name], column, plan.rows, plan.allow_pickle)
            if cells is not None:
                found.append(SharedColumn(column, cells))
    return found


# writing


def _store(
    session: Session,
    rest: BlockPlan,
    columns: Sequence[SharedColumn],
    found: Sequence[Places],
    rows: TargetRows,
    tags: list[m.Tags] | None,
    deadline: float,
) -> Operation[m.Committed]:
    """One commit of a block with the `rest`, of cells that were found, and of a new block for each column with others.
    What was filled is given up when that fails."""
    shared: list[m.SharedCells] = []
    try:
        for one, places in zip(columns, found, strict=True):
            shared += _there(one, places)
            new = [number for number in range(len(one.cells.cells)) if number not in places]
            if new:
                shared.append((yield from _new_block(session, one, new, rest.allow_pickle, deadline)))
        rows = rows._replace(shared=shared)
        if rest.columns:
            return (yield from store(session, rest, rows, tags))
        wait_s = max(0.0, deadline - time.monotonic())
        return noted(rows, (yield commit(session, rows, [], b"", -1, tags, wait_s=wait_s))[0])
    except BaseException:
        for cells in shared:
            if cells.is_new:
                yield Notify(m.Discard(cells.block))
        raise


def _there(one: SharedColumn, places: Places) -> list[m.SharedCells]:
    """Rows whose cells the partition has, by the block where they lie."""
    by_block: dict[int, list[int]] = {}
    for number, (block, _) in places.items():
        by_block.setdefault(block, []).append(number)
    field = one.column.schema()
    made = []
    for block, numbers in by_block.items():
        rows = _rows_with(one, numbers)
        lies = np.array([places[number][1] for number in one.cells.numbers[rows].tolist()], np.int64)
        made.append(m.SharedCells(field, block, rows.tobytes(), lies.tobytes(), False))
    return made


def _new_block(
    session: Session, one: SharedColumn, new: list[int], allow_pickle: bool, deadline: float
) -> Operation[m.SharedCells]:
    """A block with the distinct cells of these numbers."""
    values = [one.cells.values[number] for number in new]
    if one.column.kind == OBJECTS:
        plan = plan_objects(one.column.name, values, allow_pickle)
    else:
        plan = plan_batch({one.column.name: values}, len(values))
    block = yield from filled_block(session, plan, deadline)
    rows = _rows_with(one, new)
    places = np.searchsorted(new, one.cells.numbers[rows])
    prints = b"".join(one.cells.prints[number] for number in new)
    schema = one.column.schema()
    return m.SharedCells(schema, block, rows.tobytes(), places.tobytes(), True, plan.layout(), prints)


def _rows_with(one: SharedColumn, numbers: Sequence[int]) -> Ints:
    """The rows that have these distinct cells."""
    have = np.zeros(len(one.cells.cells), np.bool_)
    have[numbers] = True
    return np.flatnonzero(have[one.cells.numbers])


# looking


def _found(session: Session, partition: str, columns: Sequence[SharedColumn]) -> Operation[list[Places]]:
    """Which distinct cells of each column the partition has, and where."""
    asked = [
        Call(
            m.Get(
                session.next_rid(), partition, None, None, [one.column.name], False, prints=b"".join(one.cells.prints)
            )
        )
        for one in columns
    ]
    answers = yield Together(asked)
    found = []
    for one, (reply, payload) in zip(columns, answers, strict=True):
        located = LocatedRows(session, reply, payload, {}, own=True)
        try:
            found.append((yield from _compared(session, one, located)))
        finally:
            pinned = located.pinned()
            if pinned:
                yield Notify(m.Unpin(reply.rid, pinned))
    return found


def _compared(session: Session, one: SharedColumn, located: LocatedRows) -> Operation[Places]:
    """Those places of an answer whose cells are the same as ours."""
    reply = located.reply
    if not reply.count:
        return {}
    runs = numbers_of(reply.parts[0].runs, 3)
    wanted = numbers_of(reply.prints)
    away = np.array([isinstance(piece.location, m.Remote) for piece in reply.pieces])[runs[:, 0]]
    here = np.array([_is_here(piece.location) for piece in reply.pieces])[runs[:, 0]]
    nbytes = sum(one.cells.cells[number].nbytes for number in wanted[here].tolist())
    places: Places = yield Offload(lambda: _same_here(one, located, runs[here], wanted[here]), nbytes)
    left = [row for row in np.flatnonzero(away).tolist() if int(wanted[row]) not in places]
    if left:
        places |= yield from _same_elsewhere(session, one, reply, runs[left], wanted[left])
    return places


def _is_here(location: m.Location) -> bool:
    """Whether it can be looked at: not what was moved to a disk, which is not worth reading for this."""
    return isinstance(location, m.Inline) or (isinstance(location, m.InArena) and not location.digest)


def _same_here(one: SharedColumn, located: LocatedRows, runs: Numbers, wanted: Numbers) -> Places:
    places: Places = {}
    for (piece, row, _), number in zip(runs.tolist(), wanted.tolist(), strict=True):
        if number in places:
            continue
        block = located.block(piece).gathered
        column = block.layout.column(one.column.name)
        cell = None if column is None else cell_in(block, column, checked_row(block, row))
        if cell is not None and are_same(cell, one.cells.cells[number]):
            places[number] = located.reply.pieces[piece].block, row
    return places


def _same_elsewhere(
    session: Session, one: SharedColumn, reply: m.Located, runs: Numbers, wanted: Numbers
) -> Operation[Places]:
    """As `_same_here`, of blocks that their units have to digest. One that cannot, or is not heard, is passed over."""
    blocks = np.array([piece.block for piece in reply.pieces], np.int64)[runs[:, 0]]
    own = yield Offload(lambda: {n: digest_of(one.cells.cells[n]) for n in set(wanted.tolist())}, 1 << 30)
    places: Places = {}
    wait_s = min(LOOK_S, session.timeout_s)
    for unit in np.unique(blocks >> m.UNIT_SHIFT).tolist():
        mine = np.flatnonzero(blocks >> m.UNIT_SHIFT == unit)
        request = m.DigestCells(session.next_rid(), one.column.name, blocks[mine].tobytes(), runs[mine, 1].tobytes())
        try:
            answer = (yield Call(request, to=reply.units.get(unit, ""), wait_s=wait_s))[0]
        except (RowCleared, ServiceUnavailable, DeadlineExceeded):
            continue
        for place, digest in zip(mine.tolist(), answer.digests, strict=True):
            number = int(wanted[place])
            if digest == own[number]:
                places.setdefault(number, (int(blocks[place]), int(runs[place, 1])))
    return places
