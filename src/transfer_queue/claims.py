"""Who has which names, and who waits for them: the rule behind the locks of the service and those of one process.

A claim is for several names. It gets all of them at once, when nobody has one of them and nobody who came earlier waits
for one. So there is no deadlock, nobody is overtaken, and who waits has nothing that others could use.

An interrupt from the keyboard may leave a step half done: `leave` with the same claim completes it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)
C = TypeVar("C", bound=Hashable)


class Claims(Generic[N, C]):
    """Claims of type C for names of type N, in order of arrival. Each step costs the names it touches."""

    def __init__(self) -> None:
        self._names: dict[C, tuple[N, ...]] = {}  # of every claim, in order of arrival
        self._has: dict[N, C] = {}
        self._queues: dict[N, dict[C, None]] = {}  # of those who wait, in order of arrival

    def __len__(self) -> int:
        return len(self._names)

    def add(self, claim: C, names: Iterable[N]) -> bool:
        """Whether `claim`, which is new, has its names at once; else it waits for them."""
        mine = self._names[claim] = tuple(dict.fromkeys(names))
        if not any(name in self._has or name in self._queues for name in mine):
            self._has.update(dict.fromkeys(mine, claim))
            return True
        for name in mine:
            self._queues.setdefault(name, {})[claim] = None
        return False

    def leave(self, claim: C) -> list[C]:
        """`claim` gives up what it has or waits for; returns those that have their names now, in order of arrival. One
        that left before changes nothing."""
        names = self._names.get(claim, ())
        for name in names:
            if self._has.get(name) == claim:
                del self._has[name]
            self._unqueue(name, claim)
        first = dict.fromkeys(next(iter(self._queues[name])) for name in names if name in self._queues)
        found = [one for one in first if self._advance(one)]
        self._names.pop(claim, None)
        return found

    def _advance(self, claim: C) -> bool:
        """Give a claim that waits its names when it is its turn."""
        mine = self._names[claim]
        for name in mine:
            holder = self._has.get(name)
            if holder != claim and (holder is not None or next(iter(self._queues[name])) != claim):
                return False
        for name in mine:
            self._has[name] = claim
            self._unqueue(name, claim)
        return True

    def _unqueue(self, name: N, claim: C) -> None:
        queue = self._queues.get(name)
        if queue is not None:
            queue.pop(claim, None)
            if not queue:
                del self._queues[name]

    def has(self, claim: C) -> bool:
        """Whether this claim has its names."""
        names = self._names.get(claim, ())
        return bool(names) and self._has.get(names[0]) == claim

    def holders(self) -> list[C]:
        """All claims that have their names. Costs them all."""
        return [claim for claim in self._names if self.has(claim)]

    def holder(self, name: N) -> C | None:
        return self._has.get(name)

    def names(self, claim: C) -> tuple[N, ...]:
        return self._names.get(claim, ())

    def check_invariants(self) -> None:
        """Every structure agrees with every other, and nobody waits without a reason; tests call this."""
        assert all(self._queues.values()), "no empty queue is kept"
        order = {claim: place for place, claim in enumerate(self._names)}
        for name, queue in self._queues.items():
            places = [order[claim] for claim in queue]
            assert places == sorted(places), f"{name!r}: in order of arrival"
        for claim, names in self._names.items():
            has = [self._has.get(name) == claim for name in names]
            waits = [claim in self._queues.get(name, {}) for name in names]
            assert all(has) != all(waits), "all names or none of them"
            assert any(has) == all(has)
            assert any(waits) == all(waits)
            if all(waits):
                assert any(name in self._has or next(iter(self._queues[name])) != claim for name in names)
        assert set(self._has.values()) <= self._names.keys()
