"""Putting a saved state back, in steps: it is built beside the state in use, then takes its place at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.block_index import BlockEntry
from transfer_queue.controller.deadlines import NO_TIME
from transfer_queue.controller.leases import MAX_LEASE_S
from transfer_queue.controller.readiness import Returned
from transfer_queue.controller.redelivery import MAX_NUMBER
from transfer_queue.controller.saved_state import SavedController, SavedGroup, SavedReturn, SavedTable, read, refuse
from transfer_queue.controller.snapshot import sampler_name
from transfer_queue.controller.state import ControllerState
from transfer_queue.controller.table import Table
from transfer_queue.controller.taken import TaskSteps
from transfer_queue.controller.weight_versions import WeightVersions
from transfer_queue.errors import CheckpointCorrupt, DataLost, InvalidInput, StoreFull
from transfer_queue.groups import PoolCore
from transfer_queue.groups.consistency import is_consistent
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.wire import messages as m
from transfer_queue.wire.defects import answered

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
MAX_ROW = 1 << 31
SMALL_NBYTES = 64 << 10
PIECE = 1024  # objects made in one step
CELLS = 1 << 18  # looked at in one step
ROWS = 1 << 15


class NewState:
    """What was loaded so far; nobody sees it. `blocks`: the number of each saved block."""

    def __init__(self, replaces: ControllerState) -> None:
        self.replaces = replaces
        self.blocks: dict[int, int] = {}
        self.tables: dict[str, Table] = {}
        self.entries: dict[int, BlockEntry] = {}

    def discard(self) -> None:
        """What is still in it will not be used; its blocks are whose they were."""
        for table in self.tables.values():
            table.blocks.clear()
            self.replaces.cleared_partitions.add(table, {})
        self.replaces.cleared_partitions.hold(self.entries)


class Load(NamedTuple):
    ticket: Hashable
    rid: int
    blocks: list[int]
    steps: Steps[None]


class StateLoader:
    """The loads that are under way: one after the other. Every other request is served from the state in use, until
    the last step of a load replaces it. A small state is loaded within the request."""

    def __init__(self, state: ControllerState, loaded: Callable[[], None]) -> None:
        """`loaded` is called when the state was replaced."""
        self._state = state
        self._loaded = loaded
        self.loads: deque[Load] = deque()  # most of the time there are none

    def start(self, message: m.Restore, ticket: Hashable) -> m.Reply | None:
        """The answer, or None when it will appear in the outbox. Raises as `_load`."""
        payload = self._state.payloads.pop(ticket, memoryview(b""))
        draft = NewState(self._state)
        blocks = [one.block for one in message.blocks]
        load = Load(ticket, message.rid, blocks, _load(draft, payload, message.blocks))
        if self.loads or len(payload) > SMALL_NBYTES or len(message.blocks) > PIECE:
            self.loads.append(load)
            return None
        for _ in load.steps:
            pass
        self._take_over()
        return m.Done(message.rid)

    def _take_over(self) -> None:
        """The state is another one, that nobody has anything of."""
        self._state.groups.forget_holders()
        self._loaded()

    def replace(self, data: bytes | memoryview, blocks: dict[int, int]) -> None:
        """Replace the whole state at once; the saved blocks got the numbers in `blocks`. Who had some of the groups
        in it may still say so. Raises as `_load`."""
        draft = NewState(self._state)
        draft.blocks = blocks
        for _ in _load(draft, data, []):
            pass
        self._loaded()

    def step(self) -> None:
        """One step of the first load, if there is one."""
        if not self.loads:
            return
        load = self.loads[0]
        reply = answered(load.rid, "Restore", partial(self._advance, load))
        if reply is not None:
            self.loads.popleft()
            self._state.outbox.append((load.ticket, reply))

    def _advance(self, load: Load) -> m.Reply | None:
        try:
            next(load.steps)
        except StopIteration:
            self._take_over()
            return m.Done(load.rid)
        return None

    def forget(self, tickets: set[Hashable]) -> None:
        """The askers are gone: their loads change nothing."""
        for load in [one for one in self.loads if one.ticket in tickets]:
            self.loads.remove(load)
            load.steps.close()

    def lose(self, unit: int) -> None:
        """The blocks of a storage unit are gone: so are the loads that need them."""
        self._fail(lambda block: block >> m.UNIT_SHIFT == unit, f"storage unit {unit} was lost")

    def refuse(self, blocks: set[int]) -> None:
        """These blocks are gone, and so are the loads that need them."""
        self._fail(blocks.__contains__, "its storage unit began anew")

    def _fail(self, is_gone: Callable[[int], bool], why: str) -> None:
        for load in [one for one in self.loads if any(map(is_gone, one.blocks))]:
            self.forget({load.ticket})
            text = f"{why} while a checkpoint was loaded into it"
            self._state.outbox.append((load.ticket, m.Failed(load.rid, DataLost.code, text)))


def _load(draft: NewState, data: bytes | memoryview, refilled: list[m.Refilled]) -> Steps[None]:
    """Replace the whole state by a saved one, in steps; only the last one changes anything.

    All that was there before is gone then, its blocks are freed; requests that are parked stay so, or are answered from
    the new rows. New indexes are above those of both states. When anything does not fit, `CheckpointCorrupt`,
    `CheckpointUnsupported`, `InvalidInput` (another sampler) or `StoreFull` (too many rows) is raised and nothing has
    changed.
    """
    try:
        yield from _build(draft, data, refilled)
    finally:
        draft.discard()


def _build(draft: NewState, data: bytes | memoryview, refilled: list[m.Refilled]) -> Steps[None]:
    state = draft.replaces
    numbers: set[int] = set()
    for at in range(0, len(refilled), PIECE):
        part = refilled[at : at + PIECE]
        draft.blocks.update((one.saved, one.block) for one in part)
        numbers.update(one.block for one in part)
        yield
    if refilled and not len(draft.blocks) == len(numbers) == len(refilled):
        raise InvalidInput("a block occurs twice")
    saved = read(data)
    sampler = state.sampler
    if saved.sampler != sampler_name(sampler):
        raise InvalidInput(
            f"the checkpoint was saved with sampler {saved.sampler}, this service runs {sampler_name(sampler)}"
        )
    yield
    versions = WeightVersions.restored(saved.versions)
    steps = {name: TaskSteps.restored(one) for name, one in saved.steps.items()}
    pools = {name: PoolCore(one) for name, one in saved.pools.items()}
    if not all(is_consistent(pool) for pool in pools.values()):
        refuse("groups")
    if not saved.series.keys() <= {one.name for one in saved.tables}:
        refuse("series of partitions")
    for one in saved.tables:
        if one.name in draft.tables:
            refuse("partitions repeat")
        table = draft.tables[one.name] = Table(one.name, state.lineage.loads + 1, state.ledger)
        yield from _fill(draft, table, one, versions)
    last_numbers = (saved.next_index, saved.next_batch, saved.lock_numbers)
    if len(draft.entries) != len(draft.blocks) or not all(0 <= one < 1 << 62 for one in last_numbers):
        refuse("blocks or indexes do not add up")
    rows = sum(table.num_rows for table in draft.tables.values())
    if state.max_rows is not None and rows > state.max_rows:
        raise StoreFull(f"the checkpoint has {rows} rows, total_storage_size is {state.max_rows}")
    for parked in state.fetching.parked:  # their views: few, but each costs the rows
        waited = draft.tables.get(parked.message.partition)
        if waited is not None:
            waited.task(parked.message.task).view(tuple(parked.message.fields), waited)
            yield
    _load_sampler(sampler, saved.sampler_state)
    _switch(draft, saved, versions, steps)
    state.series.restore(saved.series)
    state.groups.restore(pools, saved.used_numbers)


def _load_sampler(sampler: BaseSampler, state: Any) -> None:
    if state is None:  # it was left out
        return
    before = sampler.save_checkpoint()
    try:
        sampler.load_checkpoint(state)
    except Exception as error:  # a sampler may be anybody's
        sampler.load_checkpoint(before)
        raise CheckpointCorrupt(f"{sampler_name(sampler)} does not take the saved state: {error!r}") from error


def _switch(draft: NewState, saved: SavedController, versions: WeightVersions, steps: dict[str, TaskSteps]) -> None:
    """Costs the partitions and the requests that wait, not the rows, but for those of units that are away."""
    state, fetching = draft.replaces, draft.replaces.fetching
    tables, draft.tables = draft.tables, {}
    entries, draft.entries = draft.entries, {}
    state.staleness.admissions.restore(versions, saved.admitted)
    before, gone = state.block_index.entries, list(state.tables.values())
    state.block_index.replace(entries)
    fetching.leases.clear()
    fetching.redelivery.clear()
    fetching.unreceived.clear()
    for table in gone:
        fetching.orphan(table)
    state.tables.clear()
    state.tables.update(tables)
    for table in gone:
        state.cleared_partitions.add(table, before)
    fetching.steps.restore(steps, saved.next_batch)
    fetching.leases.number_above(fetching.steps.last_lease)
    fetching.redelivery.resume(fetching.leases.now)
    for table in tables.values():
        table.away = state.units_away  # those of now: some came and went while the draft was made
        if state.units_away:
            table.withhold(table.live_slots())
        fetching.opened(table)
        for task in table.tasks.values():
            fetching.serve(table, task, list(task.views.values()))
    last = max((int(table.index[table.size - 1]) for table in tables.values() if table.size), default=-1)
    state.next_index = max(state.next_index, saved.next_index, last + 1)
    state.lineage.restored(saved.lineage)
    state.lock_numbers.go_on_above(saved.lock_numbers)


def _fill(draft: NewState, table: Table, saved: SavedTable, versions: WeightVersions) -> Steps[None]:
    index, unclaimed = _ints(saved.index), _ints(saved.unclaimed)
    rows = len(index)
    if len(saved.cells) != len(saved.fields):
        refuse(f"columns of {saved.name!r} differ in length")
    if rows and (index[0] < 0 or index[-1] >= 1 << 62 or not bool((index[1:] > index[:-1]).all())):
        refuse(f"row indexes of {saved.name!r} do not ascend")
    if not bool(((unclaimed >= 0) & (unclaimed < rows)).all()) or len(unclaimed) > rows:
        refuse(f"reserved rows of {saved.name!r}")
    if saved.cleared < 0 or saved.over < 0:
        refuse(f"cleared rows of {saved.name!r}")
    table.declared, table.cleared, table.over = saved.declared, saved.cleared, saved.over
    table.metadata, table.sizes = saved.metadata, saved.sizes
    table.unclaimed = unclaimed.tolist()
    if len(set(table.unclaimed)) != len(unclaimed):
        refuse(f"reserved rows of {saved.name!r}")
    yield
    table.give_room(2 * rows)
    table.index[:rows], table.alive[:rows] = index, True
    table.size = table.num_alive = rows
    yield
    yield from _add_keys_and_tags(draft.replaces, table, saved, versions)
    yield from _add_cells(draft, table, saved)
    lost = _ints(saved.lost)
    if not bool(((lost >= 0) & (lost < rows)).all()):
        refuse(f"lost rows of {saved.name!r}")
    table.lost.update(index[lost].tolist())
    yield
    _add_rewrites(table, saved)
    yield
    yield from _add_tasks(table, saved)


def _add_rewrites(table: Table, saved: SavedTable) -> None:
    cells, tags = {name: _ints(times) for name, times in saved.rewritten.items()}, _ints(saved.retagged)
    if any(len(times) != table.size for times in cells.values()) or len(tags) not in (0, table.size):
        refuse(f"rewritten cells of {table.name!r}")
    table.rewrites.restore(cells, tags, len(table.index))


def _add_tasks(table: Table, saved: SavedTable) -> Steps[None]:
    rows = table.size
    for name, flags in saved.consumed.items():
        if len(flags) != rows:
            refuse(f"consumption of {saved.name!r} by {name!r}")
        table.task(name).consume(np.flatnonzero(np.frombuffer(flags, np.uint8)))
        yield
    for name, places in saved.kept.items():
        kept, task = _ints(places), table.task(name)
        if not bool(((kept >= 0) & (kept < rows)).all()) or bool(task.consumed[kept].any()):
            refuse(f"rows of {saved.name!r} that are kept for {name!r}")
        task.reserve(np.unique(kept))
        yield
    for name, fates in saved.fates.items():
        if len(fates) != rows:
            refuse(f"what became of rows of {saved.name!r} for {name!r}")
        table.task(name).fates[:rows] = np.frombuffer(fates, np.uint8)
        yield
    for name, number in saved.stale.items():
        if number < 0:
            refuse(f"rows of {saved.name!r} that were too old for {name!r}")
        table.task(name).num_stale = number
    for name, returned in saved.returned.items():
        for at in range(0, len(returned), PIECE):
            _add_returned(table, name, returned[at : at + PIECE])
            yield
    for name, number in saved.max_deliver.items():
        if not 1 <= number < MAX_NUMBER:
            refuse(f"deliveries of {saved.name!r} to {name!r}")
        table.task(name).max_deliver = number


def _add_returned(table: Table, name: str, saved: list[SavedReturn]) -> None:
    task = table.task(name)
    for one in saved:
        at, is_late = one.position, one.delay_s > 0
        fits = 0 <= at < table.size and one.attempts >= 1 and 0 <= one.delay_s < MAX_LEASE_S
        if not fits or (one.dead and not task.consumed[at]) or (is_late and (task.consumed[at] or task.lease[at])):
            refuse(f"rows of {table.name!r} that came back to {name!r}")
        task.returned[at] = Returned(one.attempts, one.reason, NO_TIME, one.dead)
        if is_late:
            task.hold_back(np.array([at]), [one.delay_s])


def _add_keys_and_tags(
    state: ControllerState, table: Table, saved: SavedTable, versions: WeightVersions
) -> Steps[None]:
    """The lists of a table grow with its rows: the garbage collector looks through a new list that is long."""
    num_named = 0
    for keys, tags in zip_longest(saved.key_chunks(), saved.tag_chunks(), fillvalue=()):
        at = len(table.names)
        if len(keys) != len(tags) or at + len(keys) > table.size:
            break
        named = [(key, slot) for slot, key in enumerate(keys, at) if key is not None]
        table.keys.update(named)
        num_named += len(named)
        table.names += keys
        table.tags += tags
        slots = np.arange(at, len(table.names))
        table.log.touch(slots)
        yield
        if any(tags):
            table.any_tags = True
            state.staleness.restore(table, slots, versions)
            yield
    if len(table.names) != table.size or len(table.keys) != num_named:
        refuse(f"keys or tags of {saved.name!r} are too many or too few, or keys repeat")


def _add_cells(draft: NewState, table: Table, saved: SavedTable) -> Steps[None]:
    rows = table.size
    if any(len(pattern) != 2 * rows for pattern in saved.patterns):
        refuse(f"cells of {table.name!r}")
    number_of = {schema.name: number for number, schema in enumerate(saved.fields)}
    for number, group in enumerate(saved.groups, 1):
        if not group.fields or len(set(group.fields)) != len(group.fields) or not number_of.keys() >= set(group.fields):
            refuse(f"fields {group.fields} of {table.name!r}")
        ordered = sorted(number_of[name] for name in group.fields)  # registers fields in the order of their numbers
        table.check([saved.fields[one] for one in ordered])
        if table.group([saved.fields[one] for one in ordered]) != number:
            refuse(f"fields {group.fields} of {table.name!r} twice")
        yield
    if [field.schema for field in table.fields.values()] != saved.fields:
        refuse(f"fields of {table.name!r}")
    there = 0
    for number, pattern in enumerate(saved.cells):
        if not 0 <= pattern < len(saved.patterns):
            refuse(f"cells of {table.name!r}")
        table.cells[number, :rows] = np.frombuffer(saved.patterns[pattern], np.uint16)
        there += int(np.count_nonzero(table.cells[number, :rows]))
        yield
    placed = 0
    for number, group in enumerate(saved.groups, 1):
        placed += yield from _place(draft, table, number, group)
    if placed != there:
        refuse(f"cells of {table.name!r} that nobody wrote")


def _place(draft: NewState, table: Table, number: int, saved: SavedGroup) -> Steps[int]:
    """Locate the cells of one group and enter its blocks; returns how many cells there are."""
    runs, group = _ints(saved.runs, 4), table.groups[number]
    columns = [table.fields[name].number for name in group.fields]
    cells = np.zeros(table.size, np.int64)
    width = max(1, CELLS // len(columns))
    for at in range(0, table.size, width):
        cells[at : at + width] = (table.cells[columns, at : min(at + width, table.size)] == number).sum(axis=0)
        yield
    written = np.flatnonzero(cells)
    first, row, count = runs[:, 0], runs[:, 2], runs[:, 3]
    in_range = (count > 0) & (count <= table.size) & (row >= 0) & (row < MAX_ROW - count)
    if not bool(in_range.all()) or int(count.sum()) != len(written):
        refuse(f"places of {saved.fields} in {table.name!r}")
    yield
    block = np.empty(len(runs), np.int64)
    for at in range(0, len(runs), PIECE):
        block[at : at + PIECE] = _renumbered(runs[at : at + PIECE, 1].tolist(), draft.blocks)
        yield
    ends = np.cumsum(count)
    for at in range(0, len(written), ROWS):
        numbers = np.arange(at, min(at + ROWS, len(written)))
        run = np.searchsorted(ends, numbers, side="right")
        offset, slots = numbers - (ends - count)[run], written[at : at + ROWS]
        if not np.array_equal(first[run] + offset, slots):
            refuse(f"places of {saved.fields} in {table.name!r}")
        group.block[slots], group.row[slots] = block[run], row[run] + offset
        yield
    live = np.add.reduceat(cells[written], ends - count) if len(runs) else ends
    between = (table.index[first], table.index[first + count - 1]) if len(runs) else (ends, ends)
    yield from _enter(draft, table, number, np.stack([runs[:, 1], live, *between], axis=1), _ints(saved.blocks, 2))
    return int(live.sum())


def _enter(draft: NewState, table: Table, group: int, runs: NDArray[np.int64], known: NDArray[np.int64]) -> Steps[None]:
    """Enter the blocks of one group. `runs`: (saved block, live cells, first and last index of its rows); `known`:
    (saved block, cells it had)."""
    cells: dict[int, int] = {}
    between: dict[int, tuple[int, int]] = {}
    for at in range(0, len(runs), PIECE):
        for block, number, first, last in runs[at : at + PIECE].tolist():
            cells[block] = cells.get(block, 0) + number
            low, high = between.get(block, (first, last))
            between[block] = min(low, first), max(high, last)
        yield
    entered = 0
    for at in range(0, len(known), PIECE):
        for block, total in known[at : at + PIECE].tolist():
            live = cells.pop(block, 0)
            if not 0 < live <= total:
                refuse(f"blocks of {table.name!r}")
            entry = BlockEntry(total, table, group, *between[block])
            entry.live = live
            if draft.entries.setdefault(draft.blocks[block], entry) is not entry:
                refuse(f"block {block} belongs to several puts")
            table.blocks.add(draft.blocks[block])
            entered += 1
        yield
    if cells:
        refuse(f"blocks of {table.name!r}")


def _renumbered(saved: list[int], blocks: dict[int, int]) -> NDArray[np.int64]:
    try:
        return np.array([blocks[block] for block in saved], np.int64)
    except KeyError as error:
        refuse(f"block {error} is not there")


def _ints(data: memoryview, width: int = 0) -> NDArray[np.int64]:
    if len(data) % (8 * max(1, width)):
        refuse(f"an array of {len(data)} bytes")
    found = np.frombuffer(data, np.int64).copy()  # aligned
    return found.reshape(-1, width) if width else found
