"""Where requests of an inference server pass between steps, so that generation can be paused around a commit.

    with gate.request("r1") as request:          # or `async with`; GenerationPaused while paused by abort or wait
        while not done:
            with request.step():                 # or `async with`; waits while frozen, Aborted once it was aborted
                ...                              # one token

A server with a scheduler of its own gives a `Generation` instead.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import Literal, Protocol, TypeAlias, get_args

from transfer_queue.errors import Aborted, DeadlineExceeded, GenerationPaused, InvalidInput, UnknownMode

Mode: TypeAlias = Literal["abort", "wait", "keep"]
FREEZE_TIMEOUT_S = 600.0


class Generation(Protocol):
    """What a server can do to its running requests. Called from any thread."""

    def pause(self, mode: Mode, timeout_s: float, clear_cache: bool = True) -> None:
        """abort: end every request. wait: let the running ones end. keep: freeze them between two steps. Then new
        requests fail (abort, wait) or queue (keep). Blocks until nothing runs; `DeadlineExceeded` leaves it as it was,
        except for requests that were aborted."""

    def resume(self) -> None:
        """Go on, whatever the mode. Never blocks."""

    def is_paused(self) -> bool:
        """Whether a pause has come to its end. Never blocks."""

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (None: all), unknown ones are ignored; how many. Never blocks."""


class Gate:
    """A `Generation` for requests in threads and coroutines alike. `clear_cache` is called at the end of a pause by
    abort or wait: what was cached from the old weights has to go."""

    def __init__(self, clear_cache: Callable[[], None] | None = None) -> None:
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._clear_cache = clear_cache
        self._requests: dict[str, GenerationRequest] = {}
        self._num_steps = 0
        self._mode: Mode | None = None
        self._settled = False
        self._resting: tuple[Mode | None, bool] = (None, False)  # mode and settled, of what was reached last
        self._turn = 0  # of pauses and resumes: a pause that waits sees that another call came

    def request(self, request_id: str = "") -> GenerationRequest:
        """A request, to be entered as a context. `InvalidInput` then when one with this id runs."""
        return GenerationRequest(self, request_id or uuid.uuid4().hex)

    @property
    def running(self) -> list[str]:
        """The ids of the requests within."""
        with self._changed:
            return list(self._requests)

    def pause(self, mode: Mode, timeout_s: float, clear_cache: bool = True) -> None:
        if mode not in get_args(Mode):
            raise UnknownMode(f"mode {mode!r} is none of {', '.join(get_args(Mode))}")
        with self._changed:
            self._set(mode, settled=False)
            turn = self._turn
            if mode == "abort":
                self._abort(self._requests)
        try:
            self._settle(mode, turn, timeout_s)
            if clear_cache and mode != "keep" and self._clear_cache is not None:
                self._clear_cache()
        except BaseException:  # also an interrupt: it is as it was when that was reached last
            with self._changed:
                if self._turn == turn:
                    self._set(*self._resting)
            raise
        with self._changed:
            if self._turn == turn:
                self._settled, self._resting = True, (mode, True)

    def _settle(self, mode: Mode, turn: int, timeout_s: float) -> None:
        def settled() -> bool:
            if self._turn != turn:
                raise Aborted("a resume or another pause came before the running requests had ended")
            return not (self._num_steps if mode == "keep" else self._requests)

        with self._changed:
            if not self._changed.wait_for(settled, timeout_s):
                raise DeadlineExceeded(f"{len(self._requests)} requests ran on for {timeout_s:.3g} s: not paused")

    def resume(self) -> None:
        with self._changed:
            self._resting = (None, False)
            self._set(None, settled=False)

    def is_paused(self) -> bool:
        return self._settled

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        with self._changed:
            return self._abort(self._requests if request_ids is None else request_ids)

    def _abort(self, request_ids: Collection[str]) -> int:
        found = [self._requests[one] for one in set(request_ids) if one in self._requests]
        found = [request for request in found if not request.aborted]
        for request in found:
            request.aborted = True
        self._notify()
        return len(found)

    def _set(self, mode: Mode | None, settled: bool) -> None:
        self._mode, self._settled = mode, settled
        self._turn += 1
        self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(_wake, waiter)

    # for requests

    def enter(self, request: GenerationRequest) -> None:
        with self._changed:
            if self._mode in ("abort", "wait"):
                raise GenerationPaused("generation is paused: try again after it was resumed")
            if request.request_id in self._requests:
                raise InvalidInput(f"a request {request.request_id!r} is running")
            self._requests[request.request_id] = request

    def leave(self, request: GenerationRequest) -> None:
        with self._changed:
            del self._requests[request.request_id]
            self._notify()

    def begin_step(self, request: GenerationRequest, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._try_step(request), timeout_s):
                raise DeadlineExceeded(f"generation was frozen for {timeout_s} s")

    async def begin_step_async(self, request: GenerationRequest, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._try_step(request):
                    return
                waiter = (loop, loop.create_future())
                self._waiters.append(waiter)
            try:  # not `wait_for`, which before Python 3.12 loses a cancellation that comes together with the result
                woken, _ = await asyncio.wait([waiter[1]], timeout=deadline - time.monotonic())
            finally:
                with self._changed:
                    self._waiters = [one for one in self._waiters if one is not waiter]
            if not woken:
                raise DeadlineExceeded(f"generation was frozen for {timeout_s} s")

    def end_step(self) -> None:
        with self._changed:
            self._num_steps -= 1
            self._notify()

    def _try_step(self, request: GenerationRequest) -> bool:
        if request.aborted:
            raise Aborted(f"request {request.request_id!r} was aborted")
        if self._mode == "keep":
            return False
        self._num_steps += 1
        return True


class GenerationRequest:
    """One request. `aborted` can be looked at during a long step."""

    def __init__(self, gate: Gate, request_id: str) -> None:
        self.request_id = request_id
        self.aborted = False
        self._gate = gate

    def step(self, timeout_s: float = FREEZE_TIMEOUT_S) -> Step:
        """A step, to be entered as a context: blocks while generation is frozen. `Aborted`; `DeadlineExceeded`."""
        return Step(self._gate, self, timeout_s)

    def __enter__(self) -> GenerationRequest:
        self._gate.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._gate.leave(self)

    async def __aenter__(self) -> GenerationRequest:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._gate.leave(self)


class Step:
    def __init__(self, gate: Gate, request: GenerationRequest, timeout_s: float) -> None:
        self._gate = gate
        self._request = request
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._gate.begin_step(self._request, self._timeout_s)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._gate.end_step()

    async def __aenter__(self) -> None:
        await self._gate.begin_step_async(self._request, self._timeout_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._gate.end_step()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
