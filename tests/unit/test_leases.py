"""Leases: rows are lent until they are acknowledged, given back, cleared, or their time or their holder is gone."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from tables import Box, indexes, packed, reloaded

from transfer_queue.controller import leases
from transfer_queue.errors import DeadlineExceeded, InvalidInput, LeaseExpired
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.wire import messages as m


def filled(rows: int, sampler: Any = None, **more: Any) -> tuple[Box, list[int]]:
    box = Box(sampler, **more)
    return box, indexes(box.put(rows))


# the controller, on a virtual clock


def test_lent_rows_are_offered_to_nobody_and_not_consumed() -> None:
    box, rows = filled(4)
    lease, lent = box.lend(3)
    assert lent == rows[:3]
    assert lease > 0
    with pytest.raises(DeadlineExceeded):
        box.fetch(2)
    assert box.fetch(4, task="u") == rows, "another task is not concerned"
    assert box.consumed() == dict.fromkeys(rows, 0)


def test_an_ack_consumes_and_a_second_one_changes_nothing() -> None:
    box, rows = filled(2)
    lease, _ = box.lend(2)
    assert box.ack(lease) == 0
    assert box.consumed() == dict.fromkeys(rows, 1)
    assert box.ack(lease, rows) == 0
    box.expire(100.0)
    assert box.consumed() == dict.fromkeys(rows, 1)


def test_a_partial_ack_leaves_the_rest_on_the_lease() -> None:
    box, rows = filled(4)
    lease, _ = box.lend(4)
    assert box.ack(lease, rows[:1]) == 3
    box.expire(10.0)
    assert box.fetch(3) == rows[1:]


def test_a_lease_lasts_longer_by_the_time_in_which_nobody_was_heard() -> None:
    box, rows = filled(2)
    lease, _ = box.lend(2)
    box.controller.postpone(5.0)
    box.expire(14.9)
    assert box.renew(lease, 0.0) == 2
    box.expire(15.0)
    assert box.fetch(2) == rows


def test_an_expired_lease_is_refused_and_its_rows_wake_who_waits() -> None:
    box, rows = filled(2)
    lease, _ = box.lend(2)
    assert box.fetch(2, wait_s=60, ticket="next") is None
    assert box.controller.next_deadline() == 10.0
    box.expire(9.9)
    assert box.answers() == []
    box.expire(10.0)
    assert box.answers() == [("next", rows)]
    for call in (box.ack, box.renew, box.release):
        with pytest.raises(LeaseExpired):
            call(lease)
    assert box.consumed() == dict.fromkeys(rows, 1), "by the second consumer"


def test_a_lease_is_over_at_its_deadline_even_before_its_rows_are_offered() -> None:
    box, _ = filled(1)
    lease, _ = box.lend(1)
    box.now = 10.0
    with pytest.raises(LeaseExpired):
        box.ack(lease)


def test_renewing_extends_and_never_shortens() -> None:
    box, rows = filled(1)
    lease, _ = box.lend(1, 10.0)
    box.now = 5.0
    assert box.renew(lease, 10.0) == 1
    assert box.renew(lease, 1.0) == 1
    box.expire(14.9)
    assert box.renew(lease, 0.0) == 1
    box.expire(15.0)
    assert box.fetch(1) == rows


def test_a_session_renews_all_it_holds_at_once() -> None:
    box, rows = filled(6)
    for session in (b"one", b"one", b"two"):
        box.lend(2, session=session)
    box.now = 9.0
    assert box.renew(0, 10.0, b"one") == 4
    box.expire(10.0)
    assert box.fetch(2) == rows[4:]
    assert box.renew(0, 10.0, b"nobody") == 0


def test_the_memory_of_settled_leases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "REMEMBERED", 2)
    box, _ = filled(3)
    numbers = [box.lend(1)[0] for _ in range(3)]
    for number in numbers:
        box.ack(number)
    assert [box.ack(number) for number in numbers[1:]] == [0, 0]
    with pytest.raises(LeaseExpired):
        box.ack(numbers[0])


def test_rows_that_are_given_back_are_offered_at_once_and_not_acknowledged_later() -> None:
    box, rows = filled(3)
    lease, _ = box.lend(3)
    assert box.release(lease, rows[:1]) == 2
    again, lent = box.lend(1)
    assert (lent, again != lease) == (rows[:1], True)
    with pytest.raises(LeaseExpired):
        box.ack(lease, rows)
    assert box.consumed() == dict.fromkeys(rows, 0), "a refused ack changes nothing"
    assert box.ack(lease, rows[1:]) == 0
    assert box.ack(again) == 0


def test_an_ack_may_leave_out_what_was_given_back() -> None:
    box, rows = filled(4)
    lease, _ = box.lend(4)
    box.nack(lease, rows[:1])
    box.release(lease, rows[1:2])
    again, _ = box.lend(1)
    assert box.handle(m.Ack(1, lease, packed(rows), but_returned=True)).rows == 0
    assert box.consumed() == {rows[0]: 0, rows[1]: 0, rows[2]: 1, rows[3]: 1}
    assert box.ack(again) == 0, "what somebody else has of it is theirs"
    other, _ = box.lend(1)
    box.expire(100.0)
    with pytest.raises(LeaseExpired):
        box.handle(m.Ack(1, other, packed(rows[1:2]), but_returned=True))


def test_the_end_of_a_session_returns_what_only_it_holds() -> None:
    box, rows = filled(4)
    one, _ = box.lend(2, session=b"one")
    box.lend(2, session=b"two")
    assert box.fetch(2, wait_s=60, ticket="next") is None
    box.end_session(b"one")
    assert box.answers() == [("next", rows[:2])]
    with pytest.raises(LeaseExpired):
        box.ack(one)


def test_a_lease_may_be_held_for_another_session() -> None:
    box, rows = filled(2)
    lease, _ = box.lend(1, session=b"worker", holder=b"parent")
    assert box.lend(9, session=b"worker", holder=b"parent", wait_s=60, ticket="parked") is None
    box.end_session(b"worker")
    assert box.renew(lease) == 1
    box.end_session(b"parent")
    ((ticket, error),) = box.answers()
    assert ticket == "parked"
    assert isinstance(error, LeaseExpired)
    assert box.fetch(2) == rows


def test_ranks_that_share_a_batch_share_its_lease() -> None:
    box, rows = filled(4, GRPOGroupNSampler(2))
    terms = {"dp_rank": 0, "batch_index": 0}
    lease, lent = box.lend(2, 10.0, session=b"one", **terms)
    box.now = 5.0
    assert box.lend(2, 10.0, session=b"two", **terms) == (lease, lent)
    assert lent == rows[:2]
    box.end_session(b"one")
    box.expire(14.0)
    assert box.ack(lease, lent) == 0, "renewed by the second fetch, and held by the second session"
    assert box.ack(lease, lent) == 0, "each rank acknowledges"
    assert box.lend(2, **terms) == (0, lent), "a replay of consumed rows lends nothing"


def test_who_never_got_the_answer_holds_no_shared_lease() -> None:
    box, rows = filled(2, GRPOGroupNSampler(2))
    terms = {"dp_rank": 0, "batch_index": 0}
    lease, _ = box.lend(2, 1000.0, session=b"one", **terms)
    box.lend(2, 1000.0, session=b"two", received=False, **terms)
    box.controller.take_back(b"two", 1)
    assert box.renew(lease, session=b"one") == 2
    box.end_session(b"one")
    assert box.fetch(2) == rows


def test_of_two_answers_on_one_lease_the_one_that_was_received_keeps_it() -> None:
    box, rows = filled(2, GRPOGroupNSampler(2))
    terms = {"dp_rank": 0, "batch_index": 0}
    lease, _ = box.lend(2, **terms)
    box.lend(2, received=False, **terms)
    box.controller.take_back(b"session", 1)
    assert box.ack(lease, rows) == 0


def test_a_sampler_forgets_what_came_back_for_that_task_only() -> None:
    box, rows = filled(4, GRPOGroupNSampler(2))
    terms = {"dp_rank": 0, "batch_index": 0}
    for task in ("t", "u"):
        box.lend(2, task=task, lease_s=10.0 if task == "t" else 90.0, **terms)
    box.expire(10.0)
    assert box.lend(2, dp_rank=1, batch_index=0)[1] == rows[:2]
    assert box.lend(2, **terms)[1] == rows[2:]
    assert box.lend(2, task="u", **terms)[1] == rows[:2]


def test_rows_cleared_while_lent_are_ignored_by_the_ack() -> None:
    box, rows = filled(3)
    lease, _ = box.lend(3)
    box.clear(rows[:1])
    assert box.renew(lease) == 2
    box.clear()
    assert box.renew(lease) == 0
    box.put(3)
    assert box.ack(lease, rows) == 0
    box.expire(100.0)
    assert set(box.consumed().values()) == {0}


def test_resetting_consumption_ends_the_leases_of_the_task() -> None:
    box, rows = filled(2)
    lease, _ = box.lend(2)
    other, _ = box.lend(2, task="u")
    box.reset("t")
    with pytest.raises(LeaseExpired):
        box.ack(lease)
    assert box.fetch(2) == rows
    assert box.ack(other) == 0


def test_a_lease_survives_the_compaction_of_its_table() -> None:
    box, rows = filled(10_000)
    lease, lent = box.lend(10)
    box.clear(rows[10:9_000])
    assert box.ack(lease) == 0
    assert [row for row, used in box.consumed().items() if used] == lent


def test_lease_times_are_checked() -> None:
    box, _ = filled(1)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput):
            box.lend(1, bad)
    lease, _ = box.lend(1)
    with pytest.raises(InvalidInput):
        box.renew(lease, -1.0)


# until_done


def test_a_request_until_done_is_answered_when_the_last_row_is_acknowledged() -> None:
    box, _ = filled(2)
    lease, _ = box.lend(2, session=b"one")
    assert box.lend(2, session=b"two", until_done=True, wait_s=60, ticket="end") is None
    box.ack(lease)
    assert box.answers() == [("end", [])]
    assert box.lend(2, until_done=True) == (m.DONE, [])


def test_rows_lent_to_the_asker_itself_are_nothing_to_wait_for() -> None:
    box, rows = filled(2)
    box.lend(2, session=b"one")
    assert box.lend(2, session=b"one", until_done=True, wait_s=60) == (m.DONE, [])
    assert box.lend(2, session=b"two", until_done=True, wait_s=60, ticket="two") is None
    box.end_session(b"one")
    ((ticket, got),) = box.answers()
    assert (ticket, got) == ("two", rows)


def test_a_declared_size_keeps_requests_waiting() -> None:
    box = Box()
    box.handle(m.SetPartition(1, "p", 4, {}))
    box.put(2)
    lease, _ = box.lend(2)
    assert box.lend(2, until_done=True, wait_s=60, ticket="end") is None
    box.ack(lease)
    assert box.answers() == []
    box.handle(m.SetPartition(1, "p", 2, {}))
    assert box.answers() == [("end", [])]


def test_clearing_the_last_unread_rows_ends_the_wait() -> None:
    box, rows = filled(3)
    box.fetch(2)
    assert box.lend(2, until_done=True, wait_s=60, ticket="end") is None
    box.clear(rows[2:])
    assert box.answers() == [("end", [])]


# metadata


def test_parts_of_a_meta_share_its_lease_and_joined_ones_keep_a_common_one() -> None:
    meta = BatchMeta([1, 2, 3, 4], ["p"] * 4)
    meta.lease = 7
    other = BatchMeta([5], ["p"])
    parts = [meta[:2], *meta.chunk(2), meta.select_samples([0]), meta.select_fields([]), meta.copy(), meta[0]]
    assert {part.lease for part in [*parts, pickle.loads(pickle.dumps(meta))]} == {7}  # noqa: S301
    assert BatchMeta.concat([meta, other]).lease == 7
    assert meta.union(meta.copy()).lease == 7
    other.lease = 8
    assert BatchMeta.concat([meta, other]).lease == 0
    assert meta == BatchMeta([1, 2, 3, 4], ["p"] * 4), "a lease is not part of the value"
    meta.reorder([3, 2, 1, 0])
    assert meta.lease == 7


def declared(box: Box, size: int) -> None:
    box.handle(m.SetPartition(1, "p", size, {}))


def test_the_last_rows_of_a_declared_partition_come_as_a_smaller_batch() -> None:
    box = Box()
    declared(box, 5)
    box.put(4)
    first, _ = box.lend(4, until_done=True)
    assert box.lend(4, wait_s=9.0, ticket="rest", until_done=True, session=b"other") is None
    box.put(1)
    assert box.answers() == [], "the first rows may come back"
    box.ack(first)
    assert box.answers() == [("rest", [4])]


def test_rows_that_came_back_and_are_too_few_for_a_batch_are_handed_out_when_they_are_all() -> None:
    box = Box()
    declared(box, 4)
    box.put(4)
    first, rows = box.lend(4, until_done=True)
    box.ack(first, rows[:3])
    box.release(first)
    assert box.lend(4, until_done=True)[1] == rows[3:]


def test_without_a_declared_size_too_few_rows_are_waited_for() -> None:
    box = Box()
    box.put(3)
    assert box.lend(4, wait_s=9.0, ticket="t", until_done=True) is None


# rows that were used and cleared


def use(box: Box, rows: Sequence[int], batch: int) -> Any:
    """What a loop gets that has used and cleared these rows: its next rows, m.DONE, or None: it waits."""
    box.clear(rows)
    reply = box.lend(4, until_done=True, batch_index=batch, wait_s=60, ticket=batch)
    return reply if reply is None else reply[1] or reply[0]


def test_a_loop_that_clears_what_it_used_gets_the_last_rows_and_ends() -> None:
    box = Box()
    declared(box, 10)
    rows = indexes(box.put(10))
    assert box.lend(4, until_done=True, batch_index=0)[1] == rows[:4]
    assert use(box, rows[:4], 1) == rows[4:8]
    assert use(box, rows[4:8], 2) == rows[8:]
    assert use(box, rows[8:], 3) == m.DONE


def test_rows_that_nobody_used_and_somebody_cleared_are_not_waited_for() -> None:
    box = Box()
    declared(box, 8)
    rows = indexes(box.put(8))
    box.clear([3])
    assert box.lend(4, until_done=True, batch_index=0)[1] == [0, 1, 2, 4]
    assert use(box, [0, 1, 2, 4], 1) == rows[5:]


def test_clearing_does_not_end_a_loop_before_all_declared_rows_were_there() -> None:
    box = Box()
    declared(box, 8)
    rows = indexes(box.put(4))
    box.lend(4, until_done=True, batch_index=0)
    assert use(box, rows, 1) is None
    more = indexes(box.put(4))
    assert box.answers() == [(1, more)]
    assert use(box, more, 2) == m.DONE


def test_without_a_declared_size_a_loop_ends_when_what_was_there_is_cleared() -> None:
    box, rows = filled(4)
    box.lend(4, until_done=True, batch_index=0)
    assert use(box, rows, 1) == m.DONE


def test_a_loop_that_had_nothing_ends_with_those_who_cleared_the_declared_rows() -> None:
    box = Box()
    declared(box, 4)
    rows = indexes(box.put(4))
    box.lend(4, session=b"other")
    assert box.lend(4, until_done=True, batch_index=0, wait_s=60, ticket="waits") is None
    box.clear(rows)
    assert box.answers() == [("waits", [])]


@pytest.mark.parametrize("says", [True, False])
def test_a_partition_that_was_used_and_cleared_may_be_filled_again(says: bool) -> None:
    box = Box()
    declared(box, 4)
    box.clear(indexes(box.put(4)))
    assert box.lend(3, until_done=True, batch_index=0, wait_s=60, ticket="next round") is None
    if says:
        declared(box, 4)
    assert box.answers() == []
    rows = indexes(box.put(2))
    assert box.lend(3, until_done=True, batch_index=1, wait_s=60, ticket="rest") is None
    assert box.answers() == [], "two of four rows are no rest of a round"
    rows += indexes(box.put(2))
    assert box.answers() == [("next round", rows[:3])]
    box.ack(1)
    assert box.answers() == [("rest", rows[3:])]


def test_rows_that_come_before_those_of_the_last_round_are_cleared_are_of_the_next() -> None:
    box = Box()
    declared(box, 4)
    rows = indexes(box.put(4))
    box.fetch(4)
    more = indexes(box.put(1))
    box.clear(rows)
    assert box.lend(2, until_done=True, batch_index=0, wait_s=60, ticket="waits") is None
    more += indexes(box.put(3))
    assert box.answers() == [("waits", more[:2])]


def test_all_rows_are_those_that_are_left_of_the_declared_ones() -> None:
    box = Box()
    declared(box, 4)
    box.put(3), box.clear([1])
    assert box.lend(m.ALL, wait_s=60, ticket="all") is None
    box.put(1)
    assert box.answers() == [("all", [0, 2, 3])]
    assert box.lend(m.ALL, task="u", fields=["b"], wait_s=60, ticket="written later") is None
    box.put([0, 2], fields=["b"])
    assert box.answers() == []
    box.clear([3])
    assert box.answers() == [("written later", [0, 2])]
    box.ack(1), box.ack(2), box.put(2), box.clear([0, 2])
    assert box.lend(m.ALL, wait_s=60, ticket="next round") is None
    box.put(2)
    assert box.answers() == [("next round", [4, 5, 6, 7])]


def test_cleared_rows_do_not_count_where_a_field_has_a_number_of_its_own() -> None:
    box = Box()
    box.handle(m.SetPartition(1, "p", 4, {}, {"a": 2}))
    box.put(1, fields=["b"]), box.clear([0]), box.put(1)
    assert box.lend(m.ALL, wait_s=60, ticket="two of a") is None
    box.put(1)
    assert box.answers() == [("two of a", [1, 2])]


def test_more_rows_than_declared_are_used_and_cleared_before_the_loop_ends() -> None:
    box = Box()
    declared(box, 4)
    box.put(3)
    assert box.lend(2, until_done=True, batch_index=0)[1] == [0, 1]
    box.put(3)
    assert use(box, [0, 1], 1) == [2, 3, 4, 5]
    box.clear([2, 3])
    assert use(box, [4, 5], 2) == m.DONE


def test_rows_of_the_next_round_are_known_as_such_after_a_load() -> None:
    box = Box()
    declared(box, 2)
    box.put(2), box.fetch(2), box.put(1)
    fresh = reloaded(box)
    fresh.clear([0, 1])
    assert fresh.lend(1, until_done=True, batch_index=0, wait_s=60) == (1, [2])
    assert use(fresh, [2], 1) is None, "the second row of the round is to come"


def test_rows_that_reached_nobody_never_were_there() -> None:
    box = Box()
    declared(box, 2)
    box.insert(2)
    box.controller.take_back(b"session", 1)
    assert box.lend(1, until_done=True, batch_index=1, wait_s=60, ticket="waits") is None
    assert box.put(1) is not None
    assert box.lend(2, until_done=True, batch_index=1, wait_s=60, ticket="still") is None


@pytest.mark.parametrize("rows", [0, 2])
def test_a_partition_of_no_rows_is_over_at_once(rows: int) -> None:
    box = Box(reserved_rows=1)
    declared(box, rows)
    if rows:
        box.clear(indexes(box.put(rows)))
        declared(box, 0)
    assert box.lend(4, until_done=True, batch_index=0, wait_s=60) == (m.DONE, [])
