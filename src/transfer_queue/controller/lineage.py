"""Whose numbers of rows mean the same rows here.

A service names rows by numbers that it never uses twice, but the next service begins anew. So whoever names rows says
which life the numbers are from (`wire.lives`). A loaded checkpoint brings rows with the numbers they had: those up to
the instant it was saved keep their meaning, in whatever life they were given. All others of before are lost.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.leases import REQUESTS as LEASE_REQUESTS
from transfer_queue.errors import DataLost, LeaseExpired
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import Numbers, indexes_of
from transfer_queue.wire.lives import naming, service_of

REMEMBERED = 64  # lives; the oldest are forgotten, and metadata of theirs refused


class Lineage:
    """`service_id` names this service, `life` its rows since the last of its `loads`. `ends`: of earlier lives, the
    first number that does not mean the same here."""

    def __init__(self, service_id: bytes) -> None:
        self.service_id = self.life = service_id
        self.loads = 0
        self.ends: dict[bytes, int] = {}

    def is_of(self, service_id: bytes) -> bool:
        """Whether rows of that service may be here."""
        return service_id in {service_of(life) for life in (*self.ends, self.life)}

    def are_here(self, life: bytes, rows: Numbers) -> NDArray[np.bool_]:
        """Which of these rows of a life mean the same here."""
        end = math.inf if life == self.life else self.ends.get(life, 0)
        return rows < end

    def check(self, message: m.Request) -> None:
        """Raises `DataLost` for rows that are not those of before, `LeaseExpired` for a lease of another service."""
        named: bytes = getattr(message, "service", b"")
        if named and named != self.life:
            self._check_of_other_life(message, named)

    def _check_of_other_life(self, message: m.Request, named: bytes) -> None:
        if isinstance(message, (*LEASE_REQUESTS, m.MarkStep)):
            if service_of(named) != self.service_id:
                raise LeaseExpired("a lease ended with the service that gave it, and with it its rows")
            return
        keys: list[str] | None = getattr(message, "keys", None)
        rows = indexes_of(getattr(message, "rows", None) or b"")
        if named in self.ends and not bool((rows >= self.ends[named]).any()):
            return
        lost = keys if keys is not None else rows.tolist()
        where = getattr(message, "partition", "")
        raise DataLost(f"partition {where!r}: rows {lost[:8]} were lost with the service that held them")

    def saved(self, next_index: int) -> dict[bytes, int]:
        """What a checkpoint of this instant says; rows from `next_index` on are not in it."""
        return {**self.ends, self.life: next_index}

    def restored(self, ends: dict[bytes, int]) -> None:
        """The rows of a checkpoint took the place of all others."""
        self.loads += 1
        self.life = naming(self.service_id, self.loads)
        self.ends = dict(list(ends.items())[-REMEMBERED:])
