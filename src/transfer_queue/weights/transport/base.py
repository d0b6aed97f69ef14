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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from transfer_queue.errors import (
    Aborted,
    NotInitialized,
    NotOpen,
    ServiceUnavailable,
    StaleVersion,
    TransferQueueError,
    UpdateInProgress,
    WrongEpoch,
    emptied,
    error_from_code,
)
from transfer_queue.trace.activity import activity
from transfer_queue.trace.switch import start_as_told
from transfer_queue.weights.receive.receiver import Receiver, VersionInfo
from transfer_queue.weights.receive.update_session import CALLED_OFF, Phase, UpdateEnd, UpdateSession, run_of
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.faults import as_typed, cut_text, system_faults
from transfer_queue.weights.transport.fetching import TrainerLink
from transfer_queue.weights.transport.info import Info, InitInfo, Outcome, UpdateInfo, describe, key_of, parse
from transfer_queue.weights.transport.protocol import address_of
from transfer_queue.weights.version.columns import digest_rows
from transfer_queue.weights.version.manifest import Manifest, PieceColumns, expand, root_of

if TYPE_CHECKING:
    from transfer_queue.weights.transport.trainer import TrainerEngine

log = logging.getLogger("transfer_queue.weights")
REPORT_S = 0.5  # of waiting for the trainer to hear of a fault
LEAVE_S = 600.0  # for what a receiver still writes


class Engine(ABC):
    """Brings versions to one `Receiver`. One control call at a time; forward passes go on in other threads.

    The receiver's session says whether an update is open, whose it is, and until when. `rank` tells replicas of one
    trainer apart. No call waits longer than the `timeout_s` of its info.
    """

    trainer: ClassVar[type[TrainerEngine]]
    init_form: ClassVar[type[InitInfo]] = InitInfo
    update_form: ClassVar[type[UpdateInfo]] = UpdateInfo

    def __init__(self, receiver: Receiver, *, rank: int = 0, on_fault: Literal["raise", "record"] = "raise") -> None:
        start_as_told()
        self.receiver = receiver
        self.rank = rank
        self._records = on_fault == "record"
        self._blank = Outcome(rank, who=secrets.token_hex(8), silent=self._records)
        self.outcome = self._blank
        self._reports: TrainerLink | None = None
        self._busy = threading.Lock()
        self._is_introduced = False  # to a trainer
        self._introduction = 0  # the last one that was carried out (`Receiver.introduce`)
        self._is_meeting = False  # a trainer, just now
        self._is_called_off = False  # by the trainer, since the last start
        self._is_displaced = False  # what it was to commit since then, by another version that was joined
        self._whole: Manifest | None = None  # what is installed, as a full version

    def confine(self, root: str = "") -> None:
        """From now on infos come over a network: they may name nothing on this host's file system that is not
        below `root` ("": nothing at all, unless the engine was made with a root).
        """
        del root  # most engines' infos name nothing there

    # vLLM's calls

    def init_transfer_engine(self, init_info: Info) -> None:
        """Meet the trainer. May be repeated, also with another trainer: the update that is open ends (what waits for
        the trainer before is woken up), and its run is over. `WrongEpoch` for a run that is over itself."""
        info: Any = None
        with self._fault():
            info = parse(init_info, self.init_form)
        numbers: list[int] = []
        introduce = self.receiver.introduce
        if info is None or self._is_refused(lambda: numbers.append(introduce(info.run_id, info.timeout_s, info.begun))):
            return
        self.make_way()
        if not self._busy.acquire(timeout=info.timeout_s):
            raise UpdateInProgress("an earlier call has not ended")
        try:
            if self._is_refused(lambda: self.receiver.expect_run(info.run_id)):
                return
            with self._fault():
                self.receiver.end("the trainer was introduced again")
                self._blank = replace(self._blank, replica=info.replica)
                self.outcome = self._blank
                self._is_introduced = False
                self._introduction = numbers[0]
                self._report_to(info)
                self._meet(info)
                self._is_introduced = True
                if self._records:
                    self._report(Deadline(info.timeout_s))
        finally:
            self._busy.release()

    def make_way(self) -> None:
        """Another trainer, or the same one anew, is with the receiver (`Receiver.introduce`): wake up the introduction
        that goes on, whose trainer may hang. Never blocks."""
        if self._is_meeting:
            self._interrupt()

    def start_weight_update(self) -> None:
        """`NotInitialized` before a trainer was introduced: the trainer does that then, and starts again."""
        with self._busy, self._fault():
            self._is_called_off = self._is_displaced = False
            self._expect_introduced()
            self.receiver.begin()
            self._ended()
            self.outcome = self._blank

    def update_weights(self, update_info: Info) -> None:
        """Returns when the version is verified and only has to be committed. Whatever is wrong leaves the old one. An
        info of another run is refused (`WrongEpoch`, `NotInitialized`), and harms nobody's update. One that calls the
        update off wakes up the call that receives it."""
        if self._is_refused(lambda: self.receiver.expect_run(run_of(update_info))):
            return
        if isinstance(update_info, Mapping) and update_info.get("abort") is True:
            with suppress(UpdateInProgress):  # it is being committed: this is heard after it
                self.receiver.end(CALLED_OFF)
        with self._busy, self._fault():
            info = parse(update_info, self.update_form)
            if info.abort:
                self._drop(CALLED_OFF)
                self._is_called_off = True
                self.outcome = self._blank
                return
            before, session = self.outcome, self.receiver.session
            # What is said from here on is about this version: a late call's is no answer to what the trainer asks now.
            self.outcome = replace(
                self._blank, version=info.version, run_id=info.run_id, key=info.key, code=before.code, text=before.text
            )
            if before.code:
                raise error_from_code(before.code, before.text)
            if session is None:
                raise self._not_open()
            with self._work(), session.interrupting(self._interrupt), activity("fetch_weights") as about:
                self._receive(info, Deadline(info.timeout_s))
                if session.manifest is not None:
                    describe(about, session.manifest)
        if not self.outcome.code:
            self._report(Deadline(5 * REPORT_S))

    def finish_weight_update(self) -> None:
        """Commit what was received. Does nothing where the trainer gave the update up, where none was started, and,
        when faults are recorded, after a fault. Raises why an update is over that somebody else has ended."""
        with self._busy, self._fault():
            session = self.receiver.session
            if session is None or self.outcome.code:
                self._expect_nothing()
                return
            if session.phase is not Phase.READY or session.manifest is None:
                raise NotOpen("nothing was received since the update was started")
            self._commit(session.manifest)
        if self._records and self.outcome.installed:
            self._report(Deadline(5 * REPORT_S))

    def shutdown(self) -> None:
        """Drop what is open and leave the trainer. The installed weights stay; an archive has written its versions
        when this returns (`LEAVE_S` at most), or the log says that it has not. Repeatable."""
        with self._busy:
            self._is_introduced = False
            self._drop("shut down")
            try:
                self.receiver.flush(LEAVE_S)
            except TransferQueueError as error:
                log.error("what was committed is not all where it was to be: %s", error)
            if self._reports is not None:
                self._reports.leave()
            self._close()

    @property
    def ready(self) -> str:
        """Names the manifest (`key_of`) of the version that `finish_weight_update` would commit; "" for none."""
        session = self.receiver.session
        manifest = session.manifest if session is not None and session.phase is Phase.READY else None
        return key_of(manifest) if manifest is not None and not self.outcome.code else ""

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

    def _work(self) -> AbstractContextManager[None]:
        """Within, an `_interrupt` ends all that is asked of the trainer."""
        return nullcontext()

    def _interrupt(self) -> None:
        """Another thread ended the update, or the introduction: wake up what waits for the trainer. Never blocks."""
        return

    # steps

    @system_faults()
    def _install(self, find: Callable[[Deadline], Manifest], deadline: Deadline) -> VersionInfo:
        expected = self.ready
        self._drop("joining")
        try:
            with activity("fetch_weights") as about:
                manifest = find(deadline)
                describe(about, manifest)
                self._stage(manifest, deadline)
            self._commit(manifest)
        except BaseException:  # an interrupt must not leave it open
            self._drop("joining failed")
            raise
        self._is_displaced |= expected not in ("", self.outcome.key)
        return self.receiver.installed()

    def _meet(self, info: InitInfo) -> None:
        with self._work():
            self._is_meeting = True
            try:
                if self.receiver.num_introduced != self._introduction:  # so that nobody is missed by `make_way`
                    raise Aborted("another introduction has come")
                self._connect(info)
            finally:
                self._is_meeting = False

    def _report_to(self, info: InitInfo) -> None:
        if self._reports is not None:
            self._reports.close()
        self._reports = TrainerLink() if info.report_to else None
        if self._reports is not None:
            self._reports.address = address_of(info.report_to, info.report_token)

    def _receive(self, info: Any, deadline: Deadline) -> None:
        if info.newest:
            manifest = self._newest(deadline)
            version, key = manifest.version, key_of(manifest)
            self.outcome = replace(self.outcome, version=version, run_id=manifest.epoch, key=key)
            self._stage(manifest, deadline)
            return
        manifest = self._find(info, deadline)
        if (manifest.version, manifest.epoch) != (info.version, info.run_id):
            raise StaleVersion(f"asked for {info.version} of {info.run_id!r}, found {manifest.version}")
        self._stage(manifest, deadline)

    def _stage(self, manifest: Manifest, deadline: Deadline) -> None:
        wanted = self.receiver.open(manifest, deadline.left())
        if wanted:
            self._fetch(manifest, wanted, deadline)
        self._verify(manifest, deadline)

    def _verify(self, manifest: Manifest, deadline: Deadline) -> None:
        self.receiver.verify()
        deadline.left()

    def _commit(self, manifest: Manifest) -> None:
        with activity("commit_weights") as about:
            describe(about, manifest)
            self.receiver.commit()
        version, key = manifest.version, key_of(manifest)
        self.outcome = replace(self._blank, version=version, run_id=manifest.epoch, key=key, installed=True)
        self._whole = whole_of(self._whole, manifest)
        self._ended()

    def _drop(self, reason: str) -> None:
        self.receiver.end(reason)
        self._ended()

    def _is_refused(self, check: Callable[[], None]) -> bool:
        """Raise what a trainer whose time is over is told; where nothing may raise, it is left without an answer. The
        update that is open is somebody else's: it goes on."""
        try:
            check()
        except (WrongEpoch, NotInitialized, UpdateInProgress) as error:
            log.warning("rank %s: %s", self.rank, error)
            if not self._records:
                raise
            return True
        return False

    def _expect_introduced(self) -> None:
        """A process that was started anew knows no trainer."""
        if not self._is_introduced:
            raise NotInitialized("no trainer was introduced here: init_transfer_engine first")

    def _expect_nothing(self) -> None:
        """Raise where the trainer counts on a commit, and there is nothing that could be committed."""
        last = self.receiver.last_session
        if self._is_called_off:
            return
        self._expect_introduced()
        if self._is_displaced:
            raise Aborted("another version was joined here before this one was committed")
        if last is None or last.end is UpdateEnd.COMMITTED:
            return
        raise error_from_code(self.outcome.code, self.outcome.text) if self.outcome.code else last.error()

    def _expect_met_last(self, run_id: str) -> None:
        """Raise once another run was introduced (`WrongEpoch`), or this one again, since `_connect` was called."""
        if self._introduction != self.receiver.num_introduced:
            self.receiver.expect_run(run_id)
            raise Aborted("the trainer was introduced again")

    def _not_open(self) -> TransferQueueError:
        """Why there is no update: who ended the last one."""
        last = self.receiver.last_session
        return (
            last.error() if last is not None and last.end is UpdateEnd.TAKEN_OVER else NotOpen("no update was started")
        )

    @contextmanager
    def _fault(self) -> Iterator[None]:
        """Whatever is raised within ends the update and is recorded, as a typed error. When somebody else ended it, it
        says who."""
        session = self.receiver.session
        try:
            yield
        except Exception as error:  # noqa: BLE001 where faults are recorded nothing may leave
            typed = as_typed(emptied(error))
            if session is not None and session.end in (UpdateEnd.ABORTED, UpdateEnd.TAKEN_OVER):
                typed = session.error()
            text = cut_text(str(typed))
            if not self.outcome.code:
                # Records that are kept would keep staged memory. What somebody called off is no fault.
                level = logging.INFO if self._is_wished(session, typed) else logging.WARNING
                log.log(level, "rank %s: %s", self.rank, text)
            self.outcome = replace(self.outcome, code=typed.code, text=text)
            if not isinstance(typed, UpdateInProgress):
                self.receiver.end(text, failed=True, only=session)
            self._ended()
            if not isinstance(typed, ServiceUnavailable):
                self._report(Deadline(REPORT_S))
            try:
                if not self._records:
                    raise typed from (None if typed is error else error)
            finally:
                del typed  # its traceback has this frame: both would stay until a collection

    def _is_wished(self, session: UpdateSession | None, error: TransferQueueError) -> bool:
        """Whether the update ended as somebody called it off, also before this call of it came."""
        if session is None:
            return self._is_called_off and isinstance(error, NotOpen)
        return session.end is UpdateEnd.ABORTED

    def _report(self, deadline: Deadline) -> None:
        try:
            self._tell(self.outcome, deadline)
        except (TransferQueueError, OSError) as error:
            log.info("rank %s: the trainer could not be told how it went: %s", self.rank, error)


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
        before, version=new.version, epoch=new.epoch, label=new.label, meta=new.meta, tensors=tensors, root=root,
        pieces=_pieces_of(before, new),
    )  # fmt: skip


def _pieces_of(before: Manifest, new: Manifest) -> PieceColumns | msgspec.UnsetType:
    """Those of `before`, with the digests of `new`, whose tensors are in the same order and pieces."""
    if before.pieces is msgspec.UNSET or new.pieces is msgspec.UNSET:
        return before.pieces
    names = {spec.name for spec in new.tensors}
    is_new = np.array([spec.name in names for spec in before.tensors], np.bool_)
    counts = np.where(before.parts.layout < 0, 0, before.parts.counts)
    digests = digest_rows(before.pieces.digests).copy()
    digests[np.repeat(is_new, counts)] = digest_rows(new.pieces.digests)
    return replace(before.pieces, digests=digests.tobytes())
