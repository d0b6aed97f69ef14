"""Requests that wait for what happens outside of this process, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

from transfer_queue.errors import InternalError, TransferQueueError
from transfer_queue.server.block_requests import Answer
from transfer_queue.wire import messages as m

T = TypeVar("T")


def taken_out(outbox: list[tuple[Hashable, T]], ticket: Hashable) -> list[T]:
    """The answers for this ticket, which are not in `outbox` any more."""
    found = [answer for one, answer in outbox if one == ticket]
    if found:
        outbox[:] = [entry for entry in outbox if entry[0] != ticket]
    return found


class LateAnswers:
    """By ticket; `answers` has those that were not sent yet. A request that is forgotten meanwhile gets none, and
    has no effect."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """`ended` is called when something was waited for long enough, whether there is an answer or not."""
        self._ended = ended
        self._waiting: set[Hashable] = set()
        self.answers: list[tuple[Hashable, Answer]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, ticket: Hashable, rid: int, waits: Coroutine[Any, Any, None], answer: Callable[[], Answer]) -> None:
        """Call `answer` once `waits` is done."""

        async def run() -> None:
            found: Answer = m.Failed(rid, InternalError.code, "see the server's log"), ()
            try:
                await waits
                if ticket in self._waiting:
                    found = answer()
            except TransferQueueError as error:
                found = m.Failed(rid, error.code, str(error)), ()
            finally:
                if ticket in self._waiting:
                    self._waiting.discard(ticket)
                    self.answers.append((ticket, found))
                self._ended()

        self._waiting.add(ticket)
        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, tickets: set[Hashable]) -> None:
        self._waiting -= tickets

    def forget_all(self) -> None:
        self._waiting.clear()
        self.answers.clear()
