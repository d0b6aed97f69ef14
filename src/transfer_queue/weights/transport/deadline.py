"""Deadlines, and calls that somebody else may never answer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, TypeVar

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import DeadlineExceeded, InvalidInput

T = TypeVar("T")
MOST_S = 1e6  # poll(2) counts milliseconds in 31 bits


def checked_s(timeout_s: Any, least_s: float = -MOST_S) -> float:
    """A time in seconds that somebody gave; `InvalidInput` for what locks, threads and sockets could not wait for."""
    is_number: bool = isinstance(timeout_s, Real)
    if is_number and least_s <= timeout_s <= MOST_S:  # as it is: no float has any integer
        return float(timeout_s)
    is_endless = isinstance(timeout_s, int) and abs(timeout_s) > 10**18  # Python does not spell any integer
    found = "such a time" if is_endless else f"a time of {timeout_s!r} s"
    raise InvalidInput(f"{found}: give a number of seconds from {max(0.0, least_s):.0f} to {MOST_S:.0f} (11 days)")


class Deadline:
    """A moment, `timeout_s` from now (`InvalidInput`: see `checked_s`)."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + checked_s(timeout_s)

    def end_within(self, timeout_s: float) -> None:
        """Be this time from now at the latest: somebody else who takes part waits no longer."""
        self._end = min(self._end, time.monotonic() + checked_s(timeout_s))

    def left(self, what: str = "the update") -> float:
        """Seconds until then, more than 0. `DeadlineExceeded` once it passed."""
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"{what} did not end before its deadline")
        return left_s


@contextlib.contextmanager
def held(lock: threading.RLock, timeout_s: float) -> Iterator[bool]:
    """Hold a `threading.RLock` that this thread does not hold yet. Gives False where it did not come in time (-1: any).

    An interrupt may strike as `acquire` returns, and its answer is lost: only the lock knows then whose it is.
    """
    try:
        yield lock.acquire(timeout=timeout_s)
    finally:
        try:  # noqa: SIM105 one step: an interrupt may strike between two
            lock.release()
        except RuntimeError:  # it is not this thread's
            pass


class TimedCall(BackgroundCall[T]):
    """A call whose result is waited for until a deadline."""

    def __init__(self, function: Callable[..., T], *args: Any, known: list[Any] | None = None) -> None:
        self._called: str = getattr(function, "__name__", "the call")
        super().__init__("tq-weights-call", function, *args, known=known)

    def result(self, deadline: Deadline, what: str = "") -> T:
        """What it returned, or raised. `DeadlineExceeded` when it still runs then, which names `what` (default: the
        function)."""
        what = what or self._called
        if not self.ended(0.0) and not self.ended(deadline.left(what)):
            raise DeadlineExceeded(f"{what} did not end before its deadline")
        return self.outcome()


class TimedCalls:
    """Calls to somebody who may never answer, by one thread at a time. Those that are late are remembered: they must
    not meet what is asked later."""

    def __init__(self) -> None:
        self._begun: list[TimedCall[object]] = []

    def begin(self, function: Callable[..., object], *args: Any) -> TimedCall[object]:
        return TimedCall(function, *args, known=self._begun)

    def ask(self, function: Callable[..., object], deadline: Deadline, *args: Any) -> object:
        """See `TimedCall.result`."""
        return self.begin(function, *args).result(deadline)

    def late(self) -> list[TimedCall[object]]:
        """Those that have not ended."""
        self._begun = [call for call in self._begun if not call.ended(0.0)]
        return list(self._begun)
