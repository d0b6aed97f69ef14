"""The server of a unit with a journal, on a machine whose power goes after a random event; driven by one seed.

The controller is elsewhere and stays. Whatever rows it has of the unit, their bytes are in what the disk has left; and
when the unit has joined again it has those blocks and no others. `python -m unit_power_sim SEED` runs a seed; threads
write, so that a run of the same seed may stop at another write.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from power_sim import ForgetfulDisk, let_go, powered
from standby_sim import BUDGET, SPILL
from unit_sim import Controller, Line, Simulation, settle_doubts

from transfer_queue.server.journal.journal import DiskJournal
from transfer_queue.server.journal.kept_member import KeptMember, Membership, MemberUnit
from transfer_queue.server.journal.recovery import recover
from transfer_queue.server.service import Service
from transfer_queue.server.standby.recording import Recorder, recording_parts
from transfer_queue.storage.blocks import SpillSpace
from transfer_queue.wire import messages as m

MEMBERSHIP = Membership(3, b"i" * 16, b"s" * 16)


def member_service(recorder: Recorder, budget_nbytes: int = BUDGET, spill: SpillSpace = SPILL) -> Service:
    unit = MemberUnit(budget_nbytes, None, recorder, spill)
    return Service(Line(recorder), unit, **recording_parts(unit, recorder))


class UnitPowerSimulation(Simulation):
    """A run up to the moment when the power goes. `contents` are the bytes of what the controller was told of."""

    def __init__(self, seed: int, disk: ForgetfulDisk) -> None:
        super().__init__(seed)
        self.service.unit.close()
        self.service = member_service(self._recorder)
        self.service.unit.shm.open()
        self.service.unit.renumber(MEMBERSHIP.unit)
        assert isinstance(self.service.unit, MemberUnit)
        self.unit = self.service.unit
        kept = KeptMember(SimpleNamespace(membership=MEMBERSHIP), self.unit, self.service.pending)
        self.power = DiskJournal(str(disk.directory), kept, self.unit, lambda: None)
        self.service.journal = self.power
        self.service.deliver = self._deliver
        self.contents: dict[int, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        pass_on = self.line.handle

        def handle(message: m.Request, ticket: Any, session: bytes, now: float) -> m.Reply | None:
            if isinstance(message, m.Commit):
                self._tell_of(message.block)
            return pass_on(message, ticket, session, now)

        self.line.handle = handle  # type: ignore[method-assign]

    def _tell_of(self, number: int) -> None:
        block = self.unit.block(number)
        if block is None:  # asked again, and cleared meanwhile
            assert number in self.contents
            return
        self.contents.setdefault(number, bytes(memoryview(self.unit.memory(block))))  # type: ignore[arg-type]

    def _allocate(self) -> None:
        super()._allocate()
        for numbers in self._allocated.values():
            block = self.unit.block(numbers[-1]) if numbers else None
            if block is not None and block.number not in self.contents and not block.layout:
                self.unit.memory(block)[:] = self._random.randrange(256)

    def _move(self) -> None:
        task = asyncio.get_running_loop().create_task(self._move_kept())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _move_kept(self) -> None:
        """Compaction and spilling: the controller takes a copy in the place of a block, once that is on the disk."""
        held = self.service.pending.blocks()
        blocks = [one for one in sorted(self.controller.needed) if one in self.unit._blocks and one not in held]
        blocks = [one for one in blocks if self.unit._blocks[one].published and not self.unit._blocks[one].dropped]
        if not blocks:
            return
        number = self._random.choice(blocks)
        block, copies = self.unit._blocks[number], self._random.random() < 0.5
        target = self.unit.place(block.nbytes if copies else self._random.choice([100, 70_000]), b"mover", copies)
        if target is None:
            return
        self.unit.memory(target)[:] = memoryview(self.unit.memory(block)) if copies else self._random.randrange(256)  # type: ignore[arg-type,call-overload]
        self.unit.pin(number, b"mover")
        self.unit.publish(target.number, block.layout if copies else b"moved")
        if copies:
            self.power.copied(number, target.number)
        await self.power.keep(target)
        self._recorder.settle()
        if number in self.controller.needed:
            self._tell_of(target.number)
            self.controller.needed ^= {number, target.number}
            self.line.freed.append(number)
        else:
            self.unit.drop(target.number)
        self.unit.unpin(number, b"mover")
        self.service.apply_outcomes()

    async def play(self, events: int) -> None:
        self._recorder.settled = self.power.settle
        await self.power.start()
        await self.power.complete()
        for _ in range(events):
            self.run(1)
            self.moments.clear()
            for _ in range(self._random.choice([0, 0, 1, 3])):
                await asyncio.sleep(self._random.choice([0, 0, 0.001]))

    async def unplug(self) -> None:
        """Let go of everything, after the power went."""
        await let_go(self.power, {*self._tasks, *self.service._background})
        self.close()


async def lost(seed: int, events: int = 80) -> list[str]:
    """What is otherwise than the controller says, after a run in which the power went."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as left:
        disk = ForgetfulDisk(Path(os.path.realpath(name)), chance)
        with powered(chance, {}, disk):
            run = UnitPowerSimulation(seed, disk)
            await run.play(chance.randrange(1, events))
            disk.left(Path(left))
            controller, asked = run.controller, list(run.line.asked.values())
            needed = set(controller.needed)
            await run.unplug()
            controller.needed = needed  # whatever was still under way came to nothing
        return [f"seed {seed}: {one}" for one in _compared(run, controller, asked, chance, Path(left))]


def _compared(
    run: UnitPowerSimulation, controller: Controller, asked: list[Any], chance: random.Random, left: Path
) -> Iterator[str]:
    """The unit joins again; what it had passed on arrives before that, afterwards, or never."""
    service = member_service(Recorder(), 2 * BUDGET, SpillSpace(SPILL.directory, 2 * BUDGET))
    service.unit.shm.open()
    assert isinstance(service.unit, MemberUnit)
    member = SimpleNamespace(membership=None)
    try:
        recover(left, KeptMember(member, service.unit, service.pending), service.unit)
        if member.membership != MEMBERSHIP:
            yield f"it is {member.membership}"
        late = [one for one in asked if chance.random() < 0.7]
        for ident, message in late[::2]:
            controller.carry_out(ident, message, True)
        settle_doubts(service, controller)
        for ident, message in late[1::2]:
            controller.carry_out(ident, message, True)
        for number in controller.needed:
            block = service.unit.block(number)
            if block is None or block.dropped:
                yield f"block {number} is not there"
            elif bytes(memoryview(service.unit.memory(block))) != run.contents[number]:  # type: ignore[arg-type]
                yield f"block {number} has other bytes"
        more = set(service.unit.published()) - controller.needed
        if more:
            yield f"blocks {sorted(more)} are there, and not needed"
        service.check_invariants()
        service.controller.freed.extend(controller.needed)
        service.apply_outcomes()
        if service.unit.places or service.unit._uses:
            yield f"{service.unit.places} are taken on the disk"
    finally:
        service.unit.close()


if __name__ == "__main__":
    print(*asyncio.run(lost(int(sys.argv[1]))), sep="\n")
