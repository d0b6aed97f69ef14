"""For how long the groups of a data source have had no turn, and who is told of it."""

from __future__ import annotations

import pytest
from test_groups_controller import GroupBox

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported
from transfer_queue.groups import GroupPolicy
from transfer_queue.sampler import SequentialSampler
from transfer_queue.wire import messages as m


def test_a_source_that_nobody_uses_starves_visibly() -> None:
    box = GroupBox()
    box.made("x", source="math")
    box.open("y", source="code")
    box.report()
    box.now = 30.0
    box.ask(m.AckGroups, box.select().lease, None, False)
    box.now = 40.0
    sources = box.report()["sources"]
    assert (sources["math"]["starved_s"], sources["code"]["starved_s"]) == (10.0, 40.0)
    assert (sources["math"]["consumed"], sources["code"]["consumed"]) == (1, 0)


def test_a_source_that_had_no_groups_did_not_starve_meanwhile() -> None:
    box = GroupBox()
    box.made("x", source="math")
    box.ask(m.AckGroups, box.select().lease, None, False)
    box.now = 1000.0
    box.open("y", source="math")
    assert box.report()["sources"]["math"]["starved_s"] == 0.0
    box.now = 1007.0
    box.open("z", source="math")
    assert box.report()["sources"]["math"]["starved_s"] == 7.0


def test_a_source_whose_groups_have_no_turn_while_others_do_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    box = GroupBox(GroupPolicy(order="priority"))
    box.made("x", source="math", priority=0.5)
    warned = []
    for number in range(5):
        box.made(f"y{number}", source="code")
        box.now += 100.0
        box.ask(m.AckGroups, box.select(1, 1).lease, None, False)
        warned.append(len(caplog.messages))
    assert warned == [0, 0, 1, 1, 1]
    assert caplog.messages == [
        "the pool of 'p' used no group of source 'math' for 300 s, but those of others: 1 have not ended"
    ]


def test_after_a_recovery_nobody_knows_for_how_long_a_source_has_starved() -> None:
    box = GroupBox(ledger=(ledger := Ledger()))
    box.made("x", source="math")
    box.ask(m.AckGroups, box.select().lease, None, False)
    state, blocks = exported(Controller(SequentialSampler(), None, 0, ledger=Ledger()).state)
    heir = Recovery(GroupBox(None, Ledger()).controller, state, blocks, 0)
    for fact in ledger.take():
        heir.apply(fact)
    heir.finish()
    box.controller, box.now = heir._controller, 1e6
    assert box.report()["sources"]["math"]["starved_s"] is None
    box.made("y", source="math")
    box.now += 3.0
    assert box.report()["sources"]["math"]["starved_s"] == 3.0
