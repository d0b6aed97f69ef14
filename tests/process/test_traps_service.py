"""The rows of reference/traps.md that need a service with settings of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.errors import DeadlineExceeded

Service = Callable[..., tq.TransferQueueClient]


def batch(n: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[n])


def test_T10_cleared_rows_are_not_replayed(service: Service) -> None:
    client = service(controller={"sampler": "GRPOGroupNSampler"})
    config = {"dp_rank": 0, "batch_index": 0}
    client.put(batch(2, x=torch.tensor([1.0, 2.0])), partition_id="s1")
    meta = client.get_meta(["x"], 2, "s1", task_name="t", sampling_config=config)
    client.clear_samples(meta)
    client.put(batch(2, x=torch.full((2,), 42.0)), partition_id="s2")
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["x"], 2, "s1", task_name="t", sampling_config=config, timeout_s=0.05)


def test_T13_caches_belong_to_their_partition_and_task(service: Service) -> None:
    client = service(controller={"sampler": "GRPOGroupNSampler"})
    config = {"dp_rank": 0, "batch_index": 0}
    one = client.put(batch(2, x=torch.zeros(2)), partition_id="a")
    two = client.put(batch(2, x=torch.zeros(2)), partition_id="b")
    for partition, rows in (("a", one), ("b", two)):
        for task in ("t", "u"):
            got = client.get_meta(["x"], 2, partition, task_name=task, sampling_config=config, timeout_s=1)
            assert got.global_indexes == rows.global_indexes
            assert set(got.partition_ids) == {partition}


def test_T18_a_failed_put_leaves_no_rows_and_no_room_taken(service: Service) -> None:
    client = service(backend={"SimpleStorage": {"total_storage_size": 4}}, client={"timeout_s": 0.2})
    client.put(batch(3, x=torch.zeros(3)), partition_id="p")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            client.put(batch(2, x=torch.zeros(2)), partition_id="p")
    client.put(batch(1, x=torch.zeros(1)), partition_id="p")
    assert client.stats()["rows"] == 4


def test_T20_clear_frees_the_memory_of_its_rows(service: Service) -> None:
    client = service()
    meta = client.put(batch(4, x=torch.zeros(4, 100_000)), partition_id="p")
    client.clear_samples(meta)
    assert client.stats()["arena_nbytes_used"] == 0
    client.put(batch(4, x=torch.zeros(4, 10)), partition_id="p")
    client.clear_partition("p")
    assert (client.stats()["arena_nbytes_used"], client.stats()["rows"]) == (0, 0)
