"""Results of attempts as requests: one or several at a time, with new rows or with rows that are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tables import indexes, packed, reloaded
from test_groups_controller import GroupBox, names

from transfer_queue.errors import GroupEnded, InvalidInput, RowCleared, StaleAttempt
from transfer_queue.groups import GroupPolicy
from transfer_queue.schema import FieldSchema
from transfer_queue.wire import messages as m


def test_rows_of_a_result_are_named_by_their_keys() -> None:
    box = GroupBox()
    rows = indexes(box.put(["a", "b"]))
    box.open("x", 2)
    box.claim()

    def finish(slot: int, *keys: str) -> None:
        one = m.FinishedSlot("x", slot, 0, 1.0, None, None, 5, {}, len(keys))
        box.accepted(box.ask(m.FinishSlots, [one], b"", keys=list(keys), session=b"worker"))

    with pytest.raises(RowCleared):
        finish(0, "a", "nobody")
    finish(0, "a")
    finish(1, "b")
    assert indexes(box.select().rows) == rows
    box.ask(m.AckGroups, 1, None, False)
    indexes(box.put(["c"]))
    with pytest.raises(GroupEnded):
        finish(0, "c")
    assert box.rows() == rows  # what came too late is cleared


def test_rows_that_are_not_there_are_no_result() -> None:
    box = GroupBox()
    box.open("x")
    box.claim()
    with pytest.raises(RowCleared):
        box.finish("x", rows=[77])
    box.finish("x")


def test_a_result_for_a_slot_that_its_group_has_not_is_refused_whether_its_rows_are_there_or_not() -> None:
    """As of a worker of an earlier pool, whose group of that name had more siblings."""
    box = GroupBox()
    box.open("x", 1)
    box.claim()
    for rows in (indexes(box.put(1)), [77]):
        with pytest.raises(InvalidInput, match="slot 1 of group 'x', which has 1"):
            box.finish("x", slot=1, rows=rows)
    box.finish("x")


def test_rows_and_the_result_that_they_are_come_in_one_step_or_not_at_all() -> None:
    box = GroupBox()
    box.open("x", 2)
    box.claim(2)
    box.ask(m.FailSlots, [m.Attempt("x", 1, 0)], "infra")
    box.claim(1)

    def put(slot: int, attempt: int, group: str = "x") -> list[int]:
        return indexes(box.accepted(box.put_results((group, slot, attempt, 1))))

    rows = put(0, 0)
    for slot, attempt, group, error in (
        (1, 0, "x", StaleAttempt),
        (0, 0, "x", InvalidInput),
        (0, 0, "y", InvalidInput),
    ):
        with pytest.raises(error):
            put(slot, attempt, group)
    assert box.rows() == rows
    rows += put(1, 1)
    assert indexes(box.select().rows) == rows


def test_results_that_nobody_wants_are_left_out_of_a_batch_and_the_others_are_in() -> None:
    box = GroupBox()
    box.open("x", 3)
    box.claim(3)
    box.ask(m.FailSlots, [m.Attempt("x", 1, 0)], "infra")
    box.claim(1)
    gone = box.made("gone")
    box.clear(gone)
    before = box.rows()
    reply = box.put_results(("x", 0, 0, 2), ("x", 1, 0, 1), ("gone", 0, 0, 1), ("x", 2, 0, 1))
    assert [(one.at, one.code) for one in reply.refused] == [(1, StaleAttempt.code), (2, GroupEnded.code)]
    made = indexes(reply)
    assert box.rows() == sorted(before + made)
    table = box.controller.tables["p"]
    assert [tag["row"] for tag in table.tags_of(table.slots_of(np.array(made))) or []] == [0, 1, 4], "each row its own"
    last = indexes(box.accepted(box.put_results(("x", 1, 1, 1))))
    assert indexes(box.select().rows) == [*made[:2], *last, made[2]]


def test_a_batch_of_which_nothing_is_wanted_makes_no_row_and_frees_its_block() -> None:
    box = GroupBox()
    box.made("x"), box.made("y")
    box.ask(m.AckGroups, box.select().lease, None, True)
    late = [m.FinishedSlot(name, 0, 0, 1.0, None, None, 5, {}) for name in "xy"]
    next_index = box.controller.state.next_index
    reply = box.handle(
        m.Commit(900, "p", 2, None, None, [FieldSchema("x", "", "", ())], 77, b"", None, 0.0, finishes=late)
    )
    assert [one.code for one in reply.refused] == [GroupEnded.code] * 2
    assert indexes(reply) == box.rows() == []
    assert (box.controller.state.next_index, 77 in box.controller.freed) == (next_index, True)


def test_of_shared_cells_those_of_results_that_nobody_wants_are_left_out() -> None:
    box = GroupBox()
    box.open("x", 3)
    box.claim(3)
    box.ask(m.FailSlots, [m.Attempt("x", 1, 0)], "infra")
    box.claim(1)
    image = FieldSchema("image", "", "", ())

    def put(rid: int, slots: list[tuple[int, int]], *cells: tuple[int, list[int], bool]) -> Any:
        finished = [m.FinishedSlot("x", slot, attempt, 1.0, None, None, 5, {}) for slot, attempt in slots]
        shared = [
            m.SharedCells(image, block, packed(rows), packed([0] * len(rows)), is_new, b"", bytes(16) * is_new)
            for block, rows, is_new in cells
        ]
        return box.handle(
            m.Commit(rid, "p", len(slots), None, None, [], -1, b"", None, 0.0, finishes=finished, shared=shared)
        )

    reply = put(900, [(0, 0), (1, 0), (2, 0)], (91, [0, 2], True), (92, [1], True))
    assert [one.at for one in reply.refused] == [1]
    assert (92 in box.controller.freed, 91 in box.controller.freed) == (True, False)
    last = put(901, [(1, 0), (1, 1)], (93, [0], True), (91, [1], False))
    assert [one.at for one in last.refused] == [0]
    assert 93 in box.controller.freed
    rows = indexes(reply) + indexes(last)
    located = box.ask(m.Get, None, packed(rows), ["image"], False)
    assert {piece.block for piece in located.pieces} == {91}
    assert put(902, [(1, 0)], (94, [0], True)).refused
    assert 94 in box.controller.freed


def test_a_result_without_rows_is_in_though_nobody_wants_the_others() -> None:
    box = GroupBox()
    box.made("gone")
    box.ask(m.AckGroups, box.select().lease, None, True)
    box.open("x")
    box.claim()
    reply = box.put_results(("gone", 0, 0, 2), ("x", 0, 0, 0))
    assert [one.at for one in reply.refused] == [0]
    assert (names(box.select()), box.rows()) == (["x"], [])


def test_what_is_wrong_with_one_result_of_a_batch_refuses_all_of_it() -> None:
    box = GroupBox()
    box.open("x", 3)
    box.claim(3)
    rows = indexes(box.put(3))
    done = box.finish("x", 0)
    wrong = [
        [("x", 1, 0, 1), ("x", 0, 0, 1)], [("x", 1, 0, 1), ("x", 2, 7, 1)], [("x", 1, 0, 1), ("nobody", 0, 0, 1)],
        [("x", 1, 0, 1), ("x", 1, 0, 1)], [("x", 1, 0, -1), ("x", 2, 0, 3)],
    ]  # fmt: skip
    for results in wrong:
        with pytest.raises(InvalidInput):
            box.put_results(*results)
    finished = [m.FinishedSlot("x", slot, 0, 1.0, None, None, 5, {}) for slot in (1, 2)]
    for named in ([rows[0], rows[0]], [rows[0], done[0]], rows):
        with pytest.raises(InvalidInput):
            box.ask(m.FinishSlots, finished, packed(named), session=b"worker")
    assert box.report()["sealed"] == 0
    assert box.rows() == sorted(rows + done)
    box.ask(m.FinishSlots, finished, packed(rows[:2]), session=b"worker")
    assert indexes(box.select().rows) == done + rows[:2]


def test_of_named_rows_only_those_are_cleared_whose_result_nobody_wants() -> None:
    box = GroupBox()
    box.open("x", 4)
    box.claim(4)
    box.ask(m.FailSlots, [m.Attempt("x", 0, 0)], "infra")
    box.claim(1)
    rows = indexes(box.put(6))
    lost = 10**6
    finished = [
        m.FinishedSlot("x", slot, 0, 1.0, None, None, 5, {}, count) for slot, count in ((0, 2), (1, 2), (2, 0), (3, 2))
    ]
    reply = box.ask(m.FinishSlots, finished, packed([*rows[:2], rows[2], lost, *rows[3:5]]), session=b"worker")
    assert [(one.at, one.code) for one in reply.refused] == [(0, StaleAttempt.code), (1, RowCleared.code)]
    assert box.rows() == rows[2:]
    again = box.ask(m.FinishSlots, finished[2:], packed(rows[3:5]), session=b"worker")
    assert again.refused == [], "to say the same twice changes nothing"
    box.finish("x", 1, rows=[rows[2]])
    box.finish("x", 0, 1)
    assert len(indexes(box.select().rows)) == 4


def test_the_results_of_a_batch_seal_all_their_groups_before_who_waits_is_answered() -> None:
    box = GroupBox()
    for name in "xyz":
        box.open(name)
    box.claim()
    assert box.select(1, 9, 60.0, asker="trainer") is None
    box.put_results(*((name, 0, 0, 1) for name in "xyz"))
    assert names(box.told()["trainer"]) == ["x", "y", "z"]


def test_rows_of_a_group_that_may_come_again_are_no_other_result_and_stay_when_one_is_late() -> None:
    box = GroupBox()
    box.ask(m.MarkPool, 0)
    rows = box.made("x")
    box.ask(m.AckGroups, box.select().lease, None, False)
    with pytest.raises(GroupEnded):
        box.finish("x", rows=rows)
    box.open("y")
    box.claim()
    with pytest.raises(InvalidInput, match="is a result of group 'x' already"):
        box.finish("y", rows=rows)
    assert (box.rows(), box.ask(m.ResumePool, 0).groups) == (rows, 1)
    assert names(box.select()) == ["x"]


def test_rows_that_the_user_of_a_group_kept_stay_when_its_result_is_said_again() -> None:
    box = GroupBox()
    rows = box.made("x")
    box.ask(m.AckGroups, box.select().lease, None, False)
    for _ in range(2):
        with pytest.raises(GroupEnded):
            box.finish("x", rows=rows)
        assert box.rows() == rows
        box.controller = reloaded(box).controller
    more = indexes(box.put(1))
    with pytest.raises(GroupEnded):
        box.finish("x", rows=more)  # these are nobody's
    assert box.rows() == rows


@pytest.mark.parametrize("named", [False, True])
def test_tokens_of_results_that_came_too_late_are_counted_as_ones_that_nobody_uses(named: bool) -> None:
    box = GroupBox(GroupPolicy.windowed(0))
    box.open("old", 2, source="math")
    box.open("new", 1, source="code", start=1)
    (first, second, third) = box.claim(3)
    box.ask(m.FailSlots, [m.Attempt(*third)], "infra")
    box.claim(1)
    box.finish(*first)
    box.announce(1)  # it gives up the one with 5 tokens in it
    for late in (second, third):
        if named:
            with pytest.raises((GroupEnded, StaleAttempt)):
                box.finish(*late)
        else:
            box.put_results((*late, 1))
    assert discarded(box) == {"math": 10, "code": 5}
    box.controller = reloaded(box).controller
    box.put_results((*second, 1))
    assert discarded(box) == {"math": 10, "code": 5}


def test_tokens_of_a_result_count_once_however_often_it_is_said() -> None:
    box = GroupBox()
    box.open("used", 1, source="math")
    box.open("lost", 2, source="code")
    used, lost, _ = box.claim(3)
    box.put_results((*used, 1), (*lost, 1))
    box.ask(m.AckGroups, box.select().lease, None, True)
    box.ask(m.FilterGroups, ["lost"])
    box.ask(m.FailSlots, [m.Attempt("lost", 1, 0)], "data")
    box.finish("lost", *box.claim()[0][1:])
    for _ in range(2):
        box.put_results((*used, 1))
        box.put_results((*lost, 1))
    assert discarded(box) == {"math": 0, "code": 10}


def discarded(box: GroupBox) -> dict[str, int]:
    """The tokens that nobody used, by source."""
    return {source: one["discarded_tokens"] for source, one in box.report()["sources"].items()}
