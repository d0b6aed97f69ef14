"""All groups of one partition: tickets, attempts, sealing, judging, and what is lent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from transfer_queue.errors import GroupEnded, InvalidInput, StaleAttempt
from transfer_queue.groups.choice import due_groups, eligible, is_eligible, is_stale, may_serve, withheld
from transfer_queue.groups.counters import SourceCounters
from transfer_queue.groups.group import MAX_SIZE, Result, SiblingGroup, Slot
from transfer_queue.groups.policy import GroupPolicy
from transfer_queue.groups.priorities import check_priority, index_of
from transfer_queue.groups.rate import SampleRate
from transfer_queue.groups.state import PoolState
from transfer_queue.groups.steps import GroupSteps
from transfer_queue.groups.work import OpenWork


class PoolCore:
    """`discarded`: rows that nobody needs any more; whoever clears them empties the list."""

    def __init__(self, state: PoolState) -> None:
        self.state = state
        self.discarded: list[int] = []
        self.owners = {row: group.name for group in state.groups.values() for row in group.rows}
        self.num_sealed = sum(group.state == "sealed" for group in state.groups.values())
        self.num_open = sum(group.state == "open" for group in state.groups.values())
        self.num_due = sum(group.state == "due" for group in state.groups.values())
        self._num_surplus = sum(group.is_surplus for group in state.groups.values())
        self.num_inserted = sum(one.sealed for one in state.sources.values())
        self.rate = SampleRate(state.policy)
        self.steps = GroupSteps(state.used_after)
        self._index = index_of(state.policy)
        self.work = OpenWork(state.groups)
        for group in state.groups.values():
            self._offer(group)

    @property
    def policy(self) -> GroupPolicy:
        return self.state.policy

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def groups(self) -> dict[str, SiblingGroup]:
        """Those that have not ended, in order of arrival."""
        return self.state.groups

    @property
    def rows(self) -> Set[int]:
        """Of groups that have not ended, and of those that may be handed out once more."""
        return self.owners.keys() | self.steps.owners.keys()

    def source(self, name: str) -> SourceCounters:
        return self.state.sources.setdefault(name, SourceCounters())

    def has_groups_of(self, source: str) -> bool:
        """Whether some of this source have not ended."""
        known = self.state.sources.get(source)
        return known is not None and known.num_live > 0

    def group(self, name: str) -> SiblingGroup:
        """Raises `GroupEnded`, and `InvalidInput` for one that nobody opened."""
        group = self.groups.get(name)
        if group is not None:
            return group
        if name in self.state.fates:
            raise GroupEnded(f"group {name!r} has ended: it was {self.state.fates[name]}")
        raise InvalidInput(f"nobody opened group {name!r}")

    def end(self) -> None:
        """No more groups will be opened: whoever has a ticket can do nothing with it."""
        self.state.ended = True
        self.state.reserved.clear()

    def check_opens(self) -> None:
        """`InvalidInput` where no more groups are opened."""
        if self.state.ended:
            raise InvalidInput("the pool has ended: it was said that no more groups would be opened")

    # tickets

    def tickets(self, count: int) -> list[int] | None:
        """The next tickets, lowest first; None while the gate is closed for one of them, or the rate for so many.
        Raises as `check_opens`."""
        self.check_opens()
        coming = self.num_open + len(self.state.reserved)
        size, inserted = len(self.groups) + len(self.state.reserved), self.num_inserted + coming
        if not self.rate.may_insert(count, size, inserted, self._num_sampled):
            return None
        again = sorted(self.state.returned)[:count]
        found = again + list(range(self.state.next_ticket, self.state.next_ticket + count - len(again)))
        return found if found[-1] <= self._last_ticket() else None

    def issue(self, tickets: Sequence[int]) -> None:
        """These are somebody's now."""
        self.state.returned = [one for one in self.state.returned if one not in tickets]
        self.state.next_ticket = max(self.state.next_ticket, *(one + 1 for one in tickets))
        self.state.reserved.update(tickets)

    def _last_ticket(self) -> float:
        if self.policy.gate is None:
            return float("inf")
        versions = self.version - self.state.base + self.policy.gate + 1
        return versions * self.policy.groups_per_version - 1

    def target_of(self, ticket: int | None) -> int | None:
        """The version that a group with this ticket is for; None where any may use it."""
        if ticket is None or self.policy.serve != "target":
            return None
        return self.state.base + ticket // self.policy.groups_per_version

    def give_back(self, tickets: Iterable[int]) -> None:
        """No group will be opened with these."""
        for ticket in tickets:
            if ticket in self.state.reserved:
                self.state.reserved.discard(ticket)
                self._return(ticket)

    def _return(self, ticket: int) -> None:
        """Others may use it, unless it is for a version that has passed."""
        target = self.target_of(ticket)
        if target is None or target >= self.version:
            self.state.returned.append(ticket)

    def _use(self, ticket: int) -> None:
        """`InvalidInput` for one that was used, or that nobody was given."""
        if ticket in self.state.reserved:
            self.state.reserved.discard(ticket)
        elif ticket in self.state.returned:  # its holder was thought gone
            self.state.returned.remove(ticket)
        else:
            raise InvalidInput(f"ticket {ticket} was used before, or nobody was given it")

    # producing

    def open(
        self,
        name: str,
        size: int,
        min_size: int,
        source: str,
        prompt: dict[str, Any],
        start: int | None,
        ticket: int | None,
        refills: bool,
        priority: float = 1.0,
    ) -> SiblingGroup:
        """The group, which is new; to open it twice in the same way changes nothing.

        Raises `GroupEnded`, and `InvalidInput`: for one that differs, a bad size or priority, a pool that has ended, no
        ticket.
        """
        check_priority(name, priority)
        if name in self.state.fates:
            raise GroupEnded(f"group {name!r} has ended: it was {self.state.fates[name]}")
        known = self.groups.get(name)
        if known is not None:
            if not known.was_opened_as(size, min_size, source, prompt):
                raise InvalidInput(f"group {name!r} is open already, with another size, source or prompt")
            return known
        if not 1 <= min_size <= size <= MAX_SIZE:
            raise InvalidInput(f"group {name!r}: 1 <= min_size <= size <= {MAX_SIZE}, got {min_size} and {size}")
        if self.state.ended:
            raise InvalidInput(f"group {name!r}: it was said that no more would be opened")
        if self.policy.needs_ticket and ticket is None:
            raise InvalidInput(f"group {name!r} needs a ticket: the policy bounds how many are started")
        if ticket is not None:
            self._use(ticket)
        if refills and self.state.owed:
            self.state.owed -= 1
            self.source(source).refilled += 1
        start = self.version if start is None else start
        slots = [Slot() for _ in range(size)]
        group = SiblingGroup(
            name, source, self.state.next_number, min_size, prompt, start, self.target_of(ticket), ticket, slots,
            priority=priority,
        )  # fmt: skip
        self.state.next_number += 1
        self.groups[name] = group
        self.work.add(group)
        self.num_open += 1
        self.source(source).opened += 1
        return group

    def idle(self, count: int, name: str | None) -> list[tuple[str, int]]:
        """Up to `count` idle slots, of one group or of all in order of arrival."""
        if name is not None:
            group = self.group(name)
            return [(name, slot) for slot in group.idle()][:count] if group.state == "open" else []
        return self.work.idle(count)

    def is_running(self, name: str, slot: int, attempt: int) -> bool:
        """Whether this attempt is under way."""
        group = self.groups.get(name)
        if group is None or group.slots[slot].state != "running":
            return False
        return group.slots[slot].attempts == attempt + 1

    def start(self, slots: Sequence[tuple[str, int]]) -> list[int]:
        """The numbers of the attempts, which begin now."""
        numbers = [self.group(name).begin(number, self.state.first_attempt) for name, number in slots]
        self.state.next_attempt = max(self.state.next_attempt, *(one + 1 for one in numbers))
        return numbers

    def unstart(self, name: str, slot: int, attempt: int) -> None:
        """Nobody makes this attempt: others may claim its slot."""
        group = self.groups.get(name)
        if group is not None and group.unbegin(slot, attempt):
            self.work.add(group)

    def done(self, name: str, slot: int, attempt: int, result: Result) -> bool:
        """An attempt has its result; the last one seals the group. Whether it was news. Raises as `check`."""
        if not self.check(name, slot, attempt, result):
            return False
        group = self.groups[name]
        group.finish(slot, result)
        self.owners.update(dict.fromkeys(result.rows, name))
        self._seal(group)
        return True

    def check(self, name: str, slot: int, attempt: int, result: Result | None) -> bool:
        """Whether a result would be news; None is one with rows that are new. Raises as `SiblingGroup.check`, and
        `InvalidInput` for rows that another slot has."""
        group = self.group(name)
        if group.slot(slot).attempts <= attempt < self.state.first_attempt:
            raise StaleAttempt(f"attempt {attempt} at slot {slot} of group {name!r} is of an earlier pool or service")
        if result is not None and group.slot(slot).result is None:
            if len(set(result.rows)) != len(result.rows):
                raise InvalidInput(f"rows of slot {slot} of group {name!r} repeat")
            owned = ((row, self.owners.get(row, self.steps.owner(row))) for row in result.rows)
            if taken := [(row, name) for row, name in owned if name is not None]:
                raise InvalidInput(f"row {taken[0][0]} is a result of group {taken[0][1]!r} already")
        return group.check(slot, attempt, result)

    def fail(self, name: str, slot: int, attempt: int, kind: str) -> None:
        """An attempt has failed: its slot is to be tried again, or the group goes on without it, or is given up."""
        group = self.groups.get(name)
        if group is None or not group.fail(slot, attempt, self.policy.max_attempts):
            return
        self.source(group.source).fail(kind)
        if not group.can_come:
            self._evict(group, ["failed"])
        elif self.policy.retry == "group" and group.slot(slot).state == "idle":
            self.source(group.source).discarded_tokens += sum(result.tokens for result in group.results)
            self.state.settle(group)
            self._forget_rows(group.start_over())
            self.work.add(group)
        else:
            self.work.add(group)
            self._seal(group)

    def _seal(self, group: SiblingGroup) -> None:
        if group.state == "open" and group.is_whole:
            group.state = "sealed"
            self.num_open, self.num_sealed = self.num_open - 1, self.num_sealed + 1
            self.source(group.source).sealed += 1
            self.num_inserted += 1
            self._offer(group)
            self._judge(group)
            self._make_room()

    def _make_room(self) -> None:
        """Where more groups are there than the policy keeps, the oldest go; when they come back, if they are held."""
        capacity = math.inf if self.policy.capacity is None else self.policy.capacity
        while self.num_sealed + self.num_held - self._num_surplus > capacity:
            kept = (group for group in self.groups.values() if group.state != "open" and not group.is_surplus)
            oldest = next(kept)
            if oldest.is_held:
                oldest.is_surplus = True
                self._num_surplus += 1
            else:
                self._evict(oldest, ["surplus"])

    def _offer(self, group: SiblingGroup) -> None:
        """A sealed group may be picked by its priority."""
        if self._index is not None and group.state == "sealed":
            self._index.add(group.name, group.number, group.priority)

    def prioritize(self, priorities: Mapping[str, float]) -> None:
        """These groups have other priorities from now on; those that have ended are left out. Raises `InvalidInput` for
        one that nobody opened, before anything is changed."""
        for name, priority in priorities.items():
            check_priority(name, priority)
            if name not in self.groups and name not in self.state.fates:
                raise InvalidInput(f"nobody opened group {name!r}")
        for name in self.groups.keys() & priorities.keys():
            self.groups[name].priority = float(priorities[name])
            self._offer(self.groups[name])

    def filter(self, names: Iterable[str]) -> None:
        """Their user does not want these groups: they are evicted, once they are sealed. Raises as `group`, before
        anything is changed."""
        for group in [self.group(name) for name in dict.fromkeys(names)]:
            group.filtered = True
            self._judge(group)

    # judging

    def advance(self, version: int) -> None:
        """The trainer has another version. What it cannot use is evicted or given up, unless somebody has it."""
        self.state.version = version
        self.state.excused = {target: count for target, count in self.state.excused.items() if target >= version}
        if self.policy.serve == "target":  # nobody can use what is for a version that has passed
            first = (version - self.state.base) * self.policy.groups_per_version
            self.state.returned = [one for one in self.state.returned if one >= first]
            self.state.next_ticket = max(self.state.next_ticket, first)
        for group in list(self.groups.values()):
            self._judge(group)

    def _judge(self, group: SiblingGroup) -> None:
        if group.state == "lent":
            return
        old = group.state != "due" and is_stale(self.policy, self.version, group)
        if group.state == "open":
            if self.policy.aborts and old:
                self._evict(group, ["aborted"])
            return
        stale = ["stale"] if old and self.policy.stale != "keep" else []
        reasons = stale + ["filtered"] * group.filtered
        if reasons:
            self._evict(group, reasons)

    def lose(self, rows: Sequence[int]) -> bool:
        """These rows are gone: so are the groups that have them, for a fragment is no group. Whether there are some."""
        self.steps.lose(rows)
        names = {name for row in rows if (name := self.owners.get(row)) is not None}
        for name in sorted(names, key=lambda name: self.groups[name].number):
            self._evict(self.groups[name], ["cleared"])
        return bool(names)

    def _evict(self, group: SiblingGroup, reasons: list[str]) -> None:
        """Nobody gets the group. Its ticket goes back, or its version is smaller."""
        if group.target is not None and self._shrinks(group):  # also where it took the place of one that was excused
            self.state.excused[group.target] = self.state.excused.get(group.target, 0) + 1
        elif group.ticket is not None:
            self._return(group.ticket)
        self.state.owed += reasons != ["surplus"]  # a newer one has its place already
        self.source(group.source).evict(reasons, sum(result.tokens for result in group.results))
        self._end(group)
        if group.state != "open" and reasons != ["surplus"]:
            self._settle(group)
        self._forget_rows(group.rows)
        self.state.remember(group.name, "evicted", group.source)

    def _shrinks(self, group: SiblingGroup) -> bool:
        return self.policy.shortfall == "shrink" and group.target is not None and group.target >= self.version

    def _end(self, group: SiblingGroup) -> None:
        self.num_open -= group.state == "open"
        self.num_sealed -= group.state == "sealed"
        self.num_due -= group.state == "due"
        self._num_surplus -= group.is_surplus
        self._withdraw(group)
        self.state.settle(group)
        del self.groups[group.name]

    def _withdraw(self, group: SiblingGroup) -> None:
        if self._index is not None:
            self._index.remove(group.name)

    def _forget_rows(self, rows: list[int]) -> None:
        self._disown(rows)
        self.discarded += rows

    def _disown(self, rows: list[int]) -> None:
        for row in rows:
            self.owners.pop(row, None)

    # consuming

    def eligible(self) -> list[SiblingGroup]:
        """Those that may be handed out now; best first, unless the order is by priority."""
        if self._size < self.policy.min_size_to_sample:
            return []
        return eligible(self.policy, self.version, self.groups.values())

    def offered(
        self, least: int, most: int, accepts: Callable[[SiblingGroup], bool] | None
    ) -> tuple[list[tuple[SiblingGroup, float]], bool]:
        """`least` to `most` groups that may be handed out now and are accepted, best first, each with the probability
        of its draw (1 where nothing is drawn); none where there are fewer, unless no more will come. And whether there
        were some that are not accepted yet. `accepts` None: all are."""
        if due := self.due():
            accepted = [group for group in due if accepts is None or accepts(group)]
            return ([(group, 1.0) for group in due], False) if len(accepted) == len(due) else ([], True)
        left = self.samples_left()
        if self.num_sealed < min(least, 1) or (left < least and not self.nothing_comes):
            return [], False
        refused: list[str] = []
        found = self._pick(int(min(most, left)), accepts, refused)
        enough = len(found) >= least or self.nothing_comes
        return found if enough else [], bool(refused)

    def due(self) -> list[SiblingGroup]:
        """The next batch that is to be handed out again, as it was."""
        due = due_groups(self.groups.values()) if self.num_due else []
        return [group for group in due if group.batch == due[0].batch]

    @property
    def num_available(self) -> int:
        """How many groups may be handed out now to who takes as many as there are."""
        if self.num_due or not self.num_sealed:
            return len(self.due())
        found = sum(self.policy.order != "weighted" or one.priority > 0.0 for one in self.eligible())
        return int(min(found, self.samples_left()))

    def ends_with(self, groups: Sequence[SiblingGroup]) -> bool:
        """Whether nobody gets a group after these, which are lent: none will be sealed or given back, and none that is
        there can become eligible."""
        if not self.nothing_comes or self.num_held > len(groups):
            return False
        uses = self.policy.max_times_sampled
        sealed = (group for group in self.groups.values() if group.state == "sealed")
        come_back = (group for group in groups if uses is None or group.times_sampled < uses)
        left = itertools.chain(come_back, sealed)
        return self.samples_left() < 1 or not any(may_serve(self.policy, self.version, one) for one in left)

    def samples_left(self) -> float:
        """How many groups the policy's rate lets be selected now."""
        return self.rate.samples_left(self._size, self.num_inserted, self._num_sampled)

    @property
    def _num_sampled(self) -> float:
        return self.state.sampled + self.state.forgiven

    def _settle(self, group: SiblingGroup) -> None:
        """A group that was sealed has ended: what a rate owes of it may be owed no more."""
        rate, size = self.rate, len(self.groups) - self.num_open
        if rate.per_insert is not None:
            owed = rate.per_insert * self.num_inserted - self._num_sampled
            self.state.forgiven += rate.forgiven(owed, size, not group.times_sampled)

    @property
    def _size(self) -> int:
        """How many groups there are to select from, with those that somebody has. The last ones count as enough."""
        there = len(self.groups) - self.num_open
        return max(there, self.policy.min_size_to_sample) if self.nothing_comes else there

    def _pick(
        self, most: int, accepts: Callable[[SiblingGroup], bool] | None, refused: list[str]
    ) -> list[tuple[SiblingGroup, float]]:
        def is_accepted(group: SiblingGroup) -> bool:
            if accepts is not None and not accepts(group):
                refused.append(group.name)
                return False
            return True

        if self._index is None and accepts is None:
            return [(group, 1.0) for group in self.eligible()[:most]]
        if self._index is None:
            return [(group, 1.0) for group in self.eligible() if is_accepted(group)][:most]

        def is_served(name: str) -> bool:
            group = self.groups[name]
            return is_eligible(self.policy, self.version, group) and is_accepted(group)

        picked = self._index.pick(most, is_served, self.state.draws)
        return [(self.groups[one.name], one.probability) for one in picked]

    @property
    def nothing_comes(self) -> bool:
        """Whether no group will be sealed any more."""
        return self.state.ended and not self.num_open

    @property
    def num_held(self) -> int:
        """How many groups somebody has, or is to get again."""
        return len(self.groups) - self.num_open - self.num_sealed

    @property
    def num_lent(self) -> int:
        return self.num_held - self.num_due

    def withheld(self, group: SiblingGroup) -> list[int]:
        """The slots whose rows are held back."""
        return group.unused if group.is_again else withheld(self.policy, self.version, group)

    def lend(self, groups: Sequence[SiblingGroup]) -> None:
        """These groups, which are sealed or due, are somebody's now. `InvalidInput` for others."""
        self.state.batches += 1
        for place, group in enumerate(groups):
            if group.state not in ("sealed", "due"):
                raise InvalidInput(f"group {group.name!r} is {group.state}")
            self.num_sealed -= group.state == "sealed"
            self.num_due -= group.state == "due"
            group.state = "lent"
            group.times_sampled += 1
            if group.times_sampled == 1:  # later versions hold back these, too
                group.unused = self.withheld(group)
            if not group.is_again:
                group.batch, group.place = self.state.batches, place
            self.state.sampled += 1
            self.state.draws += self.policy.order == "weighted"
            self._withdraw(group)
            self.source(group.source).select(max(0, self.age(group)), len(self.withheld(group)))

    def age(self, group: SiblingGroup) -> int:
        """How many versions the trainer has made since the one that the group is judged by."""
        return self.version - group.judged_by(self.policy.judge)

    def release(self, names: Iterable[str]) -> None:
        """Whoever had these did not use them: they are judged again, or due as they were. Those that are due are
        judged again, too: nobody is to get them in the batches of before."""
        for name in names:
            group = self.groups.get(name)
            if group is not None and group.state == "lent":
                group.times_sampled -= 1
                self.state.sampled -= 1
                self._return_lent(group)
            elif group is not None and group.state == "due":
                self.num_due -= 1
                group.is_again = False
                self._return_lent(group)

    def _return_lent(self, group: SiblingGroup) -> None:
        """It is offered again, unless the policy gives it up now, or is due again."""
        if group.is_again:
            group.state = "due"
            self.num_due += 1
            return
        group.state = "sealed"
        self.num_sealed += 1
        self._offer(group)
        if group.is_surplus:
            self._evict(group, ["surplus"])
        else:
            self._judge(group)

    def consume(self, names: Iterable[str], clears: bool) -> None:
        """These were used; those that are used up end, and their rows stay unless `clears`."""
        uses = self.policy.max_times_sampled
        for name in names:
            group = self.groups.get(name)
            if group is None:
                continue
            if group.state == "lent" and (uses is None or group.times_sampled < uses):
                self._return_lent(group)
                self._make_room()
                continue
            self.source(group.source).consume(group.unused_tokens)
            self._end(group)
            self._settle(group)
            self._disown(group.rows)
            self.discarded += self.steps.use_up(group, clears)
            self.state.use(group, clears)

    # steps

    def mark(self, step: int) -> None:
        """A trainer may come back to this step, and to what is used up from now on. Raises as `GroupSteps.mark`."""
        self.discarded += self.steps.mark(step, self.policy)

    def revive(self, groups: Iterable[SiblingGroup]) -> None:
        """These, which were used up, are due."""
        for group in groups:
            self.state.revived(group.name)
            self.groups[group.name] = group
            self.owners.update(dict.fromkeys(group.rows, group.name))
            self.source(group.source).unconsume(group.unused_tokens)
            group.state, group.is_again, self.num_due = "due", True, self.num_due + 1
            group.times_sampled -= 1
            self.state.sampled -= 1
        arrived = sorted(self.groups.values(), key=lambda one: one.number)
        self.groups.clear()  # and not another dict: others look at this one, too
        self.groups.update({one.name: one for one in arrived})

    @property
    def in_use(self) -> bool:
        """Whether somebody may still want of it what it has."""
        return bool(self.groups or self.state.reserved)

    def give_up(self) -> None:
        """Nobody gets these groups any more: their rows are `discarded`."""
        for group in list(self.groups.values()):
            self._end(group)
            self._forget_rows(group.rows)
        self.discarded += self.steps.forget()

    def number_attempts(self, first: int) -> None:
        """Those that begin from now on have this number or a higher one."""
        self.state.first_attempt = max(self.state.first_attempt, first)
        self.state.next_attempt = max(self.state.next_attempt, first)

    def forget_holders(self) -> None:
        """Nobody of those who worked on slots or had groups is known any more, as after a load."""
        self.give_back(sorted(self.state.reserved))
        for group in self.groups.values():
            for slot in group.slots:
                slot.state = "idle" if slot.state == "running" else slot.state
            self.work.add(group)
        self.release([group.name for group in self.groups.values() if group.state == "lent"])
