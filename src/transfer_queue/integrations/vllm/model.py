"""A model in a vLLM worker as a target.

Loading goes through vLLM's layerwise reload, which keeps addresses (CUDA graphs) and repacks, but leaves the model
unusable when it fails: `workers.reloading` goes back then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from transfer_queue.errors import NotSupported
from transfer_queue.integrations.vllm.checkpoint import Checkpoint
from transfer_queue.integrations.workers.reloading import Agrees, Named, ReloadTarget
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.version.manifest import Contents
from transfer_queue.weights.version.plans import Wants


class LoadedModel(ReloadTarget):
    takes_pieces = True
    _checkpoint: Checkpoint

    def __init__(self, model: torch.nn.Module, vllm_config: Any, agree: Agrees) -> None:
        super().__init__(model, Checkpoint(vllm_config, vllm_config.model_config), agree)
        self._vllm_config = vllm_config
        self._model_config = vllm_config.model_config

    def check(self, contents: Contents) -> None:
        """vLLM may move experts between workers with EPLB (`NotSupported`): the loader takes others then than when the
        model was made, by which the version was fetched."""
        if getattr(self._vllm_config.parallel_config, "enable_eplb", False):
            raise NotSupported("this server moves experts between its workers: start it without --enable-eplb")
        super().check(contents)

    def wanted(self, tensors: Metas) -> Wants | None:
        return self._checkpoint.wanted(tensors)

    def _load(self, tensors: Named) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with set_current_vllm_config(self._vllm_config), _some_modules_may_lack(), _kernels_made_anew(self._model):
            initialize_layerwise_reload(self._model)
            try:
                load: Any = self._model.load_weights
                load(iter(tensors))
                finalize_layerwise_reload(self._model, self._model_config)
                _repack_shared(self._model)
            except BaseException:  # an interrupt must not leave layers without tensors
                _forget_what_came(self._model)
                finalize_layerwise_reload(self._model, self._model_config)
                raise
        if any(tensor.device.type not in ("cpu", "meta") for tensor in self._model.parameters()):
            torch.accelerator.synchronize()


def _forget_what_came(model: torch.nn.Module) -> None:
    """Have vLLM put the tensors from before back in place, in layers that are not finished."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


@contextmanager
def _kernels_made_anew(model: torch.nn.Module) -> Iterator[None]:
    """On CPUs vLLM (0.32) repacks the weights of experts for their kernel when it makes the kernel, in no reload after
    that: the answers would be wrong. So while a layer is loaded it has no kernel. Those of layers that were not loaded
    come back."""
    there: list[tuple[Any, Any]] = []
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and all(one.device.type == "cpu" for one in layer.parameters()):
            there.append((method, kernel))
            method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in there:
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def _repack_shared(model: torch.nn.Module) -> None:
    """On CPUs layers compute with a packed copy of their weight. A tied head that the version does not name was not
    loaded, so its copy is of the embeddings before."""
    owners: set[int] = set()
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not hasattr(layer, "cpu_linear"):
            continue
        if id(weight) in owners:
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)
        owners.add(id(weight))


def _some_modules_may_lack() -> Any:
    """vLLM's check for draft layers does not hold for checkpoints from trainers."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return contextlib.nullcontext()
    return disable_mtp_completeness_check()
