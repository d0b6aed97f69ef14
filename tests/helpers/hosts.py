"""A service over several hosts: a controller's server and units that joined it, each with a client of its host."""

from __future__ import annotations

import os
from typing import Any

import torch

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.launch import local
from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire.address import parse_address

TOKEN, UNIT_TOKEN = "a-token-nobody-guesses", "a-token-of-units-alone"
CLIENT = {
    "polling_mode": False, "timeout_s": 10.0, "spin_s": 0.0, "copy_threads": None,
    "pool_nbytes": 1 << 28,
}  # fmt: skip


LARGE = 300_000  # floats of a row: a block of some is never sent along with a reply


def rows(value: float, count: int, width: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.full((count, width), value), "n": torch.arange(count) + int(value) * 1000}


def firsts(data: Any) -> list[float]:
    return [row[0].item() for row in data["x"].unbind()]


class Host:
    """One server and a client that maps its memory."""

    def __init__(self, join: str = "", host: str = "127.0.0.1", **settings: Any) -> None:
        config = ServerConfig(
            owner_pid=os.getpid(), join=join, host=host,
            **{"run_dir": "", "budget_nbytes": 1 << 30, "token": TOKEN, "unit_token": UNIT_TOKEN,
               "sampler": {"class": "SequentialSampler"}, "client": CLIENT, **settings},
        )  # fmt: skip
        self.server = local.start(config)
        self.tcp = f"tcp:{self.server.tcp}"
        self.client = TransferQueueClient.of(Session(parse_address(self.server.address)))

    def kv_put(self, keys: list[str], partition: str, fields: Any = None, tags: Any = None) -> Any:
        return run(self.client.session, kv.kv_batch_put(self.client.session, keys, partition, fields, tags))

    def kv_get(self, keys: list[str], partition: str, fields: list[str] | None = None, **more: Any) -> Any:
        return run(self.client.session, kv.kv_batch_get(self.client.session, keys, partition, fields, **more))

    def used(self) -> int:
        """Bytes that rows, readers and writers hold in this host's unit."""
        nbytes: int = self.client.stats()["arena_nbytes_used"]
        return nbytes

    def close(self) -> None:
        self.client.close()
        self.server.stop()
