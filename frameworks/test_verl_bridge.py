"""verl's bridge between metadata and batches, which is around every method of a worker; how batches are split."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.protocol import BatchData
from verl.single_controller.base.decorator import Dispatch
from verl.utils import tensordict_utils as tu
from verl.utils.transferqueue_utils import (
    batch_meta2kv_batch_meta,
    kv_batch_meta2batch_meta,
    tqbridge,
)

import transfer_queue as tq

KEYS = [f"u{number}_0_0" for number in range(6)]


@pytest.fixture
def stored() -> tq.KVBatchMeta:
    """Six rows: a jagged column, a dense one, texts."""
    ids = torch.nested.as_nested_tensor([torch.arange(number + 1) for number in range(6)], layout=torch.jagged)
    texts = NonTensorStack(*[f"text {number}" for number in range(6)])
    batch = TensorDict({"ids": ids, "score": torch.arange(6.0), "text": texts}, batch_size=6)
    return tq.kv_batch_put(keys=KEYS, partition_id="train", fields=batch, tags=[{"n": number} for number in range(6)])


@tqbridge()
def doubled(data: TensorDict, factor: int = 2) -> TensorDict:
    temperature = tu.get_non_tensor_data(data, "temperature", default=1.0)
    out = torch.nested.nested_tensor_from_jagged(data["ids"].values() * factor * temperature, data["ids"].offsets())
    return TensorDict({"doubled": out, "note": NonTensorData({"seen": len(data)})}, batch_size=len(data))


@tqbridge()
async def counted(data: TensorDict) -> TensorDict:
    await asyncio.sleep(0)
    return TensorDict({"count": data["ids"].offsets().diff()}, batch_size=len(data))


@tqbridge()
def without_rows(data: TensorDict) -> TensorDict:
    return TensorDict({"metrics": NonTensorData({"loss": [1.0]})}, batch_size=[])


def test_a_function_reads_and_writes_the_queue_by_keys(stored: tq.KVBatchMeta) -> None:
    stored.extra_info["temperature"] = 10
    out = doubled(stored)
    assert isinstance(out, tq.KVBatchMeta)
    assert out.keys == KEYS
    assert out.tags == stored.tags
    assert out.fields == ["doubled", "ids", "score", "text"]
    assert out.extra_info == {"note": {"seen": 6}}
    rows = tq.kv_batch_get(keys=KEYS[::-1], partition_id="train", select_fields=["doubled"])["doubled"].unbind()
    assert [row.tolist() for row in rows] == [[20 * n for n in range(number + 1)] for number in reversed(range(6))]


def test_a_function_reads_only_the_fields_of_its_metadata(stored: tq.KVBatchMeta) -> None:
    chosen = tq.KVBatchMeta(keys=KEYS[2:4], tags=[{}] * 2, partition_id="train", fields=["text"], extra_info={})
    seen: list[Any] = []
    assert tqbridge()(lambda data: seen.append(data))(chosen) is None
    assert list(seen[0].keys()) == ["text"]
    assert list(seen[0]["text"]) == ["text 2", "text 3"]


def test_an_async_function(stored: tq.KVBatchMeta) -> None:
    out = asyncio.run(counted(stored))
    assert tq.kv_batch_get(keys=out.keys, partition_id="train")["count"].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_result_without_rows_is_returned_as_it_is(stored: tq.KVBatchMeta) -> None:
    assert without_rows(stored)["metrics"] == {"loss": [1.0]}


def test_a_function_by_position_of_rows(stored: tq.KVBatchMeta) -> None:
    meta = kv_batch_meta2batch_meta(stored)
    out = doubled(meta, factor=3)
    assert isinstance(out, tq.BatchMeta)
    assert out.extra_info == {"note": {"seen": 6}}
    assert out.field_names == ["doubled", "ids", "score", "text"]
    assert tq.get_client().get_data(out)["doubled"].offsets().tolist() == [0, 1, 3, 6, 10, 15, 21]


def test_a_rank_that_does_not_collect_returns_empty_metadata(stored: tq.KVBatchMeta) -> None:
    from functools import partial

    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import collect_lazy_compute_data_proto

    class Silent(Worker):
        def __init__(self) -> None:
            """Without the process group of a real one."""

        def query_collect_info(self, mesh_name: str) -> bool:
            return False

    mode = {"dispatch_fn": print, "collect_fn": partial(collect_lazy_compute_data_proto, "actor")}
    out = tqbridge(dispatch_mode=mode)(lambda worker, data: data.select("score"))(Silent(), stored)
    assert isinstance(out, tq.BatchMeta)
    assert out.size == 0
    assert tqbridge(dispatch_mode=Dispatch.ONE_TO_ALL)(lambda data: 7)(stored) == 7


def test_empty_metadata_becomes_an_empty_batch() -> None:
    meta = tq.BatchMeta()
    meta.extra_info = {"temperature": 0.5}
    assert tqbridge()(lambda data: (len(data), data["temperature"]))(meta) == (0, 0.5)


def test_metadata_is_converted_both_ways(stored: tq.KVBatchMeta) -> None:
    stored.extra_info["seed"] = 3
    meta = kv_batch_meta2batch_meta(stored)
    assert meta.size == 6
    assert meta.field_names == ["ids", "score", "text"]
    assert meta.extra_info == {"seed": 3}
    assert meta.partition_ids == ["train"] * 6
    back = batch_meta2kv_batch_meta(meta.select_samples([4, 1]))
    assert back.keys == [KEYS[4], KEYS[1]]
    assert back.partition_id == "train"
    assert back.extra_info == {"seed": 3}
    tq.kv_batch_get_by_meta(back)


def test_a_batch_is_split_over_ranks_and_joined(stored: tq.KVBatchMeta) -> None:
    stored.reorder([5, 4, 3, 2, 1, 0])
    stored.extra_info["temperature"] = 1
    assert BatchData(stored).is_chunkable()
    chunks = BatchData(stored).chunk(chunks=2)
    assert [chunk.size for chunk in chunks] == [3, 3]
    outs = [doubled(chunk) for chunk in chunks]
    assert BatchData(outs).is_concatable()
    joined = BatchData(outs).concat()
    assert isinstance(joined, tq.KVBatchMeta)
    assert joined.keys == KEYS[::-1]
    assert joined.extra_info == {"note": [{"seen": 3}, {"seen": 3}]}
    assert len(joined) == joined.size == 6


def test_key_metadata_is_joined(stored: tq.KVBatchMeta) -> None:
    parts = stored.chunk(4)
    assert [part.size for part in parts] == [2, 2, 1, 1]
    assert BatchData(parts).concat().keys == KEYS


def test_rows_that_were_cleared_meanwhile(stored: tq.KVBatchMeta) -> None:
    meta = kv_batch_meta2batch_meta(stored)
    tq.kv_clear(keys=KEYS[0], partition_id="train")
    with pytest.raises(tq.StorageKeyNotFoundError):
        doubled(meta)
