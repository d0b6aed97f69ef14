"""The receiving end of updates, for one target: what is live is always exactly one committed version.

    IDLE, INSTALLED or DIRTY -- open --> OPEN -- stage all --> STAGED -- verify --> READY -- commit --> INSTALLED

`abort`, the deadline of the update, or a failed check lead back to where it began, with the live weights untouched. A
commit that fails in the middle and cannot be undone leads to DIRTY: then nothing is served until a whole version is
committed. Versions rise within a run (one life of a trainer); a run that was followed by another (by a commit) is over.

The receiver owns the one open update (`session`). Who may have one is the run that was introduced last: that ends the
update of the run before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import torch
from msgspec.structs import replace

from transfer_queue.errors import (
    BadManifest,
    CommitFailed,
    DeadlineExceeded,
    Incomplete,
    InvalidInput,
    NotInitialized,
    NotOpen,
    StaleBase,
    StaleVersion,
    TransferQueueError,
    UpdateInProgress,
    WrongEpoch,
)
from transfer_queue.weights.receive.targets import READ_TIMEOUT_S, Broken, Live, Metas, Pause, Target
from transfer_queue.weights.receive.update_session import OpenVersion, Phase, SessionKey, UpdateEnd, UpdateSession
from transfer_queue.weights.version.digest import Buffer
from transfer_queue.weights.version.drafts import DRAFT, carries_draft
from transfer_queue.weights.version.manifest import Contents, Manifest, not_newer, root_of
from transfer_queue.weights.version.pieces import wanted_buckets
from transfer_queue.weights.version.plans import Wants
from transfer_queue.weights.version.sources import named_weights

ORDERED_S = 3600.0
AdapterSink = Callable[[Any, Manifest], None]  # (tensors, or what its `prepare` made of them; manifest)


@runtime_checkable
class Preparing(Protocol):
    """A sink that checks adapters before the commit."""

    def prepare(self, tensors: dict[str, torch.Tensor], manifest: Manifest) -> Any:
        """What the sink is to be called with. Nothing live changes; what it raises ends the update."""


class State(str, Enum):
    IDLE = "idle"
    OPEN = "open"
    STAGED = "staged"
    READY = "ready"
    COMMITTING = "committing"
    INSTALLED = "installed"
    DIRTY = "dirty"


class AdapterInfo(msgspec.Struct, frozen=True):
    version: int
    run_id: str
    root: str
    base_root: str | None

    @property
    def epoch(self) -> str:
        """The run, by its older name."""
        return self.run_id


class VersionInfo(msgspec.Struct, frozen=True):
    """What is live: version None before the first commit. `adapters` are by label."""

    version: int | None = None
    run_id: str = ""
    root: str = ""
    label: str = ""
    adapters: dict[str, AdapterInfo] = {}
    dirty: bool = False

    @property
    def epoch(self) -> str:
        """The run, by its older name."""
        return self.run_id

    @property
    def outdated(self) -> tuple[str, ...]:
        """Labels of the adapters that were made for other weights than these."""
        return tuple(label for label, one in self.adapters.items() if one.base_root not in (None, self.root))


class Verified(NamedTuple):
    version: int
    root: str
    num_tensors: int
    nbytes: int


class CommitInfo(NamedTuple):
    """`pause_s`: how long no forward pass could run. `drain_s`: how long new ones waited for others to end before."""

    version: int
    root: str
    pause_s: float
    drain_s: float


class Receiver:
    """One target's updates, one at a time. Thread-safe.

    `adapter` takes adapters, while nobody reads: (tensors, manifest). It copies what it keeps. When it raises, the
    adapter before must be in use still; `Broken`: none is, and the label counts as not there. With a method `prepare`
    (`Preparing`) it is given what that made. No tensors: the adapter is removed. `clock` gives seconds for the
    deadlines of updates. `answers`: whether somebody answers requests with what is installed.
    """

    answers = True

    def __init__(
        self, target: Target, *, adapter: AdapterSink | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not isinstance(target, Target):
            raise InvalidInput(f"a target is expected, such as Swap(module), got a {type(target).__qualname__}")
        self._target = target
        self._adapter = adapter
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # a session has ended
        self._session: UpdateSession | None = None  # the one that began last, also when it ended
        self._num_sessions = 0
        self._run = ""  # that was introduced last
        self._begun = 0.0  # by its trainer's clock
        self.num_introduced = 0  # how often a run was
        self._followed: dict[str, str] = {}  # runs that another was introduced after, and which
        self._contents: Contents = {}
        self._mixed: set[str] = set()  # names that a failed commit left in an unknown state
        self._committed_run: str | None = None
        self._past: set[str] = set()  # runs whose versions are over, as another one committed
        self._removed: dict[str, AdapterInfo] = {}  # by label: older versions do not bring them back
        target.tag = VersionInfo()

    @property
    def state(self) -> State:
        session = self.session
        opened = None if session is None else session.opened
        if opened is not None:
            return State(opened.phase.value)
        info = self.installed()
        return State.DIRTY if info.dirty else State.IDLE if info.version is None else State.INSTALLED

    # whose update it is

    @property
    def session(self) -> UpdateSession | None:
        """The open update."""
        with self._lock:
            late = self._expire()
            found = self._open_session()
        _call(late)
        return found

    @property
    def last_session(self) -> UpdateSession | None:
        """The update that is open, or was last."""
        return self.session or self._session

    @property
    def run_id(self) -> str:
        """The run that was introduced last."""
        return self._run

    def introduce(self, run_id: str, timeout_s: float = 0.0, begun: float = 0.0) -> int:
        """From now on updates are this run's ("": of a trainer without a name, the run stays). An open update ends.

        A commit is waited for, `timeout_s` at most (`UpdateInProgress`). `WrongEpoch` for a run that another one was
        introduced after, or that `begun` (seconds since 1970, 0: not known) before the one that is here: its call was
        late. Times further apart than `ORDERED_S` order nothing: clocks are wrong. Repeatable. Returns its number.
        """
        with self._changed:
            self._expect_in_order(run_id, begun)
            if not self._changed.wait_for(lambda: not self._is_committing(), timeout_s):
                raise UpdateInProgress("a version is being committed")
            self._expect_current(run_id)
            before = self._run
            taken = bool(run_id and before and run_id != before)
            if taken:
                self._followed[before] = run_id
            self._run, self._begun = run_id or before, begun or self._begun
            self.num_introduced = number = self.num_introduced + 1
            why = f"run {run_id!r} took over" if taken else "the trainer was introduced again"
            woken = self._close(UpdateEnd.TAKEN_OVER if taken else UpdateEnd.ABORTED, why)
        _call(woken)
        return number

    def would_refuse(self, run_id: str, begun: float = 0.0) -> bool:
        """Whether `introduce` would, as that run is over."""
        with self._lock:
            try:
                self._expect_in_order(run_id, begun)
            except WrongEpoch:
                return True
        return False

    def expect_run(self, run_id: str) -> None:
        """`WrongEpoch` for a run that another one took over from, `NotInitialized` for one that was not introduced. ""
        does not say whose. Changes nothing."""
        with self._lock:
            self._expect_current(run_id)
            if run_id and self._run and run_id != self._run:
                raise NotInitialized(f"run {run_id!r} was not introduced here, updates are those of {self._run!r}")

    def expect_not_over(self, run_id: str) -> None:
        """`WrongEpoch` for a run that another one took over from."""
        with self._lock:
            self._expect_current(run_id)

    def begin(self, timeout_s: float | None = None) -> UpdateSession:
        """The session of the run's next update: one in which nothing was opened yet, or a new one, which ends the one
        before. `UpdateInProgress` while that commits."""
        with self._lock:
            woken = self._expire()
            found = self._open_session()
            if found is None or found.opened is not None:
                if self._is_committing():
                    raise UpdateInProgress("a version is being committed")
                woken += self._close(UpdateEnd.ABORTED, "another update started")
                found = self._new_session(self._run, timeout_s)
        _call(woken)
        return found

    def end(self, reason: str, *, failed: bool = False, only: UpdateSession | None = None) -> bool:
        """End the open update (`only`: if it is that one); the old weights serve on. Whether there was one.
        `UpdateInProgress` when it is being committed."""
        with self._lock:
            woken = self._expire()
            session = self._open_session()
            found = session is not None and only in (None, session)
            if found and self._is_committing():
                raise UpdateInProgress(f"too late to abort ({reason}): the update is being committed")
            if found:
                woken += self._close(UpdateEnd.FAILED if failed else UpdateEnd.ABORTED, reason)
        _call(woken)
        return found

    def installed(self) -> VersionInfo:
        """What is live now. Never blocks."""
        info: VersionInfo = self._target.tag
        return replace(info, dirty=True) if self._target.broken else info

    @contextmanager
    def reading(self, timeout_s: float = READ_TIMEOUT_S) -> Iterator[Live]:
        """For a forward pass: the module and its `VersionInfo` (`tag`), which does not change within. May be nested.

        Not to be held over an `await`: all tasks of a loop are one thread, which may enter again while a commit waits,
        so that tasks that overlap never let it in. Nor over a `yield` in one of several generators of a thread: what
        is entered meanwhile sees the version of the first, as if nested.

        `CommitFailed` while the receiver is dirty; `DeadlineExceeded` when a commit takes longer than `timeout_s`.
        """
        with self._target.reading(timeout_s) as live:
            yield live

    def open(self, manifest: Manifest, timeout_s: float) -> list[int]:
        """Begin an update that has to be committed within `timeout_s`; the buckets to stage.

        Opening the same manifest again goes on where it was. None are to be staged when the version is installed
        already: then the commit does nothing. Raises `UpdateInProgress`, or what is wrong with the version
        (`WrongEpoch`, `StaleVersion`, `StaleBase`, `UnknownTensor`, `ShapeMismatch`, `Incomplete`, `BadManifest`).
        """
        with self._lock:
            woken = self._expire()
            session = self._open_session()
            if session is None or session.opened is None:
                repeated = self._is_repeated(manifest)
                contents = self._contents if repeated else self._result(manifest)
                wanted = None if repeated else self._wanted(manifest, contents)
                opened = OpenVersion(manifest, contents, repeated, wanted, self._target.stages_on_host)
                session = session or self._new_session(manifest.epoch, timeout_s)
                session.opened = opened
                session.limit(timeout_s)
            opened = session.opened
            if opened.manifest != manifest:
                raise UpdateInProgress(f"version {opened.manifest.version} is {opened.phase.value}")
            missing = [] if opened.repeated else opened.staging.missing
        _call(woken)
        return missing

    def stage(self, bucket: int, data: Buffer, lend: bool = False, vouched: bool = False) -> None:
        """Take the bytes of a bucket: in any order, from any thread; one that is here already is ignored.

        They are copied, unless lent: then the caller leaves that memory (writable, on the CPU) alone until the update
        ends, and with `Swap` for good. `vouched`: lent memory is the very one that the digests were made of, and nobody
        can have written it since; it is not read again. `DigestMismatch`: the bytes were dropped, send them again.
        """
        session, opened = self._current()
        if not opened.repeated:
            opened.staging.stage(bucket, data, lend, vouched)
        self._current(session)

    def staged(self, key: str, bucket: int) -> torch.Tensor | None:
        """The verified bytes of a bucket of the open version with this manifest's key, for others to read; None where
        it is not here (any more). Nobody writes them before the update ends."""
        with self._lock:
            session = self._open_session()
            opened = None if session is None else session.opened
            if opened is None or opened.committing or opened.manifest.key != key:
                return None
            return opened.staging.bucket(bucket)

    def verify(self) -> Verified:
        """Check that all is here, apply differences to copies, and prepare the commit. May be repeated.

        `Incomplete` leaves the update open; any other error aborts it.
        """
        session, opened = self._current()
        with opened.verifying:
            if not opened.repeated and not opened.is_prepared:
                missing = opened.staging.missing
                if missing:
                    raise Incomplete(f"{len(missing)} buckets are missing, such as {missing[0]}")
                try:
                    opened.prepared = self._prepare(opened)
                    opened.is_prepared = True
                except BaseException as error:  # an interrupt ends the update too
                    self._over(session, opened, reason=str(error))
                    raise
        self._current(session)
        manifest = opened.manifest
        return Verified(manifest.version, manifest.root, len(manifest.tensors), manifest.nbytes)

    def commit(self, timeout_s: float | None = None) -> CommitInfo:
        """Make the verified version live: all of it, or none.

        Waits for forward passes to end, at most `timeout_s` (default: until the update's deadline). `DeadlineExceeded`
        leaves it ready to be committed again, if there is time left. `CommitFailed`: the update is over, and the old
        weights live, unless `installed().dirty`. `NotOpen` before `verify`.
        """
        session, opened = self._begin_commit()
        left_s = session.left_s()
        wait_s = left_s if timeout_s is None else min(left_s, timeout_s)
        manifest = opened.manifest
        try:
            pause = Pause(0.0, 0.0) if opened.repeated else self._install(opened, wait_s)
        except (DeadlineExceeded, InvalidInput):
            with self._changed:
                opened.committing = False
                self._changed.notify_all()
                woken = self._expire()
            _call(woken)
            raise
        except BaseException as error:  # an interrupt may have come when the version was live
            live, mixed = self._is_live(manifest), isinstance(error, Broken)
            self._over(session, opened, committed=live, mixed=mixed, reason=str(error))
            raise
        self._over(session, opened, committed=True)
        return CommitInfo(manifest.version, manifest.root, *pause)

    def abort(self, reason: str) -> None:
        """Drop the version that was opened, if there is one. `UpdateInProgress` when it is being committed."""
        session = self._session
        if session is not None and session.opened is not None:
            self.end(reason, only=session)

    def flush(self, timeout_s: float) -> None:
        """Return once all that was committed is where it is to be: it is, unless something else writes it."""

    def scramble(self, timeout_s: float) -> None:
        """Overwrite the live weights with noise: dirty until a version of all of them is committed. A check that
        versions replace everything; `UpdateInProgress` when an update is open."""
        with self._lock:
            woken = self._expire()
            session = self._open_session()
            if session is not None and session.opened is not None:
                raise UpdateInProgress(f"version {session.opened.manifest.version} is {session.phase.value}")
            self._target.scramble(timeout_s)
            with self._target.inspecting(timeout_s) as module:
                self._mixed |= set(named_weights(module))
        _call(woken)

    @contextmanager
    def inspecting(self, timeout_s: float = READ_TIMEOUT_S) -> Iterator[torch.nn.Module]:
        """The live module, of which no weight changes within, whatever it holds: to look at, not to serve from."""
        with self._target.inspecting(timeout_s) as module:
            yield module

    def wants(self, tensors: Metas) -> Wants | None:
        """What of these this target would take (`Target.wanted`)."""
        return self._target.wanted(tensors)

    # what may be installed

    def _wanted(self, m: Manifest, contents: Contents) -> list[int] | None:
        """The buckets of the version that are needed here; None: all. `contents`: what it leads to."""
        if m.kind == "adapter":
            return None
        wants = self._target.wanted({name: entry[:2] for name, entry in contents.items()})
        return None if wants is None else wanted_buckets(m, wants)

    def _is_repeated(self, m: Manifest) -> bool:
        """Whether it is installed already. Raises when its run or version is over."""
        if m.epoch in self._past:
            raise WrongEpoch(f"run {m.epoch!r} is over, {self._committed_run!r} came after it")
        info = self.installed()
        now = info.adapters.get(m.label, self._removed.get(m.label)) if m.kind == "adapter" else info
        if now is None or now.version is None or now.run_id != m.epoch or m.version > now.version:
            return False
        if (m.version, m.root) != (now.version, now.root):
            raise StaleVersion(not_newer(m.version, m.epoch, now.version))
        return m.kind == "adapter" or not (info.dirty or self._target.dropped)

    def _result(self, m: Manifest) -> Contents:
        """What the model will hold; raises when that cannot be reached from here or does not fit."""
        if m.kind == "adapter":
            return self._check_adapter(m)
        contents = m.contents()
        if m.kind == "delta":
            self._check_base(m)
            contents = self._onto_base(m, contents)
        elif not self._mixed <= set(contents):
            raise Incomplete(f"the weights are a mixture, and the version lacks {min(self._mixed - set(contents))!r}")
        self._target.check(contents)
        return contents

    def _check_adapter(self, m: Manifest) -> Contents:
        if self._adapter is None:
            raise InvalidInput("this receiver takes no adapters")
        info = self.installed()
        if m.base_root is not None and (info.dirty or m.base_root != info.root):
            raise StaleBase(f"the adapter {m.label!r} is for other weights than version {info.version}")
        return self._contents

    def _check_base(self, m: Manifest) -> None:
        info = self.installed()
        same_run = info.run_id == m.epoch
        if not info.dirty and m.base_root == info.root and (not same_run or m.base == info.version):
            return
        if info.version is not None and not same_run:
            raise WrongEpoch(f"run {m.epoch!r} has to begin with a full version, or a delta on what is installed")
        raise StaleBase(f"version {m.version} is a delta on {m.base}, installed is {info.version}")

    def _onto_base(self, m: Manifest, changed: Contents) -> Contents:
        for name, entry in changed.items():
            old = self._contents.get(name)
            if old is None or old[:2] != entry[:2]:
                raise BadManifest(f"the delta has a {name!r} that its base does not have like that")
        contents = {**self._contents, **changed}
        if root_of(contents) != m.root:
            raise BadManifest("the delta does not lead to its root")
        if m.parts.needs_base:
            self._target.bases()
        return contents

    # steps of an update

    def _current(self, expected: UpdateSession | None = None) -> tuple[UpdateSession, OpenVersion]:
        """The open update (which has to be `expected`)."""
        with self._lock:
            woken = self._expire()
            session = self._open_session()
            if expected is not None and session is not expected:
                error = _gone(expected)
            elif session is None or session.opened is None:
                error = _gone(self._session if session is None else None)
            else:
                return session, session.opened
        _call(woken)
        raise error

    def _open_session(self) -> UpdateSession | None:
        return None if self._session is None or self._session.end is not None else self._session

    def _new_session(self, run_id: str, timeout_s: float | None) -> UpdateSession:
        self._num_sessions += 1
        self._session = UpdateSession(SessionKey(run_id, self._num_sessions), self._clock, timeout_s)
        return self._session

    def _is_committing(self) -> bool:
        session = self._open_session()
        return session is not None and session.phase is Phase.COMMITTING

    def _close(self, end: UpdateEnd, reason: str) -> list[Callable[[], object]]:
        """End the open session, with the lock. Returns what to call without it."""
        session = self._open_session()
        if session is None:
            return []
        self._changed.notify_all()
        return session.close(end, reason)

    def _expire(self) -> list[Callable[[], object]]:
        session = self._open_session()
        if session is None or self._is_committing() or session.left_s() > 0:
            return []
        return self._close(UpdateEnd.LATE, "its deadline passed")

    def _expect_in_order(self, run_id: str, begun: float) -> None:
        if begun and self._begun and run_id != self._run and 0 < (late_s := self._begun - begun) < ORDERED_S:
            raise WrongEpoch(f"run {run_id!r} is over: {self._run!r} took over, by the clocks {late_s:.0f} s younger")
        self._expect_current(run_id)

    def _expect_current(self, run_id: str) -> None:
        if run_id in self._followed:
            raise WrongEpoch(f"run {run_id!r} is over: {self._followed[run_id]!r} took over")

    def _prepare(self, opened: OpenVersion) -> Any:
        tensors = opened.staging.tensors(self._target)
        if opened.manifest.kind != "adapter":
            return self._target.prepare(tensors)
        sink = self._adapter
        return sink.prepare(tensors, opened.manifest) if isinstance(sink, Preparing) else tensors

    def _begin_commit(self) -> tuple[UpdateSession, OpenVersion]:
        session, opened = self._current()
        with self._lock:
            if self._open_session() is not session or opened.phase not in (Phase.READY, Phase.COMMITTING):
                raise NotOpen("the update is not verified")
            if opened.committing:
                raise UpdateInProgress("the update is being committed")
            opened.committing = True
            return session, opened

    def _install(self, opened: OpenVersion, timeout_s: float) -> Pause:
        m, info = opened.manifest, self._target.tag
        if m.kind != "adapter":
            kept = dict(info.adapters)
            if DRAFT in kept and carries_draft(opened.contents):
                del kept[DRAFT]  # this version's took its place
            new = VersionInfo(m.version, m.epoch, m.root, m.label, kept)
            return self._target.commit(opened.prepared, new, timeout_s)
        assert self._adapter is not None
        with self._target.exclusive(timeout_s) as drain_s:
            start = time.monotonic()
            try:
                self._adapter(opened.prepared, m)
            except Exception as error:  # the server's own sink may raise anything
                if isinstance(error, Broken):  # neither this one is there, nor the one before
                    others = {label: one for label, one in info.adapters.items() if label != m.label}
                    self._target.tag = replace(info, adapters=others)
                raise CommitFailed(f"the adapter {m.label!r} was not taken: {error!r}") from error
            one = AdapterInfo(m.version, m.epoch, m.root, m.base_root)
            kept = {label: other for label, other in info.adapters.items() if label != m.label}
            (kept if m.tensors else self._removed)[m.label] = one
            self._target.tag = replace(info, adapters=kept)
            return Pause(time.monotonic() - start, drain_s)

    def _is_live(self, m: Manifest) -> bool:
        """An interrupt may have come when it was."""
        info = self.installed()
        same = (info.version, info.run_id, info.root) == (m.version, m.epoch, m.root)
        return same and m.kind != "adapter" and not info.dirty

    def _over(
        self,
        session: UpdateSession,
        opened: OpenVersion,
        *,
        committed: bool = False,
        mixed: bool = False,
        reason: str = "",
    ) -> None:
        """The update came to its end, one way or the other."""
        woken: list[Callable[[], object]] = []
        with self._lock:
            if self._open_session() is session:
                woken = self._close(UpdateEnd.COMMITTED if committed else UpdateEnd.FAILED, reason)
            if mixed:
                self._mixed |= set(opened.manifest.contents())
            if committed and not opened.repeated:
                run_id = opened.manifest.epoch
                self._contents = opened.contents
                self._mixed = self._mixed if opened.manifest.kind == "adapter" else set()
                if self._committed_run not in (None, run_id):
                    self._past.add(str(self._committed_run))
                self._committed_run = run_id
        _call(woken)


def _call(woken: list[Callable[[], object]]) -> None:
    for function in woken:
        function()


def _gone(session: UpdateSession | None) -> TransferQueueError:
    """What a step is told whose session is over."""
    if session is None:
        return NotOpen("no update is open")
    if session.end in (UpdateEnd.LATE, UpdateEnd.TAKEN_OVER):
        return session.error()
    return NotOpen(f"no update is open: the last one was {session.end.value if session.end else 'replaced'}")
