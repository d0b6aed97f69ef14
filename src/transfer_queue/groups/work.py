"""Open groups that may have idle slots: to claim one costs the groups that have, not all that there are."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from transfer_queue.groups.group import SiblingGroup


class OpenWork:
    """Of `groups`, in order of arrival. One that has ended, or whose slots are all taken, is passed over."""

    def __init__(self, groups: Mapping[str, SiblingGroup]) -> None:
        self._groups = groups
        self._heap: list[tuple[int, str]] = []
        self._listed: set[int] = set()  # the numbers in it
        for group in groups.values():
            self.add(group)

    def add(self, group: SiblingGroup) -> None:
        """It may have idle slots."""
        if group.state == "open" and group.number not in self._listed:
            self._listed.add(group.number)
            heapq.heappush(self._heap, (group.number, group.name))

    def idle(self, count: int) -> list[tuple[str, int]]:
        """Up to `count` idle slots."""
        found: list[tuple[str, int]] = []
        looked: list[tuple[int, str]] = []
        while self._heap and len(found) < count:
            number, name = heapq.heappop(self._heap)
            known = self._groups.get(name)
            slots = known.idle() if known is not None and known.state == "open" else []
            if not slots:
                self._listed.discard(number)
                continue
            looked.append((number, name))
            found += [(name, slot) for slot in slots]
        for one in looked:
            heapq.heappush(self._heap, one)
        return found[:count]

    def has(self, groups: Iterable[SiblingGroup]) -> bool:
        """Whether all of these that have idle slots are known."""
        return {group.number for group in groups if group.state == "open" and group.idle()} <= self._listed
