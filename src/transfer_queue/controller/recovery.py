"""Carrying out facts on the state that they began with, after nobody is left who was there then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from transfer_queue.controller import facts as f
from transfer_queue.controller.admission import AdmissionGrant
from transfer_queue.controller.controller import Controller
from transfer_queue.controller.deadlines import NO_TIME
from transfer_queue.controller.readiness import DELAYED, REPLAYED, RESERVED, SPENT, TOO_OLD, Returned
from transfer_queue.controller.steps import Steps
from transfer_queue.controller.taken import TakenDeal, TakenRows
from transfer_queue.errors import CheckpointCorrupt, InternalError, JournalCorrupt, TransferQueueError
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of, numbers_of

Rule = Callable[[Any], None]


class Recovery:
    """Brings a controller, which nobody has asked anything yet, to where another one was.

    Rows have the numbers they had, and blocks too. Whoever names rows as the service did that is gone means the same
    ones. What was on lease is offered, and what was to be handed out once more is.
    """

    def __init__(
        self, controller: Controller, state: bytes | memoryview, blocks: list[int], reserved_rows: int
    ) -> None:
        """`state` is a saved one, which refers to `blocks`; `reserved_rows` those of the controller that was.

        Raises `CheckpointCorrupt`, and `InvalidInput` where it has another sampler.
        """
        self._controller = controller
        self._reserved, controller.reserved_rows = controller.reserved_rows, reserved_rows
        self._max_rows, controller.max_rows = controller.max_rows, None  # it was kept when the rows were put
        controller.state.max_rows = None
        controller.state.groups.first_number = 0
        controller.restoring.replace(state, {block: block for block in blocks})
        self._rules: dict[type, Rule] = {
            f.Applied: self._applied, f.RowsTaken: self._taken, f.Granted: self._granted,
            f.BatchTaken: self._batch_taken, f.BatchDealt: self._batch_dealt, f.BatchUndone: self._batch_undone,
            f.StepMarked: self._step_marked,
            f.HeldAgain: self._held_again, f.CellsMoved: self._moved, f.CellsGathered: self._gathered,
            f.SamplerIs: self._sampler_is, f.UnitGivenUp: self._unit_lost,
            f.BlocksGivenUp: self._blocks_lost,
            f.LocksNumbered: lambda fact: controller.state.lock_numbers.go_on_above(fact.last),
        }  # fmt: skip

    def apply(self, fact: f.ControllerFact) -> None:
        """Raises `JournalCorrupt` where it does not fit the state."""
        try:
            self._rules[type(fact)](fact)
        except (KeyError, IndexError, ValueError, TransferQueueError) as error:
            raise JournalCorrupt(f"{type(fact).__name__} does not fit the state before it: {error!r}") from error

    def finish(self, units: Collection[int] = ()) -> None:
        """Nobody is left who was there but these units, whose blocks they may still have."""
        controller, state = self._controller, self._controller.state
        controller.reserved_rows, controller.max_rows = self._reserved, self._max_rows
        state.max_rows = self._max_rows
        state.fetching.steps.end_leases()
        state.fetching.leases.number_above(state.fetching.steps.last_lease)
        state.fetching.redelivery.resume(NO_TIME)
        state.groups.forget_holders()
        state.groups.number_above(state.lock_numbers.last)
        lives = list(state.lineage.ends)
        if lives:
            state.lineage.ends[lives[-1]] = state.next_index
        while controller.unfinished:
            controller.tidy()
        for unit in {block >> m.UNIT_SHIFT for block in state.block_index.entries} - {0, *units}:
            controller.lose(unit)
        state.block_index.freed.clear()
        if state.ledger is not None:
            state.ledger.take()

    def _applied(self, fact: f.Applied) -> None:
        assert isinstance(fact.message, m.Request)
        self._controller.apply(fact.message)
        if self._controller.state.next_index != fact.next_index:
            raise InternalError(f"the next row is {self._controller.state.next_index}, it was {fact.next_index}")

    def _taken(self, fact: f.RowsTaken) -> None:
        table = self._controller.tables[fact.partition]
        task, slots = table.task(fact.task), table.slots_of(indexes_of(fact.rows))
        used = np.frombuffer(fact.used, np.uint8)
        if len(used) != len(slots) or bool((slots < 0).any()):
            raise CheckpointCorrupt("rows that are not there")
        for kind in (DELAYED, REPLAYED):  # what is to come once more is kept for it in the end (`Steps.end_leases`)
            task.take_back(slots, kind, used=False)
        task.consume(task.claim(slots[(used == f.USED) & ~task.consumed[slots]]))
        task.give_back(slots[used != f.USED])
        task.take_back(slots[used == 0], RESERVED, used=False)
        task.reserve(task.offered(slots[used == f.KEPT]))
        task.forgive(slots)
        if fact.fates:
            fates = np.frombuffer(fact.fates, np.uint8)
            for what in (TOO_OLD, SPENT):
                task.note_fate(slots[fates & what != 0], what)
        if fact.stale >= 0:
            task.num_stale = fact.stale
        for place, attempts, reason, dead in fact.returned:
            task.returned[int(slots[place])] = Returned(attempts, reason, NO_TIME, dead)
        task.hold_back(slots[[place for place, _ in fact.delays]], [delay_s for _, delay_s in fact.delays])
        task.max_deliver = fact.max_deliver or task.max_deliver

    def _granted(self, fact: f.Granted) -> None:
        self._controller.staleness.admissions.tasks[fact.task] = AdmissionGrant(fact.base, fact.rows)

    def _batch_taken(self, fact: f.BatchTaken) -> None:
        self._steps.took(fact.task, TakenRows.restored(fact.batch))

    def _batch_dealt(self, fact: f.BatchDealt) -> None:
        self._steps.add_deals(fact.task, [TakenDeal.restored(fact.deal)])

    def _batch_undone(self, fact: f.BatchUndone) -> None:
        self._steps.undone(fact.task, indexes_of(fact.rows))

    def _step_marked(self, fact: f.StepMarked) -> None:
        lent = [TakenRows.restored(one) for one in fact.lent]
        self._steps.marked(fact.task, fact.step, lent, [TakenDeal.restored(one) for one in fact.left])

    def _held_again(self, fact: f.HeldAgain) -> None:
        self._steps.hold_again(fact.task, fact.again, fact.served, fact.deals)

    def _moved(self, fact: f.CellsMoved) -> None:
        self._controller.relocate(fact.block, fact.target, numbers_of(fact.rows))

    def _gathered(self, fact: f.CellsGathered) -> None:
        self._controller.gather(fact.target, numbers_of(fact.blocks), numbers_of(fact.rows))

    def _unit_lost(self, fact: f.UnitGivenUp) -> None:
        self._controller.lose(fact.unit)

    def _blocks_lost(self, fact: f.BlocksGivenUp) -> None:
        self._controller.lose_blocks(fact.blocks)

    def _sampler_is(self, fact: f.SamplerIs) -> None:
        self._controller.state.sampler.load_checkpoint(fact.state)

    @property
    def _steps(self) -> Steps:
        return self._controller.state.fetching.steps
