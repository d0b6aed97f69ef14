"""Sealed groups by priority: the highest first, or drawn in proportion to their weights.

Each change, and each group that is picked, costs the logarithm of how many there are.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

import xxhash

from transfer_queue.errors import InvalidInput
from transfer_queue.groups.policy import MAX_PRIORITY, GroupPolicy

Accepts = Callable[[str], bool]
LEAST_WEIGHT = sys.float_info.min  # of a priority above 0, which is drawn however small it is


class Picked(NamedTuple):
    """A group that was picked. `probability`: with which one draw would have picked it, of all that were there."""

    name: str
    probability: float


class PriorityIndex(Protocol):
    """Names of groups with their priorities. `pick` changes nothing: whoever takes a group removes it."""

    def add(self, name: str, number: int, priority: float) -> None: ...

    def remove(self, name: str) -> None: ...

    def pick(self, most: int, accepts: Accepts, draw: int) -> list[Picked]:
        """Up to `most` groups that are accepted, best first. `draw`: the number of the next random draw."""
        ...


class HighestFirst:
    """Of equal priorities the one that arrived first."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[float, int, str]] = {}
        self._heap: list[tuple[float, int, str]] = []

    def add(self, name: str, number: int, priority: float) -> None:
        self._live[name] = entry = (-priority, number, name)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 16:  # most are of groups that left: so the heap stays small
            self._heap = sorted(self._live.values())

    def remove(self, name: str) -> None:
        self._live.pop(name, None)

    def pick(self, most: int, accepts: Accepts, draw: int) -> list[Picked]:
        """See `PriorityIndex`."""
        kept: list[tuple[float, int, str]] = []
        found: list[Picked] = []
        while self._heap and len(found) < most:
            entry = heapq.heappop(self._heap)
            if self._live.get(entry[2]) != entry or (kept and kept[-1] == entry):
                continue
            kept.append(entry)
            if accepts(entry[2]):
                found.append(Picked(entry[2], 1.0))
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found


class Weighted:
    """Drawn at random, without repeats in one `pick`. `seed` and the number of a draw make it what it is, so a process
    that takes over draws the same."""

    def __init__(self, exponent: float, seed: int) -> None:
        self._exponent = exponent
        self._seed = seed
        self._tree = SumTree()
        self._place: dict[str, int] = {}
        self._names: list[str] = []
        self._free: list[int] = []

    def add(self, name: str, number: int, priority: float) -> None:
        place = self._place.get(name)
        if place is None:
            if not self._free:
                self._free.append(len(self._names))
                self._names.append("")
            place = self._place[name] = self._free.pop()
            self._names[place] = name
        self._tree.set(place, max(LEAST_WEIGHT, priority**self._exponent) if priority else 0.0)

    def remove(self, name: str) -> None:
        place = self._place.pop(name, None)
        if place is not None:
            self._tree.set(place, 0.0)
            self._free.append(place)

    def pick(self, most: int, accepts: Accepts, draw: int) -> list[Picked]:
        """See `PriorityIndex`. What was drawn once has weight 0 until the end."""
        total, found = self._tree.total, list[Picked]()
        weights: dict[int, float] = {}
        while len(found) < most and self._tree.total > 0.0:
            place = self._tree.find(self._tree.total * self._random(draw, len(weights)))
            weights[place] = self._tree.weight(place)
            self._tree.set(place, 0.0)
            if accepts(self._names[place]):
                found.append(Picked(self._names[place], weights[place] / total))
        for place, weight in weights.items():
            self._tree.set(place, weight)
        return found

    def _random(self, draw: int, number: int) -> float:
        """From 0 to just below 1: the upper 53 bits, all that a float holds. `number`: of those of one `pick`, which
        needs more of them than it gives groups where some are not accepted. The next pick has none of them."""
        place = draw.to_bytes(8, "little") + number.to_bytes(8, "little")
        return (xxhash.xxh3_64_intdigest(place, self._seed) >> 11) / (1 << 53)


class SumTree:
    """Weights at places 0, 1, ...; the node over two others has their sum, computed anew with each change, so that
    nothing of earlier weights is left in it."""

    def __init__(self) -> None:
        self._size = 1
        self._nodes = [0.0, 0.0]

    @property
    def total(self) -> float:
        return self._nodes[1]

    def weight(self, place: int) -> float:
        return self._nodes[self._size + place]

    def set(self, place: int, weight: float) -> None:
        while place >= self._size:
            self._grow()
        nodes, node = self._nodes, self._size + place
        nodes[node] = weight
        while node > 1:
            node >>= 1
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]

    def find(self, mass: float) -> int:
        """The place under which `mass`, from 0 to just below the total, falls; never one of weight 0."""
        nodes, node = self._nodes, 1
        while node < self._size:
            node *= 2
            if (mass >= nodes[node] and nodes[node + 1] > 0.0) or nodes[node] == 0.0:
                mass -= nodes[node]
                node += 1
        return node - self._size

    def _grow(self) -> None:
        leaves = self._nodes[self._size :] + [0.0] * self._size
        self._size *= 2
        self._nodes = [0.0] * self._size + leaves
        for node in range(self._size - 1, 0, -1):
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]


def index_of(policy: GroupPolicy) -> PriorityIndex | None:
    """An empty one for this policy; None where it does not go by priority."""
    if policy.order == "weighted":
        return Weighted(policy.priority_exponent, policy.seed)
    return HighestFirst() if policy.order == "priority" else None


def check_priority(name: str, priority: float) -> None:
    """`InvalidInput` for what is no priority."""
    if not 0.0 <= priority <= MAX_PRIORITY:
        raise InvalidInput(f"priority {priority} of group {name!r}: expected a number from 0 to {MAX_PRIORITY:g}")
