"""Where cells lie that were put to be shared, by what they hold: whoever writes the same again need not store it.

A print is 16 bytes of a cell's content, and not all of it (`codec.cells`): cells with one print may differ, so whoever
is told of one compares it. This is no more than a memory of what is there: a block that is gone is found no more, and
nothing of it is saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import numpy as np

from transfer_queue.controller.readiness import Slots

PRINT_NBYTES = 16
MAX_ALIKE = 4  # places that are remembered of one print
MIN_PURGE = 1024

Place = tuple[int, int]  # a block, and a row of it


class ContentIndex:
    """Of one partition: the places of each field's prints."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, bytes], list[Place]] = {}
        self._purge_at = MIN_PURGE

    def add(self, field: str, prints: bytes, block: int, live: Set[int]) -> None:
        """Row i of `block` holds what has the i-th print. `live`: the blocks of the partition that have cells."""
        for row, at in enumerate(range(0, len(prints), PRINT_NBYTES)):
            alike = self.places.setdefault((field, prints[at : at + PRINT_NBYTES]), [])
            alike.append((block, row))
            if len(alike) > MAX_ALIKE:
                alike[:] = [place for place in alike if place[0] in live][-MAX_ALIKE:]
        if len(self.places) > self._purge_at:
            self._purge(live)

    def _purge(self, live: Set[int]) -> None:
        """Forget blocks that are gone, when there is twice as much as was left the last time."""
        kept = ((key, [place for place in alike if place[0] in live]) for key, alike in self.places.items())
        self.places = {key: alike for key, alike in kept if alike}
        self._purge_at = max(MIN_PURGE, 2 * len(self.places))

    def find(self, field: str, prints: Sequence[bytes], live: Set[int]) -> list[tuple[int, int, int]]:
        """(number of the print, block, row) of each place that is there, the latest first."""
        found = []
        for number, one in enumerate(prints):
            for block, row in reversed(self.places.get((field, one), ())):
                if block in live:
                    found.append((number, block, row))
        return found

    def moved(self, block: int, target: int, rows: Slots) -> None:
        """`rows` of `block`, ascending (none: all), are the rows of `target` now."""
        for alike in self.places.values():
            alike[:] = _moved(alike, block, target, rows)


def _moved(alike: Iterable[Place], block: int, target: int, rows: Slots) -> list[Place]:
    found = []
    for place in alike:
        if place[0] != block:
            found.append(place)
        elif not len(rows):
            found.append((target, place[1]))
        else:
            at = int(np.searchsorted(rows, place[1]))
            if at < len(rows) and rows[at] == place[1]:
                found.append((target, at))
    return found
