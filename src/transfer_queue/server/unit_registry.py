"""The storage units of other hosts, as the controller's server knows them.

A unit joins over a connection of its own and learns there which of its blocks are not needed any more. When the
connection is lost the unit is *away*: its rows stay, reading them fails at once. A unit that has a standby counts as
there for `RETURN_S` more: who wants to read waits at its door. It may come back with all it had for `AWAY_S`; after
that, or when another incarnation appears at its address, its rows are lost, and said to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from transfer_queue.errors import InvalidInput, ServiceUnavailable
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

AWAY_S = 60.0
RETURN_S = 3.0
MAX_REFUSED = 1 << 16


class UnitConnection(Protocol):
    """The connection to a unit."""

    def push(self, message: m.Message) -> None: ...


class UnitInfo:
    def __init__(self, number: int, incarnation: bytes, address: str, line: UnitConnection) -> None:
        self.number = number
        self.incarnation = incarnation
        self.address = address
        self.line: UnitConnection | None = line
        self.lost_at = 0.0  # when its rows are given up, while it is away
        self.returns = False  # it has a standby
        self.is_expected = False  # it is away, and will be there in a moment

    def leave(self, now: float, returns: bool) -> None:
        self.line, self.lost_at, self.is_expected = None, now + AWAY_S, returns

    def is_due(self, now: float) -> bool:
        deadline = self.deadline
        return deadline is not None and deadline <= now

    @property
    def deadline(self) -> float | None:
        """When it is not expected any more, or given up."""
        if self.line is not None:
            return None
        return self.lost_at - (AWAY_S - RETURN_S) * self.is_expected


class UnitRegistry:
    """`lose(unit)` is called when the rows of a unit are given up; `known()` lists the blocks that rows refer to."""

    def __init__(self) -> None:
        self.lose: Callable[[int], None] = lambda unit: None
        self.known: Callable[[], Iterable[int]] = tuple
        self._members: dict[int, UnitInfo] = {}
        self._last = 0
        self._refused: dict[int, None] = {}  # blocks whose unit was told that they are not needed

    # coming and going

    def join(self, message: m.Join, address: str, line: UnitConnection) -> m.Joined:
        """Take a unit in, or back; the reply says which of its blocks are not needed."""
        member = next((one for one in self._members.values() if one.incarnation == message.incarnation), None)
        if member is None:
            self._replace(address)
            self._last += 1
            member = self._members[self._last] = UnitInfo(self._last, message.incarnation, address, line)
        member.line, member.address, member.returns = line, address, message.returns
        has = numbers_of(message.blocks).tolist()
        needed = {block for block in self.known() if unit_of(block) == member.number}
        return m.Joined(message.rid, member.number, numbers([block for block in has if block not in needed]))

    def _replace(self, address: str) -> None:
        """Give up the unit that was at `address`: the one there now holds none of its blocks."""
        for member in [one for one in self._members.values() if one.address == address]:
            self._give_up(member)

    def left(self, line: UnitConnection, now: float, ended: bool) -> None:
        """A connection is lost; its unit, if it was one's, is away. `ended`: its host says so, and lives."""
        for member in self._members.values():
            if member.line is line:
                member.leave(now, ended and member.returns)

    def all_left(self, now: float) -> None:
        """Every connection is lost, with the process that had them."""
        for member in self._members.values():
            member.leave(now, True)

    def is_current(self, line: UnitConnection) -> bool:
        """Whether a unit speaks over this connection: what it said over an earlier one counts no more."""
        return any(member.line is line for member in self._members.values())

    def remove(self, unit: int) -> None:
        """A unit was given up, if it is not forgotten yet."""
        self._members.pop(unit, None)

    def next_deadline(self) -> float | None:
        deadlines = (one.deadline for one in self._members.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def expire(self, now: float) -> None:
        for member in [one for one in self._members.values() if one.is_due(now)]:
            member.is_expected = False
            if member.is_due(now):
                self._give_up(member)

    def _give_up(self, member: UnitInfo) -> None:
        del self._members[member.number]
        self.lose(member.number)

    # blocks

    def has(self, block: int) -> bool:
        """Whether the block of a commit lies on one of these units; `InvalidInput` when it must not be committed."""
        if unit_of(block) == 0:
            return False
        if block in self._refused:
            raise InvalidInput(f"block {block} was given up")
        return unit_of(block) in self._members

    def resolve(self, message: m.ResolveCommits) -> m.Blocks:
        """Which blocks no row refers to; they are refused from now on."""
        known = set(self.known())
        gone = [block for block in numbers_of(message.blocks).tolist() if block not in known]
        self._refused.update(dict.fromkeys(gone))
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        return m.Blocks(message.rid, numbers(gone))

    def drop(self, blocks: Iterable[int]) -> set[int]:
        """Tell the units which of their blocks are not needed any more; returns the blocks that are theirs."""
        theirs: dict[int, list[int]] = {}
        for block in blocks:
            if unit_of(block) in self._members:
                theirs.setdefault(unit_of(block), []).append(block)
        for unit, gone in theirs.items():
            self.push(unit, m.Drop(numbers(gone)))
        return {block for gone in theirs.values() for block in gone}

    def push(self, unit: int, message: m.Message) -> None:
        """Send to a unit. One that is away learns what it missed when it joins again."""
        line = self._members[unit].line
        if line is not None:
            line.push(message)

    def addresses(self, blocks: Iterable[int], known: dict[int, str]) -> dict[int, str]:
        """Where the units of `blocks` are, as far as they are members. Raises `ServiceUnavailable` for one away."""
        found = {**known}
        for unit in {unit_of(block) for block in blocks} & self._members.keys():
            member = self._members[unit]
            if member.line is None and not member.is_expected:
                raise ServiceUnavailable(
                    f"storage unit {unit} at {member.address} is away; its rows cannot be read now"
                )
            found[unit] = member.address
        return found

    def statistics(self) -> dict[str, Any]:
        return {str(one.number): {"address": one.address, "away": one.line is None} for one in self._members.values()}


def unit_of(block: int) -> int:
    return block >> m.UNIT_SHIFT if block > 0 else 0


def numbers(blocks: Iterable[int]) -> bytes:
    """Block numbers as they travel."""
    return np.fromiter(blocks, np.int64).tobytes()
