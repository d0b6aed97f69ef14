"""Handing ready rows to tasks: calling the sampler, parking the requests it cannot satisfy, waking them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from transfer_queue.controller.dealing import Dealing
from transfer_queue.controller.endings import holder_of, is_complete, is_produced, rest
from transfer_queue.controller.leases import (
    HOLDER_ENDED,
    MAX_LEASE_S,
    FailedAttempt,
    LeaseRequest,
    Leases,
    check_lease,
)
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.notices import nothing, timed_out
from transfer_queue.controller.readiness import Flags, ReadyView, Slots, Task
from transfer_queue.controller.recent import RecentEvents
from transfer_queue.controller.redelivery import Redelivery, check_max_deliver, redelivered
from transfer_queue.controller.sampler_calls import SamplerCalls, refused_rest
from transfer_queue.controller.sampler_view import SamplerView
from transfer_queue.controller.sharing import SharePicker
from transfer_queue.controller.staleness import Staleness, check_limit, for_sampler
from transfer_queue.controller.steps import Steps
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.controller.taken import TakenRows
from transfer_queue.controller.unreceived import ConsumedGrant, Grant, LeaseGrant, Unreceived
from transfer_queue.errors import InvalidInput, LeaseExpired, SamplerFailed, TransferQueueError, UnknownMode
from transfer_queue.sampler.base import BaseSampler, takes
from transfer_queue.sampler.streaming_token_budget_sampler import BUDGET
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of
from transfer_queue.wire.messages import ALL, DONE, PASSED, Ack, Failed, Fetch, MarkStep, Reply, RowSet, Tags

MIN_WAITERS = 16
_OF_EVERY_SAMPLER = (BaseSampler.least_ready, BaseSampler.has_cached_result)


class Fetching:
    """Fetch requests of all partitions. `outbox` collects (ticket, reply) for parked ones that were answered."""

    def __init__(
        self,
        sampler: BaseSampler,
        outbox: list[tuple[Hashable, Reply]],
        tables: Mapping[str, Table],
        ledger: Ledger | None = None,
        recent: RecentEvents | None = None,
    ) -> None:
        self.sampler = sampler
        self.calls = SamplerCalls(sampler)
        self._recent = recent or RecentEvents()
        self.tables = tables
        self.unreceived = Unreceived()
        self.dealing = Dealing(self._freed)
        self.staleness = Staleness(tables, outbox, self._rows_consumed, self.unreceived, ledger)
        self.redelivery = Redelivery(tables, self._offered, self.staleness.admissions.give_back, self.dealing.refused)
        self.leases = Leases(tables, self._offered, self._rows_consumed, self.redelivery.came_back, self._recent)
        self.steps = Steps(tables, self._free_all, self._look_again, self._serve_all, ledger)
        self.sharing = SharePicker(self.dealing, self.calls, self.steps)
        self.parked: WaitQueue[Fetch] = WaitQueue()
        self._on_behalf: dict[bytes, list[Waiter[Fetch]]] = {}  # by the session that would hold their rows
        self._orphans: dict[str, list[Waiter[Fetch]]] = {}  # their partition, or its next round, is not there (yet)
        self.outbox = outbox
        kind = type(sampler)
        self._samples_rows_only = (kind.least_ready, kind.has_cached_result) == _OF_EVERY_SAMPLER
        self._remembered = False  # the sampler remembers a result that others may wait for

    def fetch(self, request: Waiter[Fetch], table: Table | None) -> Reply | None:
        """Rows at once, or None after parking the request."""
        message = request.message
        self.dealing.prepare(message, self.sampler)
        if message.batch_size != ALL:
            self.calls.ask(self.sampler.check_request, message.batch_size, self._config(message))
        if table is not None and self.dealing.is_early(table, message, holder_of(request)):
            table = None
        if table is not None:
            reply = self._attempt(request, table)
            if self._remembered:
                self.serve(table, table.task(message.task), ())
            if reply is not None:
                self._rows_consumed(table, table.task(message.task))
                return reply
            if message.until_done and self._is_done(request, table):
                return nothing(message.rid, DONE)
        elif message.until_cleared:
            return nothing(message.rid, DONE)
        if message.timeout_s <= 0:
            return timed_out(message, table)
        self.parked.add(request)
        if message.holder:
            others = self._on_behalf.get(message.holder, ())
            self._on_behalf[message.holder] = [*(one for one in others if self.parked.holds(one)), request]
        if table is None:
            self._orphans.setdefault(message.partition, []).append(request)
        else:
            waiters = self._wait(table, request)
            if len(waiters) > 2 * len(self.parked) + MIN_WAITERS:
                waiters[:] = [one for one in waiters if self.parked.holds(one)]
        return None

    def opened(self, table: Table) -> None:
        """A partition was created: requests that waited for it now wait for its rows. Where all that it was to get was
        used, as in one that was loaded, those that begin wait on, and loops that had some are over."""
        table.rewrites.batches = self.steps
        for request in self._orphans.pop(table.name, ()):
            if not self.parked.holds(request):
                continue
            if self.dealing.is_early(table, request.message, holder_of(request)):
                self._orphans.setdefault(table.name, []).append(request)
            else:
                self._wait(table, request)
        if table.is_used_up:
            self.shrunk(table)

    def begins(self, table: Table) -> None:
        """All that a partition was to get was used and cleared, and it is about to get rows again."""
        table.begin_round()
        self.opened(table)

    def _wait(self, table: Table, request: Waiter[Fetch]) -> list[Any]:
        """Let a parked request wait for rows; returns all that wait for the same."""
        task = table.task(request.message.task)
        if request.message.until_done:
            task.finishing = [one for one in task.finishing if self.parked.holds(one)]
            task.finishing.append(request)
        waiters = self._view(table, request.message).waiters
        waiters.append(request)
        return waiters

    def closed(self, table: Table) -> None:
        """A partition is gone: its waiters wait for the next one of that name, unless that is the end for them."""
        self.orphan(table)
        self.staleness.closed(table)
        ended = [one for one in self._orphans.get(table.name, ()) if one.message.until_cleared]
        for request in ended:
            self.parked.remove(request)
            self.outbox.append((request.ticket, nothing(request.message.rid, DONE)))
        self._abandon(ended)
        self.dealing.forget(table)
        self.steps.closed(table.name)
        self.calls.tell(self.sampler.clear_cache, table.name)

    def cleared(self, table: Table, slots: Slots) -> None:
        """These rows are about to go."""
        self.calls.tell(self.sampler.forget, table.name, set(table.index[slots].tolist()))

    def orphan(self, table: Table) -> None:
        """The waiters of a partition wait for the next one of that name."""
        waiting = [w for task in table.tasks.values() for view in task.views.values() for w in view.waiters]
        held = [w for w in waiting if self.parked.holds(w)]
        if held:
            self._orphans.setdefault(table.name, []).extend(held)

    def written(self, table: Table, slots: Slots, fields: Sequence[str]) -> None:
        """Cells of `fields` were written on `slots`: rows may be ready now."""
        touched = set(fields)
        self.staleness.written(table, slots, touched)
        for task, view, ready in _views_of(table, slots, touched):
            more = task.mark(view, slots, ready)
            # of rows that were taken before, a remembered batch may be complete now
            if view.waiters and (more or _any_taken(task, slots)):
                self.serve(table, task, (view,))

    def shown(self, table: Table, slots: Slots) -> None:
        """Rows that could not be read can be: who waits for them gets them."""
        for task in list(table.tasks.values()):
            for view in task.views.values():
                task.refresh(view, table, slots)
            self._remembered = True  # of rows that were dealt, a share may be complete now
            self.serve(table, task, ())

    def serve(self, table: Table, task: Task, views: Sequence[ReadyView]) -> None:
        """Answer waiters of these views, in order of arrival, as far as the rows go.

        Then those of the whole task for which the sampler came to remember a result meanwhile: its rows are consumed
        and do not become ready again.
        """
        for view in views:
            self._serve(table, view)
        while self._remembered:
            self._remembered = False
            for view in list(task.views.values()):
                self._serve(table, view)

    def _serve(self, table: Table, view: ReadyView) -> None:
        if not view.waiters:
            return
        waiting, view.waiters = view.waiters, []
        kept = []
        for request in waiting:
            if not view.count and self._needs_rows(request.message) and not self.steps.are_due(request.message.task):
                kept.append(request)  # many may wait for the same few rows
                continue
            if not self.parked.holds(request):
                continue
            reply: Reply | None
            try:
                reply = self._attempt(request, table)
            except TransferQueueError as error:
                reply = Failed(request.message.rid, error.code, str(error))
            if reply is None:
                kept.append(request)
            else:
                self.parked.remove(request)
                self.outbox.append((request.ticket, reply))
                self._rows_consumed(table, table.task(request.message.task))
        view.waiters = kept + view.waiters

    def _needs_rows(self, message: Fetch) -> bool:
        """Whether nothing but ready rows can answer it: no share that was dealt, nothing that the sampler remembers."""
        return self._samples_rows_only and not message.sampling and not message.dp_size

    def _offered(self, table: Table, task: str, slots: Slots) -> None:
        """Rows that were lent are free again."""
        slots = self.steps.came_back(table, task, slots)
        self.dealing.offered(table, task, slots)
        self.calls.tell(self.sampler.offer_again, table.name, task, set(table.index[slots].tolist()))
        self.staleness.freed(table, task, slots)
        of_task = table.tasks[task]
        fuller = [view for view in list(of_task.views.values()) if of_task.refresh(view, table, slots)]
        self.serve(table, of_task, fuller)

    def _freed(self, table: Table, task: str, slots: Slots) -> None:
        """Rows that were kept for a rank are free."""
        self._remembered = True  # maybe amid the waiters of a view: they are all looked at again
        self._offered(table, task, slots)
        self._rows_consumed(table, table.tasks[task])

    def _free_all(self, table: Table, name: str) -> None:
        """Nothing of a task is lent or kept any more; `_serve_all` offers its rows."""
        task = table.tasks[name]
        self.leases.revoke(task)
        self.unreceived.void(table, name)
        task.forget_ranks()
        task.free()
        self.calls.tell(self.sampler.offer_again, table.name, name, set(table.index[table.live_slots()].tolist()))

    def _look_again(self, table: Table, name: str) -> None:
        """All rows of a task that are ready and free are offered. Maybe amid its waiters: they are looked at again."""
        task, live = table.tasks[name], table.live_slots()
        for view in task.views.values():
            task.refresh(view, table, live)
        self.staleness.review(table, name)
        self._remembered = True

    def _serve_all(self, table: Table, name: str) -> None:
        """Offer them, and answer who waits."""
        self._look_again(table, name)
        self.serve(table, table.tasks[name], ())

    def _rows_consumed(self, table: Table, task: Task) -> None:
        """Rows were consumed, lent or cleared: requests `until_done` may have nothing to wait for any more."""
        if not task.finishing:
            return
        is_dealt = bool(task.groups)
        if task.num_consumed + task.num_lent < table.num_rows or is_dealt:
            if (not task.num_lent or is_dealt) and table.is_filled:
                self.serve(table, task, [self._view(table, one.message) for one in task.finishing])
            if not is_dealt:
                return
        for request in list(task.finishing):
            if self.parked.holds(request) and self._is_done(request, table):
                self.parked.remove(request)
                self.outbox.append((request.ticket, nothing(request.message.rid, DONE)))

    def shrunk(self, table: Table) -> None:
        """Rows were cleared, or fewer are expected."""
        for task in list(table.tasks.values()):
            self._rows_consumed(table, task)
            if table.is_filled:
                waiting = [view for view in task.views.values() if view.waiters]
                asked = [view for view in waiting if any(one.message.batch_size == ALL for one in view.waiters)]
                self.serve(table, task, asked)

    def mark(self, message: MarkStep, session: bytes) -> Reply:
        """What was used of a step is acknowledged, and the step is marked; or neither. Of a batch, as of one that a
        stream goes on from, rows that it refused itself are left out."""
        self.steps.check_mark(message)
        for lease, _ in message.used:
            self.leases.check(lease, None)
        for lease, rows in message.used:
            self.leases.handle(Ack(message.rid, lease, rows, but_returned=True), session)
        return self.steps.mark(message)

    def declare(self, table: Table, message: m.SetPartition) -> None:
        """It is known how many rows will be there: who waits for all of them may have them, or for nothing any more."""
        if message.size is not None and table.is_used_up:
            self.begins(table)
        table.declare(message.size, message.sizes, message.metadata)
        if message.size is None and not message.sizes:
            return
        self.shrunk(table)
        for task in list(table.tasks.values()):
            self.serve(table, task, [view for view in task.views.values() if view.waiters])

    def _is_done(self, request: Waiter[Fetch], table: Table) -> bool:
        """Whether every row is consumed by the task or lent to the asker, and as many as declared were there."""
        holder = holder_of(request)
        if request.message.dp_size:
            group = self.dealing.group_of(table, request.message, holder)
            return group is not None and self.dealing.is_over(table, request.message, group, holder)
        task = table.task(request.message.task)
        if not is_complete(table, request.message):
            return False
        return task.num_consumed == table.num_rows or (
            task.num_consumed + task.num_lent == table.num_rows and task.num_lent == self.leases.lent_to(holder, task)
        )

    def lent(self, message: LeaseRequest, session: bytes) -> m.Lent:
        """What becomes of rows on lease. Raises as `Leases.handle`."""
        if isinstance(message, m.Release) and not message.lease:
            self.end_session(session, tried=False)
            return m.Lent(message.rid, 0)
        return self.leases.handle(message, session)

    def end_session(self, session: bytes, tried: bool = True) -> None:
        """Refuse what still waits in its name, and offer again what only it holds, which was `tried` in vain or not."""
        for request in self._on_behalf.pop(session, ()):
            if self.parked.holds(request):
                self.parked.remove(request)
                self._abandon([request])
                text = "the session that would hold the rows has ended"
                self.outbox.append((request.ticket, Failed(request.message.rid, LeaseExpired.code, text)))
        self.dealing.end_session(session, self.tables)
        self.leases.end_session(session, FailedAttempt(HOLDER_ENDED) if tried else None)

    def forget(self, tickets: set[Hashable]) -> None:
        """The askers are gone."""
        self._abandon(self.parked.forget(tickets))

    def _abandon(self, requests: Sequence[Waiter[Fetch]]) -> None:
        """Those no longer parked do not wait for their partition any more."""
        for name in {request.message.partition for request in requests} & self._orphans.keys():
            self._orphans[name] = [one for one in self._orphans[name] if self.parked.holds(one)]
            if not self._orphans[name]:
                del self._orphans[name]

    def expire(self, now: float) -> None:
        expired = self.parked.expired(now)
        self._abandon(expired)
        for request in expired:
            try:
                reply: Reply = timed_out(request.message, self.tables.get(request.message.partition))
            except TransferQueueError as error:
                reply = Failed(request.message.rid, error.code, str(error))
            self.outbox.append((request.ticket, reply))

    def _view(self, table: Table, message: Fetch) -> ReadyView:
        task, fields = table.task(message.task), tuple(message.fields)
        self.staleness.govern(table, message.task, message.sampling)
        self.redelivery.govern(task, message.sampling)
        known = fields in task.views
        view = task.view(fields, table)
        if not known and task.limit.refuses:
            self.staleness.review(table, message.task)
        return view

    def _attempt(self, request: Waiter[Fetch], table: Table) -> RowSet | None:
        """Rows for the request, consumed or lent; None when the sampler is not satisfied."""
        message, sampler = request.message, self.sampler
        view = self._view(table, message)
        if self.steps.are_due(message.task):
            if message.dp_size:
                self.dealing.deal_again(table, message, self.steps.deals_again(message, table))
            taken = self.steps.again(message, table)
            if taken is not None:
                return self._hand_out_again(request, table, taken)
        if message.dp_size:
            return self._share_out(request, table, view)
        if message.batch_size == ALL:
            return self._hand_out_all(request, table, view)
        config = {**for_sampler(message.sampling), "partition_id": message.partition, "task_name": message.task}
        remembers = not self._needs_rows(message)
        cached = remembers and self.calls.ask(sampler.has_cached_result, message.partition, message.task, config)
        last = rest(message, table, view)
        size = last or message.batch_size
        if not cached and view.count < (self.calls.ask(sampler.least_ready, size) if remembers else size):
            return None
        try:
            slots, used = self._sample(size, config, table, view)
        except InvalidInput as error:
            raise refused_rest(error, last, table.name) from None
        if not len(slots) or (cached and not _all_ready(table, slots, message.fields)):
            return None
        if (
            remembers
            and not cached
            and self.calls.ask(sampler.has_cached_result, message.partition, message.task, config)
        ):
            self._remembered = True
        reply = row_set(message.rid, table, slots, message.fields)
        if sampler.reserves:
            task = table.task(message.task)
            task.reserve(task.offered(np.setdiff1d(used, slots)))
            used = slots
        return self._grant(request, table, used, reply)

    def _grant(self, request: Waiter[Fetch], table: Table, used: Slots, reply: RowSet) -> RowSet:
        """These rows are consumed or lent with the reply."""
        message, task = request.message, table.task(request.message.task)
        fresh = task.claim(used)
        if task.returned:
            reply.redelivered = redelivered(task, table.slots_of(indexes_of(reply.rows)))
        if message.lease_s:
            holder = holder_of(request)
            reply.lease = self.leases.take(table, message.task, used, fresh, holder, message.lease_s)
            if reply.lease:
                self.unreceived.add(request.session, message.rid, LeaseGrant(reply.lease, holder))
        else:
            task.consume(fresh)
            task.forgive(fresh)
            self._note_consumed(request, table, used, fresh)
        self.steps.note(message, reply)
        self._recent.took(self.leases.now, request.session, message, reply.rows)
        return reply

    def _hand_out_all(self, request: Waiter[Fetch], table: Table, view: ReadyView) -> RowSet | None:
        """All ready rows, once there are as many as were declared to have the fields."""
        message, size = request.message, table.expects(request.message.fields)
        if size is None or not view.count or view.count + table.num_gone(message.fields) < size:
            return None
        slots = view.first(None, table.size)
        return self._grant(request, table, slots, row_set(message.rid, table, slots, message.fields))

    def _hand_out_again(self, request: Waiter[Fetch], table: Table, taken: TakenRows) -> RowSet | None:
        """A batch that the task had, before its loop went back to an earlier step; None while it cannot be read."""
        slots = table.slots_of(taken.rows)
        if not _all_ready(table, slots, request.message.fields):
            return None
        self.steps.served(request.message.task, taken)
        return self._grant(request, table, slots, row_set(request.message.rid, table, slots, request.message.fields))

    def _share_out(self, request: Waiter[Fetch], table: Table, view: ReadyView) -> RowSet | None:
        """As `_attempt`, for one of several ranks: its share of a batch of all of them, which is dealt now if need be.

        The answer is empty when the group is done, and when nothing is left of the share.
        """
        message, dealing = request.message, self.dealing
        group = dealing.join(table, message, holder_of(request))
        if message.until_done and dealing.is_over(table, message, group, holder_of(request)):
            return nothing(message.rid, DONE)
        share = dealing.find(message, group)
        if share is None:
            if not self.sharing.deal(message, table, view, group):
                if message.until_done and dealing.is_passed(table, message, group):
                    return nothing(message.rid, PASSED)
                # now: refused rows may be left over
                is_over = message.until_done and dealing.is_over(table, message, group, holder_of(request))
                return nothing(message.rid, DONE) if is_over else None
            self._remembered = True  # others may wait for theirs
            share = dealing.find(message, group)
            assert share is not None
        elif share.is_torn or share.num_refused:
            self.sharing.mend(message, table, view, group, share)
        own = table.slots_of(share.rows)
        own = own[own >= 0]
        if len(own) and not _all_ready(table, own, message.fields):
            return None
        more = dealing.padding(table, message, group, share, own)
        rows = np.concatenate([own, more])
        if not len(rows):
            return nothing(message.rid, PASSED)
        if table.away and not _all_ready(table, rows, message.fields):
            return None
        reply = row_set(message.rid, table, rows, message.fields)
        reply.repeated = len(more)
        self._grant(request, table, own, reply)
        if reply.lease:
            group.leases.add(reply.lease)
        return reply

    def _config(self, message: Fetch) -> dict[str, Any]:
        """What the sampler is to look at; where batches are dealt, it need not know about ranks."""
        asked = for_sampler(message.sampling)
        if not message.dp_size:
            return asked
        own = ("dp_rank", "batch_index")
        return {name: value for name, value in asked.items() if name not in own or takes(self.sampler, name)}

    def _note_consumed(self, request: Waiter[Fetch], table: Table, used: Slots, fresh: Slots) -> None:
        """Be able to give the rows back, should their asker never get them."""
        if len(fresh):
            grant = ConsumedGrant(table, request.message.task, table.index[fresh])
        else:
            shared = self.unreceived.sharing(table, request.message.task, used)
            if shared is None:
                return
            grant = shared
            grant.askers += 1
        self.unreceived.add(request.session, request.message.rid, grant)

    def undo(self, grant: Grant) -> None:
        """Nobody got the answer that carried these rows: the task is offered them again."""
        if isinstance(grant, LeaseGrant):
            self.leases.undo(grant)
        elif isinstance(grant, ConsumedGrant):
            grant.askers -= 1
            if grant.askers or self.tables.get(grant.table.name) is not grant.table:
                return
            slots = grant.table.slots_of(grant.rows)
            back = grant.table.tasks[grant.task].give_back(slots[slots >= 0])
            self.steps.undone(grant.task, grant.rows)
            self._offered(grant.table, grant.task, back)

    def _sample(self, batch_size: int, config: dict[str, Any], table: Table, view: ReadyView) -> tuple[Slots, Slots]:
        """The slots to hand out and those used up. Raises `SamplerFailed` for rows that do not exist."""
        slots = view.first(self.calls.needs(batch_size), table.size)
        candidates = table.index[slots].tolist()  # the sampler's, which may change it
        config["partition"] = SamplerView(table)
        if config.get(BUDGET) is not None:
            config["production_done"] = is_produced(table, config["task_name"], view)

        def slots_of(answer: Any) -> tuple[Slots, Slots]:
            sampled, consumed = answer
            return self._slots_of(sampled, slots, table), self._slots_of(consumed, slots, table)

        return self.calls.understood(self.calls.ask(self.sampler.sample, candidates, batch_size, **config), slots_of)

    def _slots_of(self, rows: Any, offered: Slots, table: Table) -> Slots:
        """The slots of the rows that the sampler names; most name the first that they were offered."""
        first = offered[: len(rows)]
        if type(rows) is list and rows == table.index[first].tolist():
            return first
        slots = table.slots_of(np.array(rows, np.int64))
        if (slots < 0).any():
            raise SamplerFailed(f"{type(self.sampler).__name__} chose rows that are not in partition {table.name!r}")
        return slots


def _views_of(table: Table, slots: Slots, touched: set[str]) -> Iterator[tuple[Task, ReadyView, Flags | None]]:
    """The views that ask for some of the fields that were `touched`, and which of the slots are ready for each. Many
    tasks ask for the same few sets of fields: each set is looked up once."""
    known: dict[tuple[str, ...], Flags | None] = {}
    for task in table.tasks.values():
        for view in list(task.views.values()):
            if view.fields not in known:
                known[view.fields] = table.ready(slots, view.fields)
            if not touched.isdisjoint(view.fields):
                yield task, view, known[view.fields]


def _any_taken(task: Task, slots: Slots) -> bool:
    """Whether some of the rows were handed out, or are kept for somebody."""
    return bool(task.consumed[slots].any() or task.lease[slots].any())


def _all_ready(table: Table, slots: Slots, fields: Sequence[str]) -> bool:
    ready = table.ready(slots, fields)
    return ready is not None and bool(ready.all())


def row_set(rid: int, table: Table, slots: Slots, fields: Sequence[str], ready: bytes | None = None) -> RowSet:
    tags: list[Tags] | None = table.tags_of(slots)
    return RowSet(rid, rows_bytes(table.index[slots]), tags, table.schema(fields), ready, loads=table.loads)


def check_fetch(message: Fetch) -> None:
    """`InvalidInput` for what no rows could satisfy."""
    if not message.fields or len(set(message.fields)) != len(message.fields):
        raise InvalidInput(f"data_fields {message.fields}: name each field to wait for once")
    if message.batch_size < 1 and (message.batch_size != ALL or message.dp_size or message.until_done):
        raise InvalidInput(f"batch_size {message.batch_size}")
    if not 0 <= message.waited_s < MAX_LEASE_S:
        raise InvalidInput(f"waited_s {message.waited_s}")
    check_lease(message.lease_s)
    check_limit(message.sampling)
    check_max_deliver(message.sampling)


def check_insert(message: m.Insert) -> None:
    """`UnknownMode`, as 0.1.11 has it, for rows that no fetch could find."""
    if message.count < 1 or not message.fields:
        raise UnknownMode('get_meta mode "insert" needs batch_size >= 1 and data_fields')
