"""Which version of the weights made each row of a table, as the number of its announcement."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.weight_versions import UNSETTLED, UNTAGGED, WeightVersions

Slots = NDArray[np.int64]
Key = tuple[str, int]


class RowVersions:
    """`born` is parallel to the table's slots. Rows are also listed by announcement, from `index` on, so that the ones
    that become too old are found without looking at the others; a row whose tags changed may be listed twice."""

    def __init__(self, capacity: int) -> None:
        self.born: Slots = np.full(capacity, UNTAGGED, np.int64)
        self._rows: dict[int, list[Slots]] | None = None  # row indexes, by the number of the announcement
        self._unsettled: dict[tuple[Key, int], list[Slots]] = {}  # by version and what it counted as
        self.num_listed = 0

    def set(self, slots: Slots, rows: Slots, keys: list[Key | None], versions: WeightVersions) -> None:
        """`keys` are the oldest (epoch, version) of these rows, None where nothing says."""
        places = {key: UNTAGGED if key is None else versions.place(*key) for key in set(keys)}
        self.born[slots] = [places[key] for key in keys]
        if self._rows is not None:
            self._list(rows, self.born[slots])
        for key, place in places.items():
            if key is not None and place in UNSETTLED:
                mine = rows[np.array([one == key for one in keys])]
                self._unsettled.setdefault((key, place), []).append(mine)
                self.num_listed += len(mine)

    def unlist(self) -> None:
        """Forget all lists: those of cleared rows have become long."""
        self._unsettled.clear()
        self.num_listed = 0
        if self._rows is not None:
            self._rows = {}

    def index(self, slots: Slots, rows: Slots) -> None:
        """List the live rows anew."""
        self.num_listed -= sum(len(part) for parts in (self._rows or {}).values() for part in parts)
        self._rows = {}
        self._list(rows, self.born[slots])

    def _list(self, rows: Slots, born: Slots) -> None:
        assert self._rows is not None
        for number in np.unique(born[born > 0]).tolist():
            mine = rows[born == number]
            self._rows.setdefault(number, []).append(mine)
            self.num_listed += len(mine)

    def of(self, number: int) -> Slots:
        """The indexes of rows that may have been made after this announcement and before the next."""
        return _joined((self._rows or {}).get(number, []))

    def drop(self, number: int) -> None:
        """Nobody will ask for this announcement, or an earlier one, again."""
        if self._rows:
            for old in [one for one in self._rows if one <= number]:
                self.num_listed -= sum(map(len, self._rows.pop(old)))

    def landed(self, versions: WeightVersions) -> Slots:
        """The indexes of rows of which the announcements say something else by now."""
        settled = [(key, place) for key, place in self._unsettled if versions.place(*key) != place]
        found = _joined([rows for one in settled for rows in self._unsettled.pop(one)])
        self.num_listed -= len(found)
        return found


def _joined(parts: list[Slots]) -> Slots:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
