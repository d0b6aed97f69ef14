"""Cells that came along with the metadata of a fetch, for the `get_data` that follows.

The rule: they are the rows as the service handed them out. They serve one `get_data`, of all these rows and fields, by
the client that fetched them, within `FRESH_S`, unless this client changed anything meanwhile; otherwise the service is
asked. So a client always reads what it wrote, and no read is older than `FRESH_S`: a row that somebody else overwrites
or clears in that time may still be read as it was handed out.
"""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple, TypeAlias

from transfer_queue.metadata import BatchMeta
from transfer_queue.wire import messages as m

FRESH_S = 0.01
MAX_UNREAD = 16  # fetches in a row whose cells nobody read: that task's are not asked for any more
MAX_READERS = 1024
CHANGING = frozenset({m.Commit, m.Clear, m.Restore})
Reader: TypeAlias = "tuple[str, tuple[str, ...]]"  # a task and the fields that it fetches
Cells: TypeAlias = "tuple[m.Located, memoryview]"


class CarriedCells(NamedTuple):
    """What a fetched `BatchMeta` has of its fetch. `cells` is None where none came along."""

    owner: Carrying
    request: m.Fetch
    rows: bytes
    cells: Cells | None
    until: float
    changes: int


class Carrying:
    """Of one session: whose fetches are followed by reads, and whether what came along is still what it was."""

    def __init__(self) -> None:
        self._unread: dict[Reader, int] = {}
        self._changes = 0
        self._numbers = itertools.count(1)

    def wanted(self, request: m.Fetch) -> bool:
        """Whether the cells are likely to be read: those of the fetch before were."""
        reader = _reader(request)
        unread = self._unread.get(reader)
        if unread is None or unread >= MAX_UNREAD:
            return False
        self._unread[reader] = unread + 1
        return True

    def changed(self) -> None:
        """A change of this session has ended, whatever came of it. Threads do not get the same number twice."""
        self._changes = next(self._numbers)

    @property
    def changes(self) -> int:
        return self._changes

    def fetched(self, meta: BatchMeta, request: m.Fetch, rows: bytes, cells: Cells | None, changes: int) -> None:
        """`meta` is of the rows of a fetch that was sent after so many `changes`."""
        until = time.monotonic() + FRESH_S if cells is not None else 0.0
        meta._carried = CarriedCells(self, request, rows, cells, until, changes)

    def read(self, meta: BatchMeta, requests: list[m.Get]) -> Cells | None:
        """The cells of `meta`, which `requests` ask for, where they came along and are still good."""
        carried = meta._carried
        if not isinstance(carried, CarriedCells):
            return None
        meta._carried = None
        if carried.owner is not self:
            return None
        if len(self._unread) >= MAX_READERS:
            self._unread.clear()
        self._unread[_reader(carried.request)] = 0
        asked = [(get.partition, get.rows, get.fields) for get in requests]
        same = asked == [(carried.request.partition, carried.rows, carried.request.fields)]
        fresh = carried.changes == self._changes and time.monotonic() < carried.until
        return carried.cells if same and fresh else None


def _reader(request: m.Fetch) -> Reader:
    return request.task, tuple(request.fields)
