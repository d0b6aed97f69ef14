"""Samplers: what they pick, what they remember, and how they are named."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import ConfigError, InvalidInput, UnsupportedValue
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, SequentialSampler, from_spec, resolve


class View:
    """A partition as samplers see it."""

    def __init__(self, groups: Mapping[int, object], any_tags: bool = True) -> None:
        self.groups = groups
        self.any_tags = any_tags

    def tags(self, index: int) -> Mapping[str, object] | None:
        return {"group_id": self.groups[index]} if index in self.groups else None


class Reversed(BaseSampler):
    def __init__(self, limit: int = 3, **more: object) -> None:
        self.more = more

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        return ready_indexes[::-1][:batch_size], []


class Shuffled(SequentialSampler):
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        return super().sample(sorted(ready_indexes, key=lambda i: -i), batch_size)


ready_rows = st.sets(st.integers(0, 60)).map(sorted)


# ---- sequential ----


def test_sequential_takes_the_first_rows_and_consumes_them() -> None:
    assert SequentialSampler().sample([3, 5, 9], 2) == ([3, 5], [3, 5])
    assert SequentialSampler()([3, 5, 9], 8, task_name="t", partition_id="p", partition=None) == ([3, 5, 9], [3, 5, 9])


def test_sequential_with_a_negative_size_drops_rows_from_the_end() -> None:
    assert SequentialSampler().sample([3, 5, 9], -1) == ([3, 5], [3, 5])


def test_sequential_results_are_lists_of_their_own() -> None:
    ready = [1, 2]
    sampled, consumed = SequentialSampler().sample(ready, 2)
    sampled.append(3)
    assert (ready, consumed) == ([1, 2], [1, 2])
    assert SequentialSampler().sample(np.array([1, 2]), 1) == ([1], [1])  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [None, 2.5, "2"])
def test_samplers_refuse_a_batch_size_that_is_no_int(size: Any) -> None:
    for sampler in (SequentialSampler(), GRPOGroupNSampler(2)):
        with pytest.raises(InvalidInput):
            sampler.sample([0, 1, 2, 3], size)


def test_needs_says_how_many_rows_a_sampler_has_to_see() -> None:
    assert SequentialSampler().needs(5) == 5
    assert SequentialSampler().needs(-1) is None
    assert GRPOGroupNSampler(2).needs(4) is None
    assert Reversed().needs(4) is None


def test_a_subclass_that_samples_differently_sees_all_rows() -> None:
    assert Shuffled().needs(5) is None


# ---- GRPO groups ----


def test_grpo_takes_runs_of_consecutive_indexes() -> None:
    sampler = GRPOGroupNSampler(n_samples_per_prompt=3)
    assert sampler.sample([10, 11, 12, 14, 15, 17, 18, 19, 20], 6) == ([10, 11, 12, 17, 18, 19],) * 2
    assert sampler.sample([5, 3, 4, 0], 3) == ([3, 4, 5],) * 2


def test_grpo_gives_nothing_when_groups_are_missing() -> None:
    assert GRPOGroupNSampler(3).sample([0, 1, 3, 4, 6, 7], 6) == ([], [])
    assert GRPOGroupNSampler(3).sample([], 0) == ([], [])


def greedy_runs(ready: list[int], n: int) -> list[list[int]]:
    """The obvious loop, as a model."""
    found, i = [], 0
    while i + n <= len(ready):
        if ready[i + n - 1] - ready[i] == n - 1:
            found.append(ready[i : i + n])
            i += n
        else:
            i += 1
    return found


@settings(deadline=None)
@given(ready_rows, st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_grpo_without_tags_agrees_with_a_plain_scan(ready: list[int], n: int, groups: int, as_array: bool) -> None:
    expected = greedy_runs(ready, n)[:groups]
    given_rows: Any = np.array(ready, np.int64) if as_array else ready
    sampled, consumed = GRPOGroupNSampler(n).sample(given_rows, n * groups)
    assert sampled == consumed == ([i for run in expected for i in run] if len(expected) == groups else [])
    assert all(type(index) is int for index in sampled)


@settings(deadline=None)
@given(
    ready_rows, st.lists(st.none() | st.sampled_from("abcde"), min_size=61, max_size=61), st.integers(1, 4), st.data()
)
def test_grpo_never_mixes_groups(ready: list[int], groups: list[str | None], n: int, data: st.DataObject) -> None:
    view = View({index: group for index, group in enumerate(groups) if group is not None})
    count = data.draw(st.integers(1, 5))
    sampled, _ = GRPOGroupNSampler(n).sample(ready, n * count, partition=view)
    assert len(sampled) in (0, n * count)
    assert len(set(sampled)) == len(sampled)
    assert set(sampled) <= set(ready)
    picked = [sampled[i : i + n] for i in range(0, len(sampled), n)]
    assert [group[0] for group in picked] == sorted(group[0] for group in picked)
    for group in picked:
        assert len({groups[index] for index in group}) == 1
        assert group == sorted(group)


@settings(deadline=None)
@given(ready_rows, st.dictionaries(st.integers(0, 60), st.integers(0, 6)), st.integers(1, 4), st.integers(1, 3))
def test_grpo_hands_out_no_row_twice(ready: list[int], groups: dict[int, int], n: int, count: int) -> None:
    sampler, seen, left = GRPOGroupNSampler(n), set(), list(ready)
    while True:
        sampled, consumed = sampler.sample(left, n * count, partition=View(groups))
        if not sampled:
            break
        assert not seen & set(sampled)
        seen |= set(sampled)
        left = [index for index in left if index not in set(consumed)]


def test_grpo_groups_by_tag_when_indexes_mislead() -> None:
    """T-11: with groups (0,1) (2,3) (4,5) and ready rows 1..4, only (2,3) is complete."""
    view = View({0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"})
    assert GRPOGroupNSampler(2).sample([1, 2, 3, 4], 2, partition=view) == ([2, 3], [2, 3])
    assert GRPOGroupNSampler(2).sample([1, 2, 3, 4], 4, partition=view) == ([], [])


def test_grpo_orders_groups_by_their_smallest_index() -> None:
    view = View({0: "a", 9: "a", 1: "b", 2: "b"})
    assert GRPOGroupNSampler(2).sample([0, 1, 2, 4, 5, 9], 6, partition=view)[0] == [0, 9, 1, 2, 4, 5]


def test_grpo_makes_several_groups_of_one_large_one() -> None:
    view = View(dict.fromkeys(range(5), "a"))
    assert GRPOGroupNSampler(2).sample([0, 1, 2, 3, 4], 4, partition=view)[0] == [0, 1, 2, 3]


def test_grpo_ignores_tags_when_told_or_when_there_are_none() -> None:
    view = View({0: "a", 1: "b"})
    assert GRPOGroupNSampler(2, group_tag=None).sample([0, 1], 2, partition=view)[0] == [0, 1]
    assert GRPOGroupNSampler(2).sample([0, 1], 2, partition=View({0: "a"}, any_tags=False))[0] == [0, 1]
    assert GRPOGroupNSampler(2, group_tag="other").sample([0, 1], 2, partition=view)[0] == [0, 1]
    assert GRPOGroupNSampler(2).sample([0, 1], 2, partition=object())[0] == [0, 1]


@pytest.mark.parametrize("arguments", [(0,), (-1,), (2.5,), ("4",), (None,), (2, 7)])
def test_grpo_refuses_bad_arguments(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError):
        GRPOGroupNSampler(*arguments)


@pytest.mark.parametrize("wrong", [{"batch_size": 3}, {"batch_size": -2}, {"dp_rank": [0]}, {"batch_index": {}}])
def test_grpo_refuses_bad_parameters_before_it_remembers_anything(wrong: dict[str, Any]) -> None:
    sampler = GRPOGroupNSampler(2)
    with pytest.raises(InvalidInput):
        sampler.sample([0, 1, 2, 3], **{"batch_size": 2, "dp_rank": 0, "batch_index": 0, **wrong})
    with pytest.raises(InvalidInput, match="row 0"):
        sampler.sample([0, 1], 2, dp_rank=0, batch_index=0, partition=View({0: [1], 1: [1]}))
    assert sampler._states == {}


# ---- remembered results ----


def test_grpo_repeats_the_result_of_a_rank_and_batch() -> None:
    sampler = GRPOGroupNSampler(2)
    where = {"task_name": "t", "partition_id": "p", "dp_rank": 0, "batch_index": 4}
    first = sampler.sample([0, 1, 2, 3], 2, **where)
    first[0].clear()  # what was handed out is not what is remembered
    assert sampler.sample([2, 3], 2, **where) == ([0, 1], [0, 1])
    assert sampler._states == {"p": {"t": {0: {4: ([0, 1], [0, 1])}}}}
    assert sampler.sample([2, 3], 2, **{**where, "batch_index": 5}) == ([2, 3], [2, 3])
    assert sampler.sample([6, 7], 2, **{**where, "task_name": "u"}) == ([6, 7], [6, 7])


def test_grpo_remembers_nothing_without_a_rank_or_a_result() -> None:
    sampler = GRPOGroupNSampler(2)
    sampler.sample([0, 1], 2, task_name="t", partition_id="p", batch_index=0)
    sampler.sample([0], 2, task_name="t", partition_id="p", dp_rank=0, batch_index=0)
    assert sampler._states == {}


def filled() -> GRPOGroupNSampler:
    sampler = GRPOGroupNSampler(2)
    for partition in "pq":
        for batch in range(2):
            rows = [2 * batch, 2 * batch + 1]
            sampler.sample(rows, 2, task_name="t", partition_id=partition, dp_rank=0, batch_index=batch)
    return sampler


def test_has_cached_result_needs_a_rank() -> None:
    sampler = filled()
    assert sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1})
    for where in (("p", "t", {"batch_index": 1}), ("p", "t"), ("z", "t", {"dp_rank": 0, "batch_index": 1})):
        assert not sampler.has_cached_result(*where)  # type: ignore[arg-type]


def test_clear_cache_forgets_one_partition() -> None:
    sampler = filled()
    sampler.clear_cache("p")
    sampler.clear_cache("unknown")
    assert sampler._states.keys() == {"q"}


def test_forget_drops_exactly_the_results_with_rows_that_are_gone() -> None:
    """T-10: a remembered result must not name rows that were cleared, their indexes may belong to others by now."""
    sampler = filled()
    sampler.forget("p", {3, 100})
    where = {"dp_rank": 0, "batch_index": 1}
    assert not sampler.has_cached_result("p", "t", where)
    assert sampler.has_cached_result("p", "t", {**where, "batch_index": 0})
    assert sampler.has_cached_result("q", "t", where)
    sampler.forget("p", {0})
    sampler.forget("unknown", {0})
    assert sampler._states.keys() == {"q"}


def test_forget_understands_results_kept_as_one_list() -> None:
    sampler = SequentialSampler()
    sampler._states = {"p": {"t": {0: {0: [1, 2], 1: [3]}}}}
    sampler.forget("p", {2})
    assert sampler._states == {"p": {"t": {0: {1: [3]}}}}


def test_checkpoint_restores_remembered_results() -> None:
    restored = GRPOGroupNSampler(2)
    restored.load_checkpoint(copy.deepcopy(filled().save_checkpoint()))
    assert restored.sample([], 2, "t", "p", dp_rank=0, batch_index=1) == ([2, 3], [2, 3])


# ---- specs ----


@pytest.mark.parametrize(
    ("given_as", "cls", "kwargs"),
    [
        ("SequentialSampler", SequentialSampler, {}),
        (GRPOGroupNSampler, GRPOGroupNSampler, {}),
        (GRPOGroupNSampler(4), GRPOGroupNSampler, {"n_samples_per_prompt": 4}),
        (GRPOGroupNSampler(4, group_tag=None), GRPOGroupNSampler, {"n_samples_per_prompt": 4, "group_tag": None}),
        ({"class": "GRPOGroupNSampler", "kwargs": {"n_samples_per_prompt": 2}}, GRPOGroupNSampler, None),
        ("transfer_queue.sampler.grpo_group_n_sampler:GRPOGroupNSampler", GRPOGroupNSampler, {}),
        (Reversed(5, a=(1, 2)), Reversed, {"limit": 5, "a": [1, 2]}),
        (f"{__name__}:Reversed", Reversed, {}),
    ],
)
def test_resolve_and_from_spec_make_the_same_sampler(given_as: Any, cls: type, kwargs: dict[str, Any] | None) -> None:
    spec = resolve(given_as)
    assert spec["class"] == f"{cls.__module__}:{cls.__qualname__}"
    assert kwargs is None or spec["kwargs"] == kwargs
    made = from_spec(spec)
    assert type(made) is cls
    assert made.spec() == spec


def test_spec_follows_attributes_and_survives_copies() -> None:
    sampler = GRPOGroupNSampler(4)
    sampler.group_tag = "uid"
    sampler.n_samples_per_prompt = 8
    for same in (sampler, copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):  # noqa: S301
        assert same.spec()["kwargs"] == {"n_samples_per_prompt": 8, "group_tag": "uid"}


@pytest.mark.parametrize("name", ["Nope", "no.such.module:Class", "json:NoSuchClass", ":X", "json:", ".x:Y"])
def test_resolve_refuses_unknown_names(name: str) -> None:
    with pytest.raises(ConfigError):
        resolve(name)


@pytest.mark.parametrize("wrong", [None, 5, dict, "json:JSONDecoder", {"kwargs": {}}])
def test_resolve_refuses_what_is_no_sampler(wrong: object) -> None:
    with pytest.raises(TypeError):
        resolve(wrong)


def test_resolve_refuses_what_another_process_cannot_make() -> None:
    class Local(SequentialSampler):
        pass

    for sampler in (Local, Local(), BaseSampler):
        with pytest.raises(ConfigError):
            resolve(sampler)
    with pytest.raises(UnsupportedValue):
        resolve(Reversed(a=object()))


def test_from_spec_refuses_bad_arguments() -> None:
    for kwargs in ({"n_samples_per_prompt": 0}, {"no_such": 1}):
        with pytest.raises(ConfigError):
            from_spec({"class": "GRPOGroupNSampler", "kwargs": kwargs})
    with pytest.raises(ConfigError):
        from_spec({})


# ---- cost ----


def fastest(sampler: BaseSampler, ready: list[int], batch_size: int, view: View | None) -> float:
    def once() -> float:
        start = time.thread_time()  # others may have the processor
        assert sampler.sample(ready, batch_size, partition=view)[0]
        return time.thread_time() - start

    return min(once() for _ in range(10))


def test_grpo_picks_from_8192_rows_quickly() -> None:
    sampler, ready = GRPOGroupNSampler(8), list(range(8192))
    assert fastest(sampler, ready, 1024, None) < 0.001
    assert fastest(sampler, [index for index in range(9000) if index % 100], 1024, None) < 0.001
    assert fastest(sampler, ready, 1024, View({index: index % 1024 for index in ready})) < 0.025
