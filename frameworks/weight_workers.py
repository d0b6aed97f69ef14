"""Workers of verl for updates of weights: its own methods and checkpoint engine, around tensors that need no GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica

from transfer_queue.integrations import refit
from transfer_queue.weights.version.digest import digest_tensor

SHAPES = {"embed": (1001, 64), "layer.weight": (256, 512), "layer.bias": (256,), "norm": (1,), "head": (1001, 64)}

SOUND = refit.Offer.bucket


def weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def wrong(offer: refit.Offer, key: str, index: int) -> torch.Tensor:
    return SOUND(offer, key, index) ^ 1


class Model:
    """What verl's engines are to an update: full tensors, each the result of a collective of all actor ranks."""

    def __init__(self) -> None:
        self.step = 0

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self._gathered(), None

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, whole in weights(self.step).items():
            shards = whole.tensor_split(dist.get_world_size())
            found: list[Any] = [None] * len(shards)
            dist.all_gather_object(found, shards[dist.get_rank()].clone())
            yield name, torch.cat(found)


class Actor(Worker):
    """An actor worker with the engine that verl's makes, and the methods of verl's for an update."""

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=dist.get_rank() == 0, bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )  # fmt: skip
        self.actor = SimpleNamespace(engine=Model())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_step(self, step: int) -> None:
        self.actor.engine.step = step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def damage(self, damaged: bool) -> None:
        """Whether every bucket that leaves from now on has wrong bytes."""
        refit.Offer.bucket = wrong if damaged else SOUND  # type: ignore[method-assign]


class Loaded(BaseRollout):
    """The inference server's end: what it was given to load, as digests."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.tensors: dict[str, str] = {}
        self.num_given = 0

    async def update_weights(self, weights: AsyncIterator[tuple[str, torch.Tensor]], **options: Any) -> None:
        found = {}
        async for name, tensor in weights:
            self.num_given += 1
            found[name] = digest_tensor(tensor)
        self.tensors = found

    async def resume(self, tags: list[str]) -> None:
        """Nothing sleeps."""

    async def release(self) -> None:
        """Nothing to release."""


class Rollout(CheckpointEngineWorker):
    def __init__(self, rollout_config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(rollout_config, model_config, Loaded(rollout_config, model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def loaded(self) -> tuple[dict[str, str], int]:
        """The last version, and how many tensors were given in all."""
        return self.server_adapter.tensors, self.server_adapter.num_given


class Replica(RolloutReplica):
    """One rollout worker, without the server beside it."""

    async def launch_servers(self) -> None:
        """No server."""

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        raise NotImplementedError


def group(pool: RayResourcePool, cls: type, **arguments: Any) -> RayWorkerGroup:
    made = RayClassWithInitArgs(ray.remote(cls), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
