"""One version on its way to a fleet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import NotInitialized, ServiceUnavailable, TransferQueueError, UpdateInProgress
from transfer_queue.weights.engines.reports import forget_caches
from transfer_queue.weights.engines.waiting import Deadline
from transfer_queue.weights.fleet.replica import Replica, at_once, each, gathered
from transfer_queue.weights.gate import Mode

if TYPE_CHECKING:
    from transfer_queue.weights.engines.trainer import TrainerEngine

PREPARING = 0.8  # of the time for an update: who is late by then is left behind, so that the others can commit


class Round:
    """The calls of one update to those that take part. Whoever fails once is out of it."""

    def __init__(
        self,
        members: list[Replica],
        publisher: TrainerEngine | None,
        call_timeout_s: float,
        failed: dict[Replica, TransferQueueError],
    ) -> None:
        self.members = members
        self._publisher = publisher
        self.prepared: list[Replica] = []
        self.info: dict[str, Any] | None = None
        self.prepare_s = 0.0
        self._call_timeout_s = call_timeout_s
        self._failed = failed  # those that did not even meet the trainer, so far

    def start(self) -> None:
        """Servers that were started anew, or have an update open that somebody left, are met again first."""
        deadline = Deadline(self._call_timeout_s)
        for one in self.members:
            if self._publisher is not None:
                self._publisher.reports.forget(one.name)
        self._each(self.members, "start_weight_update", deadline=deadline)
        again = []
        for one, error in list(self._failed.items()):
            if isinstance(error, (NotInitialized, UpdateInProgress)):
                try:
                    one.meet(self._publisher, deadline)
                    del self._failed[one]
                    again.append(one)
                except TransferQueueError as worse:
                    self._failed[one] = worse
        self._each(again, "start_weight_update", deadline=deadline)

    def prepare(self, info: dict[str, Any]) -> None:
        """Have all stage and verify the version."""
        begun = time.monotonic()
        self.info = info
        timeout_s = PREPARING * float(info.get("timeout_s") or self._call_timeout_s)
        deadline = Deadline(timeout_s)
        self._each(self._well(self.members), "update_weights", info, deadline=deadline)
        self._hear(self._well(self.members), deadline)
        self.prepared = self._well(self.members)
        self.prepare_s = time.monotonic() - begun

    def commit(self, label: str | None, pause: Mode | None, clear_cache: bool) -> float:
        """Have those that are prepared commit; the seconds for which generation was paused."""
        begun = time.monotonic()
        deadline = Deadline(self._call_timeout_s)
        if pause is not None:
            self._each(self.prepared, "pause_generation", pause, clear_cache, deadline=deadline)
        try:
            told = [] if label is None else [label]
            self._each(self._well(self.prepared), "finish_weight_update", *told, deadline=deadline)
            self._hear(self._well(self.prepared), deadline, installed=True)
            if clear_cache:
                self._forget_caches(deadline)
        finally:
            held = [one for one in self.prepared if pause is not None or one.fenced_by_pause]
            each(held, "resume_generation", deadline=Deadline(self._call_timeout_s))
            for one in held:
                one.fenced_by_pause = False
        return time.monotonic() - begun if pause is not None else 0.0

    def abort(self, deadline: Deadline) -> None:
        """Tell all that it is off. One that cannot be told drops the update by itself when its time is up, and is told
        again before the next one."""
        at_once(self.members, lambda one: one.call_off(deadline), deadline, "giving the update up at")

    def reason(self, one: Replica) -> str:
        return str(self._failed[one]) if one in self._failed else ""

    def error(self, text: str) -> TransferQueueError:
        """What went wrong, of the kind that the first one reported."""
        return gathered(text, self._failed) if self._failed else ServiceUnavailable(text)

    def _well(self, replicas: list[Replica]) -> list[Replica]:
        return [one for one in replicas if one not in self._failed]

    def _each(self, replicas: list[Replica], method: str, *args: Any, deadline: Deadline) -> None:
        for one, error in each(replicas, method, *args, deadline=deadline).items():
            if error is not None:
                self._failed[one] = error

    def _hear(self, replicas: list[Replica], deadline: Deadline, *, installed: bool = False) -> None:
        """Silent workers report what others answer."""
        for one in replicas:
            try:
                one.hear(self._publisher, self.info or {}, deadline, installed=installed)
            except TransferQueueError as error:
                self._failed[one] = error

    def _forget_caches(self, deadline: Deadline) -> None:
        silent = [one for one in self._well(self.prepared) if one.silent]
        at_once(silent, lambda one: forget_caches(one.member), deadline, "forgetting the caches of")
