"""Work that belongs to no request: done in slices, so that others are answered in between."""

from __future__ import annotations

from typing import Protocol

from transfer_queue.memory.bytes import PAGE
from transfer_queue.server.unit_registry import UnitRegistry
from transfer_queue.storage.blocks import Unit

DROPS = 64  # in a slice: less than 0.5 ms
DROPS_AT_ONCE = 16 * DROPS


class Unfinished(Protocol):
    """What has work left, of which `tidy` does a slice while it is `unfinished`; `freed` lists blocks to recycle."""

    @property
    def freed(self) -> list[int]: ...
    @property
    def unfinished(self) -> bool: ...

    def tidy(self) -> None: ...


class Recycler:
    """What the controller has left to do, and blocks to recycle that are too many for one go."""

    def __init__(self, controller: Unfinished, unit: Unit, members: UnitRegistry) -> None:
        self._controller = controller
        self._unit = unit
        self._members = members

    def __bool__(self) -> bool:
        return self._controller.unfinished or bool(self._controller.freed)

    def work(self) -> None:
        """A slice of it."""
        self._controller.tidy()
        self._drop(self._controller.freed, DROPS)

    def recycle(self) -> None:
        """The freed blocks, unless they are very many."""
        freed = self._controller.freed
        if freed and len(freed) <= DROPS_AT_ONCE:
            self._drop(freed, DROPS_AT_ONCE)

    def make_room(self, nbytes: int) -> None:
        """Work until so much fits, or nothing is left: memory that is yet to be freed is no reason to refuse."""
        while self._unit.used_nbytes + nbytes + PAGE > self._unit.budget_nbytes and self:
            self.work()

    def _drop(self, freed: list[int], count: int) -> None:
        blocks = freed[-count:]
        del freed[-count:]
        elsewhere = self._members.drop(blocks)
        for block in blocks:
            if block not in elsewhere and self._unit.block(block) is not None:
                self._unit.drop(block)

    def check_invariants(self) -> None:
        assert not self._controller.freed or len(self._controller.freed) > DROPS_AT_ONCE
