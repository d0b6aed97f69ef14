"""Locks within this process, for its threads, tasks and event loops. No service is needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from transfer_queue.claims import Claims
from transfer_queue.errors import DeadlineExceeded

Name: TypeAlias = tuple[str, str]  # partition, key


class ThreadWaiter:
    """A thread that waits for its turn. With a bare lock: one that an interrupt struck as it told an Event would leave
    the Event locked."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._turn.acquire()

    def wake(self) -> bool:
        """Tell that it is its turn; False when nobody is there to hear it."""
        with contextlib.suppress(RuntimeError):  # it was told already
            self._turn.release()
        return True

    def wait(self, timeout_s: float | None) -> None:
        """Once at most."""
        self._turn.acquire(timeout=-1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX))


class LoopWaiter:
    """A task that waits for its turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()

    def wake(self) -> bool:
        """As `ThreadWaiter.wake`: of a loop that was closed nobody hears."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._resolve)
            return True
        return False

    def _resolve(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_s: float | None) -> None:
        await asyncio.wait([self._future], timeout=timeout_s)


class LocalLocks:
    """All locks of one process. What has been granted is a `ThreadWaiter` or `LoopWaiter`, until `leave`.

    A collection may run amid each step and end a generator that holds a lock: who leaves then is noted, and goes once
    the step is done.
    """

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # it knows whether this thread has it
        self._leaving: deque[ThreadWaiter | LoopWaiter] = deque()
        self._claims: Claims[Name, ThreadWaiter | LoopWaiter] = Claims()

    def __len__(self) -> int:
        """How many hold or wait for a lock."""
        return len(self._claims)

    def take(self, names: Sequence[Name], timeout_s: float | None) -> ThreadWaiter:
        """All names together, in order of arrival. Raises `DeadlineExceeded`; an interrupted call takes nothing."""
        waiter = ThreadWaiter()
        try:
            if not self._add(waiter, names):
                waiter.wait(timeout_s)
                self._check(waiter, names, timeout_s)
        except BaseException:
            self.leave_at_last(waiter)
            raise
        return waiter

    async def take_on_loop(self, names: Sequence[Name], timeout_s: float | None) -> LoopWaiter:
        """As `take`, on the running loop; a cancelled call takes nothing."""
        waiter = LoopWaiter()
        try:
            if not self._add(waiter, names):
                await waiter.wait(timeout_s)
                self._check(waiter, names, timeout_s)
        except BaseException:
            self.leave(waiter)
            raise
        return waiter

    def _add(self, waiter: ThreadWaiter | LoopWaiter, names: Sequence[Name]) -> bool:
        with self._mutex:
            is_granted = self._claims.add(waiter, names)
        self._settle()
        return is_granted

    def _check(self, waiter: ThreadWaiter | LoopWaiter, names: Sequence[Name], timeout_s: float | None) -> None:
        with self._mutex:
            is_granted = self._claims.has(waiter)
        self._settle()
        if not is_granted:
            text = f"no lock on {[key for _, key in names]} of partition {names[0][0]!r} within {timeout_s:g} s"
            raise DeadlineExceeded(text)

    def leave(self, waiter: ThreadWaiter | LoopWaiter) -> None:
        """Give up what was granted, or do not wait any more; whoever's turn it is has the names at once."""
        self._leaving.append(waiter)
        self._settle()

    def _settle(self) -> None:
        """Let go who leaves. Each is taken off the list last of all: an interrupt leaves the step to the next one."""
        while self._leaving and not self._mutex._is_owned():  # type: ignore[attr-defined]
            with self._mutex:
                while self._leaving:
                    self._leaving.extend([one for one in self._claims.leave(self._leaving[0]) if not one.wake()])
                    self._leaving.popleft()

    def leave_at_last(self, waiter: ThreadWaiter | LoopWaiter) -> None:
        """As `leave`, after an interrupt that may have struck amid it: some may have their turn and not know it."""
        self.leave(waiter)
        with self._mutex:
            unheard = [one for one in self._claims.holders() if not one.wake()]
        self._settle()
        for one in unheard:
            self.leave(one)


local = LocalLocks()


def _start_over() -> None:
    """A forked child has none of its parent's locks."""
    local.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_start_over)
