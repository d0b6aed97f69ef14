"""Random requests about groups, and what of them outlives their controller."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from tables import indexes, packed
from test_groups_controller import GroupBox

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import StaleAttempt, TransferQueueError
from transfer_queue.groups import GroupPolicy
from transfer_queue.sampler import SequentialSampler
from transfer_queue.wire import messages as m

POLICIES = [
    GroupPolicy(), GroupPolicy.windowed(1), GroupPolicy.weight_fifo(1, 3), GroupPolicy.drop(2), GroupPolicy.dropless(3),
    GroupPolicy.in_order(1, 2, shrink=True, floor=0.0),
    GroupPolicy(serve="window", window=1, stale="withhold", retry="group"), GroupPolicy(capacity=3),
    GroupPolicy.prioritized(3, samples_per_insert=2.0), GroupPolicy.prioritized(2, max_times_sampled=3),
    GroupPolicy(order="priority", max_times_sampled=2, serve="window", window=2, stale="evict"),
]  # fmt: skip


class History:
    """Random requests of three sessions, all of which may be refused."""

    def __init__(self, seed: int, ledger: Ledger) -> None:
        self.random = random.Random(seed)
        self.box = GroupBox(self.random.choice(POLICIES), ledger)
        self.attempts: list[tuple[str, int, int]] = []
        self.tickets: list[int] = []
        self.leases: list[int] = []
        self.number = 0

    def step(self) -> None:
        choose, box = self.random, self.box
        session = choose.choice([b"a", b"b", b"c"])
        waits = choose.choice([0.0, 0.0, 50.0])
        asker = object()
        match choose.randrange(16):
            case 0 | 1:
                found = box.ask(m.TakeTickets, choose.randint(1, 2), waits, session=session, asker=asker)
                self.tickets += [one.number for one in found.tickets] if found else []
            case 2 | 3 | 4:
                self.number += 1
                size = choose.randint(1, 3)
                number = self.tickets.pop() if self.tickets and choose.random() < 0.8 else None
                box.open(
                    f"g{self.number}", size, min_size=choose.randint(1, size), source=choose.choice("mc"),
                    ticket=number, refills=choose.random() < 0.3, priority=choose.choice([0.0, 1.0, 1.0, 7.5]),
                )  # fmt: skip
            case 5 | 6 | 7:
                self.attempts += box.claim(choose.randint(1, 4), session=session, timeout_s=waits, asker=asker) or []
            case 9 | 10 if self.attempts:
                self._finish_some()
            case 8 if self.attempts:
                one = self.attempts.pop(choose.randrange(len(self.attempts)))
                rows = indexes(box.put(choose.randint(0, 2))) if choose.random() < 0.9 else [10**6]
                box.finish(*one, rows, oldest=choose.randint(0, 4), newest=9)
            case 11 if self.attempts:
                one = self.attempts.pop()
                box.ask(m.FailSlots, [m.Attempt(*one)], choose.choice(["infra", "data"]))
            case 12:
                found = box.select(choose.randint(1, 3), 3, waits, session=session, asker=asker)
                self.leases += [found.lease] if found and found.groups else []
            case 13 if self.leases:
                lease = self.leases.pop()
                if choose.random() < 0.7:
                    box.ask(m.AckGroups, lease, None, choose.random() < 0.5)
                else:
                    box.ask(m.ReleaseGroups, lease, None)
            case 14:
                self._rare(session)
            case _:
                box.expire(box.now + choose.choice([0.0, 1.0, 20.0]))
        self._hear()

    def _finish_some(self) -> None:
        """Several results, some of which are too late, with new rows or with rows that are there, or are not."""
        choose, box = self.random, self.box
        choose.shuffle(self.attempts)
        found = [(*self.attempts.pop(), choose.randint(0, 2)) for _ in range(min(len(self.attempts), 3))]
        if choose.random() < 0.5 and sum(one[-1] for one in found):
            box.put_results(*found)
            return
        count = sum(one[-1] for one in found)
        rows = indexes(box.put(count)) if choose.random() < 0.8 else choose.sample(range(60), count)
        finished = [m.FinishedSlot(*one, 1.0, choose.randint(0, 4), 9, 5, {}, count) for *one, count in found]
        box.ask(m.FinishSlots, finished, packed(rows))

    def _rare(self, session: bytes) -> None:
        choose, box = self.random, self.box
        match choose.randrange(14):
            case 12 | 13:
                self._select_with_fields(session)
            case 9 | 10:
                box.ask(m.MarkPool, self.number)
            case 11:
                marked = box.report()["steps"]
                box.ask(m.ResumePool, choose.choice(marked) if marked and choose.random() < 0.9 else 0)
            case 8:
                box.ask(m.EndPool)
            case 6 | 7:
                box.ask(m.RemovePool, choose.random() < 0.5)
                box.ask(m.OpenPool, choose.choice(POLICIES), choose.choice([None, 3]))
            case 5:
                box.ask(
                    m.PrioritizeGroups, [f"g{choose.randint(1, self.number + 1)}"], [choose.choice([0.0, 0.5, 9.0])]
                )
            case 0:
                box.end_session(session)
            case 1:
                box.announce(self.number)
            case 2:
                box.ask(m.FilterGroups, [f"g{choose.randint(1, self.number + 1)}"])
            case 3:
                rows = box.rows()
                box.clear(choose.sample(rows, min(len(rows), 2)) if rows else None)
            case 4:
                box.ask(m.RetargetGroup, f"g{choose.randint(1, self.number + 1)}", choose.randint(0, 9))

    def _select_with_fields(self, session: bytes) -> None:
        """Some rows get a field that somebody waits for."""
        choose, box = self.random, self.box
        rows = box.rows()
        if rows:
            box.put(choose.sample(rows, min(len(rows), 3)), ["z"])
        found = box.select(1, choose.randint(1, 2), 50.0, session=session, asker=object(), fields=["z"])
        self.leases += [found.lease] if found and found.groups else []

    def _nobody_waits_in_vain(self) -> None:
        """Whoever waits could not have gone on."""
        groups = self.box.controller.groups
        for partition in list(groups.pools):
            groups._changed(partition)
        assert not self.box.controller.outbox

    def _hear(self) -> None:
        for reply in self.box.told().values():
            if isinstance(reply, m.SlotsClaimed):
                self.attempts += [(one.group, one.slot, one.attempt) for one in reply.slots]
            if isinstance(reply, m.Tickets):
                self.tickets += [one.number for one in reply.tickets]
            if isinstance(reply, m.GroupsLent) and reply.groups:
                self.leases.append(reply.lease)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            try:
                self.step()
            except TransferQueueError:
                self._hear()
            self._nobody_waits_in_vain()


def settled(controller: Controller) -> Any:
    """What is saved, once nobody is left who had something."""
    controller.forget({waiter.ticket for waiter in controller.state.groups.parked})
    controller.state.groups.forget_holders()
    saved = msgspec.msgpack.decode(exported(controller.state)[0])
    for pool in saved["pools"].values():
        pool["returned"].sort()
    return (
        saved["pools"],
        saved["used_numbers"],
        [(table["name"], np.frombuffer(table["index"], np.int64).tolist()) for table in saved["tables"]],
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_keep_their_invariants_and_outlive_their_controller(seed: int) -> None:
    ledger = Ledger()
    blank = Controller(SequentialSampler(), None, 0, ledger=Ledger())
    state, blocks = exported(blank.state)
    history = History(seed, ledger)
    history.run(300)
    heir = Controller(SequentialSampler(), None, 0, ledger=Ledger())
    recovery = Recovery(heir, state, blocks, 0)
    for fact in ledger.take():
        recovery.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(fact), type=type(fact)))
    recovery.finish()
    heir.check_invariants()
    assert settled(heir) == settled(history.box.controller)


def test_a_claim_whose_answer_reached_nobody_is_no_failed_attempt() -> None:
    box = GroupBox(GroupPolicy(retry="group", max_attempts=2), ledger := Ledger())
    box.open("x", 2)
    box.claim(1)
    rows = box.finish("x", 0)
    for number in range(3):
        box.handle(m.ClaimSlots(number, "p", 1, None, 0.0), None, b"worker")
        if number < 2:
            box.controller.take_back(b"worker", number)
    box.end_session(b"worker")
    assert box.rows() == rows, "its sibling need not be made again"
    assert box.report()["sources"][""]["failed_attempts"] == {}
    assert box.claim() == [("x", 1, 3)], "a late result of the claims before does not count for this one"
    with pytest.raises(StaleAttempt):
        box.finish("x", 1, 2)
    state, blocks = exported(Controller(SequentialSampler(), None, 0, ledger=Ledger()).state)
    heir = Recovery(GroupBox(None, Ledger()).controller, state, blocks, 0)
    for fact in ledger.take():
        heir.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(fact), type=type(fact)))
    heir.finish()
    assert settled(heir._controller) == settled(box.controller)
