"""What rank 0 keeps of the others: nobody leaves before all were told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import until

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import DeadlineExceeded, InvalidInput, ServiceUnavailable, WrongEpoch
from transfer_queue.weights import Control, ModuleSource, Receiver, Swap
from transfer_queue.weights.transport import group_meeting, registry
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.group_meeting import GroupMeeting, MeetingPlace
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


def test_an_update_ends_by_the_earliest_deadline_of_its_ranks() -> None:
    meeting, deadline = RankMeeting(2), Deadline(2 * ROOM_S)
    meeting.begin()
    offer = RankMessage(1, "offer", "", ROOM_S)
    bringing = BackgroundCall("tq-test", meeting.bring, offer, b"mine", object())
    meeting.gather("offer", deadline)
    assert deadline.left() < ROOM_S
    meeting.close(0.0)
    assert bringing.ended(ROOM_S)


def test_the_report_of_an_update_is_no_answer_to_the_offer_for_the_next_one() -> None:
    offering = Offering()
    offering.meeting.answer([b"the report"])
    offering.meeting.end()
    assert offering.taken() == b"planned again"


@pytest.mark.parametrize("step", ["offer", "packed"])
def test_a_rank_that_left_where_it_waits_may_come_again_before_it_was_taken(step: Any) -> None:
    meeting = RankMeeting(2)

    def bring(body: bytes, is_lost: bool) -> BackgroundCall[bytes]:
        message = RankMessage(1, step, meeting.turn, ROOM_S)
        made = BackgroundCall("tq-test", meeting.bring, message, body, object(), lambda: is_lost)
        until(lambda: 1 in meeting._brought or made.ended(0), "it to come")
        return made

    meeting.begin()
    gone = bring(b"of one that left", is_lost=True)
    gathering = BackgroundCall("tq-test", meeting.gather, step, Deadline(ROOM_S))
    assert gone.ended(ROOM_S)
    if step == "offer":
        again = bring(b"mine", is_lost=False)
        assert gathering.ended(ROOM_S)
        assert gathering.outcome() == [b"mine"]
        meeting.end(InvalidInput("the end of the test"))
        assert again.ended(ROOM_S)
    else:
        assert gathering.ended(ROOM_S)
        with pytest.raises(ServiceUnavailable, match="rank 1 has left"):
            gathering.outcome()


class Cut(Control):
    """A server of two parameters. `cut` is called while it commits."""

    cut: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.module = torch.nn.ParameterDict({name: torch.zeros(4) for name in ("a", "b")})
        receiver = Receiver(Swap(self.module))
        self.engine = registry.engine("tcp")(receiver)
        super().__init__(self.engine, receiver)

    def finish_weight_update(self, *args: Any) -> Any:
        self.cut()
        return super().finish_weight_update(*args)


class Ranks:
    """Rank 0 has `a`, rank 1 `b`, of four ones each."""

    def __init__(self, anchor_every: int = 1) -> None:
        self.server, self.late = Cut(), Cut()
        self.modules = [torch.nn.ParameterDict({name: torch.ones(4)}) for name in ("a", "b")]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = port = probe.getsockname()[1]
        self.told = told = {
            "world": 2,
            "anchor_every": anchor_every,
            "meet": f"tcp:127.0.0.1:{port}",
            "token": "only for this test",
        }
        init, sources = registry.trainer("tcp").trainer_init, [ModuleSource(one) for one in self.modules]
        self.trainer = init({**told, "port": port}, client=self.server, source=sources[0])
        self.holder = init({**told, "rank": 1}, client=None, source=sources[1])

    def restart(self, **more: Any) -> None:
        """Rank 0 begins anew at the same address."""
        self.trainer.shutdown()
        init, source = registry.trainer("tcp").trainer_init, ModuleSource(self.modules[0])
        self.trainer = init({**self.told, "port": self.port, **more}, client=self.server, source=source)

    def send(self, deadline_s: float = ROOM_S) -> list[BackgroundCall[Any]]:
        """What each rank does."""
        both = [self.trainer, self.holder]
        calls = [BackgroundCall("tq-test", lambda one=one: one.send_weights(deadline_s=deadline_s)) for one in both]
        assert all(call.ended(2 * ROOM_S) for call in calls)
        return calls

    def close(self) -> None:
        for one in (self.trainer, self.holder, self.server.engine, self.late.engine):
            one.shutdown()


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(**more: Any) -> Ranks:
        started.append(Ranks(**more))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize("anchor_every", [1, 9])
def test_a_rank_that_loses_rank_0_in_the_commit_gives_the_version_to_late_servers(
    anchor_every: int, start_ranks: Callable[..., Ranks]
) -> None:
    ranks = start_ranks(anchor_every=anchor_every)
    ranks.server.cut = lambda: ranks.holder._link._peer.interrupt()
    leading, holding = ranks.send()
    assert leading.outcome().version == 1
    with pytest.raises(ServiceUnavailable):
        holding.outcome()
    assert ranks.trainer.join(ranks.late, deadline_s=ROOM_S) == 1
    assert ranks.late.module["b"].tolist() == [1.0] * 4
    ranks.server.cut = Cut.cut
    ranks.modules[1]["b"].data[0] = 2.0
    for version in (2, 3):
        assert [call.outcome().version for call in ranks.send()] == [version] * 2
    assert ranks.server.module["b"].tolist() == [2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("anchor_every", [1, 9])
def test_late_servers_are_given_a_version_whose_commit_failed_once_it_was_decided(
    anchor_every: int, start_ranks: Callable[..., Ranks]
) -> None:
    ranks = start_ranks(anchor_every=anchor_every)
    ranks.send()

    def killed() -> None:
        raise ServiceUnavailable("the server was killed")

    ranks.server.cut = killed
    ranks.modules[1]["b"].data[0] = 2.0
    for call in ranks.send():
        with pytest.raises(ServiceUnavailable, match="was killed"):
            call.outcome()
    assert ranks.trainer.join(ranks.late, deadline_s=ROOM_S) == 2
    assert ranks.late.module["b"].tolist() == [2.0, 1.0, 1.0, 1.0]
    ranks.server.cut = Cut.cut
    assert [call.outcome().version for call in ranks.send()] == [3, 3]
    assert ranks.server.module["b"].tolist() == [2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("anchor_every", [1, 9])
def test_a_connection_that_was_cut_between_two_updates_costs_none(
    anchor_every: int, start_ranks: Callable[..., Ranks]
) -> None:
    ranks = start_ranks(anchor_every=anchor_every)
    ranks.send()
    ranks.holder._link._peer.interrupt()
    until(lambda: 1 not in ranks.trainer._ranks._tables, "rank 0 to hear of it")
    ranks.modules[1]["b"].data[0] = 2.0
    assert [call.outcome().version for call in ranks.send()] == [2, 2]
    assert ranks.server.module["b"].tolist() == [2.0, 1.0, 1.0, 1.0]


def test_a_rank_that_left_before_rank_0_came_is_waited_for(start_ranks: Callable[..., Ranks]) -> None:
    ranks = start_ranks()
    leaving = BackgroundCall("tq-test", lambda: ranks.holder.send_weights(deadline_s=ROOM_S))
    until(lambda: ranks.trainer._ranks._is_at(1, "offer"), "its offer")
    ranks.holder._link._peer.interrupt()
    assert leaving.ended(ROOM_S)
    with pytest.raises(ServiceUnavailable):
        leaving.outcome()
    assert [call.outcome().version for call in ranks.send()] == [1, 1]


def test_a_rank_that_is_told_where_rank_0_is_to_be_waits_until_it_is(start_ranks: Callable[..., Ranks]) -> None:
    ranks = start_ranks()
    ranks.trainer.shutdown()
    init, source = registry.trainer("tcp").trainer_init, ModuleSource(ranks.modules[1])
    coming = BackgroundCall("tq-test", lambda: init({**ranks.told, "rank": 1}, client=None, source=source))
    assert not coming.ended(0.05)
    ranks.restart()
    assert coming.ended(ROOM_S)
    ranks.holder.shutdown()
    ranks.holder = coming.outcome()
    reports = [call.outcome() for call in ranks.send()]
    assert reports == [reports[0]] * 2
    ranks.trainer.shutdown()
    with pytest.raises(ServiceUnavailable, match="Connection refused"):
        init({**ranks.told, "rank": 1, "timeout_s": 0.3}, client=None, source=source)


def test_a_rank_of_a_run_before_gives_nothing_to_the_next_one(start_ranks: Callable[..., Ranks]) -> None:
    ranks = start_ranks()
    ranks.send()
    ranks.restart()
    leading, holding = ranks.send(deadline_s=1.0)
    with pytest.raises(DeadlineExceeded, match="rank 1 did not come"):
        leading.outcome()
    with pytest.raises(WrongEpoch, match="rank 1 is of run"):
        holding.outcome()
    old, source = ranks.holder, ModuleSource(ranks.modules[1])
    ranks.holder = registry.trainer("tcp").trainer_init({**ranks.told, "rank": 1}, client=None, source=source)
    old.shutdown()
    reports = [call.outcome() for call in ranks.send()]
    assert reports == [reports[0]] * 2


def test_a_rank_that_was_given_another_run_is_refused_when_it_comes(start_ranks: Callable[..., Ranks]) -> None:
    ranks = start_ranks()
    ranks.restart(run_id="this one")
    for run_id in ("this one", "another one"):
        info = {**ranks.told, "rank": 1, "run_id": run_id}
        init, source = registry.trainer("tcp").trainer_init, ModuleSource(ranks.modules[1])
        if run_id == "this one":
            init(info, client=None, source=source).shutdown()
            continue
        with pytest.raises(WrongEpoch, match="rank 1 is of run 'another one', rank 0 of 'this one'"):
            init(info, client=None, source=source)


@pytest.mark.parametrize("faulty", [[0], [1], [0, 1]])
def test_all_ranks_are_told_at_once_that_the_module_of_one_has_other_tensors(
    faulty: list[int], start_ranks: Callable[..., Ranks]
) -> None:
    ranks = start_ranks()
    ranks.send()
    for rank in faulty:
        ranks.modules[rank].register_buffer("extra", torch.zeros(1))
    for rank, call in enumerate(ranks.send(deadline_s=10 * ROOM_S)):
        with pytest.raises(InvalidInput, match="got 'extra'") as raised:
            call.outcome()
        assert str(raised.value).startswith("rank 1:") == (rank not in faulty and faulty == [1])
    for rank in faulty:
        del ranks.modules[rank].extra
    assert [call.outcome().version for call in ranks.send()] == [2, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_does_not_answer_keeps_no_rank_beyond_its_time(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    thawed = threading.Event()

    class Frozen:
        def add(self, *_: Any) -> int:
            assert thawed.wait(2 * ROOM_S)
            raise RuntimeError("its host is gone")

    monkeypatch.setattr(group_meeting, "check_group", lambda *_: None)
    monkeypatch.setattr(group_meeting, "_group_store", Frozen)
    meeting = GroupMeeting(rank, 2)
    call = BackgroundCall(
        "tq-test", lambda: meeting.find(0.01) if rank else meeting.tell(MeetingPlace("here"), Deadline(0.01))
    )
    try:
        assert call.ended(ROOM_S)
        with pytest.raises(DeadlineExceeded):
            call.outcome()
    finally:
        thawed.set()
        until(lambda: not any(one.name == "tq-weights-call" for one in threading.enumerate()), "the end of its thread")


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_gave_up_before_rank_0_did_meets_it_at_its_next_call(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = torch.distributed.HashStore()
    monkeypatch.setattr(group_meeting, "check_group", lambda *_: None)
    monkeypatch.setattr(group_meeting, "_group_store", lambda: store)
    with pytest.raises(DeadlineExceeded):
        GroupMeeting(1, 2).find(0.01)
    leading, fault = GroupMeeting(0, 2), DeadlineExceeded("the servers do not answer")
    if waits:
        with pytest.raises(DeadlineExceeded):
            leading.tell(MeetingPlace("a life before"), Deadline(0.01))
    leading.tell_fault(fault)
    call = BackgroundCall("tq-test", lambda: GroupMeeting(1, 2).find(ROOM_S))
    GroupMeeting(0, 2).tell(MeetingPlace("here"), Deadline(ROOM_S))
    assert call.ended(ROOM_S)
    assert call.outcome().address == "here"
