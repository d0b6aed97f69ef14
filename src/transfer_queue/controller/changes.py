"""Which keys and tags of a partition changed since a version, so that listing them again costs what changed."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
from numpy.typing import NDArray

MAX_REMOVED = 65_536
_serial = itertools.count(1)


class ChangeLog:
    """Versions of the slots of one table, and the keys removed lately. `table` is unique, even if names come back."""

    def __init__(self, capacity: int) -> None:
        self.table = next(_serial)
        self.version = 0
        self.changed: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._removed: deque[tuple[int, str]] = deque()
        self._complete_since = 0  # removals after this version are all in `_removed`

    def touch(self, slots: NDArray[np.int64]) -> None:
        self.version += 1
        self.changed[slots] = self.version

    def remove(self, keys: list[str]) -> None:
        self.version += 1
        self._removed.extend((self.version, key) for key in keys)
        while len(self._removed) > MAX_REMOVED:
            self._complete_since = self._removed.popleft()[0]

    def removed_since(self, version: int) -> list[str] | None:
        """Keys removed after `version`; None when that is too long ago to tell."""
        if version < self._complete_since:
            return None
        found = []
        for then, key in reversed(self._removed):
            if then <= version:
                break
            found.append(key)
        return found

    def slots_since(self, version: int, size: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.changed[:size] > version)
