"""What happened to rows lately, and when they came: bounded memories for whoever looks at one row. They end with their
process, but for events that somebody keeps (`keepers`)."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.deadlines import NO_TIME
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of

MAX_EVENTS, MAX_ROWS = 16_384, 1 << 20
MARK_EVERY_S, MAX_MARKS = 0.1, 8192


class Happened(NamedTuple):
    """`rows`: global indexes. `detail`: names of fields, or why rows came back. `runs`: where it differs, one for the
    next so many rows each, in turn."""

    at: float
    what: str
    partition: str
    rows: NDArray[np.int64]
    session: bytes
    task: str
    detail: tuple[str, ...]
    runs: tuple[tuple[str, int], ...] = ()


class RecentEvents:
    """The latest events, and no more rows than `MAX_ROWS` over all of them. To note one takes about a microsecond."""

    def __init__(self) -> None:
        self._events: deque[Happened] = deque()
        self._num_rows = 0
        self.num_noted = 0  # so far, those that are forgotten as well
        self.keepers: list[Callable[[Happened], None]] = []  # who is told of each event

    def wrote(self, at: float, session: bytes, message: m.Commit, rows: bytes) -> None:
        """A commit is done; `rows` are its own."""
        fields = [field.name for field in message.fields] + [one.field.name for one in message.shared]
        self.note(Happened(at, "written", message.partition, indexes_of(rows), session, "", tuple(fields)))

    def brought(
        self, at: float, session: bytes, message: m.Commit, finishes: Sequence[m.FinishedSlot], reply: m.Committed
    ) -> None:
        """The rows of a commit are the results of attempts, but for those that were refused."""
        rows, refused = indexes_of(reply.rows), {one.at for one in reply.refused}
        results = [one for place, one in enumerate(finishes) if place not in refused]
        if sum(one.count for one in results) == len(rows):  # else some were said before
            self.finished(at, session, message.partition, results, rows)

    def finished(
        self, at: float, session: bytes, partition: str, results: Sequence[m.FinishedSlot], rows: NDArray[np.int64]
    ) -> None:
        """Attempts have these results, and the rows in turn."""
        runs = [(f"slot {one.slot} of group {one.group!r}, attempt {one.attempt}", one.count) for one in results]
        self._note_runs(at, "finished", session, partition, rows, runs)

    def judged(
        self, at: float, what: str, session: bytes, partition: str, groups: Sequence[tuple[str, Sequence[int]]]
    ) -> None:
        """This became of rows, as those of groups; nothing is noted while that is only recovered."""
        if at > NO_TIME:
            runs = [(f"group {name!r}", len(rows)) for name, rows in groups]
            all_rows = np.array([row for _, rows in groups for row in rows], np.int64)
            self._note_runs(at, what, session, partition, all_rows, runs)

    def _note_runs(
        self,
        at: float,
        what: str,
        session: bytes,
        partition: str,
        rows: NDArray[np.int64],
        runs: Sequence[tuple[str, int]],
    ) -> None:
        """One event for all of these rows: otherwise those of large batches would leave no room for others."""
        if len(rows):
            self.note(Happened(at, what, partition, rows, session, "", (), tuple(runs)))

    def took(self, at: float, session: bytes, message: m.Fetch, rows: bytes) -> None:
        """A task has these rows."""
        self.note(Happened(at, "taken", message.partition, indexes_of(rows), session, message.task, ()))

    def note(self, event: Happened) -> None:
        """`event.rows` must not be changed afterwards."""
        for keep in self.keepers:
            keep(event)
        self._events.append(event)
        self.num_noted += 1
        self._num_rows += len(event.rows)
        while len(self._events) > MAX_EVENTS or self._num_rows > MAX_ROWS:
            self._num_rows -= len(self._events.popleft().rows)

    @property
    def num_forgotten(self) -> int:
        return self.num_noted - len(self._events)

    def since(self, number: int) -> Iterator[Happened]:
        """Those from that number on that are remembered, oldest first."""
        return itertools.islice(self._events, max(0, number - self.num_forgotten), None)

    def of_row(self, partition: str, row: int) -> list[Happened]:
        """Oldest first."""
        found = ((one, np.flatnonzero(one.rows == row)) for one in self._events if one.partition == partition)
        return [_of_place(one, int(places[0])) for one, places in found if len(places)]


def _of_place(event: Happened, place: int) -> Happened:
    """As it is of the row at this place."""
    ends = itertools.accumulate(count for _, count in event.runs)
    found = next((text for (text, _), end in zip(event.runs, ends, strict=True) if place < end), None)
    return event if found is None else event._replace(detail=(found,))


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
