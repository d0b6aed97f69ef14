"""What a trainer may ask of an inference server, under vLLM's method names: weight updates, pauses, versions, checks.

    not initialised -- init --> CLOSED -- start --> OPEN -- update... finish --> CLOSED
                                   ^------- a failed update or finish, abort, deadline ----'

`Control` is for threads (`LLM`-like), `control_async.AsyncControl` for an event loop (`AsyncLLM`-like). An engine
moves the bytes; the receiver makes them live. Steps out of order are refused, and change nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias

from transfer_queue.errors import (
    Aborted,
    CommitFailed,
    DeadlineExceeded,
    InvalidInput,
    NotInitialized,
    NotOpen,
    NotSupported,
    TransferQueueError,
    UpdateInProgress,
)
from transfer_queue.weights.checker import Comparison, checksums, compare
from transfer_queue.weights.gate import Generation, Mode
from transfer_queue.weights.receiver import Receiver, State, VersionInfo

DEFAULT_LABEL = "default"  # before the first commit
UPDATE_TIMEOUT_S = 600.0
PAUSE_TIMEOUT_S = 120.0
CHECK_TIMEOUT_S = 60.0  # to wait for a commit to end before reading the weights
UpdateInfo: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]]"


class Engine(Protocol):
    """Moves the bytes of an update into a receiver; raises typed errors. It has deadlines of its own."""

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to the trainer; again after `shutdown`, or for another trainer."""

    def start_weight_update(self) -> None:
        """Forget what is left of an update before, and begin one."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage a part of the update, or all of it."""

    def finish_weight_update(self) -> None:
        """Verify and commit: all or nothing."""

    def shutdown(self) -> None:
        """Give back what `init_transfer_engine` took."""


class Status(NamedTuple):
    installed: VersionInfo
    label: str
    state: State
    initialised: bool
    updating: bool
    paused: bool


class _Bytes(NamedTuple):
    """Names what is installed."""

    epoch: str
    version: int | None
    root: str


class Control:
    """One server's control surface. Thread-safe; calls that move weights are refused while another one runs.

    `generation` None: pauses are not supported. `rank` chooses from updates that come as a list by rank.
    `update_timeout_s`: an update that was started and not finished until then is over. `allow_reset`: permit
    `reset_weights`, after which nothing is served until the next version.
    """

    def __init__(
        self,
        engine: Engine | None,
        receiver: Receiver,
        *,
        generation: Generation | None = None,
        rank: int = 0,
        world_size: int = 1,
        data_parallel_size: int = 1,
        update_timeout_s: float = UPDATE_TIMEOUT_S,
        pause_timeout_s: float = PAUSE_TIMEOUT_S,
        allow_reset: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._generation = generation
        self._rank = rank
        self._world_size = world_size
        self._data_parallel_size = data_parallel_size
        self._update_timeout_s = update_timeout_s
        self._pause_timeout_s = pause_timeout_s
        self._allow_reset = allow_reset
        self._clock = clock
        self._busy = threading.Lock()
        self._checking = threading.Lock()
        self._initialised = False
        self._deadline: float | None = None  # of the open update
        self._abort_reason = ""  # set by an abort that came while another call ran
        self._named: tuple[_Bytes, str] | None = None  # the label, and what it was given to
        self._naming: tuple[_Bytes, str] | None = None  # what a commit that runs replaces, and the label after it

    def confine(self, root: str = "") -> None:
        """From now on calls come over a network: see `engines.base.Engine.confine`. An engine without it is left."""
        confine = getattr(self._engine, "confine", None)
        if confine is not None:
            confine(root)

    # updates

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Raises `UpdateInProgress` when an update is open, or what the engine has against `init_info`."""
        with self._turn() as engine, _caller_errors("init_info"):
            self._expect_closed()
            self._initialised = False
            engine.init_transfer_engine(dict(_inner(init_info, "init_info")))
            self._initialised = True

    def start_weight_update(self) -> None:
        """Open an update. `UpdateInProgress` when one is open, `NotInitialized` before init."""
        with self._turn() as engine:
            if not self._initialised:
                raise NotInitialized("the weight transfer engine is not initialised")
            self._expect_closed()
            self._abort_reason = ""
            engine.start_weight_update()
            self._expect_wanted()
            self._deadline = self._clock() + self._update_timeout_s

    def start_draft_weight_update(self) -> None:
        """Always `NotSupported`: there is one model."""
        raise NotSupported("this server has no draft model")

    def update_weights(self, update_info: UpdateInfo) -> None:
        """Take a part of the update. Any error ends it: the old weights serve on. `NotOpen` without a start."""
        with self._turn() as engine, self._step(), _caller_errors("update_info"):
            engine.update_weights(self._part(_inner(update_info, "update_info")))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit, and label what is live now `weight_version` (None: the version's own label, or its number).

        `DeadlineExceeded` when requests did not let go of the old weights in time: the update stays open if that may
        be tried again. Any other error ends it.
        """
        with self._turn() as engine, self._step():
            before, was_open = self._bytes(), self._is_open()
            if weight_version is not None:
                self._naming = (before, weight_version)
            engine.finish_weight_update()
            # An engine may finish without a commit, when the trainer gave the update up: that gives no label.
            committed = self._bytes() != before or (was_open and not self._is_open())
            if weight_version is not None and committed:
                self._named = (self._bytes(), weight_version)
            self._deadline = None

    def abort_weight_update(self, reason: str = "somebody asked to") -> bool:
        """End the open update; the old weights serve on. Whether there was one. While another call runs, that or the
        next one ends with `Aborted`. `UpdateInProgress` when it is being committed."""
        self._receiver.abort(reason)
        if not self._busy.acquire(blocking=False):
            self._abort_reason = reason
            return True
        try:
            was_open = self._deadline is not None
            self._drop(reason)
        finally:
            self._busy.release()
        return was_open

    def shutdown_weight_transfer_engine(self) -> None:
        """Let go of the trainer. `UpdateInProgress` when an update is open."""
        with self._turn() as engine:
            self._expect_closed()
            if self._initialised:
                self._initialised = False
                engine.shutdown()

    # versions

    def get_weight_version(self) -> str:
        """The label of what is live: never of other bytes. `CommitFailed` while that is a mixture. Never blocks."""
        info = self._receiver.installed()
        if info.dirty:
            raise CommitFailed("the weights are a mixture: commit a whole version")
        now = _Bytes(info.epoch, info.version, info.root)
        named, naming = self._named, self._naming
        if named is not None and named[0] == now:
            return named[1]
        if naming is not None and naming[0] != now:
            return naming[1]
        return info.label or (DEFAULT_LABEL if info.version is None else str(info.version))

    def update_weight_version(self, new_version: str) -> None:
        """Give what is live another label. `UpdateInProgress` while an update is open."""
        if not self._busy.acquire(blocking=False):
            raise UpdateInProgress("another call that moves weights is running")
        try:
            self._expect_closed()
            self._named = (self._bytes(), new_version)
        finally:
            self._busy.release()

    def status(self) -> Status:
        """What is live and what goes on. `label` is "" while the weights are a mixture."""
        info = self._receiver.installed()
        label = "" if info.dirty else self.get_weight_version()
        updating = self._deadline is not None and self._clock() < self._deadline
        paused = self._generation is not None and self._generation.is_paused()
        return Status(info, label, self._receiver.state, self._initialised, updating, paused)

    # generation

    def pause_generation(self, mode: Mode = "abort", clear_cache: bool = True) -> None:
        """See `Generation.pause`; blocks until nothing runs."""
        self._generating().pause(mode, self._pause_timeout_s, clear_cache)

    def resume_generation(self) -> None:
        self._generating().resume()

    def is_paused(self) -> bool:
        return self._generating().is_paused()

    def abort_requests(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (none given: all); how many were ended."""
        return self._generating().abort(request_ids or None)

    # checks

    def compute_weight_checksums(self) -> dict[str, str]:
        """SHA-256 of the live tensors. Commits wait meanwhile."""
        with self._check(), self._receiver.inspecting(CHECK_TIMEOUT_S) as module:
            return checksums(module, self._rank)

    def compare_weights(self, baseline: Mapping[str, str]) -> Comparison:
        return compare(self.compute_weight_checksums(), baseline)

    def reset_weights(self) -> None:
        """Replace the live weights by noise: nothing is served until the next version was committed."""
        if not self._allow_reset:
            raise NotSupported("this server does not permit to reset its weights (allow_reset)")
        with self._check():
            self._receiver.scramble(CHECK_TIMEOUT_S)

    def get_world_size(self, include_dp: bool = True) -> int:
        return self._world_size * (self._data_parallel_size if include_dp else 1)

    # rules of an update

    @contextmanager
    def _turn(self) -> Iterator[Engine]:
        """The engine, for one call at a time."""
        if self._engine is None:
            raise NotInitialized("no weight transfer engine is configured on this server")
        if not self._busy.acquire(blocking=False):
            raise UpdateInProgress("another call that moves weights is running")
        try:
            if self._deadline is not None and self._clock() >= self._deadline:
                self._drop("its deadline passed")
            yield self._engine
        finally:
            self._busy.release()

    @contextmanager
    def _step(self) -> Iterator[None]:
        """A step of the open update, which ends with any error."""
        if self._deadline is None:
            raise NotOpen("no weight update is open: start one")
        try:
            self._expect_wanted()
            yield
            if self._deadline is not None:
                self._expect_wanted()
        except BaseException as error:
            if not (isinstance(error, DeadlineExceeded) and self._receiver.state is State.READY):
                self._drop(repr(error))
            raise
        finally:
            self._naming = None

    def _drop(self, reason: str) -> None:
        self._deadline = None
        with suppress(UpdateInProgress):
            self._receiver.abort(reason)

    def _expect_closed(self) -> None:
        if self._deadline is not None:
            raise UpdateInProgress("a weight update is open: finish it first")

    def _expect_wanted(self) -> None:
        if self._abort_reason:
            raise Aborted(f"the update was aborted: {self._abort_reason}")

    def _part(self, update_info: UpdateInfo) -> dict[str, Any]:
        if isinstance(update_info, Mapping):
            return dict(update_info)
        if self._rank >= len(update_info):
            raise InvalidInput(f"update_info has parts for {len(update_info)} ranks, this is rank {self._rank}")
        return dict(update_info[self._rank])

    def _is_open(self) -> bool:
        return self._receiver.state in (State.OPEN, State.STAGED, State.READY)

    def _bytes(self) -> _Bytes:
        info = self._receiver.installed()
        return _Bytes(info.epoch, info.version, info.root)

    def _generating(self) -> Generation:
        if self._generation is None:
            raise NotSupported("this server's generation cannot be paused or aborted")
        return self._generation

    @contextmanager
    def _check(self) -> Iterator[None]:
        if not self._checking.acquire(blocking=False):
            raise UpdateInProgress("another check of the weights is running")
        try:
            yield
        finally:
            self._checking.release()


def _inner(info: Any, name: str) -> Any:
    """vLLM's own methods take the info in a request object, or in a dict with this one key."""
    if isinstance(info, Mapping) and set(info) == {name}:
        return info[name]
    return getattr(info, name, info)


@contextmanager
def _caller_errors(what: str) -> Iterator[None]:
    """Engines read what the caller sent: where they stumble over it without a word of ours, it was malformed."""
    try:
        yield
    except TransferQueueError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInput(f"{what} was not understood: {error!r}") from error
