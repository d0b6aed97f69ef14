"""Fetches that take the data along: the rows of a task and their cells in one answer (`Fetch.locate`, `.carry`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeAlias

from transfer_queue.controller import Controller
from transfer_queue.errors import TransferQueueError
from transfer_queue.server.block_requests import Payload
from transfer_queue.server.sessions import Answer, ServerSession
from transfer_queue.wire import messages as m

ROW_NBYTES = 8  # of a global index
Present: TypeAlias = "Callable[[m.Located, memoryview, ServerSession], Answer]"
Carried: TypeAlias = "Callable[[m.Located, Payload], Answer | None]"


class DataFetch(NamedTuple):
    message: m.Fetch
    session: ServerSession
    came: float  # when the server had it


class DataFetches:
    """`present` completes a location with what lies on this host, and `carried` gives it with all its bytes, or None.

    Where either fails the answer has the rows alone, and the client asks for the data by itself.
    """

    def __init__(self, present: Present, carried: Carried) -> None:
        self._present = present
        self._carried = carried
        self._parked: dict[Hashable, DataFetch] = {}

    def park(self, message: m.Fetch, session: ServerSession, ticket: Hashable, now: float) -> None:
        """The fetch waits; its answer will be `complete`d."""
        self._parked[ticket] = DataFetch(message, session, now)

    def unpark(self, ticket: Hashable) -> DataFetch | None:
        return self._parked.pop(ticket, None)

    def forget_all(self) -> None:
        self._parked.clear()

    def complete(
        self, controller: object, fetching: DataFetch, reply: m.Reply, payload: memoryview, now: float
    ) -> Answer:
        """The answer to a fetch, with the data where there are rows."""
        message, session, came = fetching
        if isinstance(reply, m.Handed):  # of the controller's host
            rows, located, after_s = reply.rows, reply.located, reply.after_s
        elif isinstance(reply, m.RowSet) and reply.rows and isinstance(controller, Controller):
            rows, located, after_s = reply, None, now - came
        else:
            return reply, (payload,) if payload else ()
        if message.carry and len(rows.rows) > m.CARRIED_ROWS * ROW_NBYTES:
            return rows, ()
        try:
            if located is None:
                fields = sorted(message.fields) if message.carry else message.fields
                get = m.Get(message.rid, message.partition, None, rows.rows, fields, True)
                found = controller.handle(get, None, session.ident, now)  # type: ignore[attr-defined]
                assert isinstance(found, m.Located)
                located = found
            answer = self._with_data(message, located, payload, session)
        except TransferQueueError:
            answer = None
        if answer is None:
            return rows, ()
        assert isinstance(answer[0], m.Located)
        return m.Handed(message.rid, rows, answer[0], after_s), answer[1]

    def _with_data(
        self, message: m.Fetch, located: m.Located, payload: memoryview, session: ServerSession
    ) -> Answer | None:
        if message.carry:
            return self._carried(located, (payload,) if payload else ())
        return self._present(located, payload, session)
