"""Requests that wait for the same, one behind the other: only the first of a line is looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from transfer_queue.wait_queue import Waiter, WaitQueue

MIN_KEPT = 16


class WaitLines:
    """Those of `queue`, by partition and by the `place` that says what they wait for. Whoever left the queue is passed
    over."""

    def __init__(self, queue: WaitQueue[Any]) -> None:
        self._queue = queue
        self._lines: dict[str, dict[Hashable, deque[Waiter[Any]]]] = {}

    def add(self, partition: str, place: Hashable, waiter: Waiter[Any]) -> None:
        line = self._lines.setdefault(partition, {}).setdefault(place, deque())
        if len(line) > 2 * len(self._queue) + MIN_KEPT:  # most of them have left
            kept = [one for one in line if self._queue.holds(one)]
            line.clear()
            line.extend(kept)
        line.append(waiter)

    def has(self, partition: str, place: Hashable) -> bool:
        """Whether somebody waits there."""
        return self._first(self._lines.get(partition, {}).get(place, deque())) is not None

    def serve(self, partition: str, answer: Callable[[Waiter[Any]], bool]) -> None:
        """Of each line answer those that can be, from the first on, until `answer` says that one has to wait."""
        lines = self._lines.get(partition, {})
        for place, line in list(lines.items()):
            while (first := self._first(line)) is not None and answer(first):
                line.popleft()
            if not line and lines.get(place) is line:
                del lines[place]
        if not lines:
            self._lines.pop(partition, None)

    def drop(self, partition: str) -> None:
        """Nobody waits there any more."""
        self._lines.pop(partition, None)

    def _first(self, line: deque[Waiter[Any]]) -> Waiter[Any] | None:
        while line and not self._queue.holds(line[0]):
            line.popleft()
        return line[0] if line else None
