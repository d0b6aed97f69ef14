"""Calls that contradict themselves, and wrong names: an error or a warning, never something else in silence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.errors import InvalidInput


@pytest.fixture
def part(request: pytest.FixtureRequest, shared: tq.TransferQueueClient) -> Iterator[str]:
    """A name for partitions of the test's own; all that begin with it are removed."""
    name = request.node.name
    yield name
    for one in shared.get_partition_list():
        if one.startswith(name):
            shared.clear_partition(one)


def batch(n: int, *fields: str) -> TensorDict:
    return TensorDict({field: torch.zeros(n) for field in fields or ("x",)}, batch_size=[n])


# ---- put ----


def test_put_to_metadata_of_another_partition_is_refused_and_stores_nothing(
    shared: tq.TransferQueueClient, part: str
) -> None:
    meta = shared.put(batch(2), partition_id=part)
    with pytest.raises(InvalidInput, match=f"'other'.*'{part}'"):
        shared.put(batch(2, "y"), metadata=meta, partition_id="other")
    assert meta.field_names == ["x"]
    assert shared.get_partition_list() == [part]
    assert shared.get_production_status(["y"], part) == (None, None)


def test_put_to_metadata_of_two_partitions_is_refused_for_one_of_them(
    shared: tq.TransferQueueClient, part: str
) -> None:
    both = tq.BatchMeta.concat([shared.put(batch(1), partition_id=part + end) for end in "ab"])
    with pytest.raises(InvalidInput, match=f"{part}b"):
        shared.put(batch(2, "y"), metadata=both, partition_id=part + "a")
    assert shared.get_production_status(["y"], part + "a") == (None, None)


def test_put_to_metadata_may_repeat_its_partition(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(2), partition_id=part)
    assert shared.put(batch(2, "y"), metadata=meta, partition_id=part).field_names == ["x", "y"]
