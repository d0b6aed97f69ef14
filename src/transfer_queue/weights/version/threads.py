"""Threads that copy and digest bytes, where that pays."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

import torch

from transfer_queue.background_call import Helpers
from transfer_queue.memory.processors import usable_processors

NUM_THREADS = min(8, math.ceil(usable_processors()))
AHEAD_NBYTES = NUM_THREADS * (32 << 20)
ALONE_NBYTES = 8 << 20  # copied within a millisecond or two: among busy processes a thread needs longer to begin
T = TypeVar("T")
_mode = threading.local()


def helpers_for(nbytes: int, name: str) -> Executor:
    """What copies so many bytes: threads called `name`, or the caller's own."""
    return Alone() if nbytes <= ALONE_NBYTES else helpers_called(name)


def helpers_called(name: str) -> Executor:
    """Threads in which tensors may be changed that may be in this one: in inference mode, if this one is."""
    enter = (_enter_inference_mode,) if torch.is_inference_mode_enabled() else ()
    return Helpers(NUM_THREADS, name, *enter)


def _enter_inference_mode() -> None:
    _mode.entered = torch.inference_mode()  # for as long as the thread lives
    _mode.entered.__enter__()


class Alone(Executor):
    """Calls in the thread that submits them, which raises what they raise."""

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(function(*args, **named))
        return done


class Ahead(Generic[T]):
    """Calls in threads; their results, in the order of the calls. If `ahead_nbytes` is given, not more of what calls
    were given is held at once, but for one large one, which does not keep the others waiting: a model's embedding."""

    def __init__(self, helpers: Executor, ahead_nbytes: float = math.inf) -> None:
        self._helpers = helpers
        self._ahead_nbytes = ahead_nbytes
        self._calls: list[Future[T]] = []
        self._held: deque[tuple[int, Future[T]]] = deque()
        self._nbytes = 0  # of `_held`
        self._large: tuple[int, Future[T]] | None = None

    def add(self, nbytes: int, function: Callable[..., T], *args: Any) -> None:
        if self._large is not None and (self._large[1].done() or nbytes > self._ahead_nbytes):
            self._large[1].result()  # there is room for one of them; and what it raised ends the reading
        call = self._helpers.submit(function, *args)
        self._calls.append(call)
        one: tuple[int, Future[T]] | None = (nbytes, call)
        if self._large is None or self._large[1].done() or nbytes > self._large[0]:
            one, self._large = self._large, (nbytes, call)
        if one is not None:
            self._held.append(one)
            self._nbytes += one[0]
        while self._nbytes > self._ahead_nbytes:
            nbytes, first = self._held.popleft()
            self._nbytes -= nbytes
            first.result()  # raises what it raised, before more is read

    def end(self) -> list[T]:
        """The results since this was asked last, once all calls have returned."""
        calls, self._calls = self._calls, []
        self._held.clear()
        self._nbytes, self._large = 0, None
        return [call.result() for call in calls]
