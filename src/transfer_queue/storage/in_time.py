"""Calls of other people's libraries that end in time, with an error that names them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
    """What `work` returns. It may block for minutes, and no thread can be stopped: when it is late it goes on in a
    thread of its own, which holds the memory that it writes into, and what comes of it is undone.

    Raises `ServiceUnavailable` for that and for whatever `work` raises, but for our own errors and those that it
    `passes`.
    """
    call = BackgroundCall("tq-engine", work)
    if not call.ended(timeout_s):
        call.leave(undo)
        raise ServiceUnavailable(f"{name} did not answer within {timeout_s:g} s")
    try:
        return call.outcome()
    except TransferQueueError:
        raise
    except passes:
        raise
    except ImportError as error:
        raise ServiceUnavailable(f"{name} is not installed on this host: {error}") from error
    except Exception as error:
        raise ServiceUnavailable(f"{name}: {error}") from error


def left_until(deadline: float) -> float:
    """The seconds that a call may still take until that time of the monotonic clock: never none at all."""
    return max(0.001, deadline - time.monotonic())
