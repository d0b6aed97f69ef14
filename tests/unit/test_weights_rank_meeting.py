"""What rank 0 keeps of the others: nobody leaves before all were told."""

from __future__ import annotations

import pytest
from conftest import until

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import InvalidInput, ServiceUnavailable
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.protocol import RankMessage
from transfer_queue.weights.transport.ranks import RankMeeting

ROOM_S = 30.0


def test_rank_0_leaves_once_the_last_answer_was_sent() -> None:
    meeting, visit = RankMeeting(2), object()
    meeting.begin()
    bringing = BackgroundCall("tq-test", meeting.bring, RankMessage(1, "offer", "", ROOM_S), b"mine", visit)
    until(lambda: meeting._is_at(1, "offer"), "the offer")
    meeting.answer([b"the report"])
    assert bringing.ended(ROOM_S)
    closing = BackgroundCall("tq-test", meeting.close, ROOM_S)
    assert not closing.ended(0.05)
    meeting.told(visit)
    assert closing.ended(ROOM_S)
    assert bringing.outcome() == b"the report"


def test_a_rank_that_waits_for_an_update_hears_that_rank_0_has_left() -> None:
    meeting, visit = RankMeeting(2), object()
    bringing = BackgroundCall("tq-test", meeting.bring, RankMessage(1, "offer", "", ROOM_S), b"mine", visit)
    until(lambda: meeting._is_at(1, "offer"), "the offer")
    closing = BackgroundCall("tq-test", meeting.close, ROOM_S)
    assert bringing.ended(ROOM_S)
    meeting.told(visit)
    assert closing.ended(ROOM_S)
    with pytest.raises(ServiceUnavailable, match="rank 0 has left"):
        bringing.outcome()


class Offering:
    """Rank 1 of two, that has come again while rank 0 is still in the update with its first offer."""

    def __init__(self) -> None:
        self.meeting, self._visit = RankMeeting(2), object()
        self.meeting.begin()
        first = self._bring()
        assert self.meeting.gather("offer", Deadline(ROOM_S)) == [b"mine"]
        self.meeting.answer([b"planned"])
        assert first.ended(ROOM_S)
        assert first.outcome() == b"planned"
        self.again = self._bring()

    def _bring(self) -> BackgroundCall[bytes]:
        message = RankMessage(1, "offer", "", ROOM_S)
        made = BackgroundCall("tq-test", self.meeting.bring, message, b"mine", self._visit)
        until(lambda: 1 in self.meeting._brought, "the offer")
        return made

    def taken(self) -> bytes:
        """What its second offer is told in the next update."""
        self.meeting.begin()
        self.meeting.gather("offer", Deadline(ROOM_S))
        self.meeting.answer([b"planned again"])
        assert self.again.ended(ROOM_S)
        return self.again.outcome()


def test_a_rank_that_has_come_again_does_not_hear_why_its_update_before_has_failed() -> None:
    offering = Offering()
    offering.meeting.end(InvalidInput("rank 1: the first try"))
    assert offering.taken() == b"planned again"


def test_the_report_of_an_update_is_no_answer_to_the_offer_for_the_next_one() -> None:
    offering = Offering()
    offering.meeting.answer([b"the report"])
    offering.meeting.end()
    assert offering.taken() == b"planned again"
