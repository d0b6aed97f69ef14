"""Ages of rows, limits of tasks, and admission, in the controller."""

from __future__ import annotations

from typing import Any

import pytest
from tables import Box, indexes, reloaded

from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.readiness import Slots, Task
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported
from transfer_queue.controller.table import Table
from transfer_queue.errors import DeadlineExceeded, InvalidInput, StaleVersion, WrongEpoch
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler
from transfer_queue.wire import messages as m
from transfer_queue.wire.messages.staleness import Policy


@pytest.fixture
def box() -> Box:
    return Box()


def lag(k: int) -> dict[str, int]:
    return {"max_staleness": k}


# ---- ages ----


def test_a_row_ages_with_each_version_that_is_announced(box: Box) -> None:
    box.announce(10)
    old = box.made_by(10, 2)
    box.announce(20)
    new = box.made_by(20)
    assert box.fetch(2, task="two", **lag(1)) == old
    assert box.fetch(1, task="one", **lag(0)) == new
    with pytest.raises(DeadlineExceeded, match="none of them more than 0 versions"):
        box.fetch(1, task="one")
    assert box.controller.staleness.num_stale == {"one": 2}


def test_who_waits_is_told_of_rows_whose_epoch_was_not_announced(box: Box) -> None:
    box.announce(10)
    box.put(2, tags=[{"weight_version": 10}] * 2)
    box.made_by(10, epoch="another")
    text = (
        "3 too old because their epoch of the weights was not announced, 2 of them for want of the tag 'weight_epoch'"
    )
    with pytest.raises(DeadlineExceeded, match=text):
        box.fetch(1, **lag(0))


def test_announcing_again_changes_nothing_and_older_ones_are_refused(box: Box) -> None:
    assert [box.announce(3), box.announce(3), box.announce(5)] == [1, 1, 2]
    with pytest.raises(StaleVersion):
        box.announce(4)
    assert box.announce(1, "next life") == 3
    with pytest.raises(WrongEpoch):
        box.announce(6)
    assert box.controller.statistics()["weight_announcements"] == 3


def test_a_trainer_that_restarts_with_smaller_numbers_makes_nothing_younger(box: Box) -> None:
    box.announce(900)
    box.made_by(900)
    box.announce(10, "next life")
    fresh = box.made_by(10, epoch="next life")
    box.announce(11, "next life")
    assert box.fetch(1, **lag(1)) == fresh
    assert box.controller.staleness.num_stale == {"t": 1}


def test_rows_may_come_before_their_version_is_announced(box: Box) -> None:
    box.announce(1)
    ahead = box.made_by(2)
    box.announce(2)
    assert box.fetch(1, **lag(0)) == ahead  # it is of the newest version
    later = box.made_by(4)
    box.announce(5)  # 4 never was: it counts as the one before
    with pytest.raises(DeadlineExceeded):
        box.fetch(1, task="zero", **lag(0))
    assert box.fetch(2, task="one", **lag(1)) == ahead + later


def test_before_anything_is_announced_every_row_is_fresh(box: Box) -> None:
    mine, foreign = box.made_by(7), box.made_by(7, epoch="other")
    assert box.fetch(2, **lag(0)) == mine + foreign
    box.announce(7)
    assert box.fetch(1, task="u", **lag(0)) == mine


@pytest.mark.parametrize("tag", [{"weight_version": "7"}, {"weight_version": 7, "weight_epoch": 1},
                                 {"weight_version": 7, "weight_epoch": "never"}, {"weight_version": -1}])  # fmt: skip
def test_what_cannot_be_told_is_infinitely_old(box: Box, tag: dict[str, object]) -> None:
    box.announce(7)
    box.put(1, tags=[tag])
    assert box.fetch(1, empty=True, **lag(1000)) == []


def test_rows_that_say_nothing_are_accepted_unless_they_are_refused(box: Box) -> None:
    box.announce(1)
    bare = indexes(box.put(2))
    tagged = box.made_by(1)
    assert box.fetch(1, task="refuses", untagged="refuse", **lag(0)) == tagged
    assert box.fetch(3, **lag(0)) == bare + tagged
    box.put(1)
    assert box.fetch(1, task="refuses", empty=True) == []
    assert box.consumed("refuses") == {0: 1, 1: 1, 2: 1, 3: 1}


def test_rows_get_refused_once_they_are_ready_not_before(box: Box) -> None:
    box.announce(1)
    box.put(["k"], ["prompt"])
    assert box.fetch(1, ["prompt", "response"], untagged="refuse", empty=True) == []
    box.put(["k"], ["response"], [{"weight_version": 1, "weight_epoch": "e"}])
    assert box.fetch(1, ["prompt", "response"]) == [0]


def test_tags_that_change_are_judged_anew(box: Box) -> None:
    box.announce(1)
    rows = box.made_by(1, 2)
    assert box.fetch(1, empty=True, wait_s=0, **lag(0)) == rows[:1]
    box.announce(2)
    box.tag(rows, [{"weight_version": 2}] * 2)  # too late for this task
    assert box.fetch(1, empty=True) == []
    assert box.fetch(2, task="u", **lag(0)) == rows
    newer = box.made_by(2)
    box.tag(newer, [{"weight_version": 1}])
    assert box.fetch(1, empty=True) == []


# ---- limits ----


def test_the_strictest_of_those_who_ask_counts(box: Box) -> None:
    for version in range(4):
        box.announce(version)
        box.made_by(version)
    assert box.fetch(1, **lag(2)) == [1]
    assert box.fetch(1, **lag(0)) == [3]
    assert box.fetch(1, empty=True, **lag(3)) == []


def test_the_service_has_a_policy_that_a_task_can_do_without() -> None:
    box = Box(policy=Policy(max_age=0))
    box.announce(1)
    old = box.made_by(1)
    box.announce(2)
    assert box.fetch(1, empty=True) == []
    assert box.fetch(1, task="strict", untagged="refuse", empty=True) == []
    assert box.fetch(1, task="eval", max_staleness=None) == old


@pytest.mark.parametrize("asked", [{"max_staleness": -1}, {"max_staleness": 1.0}, {"max_staleness": True},
                                   {"max_staleness": 1 << 20}, {"untagged": "maybe"}])  # fmt: skip
def test_limits_that_are_none_are_refused(box: Box, asked: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        box.fetch(1, **asked)


def test_a_waiting_fetch_goes_on_waiting_for_fresh_rows(box: Box) -> None:
    box.announce(1)
    box.made_by(1)
    assert box.fetch(2, wait_s=9, ticket="waits", **lag(0)) is None
    box.announce(2)
    fresh = box.made_by(2)
    assert box.answers() == []
    fresh += box.made_by(2)
    assert box.answers() == [("waits", fresh)]


def test_a_stream_ends_when_the_rest_is_too_old(box: Box) -> None:
    box.announce(1)
    box.made_by(1, 3)
    box.controller.tables["p"].declared = 3
    lease, rows = box.lend(1, 100, **lag(0))
    box.ack(lease, rows)
    assert box.lend(3, 100, wait_s=9, ticket="stream", until_done=True, session=b"other", **lag(1)) is not None
    assert box.lend(1, 100, wait_s=9, ticket="end", until_done=True, session=b"third") is None
    box.announce(2)
    box.end_session(b"other")  # its rows come back, and are too old now
    assert box.answers() == [("end", [])]
    assert set(box.consumed().values()) == {1}


def test_lent_rows_are_kept_and_not_offered_again_once_they_are_too_old(box: Box) -> None:
    box.announce(1)
    rows = box.made_by(1, 2)
    lease, lent = box.lend(2, 100, **lag(0))
    assert lent == rows
    box.announce(2)
    assert box.ack(lease, rows[:1]) == 1
    box.expire(200)
    assert box.fetch(1, empty=True) == []
    assert box.controller.staleness.num_stale == {"t": 1}


def test_ranks_get_the_batch_of_the_first_whatever_came_between() -> None:
    box = Box(RankAwareSampler())
    box.announce(1)
    rows = box.made_by(1, 2)
    assert box.fetch(2, dp_rank=0, batch_index=0, **lag(0)) == rows
    box.announce(2)
    assert box.fetch(2, dp_rank=0, batch_index=0, **lag(0)) == rows


def test_groups_are_of_fresh_rows_only() -> None:
    box = Box(GRPOGroupNSampler(n_samples_per_prompt=2))
    box.announce(1)
    box.made_by(1, 2)
    box.announce(2)
    fresh = box.made_by(2, 2)
    assert box.fetch(2, **lag(0)) == fresh


def test_a_reset_offers_again_what_is_fresh(box: Box) -> None:
    box.announce(1)
    box.made_by(1)
    box.announce(2)
    fresh = box.made_by(2)
    assert box.fetch(1, **lag(0)) == fresh
    box.reset()
    assert box.fetch(1) == fresh


def test_an_announcement_looks_only_at_what_becomes_too_old(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.announce(0)
    box.insert(1)
    box.fetch(1, empty=True, **lag(1))
    looked: list[int] = []
    judge = box.controller.staleness._stale

    def watched(table: Table, task: Task, slots: Slots) -> Any:
        looked.append(len(slots))
        return judge(table, task, slots)

    monkeypatch.setattr(box.controller.staleness, "_stale", watched)
    for version in range(1, 6):
        box.made_by(version - 1, 100 * version)
        looked.clear()
        box.controller.handle(m.Announce(1, "e", version), None, b"session", 0.0)  # without looking for invariants
        assert sum(looked) == (100 * (version - 1) if version > 1 else 0)
    assert box.controller.staleness.num_stale == {"t": 1000}


def test_rows_of_an_epoch_become_known_with_its_first_version(box: Box) -> None:
    box.announce(5)
    rows = box.made_by(2, epoch="next life")
    assert box.fetch(1, task="early", empty=True, **lag(0)) == []
    box.announce(2, "next life")
    assert box.fetch(1, **lag(0)) == rows


def test_lists_of_rows_that_never_age_stay_short(box: Box) -> None:
    box.made_by(0)
    for _ in range(30):
        box.clear(box.made_by(1, 1000))
    row_versions = box.controller.tables["p"].row_versions
    assert row_versions.num_listed <= 4096 + 3001
    fresh = box.made_by(1)
    box.announce(1)
    assert box.fetch(1, **lag(0)) == fresh


# ---- admission ----


def test_producers_may_start_as_much_as_will_be_used_in_time(box: Box) -> None:
    box.announce(0)
    assert box.admit(4)
    assert box.admit(4)
    with pytest.raises(DeadlineExceeded, match="8 are admitted"):
        box.admit(1)
    box.announce(1)
    assert box.admit(3)
    assert box.admit(2, wait_s=5, ticket="large") is False
    assert box.admit(1, wait_s=9, ticket="small") is False  # in order of arrival
    assert box.admit(8, task="other")
    box.announce(2)
    assert box.answers() == [("large", 2), ("small", 1)]


def test_counting_begins_with_the_first_request_of_a_task(box: Box) -> None:
    for version in range(50):
        box.announce(version)
    assert box.admit(8)
    with pytest.raises(DeadlineExceeded):
        box.admit(1)


def test_producers_that_are_there_before_the_first_version_start_no_more_than_later_ones(box: Box) -> None:
    assert box.admit(4)
    assert box.admit(4, wait_s=9, ticket="second") is False
    assert box.admit(4, wait_s=9, ticket="third") is False
    box.announce(0)
    assert box.answers() == [("second", 4)]


def test_rows_given_back_or_too_old_let_others_in(box: Box) -> None:
    box.announce(0)
    assert box.admit(4, max_age=0)
    assert box.admit(2, max_age=0, wait_s=9, ticket="a") is False
    box.handle(m.GiveBack(1, "t", 2))
    assert box.answers() == [("a", 2)]
    row = box.made_by(0)
    assert box.fetch(1, **lag(0)) == row
    box.made_by(0, 4)
    assert box.admit(4, max_age=0, wait_s=9, ticket="b") is False
    assert box.admit(4, max_age=0, wait_s=9, ticket="c") is False
    box.announce(1)  # one version more, and four rows that nobody will use
    assert box.answers() == [("b", 4), ("c", 4)]


def admitted(box: Box) -> int:
    return box.controller.staleness.admissions.tasks["t"].rows


def too_old(box: Box, partition: str = "p") -> int:
    return box.controller.tables[partition].tasks["t"].num_stale


def with_four_too_old(**more: Any) -> Box:
    """Six rows were admitted, four of which were found too old."""
    box = Box(**more)
    box.announce(1)
    assert box.admit(6)
    box.made_by(1, 4)
    box.announce(2)
    assert box.fetch(1, empty=True, **lag(0)) == []
    assert admitted(box) == 2
    return box


def test_a_row_gives_its_admission_back_once_however_often_consumption_is_reset() -> None:
    box = with_four_too_old()
    for _ in range(3):
        box.reset()
        assert (admitted(box), too_old(box)) == (2, 4)
    box.announce(3)
    assert admitted(box) == 2


def test_a_row_that_was_used_gives_nothing_back_when_a_reset_finds_it_too_old(box: Box) -> None:
    box.announce(1)
    assert box.admit(6)
    box.made_by(1, 4)
    assert len(box.fetch(4, **lag(0))) == 4
    box.announce(2)
    box.reset()
    assert (admitted(box), too_old(box)) == (6, 4)


def test_a_dead_letter_gives_its_admission_back_once() -> None:
    box = Box(max_deliver=1)
    box.announce(1)
    assert box.admit(2)
    box.put(1)
    for again in (False, True, True):
        if again:
            box.requeue()
        box.nack(box.lend(1)[0])
        assert admitted(box) == 1


def test_what_gave_its_admission_back_is_known_after_a_load() -> None:
    again = reloaded(with_four_too_old())
    assert too_old(again) == 4
    again.reset()
    assert again.fetch(1, empty=True, **lag(0)) == []
    assert (admitted(again), too_old(again)) == (2, 4)


def test_what_gave_its_admission_back_is_known_after_a_restart_with_a_journal() -> None:
    ledger = Ledger()
    box = Box()
    began = exported(box.controller.state)
    box = with_four_too_old(ledger=ledger)
    again = Box()
    recovery = Recovery(again.controller, *began, reserved_rows=0)
    for fact in ledger.take():
        recovery.apply(fact)
    recovery.finish()
    again.reset()
    assert again.fetch(1, empty=True, **lag(0)) == []
    assert (admitted(again), too_old(again)) == (2, 4)


def test_rows_that_became_too_old_are_counted_by_partition(box: Box) -> None:
    box.announce(1)
    box.made_by(1, 2), box.made_by(1, 3, partition="q")
    box.announce(2)
    for partition in ("p", "q"):
        box.fetch(1, empty=True, partition=partition, **lag(0))
    seen = box.handle(m.DescribeService(1, 0))
    assert [(one.name, one.tasks[0].stale) for one in seen.partitions] == [("p", 2), ("q", 3)]
    box.clear(partition="q")
    assert box.controller.statistics()["stale_rows"] == 5


def test_deadlines_and_producers_that_leave(box: Box) -> None:
    box.announce(0)
    assert box.admit(8)
    assert box.admit(5, wait_s=5, ticket="late") is False
    assert box.admit(1, wait_s=9, ticket="gone") is False
    assert box.admit(4, wait_s=9, ticket="last") is False
    assert box.controller.next_deadline() == 5
    box.forget("gone")
    box.expire(5)
    assert [(ticket, type(answer)) for ticket, answer in box.answers()] == [("late", DeadlineExceeded)]
    box.announce(1)
    assert box.answers() == [("last", 4)]


@pytest.mark.parametrize("wrong", [{"count": 9}, {"count": 0}, {"max_age": None}, {"rows_per_version": 0}])
def test_requests_that_never_fit_are_refused(box: Box, wrong: dict[str, int | None]) -> None:
    with pytest.raises(InvalidInput):
        box.admit(**{"count": 1, **wrong})


# ---- checkpoints ----


def test_ages_and_admission_go_on_after_a_restart(box: Box) -> None:
    box.announce(900)
    box.made_by(900)
    box.announce(1, "next life")
    fresh = box.made_by(1, epoch="next life")
    ahead = box.made_by(2, epoch="next life")
    assert box.admit(6)
    again = reloaded(box)
    assert again.fetch(2, task="u", **lag(0)) == fresh + ahead
    with pytest.raises(DeadlineExceeded, match="6 are admitted"):
        again.admit(3)
    assert again.announce(2, "next life") == 3
    with pytest.raises(WrongEpoch):
        again.announce(901)
    assert again.fetch(1, task="v", **lag(0)) == ahead
