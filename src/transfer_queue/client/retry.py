"""How long a call whose connection was lost is sent again. It keeps its id, so it has one outcome."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable
from typing import TypeVar

from transfer_queue.client.effects import Call
from transfer_queue.errors import ServiceRestarted, ServiceUnavailable, TooManyConnections
from transfer_queue.wire.address import SocketMissing

T = TypeVar("T")
REFUSED_S = 3.0  # for so long a host where nobody listens, or not for this life, may be one that does in a moment
MIN_TIMEOUT_S = 0.001
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 1.0


class NotJoined(ServiceUnavailable):
    """The storage unit that was named serves another life of the service. One that stayed joins in a moment."""


def left_s(effect: Call, left_s: float) -> float:
    """The seconds of another attempt, of so many that are left. The request waits in the server for what is left of its
    own time: its asker is to hear what was missing, not that nobody answered."""
    if effect.wait_s and hasattr(effect.request, "timeout_s"):
        effect.request.timeout_s = max(0.0, left_s - effect.grace_s)
    return max(MIN_TIMEOUT_S, left_s)


class Retry:
    """The attempts of one call until `deadline` (time.monotonic()).

    Networks cut connections and mend, and servers are killed and replaced: a call is tried again until its deadline.
    Where nobody listens at a unix socket the server is gone, for a standby listens there from the first moment on. One
    whose socket was removed is not, and another thread may give back a connection to it.
    """

    def __init__(self, is_local: bool, deadline: float) -> None:
        self._is_local = is_local
        self._deadline = deadline
        self._attempts = 0
        self._refused_at: float | None = None

    def pause_s(self, error: ServiceUnavailable) -> float | None:
        """Seconds to wait before the next attempt; None when there is to be none."""
        self._attempts += 1
        now = time.monotonic()
        if isinstance(error, (ServiceRestarted, TooManyConnections)) or now >= self._deadline:
            return None
        refused = nobody_listens(error)
        if self._is_local and refused:
            return None
        if not refused and not isinstance(error, NotJoined) and not isinstance(error.__cause__, SocketMissing):
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = now
        elif now - self._refused_at > REFUSED_S:
            return None
        if self._attempts == 1 and not refused:
            return 0.0
        longest = min(FIRST_PAUSE_S * 2 ** min(self._attempts, 10), LONGEST_PAUSE_S, self._deadline - now)
        return longest * random.uniform(0.5, 1.0)  # thousands that lost the same server must not come back together


def connected(connect: Callable[[float], T], is_local: bool, within_s: float) -> T:
    """What `connect(seconds)` makes, tried again for `within_s`: a server may be killed as it answers, and replaced."""
    deadline = time.monotonic() + within_s
    retry = Retry(is_local, deadline)
    while True:
        try:
            return connect(max(MIN_TIMEOUT_S, deadline - time.monotonic()))
        except ServiceUnavailable as error:
            pause_s = retry.pause_s(error)
            if pause_s is None:
                raise
        select.select([], [], [], pause_s)


def nobody_listens(error: ServiceUnavailable) -> bool:
    """Whether there is a host, but no server at the address: none that runs (`SocketMissing` is another error)."""
    return isinstance(error.__cause__, (ConnectionRefusedError, FileNotFoundError))
