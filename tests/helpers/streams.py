"""Partitions and datasets for the streaming tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.metadata import BatchMeta


def put(client: tq.TransferQueueClient, rows: int, partition: str = "p", start: int = 0) -> BatchMeta:
    """`rows` rows whose `x` counts from `start` and whose `wide` is a page-sized view of the same number."""
    x = torch.arange(start, start + rows)
    wide = x[:, None].repeat(1, 20_000)
    return client.put(TensorDict({"x": x, "wide": wide}, batch_size=[rows]), partition_id=partition)


def dataset(partition: str = "p", batch: int = 4, micro: int = 2, **more: Any) -> tq.StreamingDataset:
    terms = {"task_name": "t", "dp_rank": 0, "should_check_consumption_status": True, "config": None, **more}
    return tq.StreamingDataset(
        batch_size=batch, micro_batch_size=micro, data_fields=["x", "wide"], partition_id=partition, **terms
    )


def numbers(stream: Iterable[Any]) -> list[list[int]]:
    """The `x` of every micro-batch; all fields and the metadata agree with it."""
    found = []
    for data, meta in stream:
        assert len(meta) == len(data)
        assert [int(row[-1]) for row in data["wide"].unbind()] == data["x"].tolist()
        found.append(data["x"].tolist())
    return found


def used(client: tq.TransferQueueClient, partition: str = "p", task: str = "t") -> int:
    """How many rows count as consumed."""
    _, status = client.get_consumption_status(task, partition)
    assert status is not None
    return int(status.sum())
