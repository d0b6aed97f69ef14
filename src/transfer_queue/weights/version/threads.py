"""Threads that copy and digest bytes, where that pays."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

NUM_THREADS = min(8, os.cpu_count() or 1)
AHEAD_NBYTES = 64 << 20
ALONE_NBYTES = 8 << 20  # copied within a millisecond or two: among busy processes a thread needs longer to begin
T = TypeVar("T")


def helpers_for(nbytes: int, name: str) -> Executor:
    """What copies so many bytes: threads called `name`, or the caller's own."""
    return Alone() if nbytes <= ALONE_NBYTES else ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=name)


class Alone(Executor):
    """Calls in the thread that submits them, which raises what they raise."""

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(function(*args, **named))
        return done


class Ahead(Generic[T]):
    """Calls in threads; their results, in the order of the calls. Not more than `ahead_nbytes` of what they were given
    waits for threads, if that is given."""

    def __init__(self, helpers: Executor, ahead_nbytes: float = math.inf) -> None:
        self._helpers = helpers
        self._ahead_nbytes = ahead_nbytes
        self._calls: deque[tuple[int, Future[T]]] = deque()
        self._nbytes = 0
        self._results: list[T] = []

    def add(self, nbytes: int, function: Callable[..., T], *args: Any) -> None:
        self._calls.append((nbytes, self._helpers.submit(function, *args)))
        self._nbytes += nbytes
        while self._nbytes > self._ahead_nbytes:
            self._take_first()

    def end(self) -> list[T]:
        """The results since this was asked last, once all calls have returned."""
        while self._calls:
            self._take_first()
        found, self._results = self._results, []
        return found

    def _take_first(self) -> None:
        nbytes, call = self._calls.popleft()
        self._nbytes -= nbytes
        self._results.append(call.result())
