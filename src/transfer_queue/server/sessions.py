"""Who talks to this server: one session is one client over all its connections."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

from transfer_queue.errors import InternalError
from transfer_queue.wire import messages as m
from transfer_queue.wire.handshake import GRACE_S

REMEMBERED_REPLIES, REMEMBERED_NBYTES = 4096, 4 << 20  # of each session
LIGHT_NBYTES = 256
TOO_LONG_AGO = "the request was carried out, but its answer is not kept any more: larger ones came since"
REMEMBERED_CANCELS = 1024  # of each session
REMEMBERED_ENDED = 1024  # sessions
TAKEN = (  # answers that gave something
    m.RowSet, m.Admitted, m.Allocated, m.Locked, m.Tickets, m.SlotsClaimed, m.GroupsLent, m.Counted,
)  # fmt: skip
Answer: TypeAlias = "tuple[m.Reply, Sequence[bytes | bytearray | memoryview]]"


class ServerSession:
    """One client over all its connections. `local`: it maps the arenas itself."""

    def __init__(self, ident: bytes, local: bool, pid: int = 0) -> None:
        self.ident = ident
        self.local = local
        self.pid = pid  # of the process, where it is on this host and known
        self.host = ""  # from where it came last, over a network
        self.connections = 0
        self.opened = 0  # how many there have been: the number of the newest
        self.ended = False  # it said goodbye
        self.replies: OrderedDict[int, Answer] = OrderedDict()
        self._replies_nbytes = 0
        self._heavy: OrderedDict[int, None] = OrderedDict()  # of the replies
        self.parked: dict[int, Hashable] = {}  # ticket of each parked request
        self.overtaken: dict[int, Hashable] = {}  # the ticket before, of requests that were asked again while parked
        self._called_off: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by request: over which, newest then

    def remember(self, answer: Answer) -> None:
        """Keep the answer for when its request comes again: the oldest go when there are many, and are shortened to an
        error when they are large, for what was carried out must not be so twice."""
        if isinstance(answer[0], m.Handed):
            answer = (answer[0].rows, ())  # the data is asked for anew
        rid, nbytes = answer[0].rid, _weight(answer)
        self.forget(rid)
        self.replies[rid] = answer
        self._replies_nbytes += nbytes
        if nbytes > LIGHT_NBYTES:
            self._heavy[rid] = None
        while self._replies_nbytes > REMEMBERED_NBYTES and len(self._heavy) > 1:
            rid = next(iter(self._heavy))
            self.forget(rid)
            self.replies[rid] = m.Failed(rid, InternalError.code, TOO_LONG_AGO), ()
            self._replies_nbytes += LIGHT_NBYTES
        while len(self.replies) > REMEMBERED_REPLIES:
            self.forget(next(iter(self.replies)))

    def cancel(self, rid: int) -> None:
        """What this request took is undone, if it took something: sent again it is carried out anew."""
        answer = self.replies.get(rid)
        if answer is not None and isinstance(answer[0], TAKEN):
            self.forget(rid)

    def call_off(self, rid: int, over: int) -> None:
        """The request was cancelled over connection number `over`: another one that is open now may still bring it,
        for nothing says which of two connections is read first. A newer one asks again on purpose. One of
        `messages.ENDING` is carried out all the same."""
        self._called_off[rid] = (over, self.opened)
        if len(self._called_off) > REMEMBERED_CANCELS:
            self._called_off.popitem(last=False)

    def is_called_off(self, rid: int, over: int) -> bool:
        """Whether connection number `over` brings a request that had been cancelled before it was read."""
        found = self._called_off.get(rid)
        return found is not None and over != found[0] and over <= found[1]

    def forget(self, rid: int) -> None:
        """The request will not come again, or is to be carried out anew."""
        answer = self.replies.pop(rid, None)
        if answer is not None:
            self._heavy.pop(rid, None)
            self._replies_nbytes -= _weight(answer)


def _weight(answer: Answer) -> int:
    """About how many bytes an answer holds: rows, and for each its tags."""
    reply = answer[0].rows if isinstance(answer[0], m.GroupsLent) else answer[0]
    if not isinstance(reply, (m.Committed, m.RowSet)):
        return LIGHT_NBYTES
    return LIGHT_NBYTES + len(reply.rows) * (32 if reply.tags else 1)


class Sessions:
    """The sessions of one server by identity, and those whose connections are gone but which may come back."""

    def __init__(self) -> None:
        self.by_ident: dict[bytes, ServerSession] = {}
        self._away: OrderedDict[bytes, float] = OrderedDict()  # until when they may come back
        self._ended: OrderedDict[bytes, int] = OrderedDict()  # the processes of those that ended lately

    def attach(self, ident: bytes, local: bool, pid: int = 0, host: str = "") -> ServerSession:
        """The session of one more connection, which comes from the address `host` ("": of this host)."""
        session = self.by_ident.get(ident)
        if session is None:
            session = self.by_ident[ident] = ServerSession(ident, local, pid)
        self._away.pop(ident, None)
        session.pid = pid or session.pid  # a forked child's session was opened by its parent
        session.host = host or session.host
        session.connections += 1
        session.opened += 1
        return session

    def detach(self, session: ServerSession, now: float) -> bool:
        """A connection is gone. True when with it the session has ended."""
        session.connections -= 1
        if session.connections:
            return False
        if session.local or session.ended:
            self.remove(session.ident)
            return True
        self._away[session.ident] = now + GRACE_S
        return False

    def await_return(self, session: ServerSession, now: float) -> None:
        """Its connections were lost together with the process that served them: it has a while to come back."""
        session.connections = 0
        self._away[session.ident] = now + GRACE_S

    def remove(self, ident: bytes) -> None:
        """The session has ended."""
        self._ended[ident] = self.by_ident.pop(ident).pid
        if len(self._ended) > REMEMBERED_ENDED:
            self._ended.popitem(last=False)
        self._away.pop(ident, None)

    def listed(self, pinned_nbytes: Mapping[bytes, int]) -> list[m.SessionOverview]:
        """All of them, as they are shown."""
        return [
            m.SessionOverview(one.ident, one.pid, one.local, one.connections, pinned_nbytes.get(one.ident, 0), one.host)
            for one in self.by_ident.values()
        ]

    def identify(self, departures: Sequence[m.DepartureOverview]) -> None:
        """Say which processes they were, where that is known yet."""
        for one in departures:
            one.pid = self._ended.get(one.session, 0)

    def next_deadline(self) -> float | None:
        return next(iter(self._away.values()), None)

    def postpone(self, by_s: float) -> None:
        for ident in self._away:
            self._away[ident] += by_s

    def expired(self, now: float) -> list[ServerSession]:
        """Remove and return those that did not come back in time."""
        found = []
        while self._away and (deadline := self.next_deadline()) is not None and deadline <= now:
            ident, _ = self._away.popitem(last=False)
            found.append(self.by_ident[ident])
            self.remove(ident)
        return found
