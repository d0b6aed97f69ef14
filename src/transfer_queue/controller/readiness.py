"""Who may take which rows: consumption per task, readiness per field set, kept up to date incrementally.

A fetch costs the rows it hands out, a commit the rows it writes: neither looks at the whole partition. The ready rows
of a view are a flag per slot and the lowest flagged slot; taking the first n scans flags at memory speed from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
Flags = NDArray[np.bool_]
SCAN_SLOTS = 4096
FIRST_SLOTS = 64  # are looked at first, where few rows are wanted
# In place of a lease: kept for a later request that the sampler already has rows for, or that they were dealt to.
# Or for a task that took it before and is to get it once more.
RESERVED, DEALT, REPLAYED = -1, -2, -4
KEPT = frozenset((RESERVED, DEALT, REPLAYED))
DELAYED = -3  # likewise: refused, and not offered for a while
NO_LEASES = KEPT | {DELAYED}
MAX_VIEWS = 256
# What became of a row for a task, which no reset forgets: it was found too old; its admission was used, or given back.
TOO_OLD, SPENT = 1, 2


class ReadyView:
    """The rows of one partition that are ready in all of `fields`, and neither consumed by one task nor lent to it."""

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
        if len(slots) == 1:
            self._remove_one(slots.item(0))
            return
        held = slots[self.ready[slots]]
        if len(held):
            self.ready[held] = False
            self.count -= len(held)

    def _remove_one(self, slot: int) -> None:
        if self.ready.item(slot):
            self.ready[slot] = False
            self.count -= 1

    def first(self, limit: int | None, size: int) -> Slots:
        """The first `limit` ready slots (None: all) in ascending order, of `size` slots in use."""
        if limit is None or limit >= self.count:
            limit = self.count
        if limit == 1:
            return self._first_one(size)
        found: list[Slots] = []
        missing, at, step = limit, self.low, SCAN_SLOTS if limit > FIRST_SLOTS // 2 else FIRST_SLOTS
        while missing > 0 and at < size:
            part = np.flatnonzero(self.ready[at : min(at + step, size)])[:missing] + at
            if len(part):
                if not found:
                    self.low = int(part[0])
                found.append(part)
            missing -= len(part)
            at, step = at + step, step * 4
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _first_one(self, size: int) -> Slots:
        """`first` of one, of which there is one: in a quarter of the time."""
        at, step = self.low, FIRST_SLOTS
        while at < size:
            found = at + int(self.ready[at : min(at + step, size)].argmax())
            if self.ready[found]:
                self.low = found
                return np.array([found], np.int64)
            at, step = at + step, step * 4
        return np.empty(0, np.int64)


class Written(Protocol):
    """The rows of a partition, of which so many slots are in use."""

    @property
    def size(self) -> int: ...

    def ready(self, slots: Slots, fields: Sequence[str]) -> Flags | None: ...


class Returned(NamedTuple):
    """A row that came back `attempts` times, the last time for this `reason`. It is offered again at `due`, `delay_s`
    after that, or never when it is `dead`."""

    attempts: int
    reason: str
    due: float
    dead: bool
    delay_s: float = 0.0


class Watch(Protocol):
    """Who hears of it when what a task used, or what it asked for, is another thing than before."""

    def touch(self, slots: Slots) -> None: ...
    def note_terms(self) -> None: ...
    def moved(self, order: Slots) -> None: ...


class Task:
    """One consumer group of a partition. `watch` hears of what it used.

    A row is offered; then consumed, or lent and after that consumed or offered again; or first reserved.
    """

    def __init__(self, capacity: int, watch: Watch | None = None) -> None:
        self.watch = watch
        self.consumed: Flags = np.zeros(capacity, np.bool_)
        self.num_consumed = 0  # of live rows
        self.cleared_consumed = 0  # of those that were cleared since
        self.fates: NDArray[np.uint8] = np.zeros(capacity, np.uint8)  # `TOO_OLD`, `SPENT`
        self.num_stale = 0  # rows that were found too old, each once, cleared ones too
        self.lease: Slots = np.zeros(capacity, np.int64)  # number of the lease that holds the row, 0 for none
        self.lent: dict[int, int] = {}  # live rows of each lease that has some
        self.num_lent = 0
        self.views: dict[tuple[str, ...], ReadyView] = {}
        self.limit: Any = None  # how old its rows may be (`staleness.Limit`), None before it was asked for any
        self.finishing: list[Any] = []  # parked requests that are also answered when nothing is left to wait for
        self.returned: dict[int, Returned] = {}  # by slot; of rows that were on a lease that ended without an ack
        self.max_deliver: int | None = None  # asked by one of its requests
        self.groups: list[Any] = []  # data-parallel ranks that share its rows (`dealing.RankGroup`), oldest first
        self.loops: Any = None  # which of these ranks were told that nothing is left (`dealing.EndedLoops`)

    def forget_ranks(self) -> None:
        """Data-parallel ranks begin anew, whatever they had."""
        self.groups, self.loops = [], None

    def touch(self, slots: Slots) -> None:
        """Whether these rows are used, or came back, may be another thing than before."""
        if self.watch is not None and len(slots):
            self.watch.touch(slots)

    def allow(self, deliveries: int) -> None:
        """A request asks for so many deliveries of a row: of those that ask, the strictest counts."""
        if self.max_deliver is None or deliveries < self.max_deliver:
            self.max_deliver = deliveries
            if self.watch is not None:
                self.watch.note_terms()

    def view(self, fields: tuple[str, ...], table: Written) -> ReadyView:
        """The view over `fields`, built by one scan when it is new."""
        view = self.views.get(fields)
        if view is None:
            self._make_room()
            view = self.views[fields] = ReadyView(fields, len(self.consumed))
            self.refresh(view, table, np.arange(table.size))
        return view

    def refresh(self, view: ReadyView, table: Written, slots: Slots) -> bool:
        """Add those of `slots` that became ready; whether there were any."""
        return self.mark(view, slots, table.ready(slots, view.fields))

    def mark(self, view: ReadyView, slots: Slots, ready: Flags | None) -> bool:
        """Add those of `slots` that are `ready` (see `Written.ready`) and free; whether there were any."""
        if ready is None:
            return False
        if len(slots) == 1:
            return ready.item(0) and self._mark_one(view, slots.item(0))
        new = slots[ready & ~self.consumed[slots] & (self.lease[slots] == 0) & ~view.ready[slots]]
        view.add(new)
        return len(new) > 0

    def _mark_one(self, view: ReadyView, slot: int) -> bool:
        """`mark` of one ready slot, in a tenth of the time: a put of one row asks every view."""
        if self.consumed.item(slot) or self.lease.item(slot) or view.ready.item(slot):
            return False
        view.ready[slot] = True
        view.count += 1
        view.low = min(view.low, slot)
        return True

    def offered(self, slots: Slots) -> Slots:
        """Those of `slots` that are neither consumed nor lent, each once."""
        if len(slots) == 1:
            slot = slots.item(0)
            return slots[:0] if self.consumed.item(slot) or self.lease.item(slot) else slots
        fresh = slots[~self.consumed[slots] & (self.lease[slots] == 0)]
        return np.unique(fresh) if len(fresh) > 1 and bool((np.diff(fresh) <= 0).any()) else fresh

    def claim(self, slots: Slots) -> Slots:
        """Those of `slots` that are offered or reserved, about to be lent or consumed."""
        for kind in KEPT:
            if kind in self.lent:
                self._unlend(slots[self.lease[slots] == kind])
        return self.offered(slots)

    def reserve(self, slots: Slots, kind: int = RESERVED) -> None:
        """Offered rows are kept for later requests."""
        if len(slots):
            self.touch(slots)
            before = self.lent.get(kind, 0)
            self.lend(slots, kind)
            self.lent[kind] += before

    def consume(self, slots: Slots) -> None:
        """Offered rows are handed out for good."""
        self.touch(slots)
        self.consumed[slots] = True
        self.num_consumed += len(slots)
        for view in self.views.values():
            view.remove(slots)

    def spend(self, slots: Slots) -> int:
        """Nobody will use these rows: how many of them have an admission to give back, which they give back now."""
        new = slots[self.fates[slots] & SPENT == 0]
        self.note_fate(new, SPENT)
        return len(new)

    def note_fate(self, slots: Slots, what: int) -> None:
        """This became of these rows, for good."""
        new = slots[self.fates[slots] & what != what]
        self.touch(new)
        if what & TOO_OLD and (count := int(np.count_nonzero(self.fates[new] & TOO_OLD == 0))):
            self.num_stale += count
            if self.watch is not None:
                self.watch.note_terms()  # the rows may be gone when the event is over; they count
        self.fates[new] |= what

    def give_back(self, slots: Slots) -> Slots:
        """Those of live `slots` that are consumed, which they are no longer."""
        held = slots[self.consumed[slots]]
        self.touch(held)
        self.consumed[held] = False
        self.num_consumed -= len(held)
        return held

    def lend(self, slots: Slots, number: int) -> None:
        """Offered rows are held by a new lease."""
        self.lease[slots] = number
        self.lent[number] = len(slots)
        self.num_lent += len(slots)
        for view in self.views.values():
            view.remove(slots)

    def take_back(self, slots: Slots, number: int, used: bool) -> Slots:
        """Those of live `slots` that the lease holds, which it does no longer: consumed if `used`, else free."""
        held = slots[self.lease[slots] == number]
        self._unlend(held)
        if used:
            self.consumed[held] = True
            self.num_consumed += len(held)
            self.forgive(held)
        return held

    def forgive(self, slots: Slots) -> None:
        """The rows were used, or are gone: that they came back before is of no interest any more."""
        if self.returned:
            self.touch(slots)
            for slot in slots.tolist():
                self.returned.pop(slot, None)

    def free(self) -> None:
        """Nothing is lent or kept any more."""
        self._unlend(np.flatnonzero(self.lease))

    def _unlend(self, held: Slots) -> None:
        """Lent slots are so no longer."""
        self.touch(held)
        numbers, counts = np.unique(self.lease[held], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.lent[number] -= count
            if not self.lent[number]:
                del self.lent[number]
        self.lease[held] = 0
        self.num_lent -= len(held)

    def reset(self, table: Written) -> None:
        """Forget what was consumed or lent; every ready row is offered again. What was consumed has no admission left
        to give back."""
        self.fates[self.consumed] |= SPENT
        self.consumed[:] = False
        self.lease[:] = 0
        self.lent.clear()
        self.returned.clear()
        self.num_consumed = self.num_lent = 0
        for view in self.views.values():
            self.refresh(view, table, np.arange(table.size))

    def drop(self, slots: Slots) -> None:
        """The rows are gone."""
        one = len(slots) == 1
        consumed = int(self.consumed.item(slots.item(0)) if one else np.count_nonzero(self.consumed[slots]))
        self.num_consumed -= consumed
        self.cleared_consumed += consumed
        if self.num_lent:
            self._unlend(slots[self.lease[slots] != 0])
        self.forgive(slots)
        for view in self.views.values():
            view.remove(slots)

    def delay_of(self, slot: int) -> float:
        """For how long a row is held back that was refused; 0 for one that is not, or no longer."""
        return self.returned[slot].delay_s if self.lease[slot] == DELAYED and slot in self.returned else 0.0

    def hold_back(self, slots: Slots, delays: Sequence[float]) -> None:
        """These rows are offered again later, as they were about to be when they were written down."""
        for slot, delay_s in zip(slots.tolist(), delays, strict=True):
            self.returned[slot] = self.returned[slot]._replace(delay_s=delay_s)
        self.reserve(slots, DELAYED)

    def resize(self, order: Slots | None, capacity: int) -> None:
        """Follow the table: grow to `capacity`, or keep only the slots in `order`."""
        if order is not None and self.watch is not None:
            self.watch.moved(order)
        self.consumed = resized(self.consumed, order, capacity)
        self.lease = resized(self.lease, order, capacity)
        self.fates = resized(self.fates, order, capacity)
        if order is not None and self.returned:
            known = self.returned
            self.returned = {place: known[slot] for place, slot in enumerate(order.tolist()) if slot in known}
        for view in self.views.values():
            view.ready = resized(view.ready, order, capacity)
            view.low = 0

    def dead_letters(self) -> Slots:
        """The slots of rows that came back too often, ascending."""
        return np.array(sorted(slot for slot, one in self.returned.items() if one.dead), np.int64)

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
