"""Fixtures: one service and one Ray of two processors for all tests, a verl trainer without its GPU parts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from omegaconf import DictConfig
from verl.experimental.reward_loop import RewardLoopManager
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
)
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ, PPOTrainer, get_trainer_cls

import transfer_queue as tq
from frameworks.engine import Answers, Engine, Replicas
from frameworks.setting import new_config, write_data, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    write_data(folder)
    return folder


@pytest.fixture
def configure(model: Path, tmp_path: Path) -> Callable[..., DictConfig]:
    """Composes verl's configuration with overrides."""
    return lambda *overrides: new_config(model, tmp_path, *overrides)


@pytest.fixture(scope="module", autouse=True)
def service(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DictConfig]:
    """The queue, started the way verl's task runner does: with the section of verl's configuration.

    Modules with ON_RAY get it on a Ray of two processors, where workers find it by its actor's name.
    """
    os.environ.pop("TQ_ADDRESS", None)
    section = new_config(model, tmp_path_factory.mktemp("out")).transfer_queue
    on_ray = getattr(request.module, "ON_RAY", False)
    if on_ray:
        num_cpus = getattr(request.module, "NUM_CPUS", 2)
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    yield tq.init(section)
    tq.close()
    if on_ray:
        ray.shutdown()


@pytest.fixture(autouse=True)
def _nothing_stays(service: DictConfig) -> Iterator[None]:
    yield
    for partition in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(partition)


class Workers:
    """The rollout side in this process: verl's agent loop worker, unwrapped from its Ray actor."""

    def __init__(self, config: DictConfig, answers: Answers) -> None:
        self.worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, answers)

    def generate_sequences(self, batch: Any) -> None:
        """Generate for every prompt, and come back when all have settled."""

        async def settled() -> None:
            await self.worker.generate_sequences(batch)
            await asyncio.gather(*self.worker.background_tasks)

        asyncio.run(settled())


@pytest.fixture
def new_trainer(configure: Callable[..., DictConfig]) -> Callable[..., PPOTrainer]:
    """A trainer of verl with its tokenizer and data, and rollout in this process; no engines."""

    def build(*overrides: str, answers: Answers | None = None, processor: object = None) -> PPOTrainer:
        config = configure(*overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer._init_tokenizer()
        trainer.processor = processor  # the data set wants one for prompts with images, and does not call it
        trainer._init_dataloader()
        trainer._init_dump_executor()
        trainer.global_steps = 1
        trainer.replay_buffer.poll_interval = 0.01
        trainer.checkpoint_manager = trainer.llm_server_manager = Replicas()
        trainer.curr_step_profile = False
        trainer.distillation_config = None
        trainer.agent_loop_manager = Workers(config, answers or Answers())
        return trainer

    return build


@pytest.fixture
def on_ray(service: DictConfig) -> Iterator[Callable[[PPOTrainer], AgentLoopManagerTQ]]:
    """Gives a trainer its worker groups, reward workers and agent loop workers, as Ray actors."""
    handles: list[Any] = []
    groups: list[Any] = []

    def equip(trainer: PPOTrainer) -> AgentLoopManagerTQ:
        config = trainer.config
        trainer.reward_loop_manager = RewardLoopManager(config)
        manager = AgentLoopManagerTQ.create(
            config=config,
            llm_client=Answers(),
            teacher_client=None,
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        handles.extend([*trainer.reward_loop_manager.reward_loop_workers, *manager.agent_loop_workers])
        ray.get([worker.__ray_ready__.remote() for worker in handles])  # both processors belong to the engines next
        pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        groups.extend(pool.get_placement_groups(device_name="cpu"))
        engine = RayClassWithInitArgs(ray.remote(Engine))
        group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=engine, device_name="cpu")
        handles.extend(group.workers)
        trainer.actor_rollout_wg = trainer.ref_policy_wg = trainer.critic_wg = group
        trainer.ref_in_actor = False
        trainer.resource_pool_manager = ResourcePoolManager(resource_pool_spec={"global_pool": [2]}, mapping={})
        trainer.global_steps = 0
        return manager

    yield equip
    for handle in handles:
        ray.kill(handle)
    for group in groups:
        ray.util.remove_placement_group(group)
