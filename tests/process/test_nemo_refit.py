"""NeMo-RL's refit transport by the calls of its weight synchronizer; ranks and workers are processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Child

from transfer_queue.errors import ConfigError, NotInitialized, NotOpen
from transfer_queue.integrations.nemo_rl.refit_transport import NemoRefitTransport
from transfer_queue.weights.version.digest import digest_tensor

WORKER = """
import asyncio, json
import torch
from transfer_queue.integrations.nemo_rl.refit_transport import NemoRefitTransport
from transfer_queue.weights.version.digest import digest_tensor

engine = NemoRefitTransport(bucket_size=1 << 20, timeout_s=30.0)

async def receive():
    return {name: digest_tensor(tensor) async for batch in engine.receive_weight_batches() for name, tensor in batch}

while (order := input()) != "end":
    print(json.dumps({**engine.prepare(), "rank": 1}))
    metadata = json.loads(input())
    sizes = {"train_world_size": 2, "rollout_world_size": 2, "metadata": metadata}
    if order == "policy":
        engine.init_policy_process_group(worker_rank=1, **sizes)
        read = iter([("weight", torch.ones(2))])
        asyncio.run(engine.send_weights(read))
        print(json.dumps(list(read)))
    else:
        engine.init_rollout_process_group(rollout_rank=int(order), **sizes)
        print(json.dumps(asyncio.run(receive())))
    engine.finalize()
"""


def refit(engine: NemoRefitTransport, beside: list[Child], tensors: dict[str, torch.Tensor]) -> list[Any]:
    """One `sync_weights`: what each of the other processes read or received."""
    for order, one in zip(("policy", "0", "1"), beside, strict=True):
        one.say(order)
    metadata = [{**engine.prepare(), "rank": 0}, *(json.loads(one.line()) for one in beside)]
    sizes = {"train_world_size": 2, "rollout_world_size": 2}
    engine.init_policy_process_group(worker_rank=0, metadata=metadata, **sizes)
    for one in beside:
        one.say(json.dumps(metadata))
    asyncio.run(engine.send_weights(iter(tensors.items())))
    found = [json.loads(one.line()) for one in beside]
    engine.finalize()
    return found


def test_generation_workers_receive_what_the_first_policy_rank_sends_in_every_refit(
    child: Callable[[str], Child],
) -> None:
    beside = [child(WORKER) for _ in range(3)]
    engine = NemoRefitTransport(bucket_size=1 << 20, timeout_s=30.0)
    assert (engine.cleanup_after_load, engine.shard_hf_weights) == (True, False)  # read without a default
    assert engine.get_target_weight_layout() is None
    for step in (1, 2):
        tensors = {"embed": torch.full((900, 400), float(step)).bfloat16(), "norm": torch.full((7,), float(step))}
        expected = {name: digest_tensor(tensor) for name, tensor in tensors.items()}
        assert refit(engine, beside, tensors) == [[], expected, expected]
    for one in beside:
        one.say("end")
        one.finish()


def test_a_refit_that_was_not_prepared_is_refused() -> None:
    engine = NemoRefitTransport(bucket_size=1 << 20)
    with pytest.raises(NotInitialized, match="init_policy_process_group"):
        asyncio.run(engine.send_weights(iter([])))
    engine.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=[])
    with pytest.raises(NotOpen, match="prepare"):
        asyncio.run(engine.send_weights(iter([])))
    with pytest.raises(ConfigError, match="release_after_refit"):
        NemoRefitTransport(bucket_size=1 << 20, release_after_refit=False)
