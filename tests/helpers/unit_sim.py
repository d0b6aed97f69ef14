"""The server of a unit that keeps a journal, driven by one seed, and a controller elsewhere that answers when it likes.

The unit's server is killed after a random event. What its standby makes of the journal is compared with what it had;
then the standby goes on, until everybody has left: what lies there is what rows need, no more and no less. There are no
sockets and no other process: `python -m unit_sim SEED` repeats a run.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from services import FIELD
from standby_sim import BUDGET, JOURNAL_NBYTES, SPILL, Link, picture_of_unit

from transfer_queue.server.service import Service
from transfer_queue.server.standby.journal import Journal
from transfer_queue.server.standby.recording import Recorder, RecordingProxy, RecordingUnit, recording_parts
from transfer_queue.server.standby.replay import replay
from transfer_queue.storage.shm import GRAINS
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address

IDENTS = [letter * 16 for letter in (b"a", b"b", b"c", b"d")]


class Task:
    """Stands for a request on its way."""

    def cancel(self) -> None:
        pass


class Line(RecordingProxy):
    """What the unit's server has of the controller; requests go no further than `asked`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(Address("", "127.0.0.1", 1, ""), lambda: None, recorder)
        self.asked: dict[Any, tuple[bytes, m.Request]] = {}

    def handle(self, message: m.Request, ticket: Any, session: bytes, now: float) -> m.Reply | None:
        self.asked[ticket] = (session, message)
        self._asking[ticket] = (Task(), message)  # type: ignore[assignment]
        return None

    def answer(self, ticket: Any, reply: m.Reply, is_lost: bool) -> None:
        """An answer comes, or word that none does; for nobody, where its request was given up."""
        if self._asking.pop(ticket, None) is not None:
            if is_lost:
                self.in_doubt.add(ticket)
            self.outbox.append((ticket, reply))


class Controller:
    """What really became of commits: each is carried out once, whoever asks how often."""

    def __init__(self) -> None:
        self.needed: set[int] = set()
        self.outcomes: dict[tuple[bytes, int], tuple[int, bool]] = {}
        self.refused: set[int] = set()
        self.taken: set[int] = set()  # copies

    def carry_out(self, session: bytes, message: m.Commit, succeeds: bool) -> m.Reply:
        known = self.outcomes.get((session, message.rid))
        if known is None:
            done = succeeds and message.block not in self.refused
            known = self.outcomes[session, message.rid] = (message.block, done)
            if done:
                self.needed.add(message.block)
        elif known[1]:
            assert known[0] == message.block, "asked again with another block"
        if known[1]:
            return m.Committed(message.rid, bytes(8), None, ["x"])
        return m.Failed(message.rid, "invalid_input", "refused")

    def resolve(self, doubtful: list[int]) -> list[int]:
        gone = [block for block in doubtful if block not in self.needed]
        self.refused.update(gone)
        return gone


def unit_service(recorder: Recorder) -> Service:
    unit = RecordingUnit(BUDGET, None, recorder, SPILL)
    unit.renumber(3)
    return Service(Line(recorder), unit, **recording_parts(unit, recorder))


def picture(service: Service) -> dict[str, Any]:
    """All of a service's state that anybody could ever notice, as plain values."""
    return {
        **picture_of_unit(service),
        "in doubt": sorted(service.pending.in_doubt),
        "sessions": {
            ident: (one.local, one.pid, one.ended, one.connections,
                    sorted(rid for rid, answer in one.replies.items() if isinstance(answer[0], m.Allocated)))
            for ident, one in service.sessions.by_ident.items()
        },
    }  # fmt: skip


class Simulation:
    """One run. `moments[i]` is what there is after event i: a picture, the journal's length, and the controller."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._recorder = Recorder()
        self.service = unit_service(self._recorder)
        self.service.unit.shm.open()
        self.journal = Journal(size=JOURNAL_NBYTES)
        self._recorder.begin(self.journal)
        self.controller = Controller()
        self._rid = 0
        self._links: dict[bytes, list[Link]] = {}
        self._allocated: dict[bytes, list[int]] = {}
        self.moments: list[Any] = []
        self._copies: list[Any] = []  # block, copy and ticket of those that the controller has not answered
        self.sent: dict[tuple[bytes, int], int] = {}  # the block of each commit, as its client names it

    @property
    def line(self) -> Line:
        assert isinstance(self.service.controller, Line)
        return self.service.controller

    def run(self, events: int) -> None:
        kinds = [
            self._attach, self._detach, self._allocate, *3 * [self._commit], *3 * [self._answer],
            self._clear, self._read, self._tell, self._move, self._switch, self._resolve,
        ]  # fmt: skip
        for _ in range(events):
            self._random.choice(kinds if self._links else [self._attach])()
            self._deliver()
            self.moments.append((picture(self.service), self.journal._words[0], copy.deepcopy(self.controller),
                                 dict(self.line.asked)))  # fmt: skip

    def _deliver(self) -> None:
        for ticket, answer in self.service.answered(100.0):
            session = self.service.sessions.by_ident.get(ticket[0].session_ident)  # type: ignore[index]
            if session is not None and not isinstance(answer[0], m.Waiting):
                self.service.close_request(session, answer)
        self.service.check_invariants()
        self._recorder.settle()

    def _attach(self) -> None:
        ident = self._random.choice(IDENTS)
        self.service.sessions.attach(ident, ident[:1] != b"d", 4711)
        self._links.setdefault(ident, []).append(Link(ident))

    def _detach(self) -> None:
        ident = self._random.choice(sorted(self._links))
        session, link = self.service.sessions.by_ident[ident], self._links[ident].pop()
        if not self._links[ident]:
            del self._links[ident]
            self._allocated.pop(ident, None)
            session.ended = True
        tickets = {ticket for ticket in session.parked.values() if ticket[0] is link}  # type: ignore[index]
        self.service.detach(session, tickets, 100.0)

    def _ask(self, ident: bytes, message: m.Request, payload: bytes = b"") -> m.Reply | None:
        session = self.service.sessions.by_ident[ident]
        ticket = (self._random.choice(self._links[ident]), message.rid)
        answer = self.service.handle(message, memoryview(payload), session, ticket, 100.0)
        return None if answer is None else answer[0]

    def _new_rid(self) -> int:
        self._rid += 1
        return self._rid

    def _allocate(self) -> None:
        ident = self._random.choice(sorted(self._links))
        reply = self._ask(ident, m.Allocate(self._new_rid(), self._random.choice([100, 3000, 70_000]), False, 0.0))
        if isinstance(reply, m.Allocated):
            self._allocated.setdefault(ident, []).append(reply.block)

    def _commit(self) -> None:
        """Of a block, or inline; or one more time, over whichever connection."""
        ident = self._random.choice(sorted(self._links))
        mine = self._allocated.get(ident, [])
        if mine and self._random.random() < 0.6:
            self.sent[ident, self._rid + 1] = mine[-1]
            self._ask(ident, commit(self._new_rid(), mine.pop()))
        else:
            self.sent[ident, self._rid + 1] = 0
            self._ask(ident, commit(self._new_rid(), 0), b"z" * self._random.choice([10, 9000]))
        waiting = self.service.sessions.by_ident[ident].parked
        if waiting and self._random.random() < 0.2:
            rid = self._random.choice(sorted(waiting))
            held = self.service.pending.held.get((ident, rid))
            if held is not None:
                self._ask(ident, commit(rid, held[0].block.number if held[0].owner else 0), b"z")

    def _answer(self) -> None:
        """The controller carries something out; its answer comes, or is lost."""
        asked = self.line.asked
        if not asked:
            return
        ticket = self._random.choice(list(asked))
        ident, message = asked[ticket]
        assert isinstance(message, m.Commit)
        reply = self.controller.carry_out(ident, message, self._random.random() < 0.8)
        if self._random.random() < 0.3:
            return  # it is on its way
        del asked[ticket]
        self.line.answer(ticket, reply, self._random.random() < 0.2)
        self.service.apply_outcomes()

    def _clear(self) -> None:
        """A row goes, perhaps before the writer heard that it is there."""
        if self.controller.needed:
            block = self._random.choice(sorted(self.controller.needed))
            self.controller.needed.discard(block)
            self.line.freed.append(block)
            self.service.apply_outcomes()

    def _read(self) -> None:
        here = [number for number in sorted(self.controller.needed) if self.service.unit.block(number) is not None]
        if here:
            number = self._random.choice(here)
            self._ask(self._random.choice(sorted(self._links)), m.Pin(self._new_rid(), np.array([number]).tobytes()))

    def _tell(self) -> None:
        ident = self._random.choice(sorted(self._links))
        session, rid = self.service.sessions.by_ident[ident], max(1, self._rid - self._random.randrange(4))
        pins = list(self.service.unit._pins._by_session.get(ident, {}).items())
        mine = self._allocated.get(ident, [])
        choice = self._random.randrange(3)
        if choice == 0:
            self.service.notify(m.Cancel(rid), session)
            self._allocated[ident] = [one for one in mine if self.service.unit.block(one) is not None]
        elif choice == 1 and mine:
            self.service.notify(m.Discard(mine.pop()), session)
        elif pins:
            self.service.notify(m.Unpin(pins[0][0], list(pins[0][1])), session)

    def _move(self) -> None:
        """Compaction and spilling: the controller is asked to take a copy in the place of a block."""
        unit = self.service.unit
        busy = self.service.pending.blocks() | {number for number, *_ in self._copies}
        blocks = [one for one in sorted(self.controller.needed) if one in unit._blocks and one not in busy]
        if not blocks:
            return
        spills = self._random.random() < 0.5
        number, target = self._random.choice(blocks), unit.place(70_000 if spills else 100, b"mover", spills)
        if target is None:
            return
        target.digest = 4711 * spills
        self._copies.append((number, target.number, self.service.pending.hold_copy(target, b"moved")))
        self._recorder.settle()

    def _switch(self) -> None:
        """It takes the copy, or finds nothing of the block left; its answer comes, late perhaps, or is lost."""
        if not self._copies:
            return
        number, copy, ticket = one = self._random.choice(self._copies)
        if number in self.controller.needed:
            self.controller.needed ^= {number, copy}
            self.controller.taken.add(copy)
            self.line.freed.append(number)
            self.service.apply_outcomes()
            if self._random.random() < 0.3:
                return  # its answer is on its way
        self._copies.remove(one)
        if self._random.random() < 0.2:
            self.service.pending.leave_in_doubt(ticket)
        else:
            self.service.pending.answered(ticket, copy in self.controller.taken)
        self.service.apply_outcomes()

    def _resolve(self) -> None:
        settle_doubts(self.service, self.controller)

    def close(self) -> None:
        self._recorder.begin(None)
        self.service.unit.close()


def commit(rid: int, block: int) -> m.Commit:
    return m.Commit(rid, "p", 1, None, None, FIELD, block, b"layout", None, 0.0)


def settle_doubts(service: Service, controller: Controller) -> None:
    doubtful, service.pending.in_doubt = service.pending.in_doubt, []
    service.controller.freed.extend(controller.resolve(doubtful))
    service.apply_outcomes()


def differences(seed: int, events: int = 60) -> Iterator[str]:
    """What is wrong with a standby after one moment of a run."""
    run = Simulation(seed)
    try:
        run.run(events)
        rng = random.Random(seed)
        event = rng.randrange(events)
        wanted, length, controller, asked = run.moments[event]
        run.journal._words[0] = length
        service = unit_service(Recorder())
        service.unit.shm.open()
        try:
            replay(
                service, run.journal.records(), [os.dup(one.fd) for one in run.service.unit.shm.arenas[len(GRAINS) :]]
            )
            found = picture(service)
            lost = set(wanted.pop("in doubt")) - set(found.pop("in doubt"))  # to ask twice does no harm
            if lost or found != wanted:
                parts = [(name, found[name], wanted[name]) for name in wanted if found[name] != wanted[name]]
                yield f"seed {seed}, event {event}: in doubt no more {lost}; {parts}"
            service.lose_connections(were_passed_on=True)
            yield from _go_on(service, controller, asked, rng, run.sent)
            service.check_invariants()
            left = {number for number, block in service.unit._blocks.items() if not block.dropped}
            if left != controller.needed:
                yield f"seed {seed}, event {event}: there are {sorted(left)}, needed are {sorted(controller.needed)}"
        finally:
            service.unit.close()
    finally:
        run.close()


def _go_on(
    service: Service, controller: Controller, asked: dict[Any, Any], rng: random.Random, sent: dict[Any, int]
) -> Iterator[str]:
    """The unit joins again, its clients ask again or are gone, and what the killed server sent arrives when it will."""
    line = service.controller
    assert isinstance(line, Line)
    late = [one for one in asked.values() if rng.random() < 0.7]
    rng.shuffle(late)
    now, later = late[::2], late[1::2]
    for ident, message in now:
        controller.carry_out(ident, message, True)
    doubtful = set(service.pending.in_doubt)
    line.freed.extend(set(service.unit.published()) - doubtful - controller.needed)
    service.apply_outcomes()
    settle_doubts(service, controller)
    for ident, session in list(service.sessions.by_ident.items()):
        link = Link(ident)
        service.sessions.attach(ident, session.local, 4711)
        for (owner, rid), held in list(service.pending.held.items()):
            if owner == ident and rng.random() < 0.6:
                again = commit(rid, held[0].block.number if held[0].owner else 0)
                assert service.handle(again, memoryview(b"z"), session, (link, rid), 101.0) is None
        for (owner, rid), (_, is_done) in list(controller.outcomes.items()):
            if owner != ident or (owner, rid) in service.pending.held or rng.random() < 0.5:
                continue  # it heard what came of it
            answer = service.handle(commit(rid, sent[owner, rid]), memoryview(b"z"), session, (link, rid), 101.0)
            if is_done and answer is not None:
                yield f"request {rid} was carried out, and asked again {answer[0]}"
        for ticket, (owner, passed_on) in list(line.asked.items()):
            line.answer(ticket, controller.carry_out(owner, passed_on, True), rng.random() < 0.1)  # type: ignore[arg-type]
            del line.asked[ticket]
        service.apply_outcomes()
        for _, answer in service.answered(101.0):
            service.close_request(session, answer)
        session.ended = True
        service.detach(session, set(session.parked.values()), 102.0)
    settle_doubts(service, controller)
    for ident, message in later:
        controller.carry_out(ident, message, True)


if __name__ == "__main__":
    print(*differences(int(sys.argv[1])), sep="\n")
