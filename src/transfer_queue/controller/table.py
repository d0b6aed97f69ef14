"""One partition: rows, keys, tags, fields, and where every cell lies.

Rows occupy slots in ascending order of their global index. A cell holds the number of the *group* that wrote it (0:
absent): the set of fields that were put together. A group knows block and row for every slot, so fields written
together share one location, and a put of 64 fields costs little more than one of 1. Slots of cleared rows are dropped
when they are the majority.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller import single_rows
from transfer_queue.controller.changes import ChangeLog
from transfer_queue.controller.cleared_cells import CellCounts, counted
from transfer_queue.controller.content_index import ContentIndex
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.readiness import Flags, Slots, Task, resized
from transfer_queue.controller.recent import Arrivals
from transfer_queue.controller.rewrites import Rewrites
from transfer_queue.controller.row_versions import RowVersions
from transfer_queue.errors import InvalidInput, SchemaConflict
from transfer_queue.schema import FieldSchema
from transfer_queue.wire.messages import UNIT_SHIFT, Changes, Tags

MIN_CAPACITY = 64
SHRINK_SLOTS = 4096
MAX_GROUPS = 65_535

Released = list[tuple[int, int]]
MAX_INDEX = (1 << 63) - 1


class Field(NamedTuple):
    number: int
    schema: FieldSchema


class ColumnGroup:
    """Fields that were put together, and where each row of theirs lies."""

    def __init__(self, fields: tuple[str, ...], capacity: int) -> None:
        self.fields = fields
        self.block: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.row: NDArray[np.int32] = np.zeros(capacity, np.int32)


class LocatedCells(NamedTuple):
    """Fields that lie alike on the rows asked for: block and row of each."""

    fields: list[str]
    blocks: NDArray[np.int64]
    rows: NDArray[np.int32]


class Table:
    """`away`: storage units whose blocks cannot be read now; the set is that of all tables."""

    def __init__(self, name: str, loads: int = 0, ledger: Ledger | None = None, away: Set[int] = frozenset()) -> None:
        self.name = name
        self.ledger = ledger
        self.away = away
        self.loads = loads  # see `lineage`
        self.declared: int | None = None
        self.sizes: dict[str, int] = {}  # how many rows will have a field, where that was declared
        self.metadata: Tags = {}
        self.size = 0  # slots in use
        self.unclaimed: list[int] = []  # slots of rows reserved at creation, highest first
        self.keys: dict[str, int] = {}
        self.names: list[str | None] = []
        self.tags: list[Tags | None] = []
        self.any_tags = False  # whether a row ever had some
        self.fields: dict[str, Field] = {}
        self.tasks: dict[str, Task] = {}
        self.lost: set[int] = set()  # indexes of rows that lost cells
        self.blocks: set[int] = set()  # those with live cells; kept by the block_index
        self.contents = ContentIndex()
        self.arrivals = Arrivals()
        self.num_alive = 0
        self.cleared = 0  # rows that were there and are cleared, since `begin_round`
        self.cleared_cells: CellCounts = np.zeros(0, np.int64)  # by field
        self.life = -1  # the index of the row that was to come next as it began; -1 for one that was loaded
        self.over = 0  # how many of those that were there since then are of rounds that are over: the others come after
        self.index: NDArray[np.int64] = np.zeros(MIN_CAPACITY, np.int64)
        self.alive: Flags = np.zeros(MIN_CAPACITY, np.bool_)
        self.cells: NDArray[np.uint16] = np.zeros((8, MIN_CAPACITY), np.uint16)
        self.log = ChangeLog(MIN_CAPACITY)
        self.row_versions = RowVersions(MIN_CAPACITY)
        self.rewrites = Rewrites()
        self.groups: list[ColumnGroup] = [ColumnGroup((), MIN_CAPACITY)]  # group 0 stands for absent
        self._group_numbers: dict[tuple[str, ...], int] = {}

    # rows

    def reserve(self, first_index: int, count: int) -> None:
        """Rows that exist from the start, to be claimed by the first writers."""
        slots = self._append(first_index, count)
        self.unclaimed = slots[::-1].tolist()

    def add(self, first_index: int, count: int) -> Slots:
        """Slots of `count` rows: reserved ones first, then new ones with indexes from `first_index`."""
        claimed = [self.unclaimed.pop() for _ in range(min(count, len(self.unclaimed)))]
        new = self._append(first_index, count - len(claimed))
        return np.concatenate([np.array(claimed, np.int64), new]) if claimed else new

    def _append(self, first_index: int, count: int) -> Slots:
        start, end = self.size, self.size + count
        if end > len(self.index):
            self._resize(None, max(MIN_CAPACITY, 2 * end))
        self.index[start:end] = first_index if count == 1 else np.arange(first_index, first_index + count)
        self.alive[start:end] = True
        self.names += [None] * count
        self.tags += [None] * count
        self.size = end
        self.num_alive += count
        return np.arange(start, end)

    @property
    def last_index(self) -> int:
        """The index of the row that came last, as far as that is known: cleared ones may be forgotten. -1 for none."""
        return int(self.index[self.size - 1]) if self.size else -1

    @property
    def num_rows(self) -> int:
        """Rows that someone claimed."""
        return self.num_alive - len(self.unclaimed)

    @property
    def is_whole(self) -> bool:
        """Whether all rows that it is to get were there, cleared ones too; without a declared size, whether any was."""
        there = self.num_rows + self.cleared
        return there > 0 if self.declared is None else there >= self.declared

    @property
    def is_filled(self) -> bool:
        """Whether all rows were there that it was declared to get."""
        return self.declared is not None and self.is_whole

    @property
    def is_used_up(self) -> bool:
        """Whether all that it was to get were there, and all were cleared: the next row begins a new round."""
        return self.cleared > 0 and self.is_spent

    @property
    def is_spent(self) -> bool:
        """Whether no row is left, and none is to come that was declared."""
        return not self.num_rows and self.cleared >= max(self.declared or 0, *self.sizes.values(), 0)

    def begin_round(self) -> None:
        """It is about to get rows anew, as many as were declared."""
        self.cleared = self.over = 0

    def end_round(self) -> None:
        """It is about to get more rows. Where those that were declared were there, and every task has used all, the new
        ones are of the next round, though the others are not cleared yet. Else they are so many more of this one."""
        there = self.num_rows + self.cleared
        if not self.declared or there - self.over < self.declared or not self.tasks:
            return
        if all(task.num_consumed == self.num_rows for task in self.tasks.values()):
            self.over = there

    def between(self, slots: Slots) -> tuple[int, int]:
        """The lowest and the highest index of these rows; of one row in a tenth of the time."""
        if len(slots) == 1:
            index = self.index.item(slots.item(0))
            return index, index
        indexes = self.index[slots]
        return int(indexes.min()), int(indexes.max())

    def slots_of(self, indexes: NDArray[np.int64]) -> Slots:
        """Slots of global indexes, -1 where there is no such live row."""
        if len(indexes) == 1:
            return single_rows.slot_of(self.index[: self.size], self.alive, indexes)
        found = self.index[: self.size].searchsorted(indexes)
        found[found == self.size] = 0
        if not self.size:
            return np.full(len(indexes), -1)
        found[(self.index[found] != indexes) | ~self.alive[found]] = -1
        return found

    def live(self) -> Slots | slice:
        """The slots of live rows, ascending; a slice where no row was cleared."""
        return slice(0, self.size) if self.num_alive == self.size else self.live_slots()

    def live_slots(self) -> Slots:
        return np.flatnonzero(self.alive[: self.size])

    def name_rows(self, slots: Slots, keys: Sequence[str]) -> None:
        self.log.touch(slots)
        numbers = slots.tolist()
        self.keys.update(zip(keys, numbers, strict=True))
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            self.names[numbers[0] : numbers[-1] + 1] = keys
            return
        for slot, key in zip(numbers, keys, strict=True):
            self.names[slot] = key

    def clear(self, slots: Slots, count: bool = True) -> Released:
        """Remove live rows; returns the cells that are gone by block. Claimed ones `count` as rows that were there."""
        num_rows = self.num_rows
        self.cleared_cells = counted(self.cleared_cells, self.cells[: len(self.fields)], slots)
        released = self.release(slots, list(range(len(self.fields))))
        numbers = slots.tolist()
        place: Any = numbers[0] if len(numbers) == 1 else slots
        self.cells[: len(self.fields), place] = 0
        self.alive[place] = False
        gone_keys = [key for slot in numbers if (key := self.names[slot]) is not None]
        self.log.remove(gone_keys)
        for key in gone_keys:
            del self.keys[key]
        for slot in numbers:
            self.names[slot] = self.tags[slot] = None
        if self.lost:
            self.lost.difference_update(self.index[slots].tolist())
        if self.unclaimed:
            gone = set(numbers)
            self.unclaimed = [slot for slot in self.unclaimed if slot not in gone]
        for task in self.tasks.values():
            task.drop(slots)
        self.num_alive -= len(slots)
        if count:
            self.cleared += num_rows - self.num_rows
        if self.over and self.num_rows and self.cleared >= self.over:  # what is left is of the next round
            self.cleared, self.over = self.cleared - self.over, 0
        return released

    def take_all(self) -> dict[str, Any]:
        """Everything that is the table's own, by attribute; it is as good as new afterwards."""
        held = self.__dict__
        del held["away"]  # it is that of all tables
        self.__dict__ = Table(self.name).__dict__
        return held

    def give_room(self, count: int) -> None:
        """Grow to this many slots, whether or not they are used."""
        self._resize(None, max(MIN_CAPACITY, count))

    def shrink(self) -> None:
        """Drop the slots of cleared rows when they are the majority."""
        if self.size < SHRINK_SLOTS or 2 * self.num_alive > self.size:
            return
        order = self.live_slots()
        moved = np.full(self.size, -1)
        moved[order] = np.arange(len(order))
        self.keys = {key: int(moved[slot]) for key, slot in self.keys.items()}
        self.unclaimed = [int(moved[slot]) for slot in self.unclaimed]
        self.names = [self.names[slot] for slot in order.tolist()]
        self.tags = [self.tags[slot] for slot in order.tolist()]
        self.size = len(order)
        self._resize(order, max(MIN_CAPACITY, 2 * len(order)))

    def _resize(self, order: Slots | None, capacity: int) -> None:
        self.index = resized(self.index, order, capacity)
        self.alive = resized(self.alive, order, capacity)
        self.log.changed = resized(self.log.changed, order, capacity)
        self.row_versions.born = resized(self.row_versions.born, order, capacity)
        self.rewrites.resize(order, capacity)
        self.cells = resized(self.cells, order, capacity)
        for group in self.groups:
            group.block = resized(group.block, order, capacity)
            group.row = resized(group.row, order, capacity)
        for task in self.tasks.values():
            task.resize(order, capacity)

    # fields

    def check(self, schema: Sequence[FieldSchema], strict: bool = False) -> str:
        """A remark where a put of these fields brings another dtype than earlier ones, else "".

        Raises `InvalidInput` for too many sets of fields; `SchemaConflict` where `strict` and the put brings another
        dtype, rank or kind.
        """
        notes = []
        for new in schema:
            held = self.fields.get(new.name)
            reason = held.schema.conflict(new) if held is not None and held.schema != new else None
            if held is None or reason is None:
                continue
            if strict:
                raise SchemaConflict(f"partition {self.name!r}: {reason}")
            if held.schema.differs_in_dtype(new):
                unless = (
                    " where the floats do not hold the integers exactly" if held.schema.takes_whole_numbers(new) else ""
                )
                notes.append(f"{reason}: a get of rows of both raises{unless}")
        if len(self.groups) > MAX_GROUPS and tuple(sorted(new.name for new in schema)) not in self._group_numbers:
            raise InvalidInput(f"partition {self.name!r}: more than {MAX_GROUPS} different sets of fields")
        return "; ".join(notes)

    def group(self, schema: Sequence[FieldSchema]) -> int:
        """The number of the group of these fields; registers fields and group when new."""
        for new in schema:
            held = self.fields.get(new.name)
            if held is None:
                self._register(new)
            elif held.schema != new:
                self.fields[new.name] = Field(held.number, held.schema.merged(new))
        names = tuple(sorted(new.name for new in schema))
        number = self._group_numbers.get(names)
        if number is None:
            number = self._group_numbers[names] = len(self.groups)
            self.groups.append(ColumnGroup(names, len(self.index)))
        return number

    def _register(self, schema: FieldSchema) -> None:
        number = len(self.fields)
        if number == len(self.cells):
            self.cells = np.concatenate([self.cells, np.zeros_like(self.cells)])
        self.fields[schema.name] = Field(number, schema)

    # cells

    def write(self, slots: Slots, number: int, block: int, rows: Slots | None = None) -> Released:
        """Cells of group `number` on `slots` now lie in `block`, in these `rows` of it (None: row by row); returns the
        cells they replace."""
        group = self.groups[number]
        columns = [self.fields[name].number for name in group.fields]
        released = self.release(slots, columns)
        if (released or self.lost) and self.rewrites.are_noted:
            self.rewrites.rewritten(slots, group.fields, len(self.index))
        if self.lost:
            self.lost.difference_update(self.index[slots].tolist())
        if len(slots) == 1:
            slot = slots.item(0)
            group.block[slot], group.row[slot] = block, 0 if rows is None else rows[0]
            self.cells[columns, slot] = number
            return released
        group.block[slots] = block
        group.row[slots] = np.arange(len(slots), dtype=np.int32) if rows is None else rows
        self.cells[np.array(columns)[:, None], slots] = number
        return released

    def release(self, slots: Slots, columns: Sequence[int]) -> Released:
        """How many cells of each block lie under `slots` and `columns`."""
        if not len(columns):
            return []
        if len(slots) == 1:
            return single_rows.cells_of_blocks(self.cells[: len(self.fields)], self.groups, slots.item(0), columns)
        under = self.cells[np.array(columns)[:, None], slots]
        if not under.any():
            return []
        released: Released = []
        for number in np.unique(under).tolist():
            if number:
                per_slot = (under == number).sum(axis=0)
                blocks, inverse = np.unique(self.groups[number].block[slots], return_inverse=True)
                counts = np.bincount(inverse, weights=per_slot).astype(np.int64)
                released += [(b, c) for b, c in zip(blocks.tolist(), counts.tolist(), strict=True) if c]
        return released

    def ready(self, slots: Slots, fields: Sequence[str]) -> Flags | None:
        """Which of `slots` have all `fields` written where they can be read now; None when a field does not exist."""
        written = self.written(slots, fields)
        if not self.away or written is None or not written.any():
            return written
        places = np.flatnonzero(written)
        for cells in self.locate(slots[places], fields):
            written[places] &= ~np.isin(cells.blocks >> UNIT_SHIFT, list(self.away))
        return written

    def withhold(self, slots: Slots) -> None:
        """Of these rows, offer none that cannot be read now."""
        hidden: dict[tuple[str, ...], Slots] = {}
        for task in self.tasks.values():
            for view in task.views.values():
                if view.fields not in hidden:
                    ready = self.ready(slots, view.fields)
                    hidden[view.fields] = slots[:0] if ready is None else slots[~ready]
                view.remove(hidden[view.fields])

    def declare(self, size: int | None, sizes: dict[str, int], metadata: Tags) -> None:
        """How many rows there will be in all (None: as was said), and with some fields; what is known of them."""
        self.declared = self.declared if size is None else size
        self.sizes.update(sizes)
        self.metadata.update(metadata)

    def expects(self, fields: Sequence[str]) -> int | None:
        """How many rows were declared to have these fields; None where nothing was said."""
        return min((self.sizes[name] for name in fields if name in self.sizes), default=self.declared)

    def num_gone(self, fields: Sequence[str]) -> int:
        """How many of the rows that were declared are cleared: none where a number was said for some of these fields,
        since a cleared row may not have had them."""
        return 0 if self.over or not self.sizes.keys().isdisjoint(fields) else self.cleared

    def rows_on(self, unit: int) -> Slots:
        """The slots of live rows with cells on a storage unit, and of some that had."""
        lies = np.zeros(self.size, np.bool_)
        for group in self.groups:
            lies |= group.block[: self.size] >> UNIT_SHIFT == unit
        return np.flatnonzero(lies & self.alive[: self.size])

    def written(self, slots: Slots, fields: Sequence[str]) -> Flags | None:
        """Which of `slots` are alive with all `fields` written; None when a field does not exist."""
        columns = [self.fields[name].number for name in fields if name in self.fields]
        if len(columns) != len(fields):
            return None
        if len(slots) == 1:
            slot = slots.item(0)
            return np.array([self.alive.item(slot) and single_rows.has_all(self.cells, columns, slot)])
        if len(columns) == 1:
            written: Flags = self.cells[columns[0], slots] != 0
        else:
            written = (self.cells[np.array(columns)[:, None], slots] != 0).all(axis=0)
        return written & self.alive[slots]

    def common_fields(self, slots: Slots) -> list[str]:
        """Sorted fields that every one of `slots` has."""
        if not len(slots):
            return []
        if len(slots) == 1:
            written = self.cells[: len(self.fields), slots.item(0)].tolist()
            return sorted(name for name, field in self.fields.items() if written[field.number])
        have = (self.cells[: len(self.fields), slots] != 0).all(axis=1)
        return sorted(name for name, field in self.fields.items() if have[field.number])

    def locate(self, slots: Slots, fields: Sequence[str]) -> list[LocatedCells]:
        """Where the cells of `fields` on `slots` lie. All of them must be written."""
        alike: dict[bytes, list[str]] = {}
        for name in fields:
            alike.setdefault(self.cells[self.fields[name].number, slots].tobytes(), []).append(name)
        found = []
        for pattern, names in alike.items():
            numbers = np.frombuffer(pattern, np.uint16)
            group = self.groups[int(numbers[0])]
            blocks, rows = group.block[slots], group.row[slots]
            if len(numbers) > 1 and (numbers != numbers[0]).any():
                for number in np.unique(numbers).tolist():
                    of_group = numbers == number
                    blocks[of_group] = self.groups[number].block[slots[of_group]]
                    rows[of_group] = self.groups[number].row[slots[of_group]]
            found.append(LocatedCells(names, blocks, rows))
        return found

    def locate_one(self, slot: int, fields: Sequence[str]) -> list[tuple[list[str], int, int]]:
        """Of one row: fields that lie alike, their block, and its row there. All of them must be written."""
        columns = [(name, self.fields[name].number) for name in fields]
        return single_rows.places_of(self.cells[: len(self.fields)], self.groups, slot, columns)

    def place_of(self, name: str, slots: Slots) -> NDArray[np.int64]:
        """(2, slots): the block that each cell of a field lies in, and its row there; 0 where none was written."""
        found = np.zeros((2, len(slots)), np.int64)
        field = self.fields.get(name)
        if field is not None:
            under = self.cells[field.number, slots]
            for number in np.unique(under[under != 0]).tolist():
                of_group = under == number
                group, there = self.groups[number], slots[of_group]
                found[:, of_group] = group.block[there], group.row[there]
        return found

    def rows_in(self, number: int, block: int, first: int = 0, last: int = MAX_INDEX) -> tuple[Slots, list[str]]:
        """(rows of `block` with live cells, ascending; their fields); group `number` wrote the block. Its rows have
        indexes from `first` to `last`, which is where it is looked for."""
        slots, live = self._cells_in(number, block, first, last)
        names = [
            name
            for name, any_live in zip(self.groups[number].fields, np.asarray(live.any(axis=1)), strict=True)
            if any_live
        ]
        return np.unique(self.groups[number].row[slots]).astype(np.int64), names

    def relocate(
        self, number: int, block: int, target: int, rows: Slots, first: int = 0, last: int = MAX_INDEX
    ) -> None:
        group = self.groups[number]
        self.contents.moved(block, target, rows)
        if not len(rows):
            start, end = self._between(first, last)
            blocks = group.block[start:end]
            blocks[blocks == block] = target
            return
        slots, _ = self._cells_in(number, block, first, last)
        group.row[slots] = np.searchsorted(rows, group.row[slots])
        group.block[slots] = target

    def gather(self, number: int, target: int, blocks: Slots, rows: Slots) -> list[int]:
        """Rows of group `number` that lay alone, each in its block, now lie in `target`, in this order.

        Returns the blocks of those that moved: rows that are there, with all fields of the group still in that block.
        """
        group = self.groups[number]
        slots = self.slots_of(rows)
        columns = np.array([self.fields[name].number for name in group.fields])
        lies = (slots >= 0) & (group.block[slots] == blocks) & (group.row[slots] == 0)
        lies &= (self.cells[columns[:, None], slots] == number).all(axis=0)
        moved = np.flatnonzero(lies)
        group.row[slots[moved]] = moved
        group.block[slots[moved]] = target
        moved_from: list[int] = blocks[moved].tolist()
        return moved_from

    def _between(self, first: int, last: int) -> tuple[int, int]:
        """The slots of rows with these indexes and those between, as (first, the one after the last)."""
        index = self.index[: self.size]
        return int(np.searchsorted(index, first)), int(np.searchsorted(index, last, side="right"))

    def _cells_in(self, number: int, block: int, first: int, last: int) -> tuple[Slots, Flags]:
        """(slots with live cells in `block`, which (field, slot) are live)."""
        group = self.groups[number]
        start, end = self._between(first, last)
        slots = start + np.flatnonzero(self.alive[start:end] & (group.block[start:end] == block))
        live = self.cells[np.array([self.fields[name].number for name in group.fields])[:, None], slots] == number
        return slots[live.any(axis=0)], live

    def lose(self, number: int, block: int, first: int = 0, last: int = MAX_INDEX) -> Released:
        """The cells in `block`, which group `number` wrote, are absent again; their rows are remembered. `first` and
        `last` as in `rows_in`."""
        slots, live = self._cells_in(number, block, first, last)
        live = live[:, live.any(axis=0)]
        released = [(block, int(live.sum()))]
        for name, of_field in zip(self.groups[number].fields, live, strict=True):
            self.cells[self.fields[name].number, slots] *= ~of_field
        self.lost.update(self.index[slots].tolist())
        touched = set(self.groups[number].fields)
        for task in self.tasks.values():
            for view in task.views.values():
                if not touched.isdisjoint(view.fields):
                    view.remove(slots)
                    task.refresh(view, self, slots)
        return released

    # tasks and tags

    def task(self, name: str) -> Task:
        task = self.tasks.get(name)
        if task is None:
            watch = None if self.ledger is None else self.ledger.watch(self, name)
            task = self.tasks[name] = Task(len(self.index), watch)
        return task

    def put_tags(self, slots: Slots, tags: Sequence[Tags], replaced: Sequence[int]) -> None:
        """Merge the tags of rows; those at these positions replace what is there."""
        self.merge_tags(slots, tags)
        for position in replaced:
            self.merge_tags(slots[position : position + 1], [tags[position]], replace=True)

    def merge_tags(self, slots: Slots, tags: Sequence[Tags], replace: bool = False) -> None:
        self.log.touch(slots)
        self.any_tags = self.any_tags or any(tags)
        numbers = slots.tolist()
        before = [self.tags[slot] for slot in numbers]
        for slot, held, new in zip(numbers, before, tags, strict=True):
            self.tags[slot] = dict(new) if replace or held is None else {**held, **new}
        if self.rewrites.are_noted:
            changed = [slot for slot, held in zip(numbers, before, strict=True) if (held or {}) != self.tags[slot]]
            self.rewrites.retagged(changed, len(self.index))

    def tags_of(self, slots: Slots) -> list[Tags] | None:
        """Tags of the rows, or None when all are empty."""
        if not self.any_tags:
            return None
        tags = self.tags
        found = [tags[slot] or {} for slot in slots.tolist()]
        return found if any(found) else None

    def listing(self, table: int, version: int) -> Changes:
        """Keys and tags, or only what changed when the asker knows this table at `version`."""
        if table == self.log.table and version == self.log.version:  # as with most of many partitions
            return Changes(table, version, False, [], [], None)
        removed = self.log.removed_since(version) if table == self.log.table else None
        if removed is None:
            slots = np.fromiter(self.keys.values(), np.int64, len(self.keys))
            return Changes(self.log.table, self.log.version, True, [], list(self.keys), self.tags_of(slots))
        changed = [slot for slot in self.log.slots_since(version, self.size).tolist() if self.names[slot] is not None]
        keys = [self.names[slot] or "" for slot in changed]
        tags = self.tags_of(np.array(changed, np.int64))
        return Changes(self.log.table, self.log.version, False, removed, keys, tags)

    def schema(self, fields: Sequence[str]) -> list[FieldSchema]:
        return [self.fields[name].schema for name in fields if name in self.fields]

    def check_invariants(self) -> None:
        """Every structure agrees with every other; tests call this after each event."""
        live = self.live_slots()
        assert self.num_alive == len(live)
        assert bool((np.diff(self.index[: self.size]) > 0).all()), "slots ascend by index"
        assert {self.names[s]: s for s in live.tolist() if self.names[s] is not None} == self.keys
        assert not self.cells[:, : self.size][:, ~self.alive[: self.size]].any(), "cleared rows have no cells"
        for task in self.tasks.values():
            lease = task.lease[live]
            assert task.num_consumed == int(task.consumed[live].sum())
            assert task.num_lent == int((task.lease != 0).sum()) == int((lease != 0).sum())
            assert task.lent == {int(number): int((lease == number).sum()) for number in np.unique(lease[lease != 0])}
            assert not (task.consumed[live] & (lease != 0)).any(), "a lent row is not consumed"
            free = ~task.consumed[: self.size] & (task.lease[: self.size] == 0)
            for view in task.views.values():
                ready = self.ready(np.arange(self.size), view.fields)
                expected = np.zeros(self.size, np.bool_) if ready is None else ready & free
                assert np.array_equal(view.ready[: self.size], expected), f"view {view.fields}"
                assert view.count == int(expected.sum())
                assert not expected[: view.low].any()


def rows_bytes(values: NDArray[Any]) -> bytes:
    return (values if values.dtype == np.int64 else values.astype(np.int64)).tobytes()
