"""What happened to rows lately: a bounded memory for whoever looks at one row. It ends with its process."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of

MAX_EVENTS, MAX_ROWS = 16_384, 1 << 20


class Happened(NamedTuple):
    """`rows`: global indexes. `detail`: names of fields, or why rows came back."""

    at: float
    what: str
    partition: str
    rows: NDArray[np.int64]
    session: bytes
    task: str
    detail: tuple[str, ...]


class RecentEvents:
    """The latest events, and no more rows than `MAX_ROWS` over all of them. To note one takes about a microsecond."""

    def __init__(self) -> None:
        self._events: deque[Happened] = deque()
        self._num_rows = 0

    def wrote(self, at: float, session: bytes, message: m.Commit, rows: bytes) -> None:
        """A commit is done; `rows` are its own."""
        fields = [field.name for field in message.fields] + [one.field.name for one in message.shared]
        self.note(Happened(at, "written", message.partition, indexes_of(rows), session, "", tuple(fields)))

    def took(self, at: float, session: bytes, message: m.Fetch, rows: bytes) -> None:
        """A task has these rows."""
        self.note(Happened(at, "taken", message.partition, indexes_of(rows), session, message.task, ()))

    def note(self, event: Happened) -> None:
        """`event.rows` must not be changed afterwards."""
        self._events.append(event)
        self._num_rows += len(event.rows)
        while len(self._events) > MAX_EVENTS or self._num_rows > MAX_ROWS:
            self._num_rows -= len(self._events.popleft().rows)

    def of_row(self, partition: str, row: int) -> list[Happened]:
        """Oldest first."""
        return [one for one in self._events if one.partition == partition and bool((one.rows == row).any())]
