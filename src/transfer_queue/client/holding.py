"""What keeps a session alive at its server.

With the last connection of a session the server frees what the session has: pins of blocks that are being read, blocks
that are being filled, leases, locks. A call that is broken off closes its connection, so a session that has something
does not live by the connections of its calls. It has one more, that no call uses. Who has nothing needs none: a server
has room for so many connections only.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from transfer_queue.client.connection import Connection
from transfer_queue.client.effects import Call
from transfer_queue.client.one_way import Owed
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable
from transfer_queue.wire import messages as m

T = TypeVar("T")


class Hold:
    """The connection that no call uses. `connect(within_s)` makes one; `replaced` is called when one was opened in
    place of one that was lost. Where `is_needed`, whoever opens a connection for calls asks for it first."""

    def __init__(self, connect: Callable[[float], Connection], replaced: Callable[[], None]) -> None:
        self._connect = connect
        self._replaced = replaced
        self._connection: Connection | None = None
        self._aside: list[Connection] = []  # by which the session may live as well
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self.is_needed = self._is_closed = False

    def takes(self, connection: Connection) -> bool:
        """This is the one from now on, unless there is one already: whether it is."""
        self.is_needed = True
        with self._lock:
            self._connection = self._connection or connection
        return self._connection is connection

    def stands_in(self, connection: Connection) -> bool:
        """This is the one from now on where one is needed and could not be opened, as the service stood still: it has
        answered over this one since. Whether it is."""
        return self.is_needed and self._connection is None and self.takes(connection)

    @property
    def is_open(self) -> bool:
        """Whether there is one; it may have been lost since."""
        return self._connection is not None

    @property
    def is_missing(self) -> bool:
        """Whether it is needed and not there."""
        connection = self._connection
        return self.is_needed and (connection is None or connection.is_lost)

    def ensure(self, within_s: float) -> None:
        """It is there afterwards, where it is needed. Raises as `connect`."""
        if not self.is_missing:
            return
        fresh = self._connect(within_s)
        with self._lock:
            before, is_open = self._connection, not self._is_closed
            is_taken = is_open and (before is None or before.is_lost)
            if is_taken:
                self._connection = fresh
            elif is_open and before is not None and before.welcome.pid != fresh.welcome.pid:
                # Another thread was faster. One of the two servers was killed since, and nothing says yet which.
                self._put_aside(fresh)
                return
        if not is_taken:
            fresh.close()
        elif before is not None:
            before.close()
            self._replaced()

    def _put_aside(self, connection: Connection) -> None:
        for lost in [one for one in self._aside if one.is_lost]:
            self._aside.remove(lost)
            lost.close()
        self._aside.append(connection)

    def notify(self, message: m.Message) -> None:
        """Say something over it, of a session that makes no calls any more. Nobody hears whether that was possible."""
        connection = self._connection
        if connection is not None:
            with self._telling, contextlib.suppress(ServiceUnavailable, DeadlineExceeded):
                connection.notify(message)

    def close(self) -> None:
        """The session may end."""
        with self._lock:
            self.is_needed, self._is_closed = False, True
        for connection in (self._connection, *self._aside):
            if connection is not None:
                connection.close()


class Given(list[Call]):
    """What an operation asked for so far, and may have been given: rows, blocks, pins. `untold`: what servers are to be
    told before anything else is asked, or at the end."""

    __slots__ = ("__weakref__", "untold")

    def __init__(self) -> None:
        super().__init__()
        self.untold: list[Owed] = []


class Uses:
    """The operations that are under way, each by its own `Given`. What `end_with` was given is called once none is.

    To end one twice does no harm: an interrupt (KeyboardInterrupt) may strike anywhere, and what is left out then would
    be missing for good. One whose end was struck counts no more once its `Given` is gone, and one on an event loop that
    nobody runs does not count: it will not go on.
    """

    def __init__(self) -> None:
        self._active: dict[int, tuple[weakref.ref[Given], asyncio.AbstractEventLoop | None]] = {}
        self._last: list[Callable[[], None]] = []

    @property
    def num_active(self) -> int:
        return len(self._active)

    def begin(self, given: Given, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._active[id(given)] = weakref.ref(given), loop

    def end(self, given: Given) -> None:
        self._active.pop(id(given), None)
        if self._last:
            self._call_last()

    def end_with(self, call: Callable[[], None]) -> None:
        """Now, or in the thread of the last of them."""
        self._last.append(call)
        self._call_last()

    def counted(self, work: Callable[[], T]) -> Callable[[], T]:
        """`work` for another thread, which goes on whatever becomes of who waits for it."""
        token = Given()
        self.begin(token)

        def run() -> T:
            try:
                return work()
            finally:
                self.end(token)

        return run

    def _call_last(self) -> None:
        while not any(_counts(*one) for one in list(self._active.values())):
            try:
                call = self._last.pop(0)  # in one step: several threads may come here
            except IndexError:
                return
            call()


def _counts(given: weakref.ref[Given], loop: asyncio.AbstractEventLoop | None) -> bool:
    return given() is not None and (loop is None or loop.is_running())
