"""Carrying out a journal on the state that it began with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, cast

from transfer_queue.errors import TransferQueueError
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.server.standby import records as r
from transfer_queue.server.standby.journal import JournalUseless
from transfer_queue.server.standby.recording import session_of
from transfer_queue.storage.shm import Arena
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of


class Ticket(NamedTuple):
    """Of a request whose connection is gone."""

    session_ident: bytes


class KeptBlocks(Protocol):
    """A unit whose blocks are in a journal on a disk as well (`server.journal`)."""

    def stored(self, number: int, place: r.Range) -> None: ...
    def copied(self, number: int, copy: int) -> None: ...


class AwayLine:
    """The connection of a unit that is about to come back. What it misses here it learns when it joins."""

    def push(self, message: m.Message) -> None:
        pass


class Replay:
    """The controller answers again, and sessions remember the answers. The unit's memory is not looked at: what lay
    there when a request was answered may be gone by now. `arenas` are descriptors of those that were opened since."""

    def __init__(self, service: Service, arenas: Iterable[int] = ()) -> None:
        self._service = service
        self._controller: Any = service.controller  # the one of this host
        self._unit = service.unit
        self._arenas: Iterator[int] = iter(arenas)
        self._rules: dict[type, Callable[[Any], None]] = {
            r.Requested: self._requested, r.Forgotten: self._forgotten, r.AnswerReceived: self._received,
            r.TakenBack: self._taken_back, r.Expired: self._expired, r.Tidied: self._tidied,
            r.Relocated: self._relocated, r.RowsGathered: self._gathered, r.UnitLost: self._unit_lost,
            r.Attached: self._attached, r.Detached: self._detached, r.Ended: self._ended,
            r.ArenaOpened: self._arena_opened, r.Placed: self._placed, r.BlockGiven: self._allocated,
            r.Published: self._published, r.Dropped: self._dropped, r.BlockPinned: self._pinned,
            r.BlockUnpinned: self._unpinned, r.Vacated: self._vacated,
            r.UnitJoined: self._unit_joined, r.CommitsResolved: self._commits_resolved,
            r.BlockOnDisk: self._on_disk, r.BlockCopied: self._copied,
        }  # fmt: skip

    def run(self, records: Iterable[r.Record]) -> int:
        """Carry them out; how many there were. Raises `JournalUseless` where they do not fit the state."""
        count = 0
        for record in records:
            try:
                self._rules[type(record)](record)
            except (KeyError, TransferQueueError) as error:
                raise JournalUseless(f"entry {count}, {record!r}, does not fit: {error!r}") from error
            count += 1
        freed = self._controller.block_index.freed
        freed[:] = [number for number in freed if self._is_needed(number)]
        return count

    def _is_needed(self, number: int) -> bool:
        """Whether a freed block is still to be dropped. Units of other hosts learn what to drop when they join."""
        block = self._unit.block(number)
        return block is not None and not block.dropped

    # the controller

    def _requested(self, record: r.Requested) -> None:
        message = record.message
        assert isinstance(message, m.Request)
        session = self._service.sessions.by_ident[record.session]
        if message.rid in session.parked:
            self._controller.forget({session.parked.pop(message.rid)})
        ticket = (Ticket(record.session), message.rid)
        try:
            reply = self._controller.handle(message, ticket, record.session, record.now)
        except TransferQueueError as error:
            reply = m.Failed(message.rid, error.code, str(error))
        if reply is None:
            session.parked[message.rid] = ticket
        elif type(message) in m.MUTATING:
            self._remember(session, reply)
        self._controller.payloads.pop(ticket, None)
        self._drain()

    def _drain(self) -> None:
        """Parked requests that have an answer now."""
        for ticket, reply in self._controller.outbox:
            self._controller.payloads.pop(ticket, None)
            session = self._service.sessions.by_ident.get(session_of(ticket))
            if session is not None and not isinstance(reply, m.Waiting):
                session.parked.pop(reply.rid, None)
                self._remember(session, reply)
        self._controller.outbox.clear()

    def _remember(self, session: ServerSession, reply: m.Reply) -> None:
        if not isinstance(reply, m.Located):
            session.remember((reply, ()))

    def _forgotten(self, record: r.Forgotten) -> None:
        tickets = set()
        for ident, rid in record.requests:
            session = self._service.sessions.by_ident.get(ident)
            ticket = session.parked.get(rid) if session is not None else None
            if ticket is not None:
                tickets.add(ticket)
        self._controller.forget(tickets)
        self._drain()

    def _received(self, record: r.AnswerReceived) -> None:
        self._controller.received(record.session, record.rid)
        session = self._service.sessions.by_ident.get(record.session)
        if session is not None:
            session.forget(record.rid)

    def _taken_back(self, record: r.TakenBack) -> None:
        self._controller.take_back(record.session, record.rid)
        session = self._service.sessions.by_ident[record.session]
        session.parked.pop(record.rid, None)
        session.cancel(record.rid)
        self._drain()

    def _expired(self, record: r.Expired) -> None:
        self._controller.expire(record.now)
        self._drain()

    def _tidied(self, record: r.Tidied) -> None:
        self._controller.tidy()
        self._drain()

    def _relocated(self, record: r.Relocated) -> None:
        self._controller.relocate(record.block, record.target, numbers_of(record.rows))

    def _gathered(self, record: r.RowsGathered) -> None:
        self._controller.gather(record.target, numbers_of(record.blocks), numbers_of(record.rows))

    def _unit_lost(self, record: r.UnitLost) -> None:
        self._service.members.remove(record.unit)
        self._controller.lose(record.unit)
        self._drain()

    # sessions

    def _attached(self, record: r.Attached) -> None:
        self._service.sessions.attach(record.session, record.local, record.pid)

    def _detached(self, record: r.Detached) -> None:
        session = self._service.sessions.by_ident[record.session]
        session.connections -= 1
        session.ended = record.ended

    def _ended(self, record: r.Ended) -> None:
        self._service.sessions.remove(record.session)
        self._controller.end_session(record.session)
        self._drain()

    # the unit's memory

    def _arena_opened(self, record: r.ArenaOpened) -> None:
        descriptor = next(self._arenas, None)
        if descriptor is None:
            raise JournalUseless("the descriptor of an arena did not come")
        shm = self._unit.shm
        directory = shm.spill_directory if record.spills else shm.directory
        shm.add(Arena(record.size, record.grain, directory, descriptor, record.spills))

    def _placed(self, record: r.Placed) -> None:
        self._unit.place_at(record.arena, record.offset, record.nbytes, record.owner)

    def _allocated(self, record: r.BlockGiven) -> None:
        session = self._service.sessions.by_ident[record.session]
        block = self._unit.unpublished(record.block, record.session)
        session.parked.pop(record.rid, None)
        session.remember((m.Allocated(record.rid, block.number, block.arena, block.offset), ()))

    def _published(self, record: r.Published) -> None:
        self._unit.publish(record.block, record.layout, record.digest)

    def _dropped(self, record: r.Dropped) -> None:
        self._unit.drop(record.block)

    def _pinned(self, record: r.BlockPinned) -> None:
        self._unit.pin(record.block, record.session, record.rid)

    def _unpinned(self, record: r.BlockUnpinned) -> None:
        self._unit.unpin(record.block, record.session, record.rid)

    def _vacated(self, record: r.Vacated) -> None:
        self._unit.forget(record.session)

    def _on_disk(self, record: r.BlockOnDisk) -> None:
        cast(KeptBlocks, self._unit).stored(record.block, record.place)

    def _copied(self, record: r.BlockCopied) -> None:
        cast(KeptBlocks, self._unit).copied(record.block, record.copy)

    # units of other hosts

    def _unit_joined(self, record: r.UnitJoined) -> None:
        self._service.members.join(record.message, record.address, AwayLine())

    def _commits_resolved(self, record: r.CommitsResolved) -> None:
        self._service.members.resolve(record.message)
