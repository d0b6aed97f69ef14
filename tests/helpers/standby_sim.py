"""A service in this process that keeps a journal, driven by one seed; what its standby makes of the journal, beside it.

There are no sockets, no clock and no other process: `python -m standby_sim SEED` repeats a run.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from services import FIELD
from tables import packed

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.snapshot import exported
from transfer_queue.groups import GroupPolicy
from transfer_queue.memory.bytes import PAGE
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from transfer_queue.schema import FieldSchema
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.server.standby.journal import Journal
from transfer_queue.server.standby.recording import Recorder, RecordingController, RecordingUnit, recording_parts
from transfer_queue.server.standby.replay import replay
from transfer_queue.storage.blocks import SpillSpace
from transfer_queue.storage.shm import GRAINS
from transfer_queue.wire import messages as m


class Drawing(RankAwareSampler):
    """Draws from the system: it answers the same question another time differently, or not at all."""

    system = random.SystemRandom()

    def needs(self, batch_size: int) -> None:
        return None

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.system.random() < 0.1:
            raise ValueError("not now")
        self.system.shuffle(ready_indexes)
        sampled, consumed = super().sample(ready_indexes, batch_size, *args, **kwargs)
        return np.array(sampled), tuple(consumed)


SAMPLERS = (SequentialSampler, lambda: GRPOGroupNSampler(n_samples_per_prompt=2), RankAwareSampler, Drawing)
POLICIES = (
    GroupPolicy(), GroupPolicy.windowed(1), GroupPolicy.in_order(1, 2, shrink=True, floor=0.0), GroupPolicy.drop(2),
    GroupPolicy.prioritized(3, samples_per_insert=2.0), GroupPolicy.prioritized(2, max_times_sampled=2),
)  # fmt: skip
PARTITIONS, TASKS, KEYS = ("p", "q"), ("t", "u"), tuple(f"k{number}" for number in range(12))
SHARED = FieldSchema("s", "dense", "int64", (2,))
FIELDS = [FIELD, [*FIELD, FieldSchema("y", "dense", "int64", (2,))]]
BUDGET = 64 * PAGE
SPILL = SpillSpace(tempfile.gettempdir(), BUDGET)
MAX_ROWS = 24  # few, so that some requests wait for room
JOURNAL_NBYTES = 8 << 20
RECENT = 4


class Link:
    """Stands for a connection."""

    def __init__(self, session_ident: bytes) -> None:
        self.session_ident = session_ident


def recorded(sampler: Any, recorder: Recorder, lock_number: int = 7, ledger: Ledger | None = None,
             kind: Callable[..., RecordingUnit] = RecordingUnit) -> Service:  # fmt: skip
    """A service of which `recorder` hears."""
    controller = RecordingController(sampler, MAX_ROWS, 0, lock_number=lock_number, max_deliver=2, ledger=ledger)
    controller.record_to(recorder)
    controller.state.cleared_partitions.at_once = -1  # everything is put off, as with large ones
    unit = kind(BUDGET, None, recorder, SPILL)
    return Service(controller, unit, **recording_parts(unit, recorder))


def picture_of_unit(service: Service) -> dict[str, Any]:
    """The state of its memory, and of commits that wait."""
    unit = service.unit
    return {
        "blocks": sorted(
            (one.number, one.arena, one.offset, one.nbytes, one.owner, one.layout, one.digest, one.pins, one.published,
             one.dropped)
            for one in unit._blocks.values()
        ),
        "filled": {ident: sorted(numbers) for ident, numbers in unit._unpublished.items() if numbers},
        "held": {
            asked: [(one.block.number, one.owner) for one in blocks] for asked, blocks in service.pending.held.items()
        },
        "next block": unit._next,
        "used": (unit.used_nbytes, unit.spilled_nbytes, unit.num_spilled),
        "resting": list(unit._resting),
        "free": [arena.extents.free() for arena in unit.shm.arenas],
        "pins": copy.deepcopy(unit._pins._by_session),
    }  # fmt: skip


def picture(service: Service) -> dict[str, Any]:
    """All of a service's state that anybody could ever notice, as plain values."""
    controller = service.controller
    assert isinstance(controller, Controller)
    fetching, leases = controller._fetching, controller._leases
    return {
        **picture_of_unit(service),
        "state": exported(controller.state),
        "leases": {
            number: (one.partition, one.task, one.rows.tolist(), one.deadline, sorted(one.holders.items()))
            for number, one in leases._leases.items()
        },
        "delays": [(one.due, one.task, one.rows.tolist()) for one in fetching.redelivery._delays],
        "steps": {
            name: ([[(one.partition, one.rows.tolist(), one.lease, one.sampling) for one in batches]
                    for batches in (*(part.batches for part in known.done.values()), known.open.batches, known.again,
                                    known.served)],
                   [(one.partition, one.rows.tolist()) for deals in (known.open.deals, known.deals) for one in deals])
            for name, known in fetching.steps._tasks.items()
        },
        "unreceived": {
            session: {rid: type(grant).__name__ for rid, grant in held.items()}
            for session, held in fetching.unreceived._by_session.items()
        },
        "locks": {
            number: (one.parked.session, one.parked.message, one.since, one.deadline)
            for number, one in controller.locks._held.items()
        },
        "groups": (
            {number: (one.partition, list(one.names), one.session, one.deadline)
             for number, one in controller.groups._leases.items()},
            {session: copy.deepcopy((one.tickets, one.attempts, one.refills))
             for session, one in controller.groups._holdings.items()},
            {name: sorted(pool.state.reserved) for name, pool in controller.groups.pools.items()},
            dict(controller.groups.uses.at),
        ),
        "waiting": controller.num_waiting,
        "now": leases.now,
        "stale": dict(controller.staleness.num_stale),
        "unfinished": controller.unfinished,
        "sessions": {
            ident: (one.local, one.pid, one.ended, one.connections, {
                rid: m.encode(answer[0]) for rid, answer in one.replies.items() if not isinstance(answer[0], m.Failed)
            })  # what was refused before the controller saw it is refused anew
            for ident, one in service.sessions.by_ident.items()
        },
        "freed": sorted(controller.freed),
    }  # fmt: skip


class Simulation:
    """One run. `pictures[i]` is the state after event i, and `lengths[i]` how long the journal was then."""

    def __init__(
        self, seed: int, ledger: Ledger | None = None, kind: Callable[..., RecordingUnit] = RecordingUnit
    ) -> None:
        self._random = random.Random(seed)
        self._sampler = self._random.choice(SAMPLERS)
        self._weight_of_groups = self._random.choice((1, 1, 10))  # some runs are of groups, mostly
        self._recorder = Recorder()
        self.service = recorded(self._sampler(), self._recorder, ledger=ledger, kind=kind)
        self.service.unit.shm.open()
        self.journal = Journal(size=JOURNAL_NBYTES)
        self._recorder.begin(self.journal)
        self._rid = 0
        self._now = 100.0
        self._links: dict[bytes, list[Link]] = {}
        self._parked: dict[bytes, set[Any]] = {}
        self._allocated: list[tuple[bytes, int]] = []
        self._sharers: list[int] = []  # blocks of shared cells
        self._rows: dict[str, set[int]] = {name: set() for name in PARTITIONS}
        self._leases = [1]
        self._attempts: list[tuple[str, int, int]] = [("g0", 0, 0)]
        self._group_leases = [1]
        self._batches: dict[tuple[str, str, int], int] = {}
        self.pictures: list[dict[str, Any]] = []
        self.lengths: list[int] = []

    def run(self, events: int) -> None:
        for _ in range(events):
            self._now += self._random.random() * 0.1
            self._event()
            for ticket, answer in self.service.answered(self._now):
                session = self.service.sessions.by_ident.get(ticket[0].session_ident)  # type: ignore[index]
                if session is not None and not isinstance(answer[0], m.Waiting):
                    self._parked[session.ident].discard(ticket)
                    self.service.close_request(session, answer)
                    self._learn(session, answer[0])
            self.service.check_invariants()
            self._recorder.settle()
            self._look()

    def _look(self) -> None:
        """Keep what the service is now."""
        self.pictures.append(picture(self.service))
        self.lengths.append(self.journal._words[0])

    def replica(self, event: int) -> Service:
        """What a standby that was forked at the beginning has, when the server is killed right after this event."""
        self.journal._words[0] = self.lengths[event]
        service = recorded(self._sampler(), Recorder())
        service.unit.shm.open()
        for mine, its in ((self.service.controller, service.controller),):
            assert isinstance(mine, Controller)
            assert isinstance(its, Controller)
            its.lineage.service_id, its.lineage.life = mine.lineage.service_id, mine.lineage.life
        arenas = self.service.unit.shm.arenas[len(GRAINS) :]
        replay(service, self.journal.records(), [os.dup(arena.fd) for arena in arenas])
        return service

    def close(self) -> None:
        self._recorder.begin(None)
        self.service.unit.close()

    # events

    def _event(self) -> None:
        choose = self._random.random
        if not self._links or choose() < 0.06:
            self._attach()
        elif choose() < 0.05:
            self._detach()
        elif choose() < 0.07:
            self.service.expire(self._now)
        elif choose() < 0.02:
            self.service.controller.postpone(0.5)
        elif choose() < 0.05:
            self.service.tidy()
        elif choose() < 0.1:
            self._tell()
        elif choose() < 0.04:
            self._move()
        elif choose() < 0.02:
            self._lose()
        else:
            self._ask()

    def _attach(self) -> None:
        ident = self._random.choice([b"a" * 16, b"b" * 16, b"c" * 16, b"d" * 16])
        local = ident[0] != b"d"[0]
        known = self.service.sessions.by_ident.get(ident)
        self.service.sessions.attach(ident, known.local if known else local, 4711)
        self._links.setdefault(ident, []).append(Link(ident))
        self._parked.setdefault(ident, set())

    def _detach(self) -> None:
        ident = self._random.choice(sorted(self._links))
        session = self.service.sessions.by_ident[ident]
        if self._random.random() < 0.3:
            self.service.notify(m.Goodbye(), session)
        link = self._links[ident].pop()
        tickets = {ticket for ticket in self._parked[ident] if ticket[0] is link}
        self._parked[ident] -= tickets
        if not self._links[ident]:
            del self._links[ident]
        self.service.detach(session, tickets, self._now)

    def _session(self) -> ServerSession:
        return self.service.sessions.by_ident[self._random.choice(sorted(self._links))]

    def _tell(self) -> None:
        session = self._session()
        rid = max(1, self._rid - self._random.randrange(4))
        kind = self._random.randrange(4)
        if kind == 0:
            self.service.notify(m.Cancel(rid), session)
        elif kind == 1:
            self.service.confirm(m.Received([rid]), session)
        elif kind == 2 and self._allocated:
            self.service.notify(m.Discard(self._random.choice(self._allocated)[1]), session)
        else:
            for asked, held in list(self.service.unit._pins._by_session.get(session.ident, {}).items())[:1]:
                self.service.notify(m.Unpin(asked, list(held)[:2]), session)

    def _move(self) -> None:
        """What a compactor or a spiller does with a block, without its bytes."""
        controller, unit = self.service.controller, self.service.unit
        assert isinstance(controller, Controller)
        numbers = sorted(controller.block_index.entries)
        number = self._random.choice(numbers) if numbers else 0
        found = controller.rows_in(number)
        spills = self._random.random() < 0.5
        target = unit.place(70_000 if spills else 100, b"mover", spills) if found is not None else None
        if found is None or target is None:
            return
        unit.publish(target.number, b"moved", 4711 * spills)
        if not controller.relocate(number, target.number, found[0]):
            unit.drop(target.number)
        self.service.apply_outcomes()

    def _lose(self) -> None:
        """A block is gone, as one of an engine."""
        numbers = sorted(self._machine.block_index.entries)
        if numbers:
            self._machine.lose_blocks([self._random.choice(numbers)])
            self.service.apply_outcomes()

    def _ask(self) -> None:
        session = self._session()
        again = self._rid > 3 and self._random.random() < 0.05
        self._rid += not again
        message, payload = self._request(self._rid, session)
        link = self._random.choice(self._links[session.ident])
        ticket = (link, message.rid)
        answer = self.service.handle(message, memoryview(payload), session, ticket, self._now)
        if answer is None:
            self._parked[session.ident].add(ticket)
        else:
            self._learn(session, answer[0])

    def _learn(self, session: ServerSession, reply: m.Reply) -> None:
        if isinstance(reply, m.Allocated):
            self._allocated.append((session.ident, reply.block))
        if isinstance(reply, m.RowSet) and reply.lease:
            self._leases.append(reply.lease)
        if isinstance(reply, m.SlotsClaimed):
            self._attempts += [(one.group, one.slot, one.attempt) for one in reply.slots]
        if isinstance(reply, m.GroupsLent) and reply.groups:
            self._group_leases.append(reply.lease)

    def _request(self, rid: int, session: ServerSession) -> tuple[m.Request, bytes]:
        pick, below, recent = self._random.choice, self._random.randrange, self._recent
        partition, count = pick(PARTITIONS), below(1, 5)
        keys = self._random.sample(KEYS, count)
        tags = [{"n": below(9), "weight_version": below(4)} for _ in range(count)]
        wait_s = pick([0.0, 0.0, 0.3])
        makers: list[tuple[float, Any]] = [
            (8, lambda: m.Commit(rid, partition, count, pick([keys, None]), None, pick(FIELDS), 0, b"layout",
                                 pick([tags, None]), wait_s)),
            (4, lambda: self._sharing(rid, session, partition, count, pick([keys, None]), wait_s)),
            (4, lambda: m.Allocate(rid, pick([100, 3000, 70_000]), pick([True, False]), wait_s)),
            (4, lambda: self._filled(rid, session, partition, count, keys, wait_s)),
            (6, lambda: m.Fetch(rid, partition, [pick("xy")], pick([2, 4]), pick(TASKS), self._sampling(), wait_s,
                                pick([True, False]), pick([0.0, 0.0, 0.4]), locate=pick([True, False]))),
            (2, lambda: self._shared(rid, partition, pick(TASKS), wait_s)),
            (3, lambda: m.Ack(rid, recent(self._leases), None)),
            (1, lambda: m.Release(rid, recent(self._leases), None)),
            (2, lambda: m.Nack(rid, recent(self._leases), None, pick([0.0, 0.4]), pick(["", "too long"]))),
            (1, lambda: m.Requeue(rid, partition, pick(TASKS), None)),
            (2, lambda: m.MarkStep(rid, pick([below(6), rid]), pick([["t", "u"], ["t"]]), [],
                                   pools=pick([[], [], [partition]]))),
            (1, lambda: m.ResumeStep(rid, self._marked(), ["t"])),
            (1, lambda: m.ResumeStep(rid, recent(self._marked_together(partition)), ["t"], [partition])),
            (1, lambda: m.Renew(rid, recent(self._leases), 0.5)),
            (3, lambda: m.Get(rid, partition, keys[:1], None, ["x"], pick([True, False]))),
            (3, lambda: m.Clear(rid, partition, pick([keys, keys, None]), None)),
            (1, lambda: m.Find(rid, partition, keys, pick([True, False]), wait_s)),
            (1, lambda: m.Insert(rid, partition, count, ["x"], wait_s)),
            (1, lambda: m.ResetConsumption(rid, partition, pick([*TASKS, None]))),
            (2, lambda: m.Announce(rid, "run", below(6))),
            (2, lambda: m.Admit(rid, pick(TASKS), 2, 2, 4, wait_s)),
            (1, lambda: m.GiveBack(rid, pick(TASKS), 1)),
            (2, lambda: m.Lock(rid, partition, keys[:2], 0.5, wait_s, {})),
            (1, lambda: m.Unlock(rid, self._locked())),
            (1, lambda: m.Scan(rid, partition, ["x"])),
            (2, lambda: pick([m.DescribePool(rid, partition), m.DescribeService(rid, 8)])),
            *((self._weight_of_groups * one, made) for one, made in self._of_groups(rid, partition, count, wait_s)),
            *self._of_rows(rid, partition, count, tags, wait_s),
        ]  # fmt: skip
        (maker,) = self._random.choices([made for _, made in makers], [weight for weight, _ in makers])
        message = maker()
        return message, b"z" * pick([10, 500, 9000]) if isinstance(message, m.Commit) and not message.block else b""

    def _of_rows(self, rid: int, partition: str, count: int, tags: Any, wait_s: float) -> list[tuple[float, Any]]:
        """What is asked of rows that are there, by number, and of partitions."""
        pick, below, recent = self._random.choice, self._random.randrange, self._recent
        rows = self._rows_there(partition, count)
        names = packed(rows)
        return [
            (3, lambda: m.Commit(rid, partition, len(rows), None, names, pick(FIELDS), 0, b"layout",
                                 pick([tags[: len(rows)], None]), wait_s)),
            (2, lambda: m.Commit(rid, partition, len(rows), None, names, [], -1, b"", tags[: len(rows)], wait_s,
                                 list(range(below(len(rows) + 1))))),
            (2, lambda: m.SetTags(rid, partition, names, tags[: len(rows)], pick([True, False]))),
            (1, lambda: m.Clear(rid, partition, None, names, spares=pick([True, False]))),
            (2, lambda: m.Fetch(rid, partition, [pick("xy")], 2, pick(TASKS),
                                {**self._sampling(), "max_staleness": below(3), "max_deliver": 1 + below(3)}, wait_s,
                                True, 0.4)),
            (1, lambda: m.SetPartition(rid, partition, pick([None, below(9)]), {"m": below(3)},
                                       pick([{}, {"y": below(5)}]))),
            (1, lambda: m.MarkStep(rid, rid, ["t"], [(recent(self._leases), pick([None, names]))])),
            (1, lambda: m.Nack(rid, recent(self._leases), names, pick([0.0, 0.4]), "")),
            (1, lambda: m.Ack(rid, recent(self._leases), names)),
            (1, lambda: m.KeepLock(rid, self._locked(), 0.5)),
        ]  # fmt: skip

    @property
    def _machine(self) -> Controller:
        assert isinstance(self.service.controller, Controller)
        return self.service.controller

    def _recent(self, found: Sequence[Any]) -> Any:
        """One of the last: what is asked of others is refused."""
        return self._random.choice(found[-RECENT:])

    def _marked(self) -> int:
        steps = self._machine._fetching.steps._tasks
        return int(self._recent([0, *steps["t"].done] if "t" in steps else [0]))

    def _marked_together(self, partition: str) -> list[int]:
        """Steps that a task and the pool of a partition have marks of."""
        tasks, pool = self._machine._fetching.steps._tasks, self._machine.groups.pools.get(partition)
        marked = set(tasks["t"].done) if "t" in tasks else set()
        return sorted(marked.intersection(() if pool is None else pool.steps.marked)) or [0]

    def _locked(self) -> int:
        return int(self._recent([8, *self._machine.locks._held]))

    def _rows_there(self, partition: str, count: int) -> list[int]:
        """Some rows of a partition, and where there are none one that nobody has."""
        table = self._machine.tables.get(partition)
        there = [] if table is None else table.index[table.live_slots()].tolist()
        return sorted(self._random.sample(there, min(count, len(there)))) or [4711]

    def _of_groups(self, rid: int, partition: str, count: int, wait_s: float) -> list[tuple[float, Any]]:
        """What is asked of pools of groups, and of series of partitions."""
        pick, below, recent = self._random.choice, self._random.randrange, self._recent
        name, size = f"g{below(12)}", 1 + below(3)
        pool = self._machine.groups.pools.get(partition)
        ticket = self._recent([below(6), *(() if pool is None else sorted(pool.state.reserved))])
        known = self._recent(["g0", *(() if pool is None else pool.state.groups)])
        opened = self._recent([partition, *self._machine.state.series.members])
        return [
            (0.5 if pool else 40, lambda: m.OpenPool(rid, partition, pick(POLICIES), None)),
            (0.1, lambda: m.RemovePool(rid, partition, pick([True, False]))),
            (1, lambda: m.TakeTickets(rid, partition, 1 + below(2), wait_s)),
            (3, lambda: m.OpenGroup(rid, partition, name, size, 1, pick("ab"), {}, None, pick([None, ticket]),
                                    count > 3, pick([1.0, 0.0, 4.0]))),
            (1, lambda: m.PrioritizeGroups(rid, partition, [known], [pick([0.5, 2.0])])),
            (4, lambda: m.ClaimSlots(rid, partition, count, pick([None, None, known]), wait_s, pick([0.0, 0.3]))),
            (3, lambda: m.FinishSlots(rid, partition, self._finished(partition, count),
                                      packed(self._some_rows(count)))),
            (8, lambda: m.Commit(rid, partition, count, None, None, pick(FIELDS), 0, b"layout", None, wait_s,
                                 finishes=self._finished(partition, count))),
            (1, lambda: m.FailSlots(rid, partition, [m.Attempt(*recent(self._attempts))], pick(["infra", "data"]))),
            (1, lambda: m.FilterGroups(rid, partition, [known])),
            (4, lambda: m.SelectGroups(rid, partition, 1, size, None, 0.4, wait_s)),
            (1, lambda: m.AckGroups(rid, recent(self._group_leases), None, pick([True, False]))),
            (1, lambda: m.ReleaseGroups(rid, recent(self._group_leases), None)),
            (1, lambda: m.AwaitGroups(rid, partition, 1, wait_s)),
            (1, lambda: m.TakeRefills(rid, partition, 2, wait_s)),
            (1, lambda: m.OpenPartition(rid, partition, "series", below(2), ["t"], pick([True, False]), wait_s)),
            (1, lambda: m.FinishPartition(rid, opened, "t")),
            (1, lambda: m.ReturnTickets(rid, partition, [below(4)])),
            (1, lambda: m.RetargetGroup(rid, partition, known, below(6))),
            (1, lambda: m.AdvancePool(rid, partition, below(6))),
            (1, lambda: m.RenewGroups(rid, recent(self._group_leases), 0.5)),
            (0.1, lambda: m.EndPool(rid, partition)),
            (1, lambda: m.MarkPool(rid, partition, rid)),
            (1, lambda: m.ResumePool(rid, partition, recent([0, *([] if pool is None else pool.steps.marked)]))),
        ]  # fmt: skip

    def _finished(self, partition: str, num_rows: int) -> list[m.FinishedSlot]:
        """Results of some attempts, which share so many rows out; now and then of one that is over, or of one twice."""
        pool = self._machine.groups.pools.get(partition)
        groups = {} if pool is None else pool.state.groups
        running = [
            (name, place, slot.attempts - 1)
            for name, group in groups.items() for place, slot in enumerate(group.slots) if slot.state == "running"
        ]  # fmt: skip
        self._random.shuffle(running)
        made = []
        while num_rows > 0:
            attempt: tuple[str, int, int] = self._recent(self._attempts)
            if running and self._random.random() < 0.9:
                attempt = running.pop()
            count = self._random.randint(1, num_rows) if running else num_rows
            made.append(m.FinishedSlot(*attempt, 1.0, None, None, 3, {}, count))
            num_rows -= count
        return made + [made[0]] * (self._random.random() < 0.05)

    def _some_rows(self, count: int) -> list[int]:
        return self._random.sample(range(40), min(40, count))

    def _filled(
        self, rid: int, session: ServerSession, partition: str, count: int, keys: list[str], wait_s: float
    ) -> Any:
        """The commit of a block that this session has filled, or of somebody else's, which is refused."""
        mine = [block for ident, block in self._allocated if ident == session.ident] or [4711]
        block = self._random.choice(mine)
        return m.Commit(rid, partition, count, keys, None, FIELD, block, b"filled", None, wait_s)

    def _sharing(
        self, rid: int, session: ServerSession, partition: str, count: int, keys: Any, wait_s: float
    ) -> m.Commit:
        """Rows of which some have one cell, of a block that this session has filled or of one that others share."""
        pick, below = self._random.choice, self._random.randrange
        mine = [block for ident, block in self._allocated if ident == session.ident] or [4711]
        is_new = pick([True, False])
        block = pick(mine if is_new else self._sharers or [4711])
        self._sharers.append(block)
        places, prints = packed([below(3) for _ in range(count)]), b"a" * 16 + b"b" * 16 + b"c" * 16
        one = m.SharedCells(SHARED, block, packed(range(count)), places, is_new, b"shared", prints)
        fields, own = pick([(FIELD, 0), ([], -1)])
        return m.Commit(rid, partition, count, keys, None, fields, own, b"layout", None, wait_s, shared=[one])

    def _shared(self, rid: int, partition: str, task: str, wait_s: float) -> m.Fetch:
        """What one of two data-parallel ranks asks for."""
        rank = self._random.randrange(2)
        index = self._batches[partition, task, rank] = self._batches.get((partition, task, rank), -1) + 1
        return m.Fetch(rid, partition, ["x"], 2, task, {"dp_rank": rank, "batch_index": index}, wait_s, True, 0.4,
                       dp_size=2)  # fmt: skip

    def _sampling(self) -> dict[str, Any]:
        return {"dp_rank": self._random.randrange(2), "batch_index": self._random.randrange(4)}


def differences(seed: int, events: int = 60, crashes: int = 3) -> Iterator[str]:
    """What a standby has otherwise than the server that was killed, at a few moments of a run."""
    run = Simulation(seed)
    try:
        run.run(events)
        for event in sorted(random.Random(seed).sample(range(events), crashes)):
            replica = run.replica(event)
            try:
                found, wanted = picture(replica), run.pictures[event]
                for name in wanted:
                    if found[name] != wanted[name]:
                        yield f"seed {seed}, event {event}: {name} is {_short(found[name], wanted[name])}"
                replica.lose_connections()
                replica.check_invariants()
            finally:
                replica.unit.close()
    finally:
        run.close()


def _short(found: Any, wanted: Any) -> str:
    """Where two values differ first, down to what has no parts."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*found, *wanted]:
            if found.get(key) != wanted.get(key):
                return f"{key!r}: {_short(found.get(key), wanted.get(key))}"
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)) and len(found) == len(wanted):
        place = next(number for number, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
        return f"{place}: {_short(found[place], wanted[place])}"
    return f"{found!r}, was {wanted!r}"


if __name__ == "__main__":
    print(*differences(int(sys.argv[1])), sep="\n")
