"""A pool as it is saved: what lasts of it, and of those that are gone. Who works on what and who has what on lease does
not last."""

from __future__ import annotations

import msgspec

from transfer_queue.groups.counters import SourceCounters
from transfer_queue.groups.group import Fate, SiblingGroup
from transfer_queue.groups.policy import GroupPolicy
from transfer_queue.groups.steps import UsedGroup

REMEMBERED = 16_384  # groups that have ended


class PoolState(msgspec.Struct):
    """`version`: the trainer's. Ticket number n is for version base + n // groups_per_version, where tickets of 0 were
    for `base`. Those below `next_ticket` that no group has are `reserved` by somebody, or `returned`. Attempts begin
    with the number `first_attempt`; none has had `next_attempt` or more. `owed`: evicted groups that were not refilled.
    `excused`: groups by which a version is smaller. `ended`: no more groups will be opened. `fates`: of groups that
    have ended, the latest; `sources_of`: where those came from. `counted`: by group, the attempts (`attempt_id`)
    whose results were used, or whose tokens are counted as ones that nobody used. `kept`: the rows of groups that were
    used, and that their user has kept. `sampled`: groups that were selected in total, less
    those that were given back. `draws`: what the next draw is named by. `forgiven`: samples that a rate owed to groups
    that have ended, and nobody owes. `batches`: how many times groups were handed out. `used_after`: see
    `GroupSteps`."""

    policy: GroupPolicy
    base: int
    version: int
    next_number: int = 0
    next_ticket: int = 0
    first_attempt: int = 0
    next_attempt: int = 0
    returned: list[int] = []
    reserved: set[int] = set()
    owed: int = 0
    excused: dict[int, int] = {}
    ended: bool = False
    groups: dict[str, SiblingGroup] = {}
    fates: dict[str, Fate] = {}
    sources_of: dict[str, str] = {}
    sources: dict[str, SourceCounters] = {}
    sampled: int = 0
    draws: int = 0
    forgiven: float = 0.0
    batches: int = 0
    used_after: dict[int, list[UsedGroup]] = {}
    counted: dict[str, list[int]] = {}
    kept: dict[str, list[int]] = {}

    def remember(self, name: str, fate: Fate, source: str) -> None:
        """A group of this source has ended."""
        self.fates[name], self.sources_of[name] = fate, source
        if len(self.fates) > REMEMBERED:
            self.forget(next(iter(self.fates)))

    def forget(self, name: str) -> None:
        """Nothing is known of this group that has ended."""
        self.revived(name)
        self.counted.pop(name, None)

    def revived(self, name: str) -> None:
        """This group has not ended."""
        self.fates.pop(name, None)
        self.sources_of.pop(name, None)
        self.kept.pop(name, None)

    def use(self, group: SiblingGroup, clears: bool) -> None:
        """A group was used, and has ended. Its rows stay unless `clears`."""
        self.remember(group.name, "consumed", group.source)
        if not clears:
            self.kept[group.name] = group.rows

    def waste(self, name: str, attempt: int, tokens: int) -> None:
        """A result of an attempt (`attempt_id`) came too late for a group, which may have ended, or is said again."""
        group = self.groups.get(name)
        source = self.sources_of.get(name) if group is None else group.source
        counted = self.counted.setdefault(name, []) if source is not None else [attempt]
        if source is not None and attempt not in counted:
            counted.append(attempt)
            self.sources.setdefault(source, SourceCounters()).discarded_tokens += tokens

    def settle(self, group: SiblingGroup) -> None:
        """What comes of the results of a group is known: nothing more comes of one that is said again."""
        counted = self.counted.setdefault(group.name, [])
        counted += [attempt for attempt in group.attempts_done if attempt not in counted]


class UsedNumbers(msgspec.Struct):
    """Tickets and attempts of pools that are gone have numbers below these. A later pool uses none of them again, so
    that whoever still has one means no group of a pool that took the name."""

    tickets: int = 0
    attempts: int = 0

    def retire(self, tickets: int, attempts: int) -> None:
        self.tickets, self.attempts = max(self.tickets, tickets), max(self.attempts, attempts)

    def begin(self, policy: GroupPolicy, version: int) -> PoolState:
        """An empty pool, whose trainer has `version`."""
        passed = -(-self.tickets // policy.groups_per_version)
        return PoolState(
            policy, version - passed, version, next_ticket=passed * policy.groups_per_version,
            first_attempt=self.attempts, next_attempt=self.attempts,
        )  # fmt: skip
