"""What the engines for vLLM's workers need of vLLM, for tests that have none. `make test-vllm` has the real one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file


class Factory:
    """vLLM's registry."""

    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_engine(cls, name: str, module: str, attribute: str) -> None:
        if name in cls._registry:
            raise ValueError(name)
        cls._registry[name] = (module, attribute)


class TrainerFactory(Factory):
    """Its other one."""

    _registry: ClassVar[dict[str, Any]] = {}


class Model(torch.nn.Module):
    """Has vLLM's `load_weights`; fails after `fails_after` tensors, once, and when it is `asleep`."""

    asleep = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.fails_after = -1

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        assert not self.asleep
        with torch.no_grad():
            for index, (name, tensor) in enumerate(weights):
                if index == self.fails_after:
                    self.fails_after = -1
                    raise RuntimeError("as the test wanted")
                self.get_parameter(name).copy_(tensor)
        return set(dict(self.named_parameters()))


class Client:
    """vLLM's worker, as far as sessions and sleep go: it refuses what is out of order."""

    def __init__(self, engine: Any) -> None:
        self.weight_transfer_engine = engine
        self._weight_update_active = False

    def silent_workers(self) -> int:
        return 1

    def sleep(self, level: int = 1) -> None:
        self.weight_transfer_engine.model.asleep = True
        if level == 2:
            self.weight_transfer_engine.model.load_state_dict(weights(math.nan))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.weight_transfer_engine.model.asleep &= tags is not None and "weights" not in tags

    def init_weight_transfer_engine(self, info: Any) -> None:
        self.weight_transfer_engine.init_transfer_engine(self.weight_transfer_engine.parse_init_info(info))

    def start_weight_update(self) -> None:
        assert not self._weight_update_active
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, info: Any) -> None:
        assert self._weight_update_active
        self.weight_transfer_engine.update_weights(info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self._weight_update_active
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False


def put_in_place(monkeypatch: pytest.MonkeyPatch, *, twins: bool = False) -> None:
    """Its modules, as far as they are asked for. `twins`: models can be made without memory."""

    def module(name: str, **attributes: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(attributes)
        made.__path__ = []  # a package
        monkeypatch.setitem(sys.modules, name, made)

    Factory._registry, TrainerFactory._registry = {"nccl": None}, {"nccl": None}
    layerwise = SimpleNamespace(get_layerwise_info=lambda _: SimpleNamespace(can_load=lambda: False))
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.model_executor", "vllm.v1"):
        module(name)
    module(
        "vllm.distributed.weight_transfer.factory",
        WeightTransferEngineFactory=Factory, WeightTransferTrainerFactory=TrainerFactory,
    )  # fmt: skip
    sys.modules["vllm.distributed"].parallel_state = SimpleNamespace()  # type: ignore[attr-defined]
    module("vllm.v1.worker.gpu_worker", Worker=Client)
    module("vllm.config", set_current_vllm_config=lambda _: nullcontext())
    module("vllm.model_executor.model_loader")
    module(
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=nothing, finalize_layerwise_reload=nothing, layerwise=layerwise,
    )  # fmt: skip
    if twins:
        make: Callable[..., Model] = lambda vllm_config, model_config: getattr(model_config, "make", Model)()  # noqa: E731
        module("vllm.model_executor.model_loader.utils", initialize_model=make)
        for name in ("vllm.model_executor.layers", "vllm.model_executor.layers.quantization"):
            module(name)
        module("vllm.model_executor.layers.quantization.kv_cache", BaseKVCacheMethod=type("None", (), {}))


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"linear.weight": torch.full((2, 2), value), "linear.bias": torch.full((2,), value)}


def config(folder: Path, tied: bool = False) -> Any:
    save_file(weights(1.0), folder / "model.safetensors")
    model = SimpleNamespace(model=str(folder), dtype=torch.float32, revision=None)
    model.hf_config = SimpleNamespace(tie_word_embeddings=tied)
    parallel = SimpleNamespace(rank=1, world_size=2, data_parallel_index=1)
    return SimpleNamespace(
        model_config=model, parallel_config=parallel, load_config=SimpleNamespace(load_format="auto")
    )
