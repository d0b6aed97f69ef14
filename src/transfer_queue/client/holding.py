"""What keeps a session alive at its server.

With the last connection of a session the server frees what the session has: pins of blocks that are being read, blocks
that are being filled, leases, locks. A call that is broken off closes its connection, so a session that has something
does not live by the connections of its calls. It has one more, that no call uses.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from transfer_queue.client.connection import Connection
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable
from transfer_queue.wire import messages as m


class Hold:
    """The connection that no call uses. `connect(within_s)` makes one; `replaced` is called when one was opened in
    place of one that was lost. Where `is_needed`, whoever opens a connection for calls asks for it first."""

    def __init__(self, connect: Callable[[float], Connection], replaced: Callable[[], None]) -> None:
        self._connect = connect
        self._replaced = replaced
        self._connection: Connection | None = None
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self.is_needed = False

    def take(self, connection: Connection) -> None:
        """This is the one."""
        self._connection, self.is_needed = connection, True

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
        lost = self._connection
        if not self.is_missing:
            return
        fresh = self._connect(within_s)
        with self._lock:
            if self._connection is lost:
                self._connection = fresh
        if self._connection is not fresh:
            fresh.close()  # another thread was faster
        elif lost is not None:
            lost.close()
            self._replaced()

    def notify(self, message: m.Message) -> None:
        """Say something over it, of a session that makes no calls any more. Nobody hears whether that was possible."""
        connection = self._connection
        if connection is not None:
            with self._telling, contextlib.suppress(ServiceUnavailable, DeadlineExceeded):
                connection.notify(message)

    def close(self) -> None:
        """The session may end."""
        self.is_needed = False
        if self._connection is not None:
            self._connection.close()


class Uses:
    """The operations that are under way. What `end_with` was given is called once none is.

    An operation is named by the list of what it was given, which is its own. To end it twice does no harm: an interrupt
    (KeyboardInterrupt) may strike anywhere, and what is left out then would be missing for good.
    """

    def __init__(self) -> None:
        self._active: set[int] = set()
        self._last: list[Callable[[], None]] = []

    def begin(self, given: list[Any]) -> None:
        self._active.add(id(given))

    def end(self, given: list[Any]) -> None:
        self._active.discard(id(given))
        if self._last:
            self._call_last()

    def end_with(self, call: Callable[[], None]) -> None:
        """Now, or in the thread of the last of them."""
        self._last.append(call)
        self._call_last()

    def _call_last(self) -> None:
        while not self._active:
            try:
                call = self._last.pop(0)  # in one step: several threads may come here
            except IndexError:
                return
            call()
