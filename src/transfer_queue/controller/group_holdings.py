"""What one session has of pools of groups: it returns with the session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transfer_queue.groups import PoolCore

MANY = 32


class GroupLease:
    """Groups that one session has."""

    __slots__ = ("deadline", "names", "number", "partition", "session")

    def __init__(self, number: int, partition: str, names: list[str], session: bytes, deadline: float) -> None:
        self.number = number
        self.partition = partition
        self.names = names
        self.session = session
        self.deadline = deadline


class AttemptTerm:
    """Attempts that have to be over by a deadline."""

    __slots__ = ("attempts", "deadline", "partition")

    def __init__(self, partition: str, attempts: list[tuple[str, int, int]], deadline: float) -> None:
        self.partition = partition
        self.attempts = attempts
        self.deadline = deadline


class SessionHoldings:
    """What a session has of the pools, by partition, but leases."""

    def __init__(self) -> None:
        self.tickets: dict[str, set[int]] = {}
        self.attempts: dict[str, set[tuple[str, int, int]]] = {}
        self.refills: dict[str, int] = {}
        self._worth_a_look = MANY  # attempts, from which on those that are over are taken out

    def begin(self, partition: str, pool: PoolCore, attempts: Iterable[tuple[str, int, int]]) -> None:
        """It makes these attempts. Of those before, which may be over, there are never many more than are under way."""
        mine = self.attempts.setdefault(partition, set())
        if len(mine) > self._worth_a_look:
            mine.intersection_update([one for one in mine if pool.is_running(*one)])
            self._worth_a_look = max(MANY, 2 * len(mine))
        mine.update(attempts)

    def num_running(self, partition: str, pool: PoolCore) -> int:
        """How many attempts it makes now. Nothing is forgotten by the look: a standby does not hear of looks."""
        return sum(pool.is_running(*one) for one in self.attempts.get(partition, ()))

    def take(self, partition: str, pool: PoolCore, tickets: Iterable[int]) -> None:
        """It has these tickets. Those before that were used are forgotten."""
        mine = self.tickets.setdefault(partition, set())
        mine &= pool.state.reserved
        mine.update(tickets)

    def drop(self, partition: str) -> None:
        """The pool of this partition is gone."""
        for mine in (self.tickets, self.attempts, self.refills):
            mine.pop(partition, None)


def workers(holdings: Mapping[bytes, SessionHoldings], partition: str, pool: PoolCore) -> list[dict[str, Any]]:
    """The sessions (in hexadecimal, as a status may be written as JSON) that work on siblings, and on how many each."""
    counts = ((session, held.num_running(partition, pool)) for session, held in holdings.items())
    return [{"session": session.hex(), "attempts": count} for session, count in counts if count]


def pay_refill(partition: str, holdings: Iterable[SessionHoldings]) -> None:
    """A refill was opened: it is one of those that the first of these has that has some."""
    for held in holdings:
        if held.refills.get(partition, 0):
            held.refills[partition] -= 1
            return
