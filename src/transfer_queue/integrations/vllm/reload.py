"""vLLM's layerwise reload of one model: addresses stay (CUDA graphs), and what kernels need is repacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from transfer_queue.integrations.vllm.rehearsal import some_modules_may_lack
from transfer_queue.integrations.workers.reloading import Named

Modules = Mapping[str, torch.nn.Module]  # by their paths


def reload(model: Any, tensors: Named, vllm_config: Any, model_config: Any, given: Modules | None = None) -> None:
    """Load all of it. On an error the model has tensors, of whichever version.

    `given`: modules that another model owns, and what takes the values that the loader has for them: those are not
    this model's to write.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    takers = given or {}
    with (
        set_current_vllm_config(vllm_config),
        some_modules_may_lack(),
        _kernels_made_anew(model),
        _in_place(model, {path: torch.nn.Module() for path in takers}),
    ):
        initialize_layerwise_reload(model)
        try:
            with _in_place(model, takers):
                model.load_weights(iter(tensors))
            finalize_layerwise_reload(model, model_config)
            _repack_shared(model)
        except BaseException:  # an interrupt must not leave layers without tensors
            _forget_what_came(model)
            finalize_layerwise_reload(model, model_config)
            raise
    if any(tensor.device.type not in ("cpu", "meta") for tensor in model.parameters()):
        torch.accelerator.synchronize()


@contextmanager
def _in_place(model: torch.nn.Module, modules: Modules) -> Iterator[None]:
    """Have these in the place of what the model has there."""
    before: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        before.append((owner, name, owner.get_submodule(name)))
        owner._modules[name] = module
    try:
        yield
    finally:
        for owner, name, found in before:
            owner._modules[name] = found


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
