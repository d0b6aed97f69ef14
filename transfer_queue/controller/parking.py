"""Requests that wait: for rows that become ready, or for room for new rows."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Parked(Generic[T]):
    """A request with the ticket its answer goes to, the session that asked, and its deadline."""

    __slots__ = ("deadline", "message", "session", "ticket")

    def __init__(self, ticket: Hashable, session: bytes, message: T, deadline: float) -> None:
        self.ticket = ticket
        self.session = session
        self.message = message
        self.deadline = deadline


class ParkingLot(Generic[T]):
    """Parked requests by ticket, in order of arrival and of deadline."""

    def __init__(self) -> None:
        self._by_ticket: dict[Hashable, Parked[T]] = {}
        self._deadlines: list[tuple[float, int, Parked[T]]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[Parked[T]]:
        return iter(list(self._by_ticket.values()))

    def add(self, parked: Parked[T]) -> None:
        self._by_ticket[parked.ticket] = parked
        heapq.heappush(self._deadlines, (parked.deadline, next(self._order), parked))

    def remove(self, parked: Parked[T]) -> None:
        self._by_ticket.pop(parked.ticket, None)

    def holds(self, parked: Parked[T]) -> bool:
        return self._by_ticket.get(parked.ticket) is parked

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request still parked."""
        while self._deadlines and not self.holds(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now: float) -> list[Parked[T]]:
        """Remove and return the requests whose deadline has come."""
        found = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            parked = heapq.heappop(self._deadlines)[2]
            self.remove(parked)
            found.append(parked)
        return found

    def forget(self, tickets: set[Hashable]) -> list[Parked[T]]:
        """Remove and return the requests whose askers are gone."""
        return [self._by_ticket.pop(ticket) for ticket in tickets if ticket in self._by_ticket]
