"""StreamingTokenBudgetSampler: slices within a budget of tokens, the same for all who ask for one rank and batch."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import Box, indexes
from test_samplers_balanced import View, view_of

import transfer_queue as tq
from transfer_queue.errors import DeadlineExceeded, InvalidInput, MissingParameter
from transfer_queue.sampler import GRPOGroupNSampler, StreamingTokenBudgetSampler, resolve
from transfer_queue.wire import messages as m

TERMS = {"task_name": "t", "partition_id": "p"}


def ask(sampler: Any, ready: list[int], view: Any, rank: int = 0, batch: Any = 0, budget: int = 10, size: int = 2,
        done: bool = False, **more: Any) -> list[int]:  # fmt: skip
    config = {"token_budget": budget, "dp_rank": rank, "dp_size": size, "batch_index": batch, **TERMS, **more}
    sampled, consumed = sampler.sample(ready, 1, partition=view, production_done=done, **config)
    assert sampled == consumed
    return list(sampled)


def test_all_ranks_of_a_batch_are_planned_at_once_and_others_get_the_same_slice() -> None:
    sampler, view = StreamingTokenBudgetSampler(), view_of([5, 5, 5, 5])
    first = ask(sampler, [0, 1, 2, 3], view)
    assert sum(5 for _ in first) <= 10
    second = ask(sampler, [], view, rank=1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert ask(sampler, [], view) == first, "another stage of the pipeline"


def test_a_slice_is_the_longest_prefix_within_the_budget_and_one_row_at_least() -> None:
    sampler = StreamingTokenBudgetSampler()
    lengths = {0: 4, 1: 6, 2: 1, 3: 99, 4: 2}
    assert sampler._select_up_to_budget([0, 1, 2], lengths, 10) == 2
    assert sampler._select_up_to_budget([3, 4], lengths, 10) == 1
    assert sampler._select_up_to_budget([4, 2], lengths, 10) == 2
    assert sampler._select_up_to_budget([], lengths, 10) == 0


def test_groups_are_dealt_whole_until_no_more_rows_come() -> None:
    sampler, view = StreamingTokenBudgetSampler(n_samples_per_prompt=4), view_of([1] * 8)
    assert ask(sampler, [0, 1, 2], view) == []
    assert ask(sampler, [0, 1, 2], view, done=True) != []
    assert ask(sampler, [], view, rank=1) != []


def test_a_round_has_as_many_rows_for_each_rank_and_about_as_many_tokens() -> None:
    sampler, view = StreamingTokenBudgetSampler(2, balance_unit_multiplier=2), view_of([9, 1, 8, 2, 7, 3, 6, 4])
    shares = [ask(sampler, list(range(8)), view, rank=rank, budget=100) for rank in range(2)]
    assert [len(share) for share in shares] == [4, 4]
    assert [sum([9, 1, 8, 2, 7, 3, 6, 4][row] for row in share) for share in shares] == [20, 20]


@pytest.mark.parametrize("done", [False, True])
def test_an_empty_answer_is_not_remembered(done: bool) -> None:
    sampler, view = StreamingTokenBudgetSampler(), view_of([5, 5, 5])
    assert ask(sampler, [], view, done=done) == []
    assert not sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0})
    assert ask(sampler, [0], view, done=done) == [0]


def test_an_empty_answer_that_a_checkpoint_of_before_remembers_is_asked_for_again() -> None:
    sampler, view = StreamingTokenBudgetSampler(), view_of([5])
    state = {"p": {"t": {0: {0: ([], [])}, 1: {0: ([7], [7])}}}}
    sampler.load_checkpoint({"_states": state, "_buckets": {}, "_resolved_lengths": {}})
    assert ask(sampler, [0], view) == [0]
    assert ask(sampler, [], view, rank=1) == [7]


def test_a_rank_that_found_no_rows_gets_those_that_come_later() -> None:
    box = Box(StreamingTokenBudgetSampler())
    terms = {"token_budget": 40, "dp_size": 2, "batch_index": 0}
    first = indexes(box.put(1, tags=[{"total_lengths": 10}]))
    assert box.lend(1, dp_rank=0, **terms)[1] == first
    assert box.lend(1, dp_rank=1, wait_s=60, ticket="late", **terms) is None
    more = indexes(box.put(2, tags=[{"total_lengths": 10}] * 2))
    ((ticket, late),) = box.answers()
    assert (ticket, len(late), late[0] in more) == ("late", 1, True)


def test_a_rank_that_found_no_rows_gets_those_that_come_back_from_another() -> None:
    box = Box(StreamingTokenBudgetSampler())
    rows = indexes(box.put(2, tags=[{"total_lengths": 10}] * 2))
    box.handle(m.SetPartition(1, "p", 2, {}))
    terms = {"token_budget": 10, "dp_size": 2}
    leases = [box.lend(1, dp_rank=rank, batch_index=0, **terms) for rank in range(2)]
    assert sorted(leases[0][1] + leases[1][1]) == rows
    assert box.lend(1, dp_rank=0, batch_index=1, wait_s=60, ticket="later", **terms) is None
    box.release(leases[1][0])
    assert box.answers() == [("later", leases[1][1])]


@pytest.mark.parametrize("restored", [False, True])
def test_rows_are_not_kept_for_a_batch_that_a_rank_is_past(restored: bool) -> None:
    sampler = StreamingTokenBudgetSampler()
    box = Box(sampler)
    terms = {"token_budget": 10, "dp_size": 2}
    rows = indexes(box.put(1, tags=[{"total_lengths": 10}]))
    lease, found = box.lend(1, dp_rank=0, batch_index=0, **terms)
    assert found == rows
    box.ack(lease)
    assert box.lend(1, dp_rank=1, batch_index=0, wait_s=60, ticket="behind", **terms) is None
    assert box.lend(1, dp_rank=0, batch_index=1, wait_s=60, ticket="ahead", **terms) is None
    box.clear(rows)  # as trainers do with what they used: its slice is forgotten
    if restored:
        sampler.load_checkpoint(copy.deepcopy(sampler.save_checkpoint()))
    more = indexes(box.put(1, tags=[{"total_lengths": 10}]))
    assert box.answers() == [("ahead", more)]


def test_rows_are_not_kept_for_a_later_batch_than_their_rank_waits_for() -> None:
    box = Box(StreamingTokenBudgetSampler())
    terms = {"token_budget": 10, "dp_size": 2}
    box.put(1, tags=[{"total_lengths": 10}])
    box.lend(1, dp_rank=0, batch_index=0, **terms)  # there is none for rank 1
    rows = indexes(box.put(2, tags=[{"total_lengths": 10}] * 2))
    _, found = box.lend(1, dp_rank=0, batch_index=1, **terms)
    _, other = box.lend(1, dp_rank=1, batch_index=0, **terms)
    assert sorted([*found, *other]) == rows


def test_rows_that_are_kept_for_a_later_batch_go_to_an_earlier_one_that_lost_its_own() -> None:
    box = Box(StreamingTokenBudgetSampler())
    terms = {"token_budget": 10, "dp_size": 2}
    rows = indexes(box.put(4, tags=[{"total_lengths": 10}] * 4))
    used = []
    for batch in (0, 1):  # two of rank 1 are planned
        lease, found = box.lend(1, dp_rank=0, batch_index=batch, **terms)
        box.ack(lease)
        used += found
    lease, _ = box.lend(1, dp_rank=1, batch_index=0, **terms)
    box.release(lease)
    lease, found = box.lend(1, dp_rank=0, batch_index=2, **terms)  # what was given back is dealt anew
    used += found
    box.ack(lease)
    _, found = box.lend(1, dp_rank=1, batch_index=0, **terms)
    assert sorted([*used, *found]) == rows


def test_a_loop_that_goes_on_with_fewer_ranks_gets_what_was_kept_for_the_others() -> None:
    box = Box(StreamingTokenBudgetSampler())
    rows = indexes(box.put(8, tags=[{"total_lengths": 10}] * 8))
    lease, used = box.lend(1, dp_rank=0, batch_index=0, token_budget=10, dp_size=4)
    box.ack(lease)
    for batch in range(1, 8):
        lease, found = box.lend(1, dp_rank=0, batch_index=batch, token_budget=10, dp_size=1)
        box.ack(lease)
        used += found
    assert sorted(used) == rows


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_used_however_far_apart_ranks_are_and_whatever_they_give_back(seed: int) -> None:
    """A rank that gives a batch back asks for it again, or for the next one."""
    chance = random.Random(seed)
    size, lengths = chance.choice([2, 3]), [chance.choice([5, 10, 30, 60]) for _ in range(12)]
    box, at, lent = Box(StreamingTokenBudgetSampler()), [0] * size, [(0, [])] * size
    rows: list[int] = []
    used: list[int] = []
    for _ in range(2000):
        if len(rows) < len(lengths) and chance.random() < 0.2:
            rows += indexes(box.put(1, tags=[{"total_lengths": lengths[len(rows)]}]))
        rank = chance.randrange(size)
        lease, found = lent[rank]
        lent[rank] = (0, [])
        if not lease:
            terms = {"dp_rank": rank, "dp_size": size, "batch_index": at[rank], "token_budget": chance.choice([50, 80])}
            with contextlib.suppress(DeadlineExceeded):
                lent[rank] = box.lend(1, **terms)
        elif chance.random() < 0.15:
            box.release(lease)
            at[rank] += chance.choice([0, 1])
        else:
            box.ack(lease)
            used += found
            at[rank] += 1
            if len(used) == len(lengths):
                break
    assert sorted(used) == list(range(len(lengths)))


def test_groups_stay_whole_in_a_partition_of_which_nobody_knows_how_many_rows_come() -> None:
    box = Box(StreamingTokenBudgetSampler(2))
    rows = indexes(box.put(1, tags=[{"total_lengths": 4}]))
    terms = {"token_budget": 100, "dp_rank": 0, "dp_size": 2, "batch_index": 0}
    assert box.fetch(1, wait_s=60, ticket="whole", **terms) is None
    rows += indexes(box.put(1, tags=[{"total_lengths": 4}]))
    found = [row for _, some in box.answers() for row in some]
    assert sorted(found + box.fetch(1, **{**terms, "dp_rank": 1})) == rows


def test_a_row_without_a_length_counts_as_a_whole_budget(caplog: pytest.LogCaptureFixture) -> None:
    sampler = StreamingTokenBudgetSampler()
    with caplog.at_level(logging.WARNING, "transfer_queue.sampler"):
        assert len(ask(sampler, [0, 1], View({0: {"other": 1}}), size=1)) == 1
    assert "total_lengths" in caplog.text


def test_without_underfill_a_rank_waits_for_a_budgets_worth() -> None:
    sampler, view = StreamingTokenBudgetSampler(), view_of([4, 4, 4])
    assert ask(sampler, [0, 1], view, size=1, allow_underfill=False) == []
    assert ask(sampler, [0, 1, 2], view, size=1, allow_underfill=False) == [0, 1]
    assert ask(sampler, [2], view, size=1, batch=1, allow_underfill=False) == []
    assert ask(sampler, [2], view, size=1, batch=1, allow_underfill=False, done=True) == [2]


def test_without_a_batch_index_nothing_is_remembered() -> None:
    sampler, view = StreamingTokenBudgetSampler(), view_of([4, 4, 4, 4])
    assert ask(sampler, [0, 1, 2, 3], view, size=1, batch=None) == [0, 1]
    assert ask(sampler, [2, 3], view, size=1, batch=None) == [2, 3]


def test_without_a_budget_it_is_its_parent() -> None:
    ours, parent = StreamingTokenBudgetSampler(2), GRPOGroupNSampler(2)
    for sampler in (ours, parent):
        assert sampler.sample([0, 1, 2, 3, 5], 4, **TERMS) == ([0, 1, 2, 3], [0, 1, 2, 3])
    with pytest.raises(InvalidInput):
        ours.check_request(3, {})


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="balance_unit_multiplier"):
        StreamingTokenBudgetSampler(balance_unit_multiplier=0)
    sampler = StreamingTokenBudgetSampler()
    for missing in ({}, {"dp_rank": 0}, {"dp_size": 2}):
        with pytest.raises(ValueError, match="dp_rank and dp_size"):
            sampler.check_request(1, {"token_budget": 5, **missing})
    with pytest.raises(InvalidInput):
        sampler.check_request(1, {"token_budget": 5, "dp_rank": 2, "dp_size": 2})
    with pytest.raises(InvalidInput, match="does not know 'dp_rnk'"):
        sampler.check_request(1, {"token_budget": 5, "dp_rnk": 0, "dp_size": 2})
    with pytest.raises(ValueError, match="partition"):
        sampler.sample([0], 1, token_budget=5, dp_rank=0, dp_size=1, partition=None, **TERMS)
    with pytest.raises(InvalidInput, match="does not know 'token_budget'"):
        GRPOGroupNSampler(2).check_request(2, {"token_budget": 5})
    notes = {"rollout_mini_index": 0, "max_samples": 4, "consumed_samples": 0, "remaining_samples": 4}
    sampler.check_request(1, {"token_budget": 5, "dp_rank": 0, "dp_size": 2, "allow_underfill": True, **notes})


def test_rows_that_are_cleared_or_offered_again_are_dealt_anew() -> None:
    sampler, view = StreamingTokenBudgetSampler(), view_of([5] * 8)
    first = ask(sampler, list(range(8)), view, size=1)
    sampler.forget("p", {6})
    sampler.offer_again("p", "t", set(first))
    ready, rows = [row for row in range(8) if row != 6], []
    for batch in range(6):
        rows += ask(sampler, ready, view, size=1, batch=batch)
        ready = [row for row in ready if row not in rows]
    assert sorted(rows) == [0, 1, 2, 3, 4, 5, 7]
    sampler.clear_cache("p")
    assert not sampler._buckets
    assert not sampler._resolved_lengths
    assert not sampler._states


@pytest.mark.parametrize("restored", [False, True])
def test_ranks_that_are_batches_apart_get_rows_of_their_own(restored: bool) -> None:
    """What was sliced for a rank that has not asked yet is ready still."""
    sampler, view = StreamingTokenBudgetSampler(), view_of([5] * 12)
    ready, taken = list(range(12)), []
    for rank, batch in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (1, 1)]:
        rows = ask(sampler, ready, view, rank=rank, batch=batch)
        taken += rows
        ready = [row for row in ready if row not in rows]
        if restored:
            state, sampler = copy.deepcopy(sampler.save_checkpoint()), StreamingTokenBudgetSampler()
            sampler.load_checkpoint(state)
    assert sorted(taken) == list(range(12))
    sampler.offer_again("p", "t", {taken[0]})
    assert taken[0] in ask(sampler, taken[:2], view, batch=3) + ask(sampler, taken[:2], view, rank=1, batch=3)


def test_its_state_comes_back_from_a_checkpoint() -> None:
    view = view_of([5] * 4)
    sampler, other = (StreamingTokenBudgetSampler(balance_unit_multiplier=2) for _ in range(2))
    first = ask(sampler, [0, 1, 2, 3], view, budget=5)
    other.load_checkpoint(copy.deepcopy(sampler.save_checkpoint()))
    assert ask(other, [], view, budget=5) == first
    assert ask(other, [], view, budget=5, batch=1) == ask(sampler, [], view, budget=5, batch=1) != []
    assert resolve("StreamingTokenBudgetSampler") == StreamingTokenBudgetSampler().spec()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 3), st.integers(5, 40))
def test_every_row_is_handed_out_once_within_the_budget(lengths: list[int], size: int, group: int, budget: int) -> None:
    sampler, view = StreamingTokenBudgetSampler(group), view_of(lengths)
    ready, taken = list(range(len(lengths))), []
    for batch in range(len(lengths) + 1):
        for rank in range(size):
            rows = ask(sampler, ready, view, rank=rank, batch=batch, size=size, budget=budget, done=True)
            assert len(rows) <= 1 or sum(lengths[row] for row in rows) <= budget
            taken += rows
            ready = [row for row in ready if row not in rows]
    assert sorted(taken) == list(range(len(lengths)))


def test_the_controller_says_when_all_rows_are_written() -> None:
    box = Box(StreamingTokenBudgetSampler(2))
    rows = indexes(box.put(3, tags=[{"total_lengths": 4}] * 3))
    box.handle(m.SetPartition(1, "p", 3, {}))
    box.insert(1)
    terms = {"token_budget": 100, "dp_rank": 0, "dp_size": 1}
    assert box.fetch(1, batch_index=0, empty=True, **terms) == rows[:2]
    assert box.fetch(1, batch_index=1, empty=True, **terms) == []
    box.clear([3])
    assert box.fetch(1, batch_index=1, empty=True, **terms) == rows[2:]


def test_ranks_and_stages_stream_a_partition_to_its_end(service: Callable[..., tq.TransferQueueClient]) -> None:
    client = service(controller={"sampler": "StreamingTokenBudgetSampler", "polling_mode": True})
    client.set_partition("train", size=6)
    for part in range(3):
        keys = [f"{part}_{n}" for n in range(2)]
        tq.kv_batch_put(keys, "train", {"x": torch.full((2, 1), part)}, tags=[{"total_lengths": 3 + part}] * 2)
        for rank in range(2):
            metas = [
                client.get_meta(
                    data_fields=["x"], token_budget=8, partition_id="train", task_name="actor",
                    sampling_config={"dp_rank": rank, "dp_size": 2, "batch_index": part, "allow_underfill": True},
                )
                for _ in range(2)
            ]  # fmt: skip
            assert metas[0].global_indexes == metas[1].global_indexes
            assert client.get_data(metas[0])["x"].unbind()[0].tolist() == [part]
    assert client.check_consumption_status("actor", "train")
    with pytest.raises(MissingParameter):
        client.get_meta(data_fields=["x"], partition_id="train", task_name="actor")
    with pytest.raises(ValueError, match="dp_rank and dp_size"):
        client.get_meta(["x"], partition_id="train", task_name="actor", token_budget=5)
