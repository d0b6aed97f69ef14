"""Groups of siblings, as requests: who waits for what, who works on which slot, who has which groups.

The pools themselves are in `transfer_queue.groups`. Whatever lasts is a request that one of the `rules` carries out and
notes: what somebody took is said as such a request when it is known. Tickets that were not used, attempts, leases and
the right to refill belong to a session, and return with its end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from transfer_queue.controller.deadlines import Deadlines
from transfer_queue.controller.group_changes import CHANGES
from transfer_queue.controller.group_checks import (
    MAX_VERSION,
    OUTCOMES,
    check_pools,
    check_unused,
    check_versions,
    check_waiting,
)
from transfer_queue.controller.group_holdings import AttemptTerm, GroupLease, SessionHoldings, pay_refill, workers
from transfer_queue.controller.group_reports import (
    by_state,
    described,
    finished_rows,
    has_fields,
    leased,
    lent_group,
    rows_of,
    summary,
    tell_rows,
)
from transfer_queue.controller.group_results import SortedResults, enter, finish_named, sort_results
from transfer_queue.controller.group_waits import place_of, unlike_asked, wanted
from transfer_queue.controller.leases import check_lease
from transfer_queue.controller.notices import answer_waiting, too_late
from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.recent import RecentEvents
from transfer_queue.controller.source_uses import SourceUses
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.controller.unreceived import GroupGrant, Unreceived
from transfer_queue.controller.wait_lines import WaitLines
from transfer_queue.controller.weight_versions import WeightVersions
from transfer_queue.errors import DeadlineExceeded, InvalidInput, LeaseExpired, TransferQueueError
from transfer_queue.groups import PoolCore, UsedNumbers
from transfer_queue.groups.again import resume
from transfer_queue.groups.shortfall import needed
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire import messages as m


class GroupPools:
    """All pools of a service. Answers to parked requests go to `outbox`. `deadlines`: when leases and attempts end.
    `clear` removes rows of a partition. `rules` carry out what lasts. `now`: the time of the event that is handled."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        outbox: list[tuple[Hashable, m.Reply]],
        unreceived: Unreceived,
        versions: Callable[[], WeightVersions],
        now: Callable[[], float],
        recent: RecentEvents,
    ) -> None:
        self.pools: dict[str, PoolCore] = {}
        self.used = UsedNumbers()
        self.parked: WaitQueue[Any] = WaitQueue()
        self._lines = WaitLines(self.parked)
        self.fields_awaited: set[str] = set()  # partitions where somebody waits for groups with certain fields
        self.clear: Callable[[m.Clear], m.Reply]
        self._tables = tables
        self._outbox = outbox
        self._unreceived = unreceived
        self._versions = versions
        self._leases: dict[int, GroupLease] = {}
        self._lease_ends = Deadlines(self._leases)
        self._terms: dict[int, AttemptTerm] = {}
        self._term_ends = Deadlines(self._terms)
        self.deadlines = (self._lease_ends, self._term_ends)
        self.number_above(0)
        self._holdings: dict[bytes, SessionHoldings] = {}
        self.uses = SourceUses(now)
        self._now = now
        self._recent = recent
        self.rules: dict[type, Callable[[Any], m.Reply]] = {
            m.OpenPool: self._open_pool, m.RemovePool: self._remove, m.AdvancePool: self._advance,
            m.OpenGroup: self._open, m.StartSlots: self._start, m.FinishSlots: self._finish,
            m.ConsumeGroups: self._consume, m.IssueTickets: self._issue, m.LendGroups: self._lend,
            m.ResumePool: self.resume,
            **{kind: partial(self._change, change) for kind, change in CHANGES.items()},
        }  # fmt: skip

    def handle(self, message: Any, ticket: Hashable, session: bytes, now: float) -> m.Reply | None:
        """The answer, or None after parking."""
        if isinstance(message, OUTCOMES):
            raise InvalidInput(f"{type(message).__name__} is what the service makes of other requests")
        if isinstance(message, m.OpenPool):
            message.first_number = self.first_number
        if type(message) in self.rules:
            return self._lasting(message, session)
        match message:
            case m.RenewGroups(lease=number, lease_s=lease_s):
                check_lease(lease_s)
                lease = self._live(number)
                lease.deadline = max(lease.deadline, now + lease_s)
            case m.AckGroups(lease=number, groups=names, clears=clears):
                lease, names = self._part(number, names)
                self._tell("acknowledged", lease, names)
                self.rules[m.ConsumeGroups](m.ConsumeGroups(0, lease.partition, names, clears))
                self._shrink(lease, names)
            case m.ReleaseGroups(lease=number, groups=names):
                lease, names = self._part(number, names)
                self._release(lease, names)
            case m.DescribePool(partition=partition):
                return m.Report(message.rid, self._description(partition, now))
            case _:
                return self._wait(Waiter(ticket, session, message, now + message.timeout_s, now))
        return m.Done(message.rid)

    def _lasting(self, message: Any, session: bytes) -> m.Reply:
        reply = self.rules[type(message)](message)
        if isinstance(message, m.OpenGroup) and message.refills:
            pay_refill(message.partition, [self._of(session), *self._holdings.values()])
        if isinstance(message, m.FinishSlots):  # those of a commit are told of with it
            finished_rows(self._recent, self._now(), session, message, self.pools[message.partition])
        return reply

    def number_above(self, above: int) -> None:
        """Leases, and attempts and tickets of pools made or loaded from now on, have no number of an earlier life."""
        self._numbers = itertools.count(above + 1)
        self.first_number = above // 1000  # milliseconds: 0 while a journal is read, whose pools have theirs

    # what lasts

    def _open_pool(self, message: m.OpenPool) -> m.Reply:
        partition, known = message.partition, self.pools.get(message.partition)
        if known is None or known.policy != message.policy:
            newest = self._versions().newest
            version = message.version if message.version is not None else newest if newest is not None else 0
            check_versions(version)
            if known is not None:
                check_unused(partition, known, f"has another policy ({known.policy}), and is in use")
                self._retire(partition, known)
            self.used.retire(message.first_number, message.first_number)
            self.pools[partition] = PoolCore(self.used.begin(message.policy, version))
            self._changed(partition)
        return m.Done(message.rid)

    def _remove(self, message: m.RemovePool) -> m.Reply:
        partition, pool = message.partition, self.pools.get(message.partition)
        if pool is not None:
            if not message.discards:
                check_unused(partition, pool)
            self._retire(partition, pool)
            del self.pools[partition]
            self._refuse_waiting("was removed")
            self._lines.drop(partition)
        return m.Done(message.rid)

    def _retire(self, partition: str, pool: PoolCore) -> None:
        """Nobody has something of this pool any more, or gets it."""
        pool.give_up()
        self._clear_rows(partition, pool.discarded)
        self.used.retire(pool.state.next_ticket, pool.state.next_attempt)
        self._end_leases(partition)
        for number in [number for number, term in self._terms.items() if term.partition == partition]:
            del self._terms[number]
        for held in self._holdings.values():
            held.drop(partition)
        self.uses.drop(partition, pool)

    def _end_leases(self, partition: str) -> None:
        for number in [number for number, lease in self._leases.items() if lease.partition == partition]:
            del self._leases[number]

    def _refuse_waiting(self, why: str) -> None:
        """Whoever waits for something of a pool that is gone hears of it."""
        for parked in [one for one in self.parked if one.message.partition not in self.pools]:
            self.parked.remove(parked)
            text = f"the pool of groups of partition {parked.message.partition!r} {why}"
            self._outbox.append((parked.ticket, m.Failed(parked.message.rid, InvalidInput.code, text)))
        self.fields_awaited &= self.pools.keys()

    def _open(self, message: m.OpenGroup) -> m.Reply:
        check_versions(message.start)
        pool = self.pool(message.partition)
        is_first = not pool.has_groups_of(message.source)
        pool.open(
            message.group, message.size, message.min_size, message.source, message.prompt, message.start,
            message.ticket, message.refills, message.priority,
        )  # fmt: skip
        if is_first:
            self.uses.opened(message.partition, message.source)
        self._changed(message.partition)
        return m.Done(message.rid)

    def _start(self, message: m.StartSlots) -> m.Reply:
        pool = self.pool(message.partition)
        numbers = pool.start(message.slots)
        claimed = []
        for (name, slot), attempt in zip(message.slots, numbers, strict=True):
            group = pool.groups[name]
            claimed.append(m.ClaimedSlot(name, slot, attempt, group.source, group.start, group.target, group.prompt))
        return m.SlotsClaimed(message.rid, claimed, False)

    def _finish(self, message: m.FinishSlots) -> m.Reply:
        pool, table = self.pool(message.partition), self._tables.get(message.partition)
        reply, news = finish_named(message, pool, table, partial(self._clear_rows, message.partition))
        if news:
            self._changed(message.partition)
        return reply

    def sort(self, message: m.Commit, finished: list[m.FinishedSlot]) -> SortedResults:
        """Which results of a commit are wanted, and which of its rows are theirs."""
        if message.keys is not None or message.rows is not None:
            raise InvalidInput("the rows of results are new ones, or named by FinishSlots")
        return sort_results(self.pool(message.partition), finished, message.count)

    def finish(self, partition: str, results: SortedResults, rows: Slots) -> None:
        """Attempts have their results, and these rows, which are new."""
        enter(self.pool(partition), results, rows)
        self._changed(partition)

    def _change(self, change: Callable[[PoolCore, Any], None], message: Any) -> m.Reply:
        change(self.pool(message.partition), message)
        self._changed(message.partition)
        return m.Done(message.rid)

    def _advance(self, message: m.AdvancePool) -> m.Reply:
        check_versions(message.version)
        pool = self.pool(message.partition)
        if message.version > pool.version:
            pool.advance(message.version)
            self._changed(message.partition)
        return m.Done(message.rid)

    def _consume(self, message: m.ConsumeGroups) -> m.Reply:
        pool = self.pool(message.partition)
        sources = {pool.groups[name].source for name in message.groups if name in pool.groups}
        pool.consume(message.groups, message.clears)
        self.uses.used(message.partition, sources, pool, max(self.parked.notice_after_s, default=math.inf))
        self._changed(message.partition)
        return m.Done(message.rid)

    def resume(self, message: m.ResumePool) -> m.PoolResumed:
        found = resume(self.pool(message.partition), message.step)
        self._end_leases(message.partition)
        self._changed(message.partition)
        return m.PoolResumed(message.rid, *found)

    def _issue(self, message: m.IssueTickets) -> m.Reply:
        self.pool(message.partition).issue(message.tickets)
        return m.Done(message.rid)

    def _lend(self, message: m.LendGroups) -> m.Reply:
        pool = self.pool(message.partition)
        pool.lend([pool.group(name) for name in message.groups])
        return m.Done(message.rid)

    def announced(self, reply: m.Reply) -> m.Reply:
        """A version of the weights was announced: every pool judges by it. Gives the answer on."""
        newest = self._versions().newest
        for partition, pool in self.pools.items():
            if newest is not None and pool.version < newest < MAX_VERSION:
                pool.advance(newest)
                self._changed(partition)
        return reply

    def readable(self, partition: str) -> None:
        """Fields were written in a partition, or can be read again: groups may have all that somebody waits for."""
        waiting = (one.message for one in self.parked)
        if not any(one.partition == partition and getattr(one, "fields", None) for one in waiting):
            self.fields_awaited.discard(partition)
        elif partition in self.pools:
            self._changed(partition)

    def cleared(self, partition: str, rows: Slots | None) -> None:
        """These rows of a partition are gone; None: all of it."""
        pool = self.pools.get(partition)
        if pool is not None and pool.lose(list(pool.rows) if rows is None else rows.tolist()):
            self._changed(partition)

    # who waits

    def _wait(self, parked: Waiter[Any]) -> m.Reply | None:
        message = parked.message
        check_waiting(message, self.pool(message.partition))
        newer = getattr(message, "version", None)
        if newer is not None and newer > self.pools[message.partition].version:  # of a selection: it judges first
            self.rules[m.AdvancePool](m.AdvancePool(0, message.partition, newer))
        if unlike := unlike_asked(message, self.pools[message.partition]):
            self.rules[m.UnlendGroups](m.UnlendGroups(0, message.partition, unlike))
        place = place_of(parked)
        reply = None if self._lines.has(message.partition, place) else self._attempt(parked)
        if reply is not None and self._lets_in(message.partition, reply):
            self._changed(message.partition)
        if reply is None and message.timeout_s <= 0:
            raise DeadlineExceeded(too_late(message, "", self.reason))
        if reply is None:
            self.parked.add(parked)
            self._lines.add(message.partition, place, parked)
            if getattr(message, "fields", None):
                self.fields_awaited.add(message.partition)
        return reply

    def _attempt(self, parked: Waiter[Any]) -> m.Reply | None:
        """The answer, if there is one now."""
        message, session = parked.message, parked.session
        pool = self.pool(message.partition)
        match message:
            case m.TakeTickets(count=count):
                return self._give_tickets(pool, message, session, count)
            case m.ClaimSlots():
                return self._claim(pool, message, session)
            case m.SelectGroups():
                return self._select(pool, message, session)
            case m.AwaitGroups(count=count):
                found = pool.num_available
                over = found >= needed(pool, count) or pool.nothing_comes
                return m.Counted(message.rid, found) if over else None
        return self._give_refills(pool, message, session)

    def _give_tickets(self, pool: PoolCore, message: m.TakeTickets, session: bytes, count: int) -> m.Reply | None:
        tickets = pool.tickets(count)
        if tickets is None:
            return None
        self.rules[m.IssueTickets](m.IssueTickets(0, message.partition, tickets))
        for held in self._holdings.values():  # who had one before has used it, or given it back
            held.tickets.get(message.partition, set()).difference_update(tickets)
        self._of(session).take(message.partition, pool, tickets)
        self._unreceived.add(session, message.rid, GroupGrant(message.partition, tickets=tickets))
        return m.Tickets(message.rid, [m.NumberedTicket(one, pool.target_of(one)) for one in tickets])

    def _claim(self, pool: PoolCore, message: m.ClaimSlots, session: bytes) -> m.Reply | None:
        slots = pool.idle(message.count, message.group)
        if not slots:
            return m.SlotsClaimed(message.rid, [], True) if message.group is not None or pool.nothing_comes else None
        reply = self.rules[m.StartSlots](m.StartSlots(message.rid, message.partition, slots))
        assert isinstance(reply, m.SlotsClaimed)
        attempts = [(one.group, one.slot, one.attempt) for one in reply.slots]
        self._of(session).begin(message.partition, pool, attempts)
        if message.attempt_s:
            number = next(self._numbers)
            self._terms[number] = AttemptTerm(message.partition, attempts, self._now() + message.attempt_s)
            self._term_ends.add(number)
        self._unreceived.add(session, message.rid, GroupGrant(message.partition, attempts=attempts))
        return reply

    def _select(self, pool: PoolCore, message: m.SelectGroups, session: bytes) -> m.Reply | None:
        least = needed(pool, message.least)
        accepts = partial(has_fields, self._tables.get(message.partition), message.fields) if message.fields else None
        found, refused = pool.offered(least, message.most, accepts)
        over = pool.nothing_comes and not refused and (bool(found) or pool.ends_with([]))
        if len(found) < least and not over:
            return None
        groups, num_sealed = [group for group, _ in found], pool.num_sealed
        kept = [pool.withheld(group) for group in groups]
        names = [group.name for group in groups]
        lease = GroupLease(next(self._numbers), message.partition, names, session, self._now() + message.lease_s)
        if groups:
            self._tell("selected", lease, names)
            self.rules[m.LendGroups](m.LendGroups(0, message.partition, names))
            self._leases[lease.number] = lease
            self._lease_ends.add(lease.number)
            self._unreceived.add(session, message.rid, GroupGrant(message.partition, lease=lease.number))
        lent = [lent_group(pool, *one, held) for one, held in zip(found, kept, strict=True)]
        rows = rows_of(self._tables.get(message.partition), groups, kept)
        return m.GroupsLent(message.rid, lease.number, pool.version, lent, rows, pool.ends_with(groups), num_sealed)

    def _give_refills(self, pool: PoolCore, message: m.TakeRefills, session: bytes) -> m.Reply | None:
        held = sum(one.refills.get(message.partition, 0) for one in self._holdings.values())
        pool.check_opens()
        count = min(message.most, pool.state.owed - held)
        if count < 1:
            return None
        mine = self._of(session).refills
        mine[message.partition] = mine.get(message.partition, 0) + count
        self._unreceived.add(session, message.rid, GroupGrant(message.partition, refills=count))
        return m.Counted(message.rid, count)

    def _changed(self, partition: str) -> None:
        """Something of a pool is new: its rows that nobody needs go, and whoever waited for it is answered."""
        pool = self.pools[partition]
        if pool.discarded:
            rows, pool.discarded = pool.discarded, []
            self._clear_rows(partition, rows)
        while self._answer_all(partition):
            pass

    def _answer_all(self, partition: str) -> bool:
        """Answer whom it can. Whether that lets in others, who were asked before."""
        lets_in, unlike = False, list[str]()

        def answer(parked: Waiter[Any]) -> bool:
            nonlocal lets_in
            try:
                if found := unlike_asked(parked.message, self.pools[partition]):
                    unlike.extend(found)
                    return False
                reply = self._attempt(parked)
            except TransferQueueError as error:
                reply = m.Failed(parked.message.rid, error.code, str(error))
            if reply is None:
                return False
            self.parked.remove(parked)
            self._outbox.append((parked.ticket, reply))
            lets_in |= self._lets_in(partition, reply)
            return True

        self._lines.serve(partition, answer)
        groups = self.pools[partition].groups  # where somebody may have them by now
        if left := [name for name in dict.fromkeys(unlike) if name in groups and groups[name].state == "due"]:
            self.rules[m.UnlendGroups](m.UnlendGroups(0, partition, left))
        return lets_in

    def _lets_in(self, partition: str, reply: m.Reply) -> bool:
        """Whether this answer lets others go on: producers where a policy has a rate of samples for each insert, and
        who waits for what comes behind a batch that was due."""
        if not isinstance(reply, m.GroupsLent):
            return False
        pool = self.pools[partition]
        return pool.rate.per_insert is not None or any(pool.groups[one.group].is_again for one in reply.groups)

    def _clear_rows(self, partition: str, rows: list[int]) -> None:
        if rows and partition in self._tables:
            self.clear(m.Clear(0, partition, None, rows_bytes(np.array(rows, np.int64))))

    # who has what

    def _of(self, session: bytes) -> SessionHoldings:
        return self._holdings.setdefault(session, SessionHoldings())

    def pool(self, partition: str) -> PoolCore:
        """`InvalidInput` where there is none."""
        pool = self.pools.get(partition)
        if pool is None:
            raise InvalidInput(f"partition {partition!r} has no pool of groups: open one first")
        return pool

    def _live(self, number: int) -> GroupLease:
        lease = self._leases.get(number)
        if lease is None or lease.deadline <= self._now():
            raise LeaseExpired(f"lease {number} of groups is over: what it had not acknowledged is offered to others")
        return lease

    def _part(self, number: int, names: list[str] | None) -> tuple[GroupLease, list[str]]:
        """A lease, and the groups that are meant. `InvalidInput` for others than it has."""
        lease = self._live(number)
        other = set(names or ()) - set(lease.names)
        if other:
            raise InvalidInput(f"lease {number} does not have group {min(other)!r}")
        return lease, list(lease.names) if names is None else list(dict.fromkeys(names))

    def _shrink(self, lease: GroupLease, names: Iterable[str]) -> None:
        gone = set(names)
        lease.names = [name for name in lease.names if name not in gone]
        if not lease.names:
            self._leases.pop(lease.number, None)

    def _release(self, lease: GroupLease, names: list[str]) -> None:
        self._shrink(lease, names)
        if lease.partition in self.pools and names:
            self._tell("returned", lease, names)
            self.rules[m.UnlendGroups](m.UnlendGroups(0, lease.partition, names))

    def _tell(self, what: str, lease: GroupLease, names: Iterable[str]) -> None:
        """Be able to say what became of the rows of these groups."""
        tell_rows(self._recent, self._now(), what, lease, names, self.pools[lease.partition])

    def undo(self, session: bytes, grant: GroupGrant) -> None:
        """Nobody got an answer."""
        held = self._of(session)
        if grant.partition not in self.pools:
            return
        if grant.tickets:
            mine = held.tickets.get(grant.partition, set())
            back = [ticket for ticket in grant.tickets if ticket in mine]  # others may have those that it has not
            mine.difference_update(back)
            self.rules[m.ReturnTickets](m.ReturnTickets(0, grant.partition, back))
        if grant.attempts:
            held.attempts.get(grant.partition, set()).difference_update(grant.attempts)
            self._give_up(m.UnstartSlots, grant.partition, grant.attempts)
        if grant.refills:
            held.refills[grant.partition] = max(0, held.refills.get(grant.partition, 0) - grant.refills)
            self._changed(grant.partition)
        if grant.lease in self._leases:
            self._release(self._leases[grant.lease], list(self._leases[grant.lease].names))

    def _give_up(
        self,
        outcome: Callable[[int, str, list[m.Attempt]], m.Request],
        partition: str,
        attempts: Iterable[tuple[str, int, int]],
    ) -> None:
        """Nobody makes these attempts any more: they failed, or were never made."""
        groups = self.pools[partition].groups
        left = [m.Attempt(*one) for one in sorted(attempts) if one[0] in groups]
        if left:
            message = outcome(0, partition, left)
            self.rules[type(message)](message)

    def end_session(self, session: bytes) -> None:
        """What this session has returns."""
        held = self._holdings.pop(session, None)
        for lease in [one for one in self._leases.values() if one.session == session]:
            self._release(lease, list(lease.names))
        if held is None:
            return
        for partition in {*held.tickets, *held.attempts, *held.refills} & self.pools.keys():
            tickets = sorted(held.tickets.get(partition, set()) & self.pools[partition].state.reserved)
            if tickets:
                self.rules[m.ReturnTickets](m.ReturnTickets(0, partition, tickets))
            self._give_up(partial(m.FailSlots, kind="infra"), partition, held.attempts.get(partition, ()))
            self._changed(partition)

    # time

    def expire(self, now: float) -> None:
        """End the leases and attempts, and answer the requests, whose time is up; tell others what they wait for."""
        while (first := self._term_ends.first()) is not None and first[0] <= now:
            term = self._terms.pop(first[1])
            self._give_up(partial(m.FailSlots, kind="infra"), term.partition, term.attempts)
        while (first := self._lease_ends.first()) is not None and first[0] <= now:
            lease = self._leases[first[1]]
            self._release(lease, list(lease.names))
        self._left(answer_waiting(self.parked, self._outbox, now, "", self.reason))

    def forget(self, tickets: set[Hashable]) -> None:
        """The askers are gone: they do not wait any more."""
        self._left(self.parked.forget(tickets))

    def _left(self, gone: list[Waiter[Any]]) -> None:
        """These wait no more: whoever came behind them may be answered."""
        for partition in {one.message.partition: None for one in gone if one.message.partition in self.pools}:
            self._changed(partition)

    def reason(self, message: Any) -> str:
        return f"{wanted(message)}: {summary(message.partition, self.pool(message.partition))}"

    def _description(self, partition: str, now: float) -> dict[str, Any]:
        pool = self.pool(partition)
        waiting = sum(one.message.partition == partition for one in self.parked)
        return described(pool, self.uses.of(partition, pool), waiting, workers(self._holdings, partition, pool), now)

    def descriptions(self, now: float) -> dict[str, dict[str, Any]]:
        """Every pool, as `status` of one says it."""
        return {partition: self._description(partition, now) for partition in self.pools}

    def group_of(self, partition: str, row: int) -> str | None:
        """The group that a row belongs to."""
        pool = self.pools.get(partition)
        return None if pool is None else pool.owners.get(row)

    def leases(self, holder: bytes | None = None) -> list[m.LeaseOverview]:
        """All leases of groups, or those of one session, as they are shown; `left_s` is when they end."""
        return [leased(it, self.pools[it.partition]) for it in self._leases.values() if holder in (None, it.session)]

    def statistics(self) -> dict[str, dict[str, int]]:
        """How many groups every pool has, by state."""
        return {partition: by_state(pool) for partition, pool in self.pools.items()}

    # saving

    def restore(self, pools: dict[str, PoolCore], used: UsedNumbers) -> None:
        """Go on with saved pools; `forget_holders` is to follow."""
        for one in self.pools.values():  # somebody may still have an attempt or a ticket of it
            self.used.retire(one.state.next_ticket, one.state.next_attempt)
        self.used.retire(self.first_number, self.first_number)
        self._leases.clear()
        self._lease_ends.clear()
        self._terms.clear()
        self._term_ends.clear()
        self._holdings.clear()
        self.uses.clear()
        self.pools = pools
        for pool in pools.values():  # not above what was used in the saved state: a journal goes on with its numbers
            pool.number_attempts(self.used.attempts)
        self.used.retire(used.tickets, used.attempts)
        self._refuse_waiting("is not in the checkpoint")

    def forget_holders(self) -> None:
        """Nobody is left who worked on something or had it. Rows that are not there are lost."""
        for partition, pool in self.pools.items():
            pool.forget_holders()
            table, rows = self._tables.get(partition), np.array(list(pool.rows), np.int64)
            pool.lose((rows if table is None else rows[table.slots_of(rows) < 0]).tolist())
            self._changed(partition)

    def check_invariants(self) -> None:
        """Pools agree with themselves, and leases with them; tests call this after each event."""
        holders = [*self._leases.values(), *self._terms.values(), *(one.message for one in self.parked)]
        assert {one.partition for one in holders} <= self.pools.keys()
        check_pools(self.pools, self._holdings.values(), self._leases.values(), self._tables)
