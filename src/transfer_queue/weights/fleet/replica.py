"""One inference server of a fleet, as its trainer sees it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from transfer_queue.errors import (
    NotInitialized,
    NotOpen,
    NotSupported,
    ProtocolError,
    ServiceUnavailable,
    StaleBase,
    TransferQueueError,
    WrongEpoch,
    error_from_code,
    kept,
)
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.receive.status import ServerStatus
from transfer_queue.weights.transport.clients import Member as Member
from transfer_queue.weights.transport.clients import foremost, takes_owner
from transfer_queue.weights.transport.deadline import Deadline, TimedCall
from transfer_queue.weights.transport.faults import as_typed
from transfer_queue.weights.transport.reports import UNKNOWN, has, relabel
from transfer_queue.weights.transport.trainer import TrainerEngine
from transfer_queue.wire.messages.overview import ReplicaStatus as ReplicaStatus

# A call of another kind, whatever becomes of it, leaves no update open.
IN_UPDATES = (
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
    "abort_weight_update",
)  # fmt: skip
RELABEL_S = 1.0  # that a server may take for it beyond the deadline


class DecidedAdapter(NamedTuple):
    """`for_base`: for the fleet's weights only."""

    version: int
    for_base: bool
    root: str


class Decided(NamedTuple):
    """The version that the fleet has, or is coming to. `adapters`: by label. A number is not enough to tell what it is:
    a trainer that was started anew under the same `run_id` may give it to other weights. `root` "": not known."""

    version: int
    run_id: str
    label: str
    adapters: Mapping[str, DecidedAdapter]
    root: str = ""

    @property
    def epoch(self) -> str:
        """The run, by its older name."""
        return self.run_id


class Serving(NamedTuple):
    """What a server says it serves. `version` None: nothing that was sent, or it only has labels (`run_id` None).
    `adapters`: by label, version and root."""

    version: int | None
    run_id: str | None
    label: str
    adapters: Mapping[str, tuple[int, str]]
    root: str = ""

    @staticmethod
    def after(newest: Decided) -> Serving:
        """What a server serves that was brought to this."""
        adapters = {name: (one.version, one.root) for name, one in newest.adapters.items()}
        return Serving(*newest[:3], adapters, newest.root)

    @staticmethod
    def of(status: ServerStatus) -> Serving:
        info = status.installed
        if info is None:
            return Serving(None, None, status.label, {})
        adapters = {name: (one.version, one.root) for name, one in info.adapters.items()}
        return Serving(None if info.dirty else info.version, info.run_id, status.label, adapters, info.root)

    def is_newest(self, newest: Decided) -> bool:
        if (self.version, self.run_id) != (newest.version, newest.run_id) or not _is_root(self.root, newest.root):
            return False
        found = ((self.adapters.get(label), one) for label, one in newest.adapters.items())
        return all(mine is not None and mine[0] == one.version and _is_root(mine[1], one.root) for mine, one in found)


def root_in(info: Mapping[str, Any]) -> str:
    """What an update's info says of its content; "" where it says nothing."""
    return str(info.get("root") or "")


def _is_root(mine: str, wanted: str) -> bool:
    return mine == wanted or not (mine and wanted)


class Replica:
    """`state` belongs to the fleet's lock; calls to whoever holds `busy`: a round, or the replica's own thread.

    Whether an update is open there, and whether it is paused, is asked, not remembered. vLLM cannot be asked: for its
    silent workers `_session` says whether a call of ours has left one open (None: that is not known).
    """

    def __init__(self, name: str, member: Member) -> None:
        self.name = name
        self.member = member
        self.busy = threading.Lock()
        self.ready = False
        self.answers = True  # requests; until it says that it has no model
        self.reason = "it has joined just now"
        self.left = False
        self.paused_by_us = False
        self._met = False  # the trainer's transport
        self.was_met = False  # since it was admitted: it may have been started anew, and lack anything
        self.silent = 0  # how many workers it has whose calls never raise
        self.serving: Serving | None = None
        self.brought: Serving | None = None  # what it serves by what was sent to it here, for one that has only labels
        self._rest_s = self._rests_until = 0.0
        self._rounds_left = 0  # that it may rest for
        self._may_rest = True  # until it has failed in a round that it was taken along by, and is ready again
        self._session: bool | None = False
        self._since = time.monotonic()
        self._heard: float | None = None
        self._call: TimedCall[Any] | None = None
        self._look: TimedCall[str] | None = None
        self._label: str | None = None  # that it had as it was asked last, where it only has labels

    # the fleet's view

    def takes(self, info: Mapping[str, Any]) -> bool:
        """Whether an update is for it: adapters are not for what has no model to answer with."""
        return self.answers or not info.get("label")

    def share_of(self, newest: Decided) -> Decided:
        """What of it this one is to serve."""
        return newest if self.answers else newest._replace(adapters={})

    def admit(self, serving: Serving) -> None:
        if not self.ready:
            self._since = time.monotonic()
        self.ready, self.reason, self.serving, self._may_rest = True, "", serving, True
        self.was_met = False
        self.brought = serving

    def rest(self, rest_s: float) -> None:
        """It was brought to a version, and a newer one was decided meanwhile. That could go on without an end, so for
        that long nobody brings it further: the next round takes it along. Not one that was too slow for that, too: it
        would hold up round after round."""
        if self._may_rest:
            self._rest_s, self._rests_until, self._rounds_left = rest_s, time.monotonic() + rest_s, 1

    def was_taken_along(self, fault: TransferQueueError | None) -> None:
        """A round has ended that it was in. A difference to a version that it lacks is nothing for it; the next round's
        is none (`Fleet.lacks_base`)."""
        self._may_rest = fault is None or isinstance(fault, StaleBase)
        goes_on = isinstance(fault, StaleBase) and self._rounds_left > 0
        self._rounds_left -= 1
        self._rests_until = time.monotonic() + self._rest_s if goes_on else 0.0

    @property
    def rests_s(self) -> float:
        """For how long yet it rests; 0 where it does not."""
        return 0.0 if self.ready else max(0.0, self._rests_until - time.monotonic())

    def fence(self, reason: str) -> None:
        if self.ready:
            self._since = time.monotonic()
        self.ready, self.reason = False, reason

    def status(self) -> ReplicaStatus:
        now, found = time.monotonic(), self.serving
        heard_s = None if self._heard is None else now - self._heard
        version, label = (found.version, found.label) if found else (None, "")
        return ReplicaStatus(self.name, self.ready, version, label, self.reason, now - self._since, heard_s)

    # calls

    @property
    def is_met(self) -> bool:
        """Whether it may be told to start an update as it is. Not where a call has left open whether one is open there:
        silent workers refuse a second one, which puts them out of step, and a `meet` ends the first."""
        return self._met and (not self.silent or self._session is False)

    @property
    def is_waited_for(self) -> bool:
        """An earlier call is not over: it may have been frozen. Nothing else is asked until then."""
        return self._call is not None and not self._call.ended(0.0)

    def settle(self, deadline: Deadline) -> None:
        """Wait for the earlier call: it may be about to end."""
        if self.is_waited_for and self._call is not None:
            self._call.ended(deadline.left(f"an earlier call to {self.name}"))

    def call(self, method: str, *args: Any, deadline: Deadline) -> Any:
        """What the server answers. Typed errors only; `ServiceUnavailable` while an earlier call is not over. Once the
        deadline passed, nothing is called any more."""
        if self.is_waited_for:
            raise ServiceUnavailable(f"{self.name} has not answered an earlier call")
        deadline.left(f"{method} of {self.name}")  # a call that comes late does harm: others have gone on
        function = self._method(method)
        after = {"start_weight_update": True, "finish_weight_update": False}.get(method, self._session)
        try:
            self._call = TimedCall(function, *args)
            self._session = None if method in IN_UPDATES else self._session
            found = self._call.result(deadline, f"{method} of {self.name}")
        except Exception as error:  # noqa: BLE001 of an in-process server
            raise as_typed(error) from None
        self._heard = time.monotonic()
        self._session = after
        return found

    def _method(self, name: str) -> Callable[..., Any]:
        """`NotSupported` where the member, which somebody else may have written, has no such method."""
        found: Callable[..., Any] | None = getattr(self.member, name, None)
        if not callable(found):
            raise NotSupported(f"{self.name} has no method {name!r}")
        return found

    def meet(
        self, publisher: TrainerEngine | None, deadline: Deadline, init_info: dict[str, Any] | None = None
    ) -> Serving:
        """Introduce the trainer (`init_info`: as it does itself just now), which ends what is open there. Returns what
        the server serves."""
        self._met = False
        if publisher is None:
            raise NotInitialized("the fleet has no trainer yet")
        try:
            return self._meet(publisher, deadline, init_info)
        except Exception as error:  # noqa: BLE001 of a client that somebody else wrote
            raise as_typed(error) from None

    def _meet(self, publisher: TrainerEngine, deadline: Deadline, init_info: dict[str, Any] | None) -> Serving:
        has_silent = has(self.member, "silent_workers")
        self.silent = int(self.call("silent_workers", deadline=deadline)) if has_silent else 0
        told = publisher.introduction(self.silent, deadline) if init_info is None else init_info
        info = {**told, **publisher.reports.info(self.silent), "replica": self.name}
        publisher.reports.forget(self.name)
        self.call("init_weight_transfer_engine", info, deadline=deadline)
        publisher.reports.hear(self.name, None, "", self.silent, deadline)
        self._session, self.was_met = False, True
        found = self.ask(publisher, deadline)
        self._met = True
        return found

    def hear(
        self, publisher: TrainerEngine | None, info: Mapping[str, Any], deadline: Deadline, *, installed: bool = False
    ) -> None:
        """Wait until its silent workers have reported a step; raise what anybody reports instead."""
        if publisher is None:
            return
        try:
            version, key = info.get("version"), str(info.get("key", ""))
            self._look = None  # what was asked in an earlier step says nothing of this one
            look = functools.partial(self._expect_alive, self._label if not installed else None)
            publisher.reports.hear(self.name, version, key, self.silent, deadline, installed, look)
        except TransferQueueError:
            if installed and self.silent and not info.get("label"):
                self._call = TimedCall(relabel, self.member, UNKNOWN)
                self._call.ended(RELABEL_S)
            raise

    def _expect_alive(self, label: str | None) -> None:
        """Silent workers that have ended, or were started anew, do not say so, but their server does, by its label
        (None: which may change): `ServiceUnavailable`. It is asked now, and has answered when this is called again;
        where it has not, nothing is known. Never blocks."""
        asked = self._look
        if asked is None:
            self._look = TimedCall(self._method("get_weight_version"))
        if asked is None or not asked.ended(0.0):
            return
        self._look = None
        try:
            found = asked.outcome()
        except TransferQueueError as error:
            if isinstance(error, ServiceUnavailable):
                raise
            return
        if label not in (None, found):
            raise ServiceUnavailable(f"{self.name} was started anew: its label was {label!r} and is {found!r}")

    def ask(self, publisher: TrainerEngine | None, deadline: Deadline) -> Serving:
        """What it serves now."""
        try:
            status = self.call("status", deadline=deadline)
        except NotSupported:
            return self._labelled(self.call("get_weight_version", deadline=deadline))
        if not isinstance(status, ServerStatus):
            raise ProtocolError(f"{self.name} gives a {type(status).__name__} as its status")
        self.answers = status.answers
        if status.installed is not None:
            # also by a life of our trainer before, of the same name
            self.paused_by_us = publisher is not None and status.paused_by == publisher.run_id
        return Serving.of(status) if status.installed is not None else self._labelled(status.label)

    def has_what_was_brought(self, deadline: Deadline) -> bool:
        """Not where it was started anew: its silent workers, who were told of no trainer, would take an update and
        report nothing. True where only a call would tell."""
        if not self.silent or self.brought is None:
            return True
        return bool(self.call("get_weight_version", deadline=deadline) == self.brought.label)

    def _labelled(self, label: str) -> Serving:
        """A label says neither whose version that is, nor which adapters are there."""
        self._label = label
        known = self.brought
        return known if known is not None and known.label == label else Serving(None, None, label, {})

    def pause(
        self, publisher: TrainerEngine | None, mode: Mode, clear_cache: bool, lease_s: float, deadline: Deadline
    ) -> None:
        """In our name: it ends with the lease, or once another run takes over."""
        run_id = publisher.run_id if publisher is not None else ""
        self.call("pause_generation", mode, clear_cache, run_id, lease_s, deadline=deadline)
        self.paused_by_us = True

    def resume(self, publisher: TrainerEngine | None, deadline: Deadline) -> None:
        """End that pause, and nobody else's where the member can say whose."""
        run_id = publisher.run_id if publisher is not None else ""
        self.call("resume_generation", *([run_id] if self._resumes_one else []), deadline=deadline)
        self.paused_by_us = False

    @functools.cached_property
    def _resumes_one(self) -> bool:
        return takes_owner(self._method("resume_generation"))

    def call_off(self, deadline: Deadline) -> None:
        """End the update that is open there, if it is ours. vLLM's session ends with a finish only, after an abort ours
        do nothing in it, and it refuses both when none is open, which puts its workers out of step: when that is not
        known, the next `meet` ends it (`is_met`)."""
        if self.silent and self._session is not True:
            return
        try:
            if self.silent:
                self.call("update_weights", {"abort": True}, deadline=deadline)
                self.call("finish_weight_update", deadline=deadline)
            else:
                self.call("abort_weight_update", deadline=deadline)
        except (NotOpen, NotSupported, WrongEpoch):
            self._session = False


def gathered(text: str, failed: Mapping[Replica, TransferQueueError]) -> TransferQueueError:
    """One error that says what all of them say, of the kind of the `foremost`."""
    said = "; ".join(f"{one.name}: {error}" for one, error in failed.items())
    return error_from_code(foremost(failed.values()).code, f"{text}: {said}")


def at_once(
    replicas: Iterable[Replica], function: Callable[[Replica], object], deadline: Deadline, what: str
) -> dict[Replica, TransferQueueError]:
    """Do something that takes several calls to each, at all of them at the same time: who failed, and how. Nobody waits
    for another one within."""
    asked = {one: TimedCall(function, one) for one in replicas}
    failed: dict[Replica, TransferQueueError] = {}
    for one, call in asked.items():
        try:
            call.result(deadline, f"{what} {one.name}")
        except TransferQueueError as error:
            failed[one] = kept(error)
    return failed
