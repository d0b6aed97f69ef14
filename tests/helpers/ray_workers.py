"""What a job runs in an actor of Ray, on whatever node."""

from __future__ import annotations

import os

import torch

import transfer_queue as tq

ROWS, WIDTH = 8, 300_000
KEYS = [str(row) for row in range(ROWS)]


class NodeWorker:
    """With a client of the service at `address`."""

    def __init__(self, address: str) -> None:
        os.environ["TQ_ADDRESS"] = address
        tq.init()

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def put(self, partition: str, value: float) -> None:
        tq.kv_batch_put(keys=KEYS, partition_id=partition, fields={"x": rows(value)})

    def get(self, partition: str, keys: list[str]) -> list[list[float]]:
        return got(partition, keys)

    def close(self) -> None:
        tq.close()


def rows(value: float) -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, WIDTH) + value


def got(partition: str, keys: list[str]) -> list[list[float]]:
    """Of each row its first and last number, and how many it has."""
    found = tq.kv_batch_get(keys=keys, partition_id=partition)["x"]
    return [[row[0].item(), row[-1].item(), float(len(row))] for row in found.unbind()]
