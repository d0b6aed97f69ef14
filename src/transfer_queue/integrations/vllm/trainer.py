"""Our trainers from vLLM's `WeightTransferTrainerFactory` (0.32), for programs that were written for vLLM's engines.

plugin.register()
info = FactoryInfo(rank=rank, backend="tq_tcp")
trainer = WeightTransferTrainerFactory.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=source)
trainer.send_weights()
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from transfer_queue.errors import InvalidInput
from transfer_queue.integrations.vllm import engine, plugin
from transfer_queue.integrations.vllm.ray_client import RayActorClient
from transfer_queue.integrations.vllm.source import vllm_source
from transfer_queue.weights.http import WeightSyncClient
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.clients import Client
from transfer_queue.weights.transport.holder import Holder
from transfer_queue.weights.transport.pending import SyncReport
from transfer_queue.weights.transport.trainer import TrainerEngine

CLIENTS = "vllm.distributed.weight_transfer.clients"


@dataclass(kw_only=True)
class FactoryInfo:
    """What vLLM's factory is told. `backend`: the name that the servers were started with (`plugin.ENGINES`).

    `rank` of `world`: all ranks call `trainer_init` and `send_weights`; rank 0 leads. 0: those of torch's process
    group, or one. `deadline_s`: of a `send_weights` that is given none, as by vLLM's programs. `options`: what else the
    `trainer_init` of the transport takes."""

    rank: int
    backend: str = "transfer_queue"
    world: int = 0
    deadline_s: float = 300.0
    options: Mapping[str, Any] = field(default_factory=dict)


class FactoryTrainer:
    """Has the methods of vLLM's `TrainerWeightTransferEngine`. `engine` leads the updates, or takes part in them."""

    def __init__(self, info: FactoryInfo, engine: TrainerEngine | Holder) -> None:
        self.info, self.engine = info, engine
        self.is_sender = info.rank == 0

    @classmethod
    def trainer_init(cls, init_info: FactoryInfo, *, client: Any, source: Any = None) -> FactoryTrainer:
        """Introduce the servers to rank 0, and the other ranks to it.

        `source`: see `vllm_source`. `client`: of rank 0, see `client_for`. `InvalidInput` for another backend, several
        ranks over a transport that knows none, or a client that cannot say how many workers there are.
        """
        name = plugin.ENGINES.get(init_info.backend)
        if name is None:
            raise InvalidInput(f"no backend {init_info.backend!r}, there are {', '.join(plugin.ENGINES)}")
        trainer = registry.trainer(getattr(engine, name).transport)
        world = init_info.world or _num_ranks()
        if not 0 <= init_info.rank < world:
            raise InvalidInput(f"rank {init_info.rank} of {world}")
        told = dict(init_info.options)
        if world > 1:
            if "world" not in trainer.init_form.__struct_fields__:
                raise InvalidInput(f"{init_info.backend} has one rank of a trainer, not {world}: tq_tcp has several")
            told.update(rank=init_info.rank, world=world)
        calls: Any = None if init_info.rank else client_for(client, told)
        found = vllm_source(source, init_info.rank, world)
        return cls(init_info, trainer.trainer_init(told, client=calls, source=found))

    def send_weights(self, version: int | None = None, *, deadline_s: float | None = None) -> SyncReport:
        """See `TrainerEngine.send_weights`. Every rank has to call it."""
        return self.engine.send_weights(version, deadline_s=self.info.deadline_s if deadline_s is None else deadline_s)

    def shutdown(self) -> None:
        """Free what the transport holds. Servers keep their weights. Repeatable."""
        self.engine.shutdown()


def client_for(client: Any, options: Mapping[str, Any]) -> Client:
    """vLLM's own clients become ours of the same servers, which also bring labels and caches up to date: the HTTP one a
    `WeightSyncClient`, the one of Ray's actors a `RayActorClient`. Others stay as they are; one without
    `silent_workers` needs `silent` in the options, or `InvalidInput`: workers of vLLM only report what went wrong, and
    somebody has to know how many there are."""
    theirs = sys.modules.get(CLIENTS)
    if theirs is not None and type(client) is theirs.HTTPVLLMWeightSyncClient:
        return WeightSyncClient(client.base_url, timeout_s=client.timeout)
    if theirs is not None and type(client) is theirs.RayVLLMWeightSyncClient:
        requests = theirs.WeightTransferInitRequest, theirs.WeightTransferUpdateRequest
        return RayActorClient(client.handles, *requests)
    if "silent" not in options and not callable(getattr(type(client), "silent_workers", None)):
        raise InvalidInput(f"a {type(client).__name__} does not know how many workers there are: give `silent`")
    return client


def _num_ranks() -> int:
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1
