"""What an operation may ask its driver to do. An operation is a generator that yields these and returns its result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from numbers import Real
from typing import Any, TypeAlias, TypeVar

from transfer_queue.errors import InvalidInput
from transfer_queue.wire.messages import Message, Request

T = TypeVar("T")
GRACE_S = 2.0  # how much later than the server's own deadline a client gives up on it
LONGEST_S = 1e9  # thirty years: what clocks, sockets and timers take without a look at it


def seconds(value: Any, name: str = "a time-out") -> float:
    """`value` as the wire has it: 0 for less than that, `LONGEST_S` for more, such as infinity. Raises `InvalidInput`
    for what is no number."""
    number: Any = None if isinstance(value, bool) or not isinstance(value, Real) or value != value else value
    if number is None:
        raise InvalidInput(f"{name}: expected a number of seconds, got {value!r}")
    return float(min(max(number, 0.0), LONGEST_S))


class Call:
    """Send a request; the driver answers with (reply, payload) or raises the error the server reported.

    `wait_s` is how long the server may park it (see `seconds`; the request's own `timeout_s` follows it), and `grace_s`
    how much later the client gives up on it. `to` is the server ("host:port") where it is not this process's own. The
    payload of the answer is received straight into `into`.
    """

    __slots__ = ("grace_s", "into", "payload", "request", "to", "wait_s")

    def __init__(
        self,
        request: Request,
        payload: memoryview | None = None,
        wait_s: float = 0.0,
        to: str = "",
        into: memoryview | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        if type(wait_s) is not float or not 0.0 <= wait_s <= LONGEST_S:
            asked, wait_s = wait_s, seconds(wait_s)
            if getattr(request, "timeout_s", None) == asked:
                request.timeout_s = wait_s  # type: ignore[attr-defined]
        self.request = request
        self.payload = payload
        self.wait_s = wait_s
        self.to = to
        self.into = into
        self.grace_s = grace_s


class Together:
    """Carry out several calls at the same time; the driver answers with their answers in the same order."""

    __slots__ = ("calls",)

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls


class Trying:
    """Carry out an operation whose asker goes on when it raises: what it was given is given back then, at once."""

    __slots__ = ("operation",)

    def __init__(self, operation: Operation[Any]) -> None:
        self.operation = operation


class Notify:
    """Send a one-way message, to another server with `to`."""

    __slots__ = ("message", "to")

    def __init__(self, message: Message, to: str = "") -> None:
        self.message = message
        self.to = to


class HoldSession:
    """The session is to outlive the connections of its calls: it is about to be given what must not go with a call
    that is broken off. Asked for where the session is not `is_held`."""

    __slots__ = ()


class Offload:
    """Run `work`, which touches `nbytes`: in another thread when that would hold up an event loop."""

    __slots__ = ("nbytes", "work")

    def __init__(self, work: Callable[[], Any], nbytes: int) -> None:
        self.work = work
        self.nbytes = nbytes


Effect: TypeAlias = Call | HoldSession | Notify | Offload | Together | Trying
Operation: TypeAlias = Generator[Effect, Any, T]
