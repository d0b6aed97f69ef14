"""The controller: every request has one method, and its effects are complete when the method returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from transfer_queue.controller import hints
from transfer_queue.controller.deadlines import earliest
from transfer_queue.controller.departures import Departures
from transfer_queue.controller.expected_cells import check_expected
from transfer_queue.controller.facts import BlocksGivenUp, UnitGivenUp
from transfer_queue.controller.fetch import check_fetch, check_insert, row_set
from transfer_queue.controller.group_checks import REQUESTS as GROUP_REQUESTS
from transfer_queue.controller.group_results import SortedResults, left_out, new_blocks, without_refused
from transfer_queue.controller.leases import REQUESTS as LEASE_REQUESTS
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.locks import REQUESTS as LOCK_REQUESTS
from transfer_queue.controller.locks import Locks
from transfer_queue.controller.marks import mark, resume
from transfer_queue.controller.moving import gather, relocate
from transfer_queue.controller.notices import tell_waiting
from transfer_queue.controller.overview import Overviews, wait_places
from transfer_queue.controller.queries import Queries, known_slots
from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.redelivery import REQUESTS as DEAD_LETTER_REQUESTS
from transfer_queue.controller.reported_fleets import ReportedFleets
from transfer_queue.controller.restore import StateLoader
from transfer_queue.controller.series import REQUESTS as SERIES_REQUESTS
from transfer_queue.controller.shared_cells import shared_fields, write_shared
from transfer_queue.controller.snapshot import capture
from transfer_queue.controller.staleness import REQUESTS as VERSION_REQUESTS
from transfer_queue.controller.state import ControllerState, RowQuotaExceeded
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.controller.unreceived import Grant, GroupGrant, InsertGrant, LockGrant
from transfer_queue.controller.watching import Watching
from transfer_queue.errors import InvalidInput, RowCleared, ServiceUnavailable, StoreFull, TransferQueueError
from transfer_queue.sampler.base import BaseSampler, forgets_partitions
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of
from transfer_queue.wire.messages.staleness import Policy

NO_BLOCK = -1
MAX_NEW_ROWS = 1 << 24
GIVEN_UP = "was given up when another process took its unit over: nothing of it is stored, put the rows again"


class Controller:
    """All partitions of one service.

    `handle` answers a request, raises the caller's error, or returns None after parking it; the answer then appears in
    `outbox`. `block_index.freed` lists blocks without live cells. `max_rows` bounds the rows over all partitions (None:
    no bound), `reserved_rows` is how many rows a new partition has from the start. `policy`: how old rows may be. Locks
    and leases of groups have numbers above `lock_number`. A row that a task had on a lease `max_deliver` times in vain
    is a dead letter (None: never). `ledger`: where it is written down what lasts.
    """

    def __init__(
        self,
        sampler: BaseSampler,
        max_rows: int | None = None,
        reserved_rows: int = 1,
        policy: Policy | None = None,
        lock_number: int = 0,
        max_deliver: int | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.state = state = ControllerState(sampler, max_rows, ledger)
        self.tables, self.block_index, self.lineage = state.tables, state.block_index, state.lineage
        self.outbox, self.payloads = state.outbox, state.payloads
        self.in_doubt: set[Hashable] = set()
        self.restoring = StateLoader(state, self.retry_quota_waiters)
        self.max_rows, self.reserved_rows = max_rows, reserved_rows
        self._fetching = state.fetching
        self._leases, self._unreceived = self._fetching.leases, self._fetching.unreceived
        self._redelivery = self._fetching.redelivery
        self._redelivery.max_deliver = max_deliver
        self.staleness = state.staleness
        self.staleness.policy = policy or Policy()
        state.lock_numbers.last = lock_number
        self.locks = Locks(self.outbox, self._unreceived, state.lock_numbers)
        self._fleets = ReportedFleets()
        self._departures = Departures()
        self._terms = (self._leases.deadlines, self.locks.deadlines, *state.groups.deadlines)  # of all that is lent
        self._quota_waiters: WaitQueue[Any] = WaitQueue()  # requests for new rows that wait for room
        self._rules: dict[type, Callable[[Any], m.Reply]] = {
            m.Commit: self._commit, m.Insert: self._insert, m.Find: self._find, m.Clear: self._clear,
            m.SetTags: self._set_tags, m.ResetConsumption: self._reset, m.SetPartition: self._set_partition,
            m.Announce: self._announce, m.ResumeStep: lambda message: resume(message, state.fetching, state.groups),
        }  # fmt: skip
        self.groups, self.series, self.watching = state.groups, state.series, Watching(self.outbox, self.tables)
        admits = self.staleness.admissions.parked
        others = (self.locks.parked, self.groups.parked, self.series.parked, self.watching.parked)
        self._lots = (self._fetching.parked, self._quota_waiters, admits, *others)  # requests that wait, but for loads
        self._timed = (*self._terms, self._redelivery, self.locks, *self._lots)
        self.groups.clear = self.series.clear = self._clear
        self.groups.number_above(lock_number)
        self.series.open = lambda name: self._open(name, 0)
        self._lasting = self._rules | self.groups.rules | self.series.rules
        if ledger is not None:
            self._lasting = {kind: ledger.noting(rule, state) for kind, rule in self._lasting.items()}
        self._rules = {kind: self._lasting[kind] for kind in self._rules}
        self.groups.rules |= {kind: self._lasting[kind] for kind in (*self.groups.rules, m.Clear)}
        self.series.rules |= {kind: self._lasting[kind] for kind in self.series.rules}
        parts = (
            (GROUP_REQUESTS, self.groups.handle), (SERIES_REQUESTS, self.series.handle),
            (self.watching.requests, self.watching.handle), (LOCK_REQUESTS, self.locks.handle),
            (self._fleets.requests, self._fleets.handle),
            (VERSION_REQUESTS, self.staleness.handle),
            (LEASE_REQUESTS, lambda message, ticket, session, now: self._fetching.lent(message, session)),
            (DEAD_LETTER_REQUESTS, lambda message, *asker: self._redelivery.handle(message)),
        )  # fmt: skip
        self._parts: dict[type, Callable[..., m.Reply | None]] = {kind: part for kinds, part in parts for kind in kinds}
        self._rules |= {m.GetStep: self._fetching.steps.taken, **Queries(self.tables).rules}
        owners = (self.staleness, self.locks, self.groups, self.series, self.watching)
        places = wait_places(self._quota_waiters, lambda: self.max_rows, *owners)
        self._rules |= Overviews(state, places, self._fleets, self._departures).rules

    def handle(self, message: m.Request, ticket: Hashable, session: bytes, now: float) -> m.Reply | None:
        reply = self._handle(message, ticket, session, now)
        if self.watching.parked:  # something may have changed
            self.watching.serve()
        return reply

    def _handle(self, message: m.Request, ticket: Hashable, session: bytes, now: float) -> m.Reply | None:
        kind = type(message)
        self.state.asked_at, self._leases.now = now, self._leases.now if kind in m.READS else now
        self.lineage.check(message)
        if kind in self._rules:
            return self._by_rule(self._rules[kind], message, ticket, session, now)
        if kind in self._parts:
            return self._parts[kind](message, ticket, session, now)
        match message:
            case m.Fetch(timeout_s=timeout_s, waited_s=waited_s):
                check_fetch(message)
                parked = Waiter(ticket, session, message, now + timeout_s, now - waited_s, waited_s)
                return self._fetching.fetch(parked, self.tables.get(message.partition))
            case m.MarkStep():
                return mark(message, self._fetching, self.groups, session)
            case m.Snapshot():
                return capture(self.state, message, ticket, session)
            case m.Restore():
                return self.restoring.start(message, ticket)
        assert isinstance(message, m.Recycle), message
        self.state.end_captures(session, message.snapshot)
        return m.Done(message.rid)

    def _by_rule(
        self, rule: Callable[[Any], m.Reply], message: m.Request, ticket: Hashable, session: bytes, now: float
    ) -> m.Reply | None:
        """The answer, or None after parking a request for new rows."""
        try:
            reply = rule(message)
            self._note_inserted(message, reply, session)
            return reply
        except RowQuotaExceeded as full:
            timeout_s = getattr(message, "timeout_s", 0.0)
            if timeout_s <= 0 or full.never:
                raise StoreFull(str(full)) from None
            self._quota_waiters.add(Waiter(ticket, session, message, now + timeout_s, now))
            return None

    def apply(self, message: m.Request) -> None:
        """Carry out a request that was not refused before, in the state that it was made in."""
        self._lasting[type(message)](message)

    def notice_after(self, seconds: Sequence[float]) -> None:
        """When those who wait are told what is missing; ascending."""
        for lot in self._lots:
            lot.notice_after_s = seconds

    def next_deadline(self) -> float | None:
        return earliest(self._timed)

    def postpone(self, by_s: float) -> None:
        """What is lent ends so much later: nobody could renew it."""
        for deadlines in self._terms:
            deadlines.postpone(by_s)

    def expire(self, now: float) -> None:
        """End the leases and answer the parked requests whose deadline has come; tell others what is missing."""
        self._leases.now = now
        self._leases.expire()
        self._redelivery.expire(now)
        tell_waiting(self._fetching, self._quota_waiters, self.max_rows, now)
        self._fetching.expire(now)
        for part in (self.staleness.admissions, self.locks, self.groups, self.series, self.watching):
            part.expire(now)
        self.watching.serve()
        for parked in self._quota_waiters.expired(now):
            text = f"the store's {self.max_rows} rows stayed in use for {parked.message.timeout_s:g} s"
            self.outbox.append((parked.ticket, m.Failed(parked.message.rid, StoreFull.code, text)))

    def forget(self, tickets: set[Hashable]) -> None:
        """Drop parked requests whose askers are gone."""
        admits = self.staleness.admissions
        others = (self.locks, self.groups, self.series, self.watching, self.restoring)
        for part in (self._fetching, self._quota_waiters, admits, *others):
            part.forget(tickets)

    def end_session(self, session: bytes) -> None:
        """A client is gone for good: what it had not received, and what is lent to it, is offered again."""
        self.state.end_captures(session)
        for grant in self._unreceived.take_all(session):
            self._undo(grant, session)
        leases = self._fetching.leases
        self._departures.note(leases.now, session, (*leases.listed(session), *self.groups.leases(session)))
        self._fetching.end_session(session)
        self.locks.end_session(session)
        self.groups.end_session(session)
        self._fleets.end_session(session)
        self.watching.serve()

    def received(self, session: bytes, rid: int) -> None:
        """The answer to this request is in its asker's hands: what it took stays taken."""
        self._unreceived.received(session, rid)

    def take_back(self, session: bytes, rid: int) -> None:
        """Nobody gets the answer to this request: what it took is undone."""
        self.state.end_captures(session, rid)
        grant = self._unreceived.take(session, rid)
        if grant is not None:
            self._undo(grant, session)

    def _undo(self, grant: Grant, session: bytes) -> None:
        if isinstance(grant, m.Admitted):
            self.staleness.admissions.give_back(grant.task, grant.count)
        elif isinstance(grant, InsertGrant):
            self._remove_unwritten(grant)
        elif isinstance(grant, LockGrant):
            self.locks.release(grant)
        elif isinstance(grant, GroupGrant):
            self.groups.undo(session, grant)
        else:
            self._fetching.undo(grant)

    def _note_inserted(self, message: m.Request, reply: m.Reply, session: bytes) -> None:
        """Be able to remove new rows, should their asker never get them; remember who wrote what."""
        if type(message) is m.Commit and isinstance(reply, m.Committed):
            self.state.recent.wrote(self._leases.now, session, message, reply.rows)
            if message.finishes:
                self.state.recent.brought(self._leases.now, session, message, message.finishes, reply)
        if type(message) is m.Insert and isinstance(reply, m.RowSet):
            fields = message.fields if message.alone else ()
            grant = InsertGrant(self.tables[message.partition], indexes_of(reply.rows), fields)
            self._unreceived.add(session, message.rid, grant)

    def _remove_unwritten(self, grant: InsertGrant) -> None:
        table = grant.table
        if self.tables.get(table.name) is table:
            self._rules[m.Clear](m.Clear(0, table.name, None, rows_bytes(table.index[grant.unwritten()])))

    @property
    def freed(self) -> list[int]:
        """Blocks to recycle; whoever does it empties the list."""
        return [] if self.state.captures else self.block_index.freed

    @property
    def unfinished(self) -> bool:
        """Whether `tidy` has something to do."""
        return bool(self.state.cleared_partitions or self.restoring.loads)

    def tidy(self) -> None:
        """Do a step of loading a checkpoint, and a slice of what cleared partitions left."""
        self.restoring.step()
        self.state.cleared_partitions.slice()
        self.watching.serve()

    @property
    def num_rows(self) -> int:
        return self.state.num_rows

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._lots)) + len(self.restoring.loads)

    def statistics(self) -> dict[str, Any]:
        return {
            "partitions": len(self.tables), "rows": self.num_rows, "blocks": len(self.block_index.entries),
            "waiting_requests": self.num_waiting, **self.staleness.statistics(),
            "dead_letters": self._redelivery.num_dead, "locks": len(self.locks),
            "groups": self.groups.statistics(), "series": self.series.statistics(),
        }  # fmt: skip

    # writing

    def _commit(self, message: m.Commit) -> m.Reply:
        table = self.tables.get(message.partition)
        self._check(message)
        fields = message.fields
        if message.shared:
            fields = [*fields, *shared_fields(message, table, self.block_index)]
        if message.expected is not None:
            check_expected(message, message.expected, table)
        results = None if message.finishes is None else self.groups.sort(message, message.finishes)
        kept = None if results is None else results.kept  # of the block's rows; None: all
        if results is not None and not len(results.kept):
            return self._without_rows(message, results)
        asked, message = message, message if results is None else without_refused(message, results.kept)
        note = "" if table is None else table.check(fields, message.strict)
        table, slots = self._target(message, table)
        self.block_index.freed += [] if asked is message else left_out(asked, message)
        if message.fields and message.block != NO_BLOCK:
            number = table.group(message.fields)
            released = table.write(slots, number, message.block, kept)
            between = table.between(slots)
            self.block_index.open(message.block, message.count * len(message.fields), table, number, *between)
            self.block_index.release(released)
            if message.count == 1 and (results is None or not results.refused):
                self.state.lone_blocks.note(table, number, int(table.index[slots[0]]), message.block)
        if message.shared:
            write_shared(message, table, slots, self.block_index)
        if message.tags is not None:
            table.put_tags(slots, message.tags, message.replaced)
            self.staleness.tagged(table, slots)
        if fields:
            if self.state.units_away:
                table.withhold(slots)
            self._fetching.written(table, slots, [field.name for field in fields])
            if table.name in self.groups.fields_awaited:
                self.groups.readable(table.name)
        rows = rows_bytes(table.index[slots])
        if results is not None:
            self.groups.finish(message.partition, results, table.index[slots])
        keyed = message.keys is not None
        return m.Committed(
            message.rid, rows, table.tags_of(slots) if keyed else None, table.common_fields(slots) if keyed else [],
            table.loads, note, [] if results is None else results.refused,
        )  # fmt: skip

    def _without_rows(self, message: m.Commit, results: SortedResults) -> m.Reply:
        """Every result of a commit that has rows was refused: its blocks are free."""
        self.block_index.freed += new_blocks(message)
        self.groups.finish(message.partition, results, results.kept)
        return m.Committed(message.rid, b"", None, [], 0, refused=results.refused)

    def _check(self, message: m.Commit) -> None:
        if message.count < 1 or (message.tags is not None and len(message.tags) != message.count):
            raise InvalidInput(f"{message.count} rows with {len(message.tags or ())} tags")
        if len({f.name for f in message.fields}) != len(message.fields):
            raise InvalidInput("a field occurs twice")
        if not all(0 <= position < len(message.tags or ()) for position in message.replaced):
            raise InvalidInput("replaced tags that are not there")
        if message.block < NO_BLOCK or (not message.fields and message.block != NO_BLOCK):
            raise InvalidInput(f"block {message.block} with {len(message.fields)} fields")
        if message.block in self.block_index.entries:
            raise InvalidInput(f"block {message.block} is published already")

    def _target(self, message: m.Commit, table: Table | None) -> tuple[Table, Slots]:
        """Slots of the rows to write; new ones are added only once nothing can be refused any more."""
        if message.rows is not None:
            indexes = indexes_of(message.rows)
            if len(indexes) != message.count or len(np.unique(indexes)) != message.count:
                raise InvalidInput("row indexes repeat or do not fit the number of rows")
            if table is None:
                raise RowCleared(f"partition {message.partition!r} does not exist any more")
            return table, known_slots(table, indexes)
        if message.keys is None:
            table = table or self._open(message.partition, message.count)
            return table, self._new_rows(table, message.count)
        if len(message.keys) != message.count or len(set(message.keys)) != message.count:
            raise InvalidInput("Got duplicated keys.")
        table = table or self._open(message.partition, message.count)
        return table, self._rows_of_keys(table, message.keys, create=True)

    def _insert(self, message: m.Insert) -> m.Reply:
        check_insert(message)
        table = self.tables.get(message.partition) or self._open(message.partition, message.count)
        if message.alone and table.num_rows:
            abandoned = self._unreceived.abandoned(table, message.fields)
            if len(abandoned) < table.num_rows:
                text = f"has {table.num_rows} rows: a step is put once, then cleared"
                raise InvalidInput(f"partition {table.name!r} {text}")
            self._clear(m.Clear(0, table.name, None, rows_bytes(table.index[abandoned])))
            table = self.tables.get(message.partition) or self._open(message.partition, message.count)
        slots = self._new_rows(table, message.count)
        return row_set(message.rid, table, slots, message.fields, bytes(message.count))

    def _find(self, message: m.Find) -> m.Reply:
        table = self.tables.get(message.partition)
        if table is None:
            if not message.create:
                return m.RowSet(message.rid, b"", None, [], None)
            table = self._open(message.partition, len(message.keys))
        slots = self._rows_of_keys(table, message.keys, message.create)
        return row_set(message.rid, table, slots, table.common_fields(slots))

    def _announce(self, message: m.Announce) -> m.Reply:
        return self.groups.announced(self.staleness.announce(message))

    def _set_tags(self, message: m.SetTags) -> m.Reply:
        indexes = indexes_of(message.rows)
        if len(indexes) != len(message.tags):
            raise InvalidInput(f"{len(indexes)} rows with {len(message.tags)} tags")
        table = self.tables.get(message.partition)
        if table is not None:
            slots = known_slots(table, indexes)
            table.merge_tags(slots, message.tags, message.replace)
            self.staleness.tagged(table, slots)
        return m.Done(message.rid)

    def _open(self, name: str, count: int) -> Table:
        """Create a partition about to get `count` rows."""
        self._check_room(count)
        table = self.tables[name] = Table(name, self.lineage.loads, self.state.ledger, self.state.units_away)
        table.life = self.state.next_index
        if self.reserved_rows:
            table.arrivals.note(self.state.next_index, self._leases.now)
            table.reserve(self.state.next_index, self.reserved_rows)
            self.state.next_index += self.reserved_rows
        self._fetching.opened(table)
        return table

    def _check_room(self, count: int) -> None:
        if count > MAX_NEW_ROWS:
            raise InvalidInput(f"{count} new rows in one call, at most {MAX_NEW_ROWS}")
        if self.max_rows is not None and self.num_rows + count > self.max_rows:
            raise RowQuotaExceeded(
                f"{count} more rows do not fit: {self.num_rows} of total_storage_size={self.max_rows} are in use",
                never=count > self.max_rows,
            )

    def _new_rows(self, table: Table, count: int) -> Slots:
        self._check_room(count)
        if table.is_used_up:
            self._fetching.begins(table)
        elif table.name not in self.series.members:  # a partition of a series has one round
            table.end_round()
        slots = table.add(self.state.next_index, count)
        table.arrivals.note(self.state.next_index, self._leases.now)
        self.state.next_index = max(self.state.next_index, int(table.index[table.size - 1]) + 1)
        return slots

    def _rows_of_keys(self, table: Table, keys: Sequence[str], create: bool) -> Slots:
        """Slots in the order of `keys`; unknown ones are created or dropped."""
        known = list(map(table.keys.get, keys))
        if None in known:
            if not create:
                return np.array([slot for slot in known if slot is not None], np.int64)
            missing = list(dict.fromkeys(keys))
            if known.count(None) < len(known):
                missing = [key for key in missing if key not in table.keys]
            slots = self._new_rows(table, len(missing))
            table.name_rows(slots, missing)
            if len(missing) == len(known):
                return slots
            known = [table.keys[key] for key in keys]
        return np.array(known, np.int64)

    # clearing and consumption

    def _clear(self, message: m.Clear) -> m.Reply:
        table = self.tables.get(message.partition)
        if table is None:
            named = message.rows is None  # rows of metadata: the name is right, the partition is gone
            return m.Done(message.rid, hints.unknown("partition", message.partition, self.tables) if named else "")
        if message.keys is not None:
            slots = self._rows_of_keys(table, list(dict.fromkeys(message.keys)), create=False)
        elif message.rows is not None:
            slots = table.slots_of(indexes_of(message.rows))
            slots = np.unique(slots[slots >= 0]) if len(slots) > 1 else slots[slots >= 0]
        else:
            if table.num_alive and not forgets_partitions(self._fetching.sampler):
                self._fetching.cleared(table, table.live_slots())
            self._remove(table)
            self.retry_quota_waiters()
            return m.Done(message.rid)
        if len(slots):
            self._fetching.cleared(table, slots)
            rows = table.index[slots]
            self.block_index.release(table.clear(slots, message.is_asked))
            self.groups.cleared(table.name, rows)
            self._fetching.shrunk(table)
        table.shrink()
        if message.keys is not None and (table.is_spent if message.spares else not table.num_rows):
            self._remove(table)
        self.retry_quota_waiters()
        return m.Done(message.rid)

    def _remove(self, table: Table) -> None:
        """The partition is gone now, and its name is free; its memory is given back in slices."""
        del self.tables[table.name]
        self.groups.cleared(table.name, None)
        self.series.closed(table.name)
        self._fetching.closed(table)
        self.state.cleared_partitions.add(table, self.block_index.entries)

    def retry_quota_waiters(self) -> None:
        """Rows were freed: answer requests that wait for room, in order, as far as it goes."""
        for parked in self._quota_waiters:
            try:
                reply = self._rules[type(parked.message)](parked.message)
            except RowQuotaExceeded:
                return
            except TransferQueueError as error:
                reply = m.Failed(parked.message.rid, error.code, str(error))
            self._quota_waiters.remove(parked)
            self._note_inserted(parked.message, reply, parked.session)
            self.outbox.append((parked.ticket, reply))

    def _reset(self, message: m.ResetConsumption) -> m.Reply:
        table = self.tables.get(message.partition)
        if table is None:
            return m.Done(message.rid, hints.unknown("partition", message.partition, self.tables))
        unheard = message.task is not None and message.task not in table.tasks
        note = hints.unknown("task", message.task or "", table.tasks) if unheard else ""
        for name in [message.task] if message.task is not None else list(table.tasks):
            task = table.task(name)
            self._leases.revoke(task)
            self._unreceived.void(table, name)
            task.forget_ranks()
            self._fetching.steps.reset(name)
            task.reset(table)
            self.staleness.review(table, name)
            self._fetching.serve(table, task, list(task.views.values()))
        return m.Done(message.rid, note)

    def _set_partition(self, message: m.SetPartition) -> m.Reply:
        if min(message.size or 0, *message.sizes.values(), 0) < 0:
            raise InvalidInput(f"size {message.size}, sizes {message.sizes}")
        table, note = self.tables.get(message.partition), ""
        if table is None:
            note = hints.created(message.partition, self.tables)
            table = self._open(message.partition, 0)
        self._fetching.declare(table, message)
        return m.PartitionInfo(message.rid, True, table.declared, table.metadata, table.num_rows, note)

    # moving

    def rows_in(self, block: int) -> tuple[Slots, list[str]] | None:
        """(rows of `block` with live cells, ascending; fields with live cells), or None when there are none."""
        entry = self.block_index.find(block)
        return None if entry is None else entry.table.rows_in(entry.group, block, entry.first, entry.last)

    def relocate(self, block: int, target: int, rows: Slots) -> bool:
        """The live cells of `block` now lie in `target`, whose rows are `rows` of the old block, ascending (none: all,
        as they are).

        `block` is freed. False when none was left to move. `ProtocolError` when `target` cannot be that.
        """
        return relocate(self.state, block, target, rows)

    def gather(self, target: int, blocks: Slots, rows: Slots) -> bool:
        """What the first row of `blocks[i]` holds, which is that of the row with index `rows[i]`, now lies in row i of
        `target`. The rows ascend.

        Only of rows that all of it still lay there. False when there are none. `ProtocolError` when `target` cannot be
        that.
        """
        return gather(self.state, target, blocks, rows)

    def refuse_commits(self, blocks: Slots) -> None:
        """A storage unit has given up these blocks: whatever still waits to put rows there fails."""
        gone = set(blocks.tolist())
        for parked in self._quota_waiters:
            named = [getattr(parked.message, "block", 0)]
            named += [one.block for one in getattr(parked.message, "shared", ())]
            if not gone.isdisjoint(named):
                self._quota_waiters.remove(parked)
                text = f"block {min(gone.intersection(named))} {GIVEN_UP}"
                self.state.outbox.append((parked.ticket, m.Failed(parked.message.rid, ServiceUnavailable.code, text)))
        self.restoring.refuse(gone)

    def hide(self, unit: int) -> None:
        """The blocks of a storage unit cannot be read now: nobody is offered a row with cells there."""
        self.state.units_away.add(unit)
        for table in self.tables.values():
            table.withhold(table.rows_on(unit))

    def show(self, unit: int) -> None:
        """They can be read again."""
        if unit in self.state.units_away:
            self.state.units_away.discard(unit)
            for table in list(self.tables.values()):
                self._fetching.shown(table, table.rows_on(unit))
                self.groups.readable(table.name)

    def lose(self, unit: int) -> None:
        """The blocks of a storage unit are gone: their cells are not ready any more, and asking for them says so."""
        self.state.units_away.discard(unit)
        if self.state.ledger is not None:
            self.state.ledger.note(UnitGivenUp(unit))
        self.restoring.lose(unit)
        self.block_index.lose([number for number in self.block_index.entries if number >> m.UNIT_SHIFT == unit])

    def lose_blocks(self, blocks: Sequence[int]) -> dict[str, int]:
        """As `lose`, of these alone; how many rows of each partition."""
        if self.state.ledger is not None:
            self.state.ledger.note(BlocksGivenUp(list(blocks)))
        return self.block_index.lose(blocks)

    def check_invariants(self) -> None:
        """Tables agree with themselves, and the block index with the tables; tests call this after each event."""
        owners: list[Any] = [self._leases, self._redelivery, self._fetching.steps, self._unreceived, self.staleness]
        for owner in [*owners, self.locks, self.groups, self.series, *self.tables.values()]:
            owner.check_invariants()
        self.block_index.check_invariants(self.tables.values(), self.state.cleared_partitions.blocks())
