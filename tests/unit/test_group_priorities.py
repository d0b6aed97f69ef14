"""Groups by priority: the order, the draws, how often one is used, and how many of them for each that is made."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_group_policies import pool_of, sealed, take

from transfer_queue.errors import InvalidInput
from transfer_queue.groups import GroupPolicy, PoolCore
from transfer_queue.groups.consistency import is_consistent
from transfer_queue.groups.priorities import HighestFirst, SumTree, Weighted
from transfer_queue.groups.rate import SampleRate

ALL = math.inf
WEIGHTS = st.sampled_from([0.0, 1e-9, 0.25, 1.0, 3.0, 1e12])


def made(pool: PoolCore, name: str, priority: float = 1.0) -> None:
    """A sealed group of one row."""
    ticket = (take(pool, 1) or [None])[0] if pool.policy.needs_ticket else None
    pool.open(name, 1, 1, "", {}, None, ticket, False, priority)
    sealed(pool, name, [1000 + pool.groups[name].number])


def lent(pool: PoolCore, least: int = 1, most: int | None = None) -> list[str]:
    found, _ = pool.offered(least, most or least, lambda group: True)
    pool.lend([group for group, _ in found])
    assert is_consistent(pool)
    return [group.name for group, _ in found]


@given(st.lists(st.tuples(st.integers(0, 40), WEIGHTS), max_size=80), st.floats(0.0, 1.0, exclude_max=True))
def test_a_sum_tree_finds_the_weight_under_which_a_mass_falls(changes: list[tuple[int, float]], share: float) -> None:
    tree, plain = SumTree(), dict[int, float]()
    for place, weight in changes:
        tree.set(place, weight)
        plain[place] = weight
    assert tree.total == pytest.approx(sum(plain.values()))
    if tree.total > 0.0:
        mass = share * tree.total
        place = tree.find(mass)
        before = sum(weight for other, weight in plain.items() if other < place)
        assert plain[place] > 0.0
        slack = 1e-9 * tree.total
        assert before - slack <= mass <= before + plain[place] + slack


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | WEIGHTS), max_size=60), st.integers(1, 7))
def test_the_highest_priority_comes_first_and_of_equals_who_arrived_first(
    changes: list[tuple[str, float | None]], most: int
) -> None:
    index, live = HighestFirst(), dict[str, float]()
    for name, priority in changes:
        if priority is None:
            index.remove(name)
            live.pop(name, None)
        else:
            index.add(name, ord(name), priority)
            live[name] = priority
    ranked = sorted((name for name in live if name != "c"), key=lambda name: (-live[name], name))
    for _ in range(2):  # looking changes nothing
        assert [one.name for one in index.pick(most, lambda name: name != "c", 0)] == ranked[:most]


def test_draws_are_as_frequent_as_their_probabilities_say() -> None:
    index, priorities = Weighted(2.0, 7), {"a": 1.0, "b": 2.0, "c": 3.0, "never": 0.0}
    for number, (name, priority) in enumerate(priorities.items()):
        index.add(name, number, priority)
    drawn, said = Counter[str](), dict[str, float]()
    for draw in range(20_000):
        (one,) = index.pick(1, lambda name: True, draw)
        drawn[one.name] += 1
        said[one.name] = one.probability
    assert said == {"a": 1 / 14, "b": 4 / 14, "c": 9 / 14}
    for name, probability in said.items():
        spread = math.sqrt(probability * (1 - probability) / 20_000)
        assert abs(drawn[name] / 20_000 - probability) < 5 * spread
    assert {one.name for one in index.pick(9, lambda name: True, 0)} == {"a", "b", "c"}  # no repeats, none of weight 0


def test_a_draw_does_not_depend_on_the_one_before_whatever_was_not_accepted() -> None:
    index = Weighted(1.0, 7)
    for number, name in enumerate(["a", "b", "c", "d", *(f"not yet {number}" for number in range(12))]):
        index.add(name, number, 1.0)
    drawn = [index.pick(1, lambda name: len(name) == 1, draw)[0].name for draw in range(4_000)]
    num_repeats = sum(one == other for one, other in itertools.pairwise(drawn))
    assert abs(num_repeats / 4_000 - 1 / 4) < 5 * math.sqrt(1 / 4 * 3 / 4 / 4_000)


@pytest.mark.parametrize("order", ["priority", "weighted"])
def test_priorities_change_while_a_group_is_open_sealed_or_lent(order: Any) -> None:
    pool = pool_of(GroupPolicy(order=order, max_times_sampled=None, capacity=9))
    made(pool, "x", 0.0 if order == "weighted" else 1.0)
    made(pool, "y", 5.0)
    assert lent(pool) == ["y"]
    pool.prioritize({"y": 0.0, "x": 2.0})
    pool.consume(["y"], clears=False)
    assert lent(pool) == ["x"]
    pool.prioritize({"x": 0.0, "y": 1.0})
    pool.release(["x"])
    assert lent(pool) == ["y"]


def test_a_group_is_used_up_by_its_last_acknowledgement() -> None:
    pool = pool_of(GroupPolicy(max_times_sampled=2))
    made(pool, "x")
    assert lent(pool) == ["x"]
    pool.release(["x"])  # was not used
    for uses in (1, 2):
        assert lent(pool) == ["x"]
        assert pool.groups["x"].times_sampled == uses
        pool.consume(["x"], clears=True)
    assert (pool.state.fates, pool.discarded, pool.state.sampled) == ({"x": "consumed"}, [1000], 2)


def test_the_oldest_finished_group_makes_room_and_nobody_is_asked_for_another() -> None:
    pool = pool_of(GroupPolicy.prioritized(2))
    made(pool, "w")
    assert lent(pool) == ["w"]  # somebody has it: it stays until it comes back
    for name in "xyz":
        made(pool, name)
    assert pool.state.fates == {"x": "evicted"}
    pool.consume(["w"], clears=False)
    assert pool.source("").evicted_for == {"surplus": 2}
    assert pool.state.owed == 0
    assert set(pool.groups) == {"y", "z"}


def test_what_is_made_while_all_groups_are_lent_takes_their_place() -> None:
    pool = pool_of(GroupPolicy.prioritized(4))
    for name in "abcd":
        made(pool, name)
    taken = lent(pool, 4)
    for name in "efgh":
        made(pool, name)
    pool.release(taken[:1])
    pool.consume(taken[1:], clears=False)
    assert set(pool.groups) == set("efgh")


def test_an_ended_pool_says_so_when_nothing_can_be_sampled_any_more() -> None:
    pool = pool_of(GroupPolicy(max_times_sampled=2))
    made(pool, "x")
    pool.state.ended = True
    assert lent(pool) == ["x"]
    assert not pool.ends_with([pool.groups["x"]])  # it comes back
    pool.consume(["x"], clears=False)
    assert lent(pool) == ["x"]
    assert pool.ends_with([pool.groups["x"]])


def test_an_ended_pool_with_a_rate_ends_when_its_samples_are_used() -> None:
    pool = pool_of(GroupPolicy.prioritized(9, samples_per_insert=1.0))
    made(pool, "x")
    pool.state.ended = True
    assert lent(pool) == ["x"]
    assert pool.ends_with([pool.groups["x"]])
    pool.consume(["x"], clears=False)
    assert pool.offered(1, 1, lambda group: True) == ([], False)


def test_nobody_samples_before_there_are_enough_groups() -> None:
    pool = pool_of(GroupPolicy.prioritized(9, min_size_to_sample=3))
    for name in "xy":
        made(pool, name)
    assert lent(pool) == []
    assert pool.eligible() == []
    made(pool, "z")
    assert len(lent(pool, 2)) == 2


def test_groups_that_are_not_ready_are_passed_over() -> None:
    pool = pool_of(GroupPolicy.prioritized(9))
    for name in "xyz":
        made(pool, name, 1.0 + 9 * (name == "x"))
    found, refused = pool.offered(2, 3, lambda group: group.name != "x")
    assert sorted(group.name for group, _ in found) == ["y", "z"]
    assert refused
    assert pool.offered(3, 3, lambda group: group.name != "x")[0] == []


@given(
    st.sampled_from([0.5, 1.0, 3.0, 8.0]), st.integers(1, 20), st.floats(1.0, 5.0),
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=200),
)  # fmt: skip
def test_a_rate_keeps_its_bounds_and_somebody_can_always_go_on(
    per_insert: float, least_size: int, slack: float, asks: list[tuple[bool, int]]
) -> None:
    buffer = slack * max(1.0, per_insert) * 2
    rate = SampleRate(
        GroupPolicy.prioritized(
            10**6, samples_per_insert=per_insert, min_size_to_sample=least_size, error_buffer=buffer
        )
    )
    inserted = sampled = 0
    for inserts, count in asks:
        if inserts and rate.may_insert(count, inserted, inserted, sampled):
            inserted += count
        elif not inserts and count <= rate.samples_left(inserted, inserted, sampled):
            sampled += count
        assert inserted <= least_size or inserted * per_insert - sampled <= rate.highest
        assert not sampled or inserted * per_insert - sampled >= rate.lowest
        assert rate.may_insert(1, inserted, inserted, sampled) or rate.samples_left(inserted, inserted, sampled) >= 1


@pytest.mark.parametrize(
    "settings",
    [
        {"order": "weighted", "serve": "cohort", "window": 1}, {"order": "priority", "serve": "target", "gate": 1},
        {"max_times_sampled": 2, "serve": "dropless", "window": 1}, {"max_times_sampled": None}, {"capacity": 0},
        {"max_times_sampled": 0}, {"min_size_to_sample": 0}, {"capacity": 2, "min_size_to_sample": 3},
        {"priority_exponent": math.nan}, {"priority_exponent": 11.0}, {"priority_exponent": -1.0},
        {"error_buffer": 3.0}, {"samples_per_insert": 0.0}, {"samples_per_insert": math.inf},
        {"samples_per_insert": 1.5}, {"samples_per_insert": 3.0, "max_times_sampled": 2},
        {"samples_per_insert": 1.0, "gate": 1}, {"samples_per_insert": 4.0, "error_buffer": 3.0},
        {"samples_per_insert": 4.0, "error_buffer": math.nan}, {"seed": -1}, {"order": "random"},
    ],
)  # fmt: skip
def test_settings_of_priorities_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        GroupPolicy(**settings)


@pytest.mark.parametrize("priority", [-1.0, math.nan, math.inf, 2e12])
def test_what_is_no_priority_is_refused(priority: float) -> None:
    pool = pool_of(GroupPolicy.prioritized(9))
    with pytest.raises(InvalidInput, match="priority"):
        made(pool, "x", priority)
    made(pool, "x")
    with pytest.raises(InvalidInput, match="priority"):
        pool.prioritize({"x": priority})
    assert pool.groups["x"].priority == 1.0


def test_a_priority_above_0_is_drawn_however_small_its_power_is() -> None:
    pool = pool_of(GroupPolicy.prioritized(9, priority_exponent=10.0, max_times_sampled=1))
    made(pool, "x", priority=1e-40)
    pool.end()
    assert pool.num_available == 1
    assert lent(pool) == ["x"]
    assert pool.ends_with([pool.groups["x"]])
