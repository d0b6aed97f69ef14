"""Batches that are handed out once more and come back: their loop died, refused them, or the service began anew."""

from __future__ import annotations

import pytest
from tables import Box, indexes, reloaded
from test_steps import filled

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.sampler import SequentialSampler


@pytest.mark.parametrize("how", ["session", "nack", "restart"])
def test_a_batch_that_came_back_when_it_was_handed_out_once_more_comes_once(how: str) -> None:
    box, rows = filled(6)
    box.ack(box.lend(2)[0])
    box.resume(0)
    lease, again = box.lend(2)
    if how == "nack":
        box.nack(lease)
    elif how == "session":
        box.end_session()
    else:
        box = reloaded(box)
    assert box.resume(0) == (1, 2, 0)
    assert [again, box.fetch(2), box.fetch(2)] == [rows[:2], rows[:2], rows[2:4]]


def test_a_batch_that_is_refused_for_a_while_when_it_comes_once_more_waits() -> None:
    box, rows = filled(4)
    box.fetch(2)
    box.resume(0)
    box.nack(box.lend(2)[0], delay_s=60.0)
    assert box.fetch(2) == rows[2:]
    with pytest.raises(DeadlineExceeded):
        box.fetch(2)
    box.expire(100.0)
    assert box.fetch(2) == rows[:2]


def test_a_dead_letter_does_not_come_once_more_with_its_batch() -> None:
    box, rows = filled(4)
    box.fetch(2)
    box.resume(0)
    lease, _ = box.lend(2, max_deliver=1)
    box.nack(lease)
    assert list(box.dead_letters()) == rows[:2]
    assert box.fetch(2) == rows[2:]


def test_a_row_of_a_batch_that_came_once_more_is_held_back_after_a_restart() -> None:
    box = Box()
    box.controller = Controller(SequentialSampler(), None, 0, ledger=(ledger := Ledger()))
    rows = indexes(box.put(2))
    box.mark(0)
    saved = exported(box.controller.state)
    ledger.take()
    box.fetch(2)
    box.resume(0)
    box.nack(box.lend(2)[0], rows[:1], delay_s=60.0)
    heir = Recovery(Controller(SequentialSampler(), None, 0, ledger=Ledger()), *saved, 0)
    for fact in ledger.take():
        heir.apply(fact)
    heir.finish()
    box.controller = heir._controller
    assert box.fetch(1) == rows[1:]
    box.controller.check_invariants()
