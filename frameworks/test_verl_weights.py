"""Weights by verl's own manager, worker groups and registry over the engine "tq", on a Ray of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayResourcePool
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

from frameworks.weight_workers import SHAPES, Actor, Replica, Rollout, group, weights
from transfer_queue.errors import Aborted, DeadlineExceeded, DigestMismatch, ServiceUnavailable
from transfer_queue.weights.version.digest import digest_tensor

ON_RAY = True
NUM_CPUS = 8  # two sites: a processor for each worker, which waits most of the time


class Site:
    """Two actor ranks, two rollout replicas, and verl's manager between them."""

    def __init__(self, model: Path, **engine_kwargs: Any) -> None:
        config = CheckpointEngineConfig(
            backend="tq", custom_backend_module="transfer_queue.integrations.verl_weights",
            update_weights_bucket_megabytes=1, engine_kwargs={"tq": engine_kwargs},
        )  # fmt: skip
        rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
        model_config = HFModelConfig(path=str(model), use_remove_padding=False)
        self.pools = [RayResourcePool([2], use_gpu=False, max_colocate_count=1) for _ in range(2)]
        self.actors = group(self.pools[0], Actor, config=config)
        self.rollouts = group(self.pools[1], Rollout, rollout_config=rollout_config, model_config=model_config)
        replicas = [Replica(rank, rollout_config, model_config) for rank in range(2)]
        for replica in replicas:
            asyncio.run(replica.init_hybrid(self.rollouts))
        self.manager = CheckpointEngineManager(config=config, actor_wg=self.actors, replicas=replicas)

    def update(self, step: int) -> dict[str, float]:
        self.actors.set_step(step)
        return self.manager.update_weights(global_steps=step)

    def close(self) -> None:
        for worker in [*self.actors.workers, *self.rollouts.workers]:
            ray.kill(worker)
        for pool in self.pools:
            for one in pool.pgs:
                ray.util.remove_placement_group(one)

    def given(self) -> list[int]:
        """How many tensors each rollout worker was given so far."""
        return [number for _, number in self.rollouts.loaded()]


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Site]:
    """One site for the tests after which the next update works; they leave no update open."""
    made = Site(model, timeout_s=6.0)
    yield made
    made.close()


@pytest.fixture
def site(model: Path) -> Iterator[Site]:
    made = Site(model)
    yield made
    made.close()


def digests(step: int) -> dict[str, str]:
    return {name: digest_tensor(tensor) for name, tensor in weights(step).items()}


def test_every_rollout_worker_loads_what_the_actors_gathered(shared: Site) -> None:
    before = shared.given()
    for step in (1, 2, 3):
        metrics = shared.update(step)
        assert [tensors for tensors, _ in shared.rollouts.loaded()] == [digests(step)] * 2
        assert metrics["checkpoint_engine/payload_mbytes"] > 0
    assert shared.given() == [number + 3 * len(SHAPES) for number in before]
    assert CheckpointEngineRegistry.get("tq").__name__ == "VerlCheckpointEngine"


def test_damaged_buckets_are_loaded_by_nobody_and_the_next_update_works(shared: Site) -> None:
    before = shared.given()
    shared.actors.damage(True)
    with pytest.raises((DigestMismatch, Aborted)):
        shared.update(2)
    assert shared.given() == before
    shared.actors.damage(False)
    shared.update(3)
    assert [tensors for tensors, _ in shared.rollouts.loaded()] == [digests(3)] * 2


def test_one_rollout_worker_that_does_not_come_in_time_ends_the_update_for_all(shared: Site) -> None:
    before = shared.given()
    shared.manager.build_process_group(shared.rollouts)
    sent = shared.actors.update_weights(global_steps=1, mode="tq")
    taken = shared.rollouts.workers[0].update_weights.remote(global_steps=1)
    with pytest.raises(DeadlineExceeded, match="1 of 2 workers"):
        ray.get(sent, timeout=30)
    with pytest.raises((Aborted, DeadlineExceeded)):
        ray.get(taken, timeout=30)
    assert shared.given() == before
    shared.update(2)
    assert [tensors for tensors, _ in shared.rollouts.loaded()] == [digests(2)] * 2


def test_rollout_workers_hear_of_an_actor_that_was_killed_after_prepare(site: Site) -> None:
    site.manager.build_process_group(site.rollouts)
    ray.kill(site.actors.workers[0])
    for late in site.rollouts.update_weights(global_steps=1):
        with pytest.raises(ServiceUnavailable):
            ray.get(late, timeout=30)
    assert site.rollouts.loaded() == [({}, 0)] * 2
