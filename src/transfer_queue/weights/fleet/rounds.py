"""One version on its way to a fleet."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import (
    NotInitialized,
    ServiceUnavailable,
    StaleBase,
    TransferQueueError,
    UpdateInProgress,
)
from transfer_queue.weights.fleet.replica import Replica, Serving, at_once, gathered
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.transport.clients import FINISH_SHARE, START_S, START_SHARE, UPDATE_SHARE
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.reports import forget_caches

if TYPE_CHECKING:
    from transfer_queue.weights.transport.trainer import TrainerEngine

log = logging.getLogger("transfer_queue.weights")
SLACK_S = 0.5  # beyond the replicas' own deadlines


class RoundPause:
    """How generation is paused around a commit, and from when to when it was, anywhere."""

    def __init__(self, mode: Mode | None, clear_cache: bool, fence: Mode | None) -> None:
        self.mode, self.clear_cache, self.fence = mode, clear_cache, fence
        self._begun = time.monotonic()
        self._ended = self._begun

    def resumed(self) -> None:
        self._ended = max(self._ended, time.monotonic())

    @property
    def seconds(self) -> float:
        return self._ended - self._begun if self.mode is not None else 0.0


class Round:
    """The calls of one update to those that take part, to each in a thread of its own with deadlines of its own.

    Whoever is late or fails once is out of it, and holds up nobody."""

    def __init__(
        self,
        members: list[Replica],
        ready: list[Replica],
        publisher: TrainerEngine | None,
        call_timeout_s: float,
        deadline: Deadline,
        beside: list[Replica],
    ) -> None:
        """`ready`: who was ready as it began; one that could not be asked just then is no member. `beside`: who was
        not, and is taken along: what becomes of it decides nothing."""
        self.members = [*members, *beside]
        self.beside = beside
        self._ready = ready
        self._publisher = publisher
        self.prepared: list[Replica] = []
        self.info: dict[str, Any] | None = None
        self.prepare_s = 0.0
        self._call_timeout_s = call_timeout_s
        self._deadline = deadline
        self._started: set[Replica] = set()  # and not finished since
        self._served: dict[Replica, Serving] = {}  # what such ones say that they serve, once they have committed
        self._failed: dict[Replica, TransferQueueError] = {}
        for one in members:
            if publisher is not None:
                publisher.reports.forget(one.name)

    def prepare(self, info: dict[str, Any]) -> None:
        """Have all start the update, stage and verify the version. May be repeated with further parts of it."""
        begun = time.monotonic()
        self.info = info
        left_s = min(float(info.get("timeout_s") or self._call_timeout_s), self._deadline.left())
        start = Deadline(min(START_SHARE * left_s, START_S, self._call_timeout_s))
        deadline = Deadline(UPDATE_SHARE * left_s)

        def stage(one: Replica) -> None:
            if one not in self._started:
                self._start(one, start)
            one.call("update_weights", info, deadline=deadline)
            one.hear(self._publisher, info, deadline)

        asked = [one for one in self._well(self.members) if one.takes(info)]
        self._each(asked, stage, Deadline(UPDATE_SHARE * left_s + SLACK_S), "preparing")
        self.prepared = self._well(asked)
        self.prepare_s += time.monotonic() - begun

    def _start(self, one: Replica, deadline: Deadline) -> None:
        """A server that was started anew, or has an update open that somebody left, is met again first. One that has
        not ended a call of an update before has the same time for it."""
        one.settle(deadline)
        if not one.is_met or not one.has_what_was_brought(deadline):
            one.meet(self._publisher, deadline)
        try:
            one.call("start_weight_update", deadline=deadline)
        except (NotInitialized, UpdateInProgress):
            one.meet(self._publisher, deadline)
            one.call("start_weight_update", deadline=deadline)
        self._started.add(one)

    def commit(self, label: str | None, pause: RoundPause, after: Serving | None) -> None:
        """Have those that are prepared commit. Each goes on generating when it has committed itself; one that could not
        stays paused until it has caught up, if fences pause. What answers no requests has nothing to pause. `after`:
        what they should serve then; those that may lack more than this round brings are asked (`serving`)."""
        left_s = FINISH_SHARE * self._deadline.left()
        deadline = Deadline(min(self._call_timeout_s, left_s))

        def commit(one: Replica) -> None:
            if pause.mode is not None and one.answers:
                one.pause(self._publisher, pause.mode, pause.clear_cache, left_s + self._call_timeout_s, deadline)
            try:
                one.call("finish_weight_update", *([] if label is None else [label]), deadline=deadline)
                one.hear(self._publisher, self.info or {}, deadline, installed=True)
                self._started.discard(one)
                if pause.clear_cache and one.silent:
                    forget_caches(one.member)
                if after is not None and self._may_lack(one, after):
                    with suppress(TransferQueueError):
                        self._served[one] = one.ask(self._publisher, deadline)
            except TransferQueueError:
                if pause.fence is None and one.paused_by_us:
                    with suppress(TransferQueueError):
                        one.resume(self._publisher, Deadline(SLACK_S))
                raise
            if one.paused_by_us:
                one.resume(self._publisher, deadline)
            pause.resumed()

        self._each(self.prepared, commit, Deadline(min(self._call_timeout_s, left_s) + SLACK_S), "committing at")

    def abort(self, deadline: Deadline) -> None:
        """Tell all that it is off. One that cannot be told drops the update by itself when its time is up, and is told
        again before the next one."""
        at_once(self._started, lambda one: one.call_off(deadline), deadline, "giving the update up at")

    def is_wanted(self, one: Replica) -> bool:
        """Whether all of those that are ready means this one, too."""
        return one not in self.beside and (one in self.members or (one in self._ready and one.ready))

    def _may_lack(self, one: Replica, after: Serving) -> bool:
        """Whether it may have nothing but what this round has brought, and adapters, or the weights that this one is
        added to, came before."""
        has_more = after.adapters or (self.info or {}).get("label")
        return bool(has_more) and (one.was_met or one not in self._ready)

    def serving(self, one: Replica, after: Serving) -> Serving | None:
        """What one that has committed serves; None where that is not known."""
        return self._served.get(one) if self._may_lack(one, after) else after

    def reason(self, one: Replica) -> str:
        return str(self._failed[one]) if one in self._failed else ""

    def lacking_base(self) -> list[Replica]:
        """Who has not the weights that this adapter is for."""
        is_adapter = (self.info or {}).get("label")
        return [one for one, error in self._failed.items() if is_adapter and isinstance(error, StaleBase)]

    def error(self, text: str) -> TransferQueueError:
        """What went wrong, of the kind of the `foremost`."""
        failed = {one: error for one, error in self._failed.items() if one not in self.beside}
        return gathered(text, failed) if failed else ServiceUnavailable(text)

    def end_beside(self) -> None:
        """Tell those that were taken along that it is over."""
        for one in self.beside:
            one.was_taken_along(self._failed.get(one))

    def _well(self, replicas: list[Replica]) -> list[Replica]:
        return [one for one in replicas if one not in self._failed]

    def _each(self, replicas: list[Replica], function: Any, deadline: Deadline, what: str) -> None:
        for one, error in at_once(replicas, function, deadline, what).items():
            log.info("replica %s is left behind: %s", one.name, error)
            self._failed[one] = error
