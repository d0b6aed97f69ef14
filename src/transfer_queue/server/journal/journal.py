"""What is written down when, and what waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfer_queue.errors import JournalCorrupt, StoreFull
from transfer_queue.memory import memfd
from transfer_queue.server.journal import snapshots
from transfer_queue.server.journal.facts import UNWRITABLE, JournalFact, SnapshotComplete, encoded
from transfer_queue.server.journal.files import DRAFT, check_claim, claim, name_of, numbers
from transfer_queue.server.journal.kept_state import OWNER, KeptState
from transfer_queue.server.journal.kept_unit import KeptUnit
from transfer_queue.server.journal.log import DiskLog, LogFile
from transfer_queue.server.journal.payloads import Payloads, Place
from transfer_queue.server.journal.recovery import last_number, recover
from transfer_queue.storage.blocks import Block

log = logging.getLogger("transfer_queue.server")

# A new log begins where one is so long, and as long as the last snapshot; or as what takes half a minute to read.
LOG_NBYTES, MAX_LOG_NBYTES = 8 << 20, 512 << 20
AGAIN_S = 1.0
LOOK_S = 0.1  # how often a writer that waits for the disk looks whether there is space
CLOSE_S = 8.0  # how long a disk may take for what is left at the end
SHRINK_EVERY_S = 0.1


class _Run:
    """What a process has of a journal from `start` on. One that takes over makes its own: what the one before was
    doing when it was forked is done by nobody there."""

    def __init__(self, position: int, fail: Callable[[OSError], None], loads: int, payloads: Payloads) -> None:
        self.is_on = False
        self.log = DiskLog(None, position, fail)
        self.payloads = payloads
        self.is_found = False  # what is in the directory is known: `payloads`, and
        self.number = -1  # of the log and of its snapshot
        self.loads = loads  # how many checkpoints had been loaded when the log began
        self.is_adrift = False  # there is no log yet that could follow what was loaded, or what another process had
        self.snapshots: dict[int, snapshots.SnapshotProcess] = {}
        self.awaited = -1  # the snapshot without which the log does not count
        self.useless: list[int] = []  # logs that count only with a snapshot that failed
        self.snapshot_nbytes = 0
        self.why = ""  # the last attempt failed
        self.next_s = 0.0  # no earlier (time.monotonic()) does a long log end
        self.waits_for_first = False  # nobody is served yet
        self.num_writing = 0  # blocks
        self.complete = asyncio.Event()  # nothing is awaited
        self.freed: deque[tuple[int, Place]] = deque()  # ranges, and the event after which they are


class DiskJournal:
    """The journal in a directory, of a state and of a unit. `broken()` is called when the disk fails; it does not
    return. After that nothing is promised any more. `has_let_go()` is called, in an event of its own, when blocks that
    nobody needs may be recycled again."""

    def __init__(self, directory: str, kept: KeptState, unit: KeptUnit, broken: Callable[[], None]) -> None:
        """Claim the directory, and make of state and unit what it says. Raises `JournalInUse`, `ConfigError`, and as
        `recover`."""
        self.directory = Path(os.path.abspath(directory))
        self.held = claim(self.directory)
        self._claimed = self.held.id
        self._kept = kept
        self._unit = unit
        self._broken = broken
        self._position = recover(self.directory, kept, unit).position
        self._run = _Run(self._position, self._fail, kept.loads, self._no_payloads())
        unit.given_up = self._given_up
        self.has_let_go: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Begin a new log with a snapshot of now, on this event loop. Whoever waits for `complete` waits for that."""
        self._kept.hold_blocks(False)
        self._kept.start()
        self._forget_facts()
        self._unit.begin_log()
        if self._run.is_on:  # the server's, of which this process was forked
            self._run.log.close_files()
            self._run.payloads.close()
        self._run = _Run(self._position, self._fail, self._kept.loads, self._no_payloads())
        self._run.is_on = True
        self._begin(follows=False)

    def _look_into_directory(self) -> None:
        """The standby may have taken over while the journal is away, or another one is there: then rows can be read,
        and saved as a checkpoint. Raises `OSError` and `JournalCorrupt`, and then nothing was changed."""
        run = self._run
        number = last_number(self.directory)
        run.payloads = Payloads(self.directory, set(self._unit.places.values()), self._claimed)
        run.number, run.is_found = number, True
        run.freed.clear()  # they are free there

    async def complete(self) -> None:
        """Wait until all that was promised is on the disk without the log before. Raises `StoreFull` where that could
        not be written."""
        self._run.waits_for_first = True
        if not self._run.is_adrift:
            await self._run.complete.wait()
        self._run.waits_for_first = False
        if self._run.awaited >= 0 or self._run.is_adrift:
            free = os.fstatvfs(self.held.directory)
            text = f"{self._run.why or 'see the log of the server'}; {free.f_bavail * free.f_frsize} bytes are free"
            raise StoreFull(f"server.journal_dir: no snapshot could be written to {self.directory}: {text}")

    def _no_payloads(self) -> Payloads:
        return Payloads(self.directory, None, self._claimed)

    def settle(self) -> None:
        """An event is over: what came of it is written down before anybody is told."""
        run = self._run
        if not run.is_on:
            return
        if self._kept.loads != run.loads:
            self._begin(follows=False)  # a checkpoint was loaded: nothing of before lasts
        if run.is_adrift:
            self._forget_facts()
            return
        facts: list[JournalFact] = [*self._unit.take_facts(), *self._kept.take_facts()]
        if facts:
            try:
                event = encoded(facts)
            except UNWRITABLE as error:
                log.error("an event that cannot be written down, so a snapshot of all is: %s", error)
                self._begin(follows=False)
                return
            run.log.append(event)
            is_idle = not run.snapshots and run.awaited < 0  # no log follows one that may yet turn out useless
            if self._is_long() and is_idle and time.monotonic() >= run.next_s:
                self._begin(follows=True)
        if self._unit.unneeded:
            delete = self._unit.take_unneeded()
            if not run.log.hold(delete):
                delete()
        self._give_back()

    def _is_long(self) -> bool:
        return self._run.log.nbytes > max(LOG_NBYTES, min(self._run.snapshot_nbytes, MAX_LOG_NBYTES))

    def hold(self, send: Callable[[], None]) -> bool:
        """Whether `send` is kept until all that happened so far is on the disk; else it is there."""
        return self._run.is_on and self._kept.holds_answers and self._run.log.hold(send)

    def check_room(self) -> None:
        """`StoreFull` where the disk has no space for more than was promised."""
        if self._run.is_on:
            self._run.log.look_again()
        if self._run.is_on and self._run.log.is_full:
            raise StoreFull(f"the disk of the journal, {self.directory}, is full, or the journal was removed from it")

    # blocks

    def has(self, block: Block) -> bool:
        """Whether nothing is left to be done before rows may lie in it."""
        return self._unit.is_ready(block)

    async def keep(self, block: Block, wait_s: float = 0.0) -> None:
        """When this returns, the bytes of a block are on the disk, unless it was dropped meanwhile; where the unit says
        what it has before anybody hears of it, that is there as well.

        Raises `StoreFull` when the disk has had no space for `wait_s`.
        """
        await self._keep_bytes(block, wait_s)
        if self._unit.says_first and self._unit.block(block.number) is block and not block.dropped:
            self._unit.say(block)
            await self._until_kept()
            self._unit.is_safe_now(block)

    async def _until_kept(self) -> None:
        """Everything that happened so far is on the disk."""
        self.settle()
        kept = asyncio.Event()
        if self._run.log.hold(kept.set):
            await kept.wait()

    async def _keep_bytes(self, block: Block, wait_s: float) -> None:
        if self._unit.is_kept(block) or self._unit.block(block.number) is not block:
            return
        run = self._run
        self._unit.pin(block.number, OWNER)
        run.num_writing += 1
        place: Place | None = None
        try:
            await run.complete.wait()  # what is free in memory may still be in the snapshot before
            place = await self._room(block.nbytes, time.monotonic() + wait_s)
            digest = await asyncio.to_thread(run.payloads.write, place, self._unit.memory(block))
            if not block.dropped and block.number not in self._unit.places:
                self._unit.stored(block.number, place._replace(digest=digest))
                place = None
        except OSError as error:
            if error.errno in memfd.NO_SPACE:
                raise StoreFull(f"{block.nbytes} bytes: the disk of the journal is full: {error}") from error
            self._fail(error)
        finally:
            if place is not None:
                run.payloads.give(place)
            run.num_writing -= 1
            self._unit.unpin(block.number, OWNER)

    def copied(self, block: int, copy: int) -> None:
        """A block has the bytes of another one, whose rows lie in it from now on, or are about to."""
        self._unit.copied(block, copy)

    async def _room(self, nbytes: int, until: float) -> Place:
        while True:
            self._give_back()
            if self._run.freed and self._run.freed[0][0] > self._run.log.position:
                self._run.log.append(encoded([]))  # nothing else may happen that says it
            try:
                return self._run.payloads.take(nbytes)
            except StoreFull:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(LOOK_S)

    def _give_back(self) -> None:
        while self._run.freed and self._run.freed[0][0] <= self._run.log.kept:
            self._run.payloads.give(self._run.freed.popleft()[1])

    def _given_up(self, place: Place) -> None:
        """The range is free once it is on the disk that its block is gone, which the event says that is going on."""
        if self._run.is_on:
            self._run.freed.append((self._run.log.position + 1, place))

    # logs and snapshots

    def _begin(self, follows: bool) -> None:
        """A new log, with a snapshot of now. Where it does not follow the one before, it counts only with that."""
        if not self._run.is_on:
            return
        self._run.loads = self._kept.loads
        try:
            check_claim(self.directory, self._claimed)
            if not self._run.is_found:
                self._look_into_directory()
            number = self._run.number + 1
            file = LogFile(self.directory, number, self._run.log.position, follows)
        except (OSError, JournalCorrupt) as error:
            self._run.is_adrift |= not follows
            self._retry(follows, error)
            return
        self._run.number, self._run.why = number, ""
        self._run.log.go_on_in(file)
        if follows:
            self._fork(follows)
            return
        for failed in self._run.useless:  # nobody was told of what is in them
            (self.directory / name_of("log", failed)).unlink(missing_ok=True)
        self._run.useless.clear()
        self._await_snapshot()

    def _retry(self, follows: bool, error: object) -> None:
        if str(error) != self._run.why:
            what = "no new log" if follows else "no new log, answers wait"
            log.error("%s: %s, another attempt is made every %g s: %s", self.directory, what, AGAIN_S, error)
        self._run.why = str(error)
        self._run.next_s = time.monotonic() + AGAIN_S
        if not follows:
            self._run.log.shut(self._run.is_adrift)
            self._run.complete.clear()
            asyncio.get_running_loop().call_later(AGAIN_S, self._begin, follows)

    def _await_snapshot(self) -> None:
        self._run.log.shut()
        self._run.complete.clear()
        self._run.is_adrift = False
        self._forget_facts()
        self._run.awaited = self._run.number
        self._run.log.append(encoded([]))  # whoever is answered from here on waits for the snapshot
        self._fork(False)

    def _forget_facts(self) -> None:
        """They are in the state of now."""
        self._unit.take_facts()
        self._kept.forget_facts()

    def _fork(self, follows: bool) -> None:
        self._kept.hold_blocks(True)
        position = self._run.log.position if follows else self._run.log.position - 1
        try:
            written = snapshots.fork(self.directory, self._run.number, position, self._kept, self._unit, self._claimed)
        except OSError as error:
            if not self._run.snapshots:
                self._kept.hold_blocks(False)
            self._retry(follows, error)
            return
        self._run.snapshots[written.number] = written
        asyncio.get_running_loop().add_reader(written.watch, self._ended, written)

    def _ended(self, written: snapshots.SnapshotProcess) -> None:
        asyncio.get_running_loop().remove_reader(written.watch)
        os.close(written.watch)
        _, status = os.waitpid(written.pid, 0)
        del self._run.snapshots[written.number]
        if not self._run.snapshots:
            self._kept.hold_blocks(False)
            asyncio.get_running_loop().call_soon(self.has_let_go)
        path = self.directory / name_of("snapshot", written.number)
        is_here = self._is_here()
        if status or not is_here:
            log.error("%s was not written; see above", path)
            if is_here:
                path.with_suffix(DRAFT).unlink(missing_ok=True)
            self._run.next_s = time.monotonic() + AGAIN_S
            if self._run.waits_for_first:
                self._run.complete.set()
            elif written.number == self._run.awaited:
                self._run.useless += [written.number] if status else []
                asyncio.get_running_loop().call_later(AGAIN_S, self._begin, False)
            return
        if not path.exists():
            return  # a later one was quicker, and replaced it
        self._run.snapshot_nbytes = path.stat().st_size
        self._shrink()
        self._remove_before(written.number)
        if written.number == self._run.awaited:
            self._run.awaited = -1
            self._run.complete.set()
            self._run.log.append(encoded([SnapshotComplete(written.number)]))
            self._run.log.open()

    def _is_here(self) -> bool:
        """Whether what lies at the path of the directory is this journal still."""
        try:
            check_claim(self.directory, self._claimed)
        except OSError as error:
            log.error("%s", error)
            return False
        return True

    def _shrink(self) -> None:
        """Give the system what the blocks files do not need any more, a part at a time."""
        if self._run.is_on and self._run.payloads.shrink():
            asyncio.get_running_loop().call_later(SHRINK_EVERY_S, self._shrink)

    def _remove_before(self, number: int) -> None:
        """What the snapshot of this number replaces. Logs go first, in order: a log without the one before is none."""
        for kind in ("log", "snapshot"):
            for one in numbers(self.directory, kind):
                if one < number:
                    (self.directory / name_of(kind, one)).unlink(missing_ok=True)
        for path in self.directory.glob(f"snapshot-????????{DRAFT}"):
            if path.stem < name_of("snapshot", number):
                path.unlink(missing_ok=True)

    def _fail(self, error: OSError) -> None:
        log.critical("%s: the journal cannot be written, so this server ends: %s", self.directory, error)
        self._broken()

    def statistics(self) -> dict[str, Any]:
        if not self._run.is_on:
            return {}
        return {
            "journal_dir": str(self.directory),
            "journal_nbytes": self._run.log.nbytes + self._run.snapshot_nbytes,
            "journal_blocks_nbytes": self._run.payloads.used_nbytes,
            "journal_lag_s": self._run.log.lag_s,
        }

    async def _finished(self) -> None:
        await self._run.complete.wait()
        await self._run.log.flush()
        while self._run.num_writing:  # by threads, whose files are about to be closed
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Everything is on the disk."""
        if not self._run.is_on:
            return
        self.settle()
        try:
            await asyncio.wait_for(self._finished(), CLOSE_S)
        except asyncio.TimeoutError:  # until Python 3.11 another class
            log.error("%s: the disk does not take what was not promised yet; it is left out", self.directory)
            os._exit(1)
        self._run.is_on = False
        for written in self._run.snapshots.values():
            asyncio.get_running_loop().remove_reader(written.watch)
            os.kill(written.pid, signal.SIGKILL)  # another one is written at the next start
            with contextlib.suppress(ChildProcessError):
                os.waitpid(written.pid, 0)
            os.close(written.watch)
        self._run.log.close()
        self._run.payloads.close()
