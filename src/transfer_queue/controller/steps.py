"""The steps of a training loop: which batches each task took for each, and handing them out once more.

A loop marks a step when what it learned in it is on its disk. A loop that goes back to an earlier step gets what it
took since once more: single loops the same batches in the same order, data-parallel ranks (`dp_size`) the same shares
of the same batches, whoever else came meanwhile and however old the rows are by now. To other loops, and to those that
ask for other batches than before, the rows are offered like any others.

Batches are noted from the first mark of a task on. What a task took counts as used for a step once it is consumed: rows
that were still on lease when a step was marked belong to the next one, those that came back to none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from transfer_queue.controller import facts as f
from transfer_queue.controller.dealing import DP_SIZE
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.readiness import REPLAYED, Flags, Slots
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.controller.taken import MAX_ROWS, SavedSteps, Segment, TakenDeal, TakenRows, TaskSteps
from transfer_queue.errors import InvalidInput
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of

log = logging.getLogger("transfer_queue.controller")

_NONE = np.empty(0, np.int64)


class Steps:
    """All tasks' steps. `free(table, task name)`: nothing is lent to a task or kept for it any more; `offered(table,
    task name)`: its free rows are on offer; `served(table, task name)` answers who waits."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        free: Callable[[Table, str], None],
        offered: Callable[[Table, str], None],
        served: Callable[[Table, str], None],
        ledger: Ledger | None = None,
    ) -> None:
        self._ledger = ledger
        self._tables = tables
        self._free = free
        self._offered = offered
        self._served = served
        self._tasks: dict[str, TaskSteps] = {}
        self.next_number = 0  # number of a batch

    @property
    def are_noted(self) -> bool:
        """Whether any task has steps."""
        return bool(self._tasks)

    # saving

    def saved(self) -> dict[str, SavedSteps]:
        """What was handed out once more and is not used yet counts as what is still to be."""
        return {name: known.saved() for name, known in self._tasks.items()}

    def restore(self, tasks: dict[str, TaskSteps], next_number: int) -> None:
        """Go on with the steps of a saved state, whose tables are there; nothing is lent of them."""
        self._tasks.clear()
        self._tasks.update(tasks)
        self.next_number = max([self.next_number, next_number, *(known.next_number for known in tasks.values())])
        self._keep_again()

    def _keep_again(self) -> None:
        """Keep the rows of what is to be handed out once more for it, as far as all of a batch are free."""
        for name, known in self._tasks.items():
            known.again = [one for one in known.again if self._is_free(name, one.partition, one.rows)]
            known.deals = [one for one in known.deals if one.partition in self._tables]
            kept = [(one.partition, one.rows) for one in known.again] + [
                (one.partition, one.rows) for one in known.deals
            ]
            for partition, rows in kept:
                table = self._tables[partition]
                slots, task = table.slots_of(rows), table.task(name)
                task.reserve(task.offered(slots[slots >= 0]), REPLAYED)

    def _is_free(self, name: str, partition: str, rows: Slots) -> bool:
        """Whether all rows are there, and the task has none of them."""
        table = self._tables.get(partition)
        slots = _NONE if table is None else table.slots_of(rows)
        if table is None or not bool((slots >= 0).all()):
            return False
        task = table.task(name)
        return bool((~task.consumed[slots] & (task.lease[slots] == 0)).all())

    def hold_again(self, name: str, again: Sequence[int], served: Sequence[int], deals: Sequence[str]) -> None:
        """Of what a task takes once more, these batches are still to come, it has those, and the deals of these
        partitions are to come."""
        known = self._tasks[name]
        batches = {batch.number: batch for batch in (*known.again, *known.served)}
        known.again, known.served = [batches[one] for one in again], [batches[one] for one in served]
        known.deals = [deal for deal in known.deals if deal.partition in deals]

    def end_leases(self) -> None:
        """Nothing is lent any more: what was handed out once more, and was not used, is to come again."""
        for known in self._tasks.values():
            known.end_leases()
            known.again = sorted([*known.again, *known.served], key=lambda batch: batch.number)
            known.served = []
        for table in self._tables.values():
            for task in table.tasks.values():
                task.take_back(np.flatnonzero(task.lease == REPLAYED), REPLAYED, used=False)
        self._keep_again()

    @property
    def last_lease(self) -> int:
        """The highest number of a lease that a batch was taken on: another lease must not pass for it."""
        return max((known.last_lease for known in self._tasks.values()), default=0)

    def used_by(self, name: str, partition: str, row: int) -> list[tuple[int, int]]:
        """(step, number of the batch) of those that a task took this row with; step -1 since the last mark."""
        known = self._tasks.get(name)
        if known is None:
            return []
        segments = [*known.done.items(), (-1, known.open)]
        return [
            (step, batch.number) for step, segment in segments for batch in segment.batches
            if batch.partition == partition and bool((batch.own == row).any())
        ]  # fmt: skip

    # what fetches do

    def note(self, message: m.Fetch, reply: m.RowSet) -> None:
        """A task takes these rows."""
        if message.task not in self._tasks:
            return
        sampling = {**message.sampling, DP_SIZE: message.dp_size} if message.dp_size else message.sampling
        rows, fields = indexes_of(reply.rows), message.fields
        was_used = bool(message.lease_s) and not reply.lease  # a rank has its share once more, of which nothing is left
        repeated = len(rows) if was_used else reply.repeated
        taken = TakenRows(
            self.next_number, message.partition, rows, fields, message.batch_size, sampling, reply.lease, repeated
        )
        self.took(message.task, taken)

    def took(self, name: str, taken: TakenRows) -> None:
        """A task with steps takes a batch."""
        known = self._tasks[name]
        self.next_number = max(self.next_number, taken.number + 1)
        if self._ledger is not None:
            self._ledger.note(f.BatchTaken(name, taken.saved()))
        known.open.add([taken], [])
        if known.open.is_too_long:
            log.warning("task %r took more than %d rows since its last mark: its steps are forgotten", name, MAX_ROWS)
            self._forget(name)

    def dealt(self, message: m.Fetch, shares: dict[int, Slots], size: int) -> None:
        """A batch of a task was dealt to its ranks."""
        if message.task in self._tasks:
            deal = TakenDeal(message.partition, message.dp_size, message.batch_size, shares, size)
            self.add_deals(message.task, [deal])

    def add_deals(self, name: str, deals: list[TakenDeal]) -> None:
        """Ranks of a task with steps are dealt these."""
        self._tasks[name].open.add([], deals)
        if self._ledger is not None:
            for deal in deals:
                self._ledger.note(f.BatchDealt(name, deal.saved()))

    def undone(self, task: str, rows: Slots) -> None:
        """Nobody got the answer with these rows, which were consumed by it. A step may have been marked since."""
        known = self._tasks.get(task)
        for segment in () if known is None else (known.open, *reversed(known.done.values())):
            for place in reversed(range(len(segment.batches))):
                batch = segment.batches[place]
                if not batch.lease and np.isin(batch.rows, rows).any():
                    if self._ledger is not None:
                        self._ledger.note(f.BatchUndone(task, rows.tobytes()))
                    del segment.batches[place]
                    return

    def are_due(self, task: str) -> bool:
        """Whether the task has batches to take once more."""
        known = self._tasks.get(task)
        return known is not None and known.are_due()

    def again(self, message: m.Fetch, table: Table) -> TakenRows | None:
        """The batch that this request is to get once more, see `served`; None when it is to get others."""
        known = self._tasks[message.task]
        if not message.dp_size:  # what ranks had is theirs only
            deals = [deal for deal in known.deals if deal.partition == message.partition]
            self._let_go(known, table, message.task, deals)
        mine = [batch for batch in known.again if batch.partition == message.partition]
        is_plain = not message.dp_size and "dp_rank" not in message.sampling
        if mine and (not is_plain or any(batch.batch_size != message.batch_size for batch in mine)):
            self._let_go(known, table, message.task, mine)  # the loop is another one now
            return None
        gone: list[TakenRows] = []
        for batch in mine:
            slots = table.slots_of(batch.rows)
            written = table.written(slots, message.fields) if (slots >= 0).all() else None
            if written is not None and written.all():
                self._let_go(known, table, message.task, gone)
                return batch
            gone.append(batch)
        self._let_go(known, table, message.task, gone)
        return None

    def served(self, task: str, batch: TakenRows) -> None:
        """A batch that was to be handed out once more, has been."""
        known = self._tasks[task]
        known.again = [one for one in known.again if one is not batch]
        known.served.append(batch)
        self._note_again(task)

    def deals_again(self, message: m.Fetch, table: Table) -> list[TakenDeal]:
        """What the ranks of this request are dealt once more, the first as the batch that it asks for."""
        known = self._tasks[message.task]
        mine = [deal for deal in known.deals if deal.partition == message.partition]
        if not mine:
            return []
        self._let_go(known, table, message.task, mine)
        if any((deal.dp_size, deal.batch_size) != (message.dp_size, message.batch_size) for deal in mine):
            return []
        self.add_deals(message.task, mine)
        return mine

    def came_back(self, table: Table, name: str, slots: Slots) -> Slots:
        """Those of these rows, which came back, that anybody may have. A batch that was handed out once more and came
        back whole is to be handed out once more again, unless rows of it are held back or dead letters now."""
        known = self._tasks.get(name)
        if known is None or not known.served:
            return slots
        rows, task = table.index[slots], table.tasks[name]
        free = table.index[task.offered(slots)]
        kept = []
        for batch in [one for one in known.served if one.partition == table.name]:
            if np.isin(batch.rows, rows).any():
                known.served = [one for one in known.served if one is not batch]
            if np.isin(batch.rows, free).all():
                kept.append(batch)
        if not kept:
            self._note_again(name)
            return slots
        known.again = sorted([*known.again, *kept], key=lambda batch: batch.number)
        held = np.isin(rows, np.concatenate([batch.rows for batch in kept]))
        task.reserve(task.offered(slots[held]), REPLAYED)
        self._note_again(name)
        return slots[~held]

    def _note_again(self, name: str) -> None:
        if self._ledger is not None:
            known = self._tasks[name]
            again, served = ([batch.number for batch in batches] for batches in (known.again, known.served))
            self._ledger.note(f.HeldAgain(name, again, served, sorted({deal.partition for deal in known.deals})))

    def _let_go(self, known: TaskSteps, table: Table, name: str, gone: list[Any]) -> None:
        """These are not kept any more; their rows are offered like any others."""
        if not gone:
            return
        lost = {id(one) for one in gone}
        known.again = [batch for batch in known.again if id(batch) not in lost]
        known.deals = [deal for deal in known.deals if id(deal) not in lost]
        if name in self._tasks:
            self._note_again(name)
        kept = [batch.rows for batch in known.again if batch.partition == table.name]
        kept += [deal.rows for deal in known.deals if deal.partition == table.name]
        task = table.tasks[name]
        held = table.index[np.flatnonzero(task.lease == REPLAYED)]
        slots = table.slots_of(np.setdiff1d(held, np.concatenate([_NONE, *kept])))
        if len(task.take_back(slots, REPLAYED, used=False)):
            self._offered(table, name)

    def closed(self, partition: str) -> None:
        """A partition is gone."""
        for known in self._tasks.values():
            known.again = [batch for batch in known.again if batch.partition != partition]
            known.served = [batch for batch in known.served if batch.partition != partition]
            known.deals = [deal for deal in known.deals if deal.partition != partition]

    def reset(self, task: str) -> None:
        """What a task used counts for nothing any more, and neither do its marks. What was kept for it is offered."""
        if task in self._tasks:
            self._forget(task)
            for table in list(self._tables.values()):
                if task in table.tasks:
                    self._served(table, task)

    def _forget(self, name: str) -> None:
        known = self._tasks.pop(name)
        gone = [*known.again, *known.deals]
        for table in list(self._tables.values()):
            if name in table.tasks:
                self._let_go(known, table, name, gone)

    # requests

    def resume(self, message: m.ResumeStep) -> m.StepResumed:
        """Raises `InvalidInput` for a step that was not marked, or too long ago."""
        for name in message.tasks:
            if name not in self._tasks or message.step not in self._tasks[name].done:
                raise InvalidInput(f"step {message.step} of task {name!r}: {self._marks(name)}")
        resumed = m.StepResumed(message.rid, 0, 0, 0)
        for name in dict.fromkeys(message.tasks):
            self._resume(name, message.step, resumed)
        return resumed

    def _marks(self, name: str) -> str:
        known = self._tasks.get(name)
        return f"it has marks of {list(known.done)}" if known is not None and known.done else "it has no marks"

    def check_mark(self, message: m.MarkStep) -> None:
        """`InvalidInput` for a step before one that was marked, and for no tasks and pools."""
        if not (message.tasks or message.pools) or message.step < 0:
            raise InvalidInput(f"step {message.step} of tasks {message.tasks}: name a task at least, and a step from 0")
        for name in message.tasks:
            last = next(reversed(self._tasks[name].done), None) if name in self._tasks else None
            if last is not None and message.step < last:
                raise InvalidInput(f"step {message.step}: task {name!r} is at step {last}; `resume` goes back to one")

    def mark(self, message: m.MarkStep) -> m.Reply:
        """The newest step may be marked again: what was taken since belongs to it as well."""
        for name in dict.fromkeys(message.tasks):
            known = self._tasks.setdefault(name, TaskSteps())
            used, lent = self._settled(name, known.open.batches)
            over, left = self._parted(name, known.open.deals)
            if self._ledger is not None:
                saved = [batch.saved() for batch in lent], [deal.saved() for deal in left]
                self._ledger.note(f.StepMarked(name, message.step, *saved))
            known.close(message.step, Segment.of(used, over), Segment.of(lent, left))
        return m.Done(message.rid)

    def marked(self, name: str, step: int, lent: list[TakenRows], left: list[TakenDeal]) -> None:
        """A task marked a step, and this was not used then. Who it was lent to is not known any more."""
        known = self._tasks.setdefault(name, TaskSteps())
        used = self._settled(name, known.open.batches)[0]
        known.close(step, Segment.of(used, self._parted(name, known.open.deals)[0]), Segment.of(lent, left))

    def _resume(self, name: str, step: int, resumed: m.StepResumed) -> None:
        known = self._tasks[name]
        segments = [segment for number, segment in known.done.items() if number > step]
        batches = [batch for segment in segments for batch in segment.batches]
        due = {(batch.partition, row) for batch in known.again for row in batch.rows.tolist()}
        for one, latest in self._with_theirs(name, known.open.batches):
            came_back = np.array([(one.partition, row) in due for row in one.own.tolist()], np.bool_)
            batches += one.part(latest & ~came_back)
        batches += known.again
        deals = [deal for segment in (*segments, known.open) for deal in segment.deals] + known.deals
        known.done = {number: segment for number, segment in known.done.items() if number <= step}
        known.open, known.again, known.served, known.deals = Segment(), [], [], []
        there = {table.name: table for table in self._tables.values() if name in table.tasks}
        for table in there.values():
            mine = [batch for batch in batches if batch.partition == table.name]
            ours = [deal for deal in deals if deal.partition == table.name]
            self._keep(table, name, mine, ours, resumed)
        resumed.lost += sum(one.partition not in there for one in batches)  # another may have the name by now
        for table in there.values():
            self._served(table, name)

    def _keep(
        self, table: Table, name: str, batches: list[TakenRows], deals: list[TakenDeal], resumed: m.StepResumed
    ) -> None:
        """Nobody has any of these rows any more, and those that come in a batch again are kept for it."""
        known, task = self._tasks[name], table.tasks[name]
        dead = table.index[task.dead_letters()]
        slots = table.slots_of(np.setdiff1d(np.concatenate([_NONE, *(batch.own for batch in batches)]), dead))
        task.give_back(slots[slots >= 0])
        self._free(table, name)
        for batch in batches:
            slots = table.slots_of(np.setdiff1d(batch.own, dead))
            if (slots < 0).any():
                resumed.lost += 1
                continue
            resumed.batches += 1
            resumed.rows += len(slots)
            if batch.is_plain and len(slots):
                alive = batch.rows[~np.isin(batch.rows, dead)]
                known.again.append(batch._replace(number=self.next_number, rows=alive, lease=0))
                self.next_number += 1
                task.reserve(task.offered(slots), REPLAYED)
        for deal in deals:
            shares = {rank: self._left(table, name, rows) for rank, rows in deal.shares.items()}
            if any(len(rows) for rows in shares.values()):
                known.deals.append(deal._replace(shares=shares))
                task.reserve(table.slots_of(known.deals[-1].rows), REPLAYED)

    def _left(self, table: Table, name: str, rows: Slots) -> Slots:
        """Those of these rows that are on offer, in order."""
        slots = table.slots_of(rows)
        there = slots >= 0
        task = table.tasks[name]
        there[there] = ~task.consumed[slots[there]] & (task.lease[slots[there]] == 0)
        return rows[there]

    def _settled(self, name: str, batches: list[TakenRows]) -> tuple[list[TakenRows], list[TakenRows]]:
        """(what of these the task has used, what it still has on lease); what came back is in neither."""
        used: list[TakenRows] = []
        lent: list[TakenRows] = []
        for batch, mine in self._with_theirs(name, batches):
            is_used, is_lent = self._fate(name, batch)
            used += batch.part(mine & is_used)
            lent += batch.part(mine & is_lent) if len(mine) else []
        return used, lent

    def _with_theirs(self, name: str, batches: list[TakenRows]) -> list[tuple[TakenRows, Flags]]:
        """Each batch with which of its own rows no later one has; without dead letters, which none has."""
        found = []
        later: dict[tuple[str, int], tuple[Any, ...]] = {}  # who took a row last, by partition and row
        dead: dict[str, Slots] = {}
        for batch in reversed(batches):
            taker = (batch.lease, batch.sampling.get("batch_index"))
            own = batch.own.tolist()
            mine = np.array([later.setdefault((batch.partition, row), taker) == taker for row in own], np.bool_)
            table = self._tables.get(batch.partition)
            if table is not None and name in table.tasks:
                if batch.partition not in dead:
                    dead[batch.partition] = table.index[table.tasks[name].dead_letters()]
                if len(dead[batch.partition]):
                    mine &= ~np.isin(batch.own, dead[batch.partition])
            found.append((batch, mine))
        return found[::-1]

    def _fate(self, name: str, batch: TakenRows) -> tuple[Flags, Flags]:
        """Which of a batch's own rows are used, and which it still has on lease. Rows that were cleared are used."""
        table = self._tables.get(batch.partition)
        used, lent = np.ones(len(batch.own), np.bool_), np.zeros(len(batch.own), np.bool_)
        if table is not None and name in table.tasks:
            task, slots = table.tasks[name], table.slots_of(batch.own)
            there = slots >= 0
            used[there] = task.consumed[slots[there]]
            lent[there] = (task.lease[slots[there]] == batch.lease) & (batch.lease > 0)
        return used, lent

    def _parted(self, name: str, deals: list[TakenDeal]) -> tuple[list[TakenDeal], list[TakenDeal]]:
        """(what of these the task has used, what it has not). Ranks that mark a step amid a deal, after as many rows
        each, have it in two parts, so that the same micro-batches come once more. Other deals stay whole."""
        over: list[TakenDeal] = []
        left: list[TakenDeal] = []
        for deal in deals:
            is_open = {rank: self._is_open(deal, name, rows) for rank, rows in deal.shares.items()}
            used = {rank: rows[~is_open[rank]] for rank, rows in deal.shares.items()}
            rest = deal.part({rank: rows[is_open[rank]] for rank, rows in deal.shares.items()})
            are_level = len(set(map(len, used.values()))) == 1
            over += deal.part(used) if rest and are_level else [] if rest else [deal]
            left += rest if are_level else [deal] if rest else []
        return over, left

    def _is_open(self, deal: TakenDeal, name: str, rows: Slots) -> Flags:
        """Which rows of a deal are there and not used."""
        table = self._tables.get(deal.partition)
        if table is None or name not in table.tasks:
            return np.zeros(len(rows), np.bool_)
        slots = table.slots_of(rows)
        there = slots >= 0
        there[there] = ~table.tasks[name].consumed[slots[there]]
        return there

    def taken(self, message: m.GetStep) -> m.Reply:
        """Raises `InvalidInput` for a step that was not marked, or too long ago."""
        known = self._tasks.get(message.task)
        if known is None:
            raise InvalidInput(f"task {message.task!r} has no marks: steps are known from the first `checkpoint` on")
        batches: list[TakenRows] = []
        if message.step is not None and message.step not in known.done:
            raise InvalidInput(f"step {message.step} of task {message.task!r}: {self._marks(message.task)}")
        if message.step is not None:
            batches = known.done[message.step].batches
        elif message.with_batches:
            used, lent = self._settled(message.task, known.open.batches)
            batches = sorted([*used, *lent], key=lambda batch: batch.number)
        told = [self._told(batch) for batch in batches] if message.with_batches else []
        return m.StepTaken(message.rid, list(known.done), told)

    def _told(self, batch: TakenRows) -> m.TakenBatch:
        table = self._tables.get(batch.partition)
        slots = _NONE if table is None else table.slots_of(batch.rows)
        slots = slots[slots >= 0]
        there = m.RowSet(0, b"", None, [], None)
        names: list[str | None] = []
        rewritten: dict[str, bytes] = {}
        retagged = b""
        if table is not None and len(slots):
            tags, schema = table.tags_of(slots), table.schema(batch.fields)
            there = m.RowSet(0, rows_bytes(table.index[slots]), tags, schema, None, loads=table.loads)
            names = [table.names[slot] for slot in slots.tolist()]
            changed = table.rewrites.cells_since(batch.number, slots, batch.fields)
            rewritten = {name: rows_bytes(table.index[slots[flags]]) for name, flags in changed.items()}
            retagged = rows_bytes(table.index[slots[table.rewrites.tags_since(batch.number, slots)]])
        return m.TakenBatch(
            batch.partition, rows_bytes(batch.rows), list(batch.fields), batch.batch_size, batch.sampling,
            batch.repeated, there, names, rewritten, retagged,
        )  # fmt: skip

    def check_invariants(self) -> None:
        """What is kept to be handed out once more is in a batch that is, or in a deal; tests call this."""
        for table in self._tables.values():
            for name, task in table.tasks.items():
                kept = set(table.index[np.flatnonzero(task.lease == REPLAYED)].tolist())
                known = self._tasks.get(name)
                again = [] if known is None else [*(b.rows for b in known.again), *(d.rows for d in known.deals)]
                assert kept <= {row for rows in again for row in rows.tolist()}
