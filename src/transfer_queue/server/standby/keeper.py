"""The server's side of its standby: forks it, keeps its journal short, sends it the arenas it does not have."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn

from transfer_queue.server.forks import disconnect, watch
from transfer_queue.server.service import Service
from transfer_queue.server.standby.journal import Journal, JournalUseless, Succession
from transfer_queue.server.standby.recording import Recorder
from transfer_queue.server.standby.replay import replay
from transfer_queue.storage.shm import Arena
from transfer_queue.wire.arena_fds import received

log = logging.getLogger("transfer_queue.server")

FORKING_SHARE = 0.01  # of the server's time at most, where memory is large or much is written
AGAIN_S, LATEST_S = 1.0, 60.0  # after a standby could not be made, or was killed; longer each time it cannot be made
LEAVES_S = 0.5  # for so long the end of the service waits for its standby, which may be frozen
ARENA, LEAVE = b"a", b"x"
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Standby(NamedTuple):
    """`line`: it takes over when this closes. `watch`: readable when it has ended (pidfd_open(2))."""

    pid: int
    line: socket.socket
    watch: int

    def ends(self, within_s: float) -> bool:
        """Blocks."""
        poll = select.poll()
        poll.register(self.watch, select.POLLIN)
        return bool(poll.poll(1e3 * within_s))


class StandbyKeeper:
    """Makes `recorder` write for one standby at a time. `take_over` is called in the standby when the server is gone,
    and does not return; `kept` lists the descriptors that it needs for that."""

    def __init__(
        self, service: Service, recorder: Recorder, kept: Callable[[], Iterable[int]], take_over: Callable[[], NoReturn]
    ) -> None:
        self._service = service
        self._recorder = recorder
        self._kept = kept
        self._take_over = take_over
        self._succession = Succession()
        self._standby: Standby | None = None
        recorder.send, recorder.replace = self._send, self._replace
        self._scheduled: asyncio.TimerHandle | None = None
        self._closed = self._fails = False
        self.is_told_to_end = False  # by a signal, in the standby
        self._again_s = AGAIN_S
        self._next_s = 0.0  # no earlier (time.monotonic()) is a journal replaced because it is long

    def _replace(self) -> None:
        """The journal has grown long, or is of no use any more: a new standby begins a new one."""
        journal = self._recorder.journal
        if journal is not None and journal.is_useless:
            self._service.standby_pid = 0  # until there is another one nobody takes over
        if journal is None or self._fails:
            return
        if journal.is_useless:
            self._schedule(0.0)
        elif self._scheduled is None:
            self._schedule(max(0.0, self._next_s - time.monotonic()))

    def _schedule(self, delay_s: float) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._scheduled = asyncio.get_running_loop().call_later(delay_s, self.renew)

    def renew(self) -> None:
        """Fork a standby, and then let the one before it go. Where that fails, the one before goes on."""
        self._scheduled, self._fails = None, False
        if self._closed:
            return
        if self._service.controller.unfinished:  # a checkpoint may be half loaded
            self._schedule(AGAIN_S / 10)
            return
        began_s = time.monotonic()
        try:
            journal = Journal(self._succession.current + 1)
            standby = self._fork(journal)
        except (OSError, RuntimeError) as error:  # no process, no thread can be had
            log.warning("no new standby, the next attempt is in %g s: %s", self._again_s, error)
            self._fails = True
            self._schedule(self._again_s)
            self._again_s = min(2 * self._again_s, LATEST_S)
            return
        self._again_s = AGAIN_S
        self._succession.appoint(journal.number)
        now_s = time.monotonic()
        self._next_s = now_s + (now_s - began_s) / FORKING_SHARE
        log.debug("process %d stands by; to fork it took %.1f ms", standby.pid, 1e3 * (now_s - began_s))
        self._recorder.begin(journal)
        if self._standby is not None:
            self._dismiss(self._standby)
        self._standby, self._service.standby_pid = standby, standby.pid
        asyncio.get_running_loop().add_reader(standby.watch, self._ended, standby)

    def _fork(self, journal: Journal) -> Standby:
        """From a thread of its own, so that the standby begins on an empty stack: one that takes over and forks the
        next would stand deeper each time, until the stack is full."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forked: list[int | OSError] = []  # an executor would take 2 ms more, in which nobody is served
        thread = threading.Thread(target=lambda: forked.append(_fork(self, journal, theirs)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child needs none of the others
                thread.start()
                thread.join()
            (pid,) = forked
            if isinstance(pid, OSError):
                raise pid
            return Standby(pid, ours, watch(pid))
        except (OSError, RuntimeError):
            ours.close()
            journal.close()
            raise
        finally:
            theirs.close()

    def _send(self, arena: Arena) -> None:
        if self._standby is None:
            return
        try:
            socket.send_fds(self._standby.line, [ARENA], [arena.fd])
        except OSError as error:
            log.warning("the standby did not take an arena: %s", error)
            self._recorder.leave_out()

    def _dismiss(self, standby: Standby) -> None:
        """It only waits for this."""
        with contextlib.suppress(OSError):
            standby.line.send(LEAVE)
        standby.line.close()

    def _ended(self, standby: Standby) -> None:
        """A standby has left, or was killed; then there is a new one in a moment."""
        asyncio.get_running_loop().remove_reader(standby.watch)
        os.close(standby.watch)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(standby.pid, os.WNOHANG)
        if standby is not self._standby:
            return
        log.warning("the standby ended; another one is made, until then the rows end with this process")
        standby.line.close()
        self._standby, self._service.standby_pid = None, 0
        self._recorder.begin(None)
        self._schedule(AGAIN_S)

    def close(self) -> None:
        """The service ends, and its standby before it: one that does not leave is killed."""
        self._closed = True
        self._recorder.begin(None)
        if self._standby is not None:
            standby, self._standby = self._standby, None
            self._dismiss(standby)
            if not standby.ends(LEAVES_S):
                signal.pidfd_send_signal(standby.watch, signal.SIGKILL)
                standby.ends(LEAVES_S)
            self._ended(standby)

    # in the standby

    def stand_by(self, journal: Journal, line: socket.socket) -> None:
        """Returns when this standby is not needed any more. Raises `JournalUseless`."""
        signal.set_wakeup_fd(-1)  # the server's event loop would be told, over a descriptor that leads nowhere
        for one in END_SIGNALS:  # they come to the whole group: they count where the server was killed just then
            signal.signal(one, self._note_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        self._recorder.begin(None)  # the journal of the standby before is not for this one
        self._recorder.settled = lambda: None  # what is replayed was written down by the server
        lost = disconnect({line.fileno(), *self._kept(), *(arena.fd for arena in self._service.unit.shm.arenas)})
        arenas = _wait_for_the_end(line)
        if arenas is None or self._succession.current != journal.number:
            return
        count = replay(self._service, journal.records(), arenas)
        log.warning("the server was killed; process %d takes over, after %d events", os.getpid(), count)
        journal.close()
        line.close()
        for number in lost:  # as many as there were clients: those that come back need room
            os.close(number)
        self._service.standby_pid = 0
        self._take_over()

    def _note_signal(self, *_: object) -> None:
        self.is_told_to_end = True


def _fork(keeper: StandbyKeeper, journal: Journal, line: socket.socket) -> int | OSError:
    """Returns in the server alone: the standby's process, or why there is none. Ends this thread's hearing of signals:
    one that comes before the standby looks for them waits until then."""
    signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        pid = os.fork()
    except OSError as error:
        return error
    if not pid:
        _stand_by(keeper, journal, line)
    return pid


def _stand_by(keeper: StandbyKeeper, journal: Journal, line: socket.socket) -> NoReturn:
    """The standby's whole life, from the fork on. The server's event loop is never run again here, nor taken apart: the
    descriptors of its objects lead nowhere from now on."""
    status = 1
    try:
        gc.freeze()
        keeper.stand_by(journal, line)
        status = 0
    except JournalUseless as error:
        log.error("the server was killed, and its standby cannot take over: %s", error)
    finally:
        if sys.exc_info()[0] is not None:  # whatever it was, it must not unwind what was the server's
            traceback.print_exc()
        os._exit(status)


def _wait_for_the_end(line: socket.socket) -> list[int] | None:
    """The arenas that came, once the server is gone; None when this standby is not needed any more."""
    arenas: list[int] = []
    while True:
        data, descriptors = received(line, 1)
        arenas += descriptors
        if data == LEAVE:
            return None
        if not data:
            return arenas
