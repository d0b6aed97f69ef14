"""The receivers' side of a transport, in vLLM's shape: four calls, driven by a trainer through a control plane.

    init_transfer_engine(info)   where the trainer is
    start_weight_update()        a new update; drops what an earlier one left
    update_weights(info)         fetches, stages and verifies; the old weights serve meanwhile
    finish_weight_update()       commits, or, after a fault or an abort, does nothing

All infos are JSON. Where nothing may raise (inside workers whose calls have to stay in step) `on_fault="record"` only
records; the trainer sees it in the outcome that the engine reports.
"""

from __future__ import annotations

import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from transfer_queue.errors import (
    InternalError,
    InvalidInput,
    NotOpen,
    ServiceUnavailable,
    StaleVersion,
    TransferQueueError,
    error_from_code,
)
from transfer_queue.weights.engines.waiting import Deadline
from transfer_queue.weights.manifest import Manifest, expand, root_of
from transfer_queue.weights.receiver import CommitInfo, Receiver, VersionInfo

if TYPE_CHECKING:
    from transfer_queue.weights.engines.fetching import Control
    from transfer_queue.weights.engines.trainer import TrainerEngine

log = logging.getLogger("transfer_queue.weights")
INIT_TIMEOUT_S = 60.0
REPORT_S = 0.5  # of waiting for the trainer to hear of a fault
Info = Mapping[str, Any]
S = TypeVar("S", bound=msgspec.Struct)


class InitInfo(msgspec.Struct, kw_only=True):
    """`replica`: what a fleet calls this server; its outcomes carry it. `report_to`: where outcomes are reported, with
    this token, by transports that have no way of their own."""

    replica: str = ""
    timeout_s: float = INIT_TIMEOUT_S
    report_to: str = ""
    report_token: str = ""


class UpdateInfo(msgspec.Struct, kw_only=True):
    """Which version, and how long the update may take. `key` names the manifest (`key_of`). `abort`: drop the update
    that was started, as another replica cannot take it. `newest`: whichever version is the newest, for a replica that
    comes late; nothing else is needed then."""

    version: int = 0
    epoch: str = ""
    key: str = ""
    timeout_s: float = 300.0
    abort: bool = False
    newest: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """How an update went at one replica. `code` and `text` describe the fault, "" when there was none.

    `key` names the version's manifest, `who` the engine (ranks of several servers have the same numbers). `silent`: its
    calls never raise, so only a report says that they were done.
    """

    rank: int
    replica: str = ""
    version: int | None = None
    epoch: str = ""
    installed: bool = False
    code: str = ""
    text: str = ""
    key: str = ""
    who: str = ""
    silent: bool = False


def parse(info: object, form: type[S]) -> S:
    """The info as `form`; `InvalidInput` for any other. Unknown keys are ignored: later releases add some."""
    try:
        return msgspec.convert(info, form)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{form.__name__}: {error}") from None


class Engine(ABC):
    """Brings versions to one `Receiver`. One control call at a time; forward passes go on in other threads.

    `rank` tells replicas of one trainer apart. No call waits longer than the `timeout_s` of its info.
    """

    trainer: ClassVar[type[TrainerEngine]]
    init_form: ClassVar[type[InitInfo]] = InitInfo
    update_form: ClassVar[type[UpdateInfo]] = UpdateInfo

    def __init__(self, receiver: Receiver, *, rank: int = 0, on_fault: Literal["raise", "record"] = "raise") -> None:
        self.receiver = receiver
        self.rank = rank
        self.last_commit: CommitInfo | None = None
        self._records = on_fault == "record"
        self._blank = Outcome(rank, who=secrets.token_hex(8), silent=self._records)
        self.outcome = self._blank
        self._reports: Control | None = None
        self._busy = threading.Lock()
        self._started = False
        self._deadline: Deadline | None = None  # of the update that was received, and may be committed
        self._manifest: Manifest | None = None
        self._whole: Manifest | None = None  # what is installed, as a full version

    def confine(self, root: str = "") -> None:
        """From now on infos come over a network: they may name nothing on this host's file system that is not
        below `root` ("": nothing at all, unless the engine was made with a root).
        """
        del root  # most engines' infos name nothing there

    # vLLM's calls

    def init_transfer_engine(self, init_info: Info) -> None:
        """Meet the trainer. May be repeated, also with another trainer."""
        with self._busy, self._fault():
            info = parse(init_info, self.init_form)
            self._blank = replace(self._blank, replica=info.replica)
            self.outcome = self._blank
            self._report_to(info)
            self._connect(info)
            if self._records:
                self._report(Deadline(info.timeout_s))

    def start_weight_update(self) -> None:
        with self._busy, self._fault():
            self._drop("another update started")
            self.outcome = self._blank
            self._started = True

    def update_weights(self, update_info: Info) -> None:
        """Returns when the version is verified and only has to be committed. Whatever is wrong leaves the old one."""
        with self._busy, self._fault():
            if self.outcome.code and not update_info.get("abort"):
                raise error_from_code(self.outcome.code, self.outcome.text)
            info = parse(update_info, self.update_form)
            if info.abort:
                self._drop("the trainer gave it up")
                return
            if not self._started:
                raise NotOpen("no update was started")
            self.outcome = replace(self._blank, version=info.version, epoch=info.epoch, key=info.key)
            self._receive(info, Deadline(info.timeout_s))
        if not self.outcome.code:
            self._report(Deadline(5 * REPORT_S))

    def receive_weights(self, update_info: Info) -> None:
        """The same, by its older name."""
        self.update_weights(update_info)

    def finish_weight_update(self) -> None:
        """Commit what was received. Does nothing after an abort, nor, when faults are recorded, after a fault."""
        with self._busy, self._fault():
            if not self._started:
                return
            if self.outcome.code:
                self._started = False
                raise error_from_code(self.outcome.code, self.outcome.text)
            if self._deadline is None or self._manifest is None:
                raise NotOpen("nothing was received since the update was started")
            self._commit(self._manifest, self._deadline)
        if self._records and self.outcome.installed:
            self._report(Deadline(5 * REPORT_S))

    def shutdown(self) -> None:
        """Drop what is open and leave the trainer. The installed weights stay. Repeatable."""
        with self._busy:
            self._drop("shut down")
            if self._reports is not None:
                self._reports.leave()
            self._close()

    @property
    def ready(self) -> str:
        """Names the manifest (`key_of`) of the version that `finish_weight_update` would commit; "" for none."""
        manifest = self._manifest
        return key_of(manifest) if manifest is not None and self._started and not self.outcome.code else ""

    def refuse(self, error: TransferQueueError) -> None:
        """End the update with this fault, as if it had been met here."""
        with self._busy, self._fault():
            raise error

    def join(self, *, timeout_s: float, label: str = "") -> VersionInfo:
        """Install the newest version there is, of the weights or of the adapter called `label`, without a trainer's
        call: for a replica that comes late."""
        with self._busy:
            return self._install(lambda deadline: self._newest(deadline, label), Deadline(timeout_s))

    # for transports

    @abstractmethod
    def _connect(self, info: Any) -> None: ...

    @abstractmethod
    def _find(self, info: Any, deadline: Deadline) -> Manifest:
        """The manifest of the version that the trainer named."""

    @abstractmethod
    def _newest(self, deadline: Deadline, label: str = "") -> Manifest: ...

    @abstractmethod
    def _fetch(self, manifest: Manifest, wanted: list[int], deadline: Deadline) -> None:
        """Bring these buckets to `receiver.stage`."""

    @abstractmethod
    def _close(self) -> None: ...

    def _tell(self, outcome: Outcome, deadline: Deadline) -> None:
        """Report to the trainer, where there is a way."""
        if self._reports is not None:
            self._reports.tell(outcome, deadline)

    def _ended(self) -> None:
        """The update is over: let go of what only it needed."""
        return

    # steps

    def _install(self, find: Callable[[Deadline], Manifest], deadline: Deadline) -> VersionInfo:
        self._drop("joining")
        try:
            manifest = find(deadline)
            self._stage(manifest, deadline)
            self._commit(manifest, deadline)
        except BaseException as error:
            self._drop("joining failed")
            if isinstance(error, OSError) and not isinstance(error, TransferQueueError):
                raise as_typed(error) from error
            raise
        return self.receiver.installed()

    def _report_to(self, info: InitInfo) -> None:
        from transfer_queue.weights.engines.fetching import Control
        from transfer_queue.weights.engines.protocol import address_of

        if self._reports is not None:
            self._reports.close()
        self._reports = Control() if info.report_to else None
        if self._reports is not None:
            self._reports.address = address_of(info.report_to, info.report_token)

    def _receive(self, info: Any, deadline: Deadline) -> None:
        if info.newest:
            manifest = self._newest(deadline)
            version, key = manifest.version, key_of(manifest)
            self.outcome = replace(self.outcome, version=version, epoch=manifest.epoch, key=key)
            self._stage(manifest, deadline)
            return
        manifest = self._find(info, deadline)
        if (manifest.version, manifest.epoch) != (info.version, info.epoch):
            raise StaleVersion(f"asked for {info.version} of {info.epoch!r}, found {manifest.version}")
        self._stage(manifest, deadline)

    def _stage(self, manifest: Manifest, deadline: Deadline) -> None:
        wanted = self.receiver.open(manifest, deadline.left())
        if wanted:
            self._fetch(manifest, wanted, deadline)
        self._verify(manifest, deadline)

    def _verify(self, manifest: Manifest, deadline: Deadline) -> None:
        self.receiver.verify()
        deadline.left()
        self._deadline, self._manifest = deadline, manifest

    def _commit(self, manifest: Manifest, deadline: Deadline) -> None:
        self.last_commit = self.receiver.commit(deadline.left())
        version, key = manifest.version, key_of(manifest)
        self.outcome = replace(self._blank, version=version, epoch=manifest.epoch, key=key, installed=True)
        self._whole = whole_of(self._whole, manifest)
        self._started, self._deadline, self._manifest = False, None, None
        self._ended()

    def _drop(self, reason: str) -> None:
        self._started, self._deadline, self._manifest = False, None, None
        self.receiver.abort(reason)
        self._ended()

    @contextmanager
    def _fault(self) -> Iterator[None]:
        """Whatever is raised within ends the update and is recorded, as a typed error."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 where faults are recorded nothing may leave
            typed = as_typed(error)
            if not self.outcome.code:
                log.warning("rank %s: %s", self.rank, str(typed))  # records that are kept would keep staged memory
            self.outcome = replace(self.outcome, code=typed.code, text=str(typed))
            self._deadline, self._manifest = None, None
            self.receiver.abort(str(typed))
            self._ended()
            if not isinstance(typed, ServiceUnavailable):
                self._report(Deadline(REPORT_S))
            if not self._records:
                raise typed from (None if typed is error else error)

    def _report(self, deadline: Deadline) -> None:
        try:
            self._tell(self.outcome, deadline)
        except (TransferQueueError, OSError) as error:
            log.info("rank %s: the trainer could not be told how it went: %s", self.rank, error)


def key_of(manifest: Manifest) -> str:
    """Names the manifest: the content, its packing and what it is called."""
    return manifest.key


def as_typed(error: Exception) -> TransferQueueError:
    """The error itself, or one of ours that says the same."""
    if isinstance(error, TransferQueueError):
        return error
    if isinstance(error, OSError):
        return ServiceUnavailable(str(error))
    return InternalError(repr(error))


def whole_of(before: Manifest | None, new: Manifest) -> Manifest | None:
    """What is installed after `new`, as a full version laid out like the last full one was: replicas that took other
    ways to it make the same bytes. None when that is not known."""
    if new.kind == "full":
        return new
    if new.kind == "adapter" or before is None:
        return before
    changed = {spec.name: spec.digest for spec in new.tensors}
    tensors = tuple(replace(spec, digest=changed.get(spec.name, spec.digest)) for spec in before.tensors)
    root = root_of(expand({spec.name: spec.entry for spec in tensors}, before.aliases))
    if root != new.root:
        return None  # names of tied tensors differ: nothing to serve until the next full version
    return replace(
        before, version=new.version, epoch=new.epoch, label=new.label, meta=new.meta, tensors=tensors, root=root
    )
