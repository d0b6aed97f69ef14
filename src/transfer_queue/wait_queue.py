"""Requests that wait: for rows that become ready, or for room for new rows."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
NOTICE_AFTER_S = (10.0, 60.0, 300.0)  # when somebody who waits is told what is missing
AT_ONCE = 32


class Waiter(Generic[T]):
    """A request with the ticket its answer goes to, the session that asked, and its deadline.

    `since` is when its asker began to wait, with an earlier request if need be (None: nobody wants to be told), and
    `told` for how long it had waited when it was last told what is missing.
    """

    __slots__ = ("deadline", "message", "session", "since", "ticket", "told")

    def __init__(
        self,
        ticket: Hashable,
        session: bytes,
        message: T,
        deadline: float,
        since: float | None = None,
        told: float = 0.0,
    ) -> None:
        self.ticket = ticket
        self.session = session
        self.message = message
        self.deadline = deadline
        self.since = since
        self.told = told


class WaitQueue(Generic[T]):
    """Waiting requests by ticket, in order of arrival and of deadline. `notice_after_s`, ascending: after how long
    somebody who waits is due to be told what is missing."""

    def __init__(self) -> None:
        self.notice_after_s: Sequence[float] = NOTICE_AFTER_S
        self._by_ticket: dict[Hashable, Waiter[T]] = {}
        self._deadlines: Times[T] = []
        self._notices: Times[T] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[Waiter[T]]:
        return iter(list(self._by_ticket.values()))

    def add(self, parked: Waiter[T]) -> None:
        self._by_ticket[parked.ticket] = parked
        heapq.heappush(self._deadlines, (parked.deadline, next(self._order), parked))
        self._expect_notice(parked)

    def remove(self, parked: Waiter[T]) -> None:
        self._by_ticket.pop(parked.ticket, None)

    def holds(self, parked: Waiter[T]) -> bool:
        return self._by_ticket.get(parked.ticket) is parked

    def next_deadline(self) -> float | None:
        """When the next request still parked has to be answered or told something."""
        if not self._by_ticket:
            return None
        deadline, notice = self._first(self._deadlines), self._first(self._notices)
        return notice if deadline is None or (notice is not None and notice < deadline) else deadline

    def _first(self, times: Times[T]) -> float | None:
        while times and not self.holds(times[0][2]):
            heapq.heappop(times)
        return times[0][0] if times else None

    def expired(self, now: float) -> list[Waiter[T]]:
        """Remove and return the requests whose deadline has come."""
        found = []
        while (deadline := self._first(self._deadlines)) is not None and deadline <= now:
            parked = heapq.heappop(self._deadlines)[2]
            self.remove(parked)
            found.append(parked)
        return found

    def due(self, now: float) -> list[tuple[Waiter[T], float]]:
        """The requests whose askers are to be told what is missing, and for how long they have waited.

        `AT_ONCE` at most, so that others are served in between; the rest is due as soon as possible.
        """
        found: list[tuple[Waiter[T], float]] = []
        while len(found) < AT_ONCE and (time := self._first(self._notices)) is not None and time <= now:
            parked = heapq.heappop(self._notices)[2]
            found.append((parked, parked.told))
            self._expect_notice(parked)
        return found

    def _expect_notice(self, parked: Waiter[T]) -> None:
        """Those that are due no later than its deadline come, so that the next request of its asker can go on there."""
        after = next((seconds for seconds in self.notice_after_s if seconds > parked.told), None)
        if after is not None and parked.since is not None and parked.since + after <= parked.deadline:
            parked.told = after
            heapq.heappush(self._notices, (parked.since + after, next(self._order), parked))

    def forget(self, tickets: set[Hashable]) -> list[Waiter[T]]:
        """Remove and return the requests whose askers are gone."""
        return [self._by_ticket.pop(ticket) for ticket in tickets if ticket in self._by_ticket]


Times: TypeAlias = list[tuple[float, int, Waiter[T]]]
