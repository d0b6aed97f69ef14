"""Whose long request is next: after one that took milliseconds the sockets are looked at before the next one runs, so
that short requests of others wait for one of them at most, however many come at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from transfer_queue.wire import messages as m

LONG_S = 0.001
# They may cost a table.
LONG = frozenset({m.ListKeys, m.Scan, m.ListTags, m.NameRows, m.Consumption, m.Production, m.Snapshot})


class TurnTaker(Protocol):
    """A connection whose next request may be a long one."""

    def take_turn(self) -> None: ...


class Turns:
    """Requests of one event loop that may take long, in order of arrival. A turn ends with one that did."""

    def __init__(self) -> None:
        self._waiting: deque[TurnTaker] = deque()
        self._rests = False  # a long one ran since the sockets were looked at

    def take(self, who: TurnTaker) -> bool:
        """Whether it is `who`'s turn now; otherwise `take_turn` is called when it is."""
        if not self._rests and not self._waiting:
            return True
        self._waiting.append(who)
        return False

    def took(self, started: float) -> None:
        """A request that began at `started` (time.perf_counter()) is done."""
        if time.perf_counter() - started > LONG_S and not self._rests:
            self._rests = True
            asyncio.get_running_loop().call_soon(self._next)  # after the sockets were looked at

    def _next(self) -> None:
        self._rests = False
        while self._waiting and not self._rests:
            self._waiting.popleft().take_turn()
