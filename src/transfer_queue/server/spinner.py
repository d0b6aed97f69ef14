"""A server that looks for the next request for a while before it sleeps, as long as that pays."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from transfer_queue.memory.processors import usable_processors

COST = 5  # a look in vain takes the processor time that so many requests, found awake, save
MAX_CREDIT = 64
WINDOW = 32  # requests, whose askers are the clients at work
TRY_AGAIN = 100  # without credit after so many requests the next is followed by a look: clients may have changed


class Spinner:
    """Keeps an event loop from sleeping for `spin_s` after a request. A processor that sleeps takes longer to wake, and
    has colder caches, than most requests take: one client that calls again and again waits about half as long for its
    answers. The server looks while such a client works, so it takes more of a processor (docs/benchmarks.md).

    Who calls less often than that gains nothing, and a look in vain takes a processor from others. So each request that
    is found by looking earns credit, each look in vain costs `COST`, and without credit the loop sleeps at once. So it
    does where as many clients are at work as there are processors: one of them waits for that of the server.
    `spins`: whether it looks now.
    """

    def __init__(self, spin_s: float) -> None:
        self._spin_s = spin_s
        # At so many clients it sleeps. With less than two processors none can run while this looks.
        processors = usable_processors()
        self._limit = processors if spin_s and processors >= 2 else 0.0
        self._askers: deque[int] = deque(maxlen=WINDOW)  # of the last requests
        self._until = 0.0
        self.spins = False
        self._credit = MAX_CREDIT // 2
        self._slept = 0  # how many requests were followed by sleep

    def handled(self, asker: object) -> None:
        """Requests of one connection have been handled: the next may be near."""
        self._askers.append(id(asker))
        if len(set(self._askers)) >= self._limit:
            self._until = 0.0
            return
        if self.spins:
            self._credit = min(self._credit + 1, MAX_CREDIT)
        elif self._credit > 0 or self._slept >= TRY_AGAIN:
            self.spins, self._slept = True, 0
            loop = asyncio.get_running_loop()  # once: that costs a call of the system
            loop.call_soon(self._look, loop)
        else:
            self._slept += 1
            return
        self._until = time.monotonic() + self._spin_s

    def handled_last(self, asker: object) -> bool:
        """Whether the requests before were of this connection as well."""
        return bool(self._askers) and self._askers[-1] == id(asker)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop looks at its sockets, without sleeping, before it comes here again."""
        if time.monotonic() < self._until:
            loop.call_soon(self._look, loop)
        else:
            self.spins = False
            self._credit = max(0, self._credit - COST)
