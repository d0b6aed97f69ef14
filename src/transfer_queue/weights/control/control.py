"""What a trainer may ask of an inference server, under vLLM's method names: weight updates, pauses, versions, checks.

    not initialised -- init --> CLOSED -- start --> OPEN -- update... finish --> CLOSED
                                   ^-- a failed update or finish, abort, deadline, another init --'

`Control` is for threads (`LLM`-like), `control_async.AsyncControl` for an event loop (`AsyncLLM`-like). An engine
moves the bytes; the receiver makes them live, and its session is what is open. Steps out of order are refused, and
change nothing.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias

from transfer_queue.errors import (
    CommitFailed,
    DeadlineExceeded,
    InvalidInput,
    NotInitialized,
    NotOpen,
    NotSupported,
    TransferQueueError,
    UpdateInProgress,
)
from transfer_queue.weights.receive.checker import Comparison, checksums, compare
from transfer_queue.weights.receive.gate import Generation, Mode
from transfer_queue.weights.receive.pauses import Pauses
from transfer_queue.weights.receive.receiver import Receiver
from transfer_queue.weights.receive.status import OpenUpdate, ServerStatus
from transfer_queue.weights.receive.update_session import (
    CALLED_OFF,
    Phase,
    UpdateEnd,
    UpdateSession,
    begun_of,
    run_of,
    timeout_of,
)
from transfer_queue.weights.transport.info import parse

DEFAULT_LABEL = "default"  # before the first commit
UPDATE_TIMEOUT_S = 600.0
INIT_TIMEOUT_S = 60.0  # for a call of the trainer before to end, when the new one does not say
PAUSE_TIMEOUT_S = 120.0
CALL_OFF_S = 10.0  # for a call that runs to end, once its update was called off
CHECK_TIMEOUT_S = 60.0  # to wait for a commit to end before reading the weights
UpdateInfo: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]]"


class UpdateEngine(Protocol):
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


class _Bytes(NamedTuple):
    """Names what is installed."""

    run_id: str
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
        engine: UpdateEngine | None,
        receiver: Receiver,
        *,
        generation: Generation | None = None,
        rank: int = 0,
        world_size: int = 1,
        data_parallel_size: int = 1,
        update_timeout_s: float = UPDATE_TIMEOUT_S,
        pause_timeout_s: float = PAUSE_TIMEOUT_S,
        allow_reset: bool = False,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._pauses = Pauses(generation, pause_timeout_s) if generation is not None else None
        self._rank = rank
        self._world_size = world_size
        self._data_parallel_size = data_parallel_size
        self._update_timeout_s = update_timeout_s
        self._allow_reset = allow_reset
        self._life = secrets.token_hex(8)
        self._busy = threading.Lock()
        self._checking = threading.Lock()
        self._initialised = False
        self._named: tuple[_Bytes, str] | None = None  # the label, and what it was given to
        self._naming: tuple[_Bytes, str] | None = None  # what a commit that runs replaces, and the label after it

    def confine(self, root: str = "") -> None:
        """From now on calls come over a network: see `engines.base.Engine.confine`. An engine without it is left."""
        confine = getattr(self._engine, "confine", None)
        if confine is not None:
            confine(root)

    # updates

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Introduce a trainer: from now on updates are its run's. Ends the update that is open, and the pauses that
        were made for another run. Waits for a call that runs; it is woken up, and raises who took over. `WrongEpoch`
        for a run that another one took over from. Raises what the engine has against `init_info`."""
        with _caller_errors("init_info"):
            info = dict(_inner(init_info, "init_info"))
            form = getattr(self._engine, "init_form", None)
            if form is not None:
                parse(info, form)  # what the engine would refuse harms nobody's update
        run_id, timeout_s = run_of(info), timeout_of(info, INIT_TIMEOUT_S)
        if self._engine is not None:
            self._receiver.introduce(run_id, timeout_s, begun_of(info))
            make_way = getattr(self._engine, "make_way", None)
            if make_way is not None:
                make_way()
            if self._pauses is not None:
                self._pauses.take_over(run_id)
        with self._turn(timeout_s) as engine, _caller_errors("init_info"):
            self._receiver.expect_run(run_id)
            self._initialised = False
            engine.init_transfer_engine(info)
            self._initialised = True

    def expect_run(self, run_id: str) -> None:
        """`WrongEpoch` when updates are no longer of this run, `NotInitialized` when they never were. vLLM's calls
        do not say whose they are: a way to this server that knows asks before it calls."""
        self._receiver.expect_run(run_id)

    def start_weight_update(self) -> None:
        """Open an update, of the run that was introduced last. `UpdateInProgress` when one is open, `NotInitialized`
        before init."""
        with self._turn() as engine:
            if not self._initialised:
                raise NotInitialized("the weight transfer engine is not initialised")
            self._expect_closed()
            session = self._receiver.begin(self._update_timeout_s)
            try:
                engine.start_weight_update()
            except BaseException as error:  # an interrupt must not leave it open
                self._drop(session, repr(error))
                raise
            session.check()

    def start_draft_weight_update(self) -> None:
        """Always `NotSupported`: there is one model."""
        raise NotSupported("this server has no draft model")

    def update_weights(self, update_info: UpdateInfo) -> None:
        """Take a part of the update. Any error ends it: the old weights serve on. `NotOpen` without a start. A part of
        another run is refused (`WrongEpoch`, `NotInitialized`), and harms nothing. One that calls the update off
        (`abort`) ends it also while another call takes a part, which is woken up."""
        with _caller_errors("update_info"):
            info = self._part(_inner(update_info, "update_info"))
        self._receiver.expect_run(run_of(info))
        if info.get("abort"):
            self._call_off(info)
            return
        with self._turn() as engine, self._step(), _caller_errors("update_info"):
            engine.update_weights(info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit, and label what is live now `weight_version` (None: the version's own label, or its number).

        `DeadlineExceeded` when requests did not let go of the old weights in time: the update stays open if that may
        be tried again. Any other error ends it.
        """
        with self._turn() as engine, self._step() as session:
            before = self._bytes()
            if weight_version is not None:
                self._naming = (before, weight_version)
            engine.finish_weight_update()
            # An engine may finish without a commit, when the trainer gave the update up: that gives no label.
            if weight_version is not None and (session.end is UpdateEnd.COMMITTED or self._bytes() != before):
                self._named = (self._bytes(), weight_version)
            session.check()
            self._drop(session, "it was finished without a version")

    def abort_weight_update(self, reason: str = "somebody asked to") -> bool:
        """End the open update; the old weights serve on. Whether there was one. A call that runs ends with `Aborted`.
        `UpdateInProgress` when it is being committed."""
        return self._receiver.end(reason)

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
        now = _Bytes(info.run_id, info.version, info.root)
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

    def status(self) -> ServerStatus:
        """What is live and what goes on. Never blocks."""
        info, session, run_id = self._receiver.installed(), self._receiver.session, self._receiver.run_id
        update = None
        if session is not None:
            left_s = session.left_s()
            phase, left = session.phase.value, left_s if math.isfinite(left_s) else None
            update = OpenUpdate(*session.key, phase, left)
        return ServerStatus(
            installed=info, label="" if info.dirty else self.get_weight_version(), state=self._receiver.state,
            initialised=self._initialised, paused=self._pauses is not None and self._pauses.is_paused(),
            paused_by="" if self._pauses is None else self._pauses.owner(run_id), run_id=run_id, update=update,
            life=self._life, answers=self._receiver.answers,
        )  # fmt: skip

    # generation

    def pause_generation(
        self, mode: Mode = "abort", clear_cache: bool = True, owner: str = "", lease_s: float | None = None
    ) -> None:
        """See `Generation.pause`; blocks until nothing runs. `owner`: the run that the pause is for. It ends when
        another run takes over, or after `lease_s`; without them only by `resume_generation`. Owners do not end each
        other's."""
        pauses = self._generating()
        self._receiver.expect_not_over(owner)
        pauses.pause(mode, clear_cache, owner, lease_s)

    def resume_generation(self, owner: str | None = None) -> None:
        """Generate again. With an `owner` only that one's pause ends, and the others last, in the strongest mode of
        theirs."""
        self._generating().resume(owner)

    def is_paused(self) -> bool:
        return self._generating().is_paused()

    def abort_requests(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (None: all); how many were ended."""
        return self._generating().generation.abort(request_ids)

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
    def _turn(self, timeout_s: float = 0.0) -> Iterator[UpdateEngine]:
        """The engine, for one call at a time."""
        if self._engine is None:
            raise NotInitialized("no weight transfer engine is configured on this server")
        if not (self._busy.acquire(timeout=timeout_s) if timeout_s > 0 else self._busy.acquire(blocking=False)):
            raise UpdateInProgress("another call that moves weights is running")
        try:
            yield self._engine
        finally:
            self._busy.release()

    @contextmanager
    def _step(self) -> Iterator[UpdateSession]:
        """A step of the open update, which ends with any error. When somebody else ended it, it says who."""
        session = self._receiver.session
        if session is None:
            raise self._not_open()
        try:
            yield session
            session.check()
        except BaseException as error:  # an interrupt ends the update too
            if not (isinstance(error, DeadlineExceeded) and session.phase is Phase.READY):
                self._drop(None, repr(error))  # also one that the engine has opened since somebody ended ours
            if session.end in (UpdateEnd.ABORTED, UpdateEnd.TAKEN_OVER):
                session.check()
            raise
        finally:
            self._naming = None

    def _call_off(self, info: dict[str, Any]) -> None:
        if not self._receiver.end(CALLED_OFF):
            raise self._not_open()
        with self._turn(CALL_OFF_S) as engine:
            engine.update_weights(info)

    def _not_open(self) -> TransferQueueError:
        last = self._receiver.last_session
        if last is not None and last.end is UpdateEnd.TAKEN_OVER:
            return last.error()
        return NotOpen("no weight update is open: start one")

    def _drop(self, session: UpdateSession | None, reason: str) -> None:
        with suppress(UpdateInProgress):
            self._receiver.end(reason, failed=True, only=session)

    def _expect_closed(self) -> None:
        session = self._receiver.session
        if session is not None:
            raise UpdateInProgress(f"a weight update is open ({session.phase.value}): finish it first")

    def _part(self, update_info: UpdateInfo) -> dict[str, Any]:
        if isinstance(update_info, Mapping):
            return dict(update_info)
        if self._rank >= len(update_info):
            raise InvalidInput(f"update_info has parts for {len(update_info)} ranks, this is rank {self._rank}")
        return dict(update_info[self._rank])

    def _bytes(self) -> _Bytes:
        info = self._receiver.installed()
        return _Bytes(info.run_id, info.version, info.root)

    def _generating(self) -> Pauses:
        if self._pauses is None:
            raise NotSupported(
                "generation cannot be paused or aborted here: the Control was given no `generation` (Gate)"
            )
        return self._pauses

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
