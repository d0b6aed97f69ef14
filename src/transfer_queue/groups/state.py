"""A pool as it is saved: what lasts of it. Who works on what and who has what on lease does not."""

from __future__ import annotations

import msgspec

from transfer_queue.groups.counters import SourceCounters
from transfer_queue.groups.group import Fate, SiblingGroup
from transfer_queue.groups.policy import GroupPolicy

REMEMBERED = 16_384  # groups that have ended


class PoolState(msgspec.Struct):
    """`base`: the trainer's version when the pool began, `version` now. Tickets are numbered from 0: number n is for
    version base + n // groups_per_version. Those below `next_ticket` that no group has are `reserved` by somebody, or
    `returned`. `owed`: evicted groups that were not refilled. `excused`: groups by which a version is smaller. `ended`:
    no more groups will be opened. `fates`: of groups that have ended, the latest. `sampled`: groups that were selected
    in total, less those that were given back. `draws`: random numbers that were used."""

    policy: GroupPolicy
    base: int
    version: int
    next_number: int = 0
    next_ticket: int = 0
    returned: list[int] = []
    reserved: set[int] = set()
    owed: int = 0
    excused: dict[int, int] = {}
    ended: bool = False
    groups: dict[str, SiblingGroup] = {}
    fates: dict[str, Fate] = {}
    sources: dict[str, SourceCounters] = {}
    sampled: int = 0
    draws: int = 0

    def remember(self, name: str, fate: Fate) -> None:
        self.fates[name] = fate
        if len(self.fates) > REMEMBERED:
            del self.fates[next(iter(self.fates))]
