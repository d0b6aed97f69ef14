"""Loop after loop of data-parallel ranks over one partition, which each rank begins when it likes."""

from __future__ import annotations

from typing import Any

import pytest
from test_dealing import Ranks

from transfer_queue.wire import messages as m


def loop(box: Ranks, rank: int, number: int) -> Any:
    """What a rank is told that asks for a first batch in its loop of this number; "waits": it was parked."""
    asked = box.ask(rank, 0, until_done=True, session=b"%d.%d" % (rank, number), ticket=(rank, number))
    return "waits" if asked is None else asked


def round_of_two(by_ack: bool) -> Ranks:
    """Two ranks, of which rank 0 is done with its loop, and rank 1 has its rows, [1], on lease 2 yet."""
    box = Ranks(2, 1)
    box.handle(m.SetPartition(1, "p", 2, {}))
    box.put(2)
    assert [loop(box, rank, 0)[1] for rank in (0, 1)] == [[0], [1]]
    if by_ack:
        box.ack(1)
    else:
        box.clear([0])
    assert box.ask(0, 1, until_done=True, session=b"0.0") == "done"
    return box


@pytest.mark.parametrize("has_left", [False, True])
def test_a_rank_that_begins_anew_while_others_are_at_their_last_batch_waits_for_the_next_round(has_left: bool) -> None:
    box = round_of_two(by_ack=False)
    for number in range(1, 4):
        if has_left:
            box.end_session(b"0.%d" % (number - 1))
        assert loop(box, 0, number) == "waits"
        box.clear([2 * number - 1])
        assert box.answers() == []
        assert box.ask(1, 1, until_done=True, session=b"1.%d" % (number - 1)) == "done"
        box.end_session(b"1.%d" % (number - 1))
        assert loop(box, 1, number) == "waits"
        box.put(2)
        assert sorted(box.answers()) == [((0, number), [2 * number]), ((1, number), [2 * number + 1])]
        box.clear([2 * number])
        assert box.ask(0, 1, until_done=True, session=b"0.%d" % number) == "done"
        assert len(box.controller.tables["p"].tasks["t"].groups) <= 2, "those that are over are forgotten"


def test_rows_of_the_next_round_are_dealt_while_a_rank_is_at_its_last_batch() -> None:
    box = round_of_two(by_ack=False)
    assert loop(box, 0, 1) == "waits"
    box.put(2)
    assert box.answers() == [((0, 1), [2])]
    assert box.rows(1, 0, until_done=True, session=b"1.0") == [1], "the other asks for its share once more"
    box.clear([1])
    assert box.ask(1, 1, until_done=True, session=b"1.0") == "done"
    assert loop(box, 1, 1)[1] == [3]


def test_a_loop_that_begins_anew_has_nothing_where_nothing_was_cleared() -> None:
    box = round_of_two(by_ack=True)
    assert loop(box, 0, 1) == "waits"
    box.ack(2)
    assert box.answers() == [((0, 1), [])]
    assert box.ask(1, 1, until_done=True, session=b"1.0") == "done"
    assert loop(box, 1, 1) == "done"


def test_a_member_may_begin_anew_in_the_same_session() -> None:
    box = round_of_two(by_ack=False)
    assert box.ask(0, 0, until_done=True, session=b"0.0", ticket="again") is None
    box.clear([1])
    box.put(2)
    assert box.answers() == [("again", [2])]


def test_a_rank_that_was_told_before_its_last_rows_were_used_gets_them_when_it_begins_anew() -> None:
    box = Ranks(2, 1)
    box.handle(m.SetPartition(1, "p", 2, {}))
    box.put(2)
    assert [loop(box, rank, 0)[1] for rank in (0, 1)] == [[0], [1]]
    assert box.ask(0, 1, until_done=True, session=b"0.0") == "done", "it is ahead of its work"
    box.end_session(b"0.0")
    assert loop(box, 0, 1)[1] == [0]


def test_a_rank_that_refused_a_row_of_its_last_batch_begins_anew_with_the_others() -> None:
    box = round_of_two(by_ack=False)
    assert loop(box, 0, 1) == "waits"
    box.nack(2)
    assert box.ask(1, 1, until_done=True, session=b"1.0") == "done"
    assert loop(box, 1, 1) == "waits"
    box.end_session(b"0.0"), box.end_session(b"1.0")
    assert sorted(box.answers()) == [((0, 1), [1]), ((1, 1), [1])], "a rest of one row, which is repeated"


def test_what_a_rank_left_that_does_not_come_back_is_dealt_to_those_who_began_anew() -> None:
    box = round_of_two(by_ack=True)
    box.end_session(b"0.0")
    assert (loop(box, 0, 1), box.answers()) == ("waits", [])
    box.end_session(b"1.0")
    assert box.answers() == [((0, 1), [1])]


def test_a_rank_that_alone_begins_again_and_again_waits_for_no_rank_that_has_ended() -> None:
    box = Ranks(2, 1)
    box.handle(m.SetPartition(1, "p", 2, {}))
    box.put(2)
    for rank in (0, 1):
        assert loop(box, rank, 0)[1] == [rank]
    box.ack(1)
    assert [box.ask(rank, 1, until_done=True, session=b"%d.0" % rank) for rank in (0, 1)] == ["done", "done"]
    box.nack(2, [1], 0.0)
    box.end_session(b"0.0"), box.end_session(b"1.0")
    for number in range(1, 5):  # row 1 is rank 0's each time, and rank 0 does not come
        assert loop(box, 1, number) == (0, [1]), "once more, so that both get as many"
        assert box.ask(1, 1, until_done=True, session=b"1.%d" % number) == "done"
        box.end_session(b"1.%d" % number)
    assert loop(box, 0, 1)[1] == [1]


@pytest.mark.parametrize("has_left", [False, True])
def test_a_rank_that_begins_anew_waits_for_a_late_one_that_has_not_ended_before(has_left: bool) -> None:
    box = Ranks(2, 1)
    box.handle(m.SetPartition(1, "p", 2, {}))
    box.put(2)
    assert loop(box, 0, 0)[1] == [0]
    box.ack(1)
    assert box.ask(0, 1, until_done=True, session=b"0.0") == "done"
    if has_left:
        box.end_session(b"0.0")
    assert loop(box, 0, 1) == "waits"
    assert loop(box, 1, 0)[1] == [1]
    box.ack(2)
    assert box.ask(1, 1, until_done=True, session=b"1.0") == "done"


def test_rows_of_a_loop_that_only_one_rank_began_again_are_dealt_when_it_has_left() -> None:
    box = Ranks(3, 1)
    box.handle(m.SetPartition(1, "p", 3, {}))
    box.put(3)
    for rank in range(3):
        assert loop(box, rank, 0)[1] == [rank]
    box.ack(1), box.ack(2)
    for rank in range(3):
        assert box.ask(rank, 1, until_done=True, session=b"%d.0" % rank) == "done"
    box.nack(3, [2], 0.0)
    for rank in range(3):
        box.end_session(b"%d.0" % rank)
    assert loop(box, 1, 1) == (0, [2])
    lease, rows = loop(box, 0, 1)
    assert rows == [2]
    for rank in (1, 0):
        assert box.ask(rank, 1, until_done=True, session=b"%d.1" % rank) == "done"
    box.nack(lease, rows, 0.0)
    box.end_session(b"1.1")
    assert loop(box, 1, 2) == "waits", "rank 0 has not left"
    box.end_session(b"0.1")
    assert box.answers() == [((1, 2), [2])], "rank 2 need not come for what it was told to be over"


def test_who_waits_for_the_rows_of_a_rank_that_never_came_is_told_which_one_it_is() -> None:
    box = Ranks(3, 1)
    box.handle(m.SetPartition(1, "p", 3, {}))
    box.put(3)
    assert (loop(box, 0, 0)[1], box.use(1, 0, session=b"1.0")) == ([0], [1])
    box.ack(1)
    assert box.ask(0, 1, until_done=True, session=b"0.0") == "done"
    assert loop(box, 0, 1) == "waits"
    (wait,) = box.handle(m.DescribeService(1, 9)).waits
    assert "1 kept for other ranks (dp_rank 2, which has not asked for any yet)" in wait.lacks


def test_a_rank_that_goes_on_in_its_first_batch_when_others_have_ended_gets_all_of_its_shares() -> None:
    box = Ranks(2, 2)
    box.put(8)
    assert [box.use(0, 0), box.use(0, 1), box.ask(0, 2, until_done=True)] == [[0, 1], [4, 5], "done"]
    box.end_session(b"0")
    lease, rows = box.ask(1, 0)
    box.ack(lease, rows[:1])
    box.end_session(b"1")
    on = {"session": b"on", "until_done": True}
    assert [box.use(1, 0, used=1, **on), box.use(1, 1, **on), box.ask(1, 2, **on)] == [[3], [6, 7], "done"]
    assert all(box.consumed().values())


def test_a_rank_that_resumes_further_back_than_another_gets_all_of_its_shares() -> None:
    box = Ranks(2, 2)
    box.handle(m.SetPartition(1, "p", 8, {}))
    box.put(8)
    assert [box.use(0, 2, until_done=True), box.use(0, 3, until_done=True)] == [[0, 1], [4, 5]]
    assert box.ask(0, 4, until_done=True) == "done"
    box.end_session(b"0")
    assert box.ask(1, 1, used=1, until_done=True) == "passed", "nothing was left for this batch"
    assert [box.use(1, 2, until_done=True), box.use(1, 3, until_done=True)] == [[2, 3], [6, 7]]
    assert box.ask(1, 4, until_done=True) == "done"
    assert all(box.consumed().values())


def test_a_rank_that_waits_further_back_than_another_goes_on_when_nothing_more_comes() -> None:
    box = Ranks(2, 2)
    box.handle(m.SetPartition(1, "p", 4, {}))
    box.put(3)
    assert box.ask(1, 1, until_done=True, ticket="back") is None
    assert box.use(0, 2, used=1, until_done=True) == [0]
    assert box.fetch(1) == [2], "others of the task take what it might have got"
    assert box.answers() == []
    box.handle(m.SetPartition(1, "p", 3, {}))
    ((ticket, reply),) = box.controller.outbox
    assert (ticket, box.read(reply)) == ("back", "passed")
    assert box.use(1, 2, until_done=True) == [1]
