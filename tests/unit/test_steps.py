"""Steps of a training loop: what was taken for each, and going back to one."""

from __future__ import annotations

from typing import Any

import pytest
from tables import Box, indexes, reloaded

from transfer_queue.controller import taken
from transfer_queue.errors import DeadlineExceeded, InvalidInput, LeaseExpired
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of


def filled(rows: int, **more: Any) -> tuple[Box, list[int]]:
    """A box whose task t has marked step 0."""
    box = Box(**more)
    found = indexes(box.put(rows))
    box.mark(0, ["t"])
    return box, found


# what a task took


def test_rows_that_were_lent_again_after_a_restart_are_in_one_batch() -> None:
    box, rows = filled(4)
    box.lend(2)
    box = reloaded(box)  # whoever had them is gone
    box.ack(box.lend(2)[0])
    box = reloaded(box)
    box.mark(1)
    assert box.taken(1) == [rows[:2]]
    assert box.resume(0) == (1, 2, 0)


def test_a_step_has_the_batches_of_its_task_in_order() -> None:
    box, rows = filled(8)
    first, second = box.fetch(2), box.fetch(3)
    box.fetch(4, task="u")
    box.mark(1, ["t"])
    third = box.fetch(1)
    box.mark(2, ["t"])
    assert (box.taken(1), box.taken(2), box.taken(0)) == ([first, second], [third], [])
    assert rows[:6] == [*first, *second, *third]


def test_nothing_is_noted_before_the_first_mark() -> None:
    box = Box()
    box.put(2)
    box.fetch(1)
    with pytest.raises(InvalidInput, match="no marks"):
        box.taken(None)
    box.mark(5)
    assert box.taken(5) == []
    with pytest.raises(InvalidInput, match="name a task"):
        box.mark(6, [])


def test_a_mark_is_for_the_tasks_that_are_named() -> None:
    box = Box()
    box.put(2)
    box.mark(0, ["t", "u"])
    taken = box.fetch(1), box.fetch(1, task="u")
    box.mark(1, ["t", "u"])
    assert (box.taken(1), box.taken(1, "u")) == ([taken[0]], [taken[1]])


def test_rows_still_on_lease_belong_to_the_next_step() -> None:
    box, rows = filled(4)
    lease, _ = box.lend(4)
    box.ack(lease, rows[:1])
    box.mark(1)
    assert box.taken(1) == [rows[:1]]
    box.ack(lease)
    box.mark(2)
    assert box.taken(2) == [rows[1:]]


def test_what_is_acknowledged_with_the_mark_belongs_to_its_step() -> None:
    box, rows = filled(4)
    one, two = box.lend(2)[0], box.lend(2)[0]
    box.mark(1, used=[(one, None), (two, rows[2:3])])
    assert box.taken(1) == [rows[:2], rows[2:3]]
    assert box.ack(two) == 0


def test_a_mark_with_a_lease_that_is_over_changes_nothing() -> None:
    box, _ = filled(4)
    one, two = box.lend(2, 100.0)[0], box.lend(2, 5.0)[0]
    box.expire(5.0)
    with pytest.raises(LeaseExpired):
        box.mark(1, used=[(one, None), (two, None)])
    assert box.ack(one) == 0, "it was not acknowledged"
    with pytest.raises(InvalidInput, match=r"marks of \[0\]"):
        box.taken(1)


def test_rows_that_came_back_belong_to_whoever_used_them() -> None:
    box, rows = filled(2)
    lease, _ = box.lend(2)
    box.release(lease, rows[:1])
    again, _ = box.lend(1)
    box.ack(lease)
    box.ack(again)
    box.mark(1)
    assert box.taken(1) == [rows[1:], rows[:1]]


def test_dead_letters_were_not_used() -> None:
    box, rows = filled(2, max_deliver=1)
    lease, _ = box.lend(2)
    box.nack(lease, rows[:1])
    box.ack(lease)
    box.mark(1)
    assert box.taken(1) == [rows[1:]]


def test_an_answer_that_nobody_received_was_not_taken() -> None:
    box, rows = filled(2)
    box.fetch(2, received=False)
    box.controller.take_back(b"session", 1)
    assert box.fetch(2) == rows
    box.mark(1)
    assert box.taken(1) == [rows]


def test_an_answer_that_nobody_received_was_not_taken_for_a_step_that_was_marked_since() -> None:
    box, rows = filled(4)
    box.fetch(2, rid=7, received=False)
    box.mark(1)
    box.controller.take_back(b"session", 7)
    assert box.taken(1) == []
    assert box.fetch(2) == rows[:2]
    box.mark(2)
    assert box.resume(0) == (1, 2, 0)


def test_the_newest_step_may_be_marked_again_and_no_earlier_one() -> None:
    box, rows = filled(3)
    box.fetch(1)
    box.mark(1)
    box.fetch(1)
    box.mark(1)
    assert box.taken(1) == [rows[:1], rows[1:2]]
    with pytest.raises(InvalidInput, match="resume"):
        box.mark(0)


def test_the_oldest_steps_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken, "MAX_STEPS", 2)
    box, _ = filled(1)
    for step in range(1, 5):
        box.mark(step)
    with pytest.raises(InvalidInput, match=r"marks of \[3, 4\]"):
        box.taken(2)


def test_a_step_of_many_rows_pushes_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken, "MAX_ROWS", 3)
    box, _ = filled(6)
    for step in range(1, 4):
        box.fetch(2)
        box.mark(step)
    with pytest.raises(InvalidInput, match=r"marks of \[3\]"):
        box.resume(1, ["t"])


def test_what_was_written_anew_since_it_was_taken_is_said() -> None:
    box = Box()
    rows = indexes(box.put(4, ["a", "b"], [{"v": 1}] * 4))
    box.put(rows[:1], ["a"])
    box.mark(0)
    box.put(rows[:2], ["a"])
    box.fetch(3)
    box.put([rows[0], rows[3]], ["b", "c"])
    box.tag(rows, [{"v": 1}, {"v": 1}, {"v": 2}, {"v": 3}])
    box.mark(1)
    assert changed(box) == ({}, [rows[2]])  # it did not ask for b
    box.put(rows[1:3], ["a"])
    box.put(1, ["a"])
    for one in (box, reloaded(box)):
        assert changed(one) == ({"a": rows[1:3]}, [rows[2]])
    box.resume(0)
    box.fetch(3)
    box.mark(1)
    assert changed(box) == ({}, [])


def test_a_cell_that_was_lost_and_written_again_is_another_one() -> None:
    box, rows = filled(2)
    box.fetch(2)
    box.mark(1)
    box.controller.lose(box.unit)
    box.put(rows, ["a"])
    assert changed(box) == ({"a": rows}, [])


def changed(box: Box, step: int = 1) -> tuple[dict[str, list[int]], list[int]]:
    """(rows by field, rows with other tags) of the only batch of a step."""
    (batch,) = box.handle(m.GetStep(1, "t", step)).batches
    cells = {name: numbers_of(rows).tolist() for name, rows in batch.rewritten.items()}
    return cells, numbers_of(batch.retagged).tolist()


# going back


def test_the_batches_since_are_handed_out_once_more_as_they_were() -> None:
    box, rows = filled(8)
    box.fetch(2)
    box.mark(1)
    later = [box.fetch(3), box.fetch(2)]
    box.mark(2)
    assert box.resume(1) == (2, 5, 0)
    newer = indexes(box.put(1))
    assert [box.fetch(3), box.fetch(2)] == later
    assert box.fetch(2) == [*rows[7:], *newer]


def test_order_is_that_of_before_and_not_that_of_the_table() -> None:
    box = Box()
    rows = indexes(box.insert(4))
    box.mark(0, ["t"])
    box.put(rows[2:])
    first = box.fetch(2)
    box.put(rows[:2])
    second = box.fetch(2)
    box.resume(0)
    assert [box.fetch(2), box.fetch(2)] == [first, second] == [rows[2:], rows[:2]]


def test_a_loop_that_died_in_the_middle_of_a_batch_gets_it_again() -> None:
    box, rows = filled(4)
    box.lend(2, session=b"dead")
    lease, _ = box.lend(2, session=b"dead")
    box.ack(lease, rows[2:3])
    assert box.resume(0) == (2, 4, 0)
    assert box.taken(None) == []
    assert [box.lend(2)[1], box.lend(2)[1]] == [rows[:2], rows[2:]]
    with pytest.raises(LeaseExpired):
        box.ack(lease)


def test_what_others_wait_for_is_not_what_is_kept_for_the_loop() -> None:
    box, rows = filled(4)
    box.fetch(4)
    assert box.fetch(2, wait_s=60, ticket="small") is None
    assert box.resume(0) == (1, 4, 0)
    assert box.answers() == [("small", rows[:2])], "a loop with other batches is another one: all rows are on offer"
    assert box.fetch(2) == rows[2:]


def test_who_waits_for_such_a_batch_gets_it() -> None:
    box, rows = filled(2)
    box.fetch(2)
    assert box.fetch(2, wait_s=60, ticket="next") is None
    box.resume(0)
    assert box.answers() == [("next", rows)]


def test_batches_of_cleared_rows_are_lost_and_the_rest_of_them_is_on_offer() -> None:
    box, rows = filled(6)
    box.fetch(3)
    box.fetch(3)
    box.clear(rows[:1])
    assert box.resume(0) == (1, 3, 1)
    assert box.fetch(3) == rows[3:]
    assert box.fetch(2) == rows[1:3]


def test_rows_that_are_cleared_after_going_back_free_the_others() -> None:
    box, rows = filled(4)
    box.fetch(2)
    box.fetch(2)
    box.resume(0)
    box.clear(rows[:1])
    assert box.fetch(2) == rows[2:]
    assert box.fetch(1) == rows[1:2]


def test_partitions_that_are_gone_are_counted_as_lost() -> None:
    box, _ = filled(2)
    box.fetch(2)
    box.clear()
    assert box.resume(0) == (0, 0, 1)
    new = indexes(box.put(2))
    assert box.fetch(2) == new


def test_partitions_whose_name_another_one_has_are_counted_as_lost() -> None:
    box, _ = filled(2)
    box.fetch(2)
    box.clear()
    box.put(2)
    assert box.resume(0) == (0, 0, 1)


def test_a_partition_of_the_same_name_has_other_rows() -> None:
    box, _ = filled(2)
    box.fetch(2)
    box.resume(0)
    box.clear()
    new = indexes(box.put(2))
    assert box.fetch(2) == new


def test_batches_that_came_back_when_the_loop_died_are_those_of_before() -> None:
    box = Box()
    rows = indexes(box.insert(6))
    box.mark(0, ["t"])
    box.put(rows[3:])
    lent = box.lend(2, session=b"dead")[1]
    box.end_session(b"dead")
    box.put(rows[:3])
    assert box.resume(0) == (1, 2, 0)
    assert box.lend(2)[1] == lent == rows[3:5]


def test_a_row_that_waits_for_its_delay_comes_with_its_batch() -> None:
    box, rows = filled(2)
    box.nack(box.lend(2)[0], delay_s=60.0)
    box.resume(0)
    assert box.lend(2)[1] == rows
    box.expire(5.0)
    box.expire(100.0)
    assert box.lend(2)[1] == rows


def test_dead_letters_stay_dead() -> None:
    box, rows = filled(2, max_deliver=1)
    lease, _ = box.lend(2)
    box.nack(lease, rows[:1])
    box.ack(lease)
    assert box.resume(0) == (1, 1, 0)
    assert list(box.dead_letters()) == rows[:1]


def test_a_loop_may_go_back_twice() -> None:
    box, rows = filled(4)
    taken = [box.fetch(2), box.fetch(2)]
    box.mark(1)
    for _ in range(2):
        assert box.resume(0) == (2, 4, 0)
        assert box.fetch(2) == taken[0]
    box.mark(1)
    assert box.taken(1) == taken[:1]
    assert box.fetch(2) == rows[2:]


def test_steps_after_the_one_that_was_gone_back_to_are_no_more() -> None:
    box, _ = filled(2)
    box.mark(1)
    box.mark(2)
    box.resume(1)
    with pytest.raises(InvalidInput, match=r"marks of \[0, 1\]"):
        box.resume(2, ["t"])
    box.mark(2)


def test_only_the_tasks_that_are_named_go_back() -> None:
    box, rows = filled(2)
    box.mark(0, ["u"])
    box.fetch(2)
    box.fetch(2, task="u")
    box.resume(0, ["u"])
    assert box.fetch(2, task="u") == rows
    with pytest.raises(DeadlineExceeded):
        box.fetch(1)


def test_ranks_without_a_number_of_them_get_all_rows_again() -> None:
    box, rows = filled(8, sampler=RankAwareSampler())
    for batch in range(2):
        for rank in range(2):
            box.lend(2, dp_rank=rank, batch_index=batch)
    box.resume(0)
    again = [row for batch in range(4) for row in box.lend(2, dp_rank=0, batch_index=batch)[1]]
    assert sorted(again) == rows


def test_shares_that_were_dealt_are_handed_out_again() -> None:
    box, rows = filled(8)
    taken = {rank: box.lend(2, dp_rank=rank, dp_size=2, batch_index=0)[1] for rank in range(2)}
    box.mark(1)
    assert box.resume(0)[:2] == (2, 4)
    for rank in (1, 0):
        assert box.lend(2, dp_rank=rank, dp_size=2, batch_index=0)[1] == taken[rank]
    more = [row for rank in range(2) for row in box.lend(2, dp_rank=rank, dp_size=2, batch_index=1)[1]]
    assert sorted(more) == rows[4:]


def test_a_sampler_forgets_what_it_remembered_of_the_rows() -> None:
    box = Box(GRPOGroupNSampler(n_samples_per_prompt=2))
    rows = indexes(box.put(8))
    box.mark(0, ["t"])
    taken = [box.fetch(4, batch_index=number, dp_rank=0) for number in range(2)]
    box.resume(0)
    assert [box.fetch(4, batch_index=number, dp_rank=0) for number in range(2)] == taken
    assert sorted([*taken[0], *taken[1]]) == rows


def test_rows_are_not_too_old_for_a_loop_that_went_back() -> None:
    box = Box()
    box.announce(1)
    rows = box.made_by(1, 2)
    box.mark(0, ["t"])
    assert box.fetch(2, max_staleness=0) == rows
    box.announce(2)
    box.resume(0)
    assert box.fetch(2, max_staleness=0) == rows


def test_a_reset_begins_anew_and_ends_the_marks() -> None:
    box, rows = filled(4)
    box.fetch(2)
    box.resume(0)
    box.reset()
    assert box.fetch(4) == rows
    with pytest.raises(InvalidInput, match="no marks"):
        box.resume(0)


def test_a_stream_is_not_over_while_batches_are_to_come_once_more() -> None:
    box, rows = filled(2)
    box.controller.tables["p"].declared = 2
    lease, _ = box.lend(2)
    box.ack(lease)
    box.resume(0)
    assert box.lend(2, until_done=True)[1] == rows


# checkpoints


def test_a_loaded_checkpoint_has_the_steps() -> None:
    box, rows = filled(8)
    first = box.fetch(2)
    box.mark(1)
    open_ = box.fetch(3)
    fresh = reloaded(box)
    assert (fresh.taken(1), fresh.taken(None)) == ([first], [open_])
    fresh.resume(0)
    assert [fresh.fetch(2), fresh.fetch(3), fresh.fetch(3)] == [first, open_, rows[5:]]


def test_a_loaded_checkpoint_hands_out_once_more_what_was_to_be() -> None:
    box, rows = filled(6)
    batches = [box.fetch(2), box.fetch(2)]
    box.resume(0)
    assert box.lend(2)[1] == batches[0], "it was handed out, and is not used yet"
    fresh = reloaded(box)
    assert [fresh.fetch(2), fresh.fetch(2), fresh.fetch(2)] == [*batches, rows[4:]]
    fresh.controller.check_invariants()


def test_rows_that_were_on_lease_in_a_checkpoint_are_of_no_step() -> None:
    box, rows = filled(3)
    lease, _ = box.lend(2)
    box.ack(lease, rows[:1])
    fresh = reloaded(box)
    other, lent = fresh.lend(2)
    assert lent == rows[1:]
    fresh.ack(other)
    fresh.mark(1)
    assert fresh.taken(1) == [rows[:1], rows[1:]]


def test_a_loop_without_ranks_gets_what_ranks_had() -> None:
    box, rows = filled(4)
    box.fetch(2, dp_rank=0)
    box.fetch(2, dp_rank=1)
    box.resume(0)
    assert [box.fetch(2), box.fetch(2)] == [rows[:2], rows[2:]]


def test_a_dead_letter_of_an_earlier_step_stays_one() -> None:
    box = Box(max_deliver=1)
    rows = indexes(box.put(2))
    box.mark(0)
    box.fetch(2)
    box.mark(1)
    box.resume(0)
    box.fetch(2)
    box.mark(1)
    box.resume(0)
    lease, _ = box.lend(2)
    box.nack(lease)
    assert sorted(box.dead_letters()) == rows
    box.resume(0)
    assert sorted(box.dead_letters()) == rows
    with pytest.raises(DeadlineExceeded):
        box.fetch(1)


def test_a_batch_whose_answer_nobody_received_comes_again() -> None:
    box = Box()
    rows = indexes(box.insert(4))
    box.mark(0)
    box.put(rows[2:])
    box.fetch(2)
    box.put(rows[:2])
    box.fetch(2)
    box.resume(0)
    box.fetch(2, received=False)
    box.controller.take_back(b"session", 1)
    box.lend(2, session=b"dead")
    box.end_session(b"dead")
    assert [box.fetch(2), box.fetch(2)] == [rows[2:], rows[:2]]


def test_waiters_of_several_kinds_are_all_looked_at() -> None:
    box, rows = filled(4)
    box.fetch(2, dp_rank=0)
    box.fetch(2, dp_rank=0)
    assert box.fetch(2, wait_s=60, ticket="A") is None
    assert box.fetch(1, wait_s=60, ticket="B") is None
    box.resume(0)
    assert dict(box.answers()) == {"A": rows[:2], "B": rows[2:3]}


def test_a_waiter_for_a_field_that_nobody_wrote_harms_nobody() -> None:
    box, rows = filled(4)
    with pytest.raises(DeadlineExceeded):
        box.fetch(1, ["b"])
    box.fetch(2)
    box.fetch(2)
    assert box.fetch(2, ["b"], wait_s=60, ticket="b") is None
    assert box.fetch(2, wait_s=60, ticket="a") is None
    box.resume(0)
    assert len(box.answers()) == 1
    assert box.fetch(2) in (rows[:2], rows[2:])


def test_a_task_that_never_marks_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken, "MAX_ROWS", 10)
    box, _ = filled(20)
    for _ in range(10):
        box.fetch(2)
    with pytest.raises(InvalidInput, match="no marks"):
        box.resume(0)


def test_attempts_are_forgotten_once_a_row_was_used() -> None:
    box, rows = filled(1, max_deliver=2)
    box.nack(box.lend(1)[0])
    box.ack(box.lend(1)[0])
    box.resume(0)
    box.nack(box.lend(1)[0])
    assert box.lend(1)[1] == rows


def test_a_reset_of_one_partition_offers_what_was_kept_in_others() -> None:
    box = Box()
    box.mark(0)
    found = {name: indexes(box.put(4, partition=name)) for name in ("p", "q")}
    for name in found:
        box.fetch(4, partition=name)
    box.resume(0)
    box.reset("t")
    assert {name: box.fetch(4, partition=name) for name in found} == found
