"""The receiving end of updates, for one target: what is live is always exactly one committed version.

    IDLE, INSTALLED or DIRTY -- open --> OPEN -- stage all --> STAGED -- verify --> READY -- commit --> INSTALLED

`abort`, the deadline of the update, or a failed check lead back to where it began, with the live weights untouched. A
commit that fails in the middle and cannot be undone leads to DIRTY: then nothing is served until a whole version is
committed. Versions rise within an epoch (one life of a trainer); an epoch that was followed by another is over.
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
    NotOpen,
    StaleBase,
    StaleVersion,
    UpdateInProgress,
    WrongEpoch,
)
from transfer_queue.weights.digest import Buffer
from transfer_queue.weights.manifest import Contents, Manifest, root_of
from transfer_queue.weights.sources import named_weights
from transfer_queue.weights.staging import Staging
from transfer_queue.weights.targets import READ_TIMEOUT_S, Broken, Live, Pause, Target

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
    epoch: str
    root: str
    base_root: str | None


class VersionInfo(msgspec.Struct, frozen=True):
    """What is live: version None before the first commit. `adapters` are by label."""

    version: int | None = None
    epoch: str = ""
    root: str = ""
    label: str = ""
    adapters: dict[str, AdapterInfo] = {}
    dirty: bool = False

    @property
    def outdated(self) -> tuple[str, ...]:
        """Labels of the adapters that were made for other weights than these."""
        return tuple(label for label, one in self.adapters.items() if one.base_root not in (None, self.root))


class Report(NamedTuple):
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


class _Update:
    """An open update. `contents` is what the model will hold; `repeated` when it holds that version already."""

    def __init__(self, manifest: Manifest, contents: Contents, repeated: bool, deadline: float) -> None:
        self.staging = Staging(manifest)
        self.manifest = manifest
        self.contents = contents
        self.repeated = repeated
        self.deadline = deadline
        self.verifying = threading.Lock()
        self.prepared: Any = None
        self.committing = False

    @property
    def state(self) -> State:
        if self.committing:
            return State.COMMITTING
        if self.repeated or self.prepared is not None:
            return State.READY
        return State.OPEN if self.staging.missing else State.STAGED


class Receiver:
    """One target's updates, one at a time. Thread-safe.

    `adapter` takes adapters, while nobody reads: (tensors, manifest). It copies what it keeps. When it raises, the
    adapter before must be in use still. With a method `prepare` (`Preparing`) it is given what that made. No tensors:
    the adapter is removed. `clock` gives seconds for the deadlines of updates.
    """

    def __init__(
        self, target: Target, *, adapter: AdapterSink | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._target = target
        self._adapter = adapter
        self._clock = clock
        self._lock = threading.Lock()
        self._update: _Update | None = None
        self._contents: Contents = {}
        self._mixed: set[str] = set()  # names that a failed commit left in an unknown state
        self._epoch: str | None = None
        self._past: set[str] = set()
        self._removed: dict[str, AdapterInfo] = {}  # by label: older versions do not bring them back
        target.tag = VersionInfo()

    @property
    def state(self) -> State:
        with self._lock:
            self._expire()
            if self._update is not None:
                return self._update.state
        info = self.installed()
        return State.DIRTY if info.dirty else State.IDLE if info.version is None else State.INSTALLED

    def installed(self) -> VersionInfo:
        """What is live now. Never blocks."""
        info: VersionInfo = self._target.tag
        return replace(info, dirty=True) if self._target.broken else info

    @contextmanager
    def reading(self, timeout_s: float = READ_TIMEOUT_S) -> Iterator[Live]:
        """For a forward pass: the module and its `VersionInfo` (`tag`), which does not change within. May be nested.

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
            self._expire()
            if self._update is None:
                repeated = self._is_repeated(manifest)
                contents = self._contents if repeated else self._result(manifest)
                self._update = _Update(manifest, contents, repeated, self._clock() + timeout_s)
            elif self._update.manifest != manifest:
                raise UpdateInProgress(f"version {self._update.manifest.version} is {self._update.state.value}")
            return [] if self._update.repeated else self._update.staging.missing

    def stage(self, bucket: int, data: Buffer, lend: bool = False, vouched: bool = False) -> None:
        """Take the bytes of a bucket: in any order, from any thread; one that is here already is ignored.

        They are copied, unless lent: then the caller leaves that memory (writable, on the CPU) alone until the update
        ends, and with `Swap` for good. `vouched`: lent memory is the very one that the digests were made of, and nobody
        can have written it since; it is not read again. `DigestMismatch`: the bytes were dropped, send them again.
        """
        update = self._current()
        if not update.repeated:
            update.staging.stage(bucket, data, lend, vouched)
        self._current(update)

    def verify(self) -> Report:
        """Check that all is here, apply differences to copies, and prepare the commit. May be repeated.

        `Incomplete` leaves the update open; any other error aborts it.
        """
        update = self._current()
        with update.verifying:
            if not update.repeated and update.prepared is None:
                missing = update.staging.missing
                if missing:
                    raise Incomplete(f"{len(missing)} buckets are missing, such as {missing[0]}")
                try:
                    update.prepared = self._prepare(update)
                except BaseException as error:
                    self._end(update)
                    raise error
        self._current(update)
        manifest = update.manifest
        return Report(manifest.version, manifest.root, len(manifest.tensors), manifest.nbytes)

    def commit(self, timeout_s: float | None = None) -> CommitInfo:
        """Make the verified version live: all of it, or none.

        Waits for forward passes to end, at most `timeout_s` (default: until the update's deadline). `DeadlineExceeded`
        leaves it ready to be committed again, if there is time left. `CommitFailed`: the update is over, and the old
        weights live, unless `installed().dirty`. `NotOpen` before `verify`.
        """
        update, left_s = self._begin_commit()
        wait_s = left_s if timeout_s is None else min(left_s, timeout_s)
        manifest = update.manifest
        try:
            pause = Pause(0.0, 0.0) if update.repeated else self._install(update, wait_s)
        except (DeadlineExceeded, InvalidInput):
            with self._lock:
                update.committing = False
                self._expire()
            raise
        except BaseException as error:
            self._end(update, committed=self._is_live(manifest), mixed=isinstance(error, Broken))
            raise error
        self._end(update, committed=True)
        return CommitInfo(manifest.version, manifest.root, *pause)

    def abort(self, reason: str) -> None:
        """Drop the open update, if there is one. `UpdateInProgress` when it is being committed."""
        with self._lock:
            if self._update is not None and self._update.committing:
                raise UpdateInProgress(f"too late to abort ({reason}): the update is being committed")
            self._update = None

    def scramble(self, timeout_s: float) -> None:
        """Overwrite the live weights with noise: dirty until a version of all of them is committed. A check that
        versions replace everything; `UpdateInProgress` when an update is open."""
        with self._lock:
            self._expire()
            if self._update is not None:
                raise UpdateInProgress(f"version {self._update.manifest.version} is {self._update.state.value}")
            self._target.scramble(timeout_s)
            with self._target.inspecting(timeout_s) as module:
                self._mixed |= set(named_weights(module))

    @contextmanager
    def inspecting(self, timeout_s: float = READ_TIMEOUT_S) -> Iterator[torch.nn.Module]:
        """The live module, of which no weight changes within, whatever it holds: to look at, not to serve from."""
        with self._target.inspecting(timeout_s) as module:
            yield module

    # what may be installed

    def _is_repeated(self, m: Manifest) -> bool:
        """Whether it is installed already. Raises when its epoch or version is over."""
        if m.epoch in self._past:
            raise WrongEpoch(f"epoch {m.epoch!r} is over, {self._epoch!r} came after it")
        info = self.installed()
        now = info.adapters.get(m.label, self._removed.get(m.label)) if m.kind == "adapter" else info
        if now is None or now.version is None or now.epoch != m.epoch or m.version > now.version:
            return False
        if (m.version, m.root) != (now.version, now.root):
            raise StaleVersion(f"version {m.version} does not follow {now.version}")
        return m.kind == "adapter" or not info.dirty

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
        same_epoch = info.epoch == m.epoch
        if not info.dirty and m.base_root == info.root and (not same_epoch or m.base == info.version):
            return
        if info.version is not None and not same_epoch:
            raise WrongEpoch(f"epoch {m.epoch!r} has to begin with a full version, or a delta on what is installed")
        raise StaleBase(f"version {m.version} is a delta on {m.base}, installed is {info.version}")

    def _onto_base(self, m: Manifest, changed: Contents) -> Contents:
        for name, entry in changed.items():
            old = self._contents.get(name)
            if old is None or old[:2] != entry[:2]:
                raise BadManifest(f"the delta has a {name!r} that its base does not have like that")
        contents = {**self._contents, **changed}
        if root_of(contents) != m.root:
            raise BadManifest("the delta does not lead to its root")
        if any(spec.delta for spec in m.tensors):
            self._target.bases()
        return contents

    # steps of an update

    def _current(self, expected: _Update | None = None) -> _Update:
        """The open update (which has to be `expected`)."""
        with self._lock:
            if self._expire():
                raise DeadlineExceeded("the update was aborted: its deadline passed")
            if self._update is None or (expected is not None and self._update is not expected):
                raise NotOpen("no update is open" if expected is None else "the update was aborted")
            return self._update

    def _expire(self) -> bool:
        if self._update is None or self._update.committing or self._clock() < self._update.deadline:
            return False
        self._update = None
        return True

    def _prepare(self, update: _Update) -> Any:
        tensors = update.staging.tensors(self._target)
        if update.manifest.kind != "adapter":
            return self._target.prepare(tensors)
        sink = self._adapter
        return sink.prepare(tensors, update.manifest) if isinstance(sink, Preparing) else tensors

    def _begin_commit(self) -> tuple[_Update, float]:
        update = self._current()
        with self._lock:
            if self._update is not update or update.state not in (State.READY, State.COMMITTING):
                raise NotOpen("the update is not verified")
            if update.committing:
                raise UpdateInProgress("the update is being committed")
            update.committing = True
            return update, update.deadline - self._clock()

    def _install(self, update: _Update, timeout_s: float) -> Pause:
        m, info = update.manifest, self._target.tag
        if m.kind != "adapter":
            new = VersionInfo(m.version, m.epoch, m.root, m.label, info.adapters)
            return self._target.commit(update.prepared, new, timeout_s)
        assert self._adapter is not None
        with self._target.exclusive(timeout_s) as drain_s:
            start = time.monotonic()
            try:
                self._adapter(update.prepared, m)
            except Exception as error:
                raise CommitFailed(f"the adapter {m.label!r} was not taken: {error!r}") from error
            one = AdapterInfo(m.version, m.epoch, m.root, m.base_root)
            kept = {label: other for label, other in info.adapters.items() if label != m.label}
            (kept if m.tensors else self._removed)[m.label] = one
            self._target.tag = replace(info, adapters=kept)
            return Pause(time.monotonic() - start, drain_s)

    def _is_live(self, m: Manifest) -> bool:
        """An interrupt may have come when it was."""
        info = self.installed()
        same = (info.version, info.epoch, info.root) == (m.version, m.epoch, m.root)
        return same and m.kind != "adapter" and not info.dirty

    def _end(self, update: _Update, *, committed: bool = False, mixed: bool = False) -> None:
        with self._lock:
            if self._update is update:
                self._update = None
            if mixed:
                self._mixed |= set(update.manifest.contents())
            if committed and not update.repeated:
                self._contents = update.contents
                self._mixed = self._mixed if update.manifest.kind == "adapter" else set()
                if self._epoch not in (None, update.manifest.epoch):
                    self._past.add(str(self._epoch))
                self._epoch = update.manifest.epoch
