"""What changed per second, from several overviews. A count that fell adds nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import TypeAlias

WINDOW = 10  # looks
Moment: TypeAlias = tuple[float, dict[Hashable, int]]  # seconds, and sums of all that was added


class RateWindow:
    """Of counts by key. Keys that are gone are forgotten."""

    def __init__(self) -> None:
        self._last: Mapping[Hashable, int] = {}
        self._sums: deque[Moment] = deque(maxlen=WINDOW)
        self._span: tuple[Moment, Moment] | None = None  # set as one: another thread may read it

    def add(self, at: float, counts: Mapping[Hashable, int]) -> None:
        """The counts at a moment, in seconds of any clock that only goes on."""
        before, last = (self._sums[-1][1] if self._sums else {}), self._last
        sums = {key: before.get(key, 0) + max(0, count - last.get(key, 0)) for key, count in counts.items()}
        self._sums.append((at, sums))
        self._last = counts
        self._span = self._sums[0], self._sums[-1]

    def per_s(self, key: Hashable) -> float:
        """0.0 for a key that is not known, and until there are two moments."""
        if self._span is None:
            return 0.0
        (since, first), (now, last) = self._span
        return (last.get(key, 0) - first.get(key, 0)) / (now - since) if now > since else 0.0

    def forget(self) -> None:
        """Another service is there now."""
        self._last = {}
        self._sums.clear()
        self._span = None
