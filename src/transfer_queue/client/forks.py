"""What sessions do about a fork: the child goes on as a client of its own, and the parent does not notice."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Protocol

from transfer_queue.client.connection import Connection
from transfer_queue.errors import TransferQueueError
from transfer_queue.wire import messages as m

ADOPT_S = 1.0  # a fork stands still meanwhile


class Forking(Protocol):
    """What hears of the forks of this process."""

    def before_fork(self) -> None: ...
    def after_fork_in_parent(self) -> None: ...
    def after_fork_in_child(self) -> None: ...


sessions: weakref.WeakSet[Forking] = weakref.WeakSet()  # those that are open


def _each(tell: Callable[[Forking], None]) -> Callable[[], None]:
    def run() -> None:
        with ExitStack() as calls:  # one that fails keeps no other from being called
            for session in list(sessions):
                calls.callback(tell, session)

    return run


class Connecting(Protocol):
    def __call__(self, timeout_s: float, *, ident: bytes) -> Connection: ...


def heir(connect: Connecting, parent: bytes) -> tuple[bytes, Connection] | None:
    """A new session that holds the pins of `parent` as well; None where the server says nothing within `ADOPT_S`."""
    ident = secrets.token_bytes(16)
    try:
        connection = connect(ADOPT_S, ident=ident)
    except TransferQueueError:
        return None
    try:
        connection.call(m.Adopt(0, parent), None, ADOPT_S)
    except TransferQueueError:
        connection.close()
        return None
    return ident, connection


def leave(sock: Any) -> None:
    """Close a copy of the parent's socket, of which another object will close the number: it is of nothing until then.
    None, and one that is closed, is left alone."""
    descriptor = -1 if sock is None else sock.fileno()
    if descriptor >= 0:
        with suppress(OSError):
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nothing, descriptor, inheritable=False)
            os.close(nothing)


os.register_at_fork(
    before=_each(lambda session: session.before_fork()),
    after_in_parent=_each(lambda session: session.after_fork_in_parent()),
    after_in_child=_each(lambda session: session.after_fork_in_child()),
)
