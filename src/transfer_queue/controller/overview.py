"""Answers to people who look: the whole service at one instant, a map of a partition, one row. They change nothing.

An overview costs the fields times the rows, at memory speed, and the requests and leases that it lists: 1 ms for a
million rows. A map is cut into slices, so that nobody waits for long behind one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.departures import Departures
from transfer_queue.controller.groups import GroupPools
from transfer_queue.controller.locks import Locks
from transfer_queue.controller.notices import Counts, called, of_fetch, rows_wanted
from transfer_queue.controller.readiness import DELAYED, KEPT, TOO_OLD, Flags, ReadyView, Slots, Task
from transfer_queue.controller.reported_fleets import ReportedFleets
from transfer_queue.controller.series import SeriesBook
from transfer_queue.controller.staleness import Staleness
from transfer_queue.controller.state import ControllerState
from transfer_queue.controller.table import MAX_INDEX, Table
from transfer_queue.controller.watching import Watching
from transfer_queue.errors import InvalidInput, UnknownRows
from transfer_queue.names import unknown_partition
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire import messages as m

SLICE_CELLS = 1 << 22  # about 1 ms
BLOCK_SLOTS = 4096
MAX_LISTED = 1 << 14
MAX_LACKS = 300  # characters
MAX_STEPS = 64


class WaitPlace(NamedTuple):
    """Where requests wait: what their callers called ("": as `called` says), and what one of them lacks."""

    queue: WaitQueue[Any]
    call: str
    lacks: Callable[[Waiter[Any]], str]


def wait_places(
    quota_waiters: WaitQueue[Any], max_rows: Callable[[], int | None], staleness: Staleness, locks: Locks,
    groups: GroupPools, series: SeriesBook, watching: Watching,
) -> list[WaitPlace]:  # fmt: skip
    """Where requests wait, but for fetches and loads."""
    admissions = staleness.admissions
    return [
        WaitPlace(quota_waiters, "put", lambda one: f"the {max_rows()} rows that may be there are in use"),
        WaitPlace(admissions.parked, "admit", lambda one: admissions.refusal(one.message)),
        WaitPlace(locks.parked, "kv_global_lock", locks.reason),
        WaitPlace(groups.parked, "", lambda one: groups.reason(one.message)),
        WaitPlace(series.parked, "open_partition", lambda one: series.reason(one.message)),
        WaitPlace(watching.parked, "kv_watch", lambda one: "a change of keys or tags"),
    ]


class Overviews:
    """`rules` has the method that answers each type of request. `waiting`: all places where requests wait, but that of
    fetches."""

    def __init__(
        self, state: ControllerState, waiting: Sequence[WaitPlace], fleets: ReportedFleets, departures: Departures
    ) -> None:
        self._state = state
        self._fleets = fleets
        self._departures = departures
        self._counts: Counts = {}
        self._waiting = [WaitPlace(state.fetching.parked, "get_meta", self._lack_of_fetch), *waiting]
        self.rules: dict[type, Callable[[Any], m.Reply]] = {
            m.DescribeService: self.describe, m.MapCells: self.map, m.InspectRow: self.inspect,
            m.FollowEvents: self.follow,
        }  # fmt: skip

    @property
    def _now(self) -> float:
        return self._state.asked_at

    # the whole service

    def describe(self, message: m.DescribeService) -> m.ServiceOverview:
        """See `m.ServiceOverview`. `InvalidInput` for a bad `most`."""
        if not 0 <= message.most <= MAX_LISTED:
            raise InvalidInput(f"most {message.most}: expected from 0 to {MAX_LISTED}")
        state, self._counts = self._state, {}
        versions = state.staleness.admissions.versions
        waits = [(place, one) for place in self._waiting for one in place.queue]
        leases = [*state.fetching.leases.listed(), *state.groups.leases()]
        return m.ServiceOverview(
            message.rid,
            [self._partition(table) for table in state.tables.values()],
            [self._wait(place, one) for place, one in waits[: message.most]],
            len(waits),
            [self._lease(one) for one in leases[: message.most]],
            len(leases),
            state.groups.descriptions(self._now),
            state.series.descriptions(),
            versions.newest,
            versions.count,
            versions.epoch,
            self._fleets.listed(self._now),
            departures=self._departures.listed(self._now),
        )

    def _partition(self, table: Table) -> m.PartitionOverview:
        fields = list(table.fields.values())
        written = [int(np.count_nonzero(table.cells[field.number, : table.size])) for field in fields]  # live rows only
        tasks = [self._task(table, name, task) for name, task in table.tasks.items()]
        schema = [field.schema for field in fields]
        return m.PartitionOverview(
            table.name, table.num_rows, table.declared, table.metadata, schema, written, tasks, len(table.lost),
            table.cleared, table.cleared_cells.tolist(), table.life,
        )  # fmt: skip

    def _task(self, table: Table, name: str, task: Task) -> m.TaskOverview:
        kept = sum(task.lent.get(kind, 0) for kind in (*KEPT, DELAYED))
        dead = sum(one.dead for one in task.returned.values())
        limit = task.limit
        views = [m.ViewOverview(list(view.fields), view.count, self._oldest(table, view)) for view in _by_size(task)]
        return m.TaskOverview(
            name, task.num_lent - kept, kept, task.num_consumed, len(task.returned) - dead, dead,
            None if limit is None else limit.max_age, task.num_stale, views, task.cleared_consumed,
        )  # fmt: skip

    def _oldest(self, table: Table, view: ReadyView) -> float | None:
        first = view.first(1, table.size)
        since = table.arrivals.of(int(table.index[first[0]])) if len(first) else None
        return None if since is None else max(0.0, self._now - since)

    def _wait(self, place: WaitPlace, one: Waiter[Any]) -> m.WaitOverview:
        message = one.message
        waited_s = None if one.since is None else self._now - one.since
        lacks = place.lacks(one)
        fields, wanted = (message.fields, rows_wanted(message)) if type(message) is m.Fetch else ([], 0)
        return m.WaitOverview(
            place.call or called(message), getattr(message, "partition", None) or "",
            getattr(message, "task", ""), one.session, waited_s, max(0.0, one.deadline - self._now), lacks[:MAX_LACKS],
            fields, wanted,
        )  # fmt: skip

    def _lack_of_fetch(self, one: Waiter[m.Fetch]) -> str:
        fetching = self._state.fetching
        return of_fetch(one.message, fetching.tables, type(fetching.sampler).__name__, self._counts)

    def _lease(self, one: m.LeaseOverview) -> m.LeaseOverview:
        one.left_s = max(0.0, one.left_s - self._now)
        return one

    # a map of a partition

    def map(self, message: m.MapCells) -> m.CellMap:
        """See `m.CellMap`. `InvalidInput` for a bad `start` or `rows_each`."""
        each, start = message.rows_each, message.start
        if not 1 <= each <= MAX_INDEX or not 0 <= start <= MAX_INDEX or start % each:
            raise InvalidInput(f"a map from row {start}, {each} rows each: expected a multiple, and 1 or more")
        table = self._state.tables.get(message.partition)
        if table is None:
            return m.CellMap(message.rid, False, 0, 0, [], [], [], [], [], b"")
        fields, tasks = list(table.fields), list(table.tasks)
        runs = max(1, SLICE_CELLS // (each * (len(fields) + 2 * len(tasks) + 1)))
        part = _Part(table, start, min(start + runs * each, table.num_rows), each)
        written = [part.shares(table.cells[table.fields[name].number]) for name in fields]
        of_tasks = [table.tasks[name] for name in tasks]
        return m.CellMap(
            message.rid, True, table.num_rows, part.stop if part.stop < table.num_rows else 0, fields, written, tasks,
            [part.shares(task.consumed, task.num_consumed) for task in of_tasks],
            [part.shares(task.lease, task.num_lent) for task in of_tasks], table.index[part.starts].tobytes(),
        )  # fmt: skip

    # one row

    def inspect(self, message: m.InspectRow) -> m.RowInspected:
        """See `m.RowInspected`."""
        table = self._state.tables.get(message.partition)
        if table is None:
            raise UnknownRows(unknown_partition(message.partition, self._state.tables))
        slot = _slot(table, message)
        row = int(table.index[slot])
        written = [field for field in table.fields.values() if table.cells[field.number, slot]]
        missing = [name for name, field in table.fields.items() if not table.cells[field.number, slot]]
        events = [
            m.RowEvent(self._now - one.at, one.what, one.session, one.task, ", ".join(one.detail))
            for one in self._state.recent.of_row(table.name, row)
        ]
        return m.RowInspected(
            message.rid, row, table.names[slot], table.tags[slot] or {}, [field.schema for field in written], missing,
            self._age(table, slot), self._state.groups.group_of(table.name, row),
            [self._row_of(table, name, task, slot, row) for name, task in table.tasks.items()], events,
        )  # fmt: skip

    def follow(self, message: m.FollowEvents) -> m.EventsSeen:
        """See `m.EventsSeen`. `InvalidInput` for a bad `most`."""
        if not 1 <= message.most <= MAX_LISTED:
            raise InvalidInput(f"most {message.most}: expected from 1 to {MAX_LISTED}")
        recent, memory = self._state.recent, os.getpid()
        if message.memory != memory:
            return m.EventsSeen(message.rid, recent.num_noted, memory, 0, [])
        number, found = max(message.since, recent.num_forgotten), list[m.RowsEvent]()
        for one in recent.since(number):
            if len(found) == message.most:
                break
            number += 1
            if one.partition == message.partition and len(one.rows):
                detail = ", ".join((*one.detail, *dict.fromkeys(text for text, _ in one.runs)))
                found.append(m.RowsEvent(
                    self._now - one.at, one.what, one.session, one.task, detail, len(one.rows), int(one.rows.min()),
                    int(one.rows.max()),
                ))  # fmt: skip
        return m.EventsSeen(message.rid, number, memory, max(0, recent.num_forgotten - message.since), found)

    def _age(self, table: Table, slot: int) -> int | None:
        born = int(table.row_versions.born[slot])
        return self._state.staleness.admissions.versions.count - born if born > 0 else None

    def _row_of(self, table: Table, name: str, task: Task, slot: int, row: int) -> m.RowOfTask:
        back = task.returned.get(slot)
        lease = int(task.lease[slot])
        steps = self._state.fetching.steps.used_by(name, table.name, row)
        return m.RowOfTask(
            name, _state_of(task, slot), max(0, lease), 0 if back is None else back.attempts,
            "" if back is None else back.reason, steps[-MAX_STEPS:],
        )  # fmt: skip


def _by_size(task: Task) -> list[ReadyView]:
    return sorted(task.views.values(), key=lambda view: -len(view.fields))


class _Part:
    """The rows from number `start` to number `stop` of a table, cleared and unclaimed ones not counted, in runs of
    `each`. `starts` has the slot in which each run begins."""

    def __init__(self, table: Table, start: int, stop: int, each: int) -> None:
        self.stop = stop
        self._is_row: Flags | None = None
        if table.num_rows == table.size:
            self.starts, self._slots = np.arange(start, stop, each), slice(start, stop)
        else:
            is_row = table.alive[: table.size].copy()
            is_row[table.unclaimed] = False
            self.starts, end = _starts(is_row, start, stop, each)
            self._slots = slice(int(self.starts[0]), end) if end else slice(0, 0)
            self._is_row = is_row[self._slots]
        self._places = self.starts - self._slots.start
        self._lengths = np.minimum(each, stop - np.arange(start, stop, each))

    def shares(self, values: NDArray[Any], most: int = 1) -> bytes:
        """Of each run, how many rows have a value above zero: 0 to 255, 0 only for none, 255 for all. `most`: 0 where
        no row of the table has one."""
        if not most or not len(self.starts):
            return bytes(len(self.starts))
        flags = values[self._slots]
        if flags.dtype != np.bool_:
            flags = flags > 0
        if self._is_row is not None:
            flags = flags & self._is_row
        sums = np.add.reduceat(flags.view(np.uint8), self._places, dtype=np.uint32).astype(np.int64)
        return np.where(sums == self._lengths, 255, -(-sums * 254 // self._lengths)).astype(np.uint8).tobytes()


def _starts(flags: Flags, start: int, stop: int, each: int) -> tuple[Slots, int]:
    """(where every `each`-th of the flags that are set is, from number `start` to number `stop`; where the last one of
    those ends). Of flags before them blocks are counted: to list all in every slice would be most of its work."""
    if start >= stop:
        return np.empty(0, np.int64), 0
    ends = np.add.reduceat(flags.view(np.uint8), np.arange(0, len(flags), BLOCK_SLOTS), dtype=np.uint32).cumsum()
    first, last = (int(one) for one in np.searchsorted(ends, [start, stop - 1], "right"))
    before, offset = int(ends[first - 1]) if first else 0, first * BLOCK_SLOTS
    found = np.flatnonzero(flags[offset : (last + 1) * BLOCK_SLOTS])[start - before : stop - before]
    return found[::each] + offset, int(found[-1]) + offset + 1


def _slot(table: Table, message: m.InspectRow) -> int:
    """Raises `UnknownRows`, and `InvalidInput` unless the row is named in one of the two ways."""
    if (message.key is None) == (message.row is None):
        raise InvalidInput("name the row by its key, or by its index")
    if message.key is not None:
        slot = table.keys.get(message.key, -1)
    elif message.row is not None and 0 <= message.row <= MAX_INDEX:
        slot = int(table.slots_of(np.array([message.row], np.int64))[0])
    else:
        slot = -1
    if slot < 0:
        named = repr(message.key) if message.key is not None else f"with index {message.row}"
        raise UnknownRows(f"row {named} is not in partition {table.name!r}: it was cleared, or never there")
    return slot


def _state_of(task: Task, slot: int) -> str:
    back, lease = task.returned.get(slot), int(task.lease[slot])
    if back is not None and back.dead:
        return "dead"
    if task.consumed[slot]:
        return "too old" if task.fates[slot] & TOO_OLD else "consumed"
    if lease:
        return "leased" if lease > 0 else "delayed" if lease == DELAYED else "kept"
    return "ready" if any(view.ready[slot] for view in task.views.values()) else "waiting"
