"""What rank 0 keeps of the others: nobody leaves before all were told."""

from __future__ import annotations

import pytest
from conftest import until

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import ServiceUnavailable
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
