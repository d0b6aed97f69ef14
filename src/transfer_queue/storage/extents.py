"""Which ranges of an arena are free: best fit with coalescing. Pure bookkeeping."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """Free ranges of `size` bytes in units of `grain`.

    Best fit prefers the hole a block of the same size left behind, whose pages are warm, and keeps the untouched tail
    for last.
    """

    def __init__(self, size: int, grain: int) -> None:
        self.size = size
        self.grain = grain
        self._by_size: list[tuple[int, int]] = []  # (nbytes, start)
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._add(0, size)

    def rounded(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self.grain)) * self.grain

    def take(self, nbytes: int) -> int | None:
        """Start of a range of `rounded(nbytes)`, or None when no hole is large enough."""
        nbytes = self.rounded(nbytes)
        place = bisect_left(self._by_size, (nbytes, 0))
        if place == len(self._by_size):
            return None
        held, start = self._by_size.pop(place)
        del self._by_start[start], self._by_end[start + held]
        if held > nbytes:
            self._add(start + nbytes, held - nbytes)
        return start

    def claim(self, start: int, nbytes: int) -> None:
        """Take the range that begins at `start`. Raises `KeyError` when it is not free."""
        nbytes = self.rounded(nbytes)
        found = self.take(nbytes)
        if found == start:
            return
        if found is not None:
            self.give(found, nbytes)
        before, held = next(
            ((at, held) for at, held in self._by_start.items() if at <= start and start + nbytes <= at + held), (0, 0)
        )
        if not held:
            raise KeyError(start)
        self._remove(before, held)
        if before < start:
            self._add(before, start - before)
        if start + nbytes < before + held:
            self._add(start + nbytes, before + held - start - nbytes)

    def give(self, start: int, nbytes: int) -> None:
        """Return a range taken with the same `nbytes`."""
        nbytes = self.rounded(nbytes)
        end = start + nbytes
        before = self._by_end.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._by_start.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        self._add(start, end - start)

    @property
    def end(self) -> int:
        """Where the last range in use ends."""
        return self._by_end.get(self.size, self.size)

    def free(self) -> list[tuple[int, int]]:
        """(start, nbytes) of the free ranges, largest first."""
        return [(start, nbytes) for nbytes, start in reversed(self._by_size)]

    def _add(self, start: int, nbytes: int) -> None:
        insort(self._by_size, (nbytes, start))
        self._by_start[start] = nbytes
        self._by_end[start + nbytes] = start

    def _remove(self, start: int, nbytes: int) -> None:
        del self._by_size[bisect_left(self._by_size, (nbytes, start))]
        del self._by_start[start], self._by_end[start + nbytes]
