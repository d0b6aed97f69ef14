"""The storage units of other hosts, as the controller's server knows them.

A unit joins over a connection of its own and learns there which of its blocks are not needed any more. When the
connection is lost the unit is *away*: its rows stay, nobody is handed them, and reading them fails at once. One that
has a standby is expected for `RETURN_S`: who wants to read waits at its door. It may come back with all it had
for as long as it said when it joined; after that its rows are lost, and said to be. They are at once when another
incarnation joins at its address, unless it has a journal: then that one may still bring them back. Nobody joins at the
address of a unit whose connection is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from transfer_queue.controller.controller import GIVEN_UP
from transfer_queue.errors import InvalidInput, ServiceUnavailable
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

RETURN_S = 3.0
NOTHING_YET = m.ReportUnit(0, {}, 0, [])
MAX_REFUSED = 1 << 16


class UnitConnection(Protocol):
    """The connection to a unit."""

    def push(self, message: m.Message) -> None: ...
    def abort(self) -> None: ...


class UnitInfo:
    """`away_s`: for how long its rows are waited for. `lasts`: it has a journal. `returns`: it has a standby."""

    def __init__(self, number: int, incarnation: bytes) -> None:
        self.number = number
        self.incarnation = incarnation
        self.address = ""
        self.away_s = 0.0
        self.lasts = self.returns = False
        self.line: UnitConnection | None = None
        self.report = NOTHING_YET  # the last one, of when its connection was there
        self.reported_at = 0.0
        self.left_at = 0.0  # since when it is away
        self.is_expected = False  # it is away, and will be there in a moment

    def leave(self, now: float, returns: bool) -> None:
        self.line, self.left_at, self.is_expected = None, now, returns
        self.report = NOTHING_YET

    def is_due(self, now: float) -> bool:
        deadline = self.deadline
        return deadline is not None and deadline <= now

    @property
    def deadline(self) -> float | None:
        """When it is not expected any more, or given up."""
        if self.line is not None:
            return None
        return self.left_at + (RETURN_S if self.is_expected else self.away_s)


class UnitRegistry:
    """`hide(unit)` is called when a unit is away, `show(unit)` when it is there, `lose(unit)` when its rows are given
    up, `joined(member)` when it is new, or another than it was; `known()` lists the blocks that rows refer to."""

    def __init__(self) -> None:
        self.hide: Callable[[int], None] = lambda unit: None
        self.show: Callable[[int], None] = lambda unit: None
        self.lose: Callable[[int], None] = lambda unit: None
        self.joined: Callable[[UnitInfo], None] = lambda member: None
        self.known: Callable[[], Iterable[int]] = tuple
        self._members: dict[int, UnitInfo] = {}
        self._last = 0
        self._refused: dict[int, None] = {}  # blocks whose unit was told that they are not needed
        self.gone: dict[int, list[int]] = {}  # by unit, blocks of which it is to be told so

    # coming and going

    def join(self, message: m.Join, address: str, line: UnitConnection) -> m.Joined:
        """Take a unit in, or back; the reply says which of its blocks are not needed."""
        has = numbers_of(message.blocks).tolist()
        member = next((one for one in self._members.values() if one.incarnation == message.incarnation), None)
        if member is None:
            self._replace(address)
            self._last += 1
            member = self._members[self._last] = UnitInfo(self._last, message.incarnation)
        if member.line is not None and member.line is not line:
            member.line.abort()  # one is of a process that was killed, held up by the network; the other joins again
        before = member.address, member.away_s, member.lasts
        member.line, member.address, member.returns = line, address, message.returns
        member.away_s, member.lasts = message.away_s, message.lasts
        if before != (member.address, member.away_s, member.lasts):
            self.joined(member)
        self.show(member.number)
        needed = self._needed(member.number)
        gone = [block for block in has if block not in needed]
        if message.service:  # what its process before passed on may still be on its way
            self._refuse(gone)
        return m.Joined(message.rid, member.number, numbers(gone))

    def _needed(self, unit: int) -> set[int]:
        """The blocks of this unit that rows refer to."""
        return {block for block in self.known() if unit_of(block) == unit}

    def missing(self, message: m.Join) -> list[int]:
        """The blocks that rows refer to, of a unit that joins with all that its journal has, and that are not in it: it
        is an older copy, or the journal here is, which has rows that were cleared since."""
        member = next((one for one in self._members.values() if one.incarnation == message.incarnation), None)
        if member is None or not message.service:
            return []
        return sorted(self._needed(member.number).difference(numbers_of(message.blocks).tolist()))

    def refuse_second(self, message: m.Join, address: str) -> None:
        """Raises `InvalidInput` where another unit is at `address`: readers of its rows would ask this one. A push to
        one that is gone brings about the end of its connection, where that was not heard of."""
        for member in self._members.values():
            if member.address == address and member.incarnation != message.incarnation and member.line is not None:
                member.line.push(m.Drop(numbers([])))
                text = "each needs a server.host and a server.port by which others reach it, and no other unit"
                raise InvalidInput(f"storage unit {member.number} at {address} is connected: {text}")

    def _replace(self, address: str) -> None:
        """Give up the unit that was at `address`: the one there now holds none of its blocks."""
        for member in [one for one in self._members.values() if one.address == address and not one.lasts]:
            self._give_up(member)

    def expect(self, member: UnitInfo, now: float) -> None:
        """It was a member of the service whose journal this one goes on with."""
        self._members[member.number] = member
        self._last = max(self._last, member.number)
        member.leave(now, True)
        self.hide(member.number)

    def members(self) -> list[UnitInfo]:
        return list(self._members.values())

    @property
    def last(self) -> int:
        """The highest number that a unit ever had."""
        return self._last

    def count_from(self, last: int) -> None:
        """No unit that is new gets this number, or one below it."""
        self._last = max(self._last, last)

    def knows(self, incarnation: bytes) -> bool:
        return any(one.incarnation == incarnation for one in self._members.values())

    def of_line(self, line: UnitConnection) -> int:
        """The unit that speaks over this connection: what it said over an earlier one counts no more. 0: none does."""
        return next((one.number for one in self._members.values() if one.line is line), 0)

    def left(self, line: UnitConnection, now: float, ended: bool) -> None:
        """A connection is lost; its unit, if it was one's, is away. `ended`: its host says so, and lives."""
        for member in self._members.values():
            if member.line is line:
                member.leave(now, ended and member.returns)
                self.hide(member.number)

    def all_left(self, now: float) -> None:
        """Every connection is lost, with the process that had them."""
        for member in self._members.values():
            member.leave(now, True)
            self.hide(member.number)

    def remove(self, unit: int) -> None:
        """A unit was given up, if it is not forgotten yet."""
        self._members.pop(unit, None)

    def next_deadline(self) -> float | None:
        deadlines = (one.deadline for one in self._members.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def postpone(self, by_s: float) -> None:
        for member in self._members.values():
            member.left_at += by_s

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
        """Whether the block of a commit lies on one of these units. Raises `ServiceUnavailable` where the unit was told
        that it is not needed, because the commit had not come."""
        if unit_of(block) == 0:
            return False
        if block in self._refused:
            raise ServiceUnavailable(f"block {block} {GIVEN_UP}")
        return unit_of(block) in self._members

    def resolve(self, message: m.ResolveCommits, unit: int) -> m.Blocks:
        """Which blocks, that this unit has, no row refers to; they are refused from now on."""
        known = self._needed(unit)
        gone = [block for block in numbers_of(message.blocks).tolist() if block not in known]
        self._refuse(gone)
        return m.Blocks(message.rid, numbers(gone))

    def _refuse(self, blocks: Iterable[int]) -> None:
        self._refused.update(dict.fromkeys(blocks))
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def drop(self, blocks: Iterable[int]) -> set[int]:
        """These blocks are not needed any more; returns those that are of units, who are told by `tell_gone`."""
        theirs: dict[int, list[int]] = {}
        for block in blocks:
            if unit_of(block) in self._members:
                theirs.setdefault(unit_of(block), []).append(block)
        for unit, gone in theirs.items():
            self.gone.setdefault(unit, []).extend(gone)
        return {block for gone in theirs.values() for block in gone}

    def tell_gone(self, hold: Callable[[Callable[[], None]], bool]) -> None:
        """Tell the units what they need not keep, once that lasts as long as was promised: `hold` as in
        `JournalLike`."""
        while self.gone:
            unit, gone = self.gone.popitem()
            tell = partial(self.push, unit, m.Drop(numbers(gone)))
            if not hold(tell):
                tell()

    def push(self, unit: int, message: m.Message) -> None:
        """Send to a unit. One that is away learns what it missed when it joins again."""
        line = self._members[unit].line if unit in self._members else None
        if line is not None:
            line.push(message)

    def addresses(self, blocks: Iterable[int], known: dict[int, str]) -> dict[int, str]:
        """Where the units of `blocks` are, as far as they are members. Raises `ServiceUnavailable` for one away."""
        found = {**known}
        for unit in {unit_of(block) for block in blocks} & self._members.keys():
            member = self._members[unit]
            if member.line is None and not member.is_expected:
                text = f"its rows cannot be read now, and are given up {member.away_s:g} s after it left"
                raise ServiceUnavailable(f"storage unit {unit} at {member.address} is away; {text}")
            found[unit] = member.address
        return found

    # what they tell of themselves

    def reported(self, unit: int, report: m.ReportUnit, now: float) -> None:
        member = self._members[unit]
        member.report, member.reported_at = report, now

    @property
    def num_waits(self) -> int:
        """Puts that waited for room in a unit when it told so last."""
        return sum(one.report.num_waits for one in self._members.values())

    def describe_waits(self, overview: m.ServiceOverview, own: Unit, most: int, now: float) -> None:
        """Add who waits for room here and in these units, as far as the list of `most` requests goes."""
        overview.num_waits += own.num_waiting + self.num_waits
        found = own.waits(most, now)
        for one in self._members.values():
            since_s = now - one.reported_at
            found += [
                msgspec.structs.replace(
                    wait, waited_s=None if wait.waited_s is None else wait.waited_s + since_s,
                    left_s=max(0.0, wait.left_s - since_s), lacks=f"unit {one.number} at {one.address}: {wait.lacks}",
                )
                for wait in one.report.waits[:most]
            ]  # fmt: skip
        overview.waits += found[: max(0, most - len(overview.waits))]

    def statistics(self) -> dict[str, Any]:
        return {
            str(one.number): {**one.report.counts, "address": one.address, "away": one.line is None}
            for one in self._members.values()
        }


def unit_of(block: int) -> int:
    return block >> m.UNIT_SHIFT if block > 0 else 0


def numbers(blocks: Iterable[int]) -> bytes:
    """Block numbers as they travel."""
    return np.fromiter(blocks, np.int64).tobytes()
