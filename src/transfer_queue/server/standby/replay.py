"""Carrying out a journal on the state that it began with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from transfer_queue.controller import Controller
from transfer_queue.controller.sampler_calls import Heard
from transfer_queue.errors import TransferQueueError
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.server.standby import records as r
from transfer_queue.server.standby.journal import JournalUseless
from transfer_queue.server.standby.recording import session_of
from transfer_queue.storage.shm import Arena
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

Rules: TypeAlias = "Mapping[type, Callable[[Any], None]]"


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

    def abort(self) -> None:
        pass


def replay(service: Service, records: Iterable[r.Record], arenas: Iterable[int] = ()) -> int:
    """Carry them out; how many there were. `arenas` are descriptors of those that were opened since. Raises
    `JournalUseless` where they do not fit the state."""
    rules = {**UnitReplay(service, arenas).rules}
    controller = ControllerReplay(service) if isinstance(service.controller, Controller) else None
    if controller is not None:
        rules |= controller.rules
    count = 0
    for record in records:
        try:
            rules[type(record)](record)
        except (KeyError, TransferQueueError) as error:
            raise JournalUseless(f"entry {count}, {record!r}, does not fit: {error!r}") from error
        count += 1
    if controller is not None:
        try:
            controller.close()
        except KeyError as error:
            raise JournalUseless(f"after {count} entries: {error}") from error
    return count


class UnitReplay:
    """Sessions, memory, and commits that wait. What lay in a block when it was placed may be gone by now: nobody looks
    at it."""

    def __init__(self, service: Service, arenas: Iterable[int]) -> None:
        self._service = service
        self._unit = service.unit
        self._arenas: Iterator[int] = iter(arenas)
        self.rules: Rules = {
            r.Attached: self._attached, r.Detached: self._detached, r.Ended: self._ended, r.TakenBack: self._taken_back,
            r.ArenaOpened: self._arena_opened, r.Placed: self._placed, r.PlacedInEngine: self._placed_in_engine,
            r.BlockGiven: self._allocated,
            r.Published: self._published, r.Dropped: self._dropped, r.BlockPinned: self._pinned,
            r.BlockUnpinned: self._unpinned, r.Vacated: self._vacated,
            r.CommitHeld: self._held, r.CommitReleased: self._released, r.CommitDone: self._done,
            r.Doubted: self._doubted,
            r.BlockOnDisk: self._on_disk, r.BlockCopied: self._copied,
        }  # fmt: skip

    # sessions

    def _attached(self, record: r.Attached) -> None:
        self._service.sessions.attach(record.session, record.local, record.pid, record.host)

    def _detached(self, record: r.Detached) -> None:
        session = self._service.sessions.by_ident[record.session]
        session.connections -= 1
        session.ended = record.ended

    def _ended(self, record: r.Ended) -> None:
        self._service.sessions.remove(record.session)

    def _taken_back(self, record: r.TakenBack) -> None:
        session = self._service.sessions.by_ident[record.session]
        session.parked.pop(record.rid, None)
        session.cancel(record.rid)

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

    def _placed_in_engine(self, record: r.PlacedInEngine) -> None:
        self._unit.place_in_engine(record.nbytes, record.owner, record.key)

    def _allocated(self, record: r.BlockGiven) -> None:
        session = self._service.sessions.by_ident[record.session]
        block = self._unit.unpublished(record.block, record.session)
        session.parked.pop(record.rid, None)
        session.remember((m.Allocated(record.rid, block.number, block.location), ()))

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

    # commits that wait

    def _held(self, record: r.CommitHeld) -> None:
        held = []
        for number, layout, digest in record.blocks:
            block = self._unit.block(number)
            if block is None:
                raise JournalUseless("a commit of a block that is not there")
            block.digest = digest
            held.append((block, layout))
        ticket = (Ticket(record.session), record.rid)
        self._service.pending.hold(ticket, (record.session, record.rid), held)

    def _released(self, record: r.CommitReleased) -> None:
        self._service.pending.release((record.session, record.rid))

    def _done(self, record: r.CommitDone) -> None:
        self._service.pending.remember((record.session, record.rid), record.block)

    def _doubted(self, record: r.Doubted) -> None:
        self._service.pending.doubt(record.block)


class ControllerReplay:
    """The controller of this host answers again, and sessions remember the answers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._controller: Any = service.controller
        self._calls = cast(Controller, service.controller).state.fetching.calls
        self._calls.begin_again()
        self._unit = service.unit
        self.rules: Rules = {
            r.Requested: self._requested, r.Forgotten: self._forgotten, r.AnswerReceived: self._received,
            r.TakenBack: self._taken_back, r.Expired: self._expired, r.Postponed: self._postponed,
            r.Tidied: self._tidied, r.Relocated: self._relocated, r.RowsGathered: self._gathered,
            r.UnitHidden: self._unit_hidden, r.UnitLost: self._unit_lost, r.BlocksLost: self._blocks_lost,
            r.SamplerHeard: self._sampler_heard,
            r.Ended: self._ended, r.UnitJoined: self._unit_joined, r.CommitsResolved: self._commits_resolved,
        }  # fmt: skip

    def _sampler_heard(self, record: r.SamplerHeard) -> None:
        self._calls.repeat(Heard(record.answers, record.state))

    def close(self) -> None:
        """Everything was carried out. Raises KeyError where it was not what happened."""
        self._calls.end_again()
        freed = self._controller.block_index.freed
        freed[:] = [number for number in freed if self._is_needed(number)]

    def _is_needed(self, number: int) -> bool:
        """Whether a freed block is still to be dropped. Units of other hosts learn what to drop when they join."""
        block = self._unit.block(number)
        return block is not None and not block.dropped

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

    def _postponed(self, record: r.Postponed) -> None:
        self._controller.postpone(record.by_s)

    def _tidied(self, record: r.Tidied) -> None:
        self._controller.tidy()
        self._drain()

    def _relocated(self, record: r.Relocated) -> None:
        self._controller.relocate(record.block, record.target, numbers_of(record.rows))

    def _gathered(self, record: r.RowsGathered) -> None:
        self._controller.gather(record.target, numbers_of(record.blocks), numbers_of(record.rows))

    def _ended(self, record: r.Ended) -> None:
        self._service.sessions.remove(record.session)
        self._controller.end_session(record.session)
        self._drain()

    # units of other hosts

    def _unit_hidden(self, record: r.UnitHidden) -> None:
        self._controller.hide(record.unit)

    def _unit_lost(self, record: r.UnitLost) -> None:
        self._service.members.remove(record.unit)
        self._controller.lose(record.unit)
        self._drain()

    def _blocks_lost(self, record: r.BlocksLost) -> None:
        self._controller.lose_blocks(record.blocks)
        self._drain()

    def _unit_joined(self, record: r.UnitJoined) -> None:
        self._service.members.join(record.message, record.address, AwayLine())
        self._drain()

    def _commits_resolved(self, record: r.CommitsResolved) -> None:
        resolved = self._service.members.resolve(record.message, record.unit)
        self._controller.refuse_commits(numbers_of(resolved.numbers))
        self._drain()
