"""One inference server of a fleet, as its trainer sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from transfer_queue.errors import (
    NotInitialized,
    NotOpen,
    NotSupported,
    ServiceUnavailable,
    TransferQueueError,
    UpdateInProgress,
    error_from_code,
)
from transfer_queue.weights.engines.base import as_typed
from transfer_queue.weights.engines.reports import UNKNOWN, relabel, silent_workers
from transfer_queue.weights.engines.trainer import TrainerEngine
from transfer_queue.weights.engines.waiting import Call, Deadline
from transfer_queue.weights.gate import Mode
from transfer_queue.weights.receiver import VersionInfo


class Member(Protocol):
    """What a server answers: `weights.http.WeightSyncClient` with one URL, or a `Control` of this process.

    Without `status` (vLLM: `NotSupported`) the label tells the versions apart.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> object: ...

    def start_weight_update(self) -> object: ...

    def update_weights(self, update_info: dict[str, Any]) -> object: ...

    def finish_weight_update(self, weight_version: str | None = None) -> object: ...

    def get_weight_version(self) -> str: ...

    def status(self) -> Any: ...

    def pause_generation(self, mode: Mode = "abort", clear_cache: bool = True) -> object: ...

    def resume_generation(self) -> object: ...

    def abort_weight_update(self) -> object: ...


class Decided(NamedTuple):
    """The version that the fleet has, or is coming to. `adapters`: by label, (version, for these weights only)."""

    version: int
    epoch: str
    label: str
    adapters: Mapping[str, tuple[int, bool]]


class Serving(NamedTuple):
    """What a server says it serves. `version` None: nothing that was sent, or it only has labels (`epoch` None)."""

    version: int | None
    epoch: str | None
    label: str
    adapters: Mapping[str, int]

    def is_newest(self, newest: Decided) -> bool:
        if self.epoch is None:
            return self.label == newest.label
        same = (self.version, self.epoch) == (newest.version, newest.epoch)
        return same and all(self.adapters.get(label) == version for label, (version, _) in newest.adapters.items())


class ReplicaStatus(msgspec.Struct, frozen=True):
    """`reason`: why it is fenced, "" while it is ready. Seconds: since it is so, and since it was last heard of."""

    name: str
    ready: bool
    version: int | None
    label: str
    reason: str
    since_s: float
    heard_s: float | None


class Replica:
    """`state` belongs to the fleet's lock; calls to whoever holds `busy`: a round, or the replica's own thread."""

    def __init__(self, name: str, member: Member) -> None:
        self.name = name
        self.member = member
        self.busy = threading.Lock()
        self.ready = False
        self.reason = "it has joined just now"
        self.left = False
        self.fenced_by_pause = False
        self.met = False  # the trainer's transport
        self.silent = 0  # how many workers it has whose calls never raise
        self._sure = True  # about `open`
        self.open = False  # an update was started there, and not finished
        self.serving: Serving | None = None
        self._since = time.monotonic()
        self._heard: float | None = None
        self._call: Call[Any] | None = None

    # the fleet's view

    def admit(self, serving: Serving) -> None:
        if not self.ready:
            self._since = time.monotonic()
        self.ready, self.reason, self.serving = True, "", serving

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

    def call(self, method: str, *args: Any, deadline: Deadline) -> Any:
        """What the server answers. Typed errors only; `ServiceUnavailable` while an earlier call is not over."""
        self.begin(method, *args)
        return self.end(deadline)

    def begin(self, method: str, *args: Any) -> None:
        if self._call is not None and not self._call.ended(0.0):
            raise ServiceUnavailable(f"{self.name} has not answered an earlier call")
        self.open = (self.open or method == "start_weight_update") and method != "abort_weight_update"
        self._sure = False
        self._call = Call(getattr(self.member, method), *args)
        self._method = method

    def end(self, deadline: Deadline) -> Any:
        assert self._call is not None
        try:
            found = self._call.result(deadline, f"{self._method} of {self.name}")
        except Exception as error:  # noqa: BLE001 of an in-process server
            raise as_typed(error) from None
        self._heard = time.monotonic()
        self.open = self.open and self._method != "finish_weight_update"
        self._sure = True
        return found

    def meet(
        self, publisher: TrainerEngine | None, deadline: Deadline, init_info: dict[str, Any] | None = None
    ) -> Serving:
        """Introduce the trainer (`init_info`: as it does itself just now); what the server serves."""
        self.met = False
        if publisher is None:
            raise NotInitialized("the fleet has no trainer yet")
        self.silent = silent_workers(self.member)
        told = publisher.introduction(self.silent) if init_info is None else init_info
        info = {**told, **publisher.reports.info(self.silent), "replica": self.name}
        publisher.reports.forget(self.name)
        try:
            self.call("init_weight_transfer_engine", info, deadline=deadline)
        except UpdateInProgress:  # that a trainer before has left
            self.call("abort_weight_update", deadline=deadline)
            self.call("init_weight_transfer_engine", info, deadline=deadline)
        publisher.reports.hear(self.name, None, "", self.silent, deadline)
        found = self.ask(deadline)
        self.open = False if self.silent else self.open  # vLLM's `init` ends what was open
        self.met = True
        return found

    def hear(
        self, publisher: TrainerEngine | None, info: Mapping[str, Any], deadline: Deadline, *, installed: bool = False
    ) -> None:
        """Wait until its silent workers have reported a step; raise what anybody reports instead."""
        if publisher is None:
            return
        try:
            version, key = info.get("version"), str(info.get("key", ""))
            publisher.reports.hear(self.name, version, key, self.silent, deadline, installed)
        except TransferQueueError:
            if installed and self.silent:
                relabel(self.member, UNKNOWN)
            raise

    def ask(self, deadline: Deadline) -> Serving:
        """What it serves now."""
        try:
            found = self.call("status", deadline=deadline)
        except NotSupported:
            return Serving(None, None, self.call("get_weight_version", deadline=deadline), {})
        if isinstance(found, dict):  # by URL
            (one,) = found.values()
            info, label = msgspec.convert(one["installed"], VersionInfo), one["label"]
        else:
            info, label = found.installed, found.label
        adapters = {name: one.version for name, one in info.adapters.items()}
        return Serving(None if info.dirty else info.version, info.epoch, label, adapters)

    def is_surely_open(self) -> bool:
        """vLLM refuses an abort when nothing is open, which puts its workers out of step: when a call did not come to
        its end there, the next `meet` ends what may be open."""
        if self.silent and not self._sure:
            self.met = False
        return self.open and (self._sure or not self.silent)

    def call_off(self, deadline: Deadline) -> None:
        """End what is open there. vLLM's session ends with a finish only; after an abort ours do nothing in it."""
        if not self.is_surely_open():
            return
        try:
            self.call("update_weights", {"abort": True}, deadline=deadline)
            self.call("finish_weight_update", deadline=deadline)
        except NotOpen:
            self.open = False


def gathered(text: str, failed: Mapping[Replica, TransferQueueError]) -> TransferQueueError:
    """One error that says what all of them say, of the kind of the first."""
    said = "; ".join(f"{one.name}: {error}" for one, error in failed.items())
    return error_from_code(next(iter(failed.values())).code, f"{text}: {said}")


def at_once(
    replicas: Iterable[Replica], function: Callable[[Replica], object], deadline: Deadline, what: str
) -> dict[Replica, TransferQueueError]:
    """Do something that takes several calls to each, at all of them at the same time: who failed, and how."""
    asked = {one: Call(function, one) for one in replicas}
    failed: dict[Replica, TransferQueueError] = {}
    for one, call in asked.items():
        try:
            call.result(deadline, f"{what} {one.name}")
        except TransferQueueError as error:
            failed[one] = error
    return failed


def each(
    replicas: Iterable[Replica], method: str, *args: Any, deadline: Deadline
) -> dict[Replica, TransferQueueError | None]:
    """The call at all of them at once: who failed, and how."""
    found: dict[Replica, TransferQueueError | None] = {}
    for one in replicas:
        found[one] = None
        try:
            one.begin(method, *args)
        except TransferQueueError as error:
            found[one] = error
    for one in [one for one, error in found.items() if error is None]:
        try:
            one.end(deadline)
        except TransferQueueError as error:
            found[one] = error
    return found
