"""Loading without memory: which parts of a version's tensors this worker's loader takes, and whether it takes them.

The loader is a twin's: the same model, in which what is made to be filled later has no memory, and what is computed
(maps of experts, rotary tables) is real. Some of that is the live model's own, as vLLM keeps one rotary embedding for
all models of a process: nothing of a twin is ever written.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from transfer_queue.errors import Incomplete, ShapeMismatch, UnknownTensor
from transfer_queue.weights.receive.lazy import Notes, lazies
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.version.plans import Wants

log = logging.getLogger("transfer_queue.weights")
_EMPTY = (torch.empty, torch.empty_strided, torch.Tensor.new_empty)


class Rehearsal:
    """What the loader of this worker takes. One thread at a time."""

    def __init__(self, vllm_config: Any, model_config: Any) -> None:
        self._vllm_config = vllm_config
        self.twin = _twin(vllm_config, model_config)
        self.given: tuple[str, ...] = ()  # paths of modules that the live model has from another one
        self._metas: Metas | None = None  # of the rehearsal that was last
        self._wants: Wants = {}
        self._missing: set[str] = set()

    def wants(self, metas: Metas) -> Wants:
        """The boxes that are taken of tensors like these, an empty tuple or none where nothing is.

        `UnknownTensor`, `ShapeMismatch`, `Incomplete` when the loader does not take them, or they are not enough.
        """
        found, missing = self.taken(metas), self._missing
        if missing:
            raise Incomplete(f"the version leaves {len(missing)} parameters as they were, such as {min(missing)!r}")
        return found

    def taken(self, metas: Metas) -> Wants:
        """The same, also where they are not enough."""
        if metas != self._metas:
            self._metas = None
            self._wants, self._missing = self._rehearse(metas)
            self._metas = dict(metas)
        return self._wants

    def _rehearse(self, metas: Metas) -> tuple[Wants, set[str]]:
        from vllm.config import set_current_vllm_config

        notes = Notes(metas)
        try:
            with set_current_vllm_config(self._vllm_config), some_modules_may_lack():
                loaded = self.twin.load_weights(lazies(metas, notes))
        except (KeyError, AttributeError) as error:
            raise UnknownTensor(f"the model's loader does not know {error}") from error
        except ValueError as error:
            kind = UnknownTensor if "no module or parameter" in str(error) else ShapeMismatch
            raise kind(f"the model's loader does not take it: {error}") from error
        except Exception as error:  # loaders raise whatever they run into
            raise ShapeMismatch(f"the model's loader does not take it: {error!r}") from error
        if not isinstance(loaded, set):
            return notes.wants(), set()
        missing = set(dict(self.twin.named_parameters())) - loaded - _of_caches(self.twin)
        return notes.wants(), {name for name in missing if not name.startswith(self.given)}


def some_modules_may_lack() -> Any:
    """vLLM's check for draft layers does not hold for checkpoints from trainers."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return contextlib.nullcontext()
    return disable_mtp_completeness_check()


def _of_caches(model: torch.nn.Module) -> set[str]:
    """Scales of attention's caches: parameters while a checkpoint is loaded, which hardly one has."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return {
        f"{path}.{name}"
        for path, layer in model.named_modules()
        if isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod)
        for name, _ in layer.named_parameters(recurse=False)
    }


class _EmptyOnMeta(TorchFunctionMode):
    """With all on meta, models with expert parallelism cannot be made: their maps need values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in _EMPTY:
            given["device"] = "meta"
        return func(*args, **given)


def _twin(vllm_config: Any, model_config: Any) -> Any:
    """The same model, with nothing in it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy.copy(vllm_config)  # attention layers enter themselves there by name, once
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(model_config.dtype)
    try:
        with set_current_vllm_config(config), _EmptyOnMeta():
            return initialize_model(vllm_config=config, model_config=model_config)
    finally:
        torch.set_default_dtype(before)
