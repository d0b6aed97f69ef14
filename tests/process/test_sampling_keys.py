"""Names in a sampling_config that nobody would look at: refused before the request waits, with the nearest one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tables import Box, indexes

import transfer_queue as tq
from transfer_queue.errors import InvalidInput, InvalidSampling
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from transfer_queue.sampler.base import Sampled
from transfer_queue.wire import messages as m

BUILT_IN = [SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler]
KNOWN = {
    "dp_rank": 0,
    "batch_index": 0,
    "task_name": "t",
    "partition_id": "p",
    "max_staleness": 1,
    "untagged": "accept",
}


@pytest.mark.parametrize("sampler", BUILT_IN)
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("dp_rnk", "dp_rank"),
        ("batch_idx", "batch_index"),
        ("max_stalenes", "max_staleness"),
        ("partitionid", "partition_id"),
    ],
)
def test_a_misspelt_key_is_refused_before_it_waits(sampler: type[BaseSampler], wrong: str, right: str) -> None:
    box = Box(sampler())
    with pytest.raises(InvalidSampling, match=f"{sampler.__name__} does not know '{wrong}'; the nearest is '{right}'"):
        box.fetch(1, wait_s=9, ticket="t", **{wrong: 0})
    assert box.controller.num_waiting == 0


@pytest.mark.parametrize("sampler", BUILT_IN)
def test_every_key_that_is_known_may_be_given(sampler: type[BaseSampler]) -> None:
    box = Box(sampler())
    box.put(2)
    assert indexes(box.handle(_fetch(KNOWN))) == [0]


def _fetch(sampling: dict[str, Any]) -> m.Fetch:
    return m.Fetch(1, "p", ["a"], 1, "t", sampling, 0.0, False)


class Named(BaseSampler):
    """Names what it takes."""

    def sample(  # type: ignore[override]
        self, ready_indexes: list[int], batch_size: int, partition: Any, task_name: str, partition_id: str, flavour: str
    ) -> Sampled:
        return ready_indexes[:1], ready_indexes[:1]


class Inherited(SequentialSampler):
    """Samples as its parent."""


class Open(SequentialSampler):
    """Takes anything."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        return ready_indexes[: kwargs["anything"]], []


def test_a_users_sampler_takes_what_its_signature_names_and_what_every_request_has() -> None:
    box = Box(Named())
    box.put(2)
    assert box.handle(_fetch({"flavour": "sweet", "task_name": "t", "partition_id": "p"})).rows
    with pytest.raises(InvalidInput, match="Named does not know 'flavor'; the nearest is 'flavour'"):
        box.fetch(1, wait_s=9, ticket="t", flavor="sweet")
    assert box.controller.num_waiting == 0


def test_a_users_sampler_with_keyword_arguments_takes_any_key() -> None:
    box = Box(Open())
    box.put(3)
    assert box.fetch(1, anything=2) == [0, 1]


def test_a_users_sampler_that_samples_as_its_parent_knows_what_its_parent_knows() -> None:
    with pytest.raises(InvalidInput, match="Inherited does not know 'rank'"):
        Box(Inherited()).fetch(1, wait_s=9, ticket="t", rank=0)


def test_a_client_is_told_at_once(service: Callable[..., tq.TransferQueueClient]) -> None:
    client = service(controller={"sampler": "RankAwareSampler"})
    client.put({"x": [1, 2]}, partition_id="p")
    with pytest.raises(InvalidInput, match="'dp_rank'"):
        client.get_meta(["x"], 2, "p", task_name="t", sampling_config={"dprank": 0, "batch_index": 0}, timeout_s=60)
    assert client.check_consumption_status("t", "p") is False
