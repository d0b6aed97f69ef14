"""A storage unit without a server, driven by short calls; checks its invariants after every one."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.storage.blocks import NOWHERE, SpillSpace, Unit
from transfer_queue.storage.shm import SMALL_NBYTES
from transfer_queue.wire.messages import Allocate

BUDGET = 1 << 20
LARGE = SMALL_NBYTES + 1


class Shell:
    """A unit driven by short calls; its invariants are checked after every one."""

    def __init__(self, budget_nbytes: int = BUDGET, directory: str | None = None, spill: SpillSpace = NOWHERE) -> None:
        self.unit = Unit(budget_nbytes, directory, spill)

    def allocate(self, nbytes: int, session: bytes = b"s", ticket: Any = None, wait_s: float = 0.0, now: float = 0.0,
                 pin: bool = False) -> int | None:  # fmt: skip
        """The block's number, or None when parked."""
        reply = self.unit.allocate(Allocate(1, nbytes, pin, wait_s), ticket, session, now)
        self.unit.check_invariants()
        return None if reply is None else reply.block

    def published(self, nbytes: int, content: int = 0, session: bytes = b"s") -> int:
        number = self.allocate(nbytes, session)
        assert number is not None
        self.unit.memory(self.unit.unpublished(number, session))[:] = content
        self.unit.publish(number, b"layout")
        return number

    def bytes_of(self, number: int) -> np.ndarray[Any, Any]:
        block = self.unit.block(number)
        assert block is not None
        return self.unit.memory(block)

    def answers(self) -> list[tuple[Any, type]]:
        self.unit.check_invariants()
        found = [(ticket, type(reply)) for ticket, reply in self.unit.outbox]
        self.unit.outbox.clear()
        return found
