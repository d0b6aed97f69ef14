"""The end of a pool, and of a version: who waits for what cannot come hears of it."""

from __future__ import annotations

import pytest
from tables import indexes
from test_groups_controller import GroupBox, names

from transfer_queue.errors import GroupsShort, InvalidInput, LeaseExpired, StaleAttempt
from transfer_queue.groups import GroupPolicy
from transfer_queue.wire import messages as m


def test_who_waits_hears_that_no_more_will_come() -> None:
    box = GroupBox()
    box.made("x")
    box.open("y")
    assert box.ask(m.AwaitGroups, 4, 60.0, asker="watcher") is None
    assert box.select(4, 4, 60.0, asker="trainer") is None
    box.ask(m.EndPool)
    assert box.told() == {}, "y may still come"
    box.claim()
    assert box.claim(1, timeout_s=60.0, asker="worker") is None
    box.finish("y")
    told = box.told()
    assert names(told["trainer"]) == ["x", "y"]
    assert told["trainer"].ended
    assert told["watcher"].count == 2
    assert told["worker"].ended
    with pytest.raises(InvalidInput, match="no more would be opened"):
        box.open("z")


def shrinking(lead: int, size: int) -> GroupBox:
    """Every version that may be started has all its groups, g0, g1, ..., which are finished."""
    box = GroupBox(GroupPolicy.in_order(lead, size, shrink=True, floor=0.25))
    for one in box.ask(m.TakeTickets, size * (lead + 1), 0.0).tickets:
        box.made(f"g{one.number}", ticket=one.number)
    return box


def test_a_version_that_is_smaller_is_taken_in_parts_to_its_last_group() -> None:
    box = shrinking(1, 4)
    box.ask(m.FilterGroups, ["g1"])
    first, last = box.select(2, 2), box.select(2, 2)
    assert names(first) + names(last) == ["g0", "g2", "g3"]
    assert box.select(2, 2, 60.0, asker="ahead") is None, "this version has no more"
    box.ask(m.ReleaseGroups, first.lease, None)
    assert names(box.told()["ahead"]) == ["g0", "g2"]
    assert box.select(2, 2, 60.0, asker="ahead") is None
    box.ask(m.AdvancePool, 1)
    assert names(box.told()["ahead"]) == ["g4", "g5"]


def test_a_version_is_smaller_without_a_group_that_took_the_place_of_another() -> None:
    box = shrinking(1, 4)
    box.ask(m.FilterGroups, ["g0"])
    box.ask(m.RetargetGroup, "g7", 0)
    box.ask(m.FilterGroups, ["g7"])
    assert names(box.select(4, 4)) == ["g1", "g2", "g3"]


def test_a_batch_without_groups_says_that_it_is_the_last() -> None:
    box = GroupBox(GroupPolicy(order="weighted"))
    box.made("x"), box.made("never drawn", priority=0.0)
    box.ask(m.EndPool)
    first = box.select()
    assert (names(first), first.ended) == (["x"], True)
    box.ask(m.AckGroups, first.lease, None, False)
    assert box.select().ended


def test_after_the_end_who_selects_waits_for_the_version_that_groups_are_for() -> None:
    box = GroupBox(GroupPolicy.in_order(1, 1))
    for one in box.ask(m.TakeTickets, 2, 0.0).tickets:
        box.made(f"g{one.number}", ticket=one.number)
    box.ask(m.EndPool)
    first = box.select()
    assert (names(first), first.ended) == (["g0"], False)
    box.ask(m.AckGroups, first.lease, None, False)
    assert box.select(wait_s=60.0, asker="trainer") is None
    box.ask(m.AdvancePool, 1)
    told = box.told()["trainer"]
    assert (names(told), told.ended) == (["g1"], True)


def test_after_the_end_the_last_groups_need_not_be_so_many() -> None:
    box = GroupBox(GroupPolicy(min_size_to_sample=4))
    box.made("x")
    assert box.select(wait_s=60.0, asker="trainer") is None
    box.ask(m.EndPool)
    told = box.told()["trainer"]
    assert (names(told), told.ended) == (["x"], True)


def test_a_ticket_that_nobody_used_does_not_hold_up_the_end() -> None:
    box = GroupBox(GroupPolicy.ready_first(0, 2))
    tickets = [one.number for one in box.ask(m.TakeTickets, 2, 0.0).tickets]
    box.made("x", ticket=tickets[0])
    assert box.claim(1, timeout_s=60.0, asker="worker") is None
    assert box.select(2, 2, 60.0, asker="trainer") is None
    box.ask(m.EndPool)
    told = box.told()
    assert (names(told["trainer"]), told["trainer"].ended, told["worker"].ended) == (["x"], True, True)
    box.ask(m.ReturnTickets, [tickets[1]])
    box.ask(m.AckGroups, told["trainer"].lease, None, False)
    assert box.select().ended


def test_who_waits_to_open_groups_hears_that_no_more_are_opened() -> None:
    box = GroupBox(GroupPolicy.ready_first(0, 1))
    box.ask(m.TakeTickets, 1, 0.0)
    assert box.ask(m.TakeTickets, 1, 60.0, asker="producer") is None
    assert box.ask(m.TakeRefills, 1, 60.0, asker="refiller") is None
    box.ask(m.EndPool)
    told = box.told()
    assert told["producer"].code == told["refiller"].code == InvalidInput.code
    for kind in (m.TakeTickets, m.TakeRefills):
        with pytest.raises(InvalidInput, match="no more groups would be opened"):
            box.ask(kind, 1, 60.0)


def test_who_selects_hears_that_a_group_was_given_up_for_good() -> None:
    box = GroupBox(GroupPolicy(max_attempts=1))
    box.open("x")
    box.claim()
    box.ask(m.EndPool)
    assert box.select(1, 1, 60.0, asker="trainer") is None
    box.ask(m.FailSlots, [m.Attempt("x", 0, 0)], "data")
    reply = box.told()["trainer"]
    assert (reply.groups, reply.ended) == ([], True)


def test_who_waits_for_the_groups_of_a_version_hears_that_it_is_smaller() -> None:
    box = shrinking(1, 4)
    box.ask(m.FilterGroups, ["g1"])
    assert box.ask(m.AwaitGroups, 4, 0.0).count == 3
    assert len(box.select(4, 4).groups) == 3
    assert box.ask(m.AwaitGroups, 4, 60.0, asker="watcher") is None
    box.ask(m.AdvancePool, 1)
    assert box.told()["watcher"].count == 4
    box.ask(m.FilterGroups, ["g4", "g5", "g6", "g7"])
    with pytest.raises(GroupsShort):
        box.ask(m.AwaitGroups, 1, 60.0)


def test_a_pool_is_removed_once_all_of_it_is_used() -> None:
    box = GroupBox()
    rows = box.made("x", 2)
    with pytest.raises(InvalidInput, match="is in use: it has 0 open groups, 1 sealed and 0 lent"):
        box.ask(m.RemovePool, False)
    box.ask(m.AckGroups, box.select().lease, None, False)
    box.ask(m.RemovePool, False)
    box.ask(m.RemovePool, False)
    assert box.rows() == rows, "used rows stay"
    groups = box.controller.state.groups
    assert (groups.pools, groups._holdings[b"worker"].attempts, groups.uses.at) == ({}, {}, {})
    with pytest.raises(InvalidInput, match="has no pool of groups"):
        box.report()


def test_a_pool_that_is_discarded_takes_its_rows_leases_and_waiters_along() -> None:
    box = GroupBox()
    kept = indexes(box.put(1))
    box.made("lent"), box.made("sealed"), box.open("half", 2)
    box.claim()
    box.finish("half", 0)
    lease = box.select(1, 1).lease
    assert box.select(9, 9, 60.0, asker="trainer", fields=["x"]) is None
    assert box.claim(1, timeout_s=60.0, asker="worker") is None
    box.ask(m.RemovePool, True)
    told = box.told()
    assert {one: told[one].text for one in told} == dict.fromkeys(
        ("trainer", "worker"), "the pool of groups of partition 'p' was removed"
    )
    assert box.rows() == kept
    with pytest.raises(LeaseExpired):
        box.ask(m.AckGroups, lease, None, True)
    assert all(one.first() is None for one in box.controller.state.groups.deadlines)


def test_what_somebody_still_has_of_a_removed_pool_means_nothing_in_the_next_one() -> None:
    policy = GroupPolicy.in_order(0, 3)
    box = GroupBox(policy)
    old = box.ask(m.TakeTickets, 2, 0.0, session=b"old").tickets
    box.open("x", ticket=old[0].number)
    assert box.claim(session=b"old") == [("x", 0, 0)]
    box.ask(m.RemovePool, True)
    box.ask(m.OpenPool, policy, 7)
    new = box.ask(m.TakeTickets, 3, 0.0, session=b"new").tickets
    assert [one.target for one in new] == [7, 7, 7]
    with pytest.raises(InvalidInput, match="nobody was given it"):
        box.open("y", ticket=old[1].number)
    box.open("x", ticket=new[0].number)
    assert box.claim(session=b"new") == [("x", 0, 1)]
    with pytest.raises(StaleAttempt):
        box.finish("x", 0, 0)
    box.end_session(b"old")
    assert box.report()["tickets_out"] == 2, "those of the other session are not given back"
    box.finish("x", 0, 1)
    assert names(box.select()) == ["x"]


def test_who_waits_while_a_trainer_goes_back_gets_as_many_groups_as_were_asked_for() -> None:
    box = GroupBox()
    for name in "abc":
        box.made(name)
    box.ask(m.MarkPool, 0)
    for count in (1, 2):
        box.ask(m.AckGroups, box.select(count, count).lease, None, False)
    box.select(1, 1, 60.0, session=b"one", asker="one")
    box.select(1, 1, 60.0, session=b"two", asker="two")
    box.ask(m.ResumePool, 0)
    assert {asker: names(reply) for asker, reply in box.told().items()} == {"one": ["a"], "two": ["b"]}


def test_who_waits_for_more_groups_than_a_batch_had_gets_them_when_a_trainer_goes_back() -> None:
    box = GroupBox()
    for name in "ab":
        box.made(name)
    box.ask(m.MarkPool, 0)
    for _ in range(2):
        box.ask(m.AckGroups, box.select(1, 1).lease, None, False)
    box.select(2, 2, 60.0, asker="waits")
    box.ask(m.ResumePool, 0)
    assert names(box.told()["waits"]) == ["a", "b"]


def test_who_waits_for_fields_gets_the_next_batch_that_is_due_when_another_took_the_one_before() -> None:
    box = GroupBox()
    for name in "abc":
        box.put(box.made(name), ["z"] if name == "b" else ["a"])
    box.ask(m.MarkPool, 0)
    for _ in "abc":
        box.ask(m.AckGroups, box.select(1, 1).lease, None, False)
    box.ask(m.ResumePool, 0)
    assert box.select(1, 1, 60.0, fields=["z"], asker="waits") is None
    assert names(box.select(1, 1)) == ["a"]
    assert names(box.told()["waits"]) == ["b"]
