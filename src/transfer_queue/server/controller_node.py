"""The server that holds the controller: what it does beyond serving clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from transfer_queue.controller import Controller
from transfer_queue.errors import InvalidInput, TransferQueueError
from transfer_queue.memory.bytes import Ints
from transfer_queue.server.compaction import Compactor, start_compaction
from transfer_queue.server.copies import kept_first
from transfer_queue.server.gathering import Gatherer, gather_lone_rows
from transfer_queue.server.service import Service
from transfer_queue.server.spilling import Spiller
from transfer_queue.server.unit_registry import UnitConnection, unit_of
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

log = logging.getLogger("transfer_queue.server")


class ControllerNode:
    """The controller, the unit of its host, and the units that joined it. Clients are told `client_config`."""

    def __init__(
        self,
        controller: Controller,
        unit: Unit,
        make: Callable[[Controller, Unit], Service] = Service,
        client_config: dict[str, Any] | None = None,
    ) -> None:
        self.controller = controller
        self.client_config = client_config or {}
        self.service = make(controller, unit)
        self.service.life = self.service.life._replace(service=controller.lineage.service_id)
        self.members = self.service.members
        self.members.hide, self.members.show, self.members.lose = controller.hide, controller.show, controller.lose
        self._gathering: asyncio.Task[None] | None
        self.members.known = lambda: controller.block_index.entries
        self._begin()

    def work(self) -> None:
        """What became due while messages were handled."""
        start_compaction(self.controller, self.members, self.compactor)
        self.spiller.look()
        if self.controller.state.lone_blocks.is_due and (self._gathering is None or self._gathering.done()):
            gathering = gather_lone_rows(self.controller, self.members, self.gatherer)
            self._gathering = asyncio.get_running_loop().create_task(gathering)

    def start_over(self, now: float) -> None:
        """Go on, in a process that takes over."""
        self._begin()
        self.members.all_left(now)
        self.service.lose_connections()

    def _begin(self) -> None:
        """On this event loop; what was begun on the one before is gone with it."""
        self.compactor = Compactor(self.service, self._moved_here)
        self.gatherer = Gatherer(self.service, self._gathered_here)
        self.spiller = Spiller(self.service, self._spilled_here)
        self._gathering = None

    def close(self) -> None:
        """Leave what was begun: the unit is about to go."""
        self.spiller.close()
        if self._gathering is not None:
            self._gathering.cancel()

    async def _gathered_here(self, target: int, blocks: Ints, rows: Ints) -> bool:
        return await kept_first(self.service, target) and self.controller.gather(target, blocks, rows)

    async def _moved_here(self, block: int, target: int, rows: Ints) -> bool:
        return await kept_first(self.service, target) and self.controller.relocate(block, target, rows)

    async def _spilled_here(self, block: int, target: int, rows: Ints) -> bool:
        """As `_moved_here`, of a copy: what the journal has of the block is that of the copy from then on."""
        moved = self.controller.relocate(block, target, rows)
        if moved and self.service.journal is not None:
            self.service.journal.copied(block, target)
        return moved

    def _may_have(self, message: m.Join) -> bool:
        """Whether the blocks of a unit's journal may be those of rows here, or were before a checkpoint was loaded."""
        return self.controller.lineage.is_of(message.service) or self.members.knows(message.incarnation)

    def _give_up_missing(self, message: m.Join) -> None:
        """Rows whose blocks are not in the journal that a unit begins with can never be read."""
        missing = self.members.missing(message)
        if missing:
            rows, gone, freed = self.controller.lose_blocks(missing), set(missing), self.controller.block_index.freed
            freed[:] = [block for block in freed if block not in gone]  # the unit has nothing to recycle
            told = ", ".join(f"{count} rows of partition {name!r}" for name, count in sorted(rows.items()))
            text = f"{len(missing)} blocks are not in it, and with them are lost {told}"
            log.error("storage unit %d: its journal is not of the same time as this one: %s", unit_of(missing[0]), text)

    def of_unit(self, message: m.Request, host: str, line: UnitConnection, now: float) -> m.Reply:
        """The reply to a storage unit of another host, which connects from `host`."""
        unit = self.members.of_line(line)
        try:
            match message:
                case m.Join(service=service) if service and not self._may_have(message):
                    raise InvalidInput("the journal of this unit has rows of another service")
                case m.Join(address=address):
                    where = _bracketed(host) * address.startswith(":") + address
                    self.members.refuse_second(message, where)
                    self.controller.expire(now)  # rows are ready again: leases of who gets them begin now
                    self._give_up_missing(message)
                    joined = self.members.join(message, where, line)
                    self.service.apply_outcomes()
                    return joined
                case _ if not unit:
                    return m.Failed(message.rid, "row_cleared", "this unit has joined again over another connection")
                case m.ReportUnit():
                    self.members.reported(unit, message, now)
                    return m.Done(message.rid)
                case m.ResolveCommits():
                    resolved = self.members.resolve(message, unit)
                    self.controller.refuse_commits(numbers_of(resolved.numbers))
                    self.service.apply_outcomes()
                    return resolved
                case m.Moved(block=block, target=target, rows=rows) if unit_of(target) == unit:
                    if self.controller.relocate(block, target, numbers_of(rows)):
                        self.service.apply_outcomes()
                        return m.Done(message.rid)
                case m.Gathered(target=target, blocks=blocks, rows=rows) if unit_of(target) == unit:
                    if self.controller.gather(target, numbers_of(blocks), numbers_of(rows)):
                        self.service.apply_outcomes()
                        return m.Done(message.rid)
        except TransferQueueError as error:
            return m.Failed(message.rid, error.code, str(error))
        return m.Failed(message.rid, "row_cleared", "nothing of it is left")


def _bracketed(host: str) -> str:
    """A host as it stands in an address: an IPv6 one in brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host else host
