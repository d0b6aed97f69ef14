"""Calls of other people's libraries that end in time, with an error that names them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import ServiceUnavailable, TransferQueueError

T = TypeVar("T")


def in_time(
    name: str,
    timeout_s: float,
    work: Callable[[], T],
    undo: Callable[[T], None] = lambda found: None,
    passes: tuple[type[Exception], ...] = (),
) -> T:
    """What `work` returns. It may block for minutes, and no thread can be stopped: when it is late, or its caller is
    interrupted, it goes on in a thread of its own, which holds the memory that it writes into, and what comes of it is
    undone.

    Raises `ServiceUnavailable` for that and for whatever `work` raises, but for our own errors and those that it
    `passes`.
    """
    begun: list[BackgroundCall[T]] = []
    try:
        call = BackgroundCall("tq-engine", work, known=begun)
        if not call.ended(timeout_s):
            raise ServiceUnavailable(f"{name} did not answer within {timeout_s:g} s")
        found = call.outcome()
        begun.clear()
        return found
    except TransferQueueError:
        raise
    except passes:
        raise
    except ImportError as error:
        raise ServiceUnavailable(f"{name} is not installed on this host: {error}") from error
    except Exception as error:
        raise ServiceUnavailable(f"{name}: {error}") from error
    finally:
        for one in begun:  # of one that raised nothing is left to undo
            one.leave(undo)


class OpenedOnce(Generic[T]):
    """What is opened on first use, once for all threads. `name` is that of whatever may not answer."""

    def __init__(self, name: str, opens: Callable[[float], T]) -> None:
        """`opens(timeout_s)` opens it, or raises within that time."""
        self._name = name
        self._opens = opens
        self._lock = threading.Lock()
        self._failure: tuple[float, type[TransferQueueError], str] | None = None  # the last one, and its deadline
        self.opened: T | None = None

    def get(self, timeout_s: float) -> T:
        """Raises as `opens`, also where an attempt of another thread that had more time has failed meanwhile, and
        `ServiceUnavailable` where that is late."""
        if self.opened is not None:
            return self.opened
        deadline, before = time.monotonic() + timeout_s, self._failure
        if not self._lock.acquire(timeout=timeout_s):
            raise ServiceUnavailable(f"{self._name} did not answer within {timeout_s:g} s")
        try:
            failed = self._failure
            if self.opened is None and failed is not None and failed is not before and failed[0] >= deadline:
                raise failed[1](failed[2])
            if self.opened is None:
                self.opened = self._opened_now(deadline)
            return self.opened
        finally:
            self._lock.release()

    def _opened_now(self, deadline: float) -> T:
        try:
            return self._opens(left_until(deadline))
        except TransferQueueError as error:
            self._failure = deadline, type(error), str(error)
            raise

    def taken(self) -> T | None:
        """What was opened, which is somebody else's to close from now on."""
        opened, self.opened = self.opened, None
        return opened


def left_until(deadline: float) -> float:
    """The seconds that a call may still take until that time of the monotonic clock: never none at all."""
    return max(0.001, deadline - time.monotonic())
