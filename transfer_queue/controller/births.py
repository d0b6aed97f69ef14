"""Which version of the weights made each row of a table, as the number of its announcement."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.versions import AHEAD, UNTAGGED, Versions

Slots = NDArray[np.int64]
Key = tuple[str, int]


class Births:
    """`born` is parallel to the table's slots. Rows are also listed by announcement, from `index` on, so that the ones
    that become too old are found without looking at the others; a row whose tags changed may be listed twice."""

    def __init__(self, capacity: int) -> None:
        self.born: Slots = np.full(capacity, UNTAGGED, np.int64)
        self._rows: dict[int, list[Slots]] | None = None  # row indexes, by the number of the announcement
        self._ahead: dict[Key, list[Slots]] = {}  # row indexes of versions that are not announced yet

    def set(self, slots: Slots, rows: Slots, keys: list[Key | None], versions: Versions) -> None:
        """`keys` are the oldest (epoch, version) of these rows, None where nothing says."""
        places = {key: UNTAGGED if key is None else versions.place(*key) for key in set(keys)}
        self.born[slots] = [places[key] for key in keys]
        if self._rows is not None:
            self._list(rows, self.born[slots])
        if AHEAD in places.values():
            for key in {key for key in keys if key is not None and places[key] == AHEAD}:
                mine = np.array([one == key for one in keys])
                self._ahead.setdefault(key, []).append(rows[mine])

    def index(self, slots: Slots, rows: Slots) -> None:
        """List the live rows anew."""
        self._rows = {}
        self._list(rows, self.born[slots])

    def _list(self, rows: Slots, born: Slots) -> None:
        assert self._rows is not None
        for number in np.unique(born[born > 0]).tolist():
            self._rows.setdefault(number, []).append(rows[born == number])

    def of(self, number: int) -> Slots:
        """The indexes of rows that may have been made after this announcement and before the next."""
        return _joined((self._rows or {}).get(number, []))

    def drop(self, number: int) -> None:
        """Nobody will ask for this announcement, or an earlier one, again."""
        if self._rows:
            for old in [one for one in self._rows if one <= number]:
                del self._rows[old]

    def landed(self, versions: Versions) -> Slots:
        """The indexes of rows that were ahead of what was announced and may be so no longer."""
        keys = [key for key in self._ahead if versions.place(*key) != AHEAD]
        return _joined([rows for key in keys for rows in self._ahead.pop(key)])


def _joined(parts: list[Slots]) -> Slots:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
