"""SeqlenBalancedSampler, and the division of lengths into parts of about the same sum."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import Box, reloaded

import transfer_queue as tq
from transfer_queue.controller import Controller
from transfer_queue.controller.facts import SamplerIs
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import InvalidInput, LeaseExpired
from transfer_queue.sampler import SeqlenBalancedSampler, from_spec, resolve
from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions, karmarkar_karp

Rows = list[int]


class View:
    """A partition as samplers see it."""

    any_tags = True

    def __init__(self, tags: Mapping[int, dict[str, object]]) -> None:
        self.all = tags

    def get_custom_meta(self, global_indices: Rows) -> dict[int, Any]:
        return {index: self.all[index] for index in global_indices if index in self.all}


def view_of(lengths: list[Any]) -> View:
    return View({index: {"total_lengths": length} for index, length in enumerate(lengths)})


def shares(sampler: SeqlenBalancedSampler, ready: Rows, size: int, partition: object = None, **more: Any) -> list[Rows]:
    return [
        sampler.sample(ready, size, partition=partition, dp_rank=rank, **more)[0] for rank in range(sampler.dp_size)
    ]


# ---- division ----


def sums(lengths: list[Any], parts: list[Rows]) -> list[Any]:
    return [sum(lengths[item] for item in part) for part in parts]


def spread(lengths: list[Any], parts: list[Rows]) -> Any:
    return max(sums(lengths, parts)) - min(sums(lengths, parts))


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[int], int, bool]:
    k, equal = draw(st.integers(1, 9)), draw(st.booleans())
    size = k * draw(st.integers(1, 12)) if equal else draw(st.integers(k, 12 * k))
    return draw(st.lists(st.integers(0, 5000), min_size=size, max_size=size)), k, equal


@settings(deadline=None)
@given(divisions())
def test_every_item_is_in_one_part_and_no_part_is_empty(division: tuple[list[int], int, bool]) -> None:
    lengths, k, equal = division
    parts = get_seqlen_balanced_partitions(lengths, k, equal)
    assert len(parts) == k
    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and part for part in parts)
    assert not equal or {len(part) for part in parts} == {len(lengths) // k}


@settings(deadline=None)
@given(divisions())
def test_parts_differ_by_no_more_than_dealt_ones_and_one_item(division: tuple[list[int], int, bool]) -> None:
    lengths, k, equal = division
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    dealt = [order[i::k] for i in range(k)]
    assert spread(lengths, karmarkar_karp(lengths, k, equal)) <= spread(lengths, dealt) + max(lengths)


@settings(deadline=None)
@given(divisions())
def test_the_same_lengths_give_the_same_parts(division: tuple[list[int], int, bool]) -> None:
    lengths, k, equal = division
    assert karmarkar_karp(lengths, k, equal) == karmarkar_karp(list(lengths), k, equal)


def test_the_textbook_example_ends_with_a_difference_of_two() -> None:
    """Differencing of 8, 7, 6, 5, 4 leaves 2, although 8 + 7 = 6 + 5 + 4."""
    assert sorted(sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2, False))) == [14, 16]


def test_parts_of_equal_size_have_about_the_same_sum() -> None:
    lengths = [100, 1, 1, 1, 50, 50, 99, 2]
    assert spread(lengths, karmarkar_karp(lengths, 2, True)) <= 4


def test_items_of_no_length_are_spread_as_well() -> None:
    assert all(karmarkar_karp([0] * 6, 4, False))
    assert sorted(map(len, karmarkar_karp([0.5] * 6, 3, False))) == [2, 2, 2]


@pytest.mark.parametrize(
    ("lengths", "k", "equal"),
    [([1], 0, False), ([1], -1, False), ([1], 2, False), ([], 1, False), ([1, 2, 3], 2, True), ([1], 1.5, True),
     ([1, "2"], 1, True), ([1, True], 1, True), ([1, float("nan")], 2, False), ([1, -1], 2, False)],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(lengths: list[Any], k: Any, equal: bool) -> None:
    for divide in (karmarkar_karp, get_seqlen_balanced_partitions):
        with pytest.raises(InvalidInput):
            divide(lengths, k, equal)


def test_8192_lengths_are_divided_quickly() -> None:
    lengths = [(i * 7919) % 8191 for i in range(8192)]

    def once() -> float:
        start = time.thread_time()  # others may have the processor
        karmarkar_karp(lengths, 8, True)
        return time.thread_time() - start

    assert min(once() for _ in range(5)) < 0.1


# ---- the sampler alone ----


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    lengths = [10, 400, 30, 370, 200, 210, 190, 190]
    found = shares(SeqlenBalancedSampler(dp_size=2), list(range(8)), 4, view_of(lengths))
    assert sorted(found[0] + found[1]) == list(range(8))
    assert [len(share) for share in found] == [4, 4]
    assert spread(lengths, found) <= 40


def test_the_first_caller_reserves_the_rows_of_all_ranks() -> None:
    """T-12: rows of a batch that other ranks have not asked for yet are not free."""
    sampler = SeqlenBalancedSampler(dp_size=2)
    sampled, consumed = sampler.sample([0, 1, 2, 3, 4, 5], 2, dp_rank=1, batch_index=0)
    assert len(sampled) == 2
    assert sorted(consumed) == [0, 1, 2, 3]
    other, again = sampler.sample([], 2, dp_rank=0, batch_index=0)
    assert sorted(sampled + other) == [0, 1, 2, 3]
    assert sorted(again) == [0, 1, 2, 3]


def test_groups_stay_whole() -> None:
    tags: dict[int, dict[str, object]] = {
        i: {"group_id": "abcd"[i % 4], "total_lengths": 10 * (i % 4) + 1} for i in range(8)
    }
    for share in shares(SeqlenBalancedSampler(2, 2), list(range(8)), 4, View(tags)):
        assert len(share) == 4
        assert all(share[i] % 4 == share[i + 1] % 4 for i in (0, 2))


def test_groups_are_consecutive_rows_where_no_tag_says_otherwise() -> None:
    for share in shares(SeqlenBalancedSampler(2, 2), [0, 1, 3, 4, 6, 7, 9, 10, 11], 4, view_of([5] * 12)):
        assert [share[i + 1] - share[i] for i in (0, 2)] == [1, 1]


def test_rows_without_a_length_count_as_one() -> None:
    view = View({0: {"total_lengths": 3}, 1: {"other": 1}, 2: {}})
    found = shares(SeqlenBalancedSampler(dp_size=2), [0, 1, 2, 3], 2, view)
    assert sorted(map(len, found)) == [2, 2]
    for partition in (None, object()):
        assert sorted(map(len, shares(SeqlenBalancedSampler(dp_size=2), [0, 1, 2, 3], 2, partition))) == [2, 2]


@pytest.mark.parametrize("length", ["7", None, [7], True, float("nan"), float("inf"), -1])
def test_a_length_that_is_no_number_is_refused_with_its_row(length: object) -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    with pytest.raises(InvalidInput, match=r"row 1: .*total_lengths"):
        sampler.sample([0, 1], 1, partition=view_of([4, length]), partition_id="p", task_name="t")
    assert not sampler.has_cached_result("p", "t")


def test_rank_and_batch_are_zero_when_not_given() -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    first = sampler.sample([0, 1], 1, "t", "p")
    assert sampler.sample([], 1, "t", "p", dp_rank=0, batch_index=0) == first
    assert sampler.has_cached_result("p", "t", {})


def test_too_few_rows_or_groups_give_nothing() -> None:
    sampler = SeqlenBalancedSampler(2, dp_size=2)
    assert sampler.sample([0, 1], 2) == ([], [])
    assert sampler.sample([0, 1, 3, 5, 7], 2) == ([], [])
    assert sampler._balanced_cache == {}


def test_a_rank_beyond_the_last_one_gets_nothing_and_reserves_nothing() -> None:
    sampler = SeqlenBalancedSampler(dp_size=2)
    assert sampler.sample([0, 1], 1, dp_rank=2) == ([], [])
    assert sampler._balanced_cache == {}


@pytest.mark.parametrize("wrong", [{"dp_rank": -1}, {"dp_rank": "0"}, {"batch_index": []}, {"batch_size": 3}])
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        SeqlenBalancedSampler(2, 2).sample(list(range(8)), **{"batch_size": 2, **wrong})


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (1, -1), (1, 1.5), (1, "2"), (1, 1, 7)])
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError):
        SeqlenBalancedSampler(*arguments)


def test_a_checkpoint_is_plain_data_and_restores_the_shares() -> None:
    sampler, restored = SeqlenBalancedSampler(dp_size=2), SeqlenBalancedSampler(dp_size=2)
    first = sampler.sample([0, 1, 2, 3], 2, "t", "p", batch_index=5)
    state = sampler.save_checkpoint()
    assert json.loads(json.dumps(state))["_balanced_cache"]["p"]["t"]["5"]
    restored.load_checkpoint(copy.deepcopy(state))
    assert restored.sample([], 2, "t", "p", batch_index=5) == first


def test_it_has_a_name_and_a_spec() -> None:
    assert tq.SeqlenBalancedSampler is SeqlenBalancedSampler
    assert type(from_spec(resolve("SeqlenBalancedSampler"))) is SeqlenBalancedSampler
    spec = resolve(SeqlenBalancedSampler(n_samples_per_prompt=4, dp_size=8))
    assert spec["kwargs"] == {"n_samples_per_prompt": 4, "dp_size": 8}


# ---- in the controller ----


def balanced(dp_size: int = 2, n: int = 1) -> Box:
    return Box(SeqlenBalancedSampler(n, dp_size))


def lengths(*values: object) -> list[dict[str, object]]:
    return [{"total_lengths": value} for value in values]


def test_ranks_in_any_order_of_batches_never_share_a_row() -> None:
    """T-12: rank 0 is a batch ahead."""
    box = balanced()
    box.put(8, tags=lengths(9, 1, 5, 5, 7, 3, 2, 8))
    found = [box.fetch(2, dp_rank=rank, batch_index=batch) for rank, batch in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert sorted(row for share in found for row in share) == list(range(8))
    assert box.consumed() == dict.fromkeys(range(8), 1)


def test_the_share_of_a_rank_stays_although_its_rows_are_consumed() -> None:
    box = balanced()
    box.put(4)
    mine, others = box.fetch(2, dp_rank=0, batch_index=0), box.fetch(2, dp_rank=1, batch_index=0)
    assert sorted(mine + others) == [0, 1, 2, 3]
    assert box.fetch(2, dp_rank=0, batch_index=0) == mine


def test_all_ranks_that_wait_are_answered_when_the_last_row_comes() -> None:
    box = balanced()
    assert box.fetch(2, wait_s=9, ticket=1, dp_rank=1, batch_index=0) is None
    box.put(3, tags=lengths(4, 3, 2))
    assert box.fetch(2, wait_s=9, ticket=0, dp_rank=0, batch_index=0) is None
    assert box.answers() == []
    box.put(1, tags=lengths(1))
    answers = dict(box.answers())
    assert answers.keys() == {0, 1}
    assert sorted(answers[0] + answers[1]) == [0, 1, 2, 3]
    assert box.consumed() == dict.fromkeys(range(4), 1)


def test_a_rank_that_waits_is_answered_when_another_ones_fetch_makes_the_batch() -> None:
    box = balanced()
    box.put(2)
    assert box.fetch(2, wait_s=9, ticket="waits", dp_rank=1, batch_index=0) is None
    mine = box.fetch(1, dp_rank=0, batch_index=0)
    [(ticket, others)] = box.answers()
    assert (ticket, sorted(mine + others)) == ("waits", [0, 1])


def test_ranks_that_wait_for_different_batches_get_what_is_there_and_the_others_stay() -> None:
    box = balanced()
    for batch in (0, 1):
        for rank in (1, 0):
            box.fetch(1, wait_s=9, ticket=(batch, rank), dp_rank=rank, batch_index=batch)
    box.put(3)
    first = dict(box.answers())
    assert first.keys() == {(0, 0), (0, 1)}
    box.put(1)
    second = dict(box.answers())
    assert second.keys() == {(1, 0), (1, 1)}
    assert sorted(row for share in (*first.values(), *second.values()) for row in share) == [0, 1, 2, 3]


def test_rows_read_again_after_a_reset_are_not_shared_either() -> None:
    box = balanced()
    box.put(6)
    before = [box.fetch(1, dp_rank=rank, batch_index=0) for rank in (0, 1)]
    box.reset()
    assert box.fetch(1, dp_rank=0, batch_index=0) == before[0]
    later = [box.fetch(1, dp_rank=rank, batch_index=1) for rank in (0, 1)]
    assert box.fetch(1, dp_rank=1, batch_index=0) == before[1]
    assert not {row for share in before for row in share} & {row for share in later for row in share}


def test_a_share_that_lost_a_row_is_replaced_and_the_shares_of_others_stay() -> None:
    """T-10: no rank gets rows that are gone, and no rank loses rows that it has yet to fetch."""
    box = balanced()
    box.put(4)
    mine = box.fetch(2, dp_rank=0, batch_index=0)
    box.clear([mine[0]])
    assert box.fetch(2, empty=True, dp_rank=0, batch_index=0) == []
    assert sorted(box.fetch(2, dp_rank=1, batch_index=0) + mine) == [0, 1, 2, 3]
    box.put(4)
    assert box.fetch(2, dp_rank=0, batch_index=0) == [4, 5]
    assert sorted(box.fetch(1, dp_rank=0, batch_index=1) + box.fetch(1, dp_rank=1, batch_index=1)) == [6, 7]


def test_a_batch_without_shares_left_is_begun_anew() -> None:
    box = balanced()
    box.put(4)
    for rank in (0, 1):
        box.clear(box.fetch(2, dp_rank=rank, batch_index=0))
    box.put(4)
    fresh = [box.fetch(2, dp_rank=rank, batch_index=0) for rank in (0, 1)]
    assert sorted(fresh[0] + fresh[1]) == [4, 5, 6, 7]


def test_the_shares_of_other_ranks_are_kept_for_them_and_count_as_theirs() -> None:
    box = balanced()
    box.put(4)
    mine = box.fetch(2, dp_rank=0, batch_index=0)
    assert [row for row, consumed in box.consumed().items() if consumed] == mine
    assert box.fetch(1, empty=True, dp_rank=0, batch_index=1) == []
    box.fetch(2, dp_rank=1, batch_index=0)
    assert all(box.consumed().values())


def test_every_rank_has_a_lease_of_its_own_share() -> None:
    box = balanced()
    box.put(4)
    first, mine = box.lend(2, 10.0, dp_rank=0, batch_index=0)
    box.now = 5.0
    second, other = box.lend(2, 10.0, dp_rank=1, batch_index=0)
    assert first != second
    assert sorted(mine + other) == [0, 1, 2, 3]
    box.expire(10.0)
    with pytest.raises(LeaseExpired):
        box.ack(first)
    box.ack(second)
    assert [row for row, consumed in box.consumed().items() if consumed] == sorted(other)
    assert sorted(box.lend(2, 10.0, dp_rank=0, batch_index=0)[1]) == sorted(mine), "offered again"


def test_a_share_that_was_not_fetched_before_a_load_comes_on_a_lease_after_it() -> None:
    box = balanced()
    box.put(4)
    mine = box.fetch(2, dp_rank=0, batch_index=0)
    fresh = reloaded(box, SeqlenBalancedSampler(1, 2))
    assert [row for row, consumed in fresh.consumed().items() if consumed] == mine
    lease, other = fresh.lend(2, 10.0, dp_rank=1, batch_index=0)
    assert (lease > 0, sorted(mine + other)) == (True, [0, 1, 2, 3])
    fresh.release(lease)
    assert fresh.lend(2, 10.0, dp_rank=1, batch_index=0)[1] == other


def test_a_share_that_was_not_fetched_before_a_crash_comes_on_a_lease_after_it() -> None:
    ledger, kept = Ledger(), Controller(SeqlenBalancedSampler(1, 2), ledger=Ledger())
    box = balanced()
    box.controller = Controller(SeqlenBalancedSampler(1, 2), None, 0, ledger=ledger)
    state, blocks = exported(box.controller.state)
    box.put(4)
    mine = box.fetch(2, dp_rank=0, batch_index=0)
    recovery = Recovery(kept, state, blocks, reserved_rows=0)
    for fact in [*ledger.take(), SamplerIs(box.controller.state.sampler.save_checkpoint())]:
        recovery.apply(fact)
    recovery.finish()
    box.controller = kept
    assert [row for row, consumed in box.consumed().items() if consumed] == mine
    lease, other = box.lend(2, 10.0, dp_rank=1, batch_index=0)
    assert (lease > 0, sorted(mine + other)) == (True, [0, 1, 2, 3])


def test_a_cleared_row_leaves_other_batches_and_partitions_alone() -> None:
    box = balanced()
    box.put(4)
    box.put(2, partition="q")
    kept = box.fetch(1, dp_rank=0, batch_index=1)
    gone = box.fetch(1, dp_rank=0, batch_index=0)
    other = box.fetch(1, partition="q", dp_rank=0, batch_index=0)
    box.clear(gone)
    assert box.fetch(1, dp_rank=0, batch_index=1) == kept
    box.clear()
    assert box.fetch(1, partition="q", dp_rank=0, batch_index=0) == other


@pytest.mark.parametrize("sampling", [{"dp_rank": 2}, {"dp_rank": -1}, {"dp_rank": "0"}])
def test_a_rank_that_never_gets_rows_is_refused_instead_of_waiting(sampling: dict[str, Any]) -> None:
    box = balanced()
    with pytest.raises(InvalidInput, match="dp_rank"):
        box.fetch(1, wait_s=9, ticket="t", **sampling)
    assert box.controller.num_waiting == 0


def test_a_batch_size_that_splits_groups_is_refused_instead_of_waiting() -> None:
    with pytest.raises(InvalidInput, match="multiple"):
        balanced(n=2).fetch(3, wait_s=9, ticket="t", dp_rank=0)


def test_a_wrong_length_is_an_error_of_the_reader_and_mends() -> None:
    box = balanced()
    box.fetch(1, wait_s=9, ticket="t", dp_rank=0)
    box.put(2, tags=lengths(3, "four"))
    [(_, error)] = box.answers()
    assert isinstance(error, InvalidInput)
    box.tag([1], lengths(4))
    assert sorted(box.fetch(1, dp_rank=0) + box.fetch(1, dp_rank=1)) == [0, 1]


def test_through_a_client(service: Callable[..., tq.TransferQueueClient]) -> None:
    """As a driver and its data-parallel ranks do it."""
    client = service(controller={"sampler": SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)})
    meta = client.put({"x": list(range(8))}, partition_id="train_0")
    meta.update_custom_meta(lengths(900, 901, 10, 12, 880, 890, 20, 15))
    client.set_custom_meta(meta)
    found = []
    for rank in (1, 0):
        config = {"dp_rank": rank, "batch_index": 0, "task_name": "train", "partition_id": "train_0"}
        got = client.get_meta(["x"], 4, "train_0", task_name="train", sampling_config=config)
        found.append(client.get_data(got)["x"].tolist())
    assert sorted(found[0] + found[1]) == list(range(8))
    assert all(len(set(share) & {0, 1, 4, 5}) == 2 for share in found)
