"""What an operation may ask its driver to do. An operation is a generator that yields these and returns its result."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from transfer_queue.wire.messages import Message, Request

T = TypeVar("T")


class Call:
    """Send a request; the driver answers with (reply, payload) or raises the error the server reported.

    `wait_s` is how long the server may park it.
    """

    __slots__ = ("payload", "request", "wait_s")

    def __init__(self, request: Request, payload: memoryview | None = None, wait_s: float = 0.0) -> None:
        self.request = request
        self.payload = payload
        self.wait_s = wait_s


class Notify:
    """Send a one-way message."""

    __slots__ = ("message",)

    def __init__(self, message: Message) -> None:
        self.message = message


class Offload:
    """Run `work`, which touches `nbytes`: in another thread when that would hold up an event loop."""

    __slots__ = ("nbytes", "work")

    def __init__(self, work: Callable[[], Any], nbytes: int) -> None:
        self.work = work
        self.nbytes = nbytes


Effect: TypeAlias = Call | Notify | Offload
Operation: TypeAlias = Generator[Effect, Any, T]
