"""A client of the data plane, records and buffers, as NeMo-RL's single controller has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.client.groups import GroupPool
from transfer_queue.integrations.nemo_rl import (
    InOrderSampler,
    ReadyFirstSampler,
    TQReplayBuffer,
    WeightFifoSampler,
    WindowedSampler,
)
from transfer_queue.integrations.nemo_rl.payload import PackedGroup

T = TypeVar("T")
PARTITION = "rollout_data"
SIZE = 2
# In order of arrival: name, version it was started at, step it is for, whether it is finished. The trainer comes to 5.
GROUPS = [
    ("a", 3, 4, True), ("b", 3, 5, False), ("c", 4, 5, True), ("d", 5, 6, True), ("e", 5, 5, True), ("f", 6, 7, True),
    ("g", 1, 5, True),
]  # fmt: skip


class DataPlane:
    """NeMo-RL's client of the queue, as far as a buffer calls it. `fails`: methods that raise, after they have done
    their work."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.puts: list[list[str]] = []

    def put_samples(self, *, sample_ids: list[str], partition_id: str, fields: Any, tags: Any) -> None:
        tq.kv_batch_put(list(sample_ids), partition_id, fields, tags)
        self.puts.append(list(sample_ids))
        self._fail("put_samples")

    def clear_samples(self, *, sample_ids: list[str], partition_id: str) -> None:
        tq.kv_clear(list(sample_ids), partition_id)
        self._fail("clear_samples")

    async def get_samples(self, *, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> Any:
        return await tq.async_kv_batch_get(list(sample_ids), partition_id, select_fields)

    def _fail(self, method: str) -> None:
        if method in self.fails:
            raise ConnectionError(f"{method} failed")


def pack(record: int, *, pad_value_dict: Any, weight_version: int, group_id: str) -> PackedGroup:
    """A record is a number here; its group has rows of it."""
    ids = [f"{group_id}_g{at}" for at in range(SIZE)]
    columns = {"input_ids": torch.full((SIZE, 3), record), "input_lengths": torch.full((SIZE,), 3)}
    fields = TensorDict(columns, batch_size=[SIZE])
    return PackedGroup(ids, fields, [{"weight_version": weight_version} for _ in ids], [3] * SIZE)


def new_buffer(**more: Any) -> TQReplayBuffer:
    return TQReplayBuffer(DataPlane(), PARTITION, pad_value_dict={"token_ids": 0}, pack=pack, **more)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result; a wait that never ends is an error."""

    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, 50)

    return asyncio.run(bounded())


async def commit(buffer: TQReplayBuffer, name: str, start: int = 0, **more: Any) -> Any:
    buffer.reserve(weight_version=start, group_id=name, **more)
    return await buffer.commit(name, 7, start, start)


async def filled(buffer: TQReplayBuffer, stamped: bool = False) -> None:
    for name, start, step, is_finished in GROUPS:
        buffer.reserve(weight_version=start, target_step=step if stamped else None, group_id=name)
        if is_finished:
            await buffer.commit(name, 7, start, start)


async def parked(pool: GroupPool) -> None:
    """Somebody waits in the service."""
    while not (await pool.async_status())["waiting"]:
        await asyncio.sleep(0)


def names_of(meta: Any) -> str:
    return "" if meta is None else "".join(dict.fromkeys(one.partition("_")[0] for one in meta.sample_ids))


def stored() -> set[str]:
    """The groups that have rows."""
    return {key.partition("_")[0] for key in tq.kv_list(PARTITION).get(PARTITION, {})}


def lists(buffer: TQReplayBuffer) -> list[list[Any]]:
    return [
        buffer.meta_list, buffer.start_weight_list, buffer.end_weight_list, buffer.target_step_list, buffer.ready_list,
        buffer._group_ids,
    ]  # fmt: skip


TABLE: dict[str, tuple[Callable[[TQReplayBuffer], Any], str, str, str]] = {  # selected, evicted, aborted
    "windowed 1": (lambda b: WindowedSampler(b, max_staleness_versions=1), "cde", "ag", "b"),
    "freshest": (
        lambda b: WindowedSampler(b, max_staleness_versions=1, sample_freshest_first=True), "dec", "ag", "b",
    ),
    "ready_first 1": (lambda b: ReadyFirstSampler(b, max_staleness_versions=1), "acdeg", "", ""),
    "weight_fifo 1": (lambda b: WeightFifoSampler(b, max_staleness_versions=1), "c", "ag", ""),
    "weight_fifo 2": (lambda b: WeightFifoSampler(b, max_staleness_versions=2), "a", "g", ""),
    # a lookahead of 3 from step 4 on, so that all of the groups may be there when the trainer comes to 5
    "in_order": (lambda b: InOrderSampler(b, max_lookahead_versions=3, groups_per_step=4), "ceg", "a", ""),
}  # fmt: skip


def beginning() -> str:
    """What a child begins with: a buffer and a sampler as above."""
    folder = str(Path(__file__).parent)
    return f"""
    import asyncio, sys
    sys.path.insert(0, {folder!r})
    from nemo import WeightFifoSampler, commit, new_buffer
    buffer = new_buffer()
    sampler = WeightFifoSampler(buffer, max_staleness_versions=1)
    """
