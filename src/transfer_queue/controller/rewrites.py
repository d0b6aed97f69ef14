"""When cells of a partition were written anew, and tags of its rows changed: what a task took before is gone.

Nothing is noted until a task marks its first step. Times are numbers of batches: what was changed at n is as batch n
found it, and not as those before it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.readiness import Flags, Slots, resized


class Batches(Protocol):
    """Those that tasks take for their steps."""

    next_number: int

    @property
    def are_noted(self) -> bool: ...


class Rewrites:
    """`cells`: by field, and `tags`: the time of the last change, parallel to the table's slots; 0 for never."""

    def __init__(self) -> None:
        self.batches: Batches | None = None
        self.cells: dict[str, Slots] = {}
        self.tags: Slots | None = None

    @property
    def are_noted(self) -> bool:
        return self.batches is not None and self.batches.are_noted

    def rewritten(self, slots: Slots, fields: Sequence[str], capacity: int) -> None:
        """Cells that were there are others now; of new rows among these it does no harm to say so."""
        assert self.batches is not None
        for name in fields:
            if name not in self.cells:
                self.cells[name] = np.zeros(capacity, np.int64)
            self.cells[name][slots] = self.batches.next_number

    def retagged(self, slots: Sequence[int], capacity: int) -> None:
        assert self.batches is not None
        if self.tags is None:
            self.tags = np.zeros(capacity, np.int64)
        self.tags[slots] = self.batches.next_number

    def cells_since(self, number: int, slots: Slots, fields: Sequence[str]) -> dict[str, Flags]:
        """Which of the rows have another cell than batch `number` found, by field, of fields with some."""
        found = {name: self.cells[name][slots] > number for name in fields if name in self.cells}
        return {name: flags for name, flags in found.items() if flags.any()}

    def tags_since(self, number: int, slots: Slots) -> Flags:
        return np.zeros(len(slots), np.bool_) if self.tags is None else self.tags[slots] > number

    def resize(self, order: Slots | None, capacity: int) -> None:
        """Follow the table."""
        self.cells = {name: resized(times, order, capacity) for name, times in self.cells.items()}
        self.tags = None if self.tags is None else resized(self.tags, order, capacity)

    def of(self, slots: Slots) -> tuple[dict[str, Slots], NDArray[np.int64]]:
        """(`cells`, `tags`) of these rows, without what never changed."""
        cells = {name: times[slots] for name, times in self.cells.items() if times[slots].any()}
        tags = np.zeros(0, np.int64) if self.tags is None or not self.tags[slots].any() else self.tags[slots]
        return cells, tags

    def restore(self, cells: Mapping[str, Slots], tags: Slots, capacity: int) -> None:
        """As `of` gave it for the first slots of a table."""
        self.cells = {name: resized(times, None, capacity) for name, times in cells.items()}
        self.tags = resized(tags, None, capacity) if len(tags) else None
