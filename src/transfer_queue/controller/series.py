"""Series of partitions: the next one is opened when few enough of those before are left, so producers run no further
ahead than consumers allow.

A partition belongs to its series until it is cleared, by whoever it is. Its consumers say when they have finished it;
where it was opened so, the last one of them clears it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import msgspec

from transfer_queue.controller.notices import answer_waiting, too_late
from transfer_queue.errors import DeadlineExceeded, InvalidInput, UnknownRows
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire import messages as m

REQUESTS = (m.OpenPartition, m.EnterSeries, m.FinishPartition, m.DescribeSeries)
MAX_OPEN = 1 << 20
NAME = "open_partition"
LISTED = 8


class SeriesMember(msgspec.Struct):
    """A partition of a series that is not cleared. `left`: the consumers that have not finished it."""

    series: str
    consumers: list[str]
    left: list[str]
    clears: bool


class SeriesBook:
    """All series of a service. Answers to parked requests go to `outbox`. `open` creates a partition where there is
    none, and `clear` clears one. `rules` carry out what lasts."""

    def __init__(self, outbox: list[tuple[Hashable, m.Reply]], tables: Mapping[str, object]) -> None:
        self.members: dict[str, SeriesMember] = {}
        self.parked: WaitQueue[m.OpenPartition] = WaitQueue()
        self.open: Callable[[str], object]
        self.clear: Callable[[m.Clear], m.Reply]
        self._outbox = outbox
        self._tables = tables
        self.rules: dict[type, Callable[[Any], m.Reply]] = {m.EnterSeries: self._enter, m.FinishPartition: self._finish}

    def handle(self, message: Any, ticket: Hashable, session: bytes, now: float) -> m.Reply | None:
        """The answer, or None after parking."""
        if isinstance(message, m.EnterSeries):
            raise InvalidInput("EnterSeries is what the service makes of OpenPartition")
        if type(message) in self.rules:
            return self.rules[type(message)](message)
        if isinstance(message, m.DescribeSeries):
            return m.Report(message.rid, self._description(message.series))
        _check(message)
        waits = any(one.message.series == message.series for one in self.parked)
        if self._is_member(message) or (not waits and self._fits(message)):
            return self._admit(message)
        if message.timeout_s <= 0:
            raise DeadlineExceeded(too_late(message, NAME, self.reason))
        self.parked.add(Waiter(ticket, session, message, now + message.timeout_s, now))
        return None

    def _is_member(self, message: m.OpenPartition) -> bool:
        """Whether it was opened before, in the same way; `InvalidInput` when it was opened in another."""
        known = self.members.get(message.partition)
        if known is None:
            return False
        if (known.series, known.consumers, known.clears) != (message.series, message.consumers, message.clears):
            raise InvalidInput(
                f"partition {message.partition!r} is open in series {known.series!r} for {known.consumers}"
            )
        return True

    def _fits(self, message: m.OpenPartition) -> bool:
        return sum(one.series == message.series for one in self.members.values()) <= message.max_open

    def _admit(self, message: m.OpenPartition) -> m.Reply:
        entering = m.EnterSeries(0, message.partition, message.series, message.consumers, message.clears)
        self.rules[m.EnterSeries](entering)
        self._answer_opened()
        return m.Done(message.rid)

    def _answer_opened(self) -> None:
        """Nobody waits to open what is open: whoever asked for it, too, hears so, and others get their turn."""
        gone = [parked for parked in self.parked if parked.message.partition in self.members]
        for parked in gone:
            self.parked.remove(parked)
            self._outbox.append((parked.ticket, self._opened_before(parked.message)))
        for series in dict.fromkeys(parked.message.series for parked in gone):
            self._serve(series)

    def _opened_before(self, message: m.OpenPartition) -> m.Reply:
        try:
            self._is_member(message)
        except InvalidInput as error:
            return m.Failed(message.rid, error.code, str(error))
        return m.Done(message.rid)

    def _enter(self, message: m.EnterSeries) -> m.Reply:
        if message.partition not in self.members:
            if message.partition not in self._tables:
                self.open(message.partition)
            consumers = list(message.consumers)
            self.members[message.partition] = SeriesMember(message.series, consumers, list(consumers), message.clears)
        return m.Done(message.rid)

    def _finish(self, message: m.FinishPartition) -> m.Reply:
        member = self.members.get(message.partition)
        if member is None:
            raise UnknownRows(f"partition {message.partition!r} is in no series: it was cleared, or not opened in one")
        if message.consumer not in member.consumers:
            raise InvalidInput(f"partition {message.partition!r} has consumers {member.consumers}")
        if message.consumer in member.left:
            member.left.remove(message.consumer)
            if not member.left and member.clears:
                self.clear(m.Clear(0, message.partition, None, None))
        return m.Done(message.rid)

    def closed(self, partition: str) -> None:
        """A partition was cleared: the next one of its series may be opened."""
        member = self.members.pop(partition, None)
        if member is not None:
            self._serve(member.series)

    def _serve(self, series: str) -> None:
        for parked in self.parked:
            if parked.message.series == series and self.parked.holds(parked):
                if not self._fits(parked.message):
                    return
                self.parked.remove(parked)
                self._outbox.append((parked.ticket, self._admit(parked.message)))

    def restore(self, members: dict[str, SeriesMember]) -> None:
        """Go on from a saved state; requests that wait are judged by it."""
        self.members = members
        self._answer_opened()
        for series in dict.fromkeys(one.message.series for one in self.parked):
            self._serve(series)

    def expire(self, now: float) -> None:
        """Answer those who waited long enough, tell others what they wait for."""
        for parked in answer_waiting(self.parked, self._outbox, now, NAME, self.reason):
            self._serve(parked.message.series)

    def forget(self, tickets: set[Hashable]) -> None:
        """The askers are gone: they do not wait any more."""
        for parked in self.parked.forget(tickets):
            self._serve(parked.message.series)

    def reason(self, message: m.OpenPartition) -> str:
        """What a request waits for."""
        open_ones = {name: one.left for name, one in self.members.items() if one.series == message.series}
        first = list(open_ones.items())[:LISTED]
        listed = ", ".join(f"{name!r} (for {', '.join(left) or 'whoever clears it'})" for name, left in first)
        return (
            f"series {message.series!r} has {len(open_ones)} partitions that are not cleared, {message.partition!r} is "
            f"opened at {message.max_open} at most: {listed}"
        )

    def statistics(self) -> dict[str, dict[str, int]]:
        """How many partitions of every series are not cleared, and how many producers wait to open one."""
        found: dict[str, dict[str, int]] = {}
        for name, kind in [(one.series, "open") for one in self.members.values()] + [
            (one.message.series, "waiting") for one in self.parked
        ]:
            found.setdefault(name, {"open": 0, "waiting": 0})[kind] += 1
        return found

    def _description(self, series: str) -> dict[str, Any]:
        return {
            "open": {
                name: {"consumers": one.consumers, "left": one.left, "clears": one.clears}
                for name, one in self.members.items()
                if one.series == series
            },
            "waiting": [one.message.partition for one in self.parked if one.message.series == series],
        }

    def descriptions(self) -> dict[str, dict[str, Any]]:
        """Every series, as `series_status` says it."""
        return {series: self._description(series) for series in self.statistics()}

    def check_invariants(self) -> None:
        """Every member is there; tests call this after each event."""
        assert self.members.keys() <= self._tables.keys()
        assert all(set(one.left) <= set(one.consumers) for one in self.members.values())


def _check(message: m.OpenPartition) -> None:
    """`InvalidInput` for what means nothing."""
    if not message.partition or not message.series or not 0 <= message.max_open < MAX_OPEN:
        raise InvalidInput(
            f"partition {message.partition!r} of series {message.series!r}, at most {message.max_open} open"
        )
    if len(set(message.consumers)) != len(message.consumers) or not all(message.consumers):
        raise InvalidInput(f"consumers {message.consumers}: each is named once")
    if message.clears and not message.consumers:
        raise InvalidInput("a partition that clears itself has a consumer at least")
