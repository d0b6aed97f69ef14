"""The connections of a session that belong to event loops: one for each loop and server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from transfer_queue.errors import TransferQueueError
from transfer_queue.wire.aio import AsyncConnection, opened


class LoopConnections:
    """`open_here(to)` opens one to a server on the running loop; `lost(to)` hears of one that has to be replaced."""

    def __init__(
        self, open_here: Callable[[str], Coroutine[Any, Any, AsyncConnection]], lost: Callable[[str], None]
    ) -> None:
        self._open_here, self._lost = open_here, lost
        self._opening: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[AsyncConnection]] = {}

    def here(self, to: str) -> AsyncConnection | None:
        """That of the running loop, where there is one that works."""
        found = opened(self._opening.get((asyncio.get_running_loop(), to)))
        return found if found is not None and found.error is None else None

    async def get(self, to: str, within_s: float) -> AsyncConnection | None:
        """That of the running loop, opened where there is none that works; None: not in time. A task of its own opens
        it, so that nobody else's call ends with the one that asked for it first. Raises what `open_here` does."""
        loop = asyncio.get_running_loop()
        opening = self._opening.get((loop, to))
        found = opened(opening)
        if found is not None and found.error is None:
            return found
        if opening is None or opening.done():
            if found is not None:
                self._lost(to)
            self._forget_closed_loops()
            opening = self._opening[loop, to] = loop.create_task(self._open_here(to))
            opening.add_done_callback(opened)  # an error counts as seen: whoever waits gets it, if somebody does
        if not (await asyncio.wait([opening], timeout=within_s))[0]:
            return None
        return opening.result()

    def all(self) -> list[AsyncConnection]:
        """Those that were opened."""
        return [one for one in map(opened, list(self._opening.values())) if one is not None]

    def abandon(self, reason: TransferQueueError) -> None:
        """Close all of them; calls in flight raise `reason`."""
        for connection in self.all():
            connection.abandon(reason)
        self._opening.clear()

    def _forget_closed_loops(self) -> None:
        for key in [key for key in list(self._opening) if key[0].is_closed()]:
            connection = opened(self._opening.pop(key, None))
            if connection is not None:
                connection.abandon()
