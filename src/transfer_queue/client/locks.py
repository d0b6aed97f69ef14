"""Locks of the service as this process holds them: taking one, keeping it alive, giving it back."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from transfer_queue.client.effects import Call, HoldSession, Operation, seconds
from transfer_queue.client.session import Session
from transfer_queue.errors import DeadlineExceeded, LockLostError, ServiceRestarted, TransferQueueError
from transfer_queue.wire import messages as m

ASK_AGAIN_S = 1e6  # who waits for ever asks anew after so long
LINGER_S = 0.2  # for so long the thread that renews waits for the next lock
ANYWHERE = ("10.255.255.255", 1)  # nothing is sent there


class GlobalLease:
    """A lock of the service that this process holds, and renews every third of its lease until it is given back.

    `fence[key]` is a number that grows with each holder of the key, for stores that refuse writers that are too late.
    `token` names the lock. `lost` is True once it is known to have ended. `shards` is (0,): all locks are in one place.
    """

    shards = (0,)

    def __init__(self, session: Session, number: int, keys: Sequence[str], lease_s: float, deadline: float) -> None:
        self.token = str(number)
        self.fence = dict.fromkeys(keys, number)
        self.lost = False
        self.has_ended = False  # nobody needs it any more: it is not renewed
        self.deadline = deadline  # time.monotonic(): until then nobody else has it
        self.renew_at = deadline - lease_s + lease_s / 3
        self._session = session
        self._number = number
        self._lease_s = lease_s
        self._pid = os.getpid()

    def check(self) -> None:
        """Raises `LockLostError` unless the lock is held now: it was not renewed in time, or the service went."""
        if self.lost or time.monotonic() >= self.deadline or self._pid != os.getpid():
            raise LockLostError(f"the lock on {list(self.fence)} was lost: others may have it")

    def renew(self) -> None:
        """Ask for as much time again. A service that does not answer is asked again a third of the lease later."""
        sent = time.monotonic()
        self.renew_at = sent + self._lease_s / 3
        request = m.KeepLock(self._session.next_rid(), self._number, self._lease_s)
        try:
            self._session.call(Call(request, wait_s=self._lease_s / 3))
        except (LockLostError, ServiceRestarted):
            self.lost = True
        except (TransferQueueError, OSError, RuntimeError, MemoryError):  # no descriptor, thread or memory just now
            self.lost = self._session.closed
        else:
            self.deadline = sent + self._lease_s

    def giving_back(self) -> Operation[None]:
        """End the lock. Raises `LockLostError` when it had ended before."""
        if self._pid != os.getpid():
            return  # a forked child: the lock is its parent's
        held = not self.lost and time.monotonic() < self.deadline
        try:
            yield Call(m.Unlock(self._session.next_rid(), self._number))
        except TransferQueueError as error:
            # without an answer: nobody else had it until now, and it ends by itself
            if not held or not isinstance(error, DeadlineExceeded):
                self.lost = True
        else:
            return  # it was held until now: a renewal that the service read after this one has heard of its end
        if self.lost:
            raise LockLostError(f"the lock on {list(self.fence)} was lost before it was given back")


def taking(
    session: Session, partition_id: str, keys: list[str], timeout_s: float | None, lease_s: float
) -> Operation[GlobalLease]:
    """Lock all `keys` together, in order of arrival. Waits in the service, for ever when `timeout_s` is None; raises
    `DeadlineExceeded`. A cancelled or interrupted call takes nothing."""
    if not session.is_held:
        yield HoldSession()
    until = None if timeout_s is None else time.monotonic() + seconds(timeout_s)
    while True:
        asked = time.monotonic()
        wait_s = ASK_AGAIN_S if until is None else max(0.0, until - asked)
        request = m.Lock(session.next_rid(), partition_id, keys, lease_s, wait_s, _myself())
        try:
            number: int = (yield Call(request, wait_s=wait_s))[0].lock
            break
        except DeadlineExceeded:
            if until is not None:
                raise
    lease = GlobalLease(session, number, keys, lease_s, asked + lease_s)
    if time.monotonic() - asked > lease_s / 3:  # it waited: nobody here knows since when it has the lock
        sent = time.monotonic()
        yield Call(m.KeepLock(session.next_rid(), number, lease_s))
        lease.deadline, lease.renew_at = sent + lease_s, sent + lease_s / 3
    return lease


def listing(session: Session, partition_id: str | None) -> Operation[dict[str, Any]]:
    """Who holds and who waits for locks."""
    return (yield Call(m.ListLocks(session.next_rid(), partition_id)))[0].values


def _myself() -> dict[str, Any]:
    return {"node_ip": _own_address(), "pid": os.getpid(), "thread": threading.current_thread().name}


@cache
def _own_address() -> str:
    """The address that other hosts see of this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as looking, contextlib.suppress(OSError):
        looking.connect(ANYWHERE)
        return str(looking.getsockname()[0])
    return "127.0.0.1"


class Keeper:
    """Renews the leases of this process, in one thread that ends soon after the last of them.

    Other threads only put notes: an interrupt as they hold a lock would stop the renewals of all.
    """

    def __init__(self) -> None:
        self._notes: queue.SimpleQueue[GlobalLease | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._leases: set[GlobalLease] = set()  # of the thread; one that died leaves them to the next
        self._thread: threading.Thread | None = None

    def add(self, lease: GlobalLease) -> None:
        """Renew it until it `has_ended` or is lost."""
        self._notes.put(lease)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # an interrupt may have come before its start
                self._thread = threading.Thread(target=self._run, name="tq-locks", daemon=True)
                self._thread.start()

    def look(self) -> None:
        """A lease has ended."""
        self._notes.put(None)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            due = min((lease.renew_at for lease in self._leases), default=now + LINGER_S)
            with contextlib.suppress(queue.Empty):
                note = self._notes.get(timeout=max(0.0, due - now))
                if note is not None:
                    self._leases.add(note)
            self._leases = {lease for lease in self._leases if not lease.lost and not lease.has_ended}
            for lease in [lease for lease in self._leases if lease.renew_at <= time.monotonic()]:
                lease.renew()
            if not self._leases and time.monotonic() >= due and self._ends():
                return

    def _ends(self) -> bool:
        """Whether this thread is the last: nobody has put a lease since it looked."""
        with self._lock:
            if self._notes.empty():
                self._thread = None
                return True
            return False


keeper = Keeper()


def _start_over() -> None:
    """A forked child has no lock and no thread."""
    keeper.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_start_over)
