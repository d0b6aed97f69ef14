"""How long after its commit a group is in the hands of NeMo-RL's train loop, and what the calls of its buffer cost.

    python -m bench.nemo [--rounds 200]

One event loop, as NeMo-RL's single controller has one: a rollout commits groups of 8 rows of 4 KiB, a train loop wants
the next one. Two ways, in turn in each round: a sampler with `patience_s`, whose `select` waits in the service; and a
loop that looks every 5 ms at a list in its own process, where the same put has left its rows, as NeMo-RL's own buffer
and samplers do. The time is from before the commit to when the loop has the group. Then, alone: microseconds for each
call. `reserve` blocks the loop for so long.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable
from typing import Any

import torch

import transfer_queue as tq
from transfer_queue.integrations.nemo_rl import TQReplayBuffer, WindowedSampler
from transfer_queue.integrations.nemo_rl.payload import PackedGroup

SIZE = 8
PAUSE_S = 0.005
ONE = {"current_train_weight": 0, "min_prompt_groups": 1, "max_prompt_groups": 1}


class Rows:
    """The client of the data plane."""

    async def put_samples(self, *, sample_ids: list[str], partition_id: str, fields: Any, tags: Any) -> None:
        await tq.async_kv_batch_put(sample_ids, partition_id, fields, tags)

    async def clear_samples(self, *, sample_ids: list[str], partition_id: str) -> None:
        await tq.async_kv_clear(sample_ids, partition_id)


def pack(record: Any, *, pad_value_dict: Any, weight_version: int, group_id: str) -> PackedGroup:
    ids = [f"{group_id}_g{at}" for at in range(SIZE)]
    return PackedGroup(ids, {"input_ids": record}, [{"weight_version": weight_version} for _ in ids], [1024] * SIZE)


RECORD = torch.ones(SIZE, 1024, dtype=torch.int32)


async def waits(buffer: TQReplayBuffer, sampler: WindowedSampler) -> float:
    async def hand() -> float:
        meta, _ = await sampler.select(**ONE)
        ended = time.perf_counter()
        await tq.async_kv_clear(meta.sample_ids, "waits")
        return ended

    name = buffer.reserve(weight_version=0)
    train = asyncio.ensure_future(hand())
    await asyncio.sleep(random.uniform(0.02, 0.03))
    began = time.perf_counter()
    await buffer.commit(name, RECORD, 0, 0)
    return await train - began


async def looks(name: str) -> float:
    ready: list[PackedGroup] = []

    async def hand() -> float:
        while not ready:
            await asyncio.sleep(PAUSE_S)
        return time.perf_counter()

    train = asyncio.ensure_future(hand())
    await asyncio.sleep(random.uniform(0.02, 0.03))  # the loop must not be in step with it
    began = time.perf_counter()
    packed = pack(RECORD, pad_value_dict={}, weight_version=0, group_id=name)
    await tq.async_kv_batch_put(packed.sample_ids, "looks", packed.fields, packed.tags)
    ready.append(packed)
    ended = await train
    await tq.async_kv_clear(packed.sample_ids, "looks")
    return ended - began


async def compare(rounds: int) -> None:
    buffer = TQReplayBuffer(Rows(), "waits", pad_value_dict={}, pack=pack)
    sampler = WindowedSampler(buffer, max_staleness_versions=1, patience_s=60)
    found: dict[str, list[float]] = {"waits": [], "5 ms": []}
    for number in range(rounds + 5):
        took = {"waits": await waits(buffer, sampler), "5 ms": await looks(f"g{number}")}
        for way, times in found.items():
            if number >= 5:
                times.append(1e3 * took[way])
    for way, times in found.items():
        times.sort()
        p95 = times[int(0.95 * (len(times) - 1))]
        print(f"{way:6} median {statistics.median(times):6.2f} ms   p95 {p95:6.2f} ms   ({len(times)} rounds)")


async def calls(groups: int = 500) -> None:
    buffer = TQReplayBuffer(Rows(), "calls", pad_value_dict={}, pack=pack)
    sampler = WindowedSampler(buffer, max_staleness_versions=1)
    times: dict[str, list[float]] = {"reserve": [], "commit": [], "evict": [], "select": []}

    async def timed(name: str, call: Awaitable[Any]) -> None:
        began = time.perf_counter()
        await call
        times[name].append(1e6 * (time.perf_counter() - began))

    for _ in range(groups):
        began = time.perf_counter()
        name = buffer.reserve(weight_version=0)
        times["reserve"].append(1e6 * (time.perf_counter() - began))
        await timed("commit", buffer.commit(name, RECORD, 0, 0))
    for _ in range(groups):
        await timed("evict", sampler.evict(current_train_weight=0))
        await timed("select", sampler.select(**ONE))
    cells = "   ".join(f"{name} {statistics.median(values):.0f}" for name, values in times.items())
    print(f"calls, us, median of {groups}: {cells}   (evict and select: up to {groups} finished groups)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    tq.init()
    asyncio.run(compare(rounds))
    asyncio.run(calls())
    tq.close()


if __name__ == "__main__":
    main()
