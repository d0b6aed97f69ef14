"""Locks on names, for callers who agree to ask for them: no other request looks at them.

A lock is on several keys of a partition, which need not exist. Who asks gets all of them together, in order of arrival
(`claims`). It belongs to a session and ends with it, by `Unlock`, or when it was not renewed for as long as its lease
says. Its number grows with every lock that is granted, also over lives of the service: a holder whose lock ended can be
told from the next one by it. A service begins with the clock's microseconds, and with a journal above what earlier ones
have written down: the clock may have been put back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, TypeAlias

from transfer_queue.claims import Claims
from transfer_queue.controller import facts as f
from transfer_queue.controller.deadlines import Deadlines
from transfer_queue.controller.leases import MAX_LEASE_S
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.unreceived import LockGrant, Unreceived
from transfer_queue.errors import DeadlineExceeded, InvalidInput, LockLostError
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire import messages as m

Name: TypeAlias = tuple[str, str]  # partition, key
REQUESTS = (m.Lock, m.KeepLock, m.Unlock, m.ListLocks)
LISTED = 8
AHEAD = 1 << 20  # as many numbers are written down at a time


class LockNumbers:
    """Each is above all before. Those up to `used` may have been given out, also in earlier lives."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.last = self.used = 0
        self._ledger = ledger

    def next(self) -> int:
        """A number, which nobody is told before it is written down as one that may have been given out."""
        self.last += 1
        if self.last > self.used:
            self.used = self.last + AHEAD
            if self._ledger is not None:
                self._ledger.note(f.LocksNumbered(self.used))
        return self.last

    def go_on_above(self, used: int) -> None:
        """An earlier life, or the one of a saved state, may have given out those up to `used`."""
        self.used = max(self.used, used)
        self.last = max(self.last, used)


class Claim:
    """One request for keys; `number` and `deadline` once it has them. It is also what `Claims` knows it by."""

    __slots__ = ("deadline", "number", "parked", "since")

    def __init__(self, parked: Waiter[m.Lock]) -> None:
        self.parked = parked
        self.number = 0
        self.since = 0.0
        self.deadline = math.inf


class Locks:
    """All locks of a service. Answers to parked requests go to `outbox`."""

    def __init__(self, outbox: list[tuple[Hashable, m.Reply]], unreceived: Unreceived, numbers: LockNumbers) -> None:
        self.parked: WaitQueue[m.Lock] = WaitQueue()
        self._outbox = outbox
        self._unreceived = unreceived
        self._numbers = numbers
        self._claims: Claims[Name, Claim] = Claims()
        self._held: dict[int, Claim] = {}
        self._waiting: dict[Hashable, Claim] = {}  # by ticket
        self._turn: list[Claim] = []  # of those, the ones that have their keys and are about to be told
        self._of_session: dict[bytes, dict[int, None]] = {}
        self.deadlines = Deadlines(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def handle(self, message: m.Request, ticket: Hashable, session: bytes, now: float) -> m.Reply | None:
        """The answer, or None after parking. Raises `LockLostError` for a lock of another session, or that ended."""
        self._end_leases(now)
        self._grant_due(now)
        match message:
            case m.Lock():
                return self._lock(Waiter(ticket, session, message, now + message.timeout_s, now), now)
            case m.KeepLock(lock=number, lease_s=lease_s):
                _check(lease_s)
                claim = self._live(number, session, now)
                claim.deadline = max(claim.deadline, now + lease_s)
            case m.Unlock(lock=number):
                self._live(number, session, now)
                self.release(number)
                self._grant_due(now)
            case m.ListLocks(partition=partition):
                return m.Report(message.rid, self._listing(partition, now))
        return m.Done(message.rid)

    def _lock(self, parked: Waiter[m.Lock], now: float) -> m.Reply | None:
        message = parked.message
        _check(message.lease_s)
        if not message.keys or len(set(message.keys)) != len(message.keys):
            raise InvalidInput("a lock is on one key or more, each named once")
        claim = Claim(parked)
        if self._claims.add(claim, [(message.partition, key) for key in message.keys]):
            return self._grant(claim, now)
        if message.timeout_s <= 0:
            text = self._late(claim)
            self._leave(claim)
            raise DeadlineExceeded(text)
        self.parked.add(parked)
        self._waiting[parked.ticket] = claim
        return None

    def _grant(self, claim: Claim, now: float) -> m.Reply:
        message, session = claim.parked.message, claim.parked.session
        claim.number, claim.since, claim.deadline = self._numbers.next(), now, now + message.lease_s
        self._held[claim.number] = claim
        self._of_session.setdefault(session, {})[claim.number] = None
        self.deadlines.add(claim.number)
        self._unreceived.add(session, message.rid, LockGrant(claim.number))
        return m.Locked(message.rid, claim.number)

    def _grant_due(self, now: float) -> None:
        """Answer those whose turn has come."""
        turn, self._turn = self._turn, []
        for claim in turn:
            del self._waiting[claim.parked.ticket]
            self.parked.remove(claim.parked)
            self._outbox.append((claim.parked.ticket, self._grant(claim, now)))

    def _live(self, number: int, session: bytes, now: float) -> Claim:
        claim = self._held.get(number)
        if claim is None or claim.parked.session != session or claim.deadline <= now:
            raise LockLostError(f"lock {number} has ended: others may have its keys")
        return claim

    def release(self, number: int) -> None:
        """End a lock, if it is still held."""
        claim = self._held.pop(number, None)
        if claim is None:
            return
        mine = self._of_session[claim.parked.session]
        del mine[number]
        if not mine:
            del self._of_session[claim.parked.session]
        self._leave(claim)

    def _leave(self, claim: Claim) -> None:
        """Whose turn it is now is answered by the next event that knows the time; `next_deadline` is in the past."""
        self._turn = [one for one in self._turn if one is not claim] + self._claims.leave(claim)

    # time and trouble

    def next_deadline(self) -> float | None:
        """In the past where it is somebody's turn; `deadlines` and `parked` have their own."""
        return 0.0 if self._turn else None

    def expire(self, now: float) -> None:
        """End the locks whose lease is over, answer those who waited long enough, tell others what they wait for."""
        self._end_leases(now)
        self._grant_due(now)
        for parked, waited_s in self.parked.due(now):
            text = f"kv_global_lock waits for {waited_s:g} s: {self._holders_of(self._waiting[parked.ticket])}"
            self._outbox.append((parked.ticket, m.Waiting(parked.message.rid, text)))
        for parked in self.parked.expired(now):
            claim = self._waiting.pop(parked.ticket)
            failed = m.Failed(parked.message.rid, DeadlineExceeded.code, self._late(claim))
            self._outbox.append((parked.ticket, failed))
            self._leave(claim)
        self._grant_due(now)

    def _end_leases(self, now: float) -> None:
        while (first := self.deadlines.first()) is not None and first[0] <= now:
            self.release(first[1])

    def forget(self, tickets: set[Hashable]) -> None:
        """The askers are gone: they do not wait any more."""
        for parked in self.parked.forget(tickets):
            self._leave(self._waiting.pop(parked.ticket))

    def end_session(self, session: bytes) -> None:
        """What this session has is free."""
        for number in list(self._of_session.get(session, ())):
            self.release(number)

    # for people

    def _listing(self, partition: str | None, now: float) -> dict[str, Any]:
        holders = [
            {
                "partition_id": name,
                "key": key,
                "holder": claim.parked.message.holder,
                "held_s": now - claim.since,
                "lease_remaining_s": max(0.0, claim.deadline - now),
            }
            for claim in self._held.values()
            for name, key in self._claims.names(claim)
            if partition is None or name == partition
        ]
        waiters = [one for one in self._waiting.values() if partition in (None, one.parked.message.partition)]
        return {"holders": holders, "waiters": len(waiters)}

    def reason(self, parked: Waiter[m.Lock]) -> str:
        """Why a request that waits has to."""
        return self._holders_of(self._waiting[parked.ticket])

    def _holders_of(self, claim: Claim) -> str:
        """Why the request has to wait."""
        message = claim.parked.message
        found: list[str] = []
        for key in message.keys:
            holder = self._claims.holder((message.partition, key))
            if holder is not None and len(found) < LISTED:
                found.append(f"{key!r} is held by {holder.parked.message.holder}")
        others = ", ".join(found) or "others came first"
        return f"keys {message.keys[:LISTED]} of partition {message.partition!r}: {others}"

    def _late(self, claim: Claim) -> str:
        return f"no lock within {claim.parked.message.timeout_s:g} s on {self._holders_of(claim)}"

    def check_invariants(self) -> None:
        """Claims, numbers, sessions and those who wait agree; tests call this after each event."""
        self._claims.check_invariants()
        assert len(self._claims) == len(self._held) + len(self._waiting)
        assert len(self.parked) == len(self._waiting)
        for number, claim in self._held.items():
            assert number == claim.number <= self._numbers.last <= self._numbers.used
            assert self._claims.has(claim)
            assert number in self._of_session[claim.parked.session]
        assert sum(map(len, self._of_session.values())) == len(self._held)
        assert all(self._of_session.values())
        for ticket, claim in self._waiting.items():
            assert self.parked.holds(claim.parked)
            assert claim.parked.ticket == ticket
            assert self._claims.has(claim) == (claim in self._turn)


def _check(lease_s: float) -> None:
    """`InvalidInput` unless it is a number of seconds above 0."""
    if not 0 < lease_s < MAX_LEASE_S:
        raise InvalidInput(f"lease_s {lease_s}: expected seconds, above 0")
