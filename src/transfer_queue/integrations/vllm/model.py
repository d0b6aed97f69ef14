"""A model in a vLLM worker as a target. Versions are whole checkpoints; the model's loaders cut out what belongs here.

Loading goes through vLLM's layerwise reload, which keeps addresses (CUDA graphs) and repacks, but leaves the model
unusable when it fails. So nothing is loaded before it was checked, and after a failure the version before is loaded
again, from its host copy, which is kept anyway: differences apply to it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from transfer_queue.errors import CommitFailed, NotSupported, StaleBase
from transfer_queue.integrations.vllm.checkpoint import Checkpoint
from transfer_queue.memory.heap import trim_later
from transfer_queue.weights.receive.lazy import Supplied, supplied
from transfer_queue.weights.receive.targets import Broken, Live, Metas, Pause, Target
from transfer_queue.weights.version.manifest import Contents
from transfer_queue.weights.version.plans import Wants

log = logging.getLogger("transfer_queue.weights")
Named = Iterable[tuple[str, torch.Tensor]]


class Loading(NamedTuple):
    """What is to be loaded, as far as this worker has it, and the same on the host (the very same tensors where they
    came there). `metas`: every tensor of the version, in the order of loading."""

    tensors: dict[str, Supplied]
    copies: dict[str, Supplied]
    metas: Metas


class LoadedModel(Target):
    """`agree` tells whether the other workers of this server took the version too: all commit, or all go back. It is
    called once in every commit (`voted`). Commits run in the thread that runs the forward passes."""

    takes_pieces = True

    def __init__(self, model: torch.nn.Module, vllm_config: Any, agree: Callable[[bool], bool]) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._model_config = vllm_config.model_config
        self._agree = agree
        self._checkpoint = Checkpoint(vllm_config, self._model_config)
        self._held: dict[str, Supplied] | None = None  # what is installed, as far as it was wanted here
        self._held_metas: Metas = {}
        self._metas: Metas = {}  # of the version that was checked last
        self.voted = False

    def wanted(self, tensors: Metas) -> Wants | None:
        return self._checkpoint.wanted(tensors)

    def check(self, contents: Contents) -> None:
        self._checkpoint.check(contents)
        self._metas = {name: contents[name][:2] for name in in_layers(list(contents))}

    def bases(self) -> Mapping[str, Supplied]:
        if self._held is None:
            raise StaleBase("nothing was installed here yet: send a full version")
        return self._held

    def prepare(self, staged: Mapping[str, Supplied]) -> Loading:
        held = self._held or {}
        new = {name: staged.get(name, held.get(name)) for name in self._metas}
        there = {name: tensor for name, tensor in new.items() if tensor is not None}
        return Loading(there, {name: tensor.cpu() for name, tensor in there.items()}, self._metas)

    def commit(self, prepared: Loading, tag: Any, timeout_s: float) -> Pause:
        start = time.monotonic()
        fault: Exception | None = None
        try:
            self._load(supplied(prepared.tensors, prepared.metas))
        except Exception as error:  # loaders raise whatever they run into
            log.exception("loading failed")
            fault = error
        self.voted = True
        if not self._agree(fault is None):
            self._go_back(repr(fault) if fault else "another worker of this server could not load it")
        self._held, self._held_metas, self.tag, self.broken = prepared.copies, prepared.metas, tag, False
        trim_later()  # what the reload has freed: half of this worker's share of the model
        return Pause(time.monotonic() - start, 0.0)

    def _go_back(self, why: str) -> None:
        """Load what was there before, and raise."""
        self.broken = True
        before: Named | None = self._checkpoint.tensors() if self._held is None else None
        if self._held is not None:
            before = supplied(self._held, self._held_metas)
        if before is None:
            raise Broken(f"loading failed, and there is no copy of what was there before: {why}")
        try:
            self._load(before)
        except Exception as worse:  # as above
            log.exception("loading the version before failed")
            raise Broken(f"loading failed ({why}), and so did going back: {worse!r}") from worse
        self.broken = False
        raise CommitFailed(f"loading failed, the version before was loaded again: {why}")

    def _load(self, tensors: Named) -> None:
        """All of it, through the model's loader. On an error the model has tensors, of whichever version."""
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

    # readers: the worker's own thread, which commits too

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[Live]:
        if self.broken:
            raise CommitFailed("the weights are a mixture since a commit failed: commit a whole version")
        yield Live(self._model, self.tag)

    @contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[float]:
        yield 0.0

    def scramble(self, timeout_s: float) -> None:
        raise NotSupported("vLLM's own /weight_checker overwrites weights")

    @contextmanager
    def inspecting(self, timeout_s: float) -> Iterator[torch.nn.Module]:
        yield self._model


def in_layers(names: list[str]) -> list[str]:
    """What is not in a numbered layer in its place, and the others by layer: vLLM repacks a layer, and frees what was
    gathered for it, when its last tensor has come."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        parts = name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        key = (name, -1) if at is None else (".".join(parts[:at]), int(parts[at]))
        groups.setdefault(key, []).append(name)
    return [name for group in groups.values() for name in group]


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
