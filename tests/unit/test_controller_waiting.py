"""Waiting in the controller: parked requests, the order they are served in, deadlines, and room for rows."""

from __future__ import annotations

import numpy as np
import pytest
from tables import Box, indexes

from transfer_queue.errors import DeadlineExceeded, InvalidInput, SchemaConflict, ServiceUnavailable, StoreFull
from transfer_queue.sampler import GRPOGroupNSampler, SequentialSampler
from transfer_queue.schema import FieldSchema
from transfer_queue.wire import messages as m


@pytest.fixture
def box() -> Box:
    return Box()


# ---- fetching ----


def test_ready_rows_are_handed_out_once_per_task_and_in_order(box: Box) -> None:
    box.put(4)
    assert box.fetch(3) == [0, 1, 2]
    assert box.fetch(1) == [3]
    assert box.fetch(4, task="other") == [0, 1, 2, 3]


def test_a_row_is_ready_when_its_last_field_is_written(box: Box) -> None:
    box.put(["a", "b"], ["x"])
    box.put(["b"], ["y"])
    assert box.fetch(1, ["x", "y"]) == [1]
    assert box.fetch(2, ["x", "y"], task="u", empty=True) == []
    box.put(["a"], ["y"])
    assert box.fetch(1, ["y", "x"]) == [0]


def test_a_row_consumed_for_one_field_set_is_consumed_for_the_task(box: Box) -> None:
    box.put(2, ["x", "y"])
    assert box.fetch(1, ["x"]) == [0]
    assert box.fetch(1, ["y"]) == [1]
    assert box.fetch(1, ["x", "y"], empty=True) == []


def test_too_few_rows_without_waiting_is_a_deadline_or_an_empty_answer(box: Box) -> None:
    box.put(1)
    with pytest.raises(DeadlineExceeded, match=r"fewer than 2 rows.*'t'"):
        box.fetch(2)
    assert box.fetch(2, empty=True) == []
    assert box.fetch(2, empty=True, partition="q") == []
    assert box.partitions() == ["p"]
    assert box.fetch(1) == [0]


def test_an_overwritten_row_is_not_offered_again(box: Box) -> None:
    box.put(["a"])
    assert box.fetch(1) == [0]
    box.put(["a"])
    assert box.fetch(1, empty=True) == []


def test_reset_offers_every_ready_row_again(box: Box) -> None:
    box.put(2)
    box.fetch(2)
    assert box.fetch(2, wait_s=5, ticket="w") is None
    box.reset("t")
    assert box.answers() == [("w", [0, 1])]


# ---- parking ----


def test_a_waiting_fetch_blocks_nobody_and_is_answered_by_the_put_that_completes_it(box: Box) -> None:
    """T-01."""
    assert box.fetch(3, wait_s=30, ticket="w") is None
    assert box.partitions() == []
    box.put(2)
    assert box.partitions() == ["p"]
    assert box.answers() == []
    box.put(1)
    assert box.answers() == [("w", [0, 1, 2])]
    assert box.controller.num_waiting == 0


def test_waiters_are_served_in_order_of_arrival(box: Box) -> None:
    box.put(1)
    for ticket in "abc":
        assert box.fetch(2, wait_s=30, ticket=ticket) is None
    box.put(4)
    assert box.answers() == [("a", [0, 1]), ("b", [2, 3])]
    box.put(1)
    assert box.answers() == [("c", [4, 5])]


def test_a_small_request_is_served_while_a_large_one_waits(box: Box) -> None:
    box.fetch(8, wait_s=30, ticket="large")
    box.fetch(1, wait_s=30, ticket="small")
    box.put(1)
    assert box.answers() == [("small", [0])]


def test_waiters_for_a_partition_that_does_not_exist_yet(box: Box) -> None:
    for ticket in ("a", "b"):
        box.fetch(1, wait_s=30, ticket=ticket, partition="later")
    box.put(1, partition="other")
    assert box.answers() == []
    box.put(2, partition="later")
    assert box.answers() == [("a", [1]), ("b", [2])]


def test_waiters_of_a_cleared_partition_wait_for_the_next_of_that_name(box: Box) -> None:
    box.put(1)
    box.fetch(2, wait_s=30, ticket="w")
    box.clear()
    box.put(2)
    assert box.answers() == [("w", [1, 2])]


def test_waiters_over_several_tasks_and_field_sets_wake_together(box: Box) -> None:
    box.fetch(1, ["x"], "one", 30, "x")
    box.fetch(1, ["x", "y"], "two", 30, "xy")
    box.fetch(1, ["z"], "one", 30, "z")
    box.put(1, ["x", "y"])
    assert sorted(box.answers()) == [("x", [0]), ("xy", [0])]


def test_a_deadline_answers_the_waiter_and_its_rows_stay(box: Box) -> None:
    box.put(1)
    box.fetch(2, wait_s=3, ticket="raises")
    box.fetch(2, wait_s=5, ticket="empty", empty=True)
    assert box.controller.next_deadline() == 3
    box.expire(2.9)
    assert box.answers() == []
    box.expire(3)
    ((ticket, error),) = box.answers()
    assert ticket == "raises"
    assert isinstance(error, DeadlineExceeded)
    assert box.controller.next_deadline() == 5
    box.expire(9)
    assert box.answers() == [("empty", [])]
    assert box.controller.next_deadline() is None
    box.put(1)
    assert box.fetch(2) == [0, 1]


def test_a_forgotten_waiter_takes_no_rows(box: Box) -> None:
    box.fetch(1, wait_s=30, ticket="gone")
    box.fetch(1, wait_s=30, ticket="here")
    box.forget("gone", "unknown")
    box.put(1)
    assert box.answers() == [("here", [0])]
    assert box.controller.next_deadline() is None


def test_waiters_that_ended_leave_nothing_behind(box: Box) -> None:
    box.put(1, ["other"])
    for n in range(500):
        box.fetch(1, wait_s=1, ticket=n, partition=f"absent-{n % 50}")
        box.fetch(1, wait_s=1, ticket=-n - 1)
        box.forget(n) if n % 2 else None
        box.expire(10.0 * n + 9)
        box.answers()
    fetching = box.controller._fetching
    assert fetching._orphans == {}
    assert sum(len(v.waiters) for t in box.controller.tables["p"].tasks.values() for v in t.views.values()) < 40


def test_rows_cleared_before_they_were_taken_are_not_offered(box: Box) -> None:
    rows = indexes(box.put(3))
    box.fetch(4, wait_s=30, ticket="w")
    box.clear(rows[:1])
    box.put(1)
    assert box.answers() == []
    box.put(1)
    assert box.answers() == [("w", [1, 2, 3, 4])]


def test_ready_rows_behind_a_long_gap_are_found_and_remembered(box: Box) -> None:
    rows = indexes(box.insert(20_000))
    box.fetch(1, empty=True)
    box.put(rows[15_000:15_010])
    assert box.fetch(2) == rows[15_000:15_002]
    view = box.controller.tables["p"].tasks["t"].views["a",]
    assert view.low == 15_000
    box.put(rows[7:8])
    assert box.fetch(2) == [rows[7], rows[15_002]]


def test_many_field_sets_of_a_task_are_forgotten_and_rebuilt(box: Box) -> None:
    names = [f"f{n}" for n in range(300)]
    box.put(300, names)
    assert [box.fetch(1, [name]) for name in names] == [[n] for n in range(300)]
    assert len(box.controller.tables["p"].tasks["t"].views) <= 256
    assert box.fetch(1, ["f0"], empty=True) == []


# ---- groups ----


def test_groups_by_tag_are_complete_and_never_mixed() -> None:
    """T-11."""
    box = Box(GRPOGroupNSampler(2))
    box.put(6, ["x"], tags=[{"group_id": n // 2} for n in range(6)])
    box.put([1, 2, 3, 4], ["y"])
    assert box.fetch(2, ["y"]) == [2, 3]
    assert box.fetch(2, ["y"], empty=True) == []


def test_a_group_wakes_its_waiter_when_its_last_row_is_ready() -> None:
    box = Box(GRPOGroupNSampler(2))
    box.fetch(2, wait_s=30, ticket="w")
    box.put(1, tags=[{"group_id": "g"}])
    box.put(1, tags=[{"group_id": "h"}])
    assert box.answers() == []
    box.put(1, tags=[{"group_id": "g"}])
    assert box.answers() == [("w", [0, 2])]


def test_ranks_that_ask_for_one_batch_get_the_same_rows() -> None:
    box = Box(GRPOGroupNSampler(2))
    box.put(6)
    first = box.fetch(2, dp_rank=0, batch_index=0)
    assert box.fetch(2, dp_rank=0, batch_index=0) == first
    assert box.fetch(2, dp_rank=0, batch_index=1) != first


def test_a_remembered_batch_belongs_to_its_partition_and_task() -> None:
    """T-13."""
    box = Box(GRPOGroupNSampler(2))
    box.put(2)
    box.put(2, ["b"], partition="q")
    assert box.fetch(2, dp_rank=0, batch_index=0) == [0, 1]
    assert box.fetch(2, ["b"], "other", partition="q", dp_rank=0, batch_index=0) == [2, 3]
    assert box.fetch(2, ["b"], "t", partition="q", dp_rank=0, batch_index=0) == [2, 3]


def test_a_remembered_batch_does_not_outlive_its_rows() -> None:
    """T-10."""
    box = Box(GRPOGroupNSampler(2))
    rows = indexes(box.put(4))
    assert box.fetch(2, dp_rank=0, batch_index=0) == rows[:2]
    box.clear(rows[:1])
    assert box.fetch(2, dp_rank=0, batch_index=0) == rows[2:]
    box.clear()
    fresh = indexes(box.put(2))
    assert box.fetch(2, dp_rank=0, batch_index=0) == fresh


def test_a_size_that_is_no_multiple_of_the_group_is_refused() -> None:
    box = Box(GRPOGroupNSampler(2))
    box.put(4)
    with pytest.raises(InvalidInput, match="multiple"):
        box.fetch(3, wait_s=9)
    assert box.controller.num_waiting == 0


# ---- room for rows ----


def test_a_put_beyond_the_row_budget_waits_for_a_clear() -> None:
    box = Box(max_rows=4)
    rows = indexes(box.put(3))
    assert box.put(2, timeout_s=9, ticket="w") is None
    assert box.scan(["a"]) == dict.fromkeys(rows, 1)
    box.clear(rows[:1])
    assert box.answers() == [("w", [3, 4])]
    assert box.controller.num_rows == 4


def test_a_put_that_waited_too_long_is_store_full_and_leaves_nothing() -> None:
    box = Box(max_rows=2)
    box.put(2)
    box.put(["k"], tags=[{"a": 1}], timeout_s=9, ticket="w", partition="q")
    box.insert(1, timeout_s=8, ticket="i")
    assert box.controller.next_deadline() == 8
    box.expire(9)
    assert [(ticket, type(error)) for ticket, error in box.answers()] == [("i", StoreFull), ("w", StoreFull)]
    assert box.partitions() == ["p"]
    with pytest.raises(StoreFull):
        box.put(1)


def test_a_put_that_waits_fails_when_its_unit_gave_its_block_up() -> None:
    box = Box(max_rows=1)
    rows = indexes(box.put(1))
    block = max(box.controller.block_index.entries) + 1
    for ticket in ("gone", "stays"):
        box.put(1, timeout_s=9, ticket=ticket, partition="q")
    box.controller.refuse_commits(np.array([block, 4711]))
    assert [(ticket, type(error)) for ticket, error in box.answers()] == [("gone", ServiceUnavailable)]
    box.clear(rows)
    assert [ticket for ticket, _ in box.answers()] == ["stays"]


def test_overwriting_needs_no_room() -> None:
    box = Box(max_rows=1)
    box.put(["a"])
    assert indexes(box.put(["a"], ["b"])) == [0]


def test_waiting_puts_are_served_in_order_as_far_as_there_is_room() -> None:
    box = Box(max_rows=4)
    rows = indexes(box.put(4))
    for ticket, count in (("one", 1), ("three", 3), ("two", 2)):
        box.put(count, timeout_s=9, ticket=ticket)
    box.clear(rows[:2])
    assert [ticket for ticket, _ in box.answers()] == ["one"]
    box.clear(rows[2:])
    assert [ticket for ticket, _ in box.answers()] == ["three"]
    box.forget("two")
    box.clear()
    assert box.answers() == []


def test_a_waiting_put_that_no_longer_fits_the_schema_is_refused_when_its_turn_comes() -> None:
    box = Box(max_rows=2)
    box.put(["a", "b"], ["x"])
    box.put(["c"], ["y"], timeout_s=9, ticket="w", strict=True)
    box.put(["a"], ["y"])
    table = box.controller.tables["p"]
    table.fields["y"] = table.fields["y"]._replace(schema=FieldSchema("y", "dense", "int64", (2,)))
    box.clear(["b"])
    ((ticket, error),) = box.answers()
    assert ticket == "w"
    assert isinstance(error, SchemaConflict)


def test_a_put_that_waits_fails_when_its_unit_gave_a_block_of_shared_cells_up() -> None:
    box = Box(max_rows=1)
    rows = indexes(box.put(1))
    shared = m.SharedCells(FieldSchema("y", "dense", "uint8", ()), 4711, bytes(8), bytes(8), True, b"", bytes(16))
    message = m.Commit(99, "q", 1, None, None, [], -1, b"", None, 9.0, shared=[shared])
    assert box.controller.handle(message, "w", b"session", 0.0) is None
    box.controller.refuse_commits(np.array([4711]))
    assert [(ticket, type(error)) for ticket, error in box.answers()] == [("w", ServiceUnavailable)]
    box.clear(rows)
    assert box.answers() == []


class Forgetful(SequentialSampler):
    """Fails in what subclasses are told to extend."""

    def clear_cache(self, partition_id: str) -> None:
        raise KeyError(partition_id)

    def forget(self, partition_id: str, indexes: set[int]) -> None:
        raise KeyError(partition_id)


@pytest.mark.parametrize("whole", [True, False])
def test_rows_are_cleared_whatever_the_sampler_makes_of_it(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    box = Box(sampler=Forgetful())
    rows = indexes(box.put(2))
    box.clear(None if whole else rows)
    assert not box.controller.block_index.entries
    assert "Forgetful failed" in caplog.text
    with pytest.raises(DeadlineExceeded):
        box.fetch(1)
