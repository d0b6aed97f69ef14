"""What one message does: the controller and one storage unit together, in memory and without sockets."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

from transfer_queue.controller.deadlines import earliest
from transfer_queue.errors import InternalError, InvalidInput, LeaseExpired, RowCleared, TransferQueueError
from transfer_queue.server.block_requests import Answer, BlockRequests
from transfer_queue.server.cell_digests import CellDigester
from transfer_queue.server.fetch_with_data import DataFetch, DataFetches
from transfer_queue.server.late_answers import LateAnswers, taken_out
from transfer_queue.server.pending_commits import Filled, PendingCommits
from transfer_queue.server.recycling import Recycler
from transfer_queue.server.sessions import ServerSession, Sessions
from transfer_queue.server.unit_registry import UnitRegistry
from transfer_queue.storage.blocks import Block, Unit, blocks_of, name_blocks
from transfer_queue.storage.shm import SMALL_NBYTES
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of
from transfer_queue.wire.handshake import Life
from transfer_queue.wire.lives import ID_NBYTES

NO_BYTES = memoryview(b"")
MAX_LOOKS = 3  # how often a read looks at the same blocks when one of them is not here any more


class ControllerLike(Protocol):
    """The controller as a server sees it: its own, or that of another host.

    `handle` answers, raises the caller's error, or returns None; the answer then appears in `outbox` as (ticket,
    reply). `payloads` has the payloads of requests and replies that have one, by ticket. After a reply that only says
    that no answer came, `in_doubt` has the ticket. `freed` lists blocks that no row refers to any more. While
    `unfinished`, `tidy` does a slice of what is left to do.
    """

    outbox: list[tuple[Hashable, m.Reply]]
    payloads: dict[Hashable, memoryview]
    in_doubt: set[Hashable]

    @property
    def freed(self) -> list[int]: ...
    @property
    def unfinished(self) -> bool: ...

    def handle(self, message: m.Request, ticket: Hashable, session: bytes, now: float) -> m.Reply | None: ...
    def forget(self, tickets: set[Hashable]) -> None: ...
    def end_session(self, session: bytes) -> None: ...
    def received(self, session: bytes, rid: int) -> None: ...
    def take_back(self, session: bytes, rid: int) -> None: ...
    def expire(self, now: float) -> None: ...
    def postpone(self, by_s: float) -> None: ...
    def tidy(self) -> None: ...
    def next_deadline(self) -> float | None: ...
    def statistics(self) -> dict[str, Any]: ...
    def check_invariants(self) -> None: ...


class JournalLike(Protocol):
    """Where the bytes of blocks are on a disk before their rows are there."""

    def has(self, block: Block) -> bool: ...
    async def keep(self, block: Block, wait_s: float) -> None: ...
    def copied(self, block: int, copy: int) -> None: ...
    def hold(self, send: Callable[[], None]) -> bool: ...
    def check_room(self) -> None: ...
    def statistics(self) -> dict[str, Any]: ...


class Reading(NamedTuple):
    """A read whose location the controller has yet to tell. `looks`: how often the rows lay in these `blocks`."""

    message: m.Get
    session: ServerSession
    looks: int = 0
    blocks: frozenset[int] = frozenset()


class Service:
    """Answers messages of sessions. Answers to parked requests come out of `answered()`. `settled` is called when an
    event is over, before anybody is told what came of it."""

    def __init__(
        self,
        controller: ControllerLike,
        unit: Unit,
        sessions: Sessions | None = None,
        members: UnitRegistry | None = None,
        settled: Callable[[], None] = lambda: None,
        pending: PendingCommits | None = None,
    ) -> None:
        self.controller = controller
        self.unit = unit
        self.pending = pending or PendingCommits(unit)
        self.life = Life(b"", secrets.token_bytes(ID_NBYTES))  # of the service: whoever knows the controller says it
        self.blocks, self.digests = BlockRequests(unit), CellDigester(unit)
        self.members = members or UnitRegistry()
        self.sessions = sessions or Sessions()
        self._settled = settled
        self.recycler = Recycler(controller, unit, self.members)
        self.tcp = ""  # where other hosts reach this server
        self.num_requests = 0
        self.standby_pid = 0  # of the process that would take over
        self.takeovers = 0  # how often one did
        self.deliver: Callable[[], None] = lambda: None  # sends what `answered` has; for those who are nobody's request
        self.journal: JournalLike | None = None
        self._kept_first: set[Hashable] = set()  # requests that wait for the journal
        self._late = LateAnswers(self.publish_outcomes)
        self._background: set[asyncio.Task[None]] = set()
        self._reading: dict[Hashable, Reading] = {}
        self._data_fetches = DataFetches(self._present, self.blocks.carried)
        self._rules: dict[type, Callable[[m.Request, ServerSession], Answer]] = {
            m.Read: self.blocks.read, m.Write: self.blocks.done, m.Take: self.blocks.take,
            m.Pin: self.blocks.pin, m.Adopt: self.blocks.adopt, m.Stats: self._stats, m.Pull: self.blocks.done,
            m.ReportMissing: self.blocks.done,
        }  # fmt: skip

    # sessions

    def detach(self, session: ServerSession, tickets: set[Hashable], now: float) -> None:
        """A connection is gone; with the last one goes all that its session held here."""
        self.controller.expire(now)  # leases of whoever gets what is free then begin now, not at the last event
        self._forget(tickets.intersection(session.parked.values()))  # not what was asked again over another one
        if self.sessions.detach(session, now):
            self._end(session)
        self.apply_outcomes()

    def lose_connections(self, were_passed_on: bool = False) -> None:
        """All connections are gone at once, with the process that served them, in the middle of whatever they did: what
        was parked will be asked again. Who is to come back is for the caller to decide. `were_passed_on`: requests, to
        a controller that lives on, and may carry commits out."""
        self.unit.forget_waiting()
        self._reading.clear()
        self._data_fetches.forget_all()
        self.pending.lose_connections(were_passed_on)
        self._forget({ticket for session in self.sessions.by_ident.values() for ticket in session.parked.values()})
        for session in self.sessions.by_ident.values():
            session.parked.clear()
            session.overtaken.clear()
            session.connections = 0
        self._kept_first.clear()
        self._late.forget_all()
        self.unit.keep(self.sessions.by_ident.keys(), self.pending.blocks())
        self.controller.outbox.clear()
        self.unit.outbox.clear()

    def end(self, session: ServerSession) -> None:
        """A session without connections will not come back."""
        self.sessions.remove(session.ident)
        self._end(session)
        self.apply_outcomes()

    def _end(self, session: ServerSession) -> None:
        """The client is gone for good, and with it all that it held here."""
        self.pending.end_session(session.ident)
        self.unit.forget(session.ident)
        self.controller.end_session(session.ident)

    def _forget(self, tickets: set[Hashable], is_asked_again: bool = False) -> None:
        self.controller.forget(tickets)
        self.unit.forget_tickets(tickets)
        self._kept_first -= tickets
        self._late.forget(tickets)
        for ticket in tickets:
            self._reading.pop(ticket, None)
            self._data_fetches.unpark(ticket)
        for ticket in filter(self.pending.holds, tickets):
            if ticket not in self.controller.in_doubt:
                self.pending.withdraw(ticket)
            elif is_asked_again:
                self.pending.lose_ticket(ticket)
            else:
                self.pending.leave_in_doubt(ticket)
        self.controller.in_doubt -= tickets

    # requests

    def notify(self, message: m.Message, session: ServerSession) -> None:
        """Carry out a one-way message; whatever is wrong with it is ignored."""
        match message:
            case m.Unpin(rid=rid, blocks=blocks):
                self.blocks.unpin_all(rid, blocks, session)
            case m.Discard(block=block):
                self._discard(block, session)
            case m.Cancel(rid=rid):
                self._cancel(rid, session)
            case m.Received():
                self.confirm(message, session)
            case m.Goodbye():
                session.ended = True
        self.apply_outcomes()

    def confirm(self, message: m.Received, session: ServerSession) -> None:
        """Answers are in their asker's hands. It changes nothing that anybody waits for."""
        for rid in message.rids:
            self.controller.received(session.ident, rid)
            session.forget(rid)

    def _discard(self, block: int, session: ServerSession) -> None:
        asked = self.pending.of_block(block, session.ident)
        if asked is not None:
            ticket = self.pending.ticket(asked)
            if ticket is None:
                self.pending.give_up(asked)
            else:
                self._forget({ticket})
        try:
            self.unit.unpublished(block, session.ident)
        except InvalidInput:
            return
        self.unit.drop(block)

    def _cancel(self, rid: int, session: ServerSession) -> None:
        session.overtaken.pop(rid, None)
        ticket = session.parked.pop(rid, None)
        if ticket is not None:
            self._forget({ticket})
            self._withdraw(ticket, session)
        self.pending.give_up((session.ident, rid))
        self.unit.unpin_request(session.ident, rid)
        self.controller.take_back(session.ident, rid)
        answer = session.replies.get(rid)
        if answer is not None and isinstance(answer[0], m.Allocated):
            self._discard(answer[0].block, session)
        session.cancel(rid)

    def _withdraw(self, ticket: Hashable, session: ServerSession) -> None:
        """Do not send an answer that crosses the cancellation of its request."""
        for outbox in (self.controller.outbox, self.unit.outbox):
            for reply in taken_out(outbox, ticket):
                if isinstance(reply, m.Allocated):
                    self._discard(reply.block, session)

    def _crossing(self, ticket: Hashable, now: float) -> Answer | None:
        """The answer of a parked request that was not sent yet: carried out anew it would take something else."""
        for reply in taken_out(self.controller.outbox, ticket):
            if not isinstance(reply, m.Waiting):
                return self._finished(ticket, reply, now)
        for reply in taken_out(self.unit.outbox, ticket):
            return reply, ()
        return next(iter(taken_out(self._late.answers, ticket)), None)

    def handle(
        self, message: m.Request, payload: memoryview, session: ServerSession, ticket: Hashable, now: float
    ) -> Answer | None:
        """The answer, or None when the request was parked."""
        self.num_requests += 1
        known = session.replies.get(message.rid) if type(message) in m.MUTATING else None
        if known is not None:
            return known
        if message.rid in session.parked:  # asked again over another connection
            self.controller.expire(now)
            session.overtaken[message.rid] = session.parked[message.rid]
            crossing = self._crossing(session.parked[message.rid], now)
            if crossing is not None:
                self.close_request(session, crossing)
                return crossing
            self._forget({session.parked.pop(message.rid)}, is_asked_again=True)
        try:
            answer = self._handle(message, payload, session, ticket, now)
        except TransferQueueError as error:
            answer = (m.Failed(message.rid, error.code, str(error)), ())
        if answer is None:
            session.parked[message.rid] = ticket
        elif type(message) in m.MUTATING:
            session.remember(answer)
        self.apply_outcomes()
        return answer

    def _handle(
        self, message: m.Request, payload: memoryview, session: ServerSession, ticket: Hashable, now: float
    ) -> Answer | None:
        rule = self._rules.get(type(message))
        if rule is not None:
            waits = self.blocks.waits(message, session)
            if waits is None:
                return rule(message, session)
            self._late.start(ticket, message.rid, waits, partial(rule, message, session))
            return None
        if isinstance(message, m.DigestCells):
            self._late.start(ticket, message.rid, *self.digests.begin(message, session))
            return None
        if self.journal is not None and type(message) in m.GROWING:
            is_look = type(message) is m.Find and not message.create
            if not is_look and not self.pending.knows(session.ident, message.rid):
                self.journal.check_room()
        if isinstance(message, m.Allocate):
            if message.timeout_s <= 0:
                self.recycler.make_room(message.nbytes)
            allocated = self.unit.allocate(message, ticket, session.ident, now)
            return None if allocated is None else (allocated, ())
        if isinstance(message, m.Commit) and (message.block >= 0 or message.shared):
            return self._commit(message, payload, session, ticket, now)
        if isinstance(message, m.Get):
            return self._get(Reading(message, session), ticket, now)
        if isinstance(message, m.Restore):
            return self._restore(message, payload, session, ticket, now)
        if isinstance(message, m.Fetch) and message.holder and message.holder not in self.sessions.by_ident:
            raise LeaseExpired("the session that would hold the rows has ended")
        reply = self.controller.handle(message, ticket, session.ident, now)
        if isinstance(message, m.DescribeService) and isinstance(reply, m.ServiceOverview):
            self.members.describe_waits(reply, self.unit, message.most, now)
        if isinstance(message, m.Fetch) and (message.locate or message.carry):
            if reply is None:
                self._data_fetches.park(message, session, ticket, now)
                return None
            return self._data_fetches.complete(self.controller, DataFetch(message, session, now), reply, NO_BYTES, now)
        return None if reply is None else self._complete(reply, self.controller.payloads.pop(ticket, NO_BYTES))

    def _complete(self, reply: m.Reply, payload: memoryview) -> Answer:
        """The answer that a controller's reply makes."""
        if isinstance(reply, m.Captured):
            reply.units = self.members.addresses(numbers_of(reply.blocks).tolist(), reply.units)
        if isinstance(reply, m.ServiceOverview) and not reply.server:  # else the controller's own server filled it in
            reply.server = self.statistics()
            reply.sessions = self.sessions.listed(self.unit.pinned_by_session())
            self.sessions.identify(reply.departures)
        return reply, (payload,) if payload else ()

    def _commit(
        self, message: m.Commit, payload: memoryview, session: ServerSession, ticket: Hashable, now: float
    ) -> Answer | None:
        """Publish blocks the client filled, or one made of the inline payload, or those that lie on another unit."""
        asked = (session.ident, message.rid)
        orphans = self.pending.resume(ticket, asked) if self.pending.held else []
        known = orphans[0].number if orphans else self.pending.done.get(asked)
        if known is not None:
            name_blocks(message, known)
        if known is not None or any(map(self.members.has, blocks_of(message))):
            reply = self.controller.handle(message, ticket, session.ident, now)
            return None if reply is None else (reply, ())
        filled = self._filled(message, payload, session)
        name_blocks(message, filled[0][0].number if filled else 0)
        pass_on = partial(self._commit_blocks, message, session, ticket, filled)
        if self.journal is None or all(self.journal.has(block) for block, _ in filled):
            return pass_on(now)
        self._keep_first(message.rid, ticket, filled, message.timeout_s, pass_on)
        return None

    def _filled(self, message: m.Commit, payload: memoryview, session: ServerSession) -> list[Filled]:
        """The new blocks of a commit, with their layouts; that of the payload is made here, and is the first."""
        if message.block == 0 and not message.shared:
            return [(self._inline(payload), message.layout)]
        numbers = blocks_of(message)
        if len(set(numbers)) < len(numbers):
            raise InvalidInput(f"blocks {numbers}: one occurs twice")
        layouts = [message.layout] * (message.block >= 0) + [one.layout for one in message.shared if one.is_new]
        made = [self.unit.unpublished(number, session.ident) for number in numbers if number]
        if message.block == 0:
            made.insert(0, self._inline(payload))
        return list(zip(made, layouts, strict=True))

    def _inline(self, payload: memoryview) -> Block:
        """A block made of the payload of a commit."""
        if self.journal is not None and len(payload) > SMALL_NBYTES:
            raise InvalidInput(f"{len(payload)} bytes with the message: so many have a block of their own")
        self.recycler.make_room(len(payload))
        return self.blocks.inline(payload)

    def _commit_blocks(
        self, message: m.Commit, session: ServerSession, ticket: Hashable, filled: list[Filled], now: float
    ) -> Answer | None:
        try:
            reply = self.controller.handle(message, ticket, session.ident, now)
        except TransferQueueError:
            for block, _ in filled:
                self.unit.drop(block.number)
            raise
        if reply is None:
            self.pending.hold(ticket, (session.ident, message.rid), filled)
            return None
        for block, layout in filled:
            self.unit.publish(block.number, layout)
        return reply, ()

    def _restore(
        self, message: m.Restore, payload: memoryview, session: ServerSession, ticket: Hashable, now: float
    ) -> Answer | None:
        """Publish the blocks the client filled as those of a saved state, in place of everything."""
        if not all(0 <= one.layout < len(message.layouts) for one in message.blocks):
            raise InvalidInput(f"there are {len(message.layouts)} layouts")
        asked = (session.ident, message.rid)
        orphans = self.pending.resume(ticket, asked)
        is_again = bool(orphans) or asked in self.pending.done
        filled = [(block, block.layout) for block in orphans] or [
            (self.unit.unpublished(one.block, session.ident), message.layouts[one.layout])
            for one in message.blocks
            if not is_again and not self.members.has(one.block)
        ]
        pass_on = partial(self._restore_blocks, message, payload, session, ticket, filled, not is_again)
        if self.journal is None or is_again or all(self.journal.has(block) for block, _ in filled):
            return pass_on(now)
        self._keep_first(message.rid, ticket, filled, 0.0, pass_on)
        return None

    def _restore_blocks(
        self, message: m.Restore, payload: memoryview, session: ServerSession, ticket: Hashable, filled: list[Filled],
        holds: bool, now: float,
    ) -> Answer | None:  # fmt: skip
        self.controller.payloads[ticket] = payload
        try:
            reply = self.controller.handle(message, ticket, session.ident, now)
        finally:
            self.controller.payloads.pop(ticket, None)
        if reply is None:
            if holds:
                self.pending.hold(ticket, (session.ident, message.rid), filled)
            return None
        for block, layout in filled:
            self.unit.publish(block.number, layout)
        return reply, ()

    def _keep_first(
        self, rid: int, ticket: Hashable, filled: list[Filled], wait_s: float, pass_on: Callable[[float], Answer | None]
    ) -> None:
        """Go on with the request once its blocks are on the disk."""
        self._kept_first.add(ticket)
        task = asyncio.get_running_loop().create_task(self._when_kept(rid, ticket, filled, wait_s, pass_on))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _when_kept(
        self, rid: int, ticket: Hashable, filled: list[Filled], wait_s: float, pass_on: Callable[[float], Answer | None]
    ) -> None:
        assert self.journal is not None
        answer: Answer | None = (m.Failed(rid, InternalError.code, "see the server's log"), ())
        was_passed_on = False
        try:
            for block, layout in filled:
                if ticket in self._kept_first and self.unit.is_open(block):
                    block.layout = layout
                    await self.journal.keep(block, wait_s)
            if ticket in self._kept_first:
                if not all(self.unit.is_open(block) for block, _ in filled):
                    raise InvalidInput("a block that was given up before it was on the disk")
                was_passed_on = True
                answer = pass_on(time.monotonic())
        except TransferQueueError as error:
            answer = (m.Failed(rid, error.code, str(error)), ())
        finally:
            if not was_passed_on:
                self._drop_unheld(filled)
            if ticket in self._kept_first:
                self._kept_first.discard(ticket)
                if answer is not None:
                    self.unit.outbox.append((ticket, answer[0]))
                self.publish_outcomes()

    def _drop_unheld(self, filled: list[Filled]) -> None:
        """Of a commit that was not passed on: blocks that came with it, which are nobody's now."""
        held = self.pending.blocks()
        for block, _ in filled:
            if block.owner is None and self.unit.is_open(block) and block.number not in held:
                self.unit.drop(block.number)

    def _get(self, reading: Reading, ticket: Hashable, now: float) -> Answer | None:
        """Locate, then add what lies here."""
        reply = self.controller.handle(reading.message, ticket, reading.session.ident, now)
        if reply is None:
            self._reading[ticket] = reading
            return None
        assert isinstance(reply, m.Located)
        return self._present(reply, NO_BYTES, reading.session)

    def _present(self, reply: m.Located, payload: memoryview, session: ServerSession) -> Answer:
        reply.units = self.members.addresses([piece.block for piece in reply.pieces], reply.units)
        return self.blocks.present(reply, (payload,) if payload else (), session)

    def _stats(self, message: m.Request, session: ServerSession) -> Answer:
        return m.Report(message.rid, self.statistics()), ()

    def statistics(self) -> dict[str, object]:
        """Counts and sizes, for people and for monitoring."""
        control = self.controller.statistics()
        return {
            **control,
            "pid": os.getpid(),
            "standby": self.standby_pid,
            "takeovers": self.takeovers,
            "tcp": self.tcp,
            "unit": self.unit.number,
            "waiting_requests": control["waiting_requests"] + self.unit.num_waiting + self.members.num_waits,
            "requests": self.num_requests,
            "clients": len(self.sessions.by_ident),
            "units": self.members.statistics(),
            "arena_nbytes_used": self.unit.used_nbytes,
            "arena_nbytes_resident": self.unit.shm.resident_nbytes(),
            "arena_nbytes_budget": self.unit.budget_nbytes,
            "spill_nbytes_used": self.unit.spilled_nbytes,
            "spill_nbytes_budget": self.unit.spill.budget_nbytes,
            "pinned_nbytes": self.unit.pinned_nbytes(),
            **({} if self.journal is None else self.journal.statistics()),
            **self.blocks.statistics(),
        }

    # consequences

    def publish_outcomes(self) -> None:
        """Something that is no request changed answers: a request's own event delivers them, and else nobody would."""
        self.apply_outcomes()
        self.deliver()

    def apply_outcomes(self) -> None:
        """Publish what was committed, recycle what nobody needs any more, and let waiting allocations use it."""
        if self.pending.held:
            self._apply_answers()
        self.recycler.recycle()
        self.unit.retry()
        self._settled()
        if self.members.gone:
            self.members.tell_gone(self._hold)

    def _hold(self, send: Callable[[], None]) -> bool:
        return self.journal is not None and self.journal.hold(send)

    def tidy(self) -> None:
        """A slice of what `recycler` has left; called as long as there are some."""
        self.recycler.work()
        self.apply_outcomes()

    def _apply_answers(self) -> None:
        """To commits that waited for them."""
        for ticket, reply in self.controller.outbox:
            if not self.pending.holds(ticket) or isinstance(reply, m.Waiting):
                continue
            if ticket in self.controller.in_doubt:
                self.pending.leave_in_doubt(ticket)
            else:
                self.pending.answered(ticket, not isinstance(reply, m.Failed))

    def expire(self, now: float) -> None:
        self.controller.expire(now)
        self.unit.expire(now)
        self.members.expire(now)
        for session in self.sessions.expired(now):
            self._end(session)
        self.apply_outcomes()

    def next_deadline(self) -> float | None:
        return earliest((self.controller, self.unit, self.members, self.sessions))

    def answered(self, now: float) -> Iterator[tuple[Hashable, Answer]]:
        """Tickets and answers of parked requests that were answered since the last call; `Waiting` is none yet."""
        while self.controller.outbox:
            ticket, reply = self.controller.outbox.pop(0)
            answer = (reply, ()) if isinstance(reply, m.Waiting) else self._finished(ticket, reply, now)
            if answer is not None:
                yield ticket, answer
        for ticket, reply in self.unit.outbox:
            yield ticket, (reply, ())
        self.unit.outbox.clear()
        yield from self._late.answers
        self._late.answers.clear()

    def _finished(self, ticket: Hashable, reply: m.Reply, now: float) -> Answer | None:
        """What is sent for the controller's reply to a parked request; None when it waits again."""
        payload = self.controller.payloads.pop(ticket, NO_BYTES)
        self.controller.in_doubt.discard(ticket)
        reading = self._reading.pop(ticket, None)
        fetching = self._data_fetches.unpark(ticket)
        if fetching is not None:
            answer: Answer | None = self._data_fetches.complete(self.controller, fetching, reply, payload, now)
        elif reading is not None and isinstance(reply, m.Located):
            answer = self._completed(reading, ticket, reply, payload, now)
        else:
            answer = self._complete(reply, payload)
        self._settled()
        return answer

    def _completed(
        self, reading: Reading, ticket: Hashable, reply: m.Located, payload: memoryview, now: float
    ) -> Answer | None:
        """The answer to a read, or None after asking again: its blocks were moved while the reply was under way."""
        try:
            return self._present(reply, payload, reading.session)
        except RowCleared as error:
            blocks = frozenset(piece.block for piece in reply.pieces)
            looks = reading.looks + 1 if blocks == reading.blocks else 1
            if looks == MAX_LOOKS:
                return m.Failed(reply.rid, error.code, str(error)), ()
        except TransferQueueError as error:
            return m.Failed(reply.rid, error.code, str(error)), ()
        return self._get(reading._replace(looks=looks, blocks=blocks), ticket, now)

    def close_request(self, session: ServerSession, answer: Answer) -> None:
        """A parked request was answered: remember the answer in case it is asked for again."""
        session.parked.pop(answer[0].rid, None)
        if not isinstance(answer[0], m.Located):
            session.remember(answer)

    def check_invariants(self) -> None:
        self.controller.check_invariants()
        self.unit.check_invariants()
        self.recycler.check_invariants()
