"""A service with a journal whose disk forgets, when the power goes, what it was not told to sync; driven by one seed.

Of writes that were not synced any sectors may be there, of names that were not synced the first few. Snapshots are
written by this process, and some of them fail. `python -m power_sim SEED` runs a seed; threads write, so that a run of
the same seed may stop at another write.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ledger_sim import lasting, plain
from services import FIELD
from standby_sim import BUDGET, KEYS, MAX_ROWS, SPILL, Simulation, _short

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.snapshot import exported
from transfer_queue.server.connection import LASTING, PASSING
from transfer_queue.server.journal import journal as journal_module
from transfer_queue.server.journal import snapshots
from transfer_queue.server.journal.files import numbers
from transfer_queue.server.journal.journal import DiskJournal
from transfer_queue.server.journal.kept_state import KeptService
from transfer_queue.server.journal.kept_unit import KeptUnit
from transfer_queue.server.journal.recovery import recover
from transfer_queue.server.standby.recording import Recorder
from transfer_queue.server.unit_registry import UnitRegistry, unit_of
from transfer_queue.storage.blocks import SpillSpace
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

SECTOR = 512


class ForgetfulDisk:
    """The files of a directory as they are for this process, and what is left of them without power."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.directory = directory
        self._chance = chance
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}  # by inode
        self._numbers = itertools.count()
        self._names: dict[str, int] = {}  # file of each name that is on the disk
        self._moves: list[tuple[str, str | None, int]] = []  # names that are not: (new, old, file); "" for removed
        self._synced: dict[int, bytes] = {}
        self._written: dict[int, list[tuple[int, bytes]]] = {}

    @contextmanager
    def plugged_in(self) -> Iterator[None]:
        """`os` tells it of what is done to its files."""
        real = {name: getattr(os, name) for name in ("open", "pwrite", "fdatasync", "fsync", "rename", "unlink")}

        def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
            existed = os.path.exists(path)
            fd: int = real["open"](path, flags, *more, **named)
            if flags & os.O_CREAT and not existed and self._has(path):
                self._files[os.fstat(fd).st_ino] = next(self._numbers)  # numbers of inodes are used again
                self._moves.append((os.path.basename(path), None, self._file(os.fstat(fd))))
            return fd

        def pwrite(fd: int, data: Any, at: int) -> int:
            count: int = real["pwrite"](fd, data, at)
            with self._lock:
                self._written.setdefault(self._file(os.fstat(fd)), []).append((at, bytes(data[:count])))
            return count

        def sync(fd: int) -> None:
            if "/log-" in os.readlink(f"/proc/self/fd/{fd}"):
                time.sleep(self._chance.choice([0, 0, 0.004]))  # a disk takes its time: others overtake
            with self._lock:
                if os.path.isdir(f"/proc/self/fd/{fd}"):
                    self._sync_names(len(self._moves))
                    return
                file = self._file(os.fstat(fd))
                self._synced[file] = os.pread(fd, os.fstat(fd).st_size, 0) if self._reads(fd) else self._whole(file)
                self._written.pop(file, None)

        def rename(old: Any, new: Any) -> None:
            real["rename"](old, new)
            if self._has(new):
                self._moves.append((os.path.basename(new), os.path.basename(old), self._file(os.stat(new))))

        def unlink(path: Any, *more: Any, **named: Any) -> None:
            file = self._file(os.stat(path)) if self._has(path) and os.path.exists(path) else None
            real["unlink"](path, *more, **named)
            if file is not None:
                self._moves.append(("", os.path.basename(path), file))

        patched = {
            "open": open_,
            "pwrite": pwrite,
            "fdatasync": sync,
            "fsync": sync,
            "rename": rename,
            "unlink": unlink,
        }
        with mock.patch.multiple(os, **patched):
            yield

    def _has(self, path: Any) -> bool:
        return Path(os.path.dirname(os.path.abspath(path))) == self.directory

    def _reads(self, fd: int) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_RDWR)

    def _file(self, status: os.stat_result) -> int:
        return self._files.get(status.st_ino, -1)

    def _whole(self, file: int) -> bytes:
        """What is in a file that is open for writing alone."""
        return self._applied(self._synced.get(file, b""), self._written.get(file, []), lambda: True)

    def _sync_names(self, count: int) -> None:
        self._names = self._moved(count)
        del self._moves[:count]

    def _moved(self, count: int) -> dict[str, int]:
        names = dict(self._names)
        for new, old, file in self._moves[:count]:
            if old is not None:
                names.pop(old, None)
            if new:
                names[new] = file
        return names

    @staticmethod
    def _applied(data: bytes, writes: list[tuple[int, bytes]], reaches: Any) -> bytes:
        """`data` after those sectors of the writes that reach the disk."""
        found = bytearray(data)
        for start, written in writes:
            at = 0
            while at < len(written):
                part = written[at : at + SECTOR - (start + at) % SECTOR]
                if reaches():
                    end = start + at + len(part)
                    found.extend(bytes(max(0, end - len(found))))
                    found[start + at : end] = part
                at += len(part)
        return bytes(found)

    def left(self, where: Path) -> None:
        """Write what is left without power to another directory."""
        with self._lock:
            names = self._moved(self._chance.randrange(len(self._moves) + 1))
            reaches = self._chance.choice([lambda: False, lambda: True, lambda: self._chance.random() < 0.7])
            for name, file in names.items():
                data = self._applied(self._synced.get(file, b""), self._written.get(file, []), reaches)
                (where / name).write_bytes(data)


class Away:
    """The connection to a unit of another host, and what it was told over it."""

    def __init__(self, told_gone: set[int]) -> None:
        self.unit = 0
        self._told_gone = told_gone

    def push(self, message: m.Message) -> None:
        if isinstance(message, m.Drop):
            self._told_gone.update(numbers_of(message.blocks).tolist())

    def abort(self) -> None: ...


class PowerSimulation(Simulation):
    """`states[p]` is what would be saved once event p of the journal is the next one, `promised` the first event that
    nobody was told of."""

    def __init__(self, seed: int, disk: ForgetfulDisk) -> None:
        self.ledger = Ledger()
        super().__init__(seed, self.ledger, KeptUnit)
        self._disk = disk
        self.states: dict[int, tuple[bytes, list[int]]] = {}
        self.contents: dict[int, bytes] = {}
        self.promised = 0
        self._tasks: set[asyncio.Task[None]] = set()
        controller, unit = self.service.controller, self.service.unit
        assert isinstance(controller, Controller)
        assert isinstance(unit, KeptUnit)
        self._controller, self._kept = controller, unit
        self.journal = DiskJournal(
            str(disk.directory), KeptService(controller, self.service.members), unit, lambda: None
        )
        self.service.journal = self.journal
        self.service.deliver = self._drain
        self.service.members.lose, self.service.members.known = controller.lose, lambda: controller.block_index.entries
        self._units: dict[bytes, Away] = {}
        self.told_gone: set[int] = set()
        self.units_then: dict[int, set[int]] = {}
        self._handle, self.service.handle = self.service.handle, self._answered  # type: ignore[method-assign]

    def _settled(self) -> None:
        self.journal.settle()
        self.states[self.journal._run.log.position] = exported(self._controller.state)
        self.units_then[self.journal._run.log.position] = {one.number for one in self.service.members.members()}
        for block in self._kept.lasting():
            if block.number not in self.contents:
                self.contents[block.number] = bytes(memoryview(self._kept.memory(block)))  # type: ignore[arg-type]

    def _answered(self, message: Any, payload: Any, session: Any, ticket: Any, now: float) -> Any:
        answer = self._handle(message, payload, session, ticket, now)
        if answer is not None and type(message) in LASTING:
            self._tell_when_kept()
        return answer

    def _tell_when_kept(self) -> None:
        position = self.journal._run.log.position

        def told() -> None:
            self.promised = max(self.promised, position)

        if not self.journal.hold(told):
            told()

    def _drain(self) -> None:
        for ticket, answer in self.service.answered(self._now):
            session = self.service.sessions.by_ident.get(ticket[0].session_ident)  # type: ignore[index]
            if session is not None and not isinstance(answer[0], m.Waiting):
                self._parked[session.ident].discard(ticket)
                self.service.close_request(session, answer)
                self._learn(session, answer[0])
                if type(answer[0]) not in PASSING:
                    self._tell_when_kept()

    def _event(self) -> None:
        if self._links and self._random.random() < 0.2:
            self._put_large()
        elif self._links and self._random.random() < 0.03:
            self._load()
        elif self._random.random() < 0.1:
            self._of_unit()
        else:
            super()._event()

    def _of_unit(self) -> None:
        """One of another host joins, leaves, has a row put there, or is given up in a while."""
        members, identity = self.service.members, self._random.choice([b"v", b"w"])
        line = self._units.get(identity)
        if line is None or self._random.random() < 0.2:
            if line is not None:
                members.left(line, self._now, True)
            line = self._units[identity] = Away(self.told_gone)
            join = m.Join(0, identity, f"{identity!r}", b"", away_s=self._random.choice([0.1, 60.0]))
            line.unit = members.join(join, join.address, line).unit
            self.service.apply_outcomes()
        elif self._random.random() < 0.2:
            members.left(line, self._now, False)
            del self._units[identity]
        elif self._links:
            self._rid += 1
            self._blocks_elsewhere += 1
            session = self._session()
            link, block = self._links[session.ident][0], (line.unit << m.UNIT_SHIFT) + self._blocks_elsewhere
            keys = self._random.sample(KEYS, 1)
            commit = m.Commit(self._rid, "p", 1, keys, None, FIELD, block, b"there", None, 0.0)
            self.service.handle(commit, memoryview(b""), session, (link, commit.rid), self._now)

    _blocks_elsewhere = 0

    def _load(self) -> None:
        """A checkpoint without blocks takes the place of everything."""
        session = self._session()
        self._rid += 1
        data = self._random.choice([state for state, blocks in self.states.values() if not blocks])
        ticket = (self._links[session.ident][0], self._rid)
        self.service.handle(m.Restore(self._rid, [], []), memoryview(data), session, ticket, self._now)

    def _put_large(self) -> None:
        """A large block in place of another one, whose range on the disk may be its own soon."""
        session = self._session()
        link = self._links[session.ident][0]
        self._rid += 3
        clear, allocate = m.Clear(self._rid, "large", None, None), m.Allocate(self._rid + 1, 70_000, False, 0.0)
        for message in (clear, allocate):
            answer = self.service.handle(message, memoryview(b""), session, (link, message.rid), self._now)
        if answer is None or not isinstance(answer[0], m.Allocated):
            return
        block = self._kept.block(answer[0].block)
        assert block is not None
        self._kept.memory(block)[:] = self._random.randrange(256)
        commit = m.Commit(self._rid + 2, "large", 1, None, None, FIELD, block.number, b"large", None, 0.0)
        if self.service.handle(commit, memoryview(b""), session, (link, commit.rid), self._now) is None:
            self._parked[session.ident].add((link, commit.rid))

    def _move(self) -> None:
        task = asyncio.get_running_loop().create_task(self._move_kept())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _move_kept(self) -> None:
        """What a compactor does, without its bytes."""
        numbers = [one for one in sorted(self._controller.block_index.entries) if not unit_of(one)]
        number = self._random.choice(numbers) if numbers else 0
        found = self._controller.rows_in(number)
        target = self._kept.place(self._random.choice([100, 70_000]), b"mover") if found is not None else None
        if found is None or target is None:
            return
        self._kept.pin(number, b"mover")
        self._kept.publish(target.number, b"moved")
        await self.journal.keep(target)
        if not self._controller.relocate(number, target.number, found[0]):
            self._kept.drop(target.number)
        self._kept.unpin(number, b"mover")
        self.service.apply_outcomes()

    async def play(self, events: int) -> None:
        """Until the power goes."""
        self._recorder.settled = self._settled
        await self.journal.start()
        await self.journal.complete()
        for _ in range(events):
            self._now += self._random.random() * 0.1
            self._event()
            self._drain()
            self._recorder.settle()
            for _ in range(self._random.choice([0, 0, 1, 3])):
                await asyncio.sleep(self._random.choice([0, 0, 0.001]))

    async def unplug(self) -> None:
        """Let go of everything, after the power went."""
        await let_go(self.journal, {*self._tasks, *self.service._background})
        self.close()


async def let_go(journal: DiskJournal, tasks: set[asyncio.Task[None]]) -> None:
    """Of a journal that nothing is promised of any more, and of what may still use it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    journal._run.is_on = False
    await journal._run.log.flush()
    journal._run.log.close()
    journal._run.payloads.close()
    for written in journal._run.snapshots.values():
        asyncio.get_running_loop().remove_reader(written.watch)
        os.waitpid(written.pid, 0)
        os.close(written.watch)
    journal.held.close()


@contextmanager
def powered(chance: random.Random, saved: dict[int, tuple[bytes, list[int]]], disk: ForgetfulDisk) -> Iterator[None]:
    """Journals lie on this disk, and begin anew often; see `forked`."""
    with (
        mock.patch.object(snapshots, "fork", forked(chance, saved)),
        mock.patch.object(journal_module, "LOG_NBYTES", 20_000),
        mock.patch.object(journal_module, "AGAIN_S", 0.002),
        disk.plugged_in(),
    ):
        yield


def forked(chance: random.Random, saved: dict[int, tuple[bytes, list[int]]]) -> Any:
    """In place of `snapshots.fork`: the snapshot is written here, and something ends a little later. `saved` has the
    state of each, by its number."""

    def fork(directory: Path, number: int, position: int, kept: Any, unit: KeptUnit, lock: Any) -> Any:
        fails = number > 0 and chance.random() < 0.3
        if not fails:
            snapshots.write(directory, snapshots.head_of(number, position, kept), kept, unit, lock)
            saved[number] = kept.saved()[:2]
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"exit {int(fails)}"], {})
        return snapshots.SnapshotProcess(number, pid, os.pidfd_open(pid))

    return fork


async def lost(seed: int, events: int = 80) -> list[str]:
    """What was promised and is not so, or is otherwise than it was, after a run in which the power went."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as left:
        saved: dict[int, tuple[bytes, list[int]]] = {}
        disk = ForgetfulDisk(Path(os.path.realpath(name)), chance)
        with powered(chance, saved, disk):
            run = PowerSimulation(seed, disk)
            await run.play(chance.randrange(1, events))
            disk.left(Path(left))
            promised, told_gone = run.promised, set(run.told_gone)
            await run.unplug()
        return [f"seed {seed}: {one}" for one in _compared(run, promised, told_gone, saved, Path(left))]


def _compared(
    run: PowerSimulation, promised: int, told_gone: set[int], saved: dict[int, tuple[bytes, list[int]]], left: Path
) -> Iterator[str]:
    controller = Controller(run._sampler(), MAX_ROWS, 3, ledger=Ledger())
    unit = KeptUnit(2 * BUDGET, None, Recorder(), SpillSpace(SPILL.directory, 2 * BUDGET))
    unit.shm.open()
    members = UnitRegistry()
    try:
        position = recover(left, KeptService(controller, members), unit).position
        if position < promised:
            yield f"event {position} is the next one, {promised} was promised"
        last = max(numbers(left, "snapshot"), default=-1)
        if last < 0:
            return
        at = snapshots.read(left, last).head.position
        known = max((one for one in run.states if at < one <= position), default=-1)
        state = saved[last] if known < 0 else run.states[known]
        found, wanted = plain(controller), lasting(run._sampler(), state)
        for name in wanted:
            if found[name] != wanted[name]:
                yield f"{name} is {_short(found[name], wanted[name])}"
        units = {member.number for member in members.members()}
        if known >= 0 and units != run.units_then[known]:
            yield f"units {units} are known, there were {run.units_then[known]}"
        for number in wanted["blocks"]:
            if unit_of(number):
                if unit_of(number) not in units or number in told_gone:
                    yield f"unit {unit_of(number)} of block {number} is not known, or was told that it is gone"
                continue
            block: Any = unit.block(number)
            if bytes(memoryview(unit.memory(block))) != run.contents[number]:  # type: ignore[arg-type]
                yield f"block {number} has other bytes"
        controller.check_invariants()
        unit.check_invariants()
    finally:
        unit.close()


if __name__ == "__main__":
    print(*asyncio.run(lost(int(sys.argv[1]))), sep="\n")
