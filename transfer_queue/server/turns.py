"""Whose long request is next: of those that can take milliseconds, few run between two looks at the sockets, so that
short requests of others wait for one of them at most, however many come at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from transfer_queue.wire import messages as m

BUDGET_S = 0.002
LONG = frozenset({m.ListKeys, m.Scan, m.NameRows, m.Consumption, m.Production, m.Snapshot})  # they cost a whole table


class Waiting(Protocol):
    """A connection whose next request is a long one."""

    def take_turn(self) -> None: ...


class Turns:
    """Long requests of one event loop, in order of arrival. A turn is what one round of the loop may spend on them: the
    first one, and others until `BUDGET_S` has passed."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._since: float | None = None  # when the first one of this round began

    def take(self, who: Waiting) -> bool:
        """Whether it is `who`'s turn now; otherwise `take_turn` is called when it is."""
        if self._since is None:
            self._begin()
            return True
        if not self._waiting and time.perf_counter() - self._since < BUDGET_S:
            return True
        self._waiting.append(who)
        return False

    def _begin(self) -> None:
        self._since = time.perf_counter()
        asyncio.get_running_loop().call_soon(self._next)  # after the sockets were looked at again

    def _next(self) -> None:
        self._since = None
        if not self._waiting:
            return
        self._begin()
        end = time.perf_counter() + BUDGET_S
        self._waiting.popleft().take_turn()
        while self._waiting and time.perf_counter() < end:
            self._waiting.popleft().take_turn()
