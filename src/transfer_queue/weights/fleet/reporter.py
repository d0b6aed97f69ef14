"""Tells a queue how the replicas of a fleet are, so that its overview shows who serves which weights."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from transfer_queue.errors import TransferQueueError
from transfer_queue.weights.fleet.replica import ReplicaStatus

log = logging.getLogger("transfer_queue.weights")


class ReplicaBoard(Protocol):
    """A `TransferQueueClient`."""

    def report_replicas(self, replicas: Sequence[ReplicaStatus]) -> None: ...


class Reported(Protocol):
    """What a reporter asks of the fleet."""

    heartbeat_s: float

    def status(self) -> list[ReplicaStatus]: ...
    def wait_for_change(self, seen: int, timeout_s: float) -> int | None: ...


class ReplicaReporter:
    """A thread of its own: neither an update nor a replica waits for the queue. It reports when something has changed,
    and each heartbeat, so that a service that was started anew hears of it, too."""

    def __init__(self, fleet: Reported, board: ReplicaBoard) -> None:
        self._fleet = fleet
        self._board = board
        self._thread = threading.Thread(target=self._run, name="tq-fleet-report", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """The fleet was closed: wait for the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        seen: int | None = 0
        while seen is not None:
            seen = self._fleet.wait_for_change(seen, self._fleet.heartbeat_s)
            try:
                self._board.report_replicas(self._fleet.status())
            except TransferQueueError as error:
                log.debug("the queue was not told of the replicas: %s", error)
