"""One version on its way to a fleet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import Incomplete, NotInitialized, ServiceUnavailable, TransferQueueError, error_from_code
from transfer_queue.weights.engines.waiting import Deadline
from transfer_queue.weights.fleet.replica import Replica, each, gathered
from transfer_queue.weights.gate import Mode

if TYPE_CHECKING:
    from transfer_queue.weights.fleet.fleet import Publisher

PREPARING = 0.8  # of the time for an update: who is late by then is left behind, so that the others can commit


class Round:
    """The calls of one update to those that take part. Whoever fails once is out of it."""

    def __init__(self, members: list[Replica], call_timeout_s: float) -> None:
        self.members = members
        self.prepared: list[Replica] = []
        self.info: dict[str, Any] | None = None
        self.prepare_s = 0.0
        self._call_timeout_s = call_timeout_s
        self._failed: dict[Replica, TransferQueueError] = {}

    def start(self, publisher: Publisher | None, init_info: dict[str, Any]) -> None:
        """Servers that were started anew are introduced to the trainer first."""
        deadline = Deadline(self._call_timeout_s)
        for one in self.members:
            if publisher is not None:
                publisher.take_outcomes(one.name)  # of an earlier try
        self._each(self.members, "start_weight_update", deadline=deadline)
        forgot = [one for one, error in self._failed.items() if isinstance(error, NotInitialized)]
        for one in forgot:
            try:
                one.meet(init_info, deadline)
                del self._failed[one]
            except TransferQueueError as error:
                self._failed[one] = error
        self._each([one for one in forgot if one.met], "start_weight_update", deadline=deadline)

    def prepare(self, info: dict[str, Any], publisher: Publisher | None) -> None:
        """Have all stage and verify the version."""
        begun = time.monotonic()
        self.info = info
        timeout_s = PREPARING * float(info.get("timeout_s") or self._call_timeout_s)
        self._each(self._well(self.members), "update_weights", info, deadline=Deadline(timeout_s))
        self._judge(self._well(self.members), publisher, Deadline(self._call_timeout_s), first=True)
        self.prepared = self._well(self.members)
        self.prepare_s = time.monotonic() - begun

    def commit(self, label: str | None, pause: Mode | None, clear_cache: bool, publisher: Publisher | None) -> float:
        """Have those that are prepared commit; the seconds for which generation was paused."""
        begun = time.monotonic()
        deadline = Deadline(self._call_timeout_s)
        if pause is not None:
            self._each(self.prepared, "pause_generation", pause, clear_cache, deadline=deadline)
        try:
            told = [] if label is None else [label]
            self._each(self._well(self.prepared), "finish_weight_update", *told, deadline=deadline)
        finally:
            if pause is not None:
                each(self.prepared, "resume_generation", deadline=Deadline(self._call_timeout_s))
        pause_s = time.monotonic() - begun if pause is not None else 0.0
        self._judge(self._well(self.prepared), publisher, deadline, first=False)
        return pause_s

    def abort(self, members: list[Replica], deadline: Deadline) -> None:
        """Tell them that it is off (see `Replica.call_off`). One that cannot be told drops the update by itself when
        its time is up, and is told again before the next one."""
        told = each([one for one in members if one.open], "update_weights", {"abort": True}, deadline=deadline)
        each([one for one, error in told.items() if error is None], "finish_weight_update", deadline=deadline)

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

    def _judge(self, replicas: list[Replica], publisher: Publisher | None, deadline: Deadline, first: bool) -> None:
        for one in replicas:
            try:
                judge(one, publisher, deadline, expects=first)
            except TransferQueueError as error:
                self._failed[one] = error


def judge(one: Replica, publisher: Publisher | None, deadline: Deadline, *, expects: bool) -> None:
    """Raise the fault that a replica reported to the trainer: servers whose calls must not fail tell it only there.

    `expects`: then no news is bad news.
    """
    if publisher is None or not publisher.hears:
        return
    outcomes = publisher.take_outcomes(one.name)
    for outcome in outcomes:
        if outcome.code:
            raise error_from_code(outcome.code, f"rank {outcome.rank}: {outcome.text}")
    if expects and one.labels_only:
        missing = int(one.call("get_world_size", deadline=deadline)) - len({outcome.rank for outcome in outcomes})
        if missing > 0:
            raise Incomplete(f"{missing} of its workers did not report to the trainer")
