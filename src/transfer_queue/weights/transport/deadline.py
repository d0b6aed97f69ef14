"""Deadlines, and calls that somebody else may never answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from transfer_queue.errors import DeadlineExceeded

T = TypeVar("T")


class Deadline:
    """A moment, `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    def left(self, what: str = "the update") -> float:
        """Seconds until then, more than 0. `DeadlineExceeded` once it passed."""
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"{what} did not end before its deadline")
        return left_s


class TimedCall(Generic[T]):
    """A call in a thread of its own, so that its caller need not wait for ever. A thread nobody waits for any more ends
    with the call, or with the process."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, args), name="tq-weights-call", daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        try:
            self._result.append(function(*args))
        except BaseException as error:  # noqa: BLE001 raised again by whoever asks for the result
            self._error = error

    def ended(self, timeout_s: float) -> bool:
        """Whether it has returned or raised, within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self, deadline: Deadline, what: str) -> T:
        """What it returned, or raised. `DeadlineExceeded` when it still runs then."""
        if self._thread.is_alive():
            self._thread.join(deadline.left(what))
        if self._error is not None:
            raise self._error
        if not self._result:
            raise DeadlineExceeded(f"{what} did not end before its deadline")
        return self._result[0]
