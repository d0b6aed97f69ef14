"""Which rows each data-parallel rank trains on, in which order, and in which micro-batches."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transfer_queue.errors import InvalidInput

COLUMNS = "columns"  # what is sent with it: the columns that the batch had
OWN = ("dp_size", "partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes", COLUMNS)
DEPTHS = {"partitions": 2, "micro_batch_indices": 3, "num_microbatches": 1, "global_batch_sizes": 1, "dropped": 1}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Made once, where all lengths are known, and sent: ranks that pack micro-batches by themselves may not agree on
    their number, and their collectives then hang.

    `partitions`: the row numbers of each rank, in the order in which it trains on them; every row is one rank's, or
    among `dropped`: nobody trains on those, and they are not stored.
    `micro_batch_indices`: for each rank, positions in its part for each micro-batch, as many as for any other rank.
    `num_microbatches`: of each training step, the same for all ranks. `global_batch_sizes`: of each training step over
    all ranks, in what the framework counts: rows, or rollouts of several rows each.
    `extra`: plain data that is sent along, under other names than `of_rank` and the bridge's `columns` have.
    Numbers of NumPy and torch become Python's. Raises `InvalidInput` for what are no whole numbers.
    """

    partitions: Sequence[Sequence[int]]
    micro_batch_indices: Sequence[Sequence[Sequence[int]]] | None = None
    num_microbatches: Sequence[int] | None = None
    global_batch_sizes: Sequence[int] | None = None
    dropped: Sequence[int] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, depth in DEPTHS.items():
            value = getattr(self, name)
            if value is not None or name in ("partitions", "dropped"):
                object.__setattr__(self, name, _whole(value, name, depth))
        if not isinstance(self.extra, Mapping):
            raise InvalidInput(f"extra is a dict, got {self.extra!r:.200}")

    @classmethod
    def even(cls, rows: int, dp_size: int) -> Schedule:
        """Rows in their order, as many for each rank as for any other, or one more. `InvalidInput` for no rank, and for
        more ranks than rows."""
        rows, dp_size = _whole(rows, "rows", 0), _whole(dp_size, "dp_size", 0)
        if dp_size < 1:
            raise InvalidInput(f"dp_size {dp_size}: there is one rank at least")
        if dp_size > rows:
            raise InvalidInput(f"{dp_size} ranks for {rows} rows: every rank trains on one at least")
        bounds = [rows * rank // dp_size for rank in range(dp_size + 1)]
        return cls(partitions=[range(a, b) for a, b in itertools.pairwise(bounds)])

    @property
    def dp_size(self) -> int:
        return len(self.partitions)

    def check(self, rows: int) -> None:
        """Raises `InvalidInput` unless each of `rows` rows is one rank's, or dropped, and the micro-batches of a rank
        have each of its rows once, or where `extra` has a name that says another thing to a rank."""
        taken = [name for name in self.extra if name in OWN]
        if taken:
            raise InvalidInput(f"extra: {taken} are what the schedule says itself to a rank")
        parts = self.partitions
        if not parts or not all(parts):
            raise InvalidInput(f"{len(parts)} ranks for {rows} rows: every rank trains on one at least")
        if sorted(row for part in [*parts, self.dropped] for row in part) != list(range(rows)):
            more = f" and {len(self.dropped)} dropped ones" if self.dropped else ""
            raise InvalidInput(f"the partitions of {len(parts)} ranks{more} do not have each of {rows} rows once")
        if self.micro_batch_indices is None:
            return
        if len(self.micro_batch_indices) != len(parts):
            raise InvalidInput(f"micro-batches of {len(self.micro_batch_indices)} ranks, there are {len(parts)}")
        if len(numbers := {len(batches) for batches in self.micro_batch_indices}) > 1:
            raise InvalidInput(f"ranks have {sorted(numbers)} micro-batches: their collectives would hang")
        for rank, (part, batches) in enumerate(zip(parts, self.micro_batch_indices, strict=True)):
            if sorted(place for batch in batches for place in batch) != list(range(len(part))):
                raise InvalidInput(f"rank {rank}: the micro-batches do not have each of its {len(part)} rows once")
            if self.num_microbatches is not None and len(batches) != sum(self.num_microbatches):
                raise InvalidInput(
                    f"rank {rank}: {len(batches)} micro-batches, num_microbatches {list(self.num_microbatches)} says "
                    f"{sum(self.num_microbatches)}"
                )

    def of_rank(self, rank: int) -> dict[str, Any]:
        """What a rank gets of it, as plain data."""
        batches = None if self.micro_batch_indices is None else self.micro_batch_indices[rank]
        return {
            **self.extra,
            "dp_size": self.dp_size,
            "partition": list(self.partitions[rank]),
            "micro_batch_indices": None if batches is None else [list(batch) for batch in batches],
            "num_microbatches": None if self.num_microbatches is None else list(self.num_microbatches),
            "global_batch_sizes": None if self.global_batch_sizes is None else list(self.global_batch_sizes),
        }


def _whole(value: Any, name: str, depth: int) -> Any:
    """Lists in lists, `depth` deep, of Python's ints. Raises `InvalidInput`, also for what can be read only once."""
    if depth:
        if not hasattr(value, "__len__") or isinstance(value, str):
            raise InvalidInput(f"{name}: expected a list, got {value!r:.200}")
        try:
            return [_whole(one, name, depth - 1) for one in value]
        except TypeError:  # of an array without dimensions
            raise InvalidInput(f"{name}: expected a list, got {value!r:.200}") from None
    try:
        return int(operator.index(value))
    except TypeError:
        raise InvalidInput(f"{name}: expected whole numbers, got {value!r:.200}") from None
