"""Rows that came back: attempts, delays, dead letters."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tables import Box, indexes, reloaded

from transfer_queue.errors import DeadlineExceeded, InvalidInput, LeaseExpired, UnknownRows
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire import messages as m


def filled(rows: int, **more: Any) -> tuple[Box, list[int]]:
    box = Box(**more)
    return box, indexes(box.put(rows))


def told(box: Box, size: int = 1, **more: Any) -> Any:
    """What a fetch says of rows that came back."""
    message = m.Fetch(1, "p", ["a"], size, "t", more, 0.0, False, 10.0)
    return box.handle(message, None, b"session").redelivered


def test_a_refused_row_comes_again_with_its_reason() -> None:
    box, rows = filled(2)
    lease, _ = box.lend(2)
    assert box.nack(lease, rows[1:], reason="the reward model crashed") == 1
    assert box.ack(lease, rows[:1]) == 0
    assert told(box) == [(0, 1, "the reward model crashed")]


def test_a_row_that_never_came_back_says_nothing() -> None:
    box, _ = filled(1)
    assert told(box) is None


def test_every_way_a_lease_ends_in_vain_is_an_attempt() -> None:
    box, _ = filled(1)
    box.lend(1, session=b"one")
    box.end_session(b"one")
    box.lend(1, 5.0)
    box.expire(5.0)
    lease, _ = box.lend(1)
    box.nack(lease)
    assert told(box) == [(0, 3, "refused")]


def test_what_was_released_or_never_received_was_not_tried() -> None:
    box, _ = filled(1)
    lease, _ = box.lend(1)
    box.release(lease)
    box.lend(1, received=False)
    box.controller.take_back(b"session", 1)
    assert told(box) is None


def test_a_refused_row_waits_for_its_delay() -> None:
    box, rows = filled(2)
    lease, _ = box.lend(1)
    box.nack(lease, delay_s=5.0)
    assert box.fetch(1) == rows[1:], "the next one is not held up"
    assert box.fetch(1, wait_s=60, ticket="next") is None
    assert box.controller.next_deadline() == 5.0
    box.expire(4.9)
    assert box.answers() == []
    box.expire(5.0)
    assert box.answers() == [("next", rows[:1])]


def test_a_stream_is_not_over_while_a_row_waits_for_its_delay() -> None:
    box, rows = filled(1)
    box.controller.tables["p"].declared = 1
    lease, _ = box.lend(1)
    box.nack(lease, delay_s=5.0)
    assert box.lend(1, until_done=True, wait_s=60, ticket="next") is None
    box.expire(5.0)
    assert box.answers() == [("next", rows)]


def test_a_row_is_a_dead_letter_after_so_many_attempts() -> None:
    box, rows = filled(2, max_deliver=2)
    for _ in range(2):
        lease, lent = box.lend(1)
        assert lent == rows[:1]
        box.nack(lease, reason="nan")
    assert box.fetch(1) == rows[1:]
    with pytest.raises(DeadlineExceeded):
        box.fetch(1)
    assert box.dead_letters() == {rows[0]: (2, "nan")}
    assert box.controller.statistics()["dead_letters"] == 1
    assert box.fetch(2, task="u") == rows, "it is one task that gave it up"


def test_a_stream_ends_without_its_dead_letters() -> None:
    box, _ = filled(1, max_deliver=1)
    box.controller.tables["p"].declared = 1
    lease, _ = box.lend(1)
    assert box.lend(1, until_done=True, wait_s=60, ticket="next", session=b"two") is None
    box.nack(lease)
    assert [reply.lease for _, reply in box.controller.outbox] == [m.DONE]


def test_a_request_says_how_often_its_task_tries() -> None:
    box, rows = filled(1, max_deliver=5)
    for _ in range(2):
        lease, _ = box.lend(1, max_deliver=2)
        box.nack(lease)
    assert list(box.dead_letters()) == rows


@pytest.mark.parametrize("number", [0, -1, True, "3", 1.5])
def test_a_number_of_deliveries_that_is_none_is_refused(number: Any) -> None:
    box, _ = filled(1)
    with pytest.raises(InvalidInput, match="max_deliver"):
        box.lend(1, max_deliver=number)


def test_a_dead_letter_that_is_queued_again_begins_anew() -> None:
    box, rows = filled(2, max_deliver=1)
    box.nack(box.lend(2)[0])
    assert box.fetch(1, wait_s=60, ticket="next") is None
    assert box.requeue([*rows[1:], 99]) == 1
    assert box.answers() == [("next", rows[1:])]
    assert list(box.dead_letters()) == rows[:1]
    assert box.requeue() == 1
    assert told(box) is None
    assert box.requeue() == 0


def test_clearing_resetting_and_moving_slots_keep_the_books() -> None:
    box, rows = filled(12, max_deliver=1)
    box.nack(box.lend(12)[0], rows[3:9])
    box.clear(rows[:5])
    assert list(box.dead_letters()) == rows[5:9]
    box.controller.tables["p"].shrink()
    assert list(box.dead_letters()) == rows[5:9]
    box.reset()
    assert box.dead_letters() == {}
    assert box.fetch(7) == rows[5:]


def test_a_checkpoint_has_attempts_and_dead_letters() -> None:
    box, rows = filled(3, max_deliver=2)
    box.nack(box.lend(2)[0])
    box.nack(box.lend(1)[0], delay_s=50.0, reason="nan")
    lease, lent = box.lend(1)
    assert lent == rows[1:2]
    box.nack(lease, delay_s=50.0)
    again = reloaded(box, max_deliver=2)
    assert again.dead_letters() == box.dead_letters() == {rows[0]: (2, "nan"), rows[1]: (2, "refused")}
    assert again.fetch(1) == rows[2:]


def test_after_a_load_a_refused_row_waits_as_long_as_was_asked() -> None:
    box, rows = filled(3)
    for delay_s in (50.0, 20.0):
        box.nack(box.lend(1)[0], delay_s=delay_s)
    again = reloaded(box)
    assert again.fetch(1) == rows[2:]
    again.expire(0.0)
    again.expire(19.9)
    with pytest.raises(DeadlineExceeded):
        again.fetch(1)
    again.expire(20.0)
    assert told(again) == [(0, 1, "refused")]
    assert again.controller.next_deadline() == 30.0, "of the lease"
    again.expire(50.0)
    assert again.lend(1)[1] == rows[:1]


def test_after_a_load_the_number_of_deliveries_that_was_asked_for_counts() -> None:
    box, rows = filled(1)
    lease, _ = box.lend(1, max_deliver=2)
    box.nack(lease)
    again = reloaded(box)
    again.nack(again.lend(1)[0], reason="nan")
    assert again.dead_letters() == {rows[0]: (2, "nan")}


@pytest.mark.parametrize(("delay_s", "reason"), [(-1.0, ""), (float("nan"), ""), (float("inf"), ""), (0.0, "x" * 1025)])
def test_a_bad_refusal_changes_nothing(delay_s: float, reason: str) -> None:
    box, _ = filled(1)
    lease, _ = box.lend(1)
    with pytest.raises(InvalidInput):
        box.nack(lease, delay_s=delay_s, reason=reason)
    assert box.ack(lease) == 0


def test_a_lease_that_is_over_cannot_be_refused() -> None:
    box, _ = filled(1)
    lease, _ = box.lend(1)
    box.expire(10.0)
    with pytest.raises(LeaseExpired):
        box.nack(lease)


def test_dead_letters_of_what_nobody_knows() -> None:
    box, _ = filled(1)
    assert box.dead_letters(task="nobody") == {}
    assert box.requeue(task="nobody") == 0
    with pytest.raises(UnknownRows):
        box.dead_letters(partition="nowhere")


def test_metadata_keeps_what_came_back_of_its_rows() -> None:
    meta = BatchMeta([4, 5, 6], ["p"] * 3)
    meta.redelivered = {4: (1, "x"), 6: (2, "y")}
    assert meta[:2].redelivered == {4: (1, "x")}
    assert BatchMeta.concat([meta[2:], meta[:1]]).redelivered == meta.redelivered
    assert pickle.loads(pickle.dumps(meta)).redelivered == meta.redelivered  # noqa: S301  it is our own
    assert meta == BatchMeta([4, 5, 6], ["p"] * 3)


def test_a_mark_leaves_out_rows_that_were_refused() -> None:
    box = Box()
    box.mark(0)
    rows = indexes(box.put(4))
    lease, _ = box.lend(3)
    box.nack(lease, rows[1:2])
    box.mark(1, used=[(lease, rows[:3])])
    assert box.taken(1) == [[rows[0], rows[2]]]
    assert box.lend(2)[1] == [rows[1], rows[3]]


def test_a_holder_that_leaves_has_not_tried_what_it_gives_back() -> None:
    box, _ = filled(3)
    lease, _ = box.lend(1, holder=b"loader")
    box.lend(1, session=b"another")
    box.lend(2, holder=b"loader", ticket="waits", wait_s=60.0)
    box.handle(m.Release(1, 0, None), None, b"loader")
    assert [type(reply) for _, reply in box.controller.outbox] == [m.Failed], "nothing is lent in its name any more"
    assert told(box, 2) is None
    with pytest.raises(LeaseExpired):
        box.ack(lease)
