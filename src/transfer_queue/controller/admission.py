"""How many rows producers may start before the next version of the weights, so that none is too old when it is used."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.unreceived import Unreceived
from transfer_queue.controller.weight_versions import WeightVersions
from transfer_queue.errors import DeadlineExceeded, InvalidInput
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire import messages as m


class AdmissionGrant(msgspec.Struct):
    """Rows admitted for one task since announcement `base`, less those that were given back."""

    base: int
    rows: int = 0


class Admissions:
    """The task uses `rows_per_version` rows for each version, so of the rows it gets, number i is used i //
    rows_per_version announcements after the first. Requests of one task are answered in order of arrival."""

    def __init__(
        self, outbox: list[tuple[Hashable, m.Reply]], unreceived: Unreceived, ledger: Ledger | None = None
    ) -> None:
        self.versions = WeightVersions()
        self.tasks: dict[str, AdmissionGrant] = {}
        self.parked: WaitQueue[m.Admit] = WaitQueue()
        self._outbox = outbox
        self._unreceived = unreceived
        self._ledger = ledger

    def admit(self, message: m.Admit, parked: Waiter[m.Admit]) -> m.Reply | None:
        """The answer, or None after parking the request. Raises `DeadlineExceeded` when it may not wait."""
        if message.max_age is None or message.rows_per_version is None:
            raise InvalidInput("admit needs max_staleness and rows_per_version, here or in controller.staleness")
        if message.max_age < 0 or message.rows_per_version < 1 or message.count < 1:
            raise InvalidInput("admit: a number of rows and rows_per_version from 1, max_staleness from 0")
        if message.count > (most := (message.max_age + 1) * message.rows_per_version):
            raise InvalidInput(f"{message.count} rows at once, of which some would be too old: at most {most}")
        if message.task not in self.tasks:
            self.tasks[message.task] = self._new()
            self._changed(message.task)
        waits = any(one.message.task == message.task for one in self.parked)
        if not waits and self._fits(message):
            return self._take(parked)
        if message.timeout_s <= 0:
            raise DeadlineExceeded(self._late(message))
        self.parked.add(parked)
        return None

    def _changed(self, task: str) -> None:
        if self._ledger is not None:
            self._ledger.granted(task, self.tasks[task].base, self.tasks[task].rows)

    def _new(self) -> AdmissionGrant:
        """The first version announced is what producers begin with: no rows were used for it."""
        return AdmissionGrant(max(1, self.versions.count))

    def _fits(self, message: m.Admit) -> bool:
        mine = self.tasks[message.task]
        versions = self.versions.count - mine.base + 1 + (message.max_age or 0)
        return mine.rows + message.count <= versions * (message.rows_per_version or 0)

    def _take(self, parked: Waiter[m.Admit]) -> m.Reply:
        message = parked.message
        self.tasks[message.task].rows += message.count
        self._changed(message.task)
        admitted = m.Admitted(message.rid, message.task, message.count)
        self._unreceived.add(parked.session, message.rid, admitted)
        return admitted

    def give_back(self, task: str, count: int) -> None:
        """These rows will not be used."""
        mine = self.tasks.get(task)
        if mine is not None and count:
            mine.rows = max(0, mine.rows - count)
            self._changed(task)
            self.serve()

    def serve(self) -> None:
        """Answer requests, as far as it goes now."""
        full: set[str] = set()
        for parked in self.parked:
            message = parked.message
            if message.task in full or not self._fits(message):
                full.add(message.task)
                continue
            self.parked.remove(parked)
            self._outbox.append((parked.ticket, self._take(parked)))

    def expire(self, now: float) -> None:
        expired = self.parked.expired(now)
        for parked in expired:
            failed = m.Failed(parked.message.rid, DeadlineExceeded.code, self._late(parked.message))
            self._outbox.append((parked.ticket, failed))
        if expired:
            self.serve()

    def forget(self, tickets: set[Hashable]) -> None:
        if self.parked.forget(tickets):
            self.serve()

    def restore(self, versions: WeightVersions, tasks: dict[str, AdmissionGrant]) -> None:
        """Go on from a saved state; requests that wait are judged by it."""
        self.versions, self.tasks = versions, tasks
        for parked in self.parked:
            self.tasks.setdefault(parked.message.task, self._new())
        self.serve()

    def _late(self, message: m.Admit) -> str:
        return f"{self.refusal(message)}, and no version came within {message.timeout_s:g} s"

    def refusal(self, message: m.Admit) -> str:
        """Why the request has to wait."""
        return (
            f"{message.count} more rows for task {message.task!r} would be more than {message.max_age} versions old: "
            f"{self.tasks[message.task].rows} are admitted"
        )
