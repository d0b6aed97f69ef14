"""A step of a loop that takes rows for a task and groups from a pool is marked, and gone back to, as one."""

from __future__ import annotations

from typing import Any

import pytest
from test_groups_controller import GroupBox, names

from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import InvalidInput, LeaseExpired
from transfer_queue.groups import GroupPolicy
from transfer_queue.wire import messages as m


def learned(box: GroupBox) -> tuple[list[int], list[str]]:
    """What a loop takes for one step: a row of its task, and a group of its pool."""
    lent = box.select(1, 1)
    box.ask(m.AckGroups, lent.lease, None, False)
    return box.fetch(1, partition="rows"), names(lent)


def looping(ledger: Ledger | None = None) -> GroupBox:
    """A loop that can take several steps, and has marked one of them as 0."""
    box = GroupBox(ledger=ledger)
    box.put(4, partition="rows")
    for name in "abcd":
        box.made(name)
    box.mark(0, ["t"], pools=["p"])
    return box


def resumed(box: GroupBox, step: int, tasks: list[str], pools: list[str]) -> Any:
    return box.ask(m.ResumeStep, step, tasks, pools)


def test_what_was_taken_after_a_step_comes_again_from_both() -> None:
    box = looping()
    learned(box)
    box.mark(1, ["t"], pools=["p"])
    later = [learned(box), learned(box)]
    found = resumed(box, 1, ["t"], ["p"])
    assert (found.batches, found.rows, found.lost, found.pools) == (2, 2, 0, {"p": (2, 2, 0)})
    assert [learned(box), learned(box)] == later


@pytest.mark.parametrize("refused", ["lease", "task", "pool", "no pool", "policy"])
def test_what_cannot_mark_both_marks_neither(refused: str) -> None:
    box = looping()
    box.ask(m.OpenPool, GroupPolicy(max_times_sampled=2), None, partition="twice")
    before = learned(box)
    if refused == "task":
        box.mark(7, ["t"])
    if refused == "pool":
        box.ask(m.MarkPool, 7)
    error = LeaseExpired if refused == "lease" else InvalidInput
    pools = ["p", *{"no pool": ["q"], "policy": ["twice"]}.get(refused, [])]
    with pytest.raises(error):
        box.mark(5, ["t"], used=[(99, None)] if refused == "lease" else [], pools=pools)
    resumed(box, 0, ["t"], ["p"])
    assert learned(box) == before


@pytest.mark.parametrize("alone", ["task", "pool"])
def test_what_cannot_go_back_with_both_goes_back_with_neither(alone: str) -> None:
    box = looping()
    if alone == "task":
        box.mark(1, ["t"])
    else:
        box.ask(m.MarkPool, 1)
    after = [row + 1 for row in learned(box)[0]]
    with pytest.raises(InvalidInput, match="marks of"):
        resumed(box, 1, ["t"], ["p"])
    assert learned(box) == (after, ["b"])


def test_the_steps_of_both_are_in_what_a_journal_has() -> None:
    box = looping(ledger := Ledger())
    saved = exported(box.controller.state)
    ledger.take()
    learned(box)
    box.mark(1, ["t"], pools=["p"])
    later = [learned(box), learned(box)]
    resumed(box, 1, ["t"], ["p"])
    heir = Recovery(GroupBox(None, Ledger()).controller, *saved, 0)
    for fact in ledger.take():
        heir.apply(fact)
    heir.finish()
    box.controller = heir._controller
    assert [learned(box), learned(box)] == later
