"""The steps of a training loop: which batches each task took for each, and handing them out once more.

A loop marks a step when what it learned in it is on its disk. A loop that goes back to an earlier step gets the batches
that it took since once more: the same rows in the same order, whoever else came meanwhile and however old they are by
now. Batches are noted from the first mark of a task on. What a task took counts as used for a step once it is consumed:
rows that were still on lease when a step was marked belong to the next one, those that came back to none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.controller.readiness import REPLAYED, Flags, Slots, Task
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.errors import InvalidInput
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of

REQUESTS = (m.MarkStep, m.ResumeStep, m.GetStep)
MAX_STEPS, MAX_ROWS = 1024, 1 << 22  # of one task: its oldest steps are forgotten


class TakenRows(NamedTuple):
    """The answer to one fetch. `rows` are global indexes; `lease` is 0 where they were consumed at once."""

    partition: str
    rows: Slots
    fields: list[str]
    batch_size: int
    sampling: dict[str, Any]
    lease: int
    repeated: int

    @property
    def rank(self) -> Any:
        """The data-parallel rank it was for; None where there is none."""
        return self.sampling.get("dp_rank")

    def is_for(self, message: m.Fetch) -> bool:
        """Whether a request asks for such a batch. A loop that began anew counts its batches from 0 again."""
        return (self.partition, self.batch_size, self.rank) == (
            message.partition, message.batch_size, message.sampling.get("dp_rank"),
        )  # fmt: skip


class TaskSteps:
    """The batches of one task: `done` by step, ascending; `open` since; `again` are to be handed out once more."""

    def __init__(self) -> None:
        self.done: dict[int, list[TakenRows]] = {}
        self.open: list[TakenRows] = []
        self.again: deque[TakenRows] = deque()

    @property
    def last(self) -> int | None:
        return next(reversed(self.done), None)

    def forget_the_oldest(self) -> None:
        rows = sum(len(batch.rows) for batches in self.done.values() for batch in batches)
        while len(self.done) > MAX_STEPS or (rows > MAX_ROWS and len(self.done) > 1):
            rows -= sum(len(batch.rows) for batch in self.done.pop(next(iter(self.done))))


class Steps:
    """All tasks' steps. `free(table, task name)` offers everything that is lent to a task or kept for it;
    `served(table, task name)` answers who waits."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        free: Callable[[Table, str], None],
        served: Callable[[Table, str], None],
    ) -> None:
        self._tables = tables
        self._free = free
        self._served = served
        self._tasks: dict[str, TaskSteps] = {}

    # what fetches do

    def note(self, message: m.Fetch, reply: m.RowSet) -> None:
        """A task takes these rows."""
        known = self._tasks.get(message.task)
        if known is not None:
            known.open.append(
                TakenRows(
                    message.partition, indexes_of(reply.rows), message.fields, message.batch_size,
                    {**message.sampling, **({"dp_size": message.dp_size} if message.dp_size else {})}, reply.lease,
                    reply.repeated,
                )
            )  # fmt: skip

    def undone(self, task: str, rows: Slots) -> None:
        """Nobody got the answer with these rows, which were consumed by it."""
        known = self._tasks.get(task)
        if known is not None:
            known.open = [one for one in known.open if one.lease or not np.isin(one.rows, rows).any()]

    def are_due(self, task: str) -> bool:
        """Whether the task has batches to take once more."""
        known = self._tasks.get(task)
        return known is not None and bool(known.again)

    def again(self, message: m.Fetch, table: Table) -> TakenRows | None:
        """The batch that this request gets once more; None when it is to get others."""
        known = self._tasks[message.task]
        mine = [batch for batch in known.again if batch.partition == message.partition]
        if mine and not any(batch.batch_size == message.batch_size for batch in mine):
            self._let_go(known, table, message.task, mine)  # the loop is another one now
            return None
        for batch in mine:
            if batch.is_for(message):
                slots = table.slots_of(batch.rows)
                ready = table.ready(slots, message.fields) if (slots >= 0).all() else None
                if ready is not None and ready.all():
                    _remove(known.again, batch)
                    return batch
                self._let_go(known, table, message.task, [batch])
        return None

    def _let_go(self, known: TaskSteps, table: Table, name: str, batches: list[TakenRows]) -> None:
        """These are not handed out once more, but their rows like any others."""
        task = table.tasks[name]
        for batch in batches:
            _remove(known.again, batch)
        kept = [batch.rows for batch in known.again if batch.partition == table.name]
        held = table.index[np.flatnonzero(task.lease == REPLAYED)]
        slots = table.slots_of(np.setdiff1d(held, np.concatenate([np.empty(0, np.int64), *kept])))
        if len(task.take_back(slots, REPLAYED, used=False)):
            self._served(table, name)

    def closed(self, partition: str) -> None:
        """A partition is gone."""
        self._forget(self._tasks.values(), partition)

    def reset(self, task: str, partition: str) -> None:
        """A task begins with a partition anew."""
        if task in self._tasks:
            self._forget([self._tasks[task]], partition)

    def _forget(self, tasks: Iterable[TaskSteps], partition: str) -> None:
        for known in tasks:
            known.again = deque(batch for batch in known.again if batch.partition != partition)

    def clear(self) -> None:
        """All rows are gone."""
        self._tasks.clear()

    # requests

    def handle(self, message: m.ResumeStep | m.GetStep) -> m.Reply:
        """Raises `InvalidInput` for a step that was not marked, or too long ago."""
        if isinstance(message, m.GetStep):
            return self._taken(message)
        names = [name for name, known in self._tasks.items() if message.step in known.done]
        for name in message.tasks or []:
            if name not in names:
                raise InvalidInput(f"step {message.step} of task {name!r}: {self._marks(name)}")
        if not names:
            raise InvalidInput(f"step {message.step} was not marked by any task, or is forgotten")
        resumed = m.StepResumed(message.rid, 0, 0, 0)
        for name in names if message.tasks is None else dict.fromkeys(message.tasks):
            self._resume(name, message.step, resumed)
        return resumed

    def _marks(self, name: str) -> str:
        known = self._tasks.get(name)
        return f"it has marks of {list(known.done)}" if known is not None and known.done else "it has no marks"

    def check_mark(self, message: m.MarkStep) -> None:
        """`InvalidInput` for a step before one that was marked."""
        for name in message.tasks if message.tasks is not None else self._tasks:
            last = self._tasks[name].last if name in self._tasks else None
            if last is not None and message.step < last:
                raise InvalidInput(f"step {message.step}: task {name!r} is at step {last}; `resume` goes back to one")

    def mark(self, message: m.MarkStep) -> m.Reply:
        """The newest step may be marked again, for what was taken since belongs to it as well."""
        names = message.tasks
        if names is None:
            names = sorted({name for table in self._tables.values() for name in table.tasks} | self._tasks.keys())
        for name in names:
            known = self._tasks.setdefault(name, TaskSteps())
            used, known.open = self._settled(name, known.open)
            known.done.setdefault(message.step, []).extend(used)
            known.forget_the_oldest()
        return m.Done(message.rid)

    def _resume(self, name: str, step: int, resumed: m.StepResumed) -> None:
        known = self._tasks[name]
        latest = [part for one, mine in self._with_theirs(name, known.open) for part in _part(one, mine)]
        later = [batch for number, batches in known.done.items() if number > step for batch in batches]
        batches = [*later, *latest, *known.again]
        known.done = {number: batches for number, batches in known.done.items() if number <= step}
        known.open, known.again = [], deque()
        for table in list(self._tables.values()):
            if name in table.tasks:
                mine = [batch for batch in batches if batch.partition == table.name]
                self._hand_out_again(table, name, mine, known, resumed)
        there = self._tables.keys()
        resumed.lost += sum(batch.partition not in there for batch in batches)

    def _hand_out_again(
        self, table: Table, name: str, batches: list[TakenRows], known: TaskSteps, resumed: m.StepResumed
    ) -> None:
        task = table.tasks[name]
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *(batch.rows for batch in batches)]))
        slots = table.slots_of(rows)
        task.give_back(slots[slots >= 0])
        self._free(table, name)
        for batch in batches:
            slots = table.slots_of(batch.rows)
            if (slots < 0).any():
                resumed.lost += 1
                continue
            known.again.append(batch)
            task.reserve(task.offered(slots), REPLAYED)
            resumed.batches += 1
            resumed.rows += len(slots)
        self._served(table, name)

    def _settled(self, name: str, batches: list[TakenRows]) -> tuple[list[TakenRows], list[TakenRows]]:
        """(what of these the task has used, what it still has on lease); what came back is in neither."""
        used: list[TakenRows] = []
        lent: list[TakenRows] = []
        for batch, mine in self._with_theirs(name, batches):
            is_used, is_lent = self._fate(name, batch)
            used += _part(batch, mine & is_used)
            lent += _part(batch, mine & is_lent)
        return used, lent

    def _with_theirs(self, name: str, batches: list[TakenRows]) -> list[tuple[TakenRows, Flags]]:
        """Each batch with which of its rows no later one has; without dead letters, which none has."""
        found = []
        later: dict[tuple[str, int], tuple[Any, ...]] = {}  # who took a row last, by partition and row
        for batch in reversed(batches):
            taker = (batch.lease, batch.sampling.get("batch_index"))
            rows = batch.rows.tolist()
            mine = np.array([later.setdefault((batch.partition, row), taker) == taker for row in rows], np.bool_)
            table, task = self._of(name, batch)
            if table is not None and task is not None:
                mine &= ~np.isin(batch.rows, table.index[task.dead_letters()])
            found.append((batch, mine))
        return found[::-1]

    def _fate(self, name: str, batch: TakenRows) -> tuple[Flags, Flags]:
        """Which rows of a batch are used, and which it still has on lease. Rows that were cleared are used."""
        table, task = self._of(name, batch)
        used, lent = np.ones(len(batch.rows), np.bool_), np.zeros(len(batch.rows), np.bool_)
        if table is not None and task is not None:
            slots = table.slots_of(batch.rows)
            there = slots >= 0
            used[there] = task.consumed[slots[there]]
            lent[there] = (task.lease[slots[there]] == batch.lease) & (batch.lease > 0)
        return used, lent

    def _of(self, name: str, batch: TakenRows) -> tuple[Table | None, Task | None]:
        table = self._tables.get(batch.partition)
        return table, None if table is None else table.tasks.get(name)

    def _taken(self, message: m.GetStep) -> m.StepTaken:
        known = self._tasks.get(message.task)
        if known is None:
            raise InvalidInput(f"task {message.task!r} has no marks: steps are known from the first `checkpoint` on")
        if message.step is None:
            batches, lent = self._settled(message.task, known.open)
            batches = [*batches, *lent]
        elif message.step in known.done:
            batches = known.done[message.step]
        else:
            raise InvalidInput(f"step {message.step} of task {message.task!r}: {self._marks(message.task)}")
        return m.StepTaken(message.rid, list(known.done), [self._told(batch) for batch in batches])

    def _told(self, batch: TakenRows) -> m.TakenBatch:
        table = self._tables.get(batch.partition)
        slots = np.empty(0, np.int64) if table is None else table.slots_of(batch.rows)
        slots = slots[slots >= 0]
        there = m.RowSet(0, b"", None, [], None)
        names: list[str | None] = []
        if table is not None and len(slots):
            tags, schema = table.tags_of(slots), table.schema(batch.fields)
            there = m.RowSet(0, rows_bytes(table.index[slots]), tags, schema, None, loads=table.loads)
            names = [table.names[slot] for slot in slots.tolist()]
        return m.TakenBatch(
            batch.partition, rows_bytes(batch.rows), list(batch.fields), batch.batch_size, batch.sampling,
            batch.repeated, there, names,
        )  # fmt: skip

    def check_invariants(self) -> None:
        """What is kept to be handed out once more is in a batch that is; tests call this after each event."""
        for table in self._tables.values():
            for name, task in table.tasks.items():
                kept = set(table.index[np.flatnonzero(task.lease == REPLAYED)].tolist())
                known = self._tasks.get(name)
                again = [batch.rows.tolist() for batch in known.again] if known is not None else []
                assert kept <= {row for rows in again for row in rows}


def _part(batch: TakenRows, flags: Flags) -> list[TakenRows]:
    """The batch with those of its rows only; nothing where there are none."""
    if flags.all():
        return [batch]
    return [batch._replace(rows=batch.rows[flags], repeated=0)] if flags.any() else []


def _remove(batches: deque[TakenRows], batch: TakenRows) -> None:
    """Arrays do not compare: by identity."""
    del batches[next(place for place, one in enumerate(batches) if one is batch)]
