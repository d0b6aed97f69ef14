"""One buffer of groups under every policy: what each of them serves, evicts and gives up."""

from __future__ import annotations

from typing import Any

import pytest

from transfer_queue.errors import GroupEnded, GroupsShort, InvalidInput, StaleAttempt
from transfer_queue.groups import GroupPolicy, PoolCore, PoolState, Result, SiblingGroup
from transfer_queue.groups.consistency import is_consistent
from transfer_queue.groups.shortfall import needed, retarget

# (name, version it was started at, version it is for, whether it is sealed), in order of arrival; the trainer is at 5.
BUFFER = [
    ("a", 3, 4, True), ("b", 3, 5, False), ("c", 4, 5, True), ("d", 5, 6, True), ("e", 5, 5, True), ("f", 6, 7, True),
    ("g", 1, 5, True),
]  # fmt: skip


def result(rows: list[int], start: int = 0, **more: Any) -> Result:
    values: dict[str, Any] = {"reward": 1.0, "oldest": start, "newest": start, "tokens": 10, "info": {}}
    return Result(rows, **values | more)


def take(pool: PoolCore, count: int) -> list[int] | None:
    found = pool.tickets(count)
    if found:
        pool.issue(found)
    return found


def pool_of(policy: GroupPolicy, version: int = 0) -> PoolCore:
    return PoolCore(PoolState(policy, version, version))


def opened(pool: PoolCore, name: str, start: int | None = None, size: int = 1, **more: Any) -> None:
    ticket = more.get("ticket")
    if ticket is None and pool.policy.gate is not None:
        ticket = (take(pool, 1) or [None])[0]
    pool.open(
        name, size, more.get("min_size", size), more.get("source", ""), {}, start, ticket, more.get("refills", False)
    )


def sealed(pool: PoolCore, name: str, rows: list[int], **more: Any) -> None:
    """Its slots get a row each."""
    group = pool.groups[name]
    for number, row in enumerate(rows):
        (attempt,) = pool.start([(name, number)])
        pool.done(name, number, attempt, result([row], group.start, **more))


def buffer_in(policy: GroupPolicy) -> PoolCore:
    """The buffer as it is when the trainer comes to 5; its targets, where the policy has some, are those of above."""
    pool = pool_of(policy)
    for number, (name, start, target, is_sealed) in enumerate(BUFFER):
        ticket = None
        if policy.gate is not None:
            pool.state.next_ticket = 100
            ticket = target * policy.groups_per_version + number if policy.serve == "target" else number
            pool.state.reserved.add(ticket)
        opened(pool, name, start, ticket=ticket)
        if is_sealed:
            sealed(pool, name, [number])
    pool.advance(5)
    assert is_consistent(pool)
    return pool


def served(pool: PoolCore) -> str:
    return "".join(group.name for group in pool.eligible())


def evicted(pool: PoolCore) -> str:
    return "".join(sorted(name for name, fate in pool.state.fates.items() if fate == "evicted"))


@pytest.mark.parametrize(
    ("policy", "serves", "gives_up"),
    [
        (GroupPolicy.windowed(1), "cde", "abg"),
        (GroupPolicy.windowed(1, freshest_first=True), "dec", "abg"),
        (GroupPolicy.ready_first(1, 10), "acdeg", ""),
        (GroupPolicy.weight_fifo(1, 10), "c", "ag"),
        (GroupPolicy.weight_fifo(2, 10), "a", "g"),
        (GroupPolicy.in_order(1, 10), "ceg", "a"),
        (GroupPolicy.drop(2), "cde", "ag"),
        (GroupPolicy.dropless(2), "", ""),
        (GroupPolicy.dropless(4), "gacdef", ""),
    ],
    ids=["windowed", "freshest", "ready", "fifo1", "fifo2", "order", "drop", "dropless2", "dropless4"],
)
def test_what_a_policy_serves_and_gives_up(policy: GroupPolicy, serves: str, gives_up: str) -> None:
    pool = buffer_in(policy)
    assert (served(pool), evicted(pool)) == (serves, gives_up)


@pytest.mark.parametrize("name", ["serve", "window", "floor"])
def test_a_setting_that_is_a_text_nobody_can_send_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        GroupPolicy(**{name: "\ud800"})


def test_only_windowed_gives_up_what_is_unfinished() -> None:
    pool = buffer_in(GroupPolicy.windowed(1))
    assert pool.state.sources[""].evicted_for == {"stale": 2, "aborted": 1}
    with pytest.raises(GroupEnded, match="'b' has ended: it was evicted"):
        pool.done("b", 0, 0, result([9]))


def test_dropless_serves_the_oldest_once_the_one_that_blocked_has_finished() -> None:
    pool = buffer_in(GroupPolicy.dropless(2))
    sealed(pool, "b", [10])
    assert served(pool)[:2] == "ga"


def test_a_gate_is_open_for_so_many_versions_ahead() -> None:
    free, gated, ordered = GroupPolicy.windowed(1), GroupPolicy.ready_first(1, 1), GroupPolicy.in_order(1, 1)
    assert take(pool_of(free), 4) == [0, 1, 2, 3]
    for policy in (gated, ordered):
        pool = pool_of(policy)
        assert [take(pool, 1) for _ in range(3)] == [[0], [1], None]
    assert [pool.target_of(ticket) for ticket in (0, 1)] == [0, 1]
    pool.advance(1)
    assert take(pool, 1) == [2]


def test_tickets_come_back_with_groups_that_were_given_up() -> None:
    pool = pool_of(GroupPolicy(gate=1, groups_per_version=8))
    taken = [ticket for _ in range(2) for ticket in take(pool, 8) or []]
    assert take(pool, 1) is None
    for number, ticket in enumerate(taken[:4]):
        opened(pool, f"g{number}", ticket=ticket)
        pool.filter([f"g{number}"])
        sealed(pool, f"g{number}", [number])
    assert take(pool, 4) == taken[:4]
    assert take(pool, 1) is None


def test_a_pool_that_begins_at_a_later_version_counts_from_there() -> None:
    pool = pool_of(GroupPolicy.in_order(1, 1), 5)
    assert [pool.target_of(ticket) for ticket in (take(pool, 1) or []) + (take(pool, 1) or [])] == [5, 6]
    assert take(pool, 1) is None


def test_what_is_for_a_later_version_is_not_stale() -> None:
    pool = pool_of(GroupPolicy.in_order(2, 1))
    tickets = take(pool, 3)
    assert tickets is not None
    opened(pool, "x", 0, ticket=tickets[2])
    sealed(pool, "x", [1])
    pool.advance(2)
    assert served(pool) == "x"
    pool.advance(3)
    assert evicted(pool) == "x"
    assert pool.discarded == [1]


@pytest.mark.parametrize(("floor", "left"), [(0.5, 4), (0.9, None)])
def test_a_version_that_lost_a_group_is_smaller_down_to_a_floor(floor: float, left: int | None) -> None:
    policy = GroupPolicy.in_order(0, 5, shrink=True, floor=floor)
    pool = pool_of(policy, 7)
    for number in range(5):
        opened(pool, f"g{number}")
        if number:
            sealed(pool, f"g{number}", [number])
    for _ in range(policy.max_attempts):
        (attempt,) = pool.start([("g0", 0)])
        pool.fail("g0", 0, attempt, "data")
    if left is None:
        with pytest.raises(GroupsShort, match="version 7 has 4 groups left of 5, its floor is 5"):
            needed(pool, 5)
    else:
        assert needed(pool, 5) == left == len(pool.eligible())


def test_a_group_of_a_later_version_takes_the_place_of_one_that_is_lacking() -> None:
    pool = pool_of(GroupPolicy.in_order(1, 2))
    for name in "abcd":
        opened(pool, name)
    sealed(pool, "b", [1])
    sealed(pool, "c", [2])
    pool.filter(["a"])
    sealed(pool, "a", [0])
    assert served(pool) == "b"
    retarget(pool, "c", 0)
    assert served(pool) == "bc"
    assert [pool.target_of(ticket) for ticket in take(pool, 1) or []] == [1], "the lender is owed one"
    with pytest.raises(InvalidInput, match="version 0 lacks no group"):
        retarget(pool, "d", 0)


def test_a_slot_that_failed_is_tried_again_and_the_attempt_before_is_refused() -> None:
    pool = pool_of(GroupPolicy())
    opened(pool, "x", size=4)
    attempts = pool.start([("x", number) for number in range(4)])
    assert attempts == [0, 0, 0, 0]
    for number in (0, 1, 3):
        pool.done("x", number, 0, result([number]))
    pool.fail("x", 2, 0, "infra")
    assert pool.idle(9, None) == [("x", 2)]
    assert pool.start([("x", 2)]) == [1]
    with pytest.raises(StaleAttempt):
        pool.done("x", 2, 0, result([2]))
    pool.done("x", 2, 1, result([5]))
    assert pool.groups["x"].rows == [0, 1, 5, 3]


def test_a_whole_group_begins_anew_where_the_policy_says_so() -> None:
    pool = pool_of(GroupPolicy(retry="group"))
    opened(pool, "x", size=3)
    pool.start([("x", number) for number in range(3)])
    pool.done("x", 0, 0, result([7]))
    pool.fail("x", 1, 0, "infra")
    assert pool.discarded == [7]
    assert pool.source("").discarded_tokens == result([7]).tokens > 0
    assert pool.idle(9, "x") == [("x", 0), ("x", 1), ("x", 2)]
    for slot in range(3):  # one that was done, one that failed, and one that still ran
        with pytest.raises(StaleAttempt):
            pool.done("x", slot, 0, result([8 + slot]))
    assert is_consistent(pool)


def test_what_an_attempt_that_was_given_up_still_gives_counts_while_no_other_began() -> None:
    pool = pool_of(GroupPolicy())
    opened(pool, "x")
    pool.start([("x", 0)])
    pool.fail("x", 0, 0, "infra")
    assert pool.done("x", 0, 0, result([1]))
    assert served(pool) == "x"


def test_the_same_result_twice_is_one_and_another_one_is_refused() -> None:
    pool = pool_of(GroupPolicy())
    opened(pool, "x", size=2)
    pool.start([("x", 0), ("x", 1)])
    assert pool.done("x", 0, 0, result([1], reward=0.5))
    assert not pool.done("x", 0, 0, result([1], reward=0.5))
    with pytest.raises(InvalidInput, match="has another result already"):
        pool.done("x", 0, 0, result([1], reward=0.7))
    with pytest.raises(InvalidInput, match="row 1 is a result of group 'x' already"):
        pool.done("x", 1, 0, result([1]))
    assert pool.groups["x"].slots[0].result == result([1], reward=0.5)


def test_a_result_or_a_prompt_with_nan_is_the_same_when_it_is_said_again() -> None:
    """As it comes over the wire: each time as another object."""
    pool = pool_of(GroupPolicy())
    for _ in range(2):
        pool.open("x", 1, 1, "", {"target": float("nan")}, None, None, False)
    pool.start([("x", 0)])
    assert pool.done("x", 0, 0, result([1], reward=float("nan"), info={"kl": float("nan")}))
    assert not pool.done("x", 0, 0, result([1], reward=float("nan"), info={"kl": float("nan")}))


def test_a_group_with_enough_siblings_goes_on_without_one_that_failed_for_good() -> None:
    pool = pool_of(GroupPolicy(max_attempts=1))
    opened(pool, "x", size=3, min_size=2)
    pool.start([("x", number) for number in range(3)])
    pool.fail("x", 0, 0, "data")
    pool.done("x", 1, 0, result([1]))
    pool.done("x", 2, 0, result([2]))
    assert served(pool) == "x"
    opened(pool, "y", size=3, min_size=2)
    pool.start([("y", number) for number in range(3)])
    pool.fail("y", 0, 0, "data")
    pool.fail("y", 1, 0, "data")
    assert evicted(pool) == "y"
    assert pool.state.sources[""].evicted_for == {"failed": 1}


def test_a_group_that_is_stale_and_filtered_is_evicted_once() -> None:
    pool = pool_of(GroupPolicy.windowed(1))
    opened(pool, "x", 0)
    pool.filter(["x"])
    pool.state.version = 9  # between its seal and this no version was announced
    sealed(pool, "x", [1])
    source = pool.state.sources[""]
    assert (source.evicted, source.evicted_for, pool.state.owed) == (1, {"stale": 1, "filtered": 1}, 1)


def test_withheld_members_count_for_the_reward_and_not_for_the_rows() -> None:
    pool = pool_of(GroupPolicy(serve="window", window=1, stale="withhold", judge="newest"), 5)
    opened(pool, "x", 5, size=4)
    pool.start([("x", number) for number in range(4)])
    for number, (reward, oldest) in enumerate([(1.0, 3), (0.0, 4), (0.0, 5), (1.0, 5)]):
        pool.done("x", number, 0, result([number], reward=reward, oldest=oldest, newest=5))
    assert pool.withheld(pool.groups["x"]) == [0]
    pool.lend(pool.eligible())
    assert sum(one.reward or 0.0 for one in pool.groups["x"].results) / 4 == 0.5
    assert pool.state.sources[""].withheld == 1


def test_what_is_lent_is_judged_when_it_comes_back() -> None:
    pool = pool_of(GroupPolicy.windowed(1))
    opened(pool, "x", 0)
    sealed(pool, "x", [1])
    pool.lend(pool.eligible())
    pool.advance(3)
    assert evicted(pool) == ""
    pool.release(["x"])
    assert evicted(pool) == "x"


def test_refills_pay_for_what_was_evicted() -> None:
    pool = pool_of(GroupPolicy.drop(1))
    for name in "ab":
        opened(pool, name)
        sealed(pool, name, [ord(name)])
    pool.advance(2)
    assert pool.state.owed == 2
    opened(pool, "c", refills=True)
    assert (pool.state.owed, pool.state.sources[""].refilled) == (1, 1)


def test_a_group_has_any_number_of_rows_for_each_slot() -> None:
    pool = pool_of(GroupPolicy())
    opened(pool, "x", size=2)
    pool.start([("x", 0), ("x", 1)])
    pool.done("x", 0, 0, result([1, 2, 3]))
    assert served(pool) == ""
    pool.done("x", 1, 0, result([4]))
    assert pool.groups["x"].rows == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "settings",
    [
        {"serve": "window"}, {"stale": "evict"}, {"serve": "target"}, {"window": -1}, {"window": 1.5},
        {"groups_per_version": 0}, {"max_attempts": 0}, {"floor": 2.0}, {"serve": "newest"}, {"order": "random"},
        {"stale": "drop"}, {"aborts": 1, "window": 1}, {"gate": True},
        {"serve": "target", "gate": 1, "stale": "withhold"},
        {"serve": "window", "window": 1, "samples_per_insert": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        GroupPolicy(**settings)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "1", None])
@pytest.mark.parametrize("policy", [GroupPolicy.drop, GroupPolicy.dropless])
def test_a_span_that_is_none_is_refused_by_its_name(policy: Any, steps: Any) -> None:
    with pytest.raises(InvalidInput, match="max_span"):
        policy(steps)


def test_a_group_is_opened_twice_in_the_same_way_only() -> None:
    pool = pool_of(GroupPolicy())
    opened(pool, "x", size=2)
    opened(pool, "x", size=2)
    assert pool.num_open == 1
    with pytest.raises(InvalidInput, match="with another size"):
        opened(pool, "x", size=3)
    with pytest.raises(InvalidInput, match="1 <= min_size <= size"):
        opened(pool, "y", size=2, min_size=3)


def test_a_claim_looks_only_at_groups_that_have_idle_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(GroupPolicy())
    for number in range(300):
        opened(pool, f"g{number}")
    pool.start(pool.idle(299, None))
    assert pool.idle(9, None) == [("g299", 0)]
    looked: list[str] = []
    idle = SiblingGroup.idle
    monkeypatch.setattr(SiblingGroup, "idle", lambda group: looked.append(group.name) or idle(group))
    assert pool.idle(9, None) == [("g299", 0)]
    assert looked == ["g299"]
    pool.fail("g7", 0, 0, "infra")
    assert pool.idle(9, None) == [("g7", 0), ("g299", 0)]
