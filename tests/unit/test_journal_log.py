"""Answers wait for the disk: who is told when, and what happens when the disk is full, slow or broken."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from power_sim import let_go
from services import commit
from standby_sim import recorded

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.memory import memfd
from transfer_queue.sampler import SequentialSampler
from transfer_queue.server.journal import journal as journal_module
from transfer_queue.server.journal import log as log_module
from transfer_queue.server.journal import snapshots
from transfer_queue.server.journal.facts import JournalFact, encoded
from transfer_queue.server.journal.files import FrameFile, claim, numbers
from transfer_queue.server.journal.journal import DiskJournal
from transfer_queue.server.journal.kept_state import KeptService
from transfer_queue.server.journal.kept_unit import KeptUnit
from transfer_queue.server.journal.log import DiskLog, LogFile
from transfer_queue.server.journal.payloads import Payloads
from transfer_queue.server.standby.recording import Recorder
from transfer_queue.storage.shm import SMALL_NBYTES
from transfer_queue.wire import messages as m


class Disk:
    """A log whose writes wait until they are let through, in a file of a real disk."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.told: list[str] = []
        self.errors: list[OSError] = []
        self.fails: list[OSError] = []
        self._write = LogFile.write
        self._open = threading.Event()
        self._open.set()
        monkeypatch.setattr(LogFile, "write", lambda *given: self._slowly(*given))
        self.log = DiskLog(LogFile(directory, 0, 0, True), 0, self.errors.append)

    def _slowly(self, file: LogFile, position: int, payload: list[bytes]) -> None:
        assert self._open.wait(10)
        if self.fails:
            raise self.fails.pop()
        self._write(file, position, payload)

    def stop(self) -> None:
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    def answer(self, name: str) -> None:
        """As a server does: at once, or when the log says so."""
        if not self.log.hold(lambda: self.told.append(name)):
            self.told.append(name)

    def entries(self, number: int = 0) -> list[bytes]:
        with FrameFile(self.directory, "log", number) as file:
            return [frame.payload for frame in file.frames()]


async def passes(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it did not come")


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a coroutine that gets a disk."""

    def run(work: Callable[[Disk], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            disk = Disk(tmp_path, monkeypatch)
            try:
                await work(disk)
            finally:
                disk.go_on()
                disk.log.close()

        asyncio.run(main())

    return run


def test_an_answer_waits_until_its_event_is_on_the_disk(on_disk: Callable[..., None]) -> None:
    async def work(disk: Disk) -> None:
        disk.answer("before")
        assert disk.told == ["before"], "nothing is under way"
        disk.stop()
        disk.log.append(b"one")
        disk.answer("one")
        await asyncio.sleep(0.02)
        disk.log.append(b"two")
        disk.answer("two")
        await asyncio.sleep(0.02)
        assert disk.told == ["before"]
        assert disk.log.lag_s >= 0.04
        disk.go_on()
        await passes(lambda: len(disk.told) == 3)
        assert disk.told == ["before", "one", "two"]
        assert disk.entries() == [b"one", b"two"]
        assert disk.log.lag_s == 0

    on_disk(work)


def test_events_that_come_while_the_disk_is_busy_share_a_write(on_disk: Callable[..., None]) -> None:
    async def work(disk: Disk) -> None:
        disk.stop()
        for number in range(100):
            disk.log.append(b"%03d" % number)
            await asyncio.sleep(0)
        disk.go_on()
        await disk.log.flush()
        assert b"".join(disk.entries()) == b"".join(b"%03d" % number for number in range(100))
        assert len(disk.entries()) < 5

    on_disk(work)


def test_events_after_a_new_file_are_in_it(on_disk: Callable[..., None]) -> None:
    async def work(disk: Disk) -> None:
        disk.stop()
        disk.log.append(b"old")
        for number in (1, 2):
            disk.log.go_on_in(LogFile(disk.directory, number, disk.log.position, True))
            disk.log.append(b"new %d" % number)
        disk.go_on()
        await disk.log.flush()
        assert [disk.entries(number) for number in range(3)] == [[b"old"], [b"new 1"], [b"new 2"]]

    on_disk(work)


def test_behind_a_gate_answers_wait_for_more_than_the_disk(on_disk: Callable[..., None]) -> None:
    async def work(disk: Disk) -> None:
        disk.log.append(b"before")
        disk.answer("before")
        disk.log.shut()
        disk.log.append(b"behind")
        disk.answer("behind")
        await disk.log.flush()
        assert disk.told == ["before"]
        assert disk.log.kept == 1, "no range of a block of before may be used again"
        disk.log.open()
        assert (disk.told, disk.log.kept) == (["before", "behind"], 2)
        disk.log.shut(before=True)
        disk.answer("now")
        assert len(disk.told) == 2, "nothing more was appended, and yet it waits"
        disk.log.open()
        assert disk.told[2:] == ["now"]

    on_disk(work)


def test_a_full_disk_delays_answers_and_leaves_no_hole(
    on_disk: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "AGAIN_S", 0.01)

    async def work(disk: Disk) -> None:
        disk.fails = [OSError(errno.ENOSPC, "no space") for _ in range(3)]
        for name in ("one", "two"):
            disk.log.append(name.encode())
            disk.answer(name)
            await asyncio.sleep(0.005)
        assert disk.told == []
        assert disk.log.is_full
        await passes(lambda: disk.told == ["one", "two"])
        assert b"".join(disk.entries()) == b"onetwo"
        assert not disk.log.is_full

    on_disk(work)


def test_a_closed_log_does_not_try_again(on_disk: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "AGAIN_S", 0.01)
    raised: list[dict[str, Any]] = []

    async def work(disk: Disk) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
        log, disk.log = disk.log, DiskLog(None, 0, disk.errors.append)
        disk.fails = [OSError(errno.ENOSPC, "no space")]
        log.append(b"one")
        await passes(lambda: log.is_full)
        log.close()
        await asyncio.sleep(0.05)

    on_disk(work)
    assert raised == []


def test_space_is_reserved_before_it_is_needed(on_disk: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(disk: Disk) -> None:
        monkeypatch.setattr(memfd, "reserve_ahead", lambda *_: False)
        disk.log.append(bytes(log_module.AHEAD_NBYTES))
        await disk.log.flush()
        assert disk.log.is_full, "what was promised has space, and nothing more is to be"

    on_disk(work)


def test_an_error_of_the_disk_tells_nobody_anything(on_disk: Callable[..., None]) -> None:
    async def work(disk: Disk) -> None:
        disk.fails = [OSError(errno.EIO, "broken")]
        disk.log.append(b"one")
        disk.answer("one")
        await passes(lambda: bool(disk.errors))
        assert disk.told == []

    on_disk(work)


def test_an_error_as_space_is_reserved_is_one_of_the_disk(
    on_disk: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int, start: int, nbytes: int) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def work(disk: Disk) -> None:
        disk.stop()
        disk.log.append(b"x" * (3 << 20))
        disk.answer("one")
        await asyncio.sleep(0)
        monkeypatch.setattr(memfd, "reserve_ahead", fails)
        disk.go_on()
        await passes(lambda: bool(disk.errors))
        assert disk.told == ["one"], "it is on the disk"
        disk.log.append(b"two")
        disk.answer("two")
        await asyncio.sleep(0.02)
        assert disk.told == ["one"]
        assert [error.errno for error in disk.errors] == [errno.EIO]

    on_disk(work)


def test_an_entry_is_synced_before_its_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    pwrite, sync = os.pwrite, os.fdatasync
    monkeypatch.setattr(os, "pwrite", lambda *given: (done.append("write"), pwrite(*given))[1])
    monkeypatch.setattr(os, "fdatasync", lambda fd: (done.append("sync"), sync(fd))[1])
    file = LogFile(tmp_path, 0, 0, True)
    file.write(0, [b"entry"])
    os.close(file.fd)
    assert done == ["write", "sync", "write", "sync"]


# a whole journal


class Kept:
    """A service with a journal, in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.service = recorded(SequentialSampler(), Recorder(), ledger=Ledger(), kind=KeptUnit)
        controller, unit = self.service.controller, self.service.unit
        assert isinstance(controller, Controller)
        assert isinstance(unit, KeptUnit)
        self.controller, self.unit = controller, unit
        self.unit.shm.open()
        self.journal = DiskJournal(str(directory), KeptService(controller, self.service.members), unit, lambda: None)
        self._session = self.service.sessions.attach(b"client", local=True)

    def put(self, rid: int) -> None:
        answer = self.service.handle(commit(rid, 4), memoryview(b"abcd"), self._session, ("link", rid), 0.0)
        assert answer is not None
        assert isinstance(answer[0], m.Committed)
        self.journal.settle()

    async def idle(self) -> None:
        """No snapshot is being written, and the log is on the disk."""
        await passes(lambda: not self.journal._run.snapshots)
        await self.journal._run.log.flush()

    def rows_after_a_restart(self) -> int:
        """Of a service that begins with what is on the disk now."""
        with tempfile.TemporaryDirectory() as name:
            shutil.copytree(self.directory, name, dirs_exist_ok=True)
            again = Kept(Path(name))
            again.journal.held.close()
            again.unit.close()
        return again.controller.num_rows


@pytest.fixture
def kept(tmp_path: Path) -> Callable[..., None]:
    """Runs a coroutine that gets a service with a journal, which has begun."""

    def run(work: Callable[[Kept], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            one = Kept(tmp_path / "journal")
            await one.journal.start()
            await one.journal.complete()
            try:
                await work(one)
            finally:
                await let_go(one.journal, set())
                one.unit.close()

        asyncio.run(main())

    return run


def make_logs_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one begins with every event."""
    for name in ("LOG_NBYTES", "MAX_LOG_NBYTES"):
        monkeypatch.setattr(journal_module, name, 0)


def test_a_journal_that_was_moved_away_writes_nothing_where_another_one_is(
    kept: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(one: Kept) -> None:
        one.directory.rename(tmp_path / "aside")
        other = claim(one.directory)
        make_logs_short(monkeypatch)
        one.put(1)
        await one.idle()
        assert os.listdir(one.directory) == ["lock"]
        other.close()
        shutil.rmtree(one.directory)
        (tmp_path / "aside").rename(one.directory)
        assert one.rows_after_a_restart() == 4, "what was answered is where the journal is"

    kept(work)


def test_no_log_follows_one_whose_snapshot_failed(kept: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(directory: Path, number: int, *_: object) -> snapshots.SnapshotProcess:
        pid = os.posix_spawn("/bin/false", ["false"], {})
        return snapshots.SnapshotProcess(number, pid, os.pidfd_open(pid))

    async def work(one: Kept) -> None:
        one.put(1)
        await one.idle()
        monkeypatch.setattr(snapshots, "fork", fails)
        monkeypatch.setattr(journal_module, "AGAIN_S", 0.05)
        one.journal._begin(follows=False)
        await one.idle()
        assert one.journal._run.useless == [1]
        make_logs_short(monkeypatch)
        one.journal._run.next_s = 0.0  # it is time, and the timer comes a moment later
        for rid in (2, 3):
            one.put(rid)
        await passes(lambda: 1 not in numbers(one.directory, "log"))
        await one.idle()
        assert one.rows_after_a_restart() == 4, "what was answered"

    kept(work)


def test_a_snapshot_whose_end_cannot_be_heard_of_is_not_written(
    kept: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[int] = []

    def fails(pid: int) -> int:
        forked.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def work(one: Kept) -> None:
        make_logs_short(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", fails)
            one.put(1)
        (pid,) = forked
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        await one.idle()
        assert one.rows_after_a_restart() == 4

    kept(work)


def test_an_event_that_cannot_be_written_down_is_in_a_snapshot(
    kept: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(facts: list[JournalFact]) -> bytes:
        raise RecursionError

    async def work(one: Kept) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "encoded", lambda facts: fails(facts) if facts else encoded(facts))
            one.put(1)
        told: list[str] = []
        assert one.journal.hold(lambda: told.append("kept"))
        one.put(2)
        await passes(lambda: told == ["kept"])
        await one.idle()
        assert one.rows_after_a_restart() == 8

    kept(work)


def test_who_takes_over_does_not_wait_for_a_block_that_the_server_before_was_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that wrote it is not in the fork."""
    monkeypatch.setattr(journal_module, "CLOSE_S", 3.0)
    service = recorded(SequentialSampler(), Recorder(), ledger=Ledger(), kind=KeptUnit)
    controller, unit = service.controller, service.unit
    assert isinstance(controller, Controller)
    assert isinstance(unit, KeptUnit)
    journal = DiskJournal(str(tmp_path / "journal"), KeptService(controller, service.members), unit, lambda: None)
    begun, goes_on = threading.Event(), threading.Event()
    write = Payloads.write

    def late(*given: Any) -> int:
        begun.set()
        assert goes_on.wait(20)
        return write(*given)

    async def take_over() -> None:
        await journal.start()
        await journal.complete()
        await journal.close()

    async def main() -> int:
        unit.shm.open()
        await journal.start()
        await journal.complete()
        block = unit.place(SMALL_NBYTES + 1, None)
        assert block is not None
        monkeypatch.setattr(Payloads, "write", late)
        keeping = asyncio.create_task(journal.keep(block))
        await asyncio.to_thread(begun.wait, 20)
        monkeypatch.setattr(Payloads, "write", write)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads
            child = os.fork()
        if not child:
            taking = threading.Thread(target=lambda: asyncio.run(take_over()))
            taking.start()
            taking.join()
            os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        goes_on.set()
        await keeping
        await let_go(journal, set())
        return status

    assert asyncio.run(main()) == 0
    unit.close()
