"""Those who wait until keys or tags change."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from transfer_queue.controller.table import Table
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire import messages as m


class Watching:
    """Answers to parked requests go to `outbox`. Whoever changes something calls `serve` when `parked` has any."""

    requests = (m.WatchKeys,)

    def __init__(self, outbox: list[tuple[Hashable, m.Reply]], tables: Mapping[str, Table]) -> None:
        self.parked: WaitQueue[m.WatchKeys] = WaitQueue()
        self._outbox = outbox
        self._tables = tables

    def handle(self, message: m.WatchKeys, ticket: Hashable, session: bytes, now: float) -> m.Reply | None:
        """The answer, or None after parking."""
        versions = self._versions(message)
        if versions != message.known or message.timeout_s <= 0:
            return m.KeyVersions(message.rid, versions)
        self.parked.add(Waiter(ticket, session, message, now + message.timeout_s))
        return None

    def serve(self) -> None:
        """Answer those for whom something is other than they know it."""
        for waiter in list(self.parked):
            versions = self._versions(waiter.message)
            if versions != waiter.message.known:
                self.parked.remove(waiter)
                self._outbox.append((waiter.ticket, m.KeyVersions(waiter.message.rid, versions)))

    def expire(self, now: float) -> None:
        for waiter in self.parked.expired(now):
            self._outbox.append((waiter.ticket, m.KeyVersions(waiter.message.rid, self._versions(waiter.message))))

    def forget(self, tickets: set[Hashable]) -> None:
        self.parked.forget(tickets)

    def _versions(self, message: m.WatchKeys) -> dict[str, tuple[int, int]]:
        """Which table has each name, and how often it changed."""
        names = self._tables if message.partition is None else self._tables.keys() & {message.partition}
        logs = {name: self._tables[name].log for name in names}
        return {name: (log.table, log.version) for name, log in logs.items()}
