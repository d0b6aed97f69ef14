"""Who may take which rows: consumption per task, readiness per field set, kept up to date incrementally.

A fetch costs the rows it hands out, a commit the rows it writes: neither looks at the whole partition. The ready rows
of a view are a flag per slot and the lowest flagged slot; taking the first n scans flags at memory speed from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transfer_queue.controller.table import Table

Slots = NDArray[np.int64]
Flags = NDArray[np.bool_]
SCAN_SLOTS = 4096
MAX_VIEWS = 256


class View:
    """The rows of one partition that are ready in all of `fields` and not yet consumed by one task."""

    def __init__(self, fields: tuple[str, ...], capacity: int) -> None:
        self.fields = fields
        self.ready: Flags = np.zeros(capacity, np.bool_)
        self.count = 0
        self.low = 0  # no ready slot below
        self.waiters: list[Any] = []

    def add(self, slots: Slots) -> None:
        """Mark slots ready; none of them is."""
        if len(slots):
            self.ready[slots] = True
            self.count += len(slots)
            self.low = min(self.low, int(slots.min()))

    def remove(self, slots: Slots) -> None:
        held = slots[self.ready[slots]]
        if len(held):
            self.ready[held] = False
            self.count -= len(held)

    def first(self, limit: int | None, size: int) -> Slots:
        """The first `limit` ready slots (None: all) in ascending order, of `size` slots in use."""
        if limit is None or limit >= self.count:
            limit = self.count
        found: list[Slots] = []
        missing, at, step = limit, self.low, SCAN_SLOTS
        while missing > 0 and at < size:
            part = np.flatnonzero(self.ready[at : min(at + step, size)])[:missing] + at
            if len(part):
                if not found:
                    self.low = int(part[0])
                found.append(part)
            missing -= len(part)
            at, step = at + step, step * 4
        return np.concatenate(found) if found else np.empty(0, np.int64)


class Task:
    """One consumer group of a partition."""

    def __init__(self, capacity: int) -> None:
        self.consumed: Flags = np.zeros(capacity, np.bool_)
        self.views: dict[tuple[str, ...], View] = {}

    def view(self, fields: tuple[str, ...], table: Table) -> View:
        """The view over `fields`, built by one scan when it is new."""
        view = self.views.get(fields)
        if view is None:
            self._make_room()
            view = self.views[fields] = View(fields, len(self.consumed))
            self.refresh(view, table, np.arange(table.size))
        return view

    def refresh(self, view: View, table: Table, slots: Slots) -> bool:
        """Add those of `slots` that became ready; whether there were any."""
        ready = table.ready(slots, view.fields)
        if ready is None:
            return False
        new = slots[ready & ~self.consumed[slots] & ~view.ready[slots]]
        view.add(new)
        return len(new) > 0

    def consume(self, slots: Slots) -> None:
        self.consumed[slots] = True
        for view in self.views.values():
            view.remove(slots)

    def reset(self, table: Table) -> None:
        """Forget what was consumed; every ready row is offered again."""
        self.consumed[:] = False
        for view in self.views.values():
            self.refresh(view, table, np.arange(table.size))

    def drop(self, slots: Slots) -> None:
        """The rows are gone."""
        for view in self.views.values():
            view.remove(slots)

    def resize(self, order: Slots | None, capacity: int) -> None:
        """Follow the table: grow to `capacity`, or keep only the slots in `order`."""
        self.consumed = resized(self.consumed, order, capacity)
        for view in self.views.values():
            view.ready = resized(view.ready, order, capacity)
            view.low = 0

    def _make_room(self) -> None:
        """Forget the oldest idle view when there are very many; it is rebuilt by a scan when it is asked for again."""
        if len(self.views) >= MAX_VIEWS:
            idle = next((fields for fields, view in self.views.items() if not view.waiters), None)
            if idle is not None:
                del self.views[idle]


def resized(array: NDArray[Any], order: Slots | None, capacity: int) -> NDArray[Any]:
    """`array` with its last dimension of `capacity`: all entries kept, or those of `order` in that order."""
    kept = array if order is None else array[..., order]
    out = np.zeros((*array.shape[:-1], capacity), array.dtype)
    out[..., : kept.shape[-1]] = kept
    return out
