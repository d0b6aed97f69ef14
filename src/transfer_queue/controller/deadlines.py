"""When the first of many terms ends, though they are prolonged all the time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from typing import Protocol

NO_TIME = -math.inf  # before the first event, while what lasts is carried out anew


class Term(Protocol):
    deadline: float


class Timed(Protocol):
    def next_deadline(self) -> float | None: ...


def earliest(owners: Iterable[Timed]) -> float | None:
    """The first of their deadlines; None where none has one. A server asks this after every event."""
    first: float | None = None
    for owner in owners:
        found = owner.next_deadline()
        if found is not None and (first is None or found < first):
            first = found
    return first


class Deadlines:
    """The terms in `live`, by number, in the order of their ends.

    One entry per term, never later than its deadline: to prolong one, or to drop it from `live`, costs nothing here.
    """

    def __init__(self, live: Mapping[int, Term]) -> None:
        self._live = live
        self._heap: list[tuple[float, int]] = []

    def add(self, number: int) -> None:
        """A new term, which is in `live` already."""
        heapq.heappush(self._heap, (self._live[number].deadline, number))

    def first(self) -> tuple[float, int] | None:
        """(deadline, number) of the term that ends first; None where there is none."""
        while self._heap:
            deadline, number = self._heap[0]
            term = self._live.get(number)
            if term is None:
                heapq.heappop(self._heap)
            elif term.deadline > deadline:
                heapq.heapreplace(self._heap, (term.deadline, number))
            else:
                return deadline, number
        return None

    def next_deadline(self) -> float | None:
        found = self.first() if self._heap else None
        return None if found is None else found[0]

    def postpone(self, by_s: float) -> None:
        for term in self._live.values():
            term.deadline += by_s
        self._heap = [(deadline + by_s, number) for deadline, number in self._heap]  # in the order they were in

    def clear(self) -> None:
        self._heap.clear()
