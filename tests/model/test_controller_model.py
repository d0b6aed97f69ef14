"""The controller against a model made of dicts, over random histories (R13); its invariants hold after every event."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from tables import Box, indexes

from transfer_queue.errors import DeadlineExceeded, NotReady, RowCleared, StoreFull, UnknownRows
from transfer_queue.server.unit_registry import unit_of
from transfer_queue.wire.messages import UNIT_SHIFT

PARTITIONS = ["p", "q"]
FIELDS = ["a", "b", "c"]
TASKS = ["s", "t"]
MAX_ROWS = 24

partitions = st.sampled_from(PARTITIONS)
tasks = st.sampled_from(TASKS)
field_sets = st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True)
units = st.sampled_from([1, 2])
place_lists = st.lists(st.integers(0, 2), min_size=1, max_size=4)
key_lists = st.lists(st.sampled_from([f"k{n}" for n in range(8)]), min_size=1, max_size=4, unique=True)


class Row:
    def __init__(self, key: str | None) -> None:
        self.key = key
        self.tags: dict[str, Any] = {}
        self.cells: dict[str, tuple[int, int]] = {}


class Waiter:
    def __init__(self, ticket: int, partition: str, fields: list[str], task: str, size: int, deadline: float) -> None:
        self.ticket = ticket
        self.partition = partition
        self.fields = fields
        self.task = task
        self.size = size
        self.deadline = deadline


class ControllerModel(RuleBasedStateMachine):
    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, dict[int, Row]] = {}
        self.consumed: set[tuple[str, str, int]] = set()
        self.waiting: list[Waiter] = []
        self.seen: set[int] = set()
        self.freed: set[int] = set()
        self.names = itertools.count(1000)
        self.moved = itertools.count(10_000)
        self.away: set[int] = set()
        self.fields_of: dict[int, list[str]] = {}  # of each block
        self.shared: dict[int, tuple[str, str]] = {}  # partition and field of each block of shared cells
        self.patch = patch("transfer_queue.controller.lone_blocks.MIN_ROWS", 2)
        self.patch.start()

    def teardown(self) -> None:
        self.patch.stop()

    @initialize(bounded=st.booleans())
    def start(self, bounded: bool) -> None:
        self.box = Box(max_rows=MAX_ROWS if bounded else None)
        self.bounded = bounded

    # the model

    def num_rows(self) -> int:
        return sum(map(len, self.tables.values()))

    def fits(self, count: int) -> bool:
        return not self.bounded or self.num_rows() + count <= MAX_ROWS

    def row_of(self, partition: str, key: str) -> int | None:
        return next((i for i, row in self.tables.get(partition, {}).items() if row.key == key), None)

    def ready(self, partition: str, task: str, fields: list[str]) -> list[int]:
        return [i for i, row in sorted(self.tables.get(partition, {}).items())
                if all(f in row.cells for f in fields) and (partition, task, i) not in self.consumed
                and not any(unit_of(row.cells[f][0]) in self.away for f in fields)]  # fmt: skip

    def take(self, partition: str, task: str, rows: list[int]) -> None:
        self.consumed |= {(partition, task, row) for row in rows}

    def check_answers(self) -> None:
        """Every answer is one the model allows, and no waiter that could be served waits on."""
        for ticket, rows in self.box.answers():
            waiter = next(w for w in self.waiting if w.ticket == ticket)
            earlier = [w for w in self.waiting[: self.waiting.index(waiter)] if alike(w, waiter)]
            assert all(w.size > len(rows) for w in earlier), "an earlier waiter of the same rows was passed over"
            assert rows == self.ready(waiter.partition, waiter.task, waiter.fields)[: waiter.size]
            assert len(rows) == waiter.size
            self.waiting.remove(waiter)
            self.take(waiter.partition, waiter.task, rows)
        for waiter in self.waiting:
            assert len(self.ready(waiter.partition, waiter.task, waiter.fields)) < waiter.size

    def written(self, partition: str, rows: list[int], block: int, fields: list[str], tags: Any) -> None:
        self.fields_of[block] = fields
        for number, row in enumerate(rows):
            held = self.tables[partition][row]
            held.cells |= dict.fromkeys(fields, (block, number))
            held.tags = {**held.tags, **(tags[number] if tags else {})}
        self.check_answers()

    def drop(self, partition: str, rows: list[int]) -> None:
        for row in rows:
            del self.tables[partition][row]
        self.consumed = {c for c in self.consumed if c[0] != partition or c[2] not in rows}

    # events

    @rule(partition=partitions, keys=key_lists, fields=field_sets, tagged=st.booleans())
    def put_keys(self, partition: str, keys: list[str], fields: list[str], tagged: bool) -> None:
        tags = [{key: len(self.seen), "last": key} for key in keys] if tagged else None
        new = [key for key in keys if self.row_of(partition, key) is None]
        try:
            reply = self.box.put(keys, fields, tags, partition)
        except StoreFull:
            assert not self.fits(len(new))
            return
        assert not new or self.fits(len(new)) or partition in self.tables
        rows = indexes(reply)
        table = self.tables.setdefault(partition, {})
        for key, row in zip(keys, rows, strict=True):
            if key in new:
                assert row not in self.seen, "an index was reused"
                table[row] = Row(key)
            assert table[row].key == key
        self.seen |= set(rows)
        self.written(partition, rows, self.box.last_block, fields, tags)

    @rule(partition=partitions, count=st.integers(1, 4), fields=field_sets)
    def put_new(self, partition: str, count: int, fields: list[str]) -> None:
        try:
            rows = indexes(self.box.put(count, fields, None, partition))
        except StoreFull:
            assert not self.fits(count)
            return
        assert not self.seen & set(rows)
        self.seen |= set(rows)
        self.tables.setdefault(partition, {}).update({row: Row(None) for row in rows})
        self.written(partition, rows, self.box.last_block, fields, None)

    @rule(partition=partitions, fields=field_sets, data=st.data())
    def put_rows(self, partition: str, fields: list[str], data: st.DataObject) -> None:
        pool = sorted(self.seen) or [0]
        rows = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4, unique=True))
        try:
            self.box.put(rows, fields, None, partition)
        except RowCleared:
            assert not set(rows) <= set(self.tables.get(partition, {}))
            return
        self.written(partition, rows, self.box.last_block, fields, None)

    @rule(partition=partitions, name=st.sampled_from(FIELDS), places=place_lists, again=st.booleans(), data=st.data())
    def put_shared(self, partition: str, name: str, places: list[int], again: bool, data: st.DataObject) -> None:
        """New rows of which some have one cell: of a block that is new, or that others have cells in."""
        live = self.live()
        known = [block for block, of in self.shared.items() if of == (partition, name) and block in live]
        block = data.draw(st.sampled_from(known)) if again and known else next(self.moved) | self.box.unit << UNIT_SHIFT
        if block in known:
            there = sorted({place for _, place in live[block]})
            places = [there[place % len(there)] for place in places]
        try:
            rows = indexes(self.box.share(len(places), name, block, places, block not in known, partition))
        except StoreFull:
            assert not self.fits(len(places))
            return
        assert not self.seen & set(rows)
        self.seen |= set(rows)
        self.tables.setdefault(partition, {}).update({row: Row(None) for row in rows})
        self.shared[block] = partition, name
        self.fields_of[block] = [name]
        for row, place in zip(rows, places, strict=True):
            self.tables[partition][row].cells[name] = (block, place)
        self.check_answers()

    @rule(partition=partitions, count=st.integers(1, 3))
    def insert(self, partition: str, count: int) -> None:
        try:
            rows = indexes(self.box.insert(count, partition=partition))
        except StoreFull:
            assert not self.fits(count)
            return
        self.seen |= set(rows)
        self.tables.setdefault(partition, {}).update({row: Row(None) for row in rows})
        self.check_answers()

    @rule(partition=partitions, fields=field_sets, task=tasks, size=st.integers(1, 5))
    def fetch(self, partition: str, fields: list[str], task: str, size: int) -> None:
        expected = self.ready(partition, task, fields)
        try:
            rows = self.box.fetch(size, fields, task, partition=partition)
        except DeadlineExceeded:
            assert len(expected) < size
            return
        assert rows == expected[:size]
        self.take(partition, task, rows)

    @rule(
        target=tickets,
        partition=partitions,
        fields=field_sets,
        task=tasks,
        size=st.integers(1, 6),
        wait=st.integers(1, 9),
    )
    def park(self, partition: str, fields: list[str], task: str, size: int, wait: int) -> int:
        ticket = next(self.names)
        rows = self.box.fetch(size, fields, task, wait, ticket, partition=partition)
        if rows is None:
            self.waiting.append(Waiter(ticket, partition, fields, task, size, self.box.now + wait))
        else:
            assert rows == self.ready(partition, task, fields)[:size]
            self.take(partition, task, rows)
        return ticket

    @rule(ticket=tickets)
    def forget(self, ticket: int) -> None:
        self.box.forget(ticket)
        self.waiting = [w for w in self.waiting if w.ticket != ticket]

    @rule(seconds=st.integers(1, 6))
    def expire(self, seconds: int) -> None:
        self.box.expire(self.box.now + seconds)
        late = {w.ticket for w in self.waiting if w.deadline <= self.box.now}
        answers = dict(self.box.answers())
        assert set(answers) == late
        assert all(isinstance(error, DeadlineExceeded) for error in answers.values())
        self.waiting = [w for w in self.waiting if w.ticket not in late]
        assert self.box.controller.next_deadline() == min((w.deadline for w in self.waiting), default=None)

    @rule(partition=partitions, data=st.data())
    def clear_rows(self, partition: str, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.seen) or [0]), min_size=1, max_size=4))
        self.box.clear(rows, partition)
        if partition in self.tables:
            self.drop(partition, [row for row in set(rows) if row in self.tables[partition]])

    @rule(partition=partitions, keys=key_lists)
    def clear_keys(self, partition: str, keys: list[str]) -> None:
        self.box.clear(keys, partition)
        if partition in self.tables:
            self.drop(partition, [row for key in keys if (row := self.row_of(partition, key)) is not None])
            if not self.tables[partition]:
                del self.tables[partition]

    @rule(partition=partitions)
    def clear_partition(self, partition: str) -> None:
        self.box.clear(None, partition)
        if self.tables.pop(partition, None) is not None:
            self.consumed = {c for c in self.consumed if c[0] != partition}

    @rule(partition=partitions, task=tasks | st.none())
    def reset(self, partition: str, task: str | None) -> None:
        self.box.reset(task, partition)
        self.consumed = {c for c in self.consumed if c[0] != partition or (task is not None and c[1] != task)}
        self.check_answers()

    @rule(unit=units)
    def write_to(self, unit: int) -> None:
        """Puts go to this storage unit from now on. It may be away: its line is cut while a put is on its way."""
        self.box.unit = unit

    @rule(unit=units)
    def hide(self, unit: int) -> None:
        self.box.controller.hide(unit)
        self.box.controller.check_invariants()
        self.away.add(unit)
        self.check_answers()

    @rule(unit=units)
    def show(self, unit: int) -> None:
        self.box.controller.show(unit)
        self.box.controller.check_invariants()
        self.away.discard(unit)
        self.check_answers()

    @rule(partition=partitions, replace=st.booleans(), data=st.data())
    def tag(self, partition: str, replace: bool, data: st.DataObject) -> None:
        rows = sorted(self.tables.get(partition, {}))
        if rows:
            row = data.draw(st.sampled_from(rows))
            self.box.tag([row], [{"n": row}], replace, partition)
            held = self.tables[partition][row]
            held.tags = {"n": row} if replace else {**held.tags, "n": row}

    @rule(data=st.data())
    def relocate(self, data: st.DataObject) -> None:
        """Compaction: some cells are overwritten or cleared between its start and its end."""
        blocks = sorted(self.live())
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        target = next(self.moved) | unit_of(block) << UNIT_SHIFT
        rows, fields = self.box.controller.rows_in(block)  # type: ignore[misc]
        assert sorted({row for _, row in self.live()[block]}) == rows.tolist()
        assert {field for field, _ in self.live()[block]} == set(fields)
        between = data.draw(st.sampled_from(["nothing", "put", "clear"]))
        if between == "put":
            self.put_keys(data.draw(partitions), data.draw(key_lists), data.draw(field_sets), False)
        elif between == "clear":
            self.clear_keys(data.draw(partitions), data.draw(key_lists))
        assert self.box.controller.relocate(block, target, rows) == (block in self.live())
        self.box.controller.check_invariants()
        places = {int(row): number for number, row in enumerate(rows)}
        for table in self.tables.values():
            for held in table.values():
                for field, (lies, row) in held.cells.items():
                    if lies == block:
                        held.cells[field] = (target, places[row])
        if block in self.shared:
            self.shared[target] = self.shared.pop(block)

    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        """Rows put alone become columns: some are overwritten or cleared between its start and its end."""
        for batch in [found for found in self.box.controller.state.lone_blocks.round() if found is not None]:
            target = next(self.moved) | unit_of(int(batch.blocks[0])) << UNIT_SHIFT
            between = data.draw(st.sampled_from(["nothing", "put", "clear"]))
            if between == "put":
                self.put_keys(data.draw(partitions), data.draw(key_lists), data.draw(field_sets), False)
            elif between == "clear":
                self.clear_keys(data.draw(partitions), data.draw(key_lists))
            live = self.live()
            whole = [block for block in batch.blocks.tolist() if len(live.get(block, ())) == len(self.fields_of[block])]
            assert self.box.controller.gather(target, batch.blocks, batch.rows) == bool(whole)
            self.box.controller.check_invariants()
            self.fields_of[target] = []
            for table in self.tables.values():
                for held in table.values():
                    for field, (lies, _) in held.cells.items():
                        if lies in whole:
                            held.cells[field] = (target, batch.blocks.tolist().index(lies))

    def live(self) -> dict[int, set[tuple[str, int]]]:
        """(field, row) of every live cell, by block."""
        found: dict[int, set[tuple[str, int]]] = {}
        for table in self.tables.values():
            for held in table.values():
                for field, (block, row) in held.cells.items():
                    found.setdefault(block, set()).add((field, row))
        return found

    # what must hold after every event

    @invariant()
    def rows_cells_and_tags_agree(self) -> None:
        if not hasattr(self, "box"):
            return
        assert set(self.box.partitions()) == set(self.tables)
        for partition, table in self.tables.items():
            rows = sorted(table)
            assert list(self.box.scan(["a"], partition)) == rows
            assert self.box.tags(rows, partition) == [table[row].tags for row in rows]
            for field in FIELDS:
                have = [row for row in rows if field in table[row].cells]
                if have:
                    found = self.box.cells(have, [field], partition=partition)
                    assert found[field] == [table[row].cells[field] for row in have]
                refuse = [row for row in rows if field not in table[row].cells]
                if refuse:
                    assert raises(NotReady, self.box.get, rows, [field], partition=partition)

    @invariant()
    def consumption_agrees(self) -> None:
        for partition, table in self.tables.items():
            for task in TASKS:
                expected = {row: int((partition, task, row) in self.consumed) for row in sorted(table)}
                assert self.box.consumed(task, partition) == expected

    @invariant()
    def blocks_are_freed_exactly_when_their_last_cell_is_gone(self) -> None:
        if hasattr(self, "box"):
            freed = self.box.freed()
            assert not self.freed & set(freed)
            self.freed |= set(freed)
            left = self.box.controller.state.cleared_partitions.blocks()
            assert set(self.box.controller.block_index.entries) - left == set(self.live())
            assert self.box.controller.num_waiting == len(self.waiting)
            assert raises(UnknownRows, self.box.get, ["never"])


def alike(one: Waiter, other: Waiter) -> bool:
    return (one.partition, one.task, one.fields) == (other.partition, other.task, other.fields)


def raises(error: type[Exception], call: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        call(*args, **kwargs)
    except error:
        return True
    return False


TestControllerModel = ControllerModel.TestCase
TestControllerModel.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
