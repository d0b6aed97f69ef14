"""Cells that came along with the metadata of a fetch, for the `get_data` that follows.

The rule: they are the rows as the service handed them out. They serve one `get_data`, of all these rows and fields, by
the client that fetched them, within `FRESH_S` of the handing out, unless this client changed anything meanwhile;
otherwise the service is asked. So a client always reads what it wrote, and no read is older than `FRESH_S`: a row that
somebody else overwrites or clears in that time may still be read as it was handed out.
"""

from __future__ import annotations

import time
from typing import NamedTuple, TypeAlias

from transfer_queue.metadata import BatchMeta
from transfer_queue.wire import messages as m

FRESH_S = 0.01
UNUSED, MAX_UNUSED = 8, 128  # what a fetch counts whose cells were not used; from so much on they are not asked for
MAX_READERS = 1024
CHANGING = frozenset({
    m.Commit, m.Clear, m.Restore,
    m.FinishSlots, m.FailSlots, m.FilterGroups, m.RetargetGroup, m.AdvancePool, m.AckGroups, m.ReleaseGroups,
    m.RemovePool, m.Announce, m.SelectGroups, m.MarkPool, m.MarkStep,  # they may end groups, whose rows are cleared
})  # fmt: skip
Reader: TypeAlias = "tuple[str, tuple[str, ...]]"  # a task and the fields that it fetches
Cells: TypeAlias = "tuple[m.Located, memoryview]"


class Asked(NamedTuple):
    """A fetch, when it was about to be sent, and the session's last change before."""

    request: m.Fetch
    at: float
    changes: int


class CarriedCells(NamedTuple):
    """What a fetched `BatchMeta` has of its fetch. `cells`: those that came along, until somebody takes them;
    `located` says what they are."""

    owner: Carrying
    asked: Asked
    rows: bytes
    cells: list[Cells]
    located: m.Located | None
    until: float


class Carrying:
    """Of one session: whose fetches are followed by reads. `changes` is the session's, as of then."""

    def __init__(self) -> None:
        self._unused: dict[Reader, int] = {}

    def asked(self, request: m.Fetch, changes: int) -> Asked:
        """`request` is sent next. It asks for the cells where they are likely to be used: those of fetches before
        were."""
        request.carry = self._unused.get(_reader(request), MAX_UNUSED) < MAX_UNUSED
        return Asked(request, time.monotonic(), changes)

    def fetched(self, meta: BatchMeta, asked: Asked, reply: m.Handed | m.RowSet, payload: memoryview) -> None:
        """`meta` is of the rows in the answer. They were handed out `after_s` after the server had the request, which
        is not before it was sent: they are no older than counted here, whatever the clocks say."""
        if isinstance(reply, m.RowSet):
            meta._carried = CarriedCells(self, asked, reply.rows, [], None, 0.0)
            return
        reader = _reader(asked.request)
        self._unused[reader] = self._unused.get(reader, 0) + UNUSED
        handed_out = asked.at + reply.after_s
        cells, until = [(reply.located, payload)], handed_out + FRESH_S
        meta._carried = CarriedCells(self, asked, reply.rows.rows, cells, reply.located, until)

    def read(self, meta: BatchMeta, requests: list[m.Get], changes: int) -> Cells | None:
        """The cells of `meta`, which `requests` ask for, where they came along and are still good."""
        carried = meta._carried
        if not isinstance(carried, CarriedCells) or carried.owner is not self:
            return None
        reader = _reader(carried.asked.request)
        try:
            cells = carried.cells.pop()  # of two threads one gets them
        except IndexError:
            if len(self._unused) >= MAX_READERS:
                self._unused.clear()
            self._unused[reader] = max(0, self._unused.get(reader, 1) - 1)
            return None
        fetch = carried.asked.request
        asked = [(get.partition, get.rows, get.fields) for get in requests]
        same = asked == [(fetch.partition, carried.rows, sorted(fetch.fields))]
        if not same or carried.asked.changes != changes or time.monotonic() > carried.until:
            return None
        self._unused[reader] = 0
        return cells


def _reader(request: m.Fetch) -> Reader:
    return request.task, tuple(request.fields)
