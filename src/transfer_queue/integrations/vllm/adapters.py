"""LoRA adapters in a vLLM worker that was started with `--enable-lora`: held on the host, by label.

A request names one by the path `tq:LABEL` (`lora_request`). vLLM keeps what it loaded by the number of the request, and
drops it with every update of weights; then its manager of adapters asks for the path again, and gets what is held now.
So a version replaces the one before from the next forward pass on, whatever number or name a server gave it.

A label that has no adapter (yet, any more, or for these weights) is answered by the base model alone: to raise where
vLLM loads adapters ends its engine, or puts the workers out of step.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import torch

from transfer_queue.errors import Incomplete, InvalidInput, NotSupported, ShapeMismatch, UnknownTensor
from transfer_queue.weights.receive.adapters import config_of
from transfer_queue.weights.receive.targets import Target
from transfer_queue.weights.version.manifest import Manifest

log = logging.getLogger("transfer_queue.weights")
SCHEME = "tq:"
MANAGERS = "vllm.lora.worker_manager"
Sizes = tuple[int | None, int | None]  # of a layer's input and output; None where it is not known
_served: WeakKeyDictionary[torch.nn.Module, LabeledAdapters] = WeakKeyDictionary()


def path_of(label: str, version: int | None = None) -> str:
    """What a request, or `/v1/load_lora_adapter`, has as an adapter's path. The version chooses nothing, the newest one
    answers: it keeps prefixes that were cached with other versions from being found."""
    return SCHEME + quote(label, safe="") + ("" if version is None else f"#{version}")


def lora_request(label: str, version: int | None = None) -> Any:
    """vLLM's `LoRARequest` for the adapter that a trainer sent under this label (`path_of`)."""
    from vllm.lora.request import LoRARequest

    number = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=4).digest(), "big") // 2 + 1
    return LoRARequest(lora_name=label, lora_int_id=number, lora_path=path_of(label, version))


class HostAdapter(NamedTuple):
    """One version, as it came."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    base_root: str | None


class LabeledAdapters:
    """The adapters of one worker: what its receiver gives them to. Commits and loads are in the worker's thread."""

    def __init__(self, model: torch.nn.Module, target: Target) -> None:
        """`target`: says which weights are installed."""
        self._model, self._target = model, target
        self._manager: Any = getattr(model, "lora_manager", None)
        self._held: dict[str, HostAdapter] = {}
        self._ids: set[int] = set()  # that vLLM may have loaded
        if self._manager is not None:
            _served[model] = self
            load_from_here()

    def prepare(self, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> HostAdapter:
        """Check it against this worker's model and settings. `NotSupported` for what vLLM does not take (no
        `--enable-lora`, a rank above `--max-lora-rank`, DoRA, ..), `UnknownTensor`, `ShapeMismatch`, `Incomplete`,
        `BadManifest`, `InvalidInput`."""
        if self._manager is None:
            raise NotSupported("this server takes no adapters: start it with --enable-lora")
        if not manifest.tensors:
            return HostAdapter({}, {}, None)
        kept = {name: one.cpu().clone() for name, one in tensors.items()}  # a small tensor would keep its bucket
        found = HostAdapter(kept, config_of(manifest), manifest.base_root)
        self._check(found)
        return found

    def __call__(self, adapter: HostAdapter, manifest: Manifest) -> None:
        """The receiver's commit."""
        kept = {label: one for label, one in self._held.items() if label != manifest.label}
        self._held = {**kept, manifest.label: adapter} if manifest.tensors else kept

    def unload(self) -> None:
        """Have vLLM ask again for all that came from here. In the worker's thread."""
        for number in self._ids:
            self._manager.remove_adapter(number)
        self._ids.clear()

    def load(self, request: Any) -> Any:
        """vLLM's `LoRAModel` for a request whose path is ours. Raises nothing."""
        label = unquote(request.lora_path.removeprefix(SCHEME).split("#")[0])
        self._ids.add(request.lora_int_id)
        held = self._held.get(label)
        if held is None or held.base_root not in (None, self._target.tag.root):
            why = "there is none" if held is None else "it is for other weights than those installed"
            log.warning("requests with the adapter %r are answered without it: %s", label, why)
            return _nothing(request.lora_int_id)
        copies = {name: one.clone() for name, one in held.tensors.items()}  # vLLM scales them in place
        made = self._made(request.lora_int_id, copies, held.config)
        made.is_3d_lora_weight = getattr(request, "is_3d_lora_weight", False)
        return made

    def _made(self, number: int, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> Any:
        from vllm.lora.lora_model import LoRAModel

        return LoRAModel.from_lora_tensors(
            number, tensors, _settings(config), device="cpu", dtype=self._manager.lora_config.lora_dtype,
            model_vocab_size=self._manager.vocab_size, weights_mapper=_mapper(self._model),
            skip_prefixes=getattr(self._model, "lora_skip_prefixes", None),
        )  # fmt: skip

    def _check(self, adapter: HostAdapter) -> None:
        settings = _settings(adapter.config)
        if adapter.config.get("modules_to_save"):
            raise NotSupported("an adapter with saved modules")
        try:
            settings.validate_legal(self._manager.lora_config)
        except ValueError as error:
            raise NotSupported(str(error)) from None
        try:
            made = self._made(1, dict(adapter.tensors), adapter.config)
        except ValueError as error:
            raise UnknownTensor(str(error)) from None
        except RuntimeError as error:
            raise ShapeMismatch(str(error)) from None
        known = dict(sizes(self._manager))
        for name, layer in made.loras.items():
            if name not in known:
                raise UnknownTensor(f"vLLM has no layer {name!r} that takes an adapter")
            _check_layer(name, layer, known[name])


def load_from_here() -> None:
    """vLLM's managers of adapters read folders. From now on they get what has one of our paths from here; other paths
    are theirs as before. Repeatable."""
    managers: Any = sys.modules[MANAGERS].WorkerLoRAManager
    load: Any = managers._load_adapter
    if getattr(load, "knows_labels", False):
        return

    def wrapped(self: Any, lora_request: Any) -> Any:
        held = _served.get(self._adapter_manager.model)
        if held is None or not lora_request.lora_path.startswith(SCHEME):
            return load(self, lora_request)
        return held.load(lora_request)

    wrapped.knows_labels = True  # type: ignore[attr-defined]
    managers._load_adapter = wrapped


def sizes(manager: Any) -> Iterator[tuple[str, Sizes]]:
    """The layers that take an adapter, by the names that adapters have for them, and their sizes on all workers."""
    for name, module in manager.modules.items():
        layer = getattr(module, "base_layer", module)
        parts = manager.packed_modules.get(name) or [name]
        given, outputs = getattr(layer, "input_size", None), _outputs(layer, len(parts))
        if hasattr(layer, "embedding_dim"):
            given, outputs = layer.org_vocab_size, [layer.embedding_dim]
        yield from ((part, (given, output)) for part, output in zip(parts, outputs, strict=True))


def _outputs(layer: Any, num_parts: int) -> list[int | None]:
    """Of each part of a layer. Keys and values may be on several workers, so their sizes count heads."""
    if num_parts == 3 and hasattr(layer, "total_num_kv_heads"):
        heads = (layer.total_num_heads, layer.total_num_kv_heads)
        values = heads[1] * getattr(layer, "v_head_size", layer.head_size)
        return [heads[0] * layer.head_size, heads[1] * layer.head_size, values]
    several = getattr(layer, "output_sizes", None)
    if num_parts == 1:
        return [getattr(layer, "output_size", None)]
    return list(several) if several is not None and len(several) == num_parts else [None] * num_parts


def _check_layer(name: str, layer: Any, known: Sizes) -> None:
    if layer.lora_a is None or layer.lora_b is None:
        raise Incomplete(f"the adapter has one half of {name!r}")
    found = (*layer.lora_a.shape, *layer.lora_b.shape)
    expected = (layer.rank, known[0], known[1], layer.rank)
    if len(found) != 4 or any(size not in (None, have) for size, have in zip(expected, found, strict=True)):
        shapes = (list(layer.lora_a.shape), list(layer.lora_b.shape))
        raise ShapeMismatch(f"{name!r} has halves of {shapes}, expected {expected[:2]} and {expected[2:]}")


def _settings(config: Mapping[str, Any]) -> Any:
    """vLLM's reading of PEFT's configuration."""
    from vllm.lora.peft_helper import PEFTHelper

    try:
        return PEFTHelper.from_dict({"target_modules": [], **config})
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise InvalidInput(f"the adapter's configuration: {error}") from None


def _mapper(model: torch.nn.Module) -> Any:
    """From a checkpoint's names to this model's; None where they are the same."""
    found: Any = getattr(model, "hf_to_vllm_mapper", None)
    rename = getattr(found, "get_rename_mapper", None)
    return found if rename is None else rename()


def _nothing(number: int) -> Any:
    """An adapter without effect: of a layer that no model has."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    none = torch.zeros(1, 1, device="cpu")
    return LoRAModel(number, 1, {"nothing": LoRALayerWeights("nothing", 1, 1, none, none.clone())})
