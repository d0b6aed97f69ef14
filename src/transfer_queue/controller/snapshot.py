"""The controller's whole state as bytes, as of one instant. `restore` is the way back."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.block_index import BlockEntry
from transfer_queue.controller.readiness import RESERVED, Slots, Task
from transfer_queue.controller.saved_state import (
    CHUNK_ROWS,
    FORMAT,
    SavedController,
    SavedGroup,
    SavedReturn,
    SavedTable,
    encode,
)
from transfer_queue.controller.state import ControllerState
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.errors import SamplerFailed
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.wire import messages as m

log = logging.getLogger("transfer_queue.controller")


def capture(state: ControllerState, message: m.Snapshot, ticket: Hashable, session: bytes) -> m.Reply:
    """Export everything; no block is recycled until `session` releases them."""
    data, blocks = exported(state)
    state.payloads[ticket] = memoryview(data)
    state.captures.add((session, message.rid))
    return m.Captured(message.rid, np.array(blocks, np.int64).tobytes(), {})


def exported(state: ControllerState, strict: bool = True) -> tuple[bytes, list[int]]:
    """The state as of now, and the blocks it refers to. Costs time by rows and tags: nothing else runs meanwhile.

    Raises `SamplerFailed`; unless `strict`, what the sampler remembers is left out then.
    """
    try:
        remembered = sampler_state(state.sampler)
    except SamplerFailed as error:
        if strict:
            raise
        log.error("what the sampler remembers is not saved: %s", error)
        remembered = None
    saved = SavedController(
        FORMAT,
        state.next_index,
        sampler_name(state.sampler),
        remembered,
        [_saved_table(table, state.block_index.entries) for table in state.tables.values()],
        state.staleness.admissions.versions.saved(),
        state.staleness.admissions.tasks,
        state.lineage.saved(state.next_index),
        state.fetching.steps.saved(),
        {partition: pool.state for partition, pool in state.groups.pools.items()},
        state.series.members,
        state.groups.used,
        state.fetching.steps.next_number,
        state.lock_numbers.used,
    )
    return encode(saved), sorted(block for table in state.tables.values() for block in table.blocks)


def sampler_name(sampler: BaseSampler) -> str:
    return f"{type(sampler).__module__}:{type(sampler).__qualname__}"


def sampler_state(sampler: BaseSampler) -> Any:
    """What a sampler, which may be anybody's, remembers, as plain data. Raises `SamplerFailed`."""
    try:
        return msgspec.msgpack.decode(encode(sampler.save_checkpoint()))
    except Exception as error:
        raise SamplerFailed(f"{sampler_name(sampler)}.save_checkpoint gave no plain data: {error!r}") from error


def _saved_table(table: Table, entries: dict[int, BlockEntry]) -> SavedTable:
    blocks: dict[int, list[tuple[int, int]]] = {}
    for number in sorted(table.blocks):
        blocks.setdefault(entries[number].group, []).append((number, entries[number].total))
    live = table.live_slots()
    slots = live.tolist()
    rewritten, retagged = table.rewrites.of(live)
    patterns: dict[bytes, int] = {}
    cells = [patterns.setdefault(table.cells[f.number, live].tobytes(), len(patterns)) for f in table.fields.values()]
    known = [np.frombuffer(pattern, np.uint16) for pattern in patterns]
    groups = []
    for number, group in enumerate(table.groups[1:], 1):
        used = {cells[table.fields[name].number] for name in group.fields}
        written = np.flatnonzero(np.logical_or.reduce([known[one] == number for one in used]))
        runs = _runs(written, group.block[live[written]], group.row[live[written]])
        groups.append(SavedGroup(list(group.fields), _packed(np.array(blocks.get(number, []))), runs))
    return SavedTable(
        table.name,
        table.declared,
        table.metadata,
        _packed(table.index[live]),
        _packed(np.searchsorted(live, table.unclaimed)),
        _chunks(table.names, slots),
        _chunks(table.tags, slots),
        [field.schema for field in table.fields.values()],
        cells,
        [memoryview(pattern) for pattern in patterns],
        groups,
        {name: memoryview(task.consumed[live].tobytes()) for name, task in table.tasks.items()},
        {name: _returned(task, live) for name, task in table.tasks.items() if task.returned},
        _packed(np.searchsorted(table.index[live], sorted(table.lost))),
        table.sizes,
        table.cleared,
        {
            name: _packed(np.flatnonzero(task.lease[live] == RESERVED))
            for name, task in table.tasks.items()
            if RESERVED in task.lent
        },
        {name: memoryview(task.fates[live].tobytes()) for name, task in table.tasks.items() if task.fates[live].any()},
        {name: task.num_stale for name, task in table.tasks.items() if task.num_stale},
        table.over,
        {name: _packed(times) for name, times in rewritten.items()},
        _packed(retagged),
        {name: task.max_deliver for name, task in table.tasks.items() if task.max_deliver},
    )


def _returned(task: Task, live: Slots) -> list[SavedReturn]:
    places = np.searchsorted(live, list(task.returned)).tolist()
    pairs = zip(places, task.returned.items(), strict=True)
    return [SavedReturn(place, one.attempts, one.reason, one.dead, task.delay_of(slot)) for place, (slot, one) in pairs]


def _chunks(values: list[Any], slots: list[int]) -> list[memoryview]:
    parts = (slots[at : at + CHUNK_ROWS] for at in range(0, len(slots), CHUNK_ROWS))
    return [memoryview(encode([values[slot] for slot in part])) for part in parts]


def _packed(values: NDArray[Any]) -> memoryview:
    return memoryview(rows_bytes(values))


def _runs(positions: Slots, blocks: NDArray[np.int64], rows: NDArray[np.int32]) -> memoryview:
    if not len(positions):
        return memoryview(b"")
    breaks = np.flatnonzero((np.diff(positions) != 1) | (np.diff(blocks) != 0) | (np.diff(rows) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(starts, append=len(positions))
    return _packed(np.stack([positions[starts], blocks[starts], rows[starts], counts], axis=1))
