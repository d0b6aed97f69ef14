"""When groups of each data source were used last. A source whose groups nobody uses, while others have turns, is named
in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from transfer_queue.controller.deadlines import NO_TIME
from transfer_queue.groups import PoolCore

log = logging.getLogger("transfer_queue.groups")


class SourceUses:
    """`at`: when a group of a source, by partition, was used last, or the first of those that it has was opened. What
    is recovered has no time. `now`: the time of the event that is handled."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.at: dict[tuple[str, str], float] = {}
        self._told: set[tuple[str, str]] = set()
        self._now = now

    def opened(self, partition: str, source: str) -> None:
        """It has a group, the only one."""
        if self._now() > NO_TIME:
            self.at[partition, source] = self._now()

    def used(self, partition: str, sources: Collection[str], pool: PoolCore, warn_after_s: float) -> None:
        """Groups of these sources were used. Others that have some, and had no turn for so long, are named once."""
        now = self._now()
        if now == NO_TIME:
            return
        for source in sources:
            self.at[partition, source] = now
            self._told.discard((partition, source))
        for source, counters in pool.state.sources.items():
            place, since = (partition, source), self.at.get((partition, source), now)
            if now - since >= warn_after_s and counters.num_live and place not in self._told:
                self._told.add(place)
                log.warning(
                    "the pool of %r used no group of source %r for %.0f s, but those of others: %d have not ended",
                    partition, source, now - since, counters.num_live,
                )  # fmt: skip

    def of(self, partition: str, pool: PoolCore) -> dict[str, float | None]:
        """By source; None for what is not known."""
        return {source: self.at.get((partition, source)) for source in pool.state.sources}

    def drop(self, partition: str, pool: PoolCore) -> None:
        """The pool is gone."""
        for source in pool.state.sources:
            self.at.pop((partition, source), None)
            self._told.discard((partition, source))

    def clear(self) -> None:
        """Nothing is known any more."""
        self.at.clear()
        self._told.clear()
