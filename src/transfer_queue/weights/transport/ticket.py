"""A version that was packed and is on its way to the receivers, or waits for that, while its trainer goes on."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import DeadlineExceeded, NotOpen, StaleVersion
from transfer_queue.weights.transport.deadline import Deadline, checked_s, held
from transfer_queue.weights.transport.faults import cut_text
from transfer_queue.weights.transport.pending import PendingVersion, SyncReport
from transfer_queue.weights.version.manifest import Manifest

log = logging.getLogger("transfer_queue.weights")
LEAVE_S = 600.0  # every update has a deadline
SHUT_DOWN = "this trainer was shut down, and sends nothing any more: make another one (`trainer_init`)"
LOOK_S = 0.1  # how often a version that waits for its turn looks whether it gave way: a lock tells nobody of that


class PackedVersion(NamedTuple):
    """What `publish` has packed, and where it is given."""

    draft: PendingVersion
    manifest: Manifest


class PublishTicket:
    """What `publish` returns. The weights may change; the update ends by its deadline, whether anybody asks or not."""

    def __init__(self, version: int, packed: PackedVersion | None = None) -> None:
        self.version = version
        self._packed = packed  # until somebody took it
        self._lock = threading.Lock()
        self._has_given_way = False
        self._calls: list[BackgroundCall[SyncReport]] = []  # one, from before its thread begins

    def take(self) -> PackedVersion | None:
        """What was packed, for who asks first: to bring it to the receivers, or to let go of it."""
        with self._lock:
            found, self._packed = self._packed, None
        return found

    @property
    def waits(self) -> bool:
        """Whether nobody took what was packed yet."""
        return self._packed is not None

    def start(self, function: Callable[[], SyncReport]) -> PublishTicket:
        """Have this go on in a thread of its own, which a program that ends waits for. Where it fails the log says so,
        as nobody may ask this ticket."""
        BackgroundCall("tq-weights-publish", self._run, function, known=self._calls).outlast(LEAVE_S)
        return self

    def _run(self, function: Callable[[], SyncReport]) -> SyncReport:
        try:
            return function()
        except BaseException as error:  # an interrupt too
            if not self._has_given_way:
                log.warning("version %s, which was published, was not taken: %s", self.version, cut_text(repr(error)))
            raise

    def given_way(self) -> StaleVersion:
        """What it is to raise: another one was published before anybody took this one."""
        self._has_given_way = True
        return StaleVersion(f"version {self.version} was superseded before anybody took it")

    @property
    def done(self) -> bool:
        """Whether the update has ended, well or not."""
        return self.wait(0.0)

    def wait(self, timeout_s: float = LEAVE_S) -> bool:
        """Whether it has ended within that time, or never began."""
        left_s = max(0.0, checked_s(timeout_s))
        return all(call.ended(left_s) for call in self._calls)

    def settle(self, deadline: Deadline) -> None:
        """Return once it has ended, well or not; `DeadlineExceeded`."""
        if not self.wait(deadline.left()):
            raise DeadlineExceeded(f"version {self.version} was on its way until the deadline")

    def result(self, timeout_s: float = 3600.0) -> SyncReport:
        """What `send_weights` would have returned, or raised. `DeadlineExceeded` when it is still on its way then."""
        if not self.wait(timeout_s):
            raise DeadlineExceeded(f"version {self.version} is still on its way after {timeout_s:g} s")
        return self._calls[0].outcome()


class UpdateTurns:
    """Whose version is on its way: one at a time, and at most one that was published waits for its turn.

    `in_turn`: a version is not packed before the one before it has ended. Once it is over (`end`) there are no turns
    but of what was published before: `NotOpen`."""

    def __init__(self, in_turn: bool) -> None:
        self.in_turn = in_turn
        self._is_over = False
        self._busy = threading.RLock()
        self._tickets: list[PublishTicket] = []  # that have not ended

    @contextmanager
    def turn(self, deadline: Deadline, ticket: PublishTicket | None = None) -> Iterator[None]:
        """Within, no other version is on its way. `ticket`: of the one that waits; `StaleVersion` once it gave way."""
        left_s, limit_s = deadline.left(), math.inf if ticket is None else LOOK_S
        if ticket is None:
            self._expect_open()
        while ticket is None or ticket.waits:
            with held(self._busy, min(left_s, limit_s)) as is_held:
                if is_held:
                    yield
                    return
            left_s = deadline.left("another version, which was on its way,")
        raise ticket.given_way()

    def prepare(self, deadline: Deadline) -> None:
        """Before a version is packed."""
        self._expect_open()
        if self.in_turn:
            self.settle(deadline)

    def is_on_its_way(self, version: int) -> bool:
        return any(one.version == version and not one.done for one in self._tickets)

    def begin(self, ticket: PublishTicket, function: Callable[[], SyncReport]) -> PublishTicket:
        """By one thread at a time. Where its own thread does not begin it has ended, and still waits."""
        self._tickets = [one for one in self._tickets if not one.done] + [ticket]
        return ticket.start(function)

    def waiting(self) -> list[PackedVersion]:
        """What waits for its turn, which it does not get any more."""
        return [packed for one in self._tickets if (packed := one.take()) is not None]

    def settle(self, deadline: Deadline) -> None:
        """Return once all that was published has ended; `DeadlineExceeded`."""
        for ticket in self._tickets:
            ticket.settle(deadline)

    def end(self) -> None:
        """Wait for what is on its way, whose deadlines end it. Repeatable."""
        self._is_over = True
        for ticket in self._tickets:
            ticket.wait()

    def _expect_open(self) -> None:
        if self._is_over:
            raise NotOpen(SHUT_DOWN)
