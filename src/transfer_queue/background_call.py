"""A call that somebody else may never answer, in a thread of its own."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as pools  # its hook is called after ours: who is waited for may use executors
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from transfer_queue.errors import Aborted, emptied, kept

T = TypeVar("T")
STEP_S = 1.0  # an interrupt may strike as one that waits has heard of the end, and the others have not
LEAVE_S = 5.0  # that a thread may need for its last steps
BEGIN_S = 0.2  # an interrupt may strike as a thread is started: then it begins at once, or never


class BackgroundCall(Generic[T]):
    """Its caller need not wait for ever. A thread nobody waits for any more ends with the call, or with the process;
    until then it holds what the call was given."""

    def __init__(self, name: str, function: Callable[..., T], *args: Any, known: list[Any] | None = None) -> None:
        """`name`: the thread's. This is in `known` before it begins, so that an interrupt does not make it unknown."""
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._undo: Callable[[T], None] | None = None
        self._lock = threading.Lock()
        # Up to Python 3.12 an interrupted `join` makes its thread seem over; an event may keep its lock then.
        self._is_over = False
        self._over: SimpleQueue[None] = SimpleQueue()  # has something once it is
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(function, args), name=name, daemon=True)
        if known is not None:
            known.append(self)
        self._thread.start()

    def _run(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        try:
            self._call(function, args)
        finally:
            self._is_over = True
            self._over.put(None)

    def _call(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        try:
            found = function(*args)
        except BaseException as error:  # noqa: BLE001 raised again by whoever asks for the result
            # Nobody may ever ask: it is to hold neither what the call worked on nor, by this frame, itself.
            self._error = emptied(error).with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            return
        with self._lock:
            self._result.append(found)
            undo = self._undo
        if undo is not None:
            undo(found)

    def ended(self, timeout_s: float) -> bool:
        """Whether it has returned or raised, within that time; also when an interrupt kept it from beginning, and in a
        forked child, which has no such thread."""
        if os.getpid() != self._pid:
            return True
        until = time.monotonic() + BEGIN_S
        while self._thread.ident is None:  # it has not begun
            if time.monotonic() > until:
                return True
            time.sleep(0.001)
        until = time.monotonic() + timeout_s
        while not self._is_over:
            left_s = until - time.monotonic()
            with contextlib.suppress(Empty):
                self._over.get(timeout=max(0.0, min(left_s, STEP_S)))
                self._over.put(None)  # for others who wait
            if left_s <= 0 and not self._is_over:
                return False
        self._thread.join(LEAVE_S)  # it has nothing left to do
        return True

    def outlast(self, timeout_s: float, patience_s: float = math.inf) -> None:
        """A program that ends before it waits for it, until that time from now; not where that is more than
        `patience_s` off still. So does a child of multiprocessing's; `os._exit` and signals wait for nothing."""
        _outlasting[self] = _Awaited(time.monotonic() + timeout_s, patience_s)

    def leave(self, undo: Callable[[T], None]) -> None:
        """Nobody waits any more: `undo` is called with what it returns, or returned a moment ago."""
        with self._lock:
            self._undo = undo
            late = list(self._result)
        for found in late:
            undo(found)

    def outcome(self) -> T:
        """What it returned, or raised: it has ended. Raises `Aborted` where an interrupt kept it from beginning."""
        error = self._error
        if error is None:
            if not self._result:
                raise Aborted(f"{self._thread.name} was interrupted before it began")
            return self._result[0]
        self._error = kept(error)
        try:
            raise error
        finally:
            del error


class Helpers(ThreadPoolExecutor):
    """Threads, until the program's main thread has ended. From then on Python gives no pool any work, though the
    program waits for its other threads, which may go on for long: what such a one submits it does itself."""

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        try:
            return super().submit(function, *args, **named)
        except RuntimeError:
            if self._shutdown or not pools._shutdown:  # it was shut down itself; or its thread cannot be started
                raise
        done: Future[T] = Future()
        done.set_result(function(*args, **named))
        return done


class _Awaited(NamedTuple):
    """`until`: by the clock."""

    until: float
    patience_s: float

    @property
    def left_s(self) -> float:
        left_s = self.until - time.monotonic()
        return left_s if 0 < left_s <= self.patience_s else 0.0


_outlasting: weakref.WeakKeyDictionary[BackgroundCall[Any], _Awaited] = weakref.WeakKeyDictionary()


def _end() -> None:
    """A call that is waited for may begin others."""
    while waiting := [(call, one) for call, one in list(_outlasting.items()) if one.left_s and not call.ended(0.0)]:
        for call, one in waiting:
            call.ended(one.left_s)


# Not `atexit`: threads, which the calls need, can hardly be started any more then, and multiprocessing's forked
# children do not call it. CPython 3.12.0 and 3.12.1 start none in either (gh-113964).
threading._register_atexit(_end)  # type: ignore[attr-defined]
