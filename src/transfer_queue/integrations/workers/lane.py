"""Calls out of which nothing is raised, and a thread beside the worker's for them."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from transfer_queue.errors import attempt

log = logging.getLogger("transfer_queue.weights")
Method = TypeVar("Method", bound=Callable[..., Any])


def silent(method: Method) -> Method:
    """Nothing leaves it: what raises in a worker puts it out of step with the others, or ends it."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **more: Any) -> None:
        attempt(method.__name__, lambda: method(self, *args, **more), log)

    return call  # type: ignore[return-value]


class Lane:
    """Calls in a thread beside the worker's, one after the other. It is there from the first `add` to `close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], object]] = deque()
        self._num_left = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, function: Callable[..., object], *args: Any) -> None:
        with self._changed:
            self._num_left += 1
            self._calls.append(functools.partial(function, *args))
            self._closing = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tq-weights-lane", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def ended(self, timeout_s: float) -> bool:
        """Whether all that was added is done, within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_left, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread once all is done; it is waited for `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closing)
                if not self._calls:
                    self._thread = None
                    self._changed.notify_all()
                    return
                call = self._calls.popleft()
            attempt("a call of the weights' lane", call, log)
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()
