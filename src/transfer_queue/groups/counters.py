"""What became of the groups of each data source, in total since the pool began."""

from __future__ import annotations

import msgspec


class SourceCounters(msgspec.Struct):
    """Groups, unless said otherwise. `evicted_for` may count a group under several reasons; `evicted` counts it once.
    `failed_attempts`: of slots, by kind. `ages`, summed over `selected` groups, and `oldest`: in versions when they
    were handed out. `withheld`: members. `discarded_tokens`: of results that nobody used: of
    groups that were evicted, of slots that were started over, of members that were withheld in every use, and of those
    that were refused because they came too late."""

    opened: int = 0
    sealed: int = 0
    selected: int = 0
    consumed: int = 0
    evicted: int = 0
    evicted_for: dict[str, int] = {}
    failed_attempts: dict[str, int] = {}
    withheld: int = 0
    refilled: int = 0
    ages: int = 0
    oldest: int = 0
    discarded_tokens: int = 0

    @property
    def num_live(self) -> int:
        """Groups that have not ended."""
        return self.opened - self.consumed - self.evicted

    def evict(self, reasons: list[str], tokens: int) -> None:
        self.evicted += 1
        self.discarded_tokens += tokens
        for reason in dict.fromkeys(reasons):
            self.evicted_for[reason] = self.evicted_for.get(reason, 0) + 1

    def consume(self, unused_tokens: int) -> None:
        self.consumed += 1
        self.discarded_tokens += unused_tokens

    def unconsume(self, unused_tokens: int) -> None:
        self.consumed -= 1
        self.discarded_tokens -= unused_tokens

    def fail(self, kind: str) -> None:
        self.failed_attempts[kind] = self.failed_attempts.get(kind, 0) + 1

    def select(self, age: int, withheld: int) -> None:
        self.selected += 1
        self.ages += age
        self.oldest = max(self.oldest, age)
        self.withheld += withheld
