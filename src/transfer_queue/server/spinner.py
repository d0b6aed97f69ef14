"""A server that looks for the next request for a while before it sleeps, as long as that pays."""

from __future__ import annotations

import asyncio
import time

from transfer_queue.memory.processors import usable_processors

COST = 5  # a look in vain takes the processor time that so many requests, found awake, save
MAX_CREDIT = 64
TRY_AGAIN = 100  # without credit after so many requests the next is followed by a look: clients may have changed


class Spinner:
    """Keeps an event loop from sleeping for `spin_s` after a request. A processor that sleeps takes longer to wake, and
    has colder caches, than most requests take: one client that calls again and again waits about half as long for its
    answers. The server looks while such a client works, so it takes more of a processor (docs/benchmarks.md).

    Who calls less often than that gains nothing, and a look in vain takes a processor from others. So each request that
    is found by looking earns credit, each look in vain costs `COST`, and without credit the loop sleeps at once.
    `spins`: whether it looks now.
    """

    def __init__(self, spin_s: float) -> None:
        alone = usable_processors() < 2  # a client cannot run while this looks
        self._spin_s = 0.0 if alone else spin_s
        self._until = 0.0
        self.spins = False
        self._credit = MAX_CREDIT // 2
        self._slept = 0  # how many requests were followed by sleep

    def handled(self) -> None:
        """Requests have been handled: the next may be near."""
        if not self._spin_s:
            return
        if self.spins:
            self._credit = min(self._credit + 1, MAX_CREDIT)
        elif self._credit > 0 or self._slept >= TRY_AGAIN:
            self.spins, self._slept = True, 0
            asyncio.get_running_loop().call_soon(self._look)
        else:
            self._slept += 1
            return
        self._until = time.monotonic() + self._spin_s

    def _look(self) -> None:
        """The loop looks at its sockets, without sleeping, before it comes here again."""
        if time.monotonic() < self._until:
            asyncio.get_running_loop().call_soon(self._look)
        else:
            self.spins = False
            self._credit = max(0, self._credit - COST)
