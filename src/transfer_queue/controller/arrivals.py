"""When the rows of a partition came."""

from __future__ import annotations

from bisect import bisect_right

from transfer_queue.controller.deadlines import NO_TIME

MARK_EVERY_S, MAX_MARKS = 0.1, 8192


class Arrivals:
    """When rows came to be, to within a tenth of a second: a mark now and then, not a time for each row. Rows have
    ascending indexes, so a mark says when all from its index on came, up to the next mark."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._times: list[float] = []

    def note(self, first: int, now: float) -> None:
        """Rows from this index on come now; where it is not known when they came, nothing is noted."""
        if now == NO_TIME or (self._times and now - self._times[-1] < MARK_EVERY_S):
            return
        self._rows.append(first)
        self._times.append(now)
        if len(self._rows) > MAX_MARKS:  # coarser from here on: every other mark goes
            del self._rows[1::2], self._times[1::2]

    def of(self, row: int) -> float | None:
        """When the row came; None where that was before this process knew its table."""
        place = bisect_right(self._rows, row) - 1
        return self._times[place] if place >= 0 else None
