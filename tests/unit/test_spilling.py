"""Blocks that have no room in memory: which are moved, what counts, and what is done when the disk is at its end."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from services import FIELD
from units import Shell
from xxhash import xxh3_64_intdigest

from transfer_queue.client.spilled import SpilledBlocks
from transfer_queue.codec.plan import plan_batch
from transfer_queue.controller import Controller
from transfer_queue.errors import DataLost, ServiceUnavailable, StoreFull
from transfer_queue.memory.bytes import Ints
from transfer_queue.sampler import SequentialSampler
from transfer_queue.server.service import Service
from transfer_queue.server.spilling import Spiller
from transfer_queue.storage.blocks import SpillSpace, Unit
from transfer_queue.wire import messages as m

NBYTES = 100_000
BLOCK = 25 * 4096  # what a block of so many bytes takes
BUDGET = 10 * BLOCK


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(BUDGET, spill=SpillSpace(str(tmp_path), 3 * BLOCK))
    yield shell
    shell.unit.close()


def full(shell: Shell, count: int) -> list[int]:
    return [shell.published(NBYTES, number) for number in range(count)]


def test_memory_is_given_free_before_it_is_full(shell: Shell) -> None:
    full(shell, 8)
    assert shell.unit.surplus_nbytes() == 0
    full(shell, 1)
    assert shell.unit.surplus_nbytes() == 9 * BLOCK - int(0.75 * BUDGET)


def test_who_waits_is_told_how_much_is_missing(shell: Shell) -> None:
    full(shell, 10)
    assert shell.allocate(2 * NBYTES, wait_s=1.0) is None
    assert shell.unit.surplus_nbytes() == shell.unit.shm.rounded(2 * NBYTES)


def test_the_longest_unread_go_first_and_those_that_are_read_stay(shell: Shell) -> None:
    blocks = full(shell, 4)
    shell.unit.pin(blocks[0], b"s", 1)
    shell.unit.pin(blocks[1], b"s", 2)
    shell.unit.unpin(blocks[0], b"s", 1)
    chosen = [block.number for block in shell.unit.longest_unread(BUDGET)]
    assert chosen == [blocks[2], blocks[3], blocks[0]]
    assert len(shell.unit.longest_unread(1)) == 1


def test_small_blocks_and_those_that_are_gone_are_never_chosen(shell: Shell) -> None:
    shell.published(100)
    shell.unit.drop(full(shell, 1)[0])
    assert not shell.unit.can_spill


def test_disk_and_memory_are_counted_apart(shell: Shell) -> None:
    full(shell, 10)
    on_disk = [shell.unit.place(NBYTES, None, spills=True) for _ in range(4)]
    assert on_disk.pop() is None, "its budget is at an end"
    assert shell.unit.used_nbytes == BUDGET
    assert shell.unit.spilled_nbytes == 3 * BLOCK
    for block in on_disk:
        assert block is not None
        shell.unit.publish(block.number, b"layout", 7)
        assert shell.unit.is_spilled(block)
        shell.unit.drop(block.number)
    shell.unit.check_invariants()
    assert shell.unit.spilled_nbytes == shell.unit.num_spilled == 0


def test_space_of_the_disk_is_returned(shell: Shell) -> None:
    block = shell.unit.place(NBYTES, None, spills=True)
    assert block is not None
    assert shell.unit.shm.resident_nbytes(spills=True) >= NBYTES
    shell.unit.drop(block.number)
    shell.unit.trim(0)
    assert shell.unit.shm.resident_nbytes(spills=True) == 0


# moving


class Rig:
    """A service whose memory is full, and what moves its blocks."""

    def __init__(self, directory: str, count: int = 10) -> None:
        self.controller = Controller(SequentialSampler(), reserved_rows=0)
        self.unit = Unit(BUDGET, None, SpillSpace(directory, 8 * BLOCK))
        self.service = Service(self.controller, self.unit)
        self.session = self.service.sessions.attach(b"s", local=True)
        self.spiller = Spiller(self.service, self.moved)
        self.meanwhile: Any = lambda block: None
        for number in range(count):
            self.put(number)

    def put(self, number: int) -> None:
        plan = plan_batch({"x": np.full((2, NBYTES // 2), number, np.uint8)}, 2, False)
        block = self.unit.place(plan.nbytes, b"s")
        assert block is not None
        self.unit.memory(block)[:] = number
        commit = m.Commit(number + 1, "p", 2, None, None, FIELD, block.number, plan.layout(), None, 0.0)
        assert isinstance(self.ask(commit), m.Committed)

    def ask(self, message: m.Request) -> Any:
        answer = self.service.handle(message, memoryview(b""), self.session, ("link", message.rid), 0.0)
        self.service.check_invariants()
        return None if answer is None else answer[0]

    async def moved(self, block: int, target: int, rows: Ints) -> bool:
        self.meanwhile(block)
        return self.controller.relocate(block, target, rows)

    def run(self) -> None:
        async def look() -> None:
            self.spiller.look()
            if self.spiller._task is not None:
                await self.spiller._task

        asyncio.run(look())
        self.service.check_invariants()

    def content(self) -> list[int]:
        """The first byte of every block that rows lie in."""
        found = []
        for number in self.controller.block_index.entries:
            block = self.unit.block(number)
            assert block is not None
            found.append(int(self.unit.memory(block)[0]))
        return sorted(found)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(str(tmp_path))
    yield rig
    rig.unit.close()


def test_moved_rows_are_what_they_were(rig: Rig) -> None:
    rig.run()
    assert rig.spiller.num_moved == rig.unit.num_spilled == 3
    assert rig.unit.surplus_nbytes() == 0
    assert rig.content() == list(range(10))
    lies = rig.ask(m.Get(100, "p", None, np.arange(4).tobytes(), ["x"], False)).pieces
    assert all(piece.location.digest for piece in lies)


def test_a_block_that_somebody_began_to_read_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(iter(rig.controller.block_index.entries))
    write = rig.spiller._write

    def read_meanwhile(copies: Any) -> list[int]:
        rig.unit.pin(first, b"s", 50)
        monkeypatch.undo()
        return write(copies)

    monkeypatch.setattr(rig.spiller, "_write", read_meanwhile)
    rig.run()
    assert rig.unit.block(first) is not None
    assert not rig.unit.is_spilled(rig.unit.block(first))  # type: ignore[arg-type]
    assert rig.unit.num_spilled == 3, "others went in its place"


def test_moved_rows_into_which_somebody_writes_meanwhile_can_be_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who filled a block may write there after its commit."""
    written, memories = os.pwrite, {number: rig.unit.memory(block) for number, block in rig.unit._blocks.items()}

    def write_and_change(fd: int, data: Any, offset: int) -> int:
        count = written(fd, data, offset)
        for memory in memories.values():
            memory[:] += 1
        return count

    monkeypatch.setattr(os, "pwrite", write_and_change)
    rig.run()
    moved = [block for block in rig.unit._blocks.values() if rig.unit.is_spilled(block)]
    assert len([rig.unit.content(block) for block in moved]) == 3


def test_a_copy_is_not_offered_to_the_controller_before_it_took_it(rig: Rig) -> None:
    """A unit that joins again meanwhile would be told that no row lies there, and the rows would move to nowhere."""
    offered: list[int] = []
    moved = rig.moved

    async def look(block: int, target: int, rows: Ints) -> bool:
        offered.extend(one for one in rig.unit.published() if one == target)
        return await moved(block, target, rows)

    rig.spiller._moved = look
    rig.run()
    assert rig.spiller.num_moved == 3
    assert offered == []


def test_rows_that_are_cleared_meanwhile_leave_nothing(rig: Rig) -> None:
    rig.meanwhile = lambda block: rig.ask(m.Clear(200 + block, "p", None, None))
    rig.run()
    rig.service.apply_outcomes()
    assert rig.unit.used_nbytes == rig.unit.spilled_nbytes == 0


def test_a_disk_with_an_error_leaves_everything_in_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", broken)
    rig.run()
    assert rig.unit.num_spilled == 0
    assert rig.content() == list(range(10))


def test_a_disk_that_is_full_is_asked_again_after_a_while(tmp_path: Path) -> None:
    rig = Rig(str(tmp_path))
    rig.unit.spill = SpillSpace(str(tmp_path), BLOCK)
    rig.run()
    assert rig.unit.num_spilled == 1
    rig.run()
    assert rig.unit.num_spilled == 1
    assert rig.unit.disk_is_short
    assert "bytes do not fit" in rig.unit.full(1)
    assert str(tmp_path) in rig.unit.full(1)
    rig.unit.close()


def test_room_that_comes_back_on_the_disk_is_used_at_once(tmp_path: Path) -> None:
    rig = Rig(str(tmp_path))
    rig.unit.spill = SpillSpace(str(tmp_path), BLOCK)
    rig.run()
    rig.ask(m.Clear(100, "p", None, np.arange(2).tobytes()))  # the rows that were put first
    rig.service.apply_outcomes()
    assert rig.unit.num_spilled == 0
    rig.run()
    assert rig.unit.num_spilled == 1
    rig.unit.close()


def test_a_timer_that_fires_early_begins_the_next_attempt_as_well(tmp_path: Path) -> None:
    """uvloop counts from the begin of its turn, so the clock may be a little short of the time that was asked for."""
    rig = Rig(str(tmp_path))
    rig.unit.spill = SpillSpace(str(tmp_path), 1)
    rig.service.deliver = rig.spiller.look
    began = []

    async def fire_early() -> None:
        rig.spiller.look()
        await rig.spiller._task  # type: ignore[misc]
        rig.spiller._pause._run()  # type: ignore[union-attr]
        began.append(rig.spiller._task)
        await rig.spiller._task  # type: ignore[misc]

    asyncio.run(fire_early())
    assert began[0] is not None
    rig.unit.close()


def test_a_directory_that_is_gone_leaves_everything_in_memory_and_is_asked_again(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    rig = Rig(str(folder))
    folder.rmdir()
    rig.run()
    assert rig.unit.num_spilled == 0
    assert not rig.unit.pinned_nbytes()
    assert "No such file" in rig.unit.full(1)
    folder.mkdir()
    rig.spiller._end_pause()
    rig.run()
    assert rig.unit.num_spilled == 3
    assert rig.content() == list(range(10))
    rig.unit.close()


def test_blocks_whose_rows_are_gone_are_copied_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a snapshot is open they stay in memory."""
    rig.controller.state.captures.add((b"saver", 1))
    rig.ask(m.Clear(100, "p", None, None))
    copied: list[int] = []
    write = rig.spiller._write

    def counted(copies: Any) -> list[int]:
        copied.extend(one.block.number for one in copies)
        return write(copies)

    monkeypatch.setattr(rig.spiller, "_write", counted)
    for _ in range(3):
        rig.spiller._end_pause()
        rig.run()
    assert len(copied) == len(set(copied))
    assert rig.unit.num_spilled == 0


def test_nothing_is_moved_while_it_is_not_known_what_became_of_a_copy(rig: Rig) -> None:
    async def away(block: int, target: int, rows: Ints) -> bool:
        raise ServiceUnavailable("the controller is away")

    rig.spiller._moved = away
    for _ in range(3):
        rig.spiller._end_pause()
        rig.run()
    assert len(rig.service.pending.in_doubt) == rig.unit.num_spilled == 3


def test_who_cannot_wait_or_needs_more_than_memory_gets_the_disk_at_once(shell: Shell) -> None:
    full(shell, 10)
    assert shell.allocate(NBYTES) is not None
    assert shell.unit.num_spilled == 1
    small = Shell(BLOCK, spill=shell.unit.spill)
    assert small.allocate(2 * NBYTES, wait_s=1.0) is not None
    with pytest.raises(StoreFull):
        small.allocate(4 * NBYTES, wait_s=1.0)
    small.unit.close()


def test_who_waits_gets_the_disk_where_what_is_in_memory_does_not_fit_there(tmp_path: Path) -> None:
    shell = Shell(BUDGET, spill=SpillSpace(str(tmp_path), BLOCK))
    shell.published(9 * NBYTES)
    shell.unit.disk_is_short = True
    assert shell.allocate(NBYTES, wait_s=1.0) is not None
    assert shell.allocate(NBYTES, wait_s=1.0) is not None
    assert shell.unit.num_spilled == 1
    shell.unit.close()


# reading


class OneFile:
    """Stands for the arenas of a session."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getitem__(self, number: int) -> OneFile:
        return self


def test_bytes_of_a_disk_are_compared_once(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "arena", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x" * NBYTES, 4096)
    blocks = SpilledBlocks(OneFile(fd))  # type: ignore[arg-type]
    where = m.InArena(3, 4096, xxh3_64_intdigest(b"x" * NBYTES))
    blocks.check(7, where, NBYTES)
    os.pwrite(fd, b"y", 5000)
    blocks.check(7, where, NBYTES)
    with pytest.raises(DataLost, match="other bytes"):
        blocks.check(8, where, NBYTES)
    with pytest.raises(DataLost, match="ends"):
        blocks.check(9, where, 2 * NBYTES)
    os.close(fd)
    with pytest.raises(DataLost, match="error"):
        blocks.check(10, where, NBYTES)
