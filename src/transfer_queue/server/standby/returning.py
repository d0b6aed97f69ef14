"""Local sessions whose connections were lost with the server's process: they last as long as their own processes.

A process that only looks at what it has read makes no call, so it does not notice that the server was replaced. What
it looks at is pinned until it ends, or has attached again and left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession

MAX_WATCHES = 1024  # each takes a descriptor, of which connections need theirs


class ReturningSessions:
    """`ended` is called when one will not come back; `now` is the time of events of `service`."""

    def __init__(self, service: Service, now: Callable[[], float], ended: Callable[[], None]) -> None:
        self._service = service
        self._now = now
        self._ended = ended
        self._watches: dict[int, list[ServerSession]] = {}  # by the descriptor of the process (pidfd_open(2))

    def expect_all(self) -> None:
        """Every session there is. Those of other hosts, and those whose process cannot be watched, have a while."""
        of_process: dict[int, list[ServerSession]] = {}
        for session in list(self._service.sessions.by_ident.values()):
            of_process.setdefault(session.pid if session.local else 0, []).append(session)
        for pid, sessions in of_process.items():
            if pid and len(self._watches) < MAX_WATCHES and self._watch(pid, sessions):
                continue
            for session in sessions:
                self._service.sessions.await_return(session, self._now())

    def _watch(self, pid: int, sessions: list[ServerSession]) -> bool:
        """Whether the process is watched, or has ended and its sessions with it."""
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:
            for session in sessions:
                self._service.end(session)
            return True
        except OSError:  # no descriptor is left
            return False
        self._watches[watch] = sessions
        asyncio.get_running_loop().add_reader(watch, self._process_ended, watch)
        return True

    def _process_ended(self, watch: int) -> None:
        sessions = self._watches.pop(watch)
        self._let_go(watch)
        self._service.expire(self._now())
        for session in sessions:
            known = self._service.sessions.by_ident.get(session.ident)
            if known is session and not session.connections:
                self._service.end(session)
                self._ended()

    def close(self) -> None:
        for watch in self._watches:
            self._let_go(watch)
        self._watches.clear()

    def _let_go(self, watch: int) -> None:
        asyncio.get_running_loop().remove_reader(watch)
        os.close(watch)
