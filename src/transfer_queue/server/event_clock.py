"""The time of a server's events, which knows when the server stood still."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LATE_S = 1.0  # who looks so late did nothing meanwhile
READING_S = 1.0  # what came meanwhile is read within


class EventClock:
    """`next_look`: when somebody asks for the time at the latest. Where nobody did (SIGSTOP, or a machine
    that swaps), what came meanwhile is yet to be read, renewals of leases among it. Before anything ends,
    `stood_still(seconds)` is called then, with the time that is not to count."""

    def __init__(self, stood_still: Callable[[float], None]) -> None:
        self._stood_still = stood_still
        self.next_look = math.inf

    def now(self) -> float:
        """As `time.monotonic`."""
        now = time.monotonic()
        if now - self.next_look > LATE_S:
            late_s, self.next_look = now - self.next_look, math.inf
            self._stood_still(late_s + READING_S)
        return now
