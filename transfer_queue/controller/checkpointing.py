"""The controller's whole state as bytes, and back.

Blocks are named by number only. Loading gives every saved number another one, so the file knows nothing of storage
units. Arrays are little-endian bytes over the *positions* of a table: its live rows in ascending order of their index.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.admission import Admitted
from transfer_queue.controller.ledger import Entry
from transfer_queue.controller.readiness import RESERVED, Flags, Slots
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.controller.versions import SavedVersions, Versions
from transfer_queue.errors import CheckpointCorrupt, CheckpointUnsupported, InvalidInput, SamplerFailed, StoreFull
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.schema import FieldSchema
from transfer_queue.wire import messages as m
from transfer_queue.wire.messages import Tags

if TYPE_CHECKING:
    from transfer_queue.controller.machine import Controller

FORMAT = 1
MAX_ROW = 1 << 31


class SavedGroup(msgspec.Struct):
    """Fields written together. `blocks`: int64 (k, 2) of (block, cells it was written with); `runs`: int64 (k, 4) of
    (first position, block, first row in it, number of rows), ascending, of the positions with cells of this group."""

    fields: list[str]
    blocks: bytes
    runs: bytes


class SavedTable(msgspec.Struct):
    """One partition. `index` is int64, `unclaimed` int64 positions; `keys` and `tags` lie parallel to the positions.

    `cells` maps every field, in the order they were first written, to its entry of `patterns`: uint16 group numbers
    over the positions, 0 where the cell is absent; group n is `groups[n - 1]`. `consumed` has one byte per position.
    """

    name: str
    declared: int | None
    metadata: Tags
    index: bytes
    unclaimed: bytes
    keys: list[str | None]
    tags: list[Tags | None]
    fields: list[FieldSchema]
    cells: list[int]
    patterns: list[bytes]
    groups: list[SavedGroup]
    consumed: dict[str, bytes]


class SavedController(msgspec.Struct):
    format: int
    next_index: int
    sampler: str
    sampler_state: Any
    tables: list[SavedTable]
    versions: SavedVersions = msgspec.field(default_factory=SavedVersions)
    admitted: dict[str, Admitted] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SavedController).decode


def capture(controller: Controller, message: m.Snapshot, ticket: Hashable, session: bytes) -> m.Reply:
    """Export everything; no block is recycled until `session` releases them."""
    state, blocks = exported(controller)
    controller.payloads[ticket] = memoryview(state)
    controller.captures.add(session)
    return m.Captured(message.rid, np.array(blocks, np.int64).tobytes(), {})


def restore(controller: Controller, message: m.Restore, ticket: Hashable) -> m.Reply:
    """Replace everything by the state that came along."""
    blocks = {one.saved: one.block for one in message.blocks}
    if len(blocks) != len(message.blocks) or len(set(blocks.values())) != len(blocks):
        raise InvalidInput("a block occurs twice")
    restored(controller, controller.payloads.pop(ticket, memoryview(b"")), blocks)
    return m.Done(message.rid)


# saving


def exported(controller: Controller) -> tuple[bytes, list[int]]:
    """The state as of now, and the blocks it refers to. Costs time by rows and tags: nothing else runs meanwhile."""
    sampler = controller._fetching.sampler
    saved = SavedController(
        FORMAT,
        controller._next_index,
        _name(sampler),
        _sampler_state(sampler),
        [_saved_table(table, controller.ledger.entries) for table in controller.tables.values()],
        controller.staleness.admissions.versions.saved(),
        controller.staleness.admissions.tasks,
    )
    return _encode(saved), sorted(block for table in controller.tables.values() for block in table.blocks)


def _name(sampler: BaseSampler) -> str:
    return f"{type(sampler).__module__}:{type(sampler).__qualname__}"


def _sampler_state(sampler: BaseSampler) -> Any:
    """The state of a sampler, which may be anybody's, as plain data."""
    try:
        return msgspec.msgpack.decode(_encode(sampler.save_checkpoint()))
    except Exception as error:
        raise SamplerFailed(f"{_name(sampler)}.save_checkpoint gave no plain data: {error!r}") from error


def _saved_table(table: Table, entries: dict[int, Entry]) -> SavedTable:
    blocks: dict[int, list[tuple[int, int]]] = {}
    for number in sorted(table.blocks):
        blocks.setdefault(entries[number].group, []).append((number, entries[number].total))
    live = table.live_slots()
    slots = live.tolist()
    patterns: dict[bytes, int] = {}
    cells = [patterns.setdefault(table.cells[f.number, live].tobytes(), len(patterns)) for f in table.fields.values()]
    known = [np.frombuffer(pattern, np.uint16) for pattern in patterns]
    groups = []
    for number, group in enumerate(table.groups[1:], 1):
        used = {cells[table.fields[name].number] for name in group.fields}
        written = np.flatnonzero(np.logical_or.reduce([known[one] == number for one in used]))
        runs = _runs(written, group.block[live[written]], group.row[live[written]])
        groups.append(SavedGroup(list(group.fields), rows_bytes(np.array(blocks.get(number, []))), runs))
    return SavedTable(
        table.name,
        table.declared,
        table.metadata,
        rows_bytes(table.index[live]),
        rows_bytes(np.searchsorted(live, table.unclaimed)),
        [table.names[slot] for slot in slots],
        [table.tags[slot] for slot in slots],
        [field.schema for field in table.fields.values()],
        cells,
        list(patterns),
        groups,
        {name: (task.consumed | (task.lease == RESERVED))[live].tobytes() for name, task in table.tasks.items()},
    )


def _runs(positions: Slots, blocks: NDArray[np.int64], rows: NDArray[np.int32]) -> bytes:
    if not len(positions):
        return b""
    breaks = np.flatnonzero((np.diff(positions) != 1) | (np.diff(blocks) != 0) | (np.diff(rows) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(starts, append=len(positions))
    return rows_bytes(np.stack([positions[starts], blocks[starts], rows[starts], counts], axis=1))


# loading


def restored(controller: Controller, data: bytes | memoryview, blocks: dict[int, int]) -> None:
    """Replace the whole state by a saved one, whose blocks got the numbers in `blocks`.

    All that was there before is gone, its blocks are freed; requests that are parked stay so, or are answered from the
    new rows. New indexes are above those of both states. One step: when anything does not fit, `CheckpointCorrupt`,
    `CheckpointUnsupported`, `InvalidInput` (another sampler) or `StoreFull` (too many rows) is raised and nothing has
    changed.
    """
    saved = _decoded(data)
    sampler = controller._fetching.sampler
    if saved.sampler != _name(sampler):
        raise InvalidInput(f"the checkpoint was saved with sampler {saved.sampler}, this service runs {_name(sampler)}")
    entries: dict[int, Entry] = {}
    tables = {one.name: _table(one, blocks, entries) for one in saved.tables}
    if len(tables) != len(saved.tables) or len(entries) != len(blocks) or not 0 <= saved.next_index < 1 << 62:
        _refuse("partitions, blocks or indexes do not add up")
    versions = Versions.restored(saved.versions)
    rows = sum(table.num_rows for table in tables.values())
    if controller.max_rows is not None and rows > controller.max_rows:
        raise StoreFull(f"the checkpoint has {rows} rows, total_storage_size is {controller.max_rows}")
    _load_sampler(sampler, saved.sampler_state)
    controller.staleness.admissions.restore(versions, saved.admitted)
    _switch(controller, tables, entries)
    last = max((int(table.index[table.size - 1]) for table in tables.values() if table.size), default=-1)
    controller._next_index = max(controller._next_index, saved.next_index, last + 1)
    controller._retry_crowded()


def _refuse(reason: str) -> NoReturn:
    raise CheckpointCorrupt(f"the saved controller state is not consistent: {reason}")


def _decoded(data: bytes | memoryview) -> SavedController:
    try:
        saved = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, TypeError) as error:
        raise CheckpointCorrupt(f"not a saved controller state: {error}") from None
    if saved.format != FORMAT:
        raise CheckpointUnsupported(f"controller state of format {saved.format}, this version reads {FORMAT}")
    return saved


def _load_sampler(sampler: BaseSampler, state: Any) -> None:
    before = sampler.save_checkpoint()
    try:
        sampler.load_checkpoint(state)
    except Exception as error:  # a sampler may be anybody's
        sampler.load_checkpoint(before)
        raise CheckpointCorrupt(f"{_name(sampler)} does not take the saved state: {error!r}") from error


def _switch(controller: Controller, tables: dict[str, Table], entries: dict[int, Entry]) -> None:
    fetching = controller._fetching
    before = controller.ledger.entries
    controller.ledger.replace(entries)
    fetching.leases.clear()
    for table in controller.tables.values():
        fetching.orphan(table)
        controller.remains.add(table, before)
    controller.tables.clear()
    controller.tables.update(tables)
    controller.staleness.restored(tables)
    for table in tables.values():
        fetching.opened(table)
        for task in table.tasks.values():
            fetching.serve(table, task, list(task.views.values()))


def _table(saved: SavedTable, blocks: dict[int, int], entries: dict[int, Entry]) -> Table:
    index, unclaimed = _ints(saved.index), _ints(saved.unclaimed)
    rows = len(index)
    if len(saved.keys) != rows or len(saved.tags) != rows or len(saved.cells) != len(saved.fields):
        _refuse(f"columns of {saved.name!r} differ in length")
    if rows and (index[0] < 0 or index[-1] >= 1 << 62 or not bool((index[1:] > index[:-1]).all())):
        _refuse(f"row indexes of {saved.name!r} do not ascend")
    if len(np.unique(unclaimed)) != len(unclaimed) or not bool(((unclaimed >= 0) & (unclaimed < rows)).all()):
        _refuse(f"reserved rows of {saved.name!r}")
    table = Table(saved.name)
    table.declared, table.metadata = saved.declared, saved.metadata
    table.reserve(0, rows)
    table.index[:rows] = index
    table.unclaimed = unclaimed.tolist()
    table.tags = saved.tags
    table.any_tags = any(saved.tags)
    named = [position for position, key in enumerate(saved.keys) if key is not None]
    if named:
        table.name_rows(np.array(named), [key for key in saved.keys if key is not None])
    if len(table.keys) != len(named):
        _refuse(f"keys of {saved.name!r} repeat")
    _add_cells(table, saved, blocks, entries)
    for name, flags in saved.consumed.items():
        if len(flags) != rows:
            _refuse(f"consumption of {saved.name!r} by {name!r}")
        table.task(name).consume(np.flatnonzero(np.frombuffer(flags, np.uint8)))
    return table


def _add_cells(table: Table, saved: SavedTable, blocks: dict[int, int], entries: dict[int, Entry]) -> None:
    rows = table.size
    if any(len(pattern) != 2 * rows for pattern in saved.patterns):
        _refuse(f"cells of {table.name!r}")
    number_of = {schema.name: number for number, schema in enumerate(saved.fields)}
    for number, group in enumerate(saved.groups, 1):
        if not group.fields or len(set(group.fields)) != len(group.fields) or not number_of.keys() >= set(group.fields):
            _refuse(f"fields {group.fields} of {table.name!r}")
        ordered = sorted(number_of[name] for name in group.fields)  # registers fields in the order of their numbers
        table.check([saved.fields[one] for one in ordered])
        if table.group([saved.fields[one] for one in ordered]) != number:
            _refuse(f"fields {group.fields} of {table.name!r} twice")
    if [field.schema for field in table.fields.values()] != saved.fields:
        _refuse(f"fields of {table.name!r}")
    for number, pattern in enumerate(saved.cells):
        if not 0 <= pattern < len(saved.patterns):
            _refuse(f"cells of {table.name!r}")
        table.cells[number, :rows] = np.frombuffer(saved.patterns[pattern], np.uint16)
    placed = 0
    for number, group in enumerate(saved.groups, 1):
        placed += _place(table, number, group, blocks, entries)
    if placed != np.count_nonzero(table.cells[: len(table.fields), :rows]):
        _refuse(f"cells of {table.name!r} that nobody wrote")


def _place(table: Table, number: int, saved: SavedGroup, blocks: dict[int, int], entries: dict[int, Entry]) -> int:
    """Locate the cells of one group and enter its blocks; returns how many cells there are."""
    runs, group = _ints(saved.runs, 4), table.groups[number]
    columns = [table.fields[name].number for name in group.fields]
    mine: Flags = table.cells[columns, : table.size] == number
    written = np.flatnonzero(mine.any(axis=0))
    first, row, count = runs[:, 0], runs[:, 2], runs[:, 3]
    in_range = (count > 0) & (count <= table.size) & (row >= 0) & (row < MAX_ROW - count)
    if not bool(in_range.all()) or int(count.sum()) != len(written):
        _refuse(f"places of {saved.fields} in {table.name!r}")
    offset = np.arange(len(written)) - np.repeat(np.cumsum(count) - count, count)
    if not np.array_equal(np.repeat(first, count) + offset, written):
        _refuse(f"places of {saved.fields} in {table.name!r}")
    group.block[written] = np.repeat(_renumbered(runs[:, 1].tolist(), blocks), count)
    group.row[written] = np.repeat(row, count) + offset
    live = np.bincount(np.repeat(np.arange(len(runs)), count), weights=mine[:, written].sum(axis=0)).astype(np.int64)
    _enter(table, number, runs[:, 1].tolist(), live.tolist(), _ints(saved.blocks, 2), blocks, entries)
    return int(live.sum())


def _enter(
    table: Table,
    group: int,
    of_runs: list[int],
    live: list[int],
    known: NDArray[np.int64],
    blocks: dict[int, int],
    entries: dict[int, Entry],
) -> None:
    cells: dict[int, int] = {}
    for block, number in zip(of_runs, live, strict=True):
        cells[block] = cells.get(block, 0) + number
    totals = dict(known.tolist())
    if totals.keys() != cells.keys() or any(totals[block] < number for block, number in cells.items()):
        _refuse(f"blocks of {table.name!r}")
    for block, number in cells.items():
        entry = Entry(totals[block], table, group)
        entry.live = number
        if entries.setdefault(blocks[block], entry) is not entry:
            _refuse(f"block {block} belongs to several puts")
        table.blocks.add(blocks[block])


def _renumbered(saved: Sequence[int], blocks: dict[int, int]) -> NDArray[np.int64]:
    try:
        return np.array([blocks[block] for block in saved], np.int64)
    except KeyError as error:
        _refuse(f"block {error} is not there")


def _ints(data: bytes, width: int = 0) -> NDArray[np.int64]:
    if len(data) % (8 * max(1, width)):
        _refuse(f"an array of {len(data)} bytes")
    found = np.frombuffer(data, np.int64)
    return found.reshape(-1, width) if width else found
