"""The thread that looks after one replica."""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

from transfer_queue.errors import NotSupported, TransferQueueError, VersionGone
from transfer_queue.weights.fleet.replica import Decided, Replica, Serving
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.reports import forget_caches
from transfer_queue.weights.transport.trainer import TrainerEngine

log = logging.getLogger("transfer_queue.weights")
MAX_REST_S = 30.0
PROBE_TIMEOUT_S = 5.0  # for the answer to a heartbeat


class Overseer(Protocol):
    """What a monitor asks of the fleet, and tells it."""

    heartbeat_s: float
    call_timeout_s: float
    catch_up_timeout_s: float
    fence_mode: Mode | None
    publisher: TrainerEngine | None
    interval_s: float

    def newest(self) -> Decided | None: ...
    def fence(self, one: Replica, reason: str) -> None: ...
    def admit(self, one: Replica, serving: Serving) -> bool: ...
    def wait_for_work(self, one: Replica, timeout_s: float, seen: Decided | None, was_ready: bool | None) -> None: ...
    def wait_for_round(self, one: Replica) -> None: ...


class ReplicaMonitor:
    """Asks a ready replica how it is, every heartbeat; brings a fenced one to the newest version, and tries again."""

    def __init__(self, fleet: Overseer, replica: Replica) -> None:
        self._fleet = fleet
        self._replica = replica
        self._lacking = ""  # why what it lacks could not be had
        self._thread = threading.Thread(target=self._run, name=f"tq-fleet-{replica.name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """The replica has left: wait for the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        fleet, one = self._fleet, self._replica
        rest_s = fleet.heartbeat_s
        seen: Decided | None = None
        while not one.left:
            if one.rests_s:
                fleet.wait_for_round(one)
                continue
            newest = fleet.newest()
            was_waited_for = one.is_waited_for  # that costs it nothing, so it is no reason to wait longer and longer
            infos = [] if one.ready or newest is None or was_waited_for else self._infos()  # waits for a sending
            was_ready: bool | None = None
            if one.busy.acquire(blocking=False):  # otherwise a round has it
                try:
                    was_ready = one.ready
                    well = self._look_after(infos)
                    was_ready |= one.ready  # one that was fenced just now is brought up without a rest
                finally:
                    one.busy.release()
                longer_s = min(2 * rest_s, max(MAX_REST_S, fleet.heartbeat_s))
                rest_s = fleet.heartbeat_s if well or was_waited_for else longer_s
                seen = newest
            fleet.wait_for_work(one, rest_s, seen, was_ready)
        self._let_go()

    def _let_go(self) -> None:
        """It has left, and nobody would end the pause that a fence of ours made."""
        fleet, one = self._fleet, self._replica
        timeout_s = min(PROBE_TIMEOUT_S, fleet.call_timeout_s)
        if not one.busy.acquire(timeout=timeout_s):
            return  # its round does not end: the pause has a lease
        try:
            if one.paused_by_us:
                one.resume(fleet.publisher, Deadline(timeout_s))
        except TransferQueueError as error:
            log.info("replica %s, which has left, is paused until the lease ends: %s", one.name, error)
        finally:
            one.busy.release()

    def _infos(self) -> list[dict[str, Any]]:
        """What brings a replica to the newest version; nothing when that cannot be had."""
        publisher = self._fleet.publisher
        try:
            self._lacking = ""
            return publisher.catch_up_infos(self._fleet.catch_up_timeout_s) if publisher is not None else []
        except TransferQueueError as error:
            self._lacking = f": {error}"
            log.info("replica %s: %s", self._replica.name, error)
            return []

    def _look_after(self, infos: list[dict[str, Any]]) -> bool:
        """Whether all is well with it."""
        fleet, one = self._fleet, self._replica
        newest = fleet.newest()
        try:
            if one.ready:
                fleet.admit(one, one.ask(fleet.publisher, Deadline(min(PROBE_TIMEOUT_S, fleet.call_timeout_s))))
            elif newest is not None:
                self._catch_up(newest, infos)
            elif fleet.publisher is not None and not one.is_met:
                self._meet()
                fleet.fence(one, "no version was sent yet")
        except TransferQueueError as error:
            log.info("replica %s: %s", one.name, error)
            fleet.fence(one, str(error))
            if newest is not None and isinstance(error, VersionGone):  # the trainer has let go of it for newer ones
                self._is_overtaken(newest)
        return one.ready or newest is None

    def _is_overtaken(self, version: Decided) -> bool:
        """Whether a newer version was decided while the replica came to this one; it rests then, until the next one is
        to be expected."""
        fleet = self._fleet
        newest = fleet.newest()
        if newest is None or newest.run_id != version.run_id or newest.version <= version.version:
            return False
        self._replica.rest(fleet.heartbeat_s + 2 * fleet.interval_s)
        return True

    def _meet(self) -> None:
        fleet, one = self._fleet, self._replica
        one.meet(fleet.publisher, Deadline(fleet.call_timeout_s))

    def _catch_up(self, newest: Decided, infos: list[dict[str, Any]]) -> None:
        """Bring it to the newest version, unless there is another one meanwhile."""
        fleet, one = self._fleet, self._replica
        found = one.ask(fleet.publisher, Deadline(fleet.call_timeout_s))
        newest = one.share_of(newest)
        if not found.is_newest(newest):
            self._pause()
            if not infos or (infos[0]["version"], infos[0]["run_id"]) != newest[:2]:
                raise VersionGone(f"version {newest.version} cannot be had now{self._lacking}")
            self._meet()
            self._install(newest, infos)
            found = one.ask(fleet.publisher, Deadline(fleet.call_timeout_s))
            if not found.is_newest(newest):
                fleet.fence(one, f"it serves {found} after version {newest.version} was sent to it")
                return
            if self._is_overtaken(newest):
                fleet.fence(one, f"a newer version was decided while it came to {newest.version}")
                return
        self._resume()
        fleet.admit(one, found)

    def _install(self, newest: Decided, infos: list[dict[str, Any]]) -> None:
        fleet, one = self._fleet, self._replica
        publisher = fleet.publisher
        assert publisher is not None
        deadline = Deadline(fleet.catch_up_timeout_s)
        for info in filter(one.takes, infos):
            publisher.reports.forget(one.name)
            one.call("start_weight_update", deadline=deadline)
            one.call("update_weights", info, deadline=deadline)
            one.hear(publisher, info, deadline)
            one.call("finish_weight_update", *([] if info["label"] else [newest.label]), deadline=deadline)
            one.hear(publisher, info, deadline, installed=True)
        one.brought = Serving.after(newest)
        if one.silent:
            forget_caches(one.member)

    def _pause(self) -> None:
        """Also when it is paused by us: that begins the lease anew."""
        fleet, one = self._fleet, self._replica
        if fleet.fence_mode is None:
            return
        lease_s, deadline = fleet.catch_up_timeout_s + MAX_REST_S, Deadline(fleet.call_timeout_s)
        try:
            one.pause(fleet.publisher, fleet.fence_mode, True, lease_s, deadline)
        except NotSupported:
            log.debug("replica %s cannot be paused: only routers leave it out", one.name)

    def _resume(self) -> None:
        if self._replica.paused_by_us:
            self._replica.resume(self._fleet.publisher, Deadline(self._fleet.call_timeout_s))
