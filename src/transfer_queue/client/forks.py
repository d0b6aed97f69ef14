"""What sessions do about a fork: the child goes on as a client of its own, and the parent does not notice."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Protocol

from transfer_queue.wire.address import Address

log = logging.getLogger("transfer_queue")


class Forking(Protocol):
    """What hears of the forks of this process."""

    address: Address

    def before_fork(self) -> None: ...
    def after_fork_in_parent(self) -> None: ...
    def after_fork_in_child(self) -> None: ...


sessions: weakref.WeakSet[Forking] = weakref.WeakSet()  # those that are open


def _each(tell: Callable[[Forking], None]) -> Callable[[], None]:
    """Tell each session by itself: one that fails keeps no other from hearing of it."""

    def run() -> None:
        for session in list(sessions):
            try:
                tell(session)
            except Exception:
                log.exception("process %d: the session with %s cannot follow a fork", os.getpid(), session.address)

    return run


os.register_at_fork(
    before=_each(lambda session: session.before_fork()),
    after_in_parent=_each(lambda session: session.after_fork_in_parent()),
    after_in_child=_each(lambda session: session.after_fork_in_child()),
)
