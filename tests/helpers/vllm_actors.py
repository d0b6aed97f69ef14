"""Actors for `test_ray_weights.py`, with the methods of vLLM's `AsyncLLM` and its requests, over a receiver of ours."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from transfer_queue.integrations.vllm.trainer import CLIENTS
from transfer_queue.weights import Control, Receiver, Swap
from transfer_queue.weights.transport import registry


@dataclass
class WeightTransferInitRequest:
    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    update_info: Any = field(default_factory=dict)


class RayVLLMWeightSyncClient:
    """Whose methods are not called: ours takes its place."""

    def __init__(self, handle: Any) -> None:
        self.handles = handle if isinstance(handle, list) else [handle]


class HTTPVLLMWeightSyncClient:
    """Has to be there."""


def pretend_vllm() -> None:
    """Have the module of vLLM's clients be there, with these."""
    module = ModuleType(CLIENTS)
    module.__dict__.update(globals())
    sys.modules[CLIENTS] = module


class Plain:
    """An actor that holds a `Control`, so its faults are raised."""

    def __init__(self, num_cpus: int = 1) -> None:
        self.module = torch.nn.Linear(4, 4)
        receiver = Receiver(Swap(self.module))
        self._control = Control(registry.engine("tcp")(receiver), receiver)

    def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        self._control.init_weight_transfer_engine(request.init_info)

    def start_weight_update(self) -> None:
        self._control.start_weight_update()

    def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        self._control.update_weights(request.update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._control.finish_weight_update(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self._control.update_weight_version(new_version)

    def get_weight_version(self) -> str:
        return self._control.get_weight_version()

    def silent_workers(self) -> int:
        return 0

    def weight(self) -> float:
        return float(self.module.weight[0, 0])


class Workers:
    """An actor with workers of which nobody is met: it is asked how many there are."""

    def collective_rpc(self, method: str) -> list[None]:
        assert method == "check_health"
        return [None, None]


class Neither:
    """An actor that cannot say."""

    def start_weight_update(self) -> None:
        """Never called."""
