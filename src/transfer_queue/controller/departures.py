"""Clients that ended lately with rows or groups on lease: what they had. Only people who look depend on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from transfer_queue.wire import messages as m

MAX_DEPARTURES = 64


class Departures:
    """The latest of them. They end with the process, as those of `RecentEvents` do."""

    def __init__(self) -> None:
        self._noted: deque[m.DepartureOverview] = deque(maxlen=MAX_DEPARTURES)

    def note(self, now: float, session: bytes, leases: Iterable[m.LeaseOverview]) -> None:
        """`session` is about to end. `leases` are those that it holds; what somebody else holds as well stays lent."""
        found: dict[tuple[str, str], m.GivenBack] = {}
        for one in leases:
            if one.holders == [session] and (one.rows or one.groups):
                sums = found.setdefault((one.partition, one.task), m.GivenBack(one.partition, one.task, 0, 0, 0))
                sums.leases += 1
                sums.rows += one.rows
                sums.groups += len(one.groups)
        if found:
            self._noted.append(m.DepartureOverview(session, 0, now, list(found.values())))

    def listed(self, now: float) -> list[m.DepartureOverview]:
        """Oldest first."""
        return [msgspec.structs.replace(one, ago_s=max(0.0, now - one.ago_s)) for one in self._noted]
