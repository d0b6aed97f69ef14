"""Metadata and configuration on their way to other processes: through Ray, and through torch.distributed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict

import transfer_queue as tq

ON_RAY = True
ROOT = Path(__file__).resolve().parent.parent
KEYS = ["a", "b", "c", "d"]


@pytest.fixture
def metas() -> tuple[tq.KVBatchMeta, tq.BatchMeta]:
    """Both kinds of metadata of the same four rows, with everything they can carry."""
    ids = torch.nested.as_nested_tensor([torch.arange(n) for n in (1, 3, 2, 4)], layout=torch.jagged)
    batch = TensorDict({"ids": ids, "score": torch.arange(4.0)}, batch_size=4)
    by_key = tq.kv_batch_put(keys=KEYS, partition_id="p", fields=batch, tags=[{"n": n} for n in range(4)])
    by_key.extra_info["temperature"] = 0.5
    by_index = tq.get_client().kv_retrieve_meta(keys=KEYS, partition_id="p")
    by_index.extra_info = {"seed": torch.tensor([1, 2])}
    return by_key, by_index


def facts(by_key: tq.KVBatchMeta, by_index: tq.BatchMeta) -> list[Any]:
    """What there is to know about the two, as plain values."""
    return [
        by_key.keys, by_key.tags, by_key.partition_id, by_key.fields, by_key.extra_info, by_key.size, len(by_key),
        by_index.global_indexes, by_index.partition_ids, by_index.field_names, by_index.custom_meta, by_index.size,
        by_index.is_ready, by_index.production_status.tolist(), by_index.get_dtypes("ids"), by_index.get_shapes("ids"),
        by_index.extra_info["seed"].tolist(),
    ]  # fmt: skip


@ray.remote(num_cpus=0)
class Reader:
    """A worker that finds the service by itself."""

    def __init__(self) -> None:
        tq.init()

    def facts(self, by_key: tq.KVBatchMeta, by_index: tq.BatchMeta) -> list[Any]:
        return facts(by_key, by_index)

    def read(self, by_key: tq.KVBatchMeta, by_index: tq.BatchMeta) -> list[Any]:
        one, other = tq.kv_batch_get_by_meta(by_key), tq.get_client().get_data(by_index)
        return [[row.tolist() for row in td["ids"].unbind()] for td in (one, other)] + [one["score"].tolist()]

    def write(self, by_index: tq.BatchMeta) -> tq.BatchMeta:
        column = TensorDict({"value": torch.arange(float(len(by_index)))}, batch_size=len(by_index))
        return tq.get_client().put(column, metadata=by_index)

    def attach(self, config: DictConfig) -> bool:
        """Whether `init` with what the starter's `init` returned only attaches."""
        return tq.init(config) is config and tq.get_client().get_partition_list() == ["p"]


def test_metadata_through_ray(metas: tuple[tq.KVBatchMeta, tq.BatchMeta], service: DictConfig) -> None:
    assert facts(*ray.get([ray.put(meta) for meta in metas])) == facts(*metas)
    reader = Reader.remote()
    assert ray.get(reader.facts.remote(*metas)) == facts(*metas)
    rows = [[0], [0, 1, 2], [0, 1], [0, 1, 2, 3]]
    assert ray.get(reader.read.remote(*metas)) == [rows, rows, [0.0, 1.0, 2.0, 3.0]]
    part = metas[1].select_samples([3, 1])
    written = ray.get(reader.write.remote(part))
    assert written.is_ready
    assert written.field_names == ["ids", "score", "value"]
    assert tq.kv_batch_get(keys=["d", "b"], partition_id="p", select_fields=["value"])["value"].tolist() == [0.0, 1.0]
    assert ray.get(reader.attach.remote(ray.put(service)))
    tq.kv_put("e", "p", tag={"late": True})
    assert tq.kv_list("p")["p"]["e"] == {"late": True}
    ray.kill(reader)


PEER = """
    import os, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import transfer_queue as tq
    from frameworks.test_travel import facts

    rank = int(sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    if rank == 0:
        client = tq.init() or tq.get_client()
        by_index = client.get_meta(["ids"], 4, "p", task_name="t", timeout_s=10)
        by_index.extra_info = {"seed": torch.tensor([1, 2])}
        by_key = tq.KVBatchMeta(keys=list("abcd"), tags=[{}] * 4, partition_id="p", fields=["ids"], extra_info={"x": 1})
        box = [client.get_data(by_index), by_index, by_key]
    else:
        box = [None, None, None]
    dist.broadcast_object_list(box, src=0)
    rows = [row.tolist() for row in box[0]["ids"].unbind()]
    told = [rows, tuple(box[0]["ids"].to_padded_tensor(-1).shape), facts(box[2], box[1])]
    if rank == 1:  # the metadata of another process is good for reading, writing and clearing
        tq.init()
        again = [row.tolist() for row in tq.get_client().get_data(box[1])["ids"].unbind()]
        assert again == rows, again
        assert len(tq.kv_batch_get_by_meta(box[2])) == 4
        tq.get_client().put({"back": torch.ones(4)}, metadata=box[1])
    print(told)
    dist.barrier()
    dist.destroy_process_group()
"""


def test_metadata_and_rows_through_torch_distributed(metas: tuple[tq.KVBatchMeta, tq.BatchMeta]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PEER), str(rank)],
            env={**os.environ, **where}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0] == said[1]
    assert said[0].startswith("[[[0], [0, 1, 2], [0, 1], [0, 1, 2, 3]], (4, 4), ")
    assert tq.kv_batch_get(keys=KEYS, partition_id="p", select_fields=["back"])["back"].tolist() == [1.0] * 4
