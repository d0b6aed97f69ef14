"""Deadlines, and calls that somebody else may never answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from transfer_queue.background_call import BackgroundCall
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


class TimedCall(BackgroundCall[T]):
    """A call whose result is waited for until a deadline."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        super().__init__("tq-weights-call", function, *args)

    def result(self, deadline: Deadline, what: str) -> T:
        """What it returned, or raised. `DeadlineExceeded` when it still runs then."""
        if not self.ended(0.0) and not self.ended(deadline.left(what)):
            raise DeadlineExceeded(f"{what} did not end before its deadline")
        return self.outcome()
