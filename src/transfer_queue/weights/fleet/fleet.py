"""Versions to all replicas of a trainer, in two phases: every replica stages and verifies, then all commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from transfer_queue.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotOpen,
    StaleVersion,
    TransferQueueError,
    WrongEpoch,
)
from transfer_queue.weights.fleet.monitor import PROBE_TIMEOUT_S, ReplicaMonitor
from transfer_queue.weights.fleet.replica import (
    Decided,
    DecidedAdapter,
    Member,
    Replica,
    ReplicaStatus,
    Serving,
    at_once,
    gathered,
    root_in,
)
from transfer_queue.weights.fleet.reporter import ReplicaBoard, ReplicaReporter
from transfer_queue.weights.fleet.rounds import Round, RoundPause
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.receive.update_session import run_of
from transfer_queue.weights.transport.clients import Follower
from transfer_queue.weights.transport.deadline import Deadline, checked_s
from transfer_queue.weights.transport.trainer import TrainerEngine
from transfer_queue.weights.version.manifest import not_newer

CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
CALL_TIMEOUT_S = 30.0
HEARTBEAT_S = 2.0
# Of the time for an update or an introduction: to wait for replicas that are asked something else; for the meeting.
TAKING, MEETING = 0.2, 0.5
CATCH_UP_TIMEOUT_S = 600.0
ABORT_S = 1.5  # to tell replicas that an update is off: less than the trainer gives


class RoundReport(NamedTuple):
    """`missed`: who was fenced for it, and why. `pause_s`: from the first pause to the last resume of those that
    committed; each resumes when it has committed itself."""

    version: int
    committed: tuple[str, ...]
    missed: dict[str, str]
    prepare_s: float
    commit_s: float
    pause_s: float


class Fleet(Follower):
    """The client of a trainer engine, for any number of replicas, which join and leave at any time. Thread-safe.

    A version is decided when at least `min_ready` of those that are ready have verified it (None: all of them); those
    that did not are fenced, and catch up by themselves. Otherwise it is given up, and all serve the old one. Archives
    do not count beside servers. `pause`: how generation is paused around the commit (None: not). `fence`: how it is
    paused at a replica while it is fenced. Each replica has deadlines of its own, out of those of the update and
    `call_timeout_s`; one that is late is fenced, and holds up nobody. `queue`: a client of the service whose overview
    is to show the replicas.
    """

    def __init__(
        self,
        members: Mapping[str, Member] | None = None,
        *,
        min_ready: int | None = 1,
        pause: Mode | None = None,
        clear_cache: bool = True,
        fence: Mode | None = "keep",
        call_timeout_s: float = CALL_TIMEOUT_S,
        catch_up_timeout_s: float = CATCH_UP_TIMEOUT_S,
        heartbeat_s: float = HEARTBEAT_S,
        queue: ReplicaBoard | None = None,
    ) -> None:
        if min_ready is not None and not (isinstance(min_ready, int) and min_ready >= 1):
            raise InvalidInput(f"at least {min_ready!r} replicas ready")
        for name, mode in (("pause", pause), ("fence", fence)):
            if mode is not None and mode not in get_args(Mode):
                raise InvalidInput(f"{name}={mode!r}: give one of {', '.join(get_args(Mode))}, or None")
        if queue is not None and not callable(getattr(queue, "report_replicas", None)):
            raise InvalidInput(f"queue is a {type(queue).__name__}, which has no report_replicas: give tq.get_client()")
        self.pause, self.clear_cache, self.fence_mode = pause, clear_cache, fence
        self.call_timeout_s, self.catch_up_timeout_s = checked_s(call_timeout_s, 0), checked_s(catch_up_timeout_s, 0)
        self.heartbeat_s = checked_s(heartbeat_s, 0)
        self.publisher: TrainerEngine | None = None
        self.last: RoundReport | None = None
        self._min_ready = min_ready
        self._changed = threading.Condition()
        self._replicas: dict[str, Replica] = {}
        self._monitors: dict[str, ReplicaMonitor] = {}
        self._newest: Decided | None = None
        self._free: dict[str, dict[str, DecidedAdapter]] = {}  # the run's adapters for any weights, as in `Decided`
        self._decided_at: float | None = None
        self.interval_s = 0.0  # between the last two decisions
        self._past: set[str] = set()
        self._turn = threading.Lock()  # the trainer's calls, one at a time
        self._round: Round | None = None
        self._deadline: Deadline | None = None  # of the trainer's update
        self._num_changes, self._is_closed = 0, False
        self._reporter = ReplicaReporter(self, queue) if queue is not None else None
        try:
            for name, member in (members or {}).items():
                self.join(name, member)
        except BaseException:  # threads look after those before it
            self.close()
            raise

    # members

    def join(self, name: str, member: Member, *, wait_s: float | None = None) -> None:
        """Add a replica. It is brought to the newest version at once, if there is one; `wait_s`: until it is ready.

        `DeadlineExceeded` when it is not ready by then: it is a member all the same. `InvalidInput` for what has not a
        client's calls.
        """
        lacking = [call for call in CALLS if not callable(getattr(member, call, None))]
        if lacking:
            raise InvalidInput(f"the replica {name!r} is no client: a {type(member).__name__} has no {lacking[0]}")
        with self._changed:
            if not name or name in self._replicas:
                raise InvalidInput(f"a replica {name!r} is a member already" if name else "a replica needs a name")
            replica = self._replicas[name] = Replica(name, member)
            self._monitors[name] = ReplicaMonitor(self, replica)
            self._note_change()
        if wait_s is not None:
            self.wait_ready([name], wait_s)

    def leave(self, name: str) -> None:
        """Forget a replica, which keeps what it serves, and goes on generating if a fence has paused it. Waits for a
        call to it to end, `call_timeout_s` at most."""
        with self._changed:
            if name not in self._replicas:
                raise InvalidInput(f"no replica {name!r}")
            self._replicas.pop(name).left = True
            monitor = self._monitors.pop(name)
            self._note_change()
        monitor.close(self.call_timeout_s)

    def ready(self) -> list[str]:
        """Who serves the newest version: where requests may go. Not archives, which have no model."""
        with self._changed:
            return [name for name, one in self._replicas.items() if one.ready and one.answers]

    def status(self) -> list[ReplicaStatus]:
        with self._changed:
            return [one.status() for one in self._replicas.values()]

    def newest(self) -> Decided | None:
        """The version that was decided last."""
        with self._changed:
            return self._newest

    def wait_ready(self, names: list[str], timeout_s: float) -> None:
        """Block until these are ready. `DeadlineExceeded` says why they are not."""

        def lacking() -> dict[str, str]:
            known = self._replicas
            return {
                name: known[name].reason if name in known else "no member"
                for name in names
                if name not in known or not known[name].ready
            }

        with self._changed:
            if not self._changed.wait_for(lambda: not lacking(), timeout_s):
                raise DeadlineExceeded(f"not ready within {timeout_s} s: {lacking()}")

    def close(self) -> None:
        """Leave all replicas as they are. Repeatable."""
        for name in list(self._replicas):
            self.leave(name)
        with self._changed:
            self._is_closed = True
            self._note_change()
        if self._reporter is not None:
            self._reporter.close(self.call_timeout_s)

    # the trainer engine's calls

    def follow(self, publisher: TrainerEngine) -> None:
        self.publisher = publisher

    def allow(self, timeout_s: float | None) -> None:
        """The calls of the trainer's update have this long together; None: it is over."""
        self._deadline = None if timeout_s is None else Deadline(timeout_s)

    def lacks_base(self) -> bool:
        """See `Follower`: of those that the next round takes along."""
        with self._changed:
            return any(one.rests_s for one in self._replicas.values())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Introduce the trainer to all. Raises when none of them took it."""
        with self._turn:
            self._end_round()
            given_s = float(init_info.get("timeout_s") or 2 * self.call_timeout_s)
            members = self._take(lambda one: True, TAKING * given_s)
            timeout_s = MEETING * given_s
            try:
                failed = self._meet(members, init_info, Deadline(min(self.call_timeout_s, timeout_s)))
            finally:
                self._release(members)
            if members and len(failed) == len(members):
                raise gathered("nobody met the trainer", failed)

    def start_weight_update(self) -> None:
        """With those that are ready; when none is, with all. They are called with the update itself. Those that
        versions have overtaken while they came to one are taken along, if nobody asks them something else just now."""
        with self._turn:
            self._end_round()
            deadline, self._deadline = self._deadline or Deadline(self.catch_up_timeout_s), None
            limit_s, ready = TAKING * deadline.left(), [one for one in self._counted() if one.ready]
            members = self._take(lambda one: one.ready or not ready, limit_s) or self._take(lambda one: True, limit_s)
            beside = self._take(lambda one: one.rests_s > 0, 0.0) if ready else []
            self._round = Round(members, ready, self.publisher, self.call_timeout_s, deadline, beside)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Phase one. Raises, with nothing decided, when too few have verified the version."""
        with self._turn:
            if update_info.get("abort"):
                self._end_round()
                return
            if self._round is None:
                raise NotOpen("no update was started")
            self._check_follows(update_info)
            self._round.prepare(update_info)
            wanted, counted = self._min_ready, self._counted()
            verified = [one for one in self._round.prepared if one in counted and one not in self._round.beside]
            if wanted is None:
                wanted = len([one for one in counted if self._round.is_wanted(one)])
            if counted and len(verified) < max(wanted, 1):
                remedy = self._fence_lacking(self._round)
                raise self._round.error(f"{len(verified)} of {len(counted)} replicas have verified it{remedy}")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Phase two: from here on this is the version. Raises when nobody committed, though some were to."""
        with self._turn:
            found = self._round
            if found is None:
                return
            if found.info is None:
                raise NotOpen("nothing was sent since the update was started")
            newest = self._after(found.info, weight_version)
            self._decide(newest, found)
            begun = time.monotonic()
            label = None if newest is None or found.info.get("label") else newest.label
            pause = RoundPause(self.pause, self.clear_cache, self.fence_mode)
            found.commit(label, pause, newest and Serving.after(newest))
            self._conclude(found, time.monotonic() - begun, pause.seconds)

    # steps

    def _counted(self) -> list[Replica]:
        """Who is to have a version: servers, or archives where there are no others."""
        with self._changed:
            found = list(self._replicas.values())
        return [one for one in found if one.answers] or found

    def _fence_lacking(self, found: Round) -> str:
        """Who lacks the weights that an adapter is for was started anew since it was asked last: its thread brings
        them. What that means for who sends it."""
        lacking = found.lacking_base()
        for one in lacking:
            self.fence(one, found.reason(one))
        names = ", ".join(one.name for one in lacking)
        return (
            f" ({names}: sent the weights that it is for now; once `wait_ready` returns, send it again)"
            if names
            else ""
        )

    def _take(self, wanted: Callable[[Replica], bool], limit_s: float) -> list[Replica]:
        """The replicas that are wanted, for us alone; not those that are busy for longer than that, or a heartbeat."""
        deadline = time.monotonic() + min(PROBE_TIMEOUT_S, limit_s)
        with self._changed:
            members = [one for one in self._replicas.values() if wanted(one)]
        return [one for one in members if one.busy.acquire(timeout=max(deadline - time.monotonic(), 0.0))]

    def _meet(
        self, members: list[Replica], info: dict[str, Any], deadline: Deadline
    ) -> dict[Replica, TransferQueueError]:
        """All at once: a group forms when all of it have come. Where none of them has ended an earlier call, that is
        waited for."""
        are_late = all(one.is_waited_for for one in members)

        def meet(one: Replica) -> None:
            if are_late:
                one.settle(deadline)
            self.admit(one, one.meet(self.publisher, deadline, info))

        failed = at_once(members, meet, deadline, "the meeting with")
        for one, error in failed.items():
            self.fence(one, f"it did not meet the trainer: {error}")
        return failed

    def _release(self, members: list[Replica]) -> None:
        for one in members:
            one.busy.release()
        with self._changed:
            self._note_change()

    def _check_follows(self, info: Mapping[str, Any]) -> None:
        version, run_id, newest = int(info["version"]), run_of(info), self.newest()
        if run_id in self._past:
            raise WrongEpoch(f"run {run_id!r} is over")
        if newest is not None and newest.run_id == run_id and not info.get("label") and version <= newest.version:
            raise StaleVersion(not_newer(version, run_id, newest.version))

    def _after(self, info: Mapping[str, Any], label: str | None) -> Decided | None:
        """What is to be served once this update is decided."""
        newest, version = self.newest(), int(info["version"])
        if not info.get("label"):
            run_id = run_of(info)
            return Decided(version, run_id, label or str(version), self._free.get(run_id, {}), root_in(info))
        if newest is None:
            return None
        others = {name: number for name, number in newest.adapters.items() if name != info["label"]}
        here = DecidedAdapter(version, bool(info.get("for_base")), root_in(info))
        return newest._replace(adapters=others if info.get("removed") else {**others, info["label"]: here})

    def _decide(self, newest: Decided | None, found: Round) -> None:
        """Fence first, so that nobody is sent to the old version while others have the new one."""
        assert found.info is not None
        with self._changed:
            if self._newest is not None and newest is not None and self._newest.run_id != newest.run_id:
                self._past.add(self._newest.run_id)
            now, before = time.monotonic(), self._decided_at
            self._decided_at, self.interval_s = now, 0.0 if before is None else now - before
            self._newest = newest
            self._note_adapter(found.info)
            for one in self._replicas.values():
                if one not in found.prepared and one.takes(found.info):
                    one.fence(found.reason(one) or f"it missed version {found.info['version']}")
            self._note_change()

    def _note_adapter(self, info: Mapping[str, Any]) -> None:
        """Also of one that comes before any weights of its run."""
        if label := info.get("label"):
            run_id = run_of(info)
            others = {name: one for name, one in self._free.get(run_id, {}).items() if name != label}
            is_free = not (info.get("for_base") or info.get("removed"))
            one = DecidedAdapter(int(info["version"]), False, root_in(info))
            self._free = {run_id: {**others, label: one} if is_free else others}

    def _conclude(self, found: Round, commit_s: float, pause_s: float) -> None:
        newest = self._newest
        assert found.info is not None
        serving = newest and Serving.after(newest)
        with self._changed:
            for one in found.prepared:
                if reason := found.reason(one):
                    one.fence(reason)
                elif serving is not None and not one.left:
                    self._admit(one, found.serving(one, serving))
            self._note_change()
            committed = tuple(one.name for one in found.prepared if not found.reason(one))
            missed = {one.name: one.reason for one in self._replicas.values() if not one.ready}
        self.last = RoundReport(int(found.info["version"]), committed, missed, found.prepare_s, commit_s, pause_s)
        error = found.error("nobody has committed it") if found.prepared and not committed else None
        self._end_round()
        if error is not None:
            raise error

    def _end_round(self) -> None:
        found, self._round = self._round, None
        if found is not None:
            found.abort(Deadline(ABORT_S))
            with self._changed:
                found.end_beside()
            self._release(found.members)

    # the replicas' threads

    def fence(self, one: Replica, reason: str) -> None:
        with self._changed:
            one.fence(reason)
            self._note_change()

    def _admit(self, one: Replica, serving: Serving | None) -> None:
        """Who has committed, with the lock."""
        if serving is None:
            one.fence("it does not say what it serves")
        else:
            self.admit(one, serving)

    def admit(self, one: Replica, serving: Serving) -> bool:
        """Whether what it serves is the newest version still; then it is ready."""
        with self._changed:
            if self._newest is None or not serving.is_newest(one.share_of(self._newest)):
                one.serving = serving
                if one.ready:
                    one.fence(f"it serves {serving}")
                    self._note_change()
                return False
            is_new = not one.ready or one.serving != serving
            one.admit(serving)
            if is_new:
                self._note_change()
            return True

    def wait_for_work(self, one: Replica, timeout_s: float, seen: Decided | None, was_ready: bool | None) -> None:
        """Sleep until there is something to do for a replica: another version, a fence, leaving, or the time is up.
        `was_ready`: as it was looked at; None: it could not be looked at, as a round had it."""

        def wanted() -> bool:
            changed = self._newest != seen or one.ready != was_ready
            return one.left or (changed and not one.busy.locked())

        with self._changed:
            self._changed.wait_for(wanted, timeout_s)

    def wait_for_round(self, one: Replica) -> None:
        """Sleep until a replica that rests was in a round, or has rested, or leaves."""
        with self._changed:
            while not one.left and (one.rests_s or one.busy.locked()):
                self._changed.wait(one.rests_s or self.heartbeat_s)

    # who reports

    def wait_for_change(self, seen: int, timeout_s: float) -> int | None:
        """Sleep until replicas have changed more than `seen` times, or the time is up: how often they have. None once
        the fleet was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_changes != seen, timeout_s)
            return None if self._is_closed else self._num_changes

    def _note_change(self) -> None:
        """With the lock: who waits for a change of the replicas looks again."""
        self._num_changes += 1
        self._changed.notify_all()
