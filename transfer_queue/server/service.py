"""What one message does: the controller and one storage unit together, in memory and without sockets."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from transfer_queue.controller import Controller
from transfer_queue.errors import InvalidInput, LeaseExpired, StoreFull, TransferQueueError
from transfer_queue.storage.shm.unit import Block, Unit
from transfer_queue.wire import messages as m

REMOTE_INLINE_NBYTES = 1 << 20
REMEMBERED_REPLIES, REMEMBERED_NBYTES = 4096, 4 << 20  # of each session
REMEMBERED_PINS = 256
Payload: TypeAlias = "Sequence[bytes | bytearray | memoryview]"
Answer: TypeAlias = "tuple[m.Reply, Payload]"


class Session:
    """One client over all its connections. `local`: it maps the arenas itself."""

    def __init__(self, ident: bytes, local: bool) -> None:
        self.ident = ident
        self.local = local
        self.connections = 0
        self.replies: OrderedDict[int, Answer] = OrderedDict()
        self._replies_nbytes = 0
        self.parked: dict[int, Hashable] = {}  # ticket of each parked request
        self.pinned: OrderedDict[int, list[int]] = OrderedDict()  # blocks each of the latest reads pinned

    def remember(self, answer: Answer) -> None:
        """Keep the answer for when its request comes again; the oldest go when there are many or they are large."""
        self.replies[answer[0].rid] = answer
        self._replies_nbytes += _weight(answer)
        while len(self.replies) > REMEMBERED_REPLIES or (
            self._replies_nbytes > REMEMBERED_NBYTES and len(self.replies) > 1
        ):
            self._replies_nbytes -= _weight(self.replies.popitem(last=False)[1])


def _weight(answer: Answer) -> int:
    """About how many bytes an answer holds: rows, and for each its tags."""
    reply = answer[0]
    if not isinstance(reply, (m.Committed, m.RowSet)):
        return 256
    return 256 + len(reply.rows) * (32 if reply.tags else 1)


class Held(NamedTuple):
    """The block of a commit that waits for room: neither published nor its client's to change."""

    block: Block
    owner: bytes | None
    layout: bytes


class Service:
    """Answers messages of sessions. Answers to parked requests come out of `answered()`."""

    def __init__(self, controller: Controller, unit: Unit) -> None:
        self.controller = controller
        self.unit = unit
        self.sessions: dict[bytes, Session] = {}
        self.num_requests = 0
        self._held: dict[Hashable, Held] = {}
        self._rules: dict[type, Callable[[m.Request, Session], Answer]] = {
            m.Read: self._read, m.Write: self._write, m.Get: self._get, m.Stats: self._stats, m.Adopt: self._adopt,
        }  # fmt: skip

    # sessions

    def attach(self, ident: bytes, local: bool) -> Session:
        session = self.sessions.get(ident)
        if session is None:
            session = self.sessions[ident] = Session(ident, local)
        session.connections += 1
        return session

    def detach(self, session: Session, tickets: set[Hashable]) -> None:
        """A connection is gone; with the last one goes all that its session held."""
        self._forget(tickets)
        session.connections -= 1
        if not session.connections:
            del self.sessions[session.ident]
            self.unit.forget(session.ident)
            self.controller.end_session(session.ident)
        self.settle()

    def _forget(self, tickets: set[Hashable]) -> None:
        self.controller.forget(tickets)
        self.unit.forget_tickets(tickets)
        for ticket in tickets & self._held.keys():
            held = self._released(ticket)
            if held.owner is None:
                self.unit.drop(held.block.number)

    def _released(self, ticket: Hashable) -> Held:
        """What a parked commit held, given back to its owner (None: it came inline)."""
        held = self._held.pop(ticket)
        held.block.owner = held.owner
        return held

    # requests

    def notify(self, message: m.Message, session: Session) -> None:
        """Carry out a one-way message; whatever is wrong with it is ignored."""
        match message:
            case m.Unpin(blocks=blocks):
                self._unpin_all(blocks, session)
            case m.Discard(block=block):
                waiting = [
                    t for t, held in self._held.items() if (held.block.number, held.owner) == (block, session.ident)
                ]
                self._forget(set(waiting))
                try:
                    self.unit.unpublished(block, session.ident)
                except InvalidInput:
                    return
                self.unit.drop(block)
            case m.Cancel(rid=rid):
                self._cancel(rid, session)
        self.settle()

    def _cancel(self, rid: int, session: Session) -> None:
        if rid in session.parked:
            self._forget({session.parked.pop(rid)})
        self._unpin_all(session.pinned.pop(rid, ()), session)
        answer = session.replies.get(rid)
        if answer is not None and isinstance(answer[0], m.RowSet):
            self.controller.take_back(answer[0])
        if answer is not None and isinstance(answer[0], m.Allocated):
            self._unpin_all([answer[0].block], session)
            self.notify(m.Discard(answer[0].block), session)

    def _unpin_all(self, blocks: Sequence[int], session: Session) -> None:
        for block in blocks:
            self.unit.unpin(block, session.ident)

    def handle(
        self, message: m.Request, payload: memoryview, session: Session, ticket: Hashable, now: float
    ) -> Answer | None:
        """The answer, or None when the request was parked."""
        self.num_requests += 1
        known = session.replies.get(message.rid) if isinstance(message, m.MUTATING) else None
        if known is not None:
            return known
        if message.rid in session.parked:  # asked again over another connection
            self._forget({session.parked.pop(message.rid)})
        try:
            answer = self._handle(message, payload, session, ticket, now)
        except TransferQueueError as error:
            answer = (m.Failed(message.rid, error.code, str(error)), ())
        if answer is None:
            session.parked[message.rid] = ticket
        elif isinstance(message, m.MUTATING):
            session.remember(answer)
        self.settle()
        return answer

    def _handle(
        self, message: m.Request, payload: memoryview, session: Session, ticket: Hashable, now: float
    ) -> Answer | None:
        rule = self._rules.get(type(message))
        if rule is not None:
            return rule(message, session)
        if isinstance(message, m.Allocate):
            allocated = self.unit.allocate(message, ticket, session.ident, now)
            return None if allocated is None else (allocated, ())
        if isinstance(message, m.Commit) and message.block >= 0:
            return self._commit(message, payload, session, ticket, now)
        if isinstance(message, m.Fetch) and message.holder and message.holder not in self.sessions:
            raise LeaseExpired("the session that would hold the rows has ended")
        reply = self.controller.handle(message, ticket, session.ident, now)
        return None if reply is None else (reply, ())

    def _commit(
        self, message: m.Commit, payload: memoryview, session: Session, ticket: Hashable, now: float
    ) -> Answer | None:
        """Publish a block the client filled, or one made of the inline payload."""
        block = self._inline(payload) if message.block == 0 else self.unit.unpublished(message.block, session.ident)
        message.block = block.number
        try:
            reply = self.controller.handle(message, ticket, session.ident, now)
        except TransferQueueError:
            self.unit.drop(block.number)
            raise
        if reply is None:
            self._held[ticket] = Held(block, block.owner, message.layout)
            block.owner = None
            return None
        self.unit.publish(block.number, message.layout)
        return reply, ()

    def _inline(self, payload: memoryview) -> Block:
        nbytes = max(1, len(payload))
        block = self.unit.place(nbytes, None)
        if block is None:
            raise StoreFull(f"{nbytes} bytes do not fit into the store now")
        self.unit.memory(block)[: len(payload)] = payload
        return block

    def _get(self, message: m.Request, session: Session) -> Answer:
        """Locate, then either send small blocks along or pin them."""
        reply = self.controller.handle(message, None, session.ident, 0.0)
        assert isinstance(reply, m.Located)
        reply.layouts, total = self.unit.describe(reply.pieces)
        if total <= (m.INLINE_NBYTES if session.local else REMOTE_INLINE_NBYTES):
            return reply, (self._copied(reply.pieces, total),)
        self._pin_all(message.rid, [piece.block for piece in reply.pieces], session)
        return reply, ()

    def _pin_all(self, rid: int, blocks: list[int], session: Session) -> None:
        """Pin what a reply names, in place of what an earlier reply to the same request named."""
        for block in blocks:
            self.unit.pin(block, session.ident)
        self._unpin_all(session.pinned.pop(rid, ()), session)
        session.pinned[rid] = blocks
        if len(session.pinned) > REMEMBERED_PINS:
            session.pinned.popitem(last=False)

    def _copied(self, pieces: list[m.Piece], total: int) -> bytearray:
        payload = bytearray(total)
        at = 0
        for piece in pieces:
            block = self.unit.block(piece.block)
            assert block is not None
            payload[at : at + block.nbytes] = memoryview(self.unit.memory(block))  # type: ignore[arg-type]
            piece.arena, piece.offset = -1, at
            at += -(-block.nbytes // 64) * 64
        return payload

    def _read(self, message: m.Request, session: Session) -> Answer:
        assert isinstance(message, m.Read)
        block = self.unit.pinned(message.block, session.ident)
        end = message.offset + message.nbytes
        if message.offset < 0 or message.nbytes < 0 or end > block.nbytes:
            raise InvalidInput(f"bytes {message.offset}..{end} of a block of {block.nbytes}")
        return m.Data(message.rid), (self.unit.memory(block)[message.offset : end].tobytes(),)

    def _write(self, message: m.Request, session: Session) -> Answer:
        return m.Done(message.rid), ()  # the payload was received in place: see `destination`

    def destination(self, message: m.Message, nbytes: int, session: Session) -> memoryview:
        """Where the payload of `message` is received; raises to refuse it."""
        if isinstance(message, m.Write):
            block = self.unit.unpublished(message.block, session.ident)
            if message.offset < 0 or message.offset + nbytes > block.nbytes:
                raise InvalidInput(f"bytes {message.offset}..{message.offset + nbytes} of a block of {block.nbytes}")
            return memoryview(self.unit.memory(block))[message.offset : message.offset + nbytes]  # type: ignore[arg-type]
        if isinstance(message, m.Commit) and message.block == 0 and nbytes <= REMOTE_INLINE_NBYTES:
            return memoryview(bytearray(nbytes))
        raise InvalidInput(f"{type(message).__name__} with a payload of {nbytes} bytes")

    def _adopt(self, message: m.Request, session: Session) -> Answer:
        assert isinstance(message, m.Adopt)
        self.unit.adopt(session.ident, message.session)
        return m.Done(message.rid), ()

    def _stats(self, message: m.Request, session: Session) -> Answer:
        return m.Report(message.rid, self.statistics()), ()

    def statistics(self) -> dict[str, object]:
        """Counts and sizes, for people and for monitoring."""
        return {
            "pid": os.getpid(),
            "partitions": len(self.controller.tables),
            "rows": self.controller.num_rows,
            "blocks": len(self.controller.ledger.entries),
            "waiting_requests": self.controller.num_waiting + self.unit.num_waiting,
            "requests": self.num_requests,
            "clients": len(self.sessions),
            "arena_nbytes_used": self.unit.used_nbytes,
            "arena_nbytes_resident": self.unit.resident_nbytes(),
            "arena_nbytes_budget": self.unit.budget_nbytes,
            "pinned_nbytes": self.unit.pinned_nbytes(),
        }

    # consequences

    def settle(self) -> None:
        """Publish what found room, recycle what nobody needs any more, and let waiting allocations use it."""
        if self._held:
            self._settle_held()
        freed = self.controller.ledger.freed
        if freed:
            for block in freed:
                self.unit.drop(block)
            freed.clear()
        self.unit.retry()

    def _settle_held(self) -> None:
        for ticket, reply in self.controller.outbox:
            if ticket in self._held:
                held = self._released(ticket)
                if isinstance(reply, m.Failed):
                    self.unit.drop(held.block.number)
                else:
                    self.unit.publish(held.block.number, held.layout)

    def expire(self, now: float) -> None:
        self.controller.expire(now)
        self.unit.expire(now)
        self.settle()

    def next_deadline(self) -> float | None:
        deadlines = (self.controller.next_deadline(), self.unit.next_deadline())
        return min((d for d in deadlines if d is not None), default=None)

    def answered(self) -> Iterator[tuple[Hashable, m.Reply]]:
        """Tickets and replies of parked requests that were answered since the last call."""
        for outbox in (self.controller.outbox, self.unit.outbox):
            yield from outbox
            outbox.clear()

    def close_request(self, session: Session, reply: m.Reply) -> None:
        """A parked request was answered: remember the answer in case it is asked for again."""
        session.parked.pop(reply.rid, None)
        session.remember((reply, ()))

    def check_invariants(self) -> None:
        self.controller.check_invariants()
        self.unit.check_invariants()
        assert not self.controller.ledger.freed
