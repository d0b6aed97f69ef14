"""The steps of a trainer on a pool: which groups it used up after each, and going back to one.

A trainer marks a step when what it learned in it is on its disk. From the first mark on, groups that are used up are
noted, and rows that were acknowledged to be cleared stay until the next mark. A trainer that goes back to a step gets
what it was given since once more: the same groups in the same batches.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator

import msgspec

from transfer_queue.errors import InvalidInput
from transfer_queue.groups.group import SiblingGroup
from transfer_queue.groups.policy import GroupPolicy

log = logging.getLogger("transfer_queue.groups")
MAX_STEPS, MAX_ROWS = 1024, 1 << 18  # the oldest steps are forgotten; the last one as well, when it has more rows


class UsedGroup(msgspec.Struct):
    """`group` is None once it cannot be handed out again. `clears`: its rows go with the next mark."""

    group: SiblingGroup | None
    clears: bool


class GroupSteps:
    """`used`: the marked steps, ascending, each with the groups that were used up after it and before the next one, in
    order. It is what is saved; nothing is noted before the first mark."""

    def __init__(self, used: dict[int, list[UsedGroup]]) -> None:
        self._used = used
        self.owners: dict[int, UsedGroup] = {}  # of rows that may be handed out again
        for one in self._all():
            self._own(one)

    def _all(self) -> Iterator[UsedGroup]:
        return itertools.chain(*self._used.values())

    @property
    def marked(self) -> list[int]:
        """The steps that can be gone back to."""
        return list(self._used)

    @property
    def groups(self) -> list[SiblingGroup]:
        """Those that may be handed out again."""
        return [one.group for one in self._all() if one.group is not None]

    def owner(self, row: int) -> str | None:
        """The group that has this row, and may be handed out again."""
        used = self.owners.get(row)
        return None if used is None or used.group is None else used.group.name

    def use_up(self, group: SiblingGroup, clears: bool) -> list[int]:
        """A group is used up. Returns the rows that nobody needs any more."""
        if not self._used:
            return group.rows if clears else []
        group.is_again = group.is_surplus = False
        used = UsedGroup(group, clears)
        self._used[self._last].append(used)
        self._own(used)
        while len(self.owners) > MAX_ROWS and len(self._used) > 1:
            self._forget_first()
        if len(self.owners) <= MAX_ROWS:
            return []
        log.warning("a pool used up more than %d rows since its last mark: its steps are forgotten", MAX_ROWS)
        return self.forget()

    @property
    def _last(self) -> int:
        return next(reversed(self._used))

    def check(self, step: int, policy: GroupPolicy) -> None:
        """`InvalidInput` for a step before the last one, and for groups that are used several times, or at a rate:
        there is no order in which they would come again."""
        if policy.max_times_sampled != 1 or policy.samples_per_insert is not None:
            raise InvalidInput("steps are of a pool whose groups are used once, and at no rate (samples_per_insert)")
        if self._used and step < self._last:
            raise InvalidInput(f"step {step}: the pool is at step {self._last}; `resume` goes back to one")

    def check_marked(self, step: int) -> None:
        """`InvalidInput` for a step that was not marked, or too long ago."""
        if step not in self._used:
            raise InvalidInput(f"step {step} of the pool: it has marks of {self.marked}")

    def mark(self, step: int, policy: GroupPolicy) -> list[int]:
        """What was used up until now is not needed to go back to this step. Returns the rows that nobody needs.
        Raises as `check`."""
        self.check(step, policy)
        gone = [row for one in self._all() if one.clears for row in self._drop(one)]
        since = self._used.pop(step, [])  # marked again: this was used for it, and comes after the step before
        if self._used:
            self._used[self._last] += since
        else:
            for one in since:
                self._drop(one)
        self._used[step] = []
        if len(self._used) > MAX_STEPS:
            self._forget_first()
        return gone

    def go_back(self, step: int) -> list[UsedGroup]:
        """What was used up after a step, in order; it is not any more. Raises as `check_marked`."""
        self.check_marked(step)
        found = list(itertools.chain(*(self._used.pop(number) for number in self.marked if number >= step)))
        self._used[step] = []
        for one in found:
            self._disown(one)
        return found

    def lose(self, rows: Iterable[int]) -> None:
        """These rows are gone: the groups that had them cannot come again."""
        for row in rows if self.owners else ():
            if (used := self.owners.get(row)) is not None:
                self._drop(used)

    def forget(self) -> list[int]:
        """No step is known any more. Returns the rows that nobody needs."""
        gone = [row for one in self._all() if one.clears for row in self._drop(one)]
        self._used.clear()
        self.owners.clear()
        return gone

    def _forget_first(self) -> None:
        for one in self._used.pop(next(iter(self._used))):
            self._drop(one)

    def _own(self, used: UsedGroup) -> None:
        self.owners.update(dict.fromkeys(_rows(used), used))

    def _disown(self, used: UsedGroup) -> None:
        for row in _rows(used):
            self.owners.pop(row, None)

    def _drop(self, used: UsedGroup) -> list[int]:
        rows = _rows(used)
        self._disown(used)
        used.group, used.clears = None, False
        return rows


def _rows(used: UsedGroup) -> list[int]:
    return [] if used.group is None else used.group.rows
