"""The state machines of a server with a standby: each says what happens to it, and is otherwise what it was.

What may be refused is noted once it was not: a record that cannot be carried out makes the standby useless. Requests of
clients are noted before, with what they lead to behind them; they are refused there as they were here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, cast

from transfer_queue.controller import Controller
from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.sampler_calls import Heard
from transfer_queue.controller.table import rows_bytes
from transfer_queue.server.controller_proxy import ControllerProxy
from transfer_queue.server.pending_commits import Asked, Filled, HeldBlock, PendingCommits
from transfer_queue.server.sessions import ServerSession, Sessions
from transfer_queue.server.standby import records as r
from transfer_queue.server.standby.journal import Journal
from transfer_queue.server.unit_registry import UnitConnection, UnitRegistry
from transfer_queue.storage.blocks import NOWHERE, Block, SpillSpace, Unit
from transfer_queue.storage.shm import Arena, SharedMemory
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address


class Recorder:
    """Where what happens is written: to the journal of the standby that there is, or nowhere.

    `note` takes a record of the event that is going on. What it says must not change before the event is settled.
    """

    def __init__(self) -> None:
        self.journal: Journal | None = None
        self._event: list[r.Record] = []
        self.note = self._event.append
        self.send: Callable[[Arena], None] = lambda arena: None  # to the standby
        self.replace: Callable[[], None] = lambda: None  # the journal, once no event is going on
        self.settled: Callable[[], None] = lambda: None  # for whoever else writes down what happened
        self.heard: Callable[[], Heard | None] = lambda: None  # of a sampler, which answered in this event

    def settle(self) -> None:
        """The event is over: its answer may leave."""
        if self._event:
            heard, journal = self.heard(), self.journal
            if heard is not None:
                self._event.insert(0, r.SamplerHeard(*heard))  # it answers before it is asked
            if journal is not None and journal.write(self._event):
                self.replace()
            self._event.clear()
        self.settled()

    def begin(self, journal: Journal | None) -> None:
        """From now on write to this one, which begins with the state of now; the one before is closed."""
        if self.journal is not None:
            self.journal.close()
        self.journal = journal
        self._event.clear()
        self.heard()

    def leave_out(self) -> None:
        """Something happens that no record says: the standby must not take over any more."""
        if self.journal is not None:
            self.journal.leave()
            self.replace()


class Asker(Protocol):
    """The connection that a ticket names first."""

    @property
    def session_ident(self) -> bytes: ...


def session_of(ticket: Hashable) -> bytes:
    """The session whose request has this ticket, which is (connection, rid)."""
    return cast(Asker, ticket[0]).session_ident  # type: ignore[index]


class RecordingController(Controller):
    """`record_to` is called before the first event."""

    recorder: Recorder

    def record_to(self, recorder: Recorder) -> None:
        self.recorder = recorder
        calls = self.state.fetching.calls
        if calls.keep():
            recorder.heard = calls.heard

    def handle(self, message: m.Request, ticket: Hashable, session: bytes, now: float) -> m.Reply | None:
        if type(message) is m.Restore:
            self.recorder.leave_out()  # its payload is the whole state: there is a new standby when it is loaded
        elif type(message) not in m.READS:
            self.recorder.note(r.Requested(session, now, message))  # type: ignore[arg-type]  # what clients ask for
        return super().handle(message, ticket, session, now)

    def forget(self, tickets: set[Hashable]) -> None:
        if tickets:
            self.recorder.note(r.Forgotten([(session_of(one), one[1]) for one in tickets]))  # type: ignore[index]
        super().forget(tickets)

    def end_session(self, session: bytes) -> None:
        self.recorder.note(r.Ended(session))
        super().end_session(session)

    def received(self, session: bytes, rid: int) -> None:
        self.recorder.note(r.AnswerReceived(session, rid))
        super().received(session, rid)  # nobody is answered, so it is written with the next event

    def take_back(self, session: bytes, rid: int) -> None:
        self.recorder.note(r.TakenBack(session, rid))
        super().take_back(session, rid)

    def expire(self, now: float) -> None:
        self.recorder.note(r.Expired(now))
        super().expire(now)

    def postpone(self, by_s: float) -> None:
        self.recorder.note(r.Postponed(by_s))
        super().postpone(by_s)

    def tidy(self) -> None:
        self.recorder.note(r.Tidied())
        super().tidy()

    def relocate(self, block: int, target: int, rows: Slots) -> bool:
        is_taken = super().relocate(block, target, rows)
        self.recorder.note(r.Relocated(block, target, rows_bytes(rows)))
        return is_taken

    def gather(self, target: int, blocks: Slots, rows: Slots) -> bool:
        is_taken = super().gather(target, blocks, rows)
        self.recorder.note(r.RowsGathered(target, rows_bytes(blocks), rows_bytes(rows)))
        return is_taken

    def hide(self, unit: int) -> None:
        self.recorder.note(r.UnitHidden(unit))
        super().hide(unit)

    def lose(self, unit: int) -> None:
        self.recorder.note(r.UnitLost(unit))
        super().lose(unit)

    def lose_blocks(self, blocks: Sequence[int]) -> dict[str, int]:
        self.recorder.note(r.BlocksLost(list(blocks)))
        return super().lose_blocks(blocks)


class RecordingMemory(SharedMemory):
    """The standby needs the descriptor of an arena before it hears of a block there."""

    def __init__(self, directory: str | None, spill_directory: str | None, recorder: Recorder) -> None:
        super().__init__(directory, spill_directory)
        self._recorder = recorder

    def add(self, arena: Arena) -> None:
        self._recorder.note(r.ArenaOpened(arena.size, arena.extents.grain, arena.spills))
        self._recorder.send(arena)
        super().add(arena)


class RecordingUnit(Unit):
    def __init__(
        self, budget_nbytes: int, directory: str | None, recorder: Recorder, spill: SpillSpace = NOWHERE
    ) -> None:
        super().__init__(budget_nbytes, directory, spill)
        self.shm = RecordingMemory(directory, spill.directory, recorder)
        self.recorder = recorder
        self._vacating = False

    def place(self, nbytes: int, session: bytes | None, spills: bool = False) -> Block | None:
        block = super().place(nbytes, session, spills)
        if block is not None:
            self.recorder.note(r.Placed(block.arena, block.offset, nbytes, session))
        return block

    def place_in_engine(self, nbytes: int, session: bytes | None, key: str = "") -> Block:
        block = super().place_in_engine(nbytes, session, key)
        self.recorder.note(r.PlacedInEngine(block.key, nbytes, session))
        return block

    def _allocated(self, message: m.Allocate, session: bytes) -> m.Allocated | None:
        allocated = super()._allocated(message, session)
        if allocated is not None:
            self.recorder.note(r.BlockGiven(session, message.rid, allocated.block))
        return allocated

    def publish(self, number: int, layout: bytes, digest: int = 0) -> None:
        super().publish(number, layout, digest)
        self.recorder.note(r.Published(number, layout, digest))

    def drop(self, number: int) -> None:
        super().drop(number)
        if not self._vacating:
            self.recorder.note(r.Dropped(number))

    def pin(self, number: int, session: bytes, rid: int = 0) -> None:
        super().pin(number, session, rid)
        self.recorder.note(r.BlockPinned(number, session, rid))

    def unpin(self, number: int, session: bytes, rid: int = 0) -> None:
        super().unpin(number, session, rid)
        self.recorder.note(r.BlockUnpinned(number, session, rid))

    def forget(self, session: bytes) -> None:
        self._vacating = True
        super().forget(session)
        self._vacating = False
        self.recorder.note(r.Vacated(session))


class RecordingSessions(Sessions):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def attach(self, ident: bytes, local: bool, pid: int = 0, host: str = "") -> ServerSession:
        self._recorder.note(r.Attached(ident, local, pid, host))
        return super().attach(ident, local, pid, host)

    def detach(self, session: ServerSession, now: float) -> bool:
        self._recorder.note(r.Detached(session.ident, session.ended))
        return super().detach(session, now)


class RecordingCommits(PendingCommits):
    def __init__(self, unit: Unit, recorder: Recorder) -> None:
        super().__init__(unit)
        self._recorder = recorder

    def hold(self, ticket: Hashable, asked: Asked, blocks: Sequence[Filled]) -> None:
        super().hold(ticket, asked, blocks)
        held = [(block.number, layout, block.digest) for block, layout in blocks]
        self._recorder.note(r.CommitHeld(*asked, held))

    def release(self, asked: Asked) -> list[HeldBlock]:
        here = super().release(asked)
        self._recorder.note(r.CommitReleased(*asked))
        return here

    def remember(self, asked: Asked, block: int) -> None:
        super().remember(asked, block)
        self._recorder.note(r.CommitDone(*asked, block))

    def doubt(self, number: int) -> None:
        super().doubt(number)
        self._recorder.note(r.Doubted(number))


class RecordingProxy(ControllerProxy):
    """What is passed on is not written down: the controller's host knows what it answered."""

    def __init__(self, address: Address, deliver: Callable[[], None], recorder: Recorder) -> None:
        super().__init__(address, deliver)
        self._recorder = recorder

    def end_session(self, session: bytes) -> None:
        self._recorder.note(r.Ended(session))
        super().end_session(session)

    def take_back(self, session: bytes, rid: int) -> None:
        self._recorder.note(r.TakenBack(session, rid))
        super().take_back(session, rid)


class RecordingRegistry(UnitRegistry):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def join(self, message: m.Join, address: str, line: UnitConnection) -> m.Joined:
        joined = super().join(message, address, line)
        self._recorder.note(r.UnitJoined(message, address))
        return joined

    def resolve(self, message: m.ResolveCommits, unit: int) -> m.Blocks:
        resolved = super().resolve(message, unit)
        self._recorder.note(r.CommitsResolved(message, unit))
        return resolved


def recording_parts(unit: Unit, recorder: Recorder) -> dict[str, Any]:
    """What a `Service` whose unit is this one is made with, so that `recorder` hears of all that happens there."""
    return {
        "sessions": RecordingSessions(recorder),
        "members": RecordingRegistry(recorder),
        "settled": recorder.settle,
        "pending": RecordingCommits(unit, recorder),
    }
