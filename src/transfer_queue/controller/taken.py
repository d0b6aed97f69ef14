"""What tasks took, for steps: the answer to one fetch, one deal to ranks, what lies between two marks. And as saved.

Saved batches belong to no lease: a lease ends with the state it was given in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue.controller.readiness import Flags, Slots
from transfer_queue.errors import CheckpointCorrupt

MAX_STEPS, MAX_ROWS = 1024, 1 << 22  # of one task: its oldest steps are forgotten; all of them, when one has more rows
_NONE = np.empty(0, np.int64)


class SavedTaken(msgspec.Struct, array_like=True):
    """A `TakenRows`; `rows` are int64."""

    number: int
    partition: str
    rows: bytes
    fields: list[str]
    batch_size: int
    sampling: dict[str, Any]
    lease: int
    repeated: int


class SavedDeal(msgspec.Struct, array_like=True):
    """A `TakenDeal`; each share is int64."""

    partition: str
    dp_size: int
    batch_size: int
    shares: dict[int, bytes]
    size: int


class SavedSegment(msgspec.Struct, array_like=True):
    batches: list[SavedTaken]
    deals: list[SavedDeal]


class SavedSteps(msgspec.Struct, array_like=True):
    """The steps of one task, see `TaskSteps`; `done` by ascending step."""

    done: list[tuple[int, SavedSegment]]
    open: SavedSegment
    again: list[SavedTaken]
    deals: list[SavedDeal]


class TakenRows(NamedTuple):
    """The answer to one fetch. `rows` are global indexes, the last `repeated` of them for the sake of other ranks, or
    all of a share that its rank had used before; `lease` is 0 where they were consumed at once."""

    number: int
    partition: str
    rows: Slots
    fields: list[str]
    batch_size: int
    sampling: dict[str, Any]
    lease: int
    repeated: int

    @property
    def own(self) -> Slots:
        return self.rows[: len(self.rows) - self.repeated]

    @property
    def is_plain(self) -> bool:
        """Whether it was for a loop that has no ranks."""
        return "dp_rank" not in self.sampling

    def saved(self) -> SavedTaken:
        return SavedTaken(
            self.number, self.partition, self.rows.tobytes(), self.fields, self.batch_size, self.sampling, self.lease,
            self.repeated,
        )  # fmt: skip

    @classmethod
    def restored(cls, saved: SavedTaken) -> TakenRows:
        """Raises `CheckpointCorrupt`."""
        rows = _rows(saved.rows)
        if not 0 <= saved.repeated <= len(rows) or saved.number < 0:
            raise _damaged()
        return cls(
            saved.number, saved.partition, rows, saved.fields, saved.batch_size, saved.sampling, saved.lease,
            saved.repeated,
        )  # fmt: skip

    def without_lease(self) -> TakenRows:
        """The lease has ended. Who shared it, shares this one; no later one has its number (`Steps.last_lease`)."""
        return self if self.lease <= 0 else self._replace(lease=-self.lease)

    def part(self, flags: Flags) -> list[TakenRows]:
        """The batch with those of its own rows only; nothing where there are none."""
        if flags.all():
            return [self]
        return [self._replace(rows=self.own[flags], repeated=0)] if flags.any() else []


class TakenDeal(NamedTuple):
    """A batch that was dealt to data-parallel ranks: the rows of each, and how many the largest share has."""

    partition: str
    dp_size: int
    batch_size: int
    shares: dict[int, Slots]
    size: int

    @property
    def rows(self) -> Slots:
        return np.concatenate([_NONE, *self.shares.values()])

    def part(self, shares: dict[int, Slots]) -> list[TakenDeal]:
        """The deal of these rows alone; none of no rows."""
        size = max(map(len, shares.values()), default=0)
        return [self._replace(shares=shares, size=size)] if size else []

    def saved(self) -> SavedDeal:
        shares = {rank: rows.tobytes() for rank, rows in self.shares.items()}
        return SavedDeal(self.partition, self.dp_size, self.batch_size, shares, self.size)

    @classmethod
    def restored(cls, saved: SavedDeal) -> TakenDeal:
        """Raises `CheckpointCorrupt`."""
        shares = {rank: _rows(rows) for rank, rows in saved.shares.items()}
        if saved.dp_size < 1 or not all(0 <= rank < saved.dp_size for rank in shares):
            raise _damaged()
        return cls(saved.partition, saved.dp_size, saved.batch_size, shares, saved.size)


class Segment:
    """What was taken between two marks."""

    def __init__(self) -> None:
        self.batches: list[TakenRows] = []
        self.deals: list[TakenDeal] = []
        self.num_rows = 0

    @property
    def is_too_long(self) -> bool:
        """Whether its task did not mark anything for very long."""
        return self.num_rows > MAX_ROWS

    def saved(self) -> SavedSegment:
        return SavedSegment([batch.saved() for batch in self.batches], [deal.saved() for deal in self.deals])

    @classmethod
    def restored(cls, saved: SavedSegment) -> Segment:
        """Raises `CheckpointCorrupt`."""
        return cls.of(map(TakenRows.restored, saved.batches), map(TakenDeal.restored, saved.deals))

    @classmethod
    def of(cls, batches: Iterable[TakenRows], deals: Iterable[TakenDeal]) -> Segment:
        found = cls()
        found.add(batches, deals)
        return found

    def end_leases(self) -> None:
        """No lease of before lives any more."""
        self.batches = [batch.without_lease() for batch in self.batches]

    def add(self, batches: Iterable[TakenRows], deals: Iterable[TakenDeal]) -> None:
        for batch in batches:
            self.batches.append(batch)
            self.num_rows += len(batch.rows) + 1
        for deal in deals:
            self.deals.append(deal)
            self.num_rows += deal.dp_size


class TaskSteps:
    """One task's segments: `done` by step, ascending; `open` since. `again` is to be handed out once more, in this
    order; `served` was, and is not used yet."""

    def __init__(self) -> None:
        self.done: dict[int, Segment] = {}
        self.open = Segment()
        self.again: list[TakenRows] = []
        self.served: list[TakenRows] = []
        self.deals: list[TakenDeal] = []  # to be dealt once more

    def are_due(self) -> bool:
        return bool(self.again or self.deals)

    def close(self, step: int, used: Segment, left: Segment) -> None:
        """What was taken since the last mark is `used` for this step; what is `left` of it is not used yet."""
        self.done.setdefault(step, Segment()).add(used.batches, used.deals)
        self.open, self.served = left, []
        self._forget_the_oldest()

    def _forget_the_oldest(self) -> None:
        rows = sum(segment.num_rows for segment in self.done.values())
        while len(self.done) > MAX_STEPS or (rows > MAX_ROWS and len(self.done) > 1):
            rows -= self.done.pop(next(iter(self.done))).num_rows

    def saved(self) -> SavedSteps:
        """`served` is not used yet, so it is to be handed out once more."""
        again = sorted([*self.again, *self.served], key=lambda batch: batch.number)
        return SavedSteps(
            [(step, segment.saved()) for step, segment in self.done.items()],
            self.open.saved(),
            [batch.saved() for batch in again],
            [deal.saved() for deal in self.deals],
        )

    @classmethod
    def restored(cls, saved: SavedSteps) -> TaskSteps:
        """Raises `CheckpointCorrupt`."""
        found = cls()
        found.done = {step: Segment.restored(segment) for step, segment in saved.done}
        if len(found.done) != len(saved.done) or list(found.done) != sorted(found.done):
            raise _damaged()
        found.open = Segment.restored(saved.open)
        found.again = [TakenRows.restored(batch) for batch in saved.again]
        found.deals = [TakenDeal.restored(deal) for deal in saved.deals]
        found.end_leases()
        return found

    def end_leases(self) -> None:
        """No lease of before lives any more."""
        for segment in (*self.done.values(), self.open):
            segment.end_leases()

    @property
    def next_number(self) -> int:
        """Above those of all batches."""
        return max((batch.number for batch in self._batches()), default=-1) + 1

    @property
    def last_lease(self) -> int:
        """The highest of all batches, whether it lives or has ended."""
        return max((abs(batch.lease) for batch in self._batches()), default=0)

    def _batches(self) -> Iterator[TakenRows]:
        for segment in (*self.done.values(), self.open):
            yield from segment.batches
        yield from (*self.again, *self.served)


def _rows(data: bytes) -> Slots:
    if len(data) % 8:
        raise _damaged()
    return np.frombuffer(data, np.int64).copy()


def _damaged() -> CheckpointCorrupt:
    return CheckpointCorrupt("the saved controller state is not consistent: steps of a task")
