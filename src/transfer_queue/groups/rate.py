"""How often groups may be selected for each that is made: Reverb's rate limiter, for a pool of groups."""

from __future__ import annotations

import math

from transfer_queue.groups.policy import GroupPolicy


class SampleRate:
    """The bounds of `samples_per_insert * inserted - sampled` that a policy sets; without a rate there are none.

    `inserted`: groups that were sealed, in total; `sampled`: groups that were selected, less those given back, and what
    was forgiven. The difference is how many samples are owed.
    """

    def __init__(self, policy: GroupPolicy) -> None:
        self.per_insert = policy.samples_per_insert
        self.least_size = policy.min_size_to_sample
        middle = (self.per_insert or 0.0) * self.least_size
        buffer = max(1.0, middle) if policy.error_buffer is None else policy.error_buffer
        self.lowest, self.highest = middle - buffer, middle + buffer

    @property
    def most_samples(self) -> float:
        """More groups than this are never to be had at once: their producers would wait for their consumer."""
        return math.inf if self.per_insert is None else self.highest - self.lowest - self.per_insert

    @property
    def most_inserts(self) -> float:
        """More groups than this may never be started at once."""
        if self.per_insert is None:
            return math.inf
        return max(self.least_size, (self.highest - self.lowest - 1) / self.per_insert)

    def may_insert(self, count: int, size: int, inserted: int, sampled: float) -> bool:
        """Whether `count` more may be made. `size`: groups that are there or may come, of those that count as
        `inserted` already."""
        if self.per_insert is None or size + count <= self.least_size:
            return True
        return (inserted + count) * self.per_insert - sampled <= self.highest

    def forgiven(self, owed: float, size: int, was_unused: bool) -> float:
        """How many of the samples that are owed nobody owes any more when a group has ended, and `size` are left. One
        that was never used takes all of its own along. What others would still have had is owed by those that are left,
        but no more than if none of these had been selected yet: samples of what is gone let nobody wait."""
        if self.per_insert is None:
            return 0.0
        own = self.per_insert if was_unused else 0.0
        return own + max(0.0, owed - own - self.per_insert * size)

    def samples_left(self, size: int, inserted: int, sampled: float) -> float:
        """How many groups may be selected now. `size`: those that are sealed, or that somebody has."""
        if size < self.least_size:
            return 0.0
        if self.per_insert is None:
            return math.inf
        return max(0.0, math.floor(inserted * self.per_insert - sampled - self.lowest))
