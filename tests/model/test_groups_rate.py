"""Priorities of groups, and a rate between those who make them and those who use them, as requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_groups_controller import GroupBox, names

from transfer_queue.errors import InvalidInput, TransferQueueError
from transfer_queue.groups import GroupPolicy
from transfer_queue.wire import messages as m


def test_a_group_that_is_selected_lets_in_the_producer_that_waited_before() -> None:
    box = GroupBox(GroupPolicy.prioritized(9, samples_per_insert=1.0))
    for number in range(2):
        (ticket,) = box.ask(m.TakeTickets, 1, 0.0, session=b"worker").tickets
        box.made(f"g{number}", ticket=ticket.number)
    assert box.ask(m.TakeTickets, 1, 60.0, session=b"worker", asker="producer") is None
    reply = box.select(1, 1)
    assert [one.number for one in box.told()["producer"].tickets] == [2]
    assert box.select(1, 1, 60.0, asker="trainer") is not None
    assert box.select(1, 1, 60.0, asker="late") is None  # as many as were made
    box.ask(m.ReleaseGroups, reply.lease, None)  # not used after all
    assert len(box.told()["late"].groups) == 1


def test_a_group_that_waits_behind_its_rate_comes_with_the_next_one_that_is_made() -> None:
    box = GroupBox(GroupPolicy.prioritized(9, samples_per_insert=1.0, min_size_to_sample=2))
    first, second, third = (
        ticket.number for _ in range(3) for ticket in box.ask(m.TakeTickets, 1, 0.0, session=b"worker").tickets
    )
    box.made("x", ticket=first)
    assert box.select(1, 1, 60.0, asker="trainer") is None
    box.made("y", ticket=second)
    assert len(box.told()["trainer"].groups) == 1
    box.made("z", ticket=third)


@pytest.mark.parametrize(("kind", "count"), [(m.SelectGroups, 8), (m.TakeTickets, 5)])
def test_more_at_once_than_a_rate_ever_allows_is_refused(kind: Any, count: int) -> None:
    box = GroupBox(GroupPolicy.prioritized(9, samples_per_insert=2.0, error_buffer=4.0))
    with pytest.raises(InvalidInput, match="a larger error_buffer more"):
        box.ask(kind, count, *((9, None, 10.0) if kind is m.SelectGroups else ()), 60.0)


def test_priorities_are_set_for_all_groups_or_for_none() -> None:
    box = GroupBox(GroupPolicy(order="priority"))
    box.made("x")
    box.made("y")
    for names_, priorities in ((["y", "nobody"], [9.0, 1.0]), (["y", "x"], [9.0, -1.0]), (["y"], [9.0, 1.0])):
        with pytest.raises(InvalidInput):
            box.ask(m.PrioritizeGroups, names_, priorities)
    assert names(box.select(1, 1)) == ["x"]  # both had 1: in order of arrival


def made_with_tickets(box: GroupBox, rounds: int, count: int = 4) -> list[str]:
    found = [f"g{rounds}.{one.number}" for one in box.ask(m.TakeTickets, count, 0.0, session=b"worker").tickets]
    for name in found:
        box.made(name, ticket=int(name.partition(".")[2]))
    return found


@pytest.mark.parametrize("goes", ["filtered", "stale", "cleared"])
def test_groups_that_nobody_used_do_not_hold_up_their_producers(goes: str) -> None:
    policy = {"serve": "window", "window": 0, "stale": "evict"} if goes == "stale" else {}
    box = GroupBox(GroupPolicy(samples_per_insert=1.0, error_buffer=16.0, **policy))  # type: ignore[arg-type]
    for rounds in range(30):
        made = made_with_tickets(box, rounds)
        if goes == "filtered":
            box.ask(m.FilterGroups, made[:2])
        elif goes == "cleared":
            box.clear(box.rows()[-2:])
        box.ask(m.AckGroups, box.select(2, 2).lease, None, True)
        box.ask(m.AdvancePool, rounds + 1)


@pytest.mark.parametrize("seed", range(20))
def test_with_a_rate_somebody_can_always_go_on(seed: int) -> None:
    choose = random.Random(seed)
    uses = choose.choice([None, 2, 4])
    box = GroupBox(
        GroupPolicy.prioritized(
            choose.choice([4, 64]),
            samples_per_insert=choose.choice([0.5, 2.0]),
            max_times_sampled=uses,
            seed=seed,
            min_size_to_sample=choose.randint(1, 3),
            error_buffer=choose.choice([8.0, 16.0]),
        )
    )
    for rounds in range(300):
        pool = box.controller.groups.pools["p"]
        try:
            match choose.randrange(4):
                case 0 | 1:
                    made_with_tickets(box, rounds, choose.randint(1, 3))
                case 2:
                    box.ask(m.AckGroups, box.select(1, 3).lease, None, True)
                case 3 if pool.groups:
                    box.ask(m.FilterGroups, choose.sample(sorted(pool.groups), choose.randint(1, len(pool.groups))))
        except TransferQueueError:
            assert pool.tickets(1) is not None or pool.offered(1, 1, None)[0]


def test_who_waits_for_groups_hears_of_those_that_the_rate_allows() -> None:
    box = GroupBox(GroupPolicy.prioritized(9, samples_per_insert=1.0))
    made_with_tickets(box, 0, 1)
    assert box.ask(m.AwaitGroups, 1, 0.0).count == 1
    box.ask(m.AckGroups, box.select(1, 1).lease, None, False)
    assert box.ask(m.AwaitGroups, 1, 60.0, asker="watcher") is None, "select would wait as well"
    assert box.ask(m.DescribePool).values["eligible"] == 0
    made_with_tickets(box, 1, 1)
    assert box.told()["watcher"].count == 1


def test_who_waits_for_groups_hears_of_none_that_is_never_drawn() -> None:
    box = GroupBox(GroupPolicy.prioritized(9))
    box.made("x")
    box.ask(m.PrioritizeGroups, ["x"], [0.0])
    assert box.ask(m.AwaitGroups, 1, 60.0, asker="watcher") is None
    box.ask(m.PrioritizeGroups, ["x"], [1e-40])
    assert box.told()["watcher"].count == 1
