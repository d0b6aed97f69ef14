"""RankAwareSampler: every process of a data-parallel rank gets the rows of the one that asked first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tables import Box

import transfer_queue as tq
from transfer_queue.errors import InvalidInput, MissingParameter
from transfer_queue.sampler import RankAwareSampler, from_spec, resolve

FIRST = {"dp_rank": 0, "batch_index": 0}


@pytest.fixture
def box() -> Box:
    return Box(RankAwareSampler())


# ---- the sampler alone ----


def test_the_first_caller_of_a_rank_and_batch_decides_for_the_others() -> None:
    sampler = RankAwareSampler()
    first = sampler.sample([3, 5, 9], 2, task_name="t", partition_id="p", **FIRST)
    assert first == ([3, 5], [3, 5])
    first[0].clear()  # what was handed out is not what is remembered
    assert sampler.sample([9], 2, task_name="t", partition_id="p", **FIRST) == ([3, 5], [3, 5])
    assert sampler.sample([9], 1, 1, 0, "t", "p") == ([9], [9])
    assert sampler._states == {"p": {"t": {0: {0: [3, 5]}, 1: {0: [9]}}}}


def test_too_few_rows_give_nothing_and_are_not_remembered() -> None:
    sampler = RankAwareSampler()
    assert sampler.sample([3], 2, **FIRST) == ([], [])
    assert sampler.sample([3], 0, **FIRST) == ([], [])
    assert sampler._states == {}


def test_rows_may_come_as_an_array() -> None:
    sampled, _ = RankAwareSampler().sample(np.array([3, 5, 9]), 2, **FIRST)  # type: ignore[arg-type]
    assert sampled == [3, 5]
    assert all(type(row) is int for row in sampled)


def test_it_looks_at_the_first_rows_only() -> None:
    class Last(RankAwareSampler):
        def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
            return ready_indexes[-batch_size:], []

    assert RankAwareSampler().needs(4) == 4
    assert Last().needs(4) is None


@pytest.mark.parametrize("given", [{}, {"dp_rank": 0}, {"batch_index": 0}, {"dp_rank": None, "batch_index": 0}])
def test_rank_and_batch_are_needed(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as caught:
        RankAwareSampler().sample([0], 1, **given)
    assert isinstance(caught.value, MissingParameter)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("wrong", [{"dp_rank": -1}, {"dp_rank": "0"}, {"batch_index": []}, {"batch_size": -1}])
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    sampler = RankAwareSampler()
    with pytest.raises(InvalidInput):
        sampler.sample([0, 1], **{"batch_size": 1, **FIRST, **wrong})
    assert sampler._states == {}


def test_a_checkpoint_restores_the_batches() -> None:
    sampler, restored = RankAwareSampler(), RankAwareSampler()
    sampler.sample([3, 5], 2, task_name="t", partition_id="p", **FIRST)
    restored.load_checkpoint(copy.deepcopy(sampler.save_checkpoint()))
    assert restored.has_cached_result("p", "t", FIRST)
    assert restored.sample([], 2, task_name="t", partition_id="p", **FIRST) == ([3, 5], [3, 5])


def test_it_has_a_name() -> None:
    assert tq.RankAwareSampler is RankAwareSampler
    assert type(from_spec(resolve("RankAwareSampler"))) is RankAwareSampler


# ---- in the controller ----


def test_all_callers_of_a_rank_get_the_same_rows_and_they_are_consumed_once(box: Box) -> None:
    box.put(4)
    assert [box.fetch(2, **FIRST) for _ in range(3)] == [[0, 1]] * 3
    assert box.fetch(2, dp_rank=1, batch_index=0) == [2, 3]
    assert box.consumed() == dict.fromkeys(range(4), 1)
    assert box.fetch(2, **FIRST) == [0, 1]


def test_waiting_callers_of_a_rank_are_answered_together(box: Box) -> None:
    for ticket in "abc":
        assert box.fetch(2, wait_s=9, ticket=ticket, **FIRST) is None
    box.put(1)
    assert box.answers() == []
    box.put(1)
    assert box.answers() == [("a", [0, 1]), ("b", [0, 1]), ("c", [0, 1])]


def test_ranks_that_wait_together_get_different_rows(box: Box) -> None:
    for ticket, rank in (("a", 1), ("b", 0), ("c", 1)):
        box.fetch(2, wait_s=9, ticket=ticket, dp_rank=rank, batch_index=0)
    box.put(4)
    assert box.answers() == [("a", [0, 1]), ("b", [2, 3]), ("c", [0, 1])]


def test_a_caller_that_waits_is_answered_when_another_takes_the_batch_with_fewer_rows(box: Box) -> None:
    box.put(2)
    assert box.fetch(4, wait_s=9, ticket="many", **FIRST) is None
    assert box.fetch(2, **FIRST) == [0, 1]
    assert box.answers() == [("many", [0, 1])]


def test_a_caller_that_came_first_is_answered_by_what_a_later_one_completes(box: Box) -> None:
    box.fetch(4, wait_s=9, ticket="many", **FIRST)
    box.fetch(2, wait_s=9, ticket="few", **FIRST)
    box.put(2)
    assert box.answers() == [("few", [0, 1]), ("many", [0, 1])]


def test_a_remembered_batch_waits_for_fields_that_are_not_written_yet(box: Box) -> None:
    """The last stage of a pipeline asks for another field than the first one."""
    box.put(["k", "l"], ["x"])
    assert box.fetch(2, ["x"], **FIRST) == [0, 1]
    assert box.fetch(2, ["x", "y"], wait_s=9, ticket="last", **FIRST) is None
    box.put(["k"], ["y"])
    assert box.answers() == []
    box.put(["l"], ["y"])
    assert box.answers() == [("last", [0, 1])]


def test_a_cleared_row_ends_its_batch(box: Box) -> None:
    """T-10: the same batch_index never names rows that are gone, or others that took their place."""
    box.put(4)
    box.fetch(2, **FIRST)
    box.clear([1])
    assert box.fetch(2, **FIRST) == [2, 3]
    box.clear()
    box.put(2)
    assert box.fetch(2, **FIRST) == [4, 5]


def test_partitions_and_tasks_do_not_share_batches_whatever_the_caller_says(box: Box) -> None:
    """T-13: the controller knows the partition and the task; sampling_config may repeat them, or be wrong."""
    box.put(2)
    box.put(2, partition="q")
    wrong = {**FIRST, "partition_id": "q", "task_name": "u"}
    assert box.fetch(2, **wrong) == [0, 1]
    assert box.fetch(2, task="u", **FIRST) == [0, 1]
    assert box.fetch(2, partition="q", **FIRST) == [2, 3]
    box.clear([0])
    assert box.fetch(2, empty=True, **wrong) == []


@pytest.mark.parametrize("sampling", [{}, {"dp_rank": 0}, {"dp_rank": -1, "batch_index": 0}])
def test_what_can_never_be_sampled_is_refused_instead_of_waiting(box: Box, sampling: dict[str, Any]) -> None:
    for _ in range(2):  # without and with a partition
        with pytest.raises(InvalidInput):
            box.fetch(2, wait_s=9, ticket="t", **sampling)
        box.put(1)
    assert box.controller.num_waiting == 0


def test_through_a_client(service: Callable[..., tq.TransferQueueClient]) -> None:
    client = service(controller={"sampler": RankAwareSampler()})
    client.put({"x": [1, 2, 3, 4]}, partition_id="p")
    first = client.get_meta(["x"], 2, "p", task_name="t", sampling_config=FIRST)
    assert client.get_meta(["x"], 2, "p", task_name="t", sampling_config=FIRST).global_indexes == first.global_indexes
    with pytest.raises(MissingParameter):
        client.get_meta(["x"], 2, "p", task_name="t", sampling_config={"dp_rank": 0})
