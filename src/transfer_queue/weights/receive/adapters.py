"""LoRA adapters for the linear layers of torch modules, in PEFT's names and folders.

    Lora     y = Wx + (alpha / r) B(Ax), added by forward hooks: weights, names and the state dict stay as they are
    active   which adapter the forward passes of this thread (or asyncio task) have; none without it
    load, save   a folder with adapter_model.safetensors and adapter_config.json

What would change the result and is not understood (DoRA, biases, saved modules, patterns) is refused, never left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import save_file

from transfer_queue.errors import (
    BadManifest,
    Incomplete,
    InvalidInput,
    NotSupported,
    ShapeMismatch,
    StaleBase,
    UnknownTensor,
)
from transfer_queue.structs import decodable
from transfer_queue.weights.receive.receiver import VersionInfo
from transfer_queue.weights.version.manifest import ADAPTER_CONFIG, Manifest
from transfer_queue.weights.version.sources import SafetensorsSource, WeightSource

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_NAME = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
_UNMEANT = (
    "use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "megatron_config",
    "layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "use_qalora",
)  # fmt: skip


@decodable
class LoraConfig(msgspec.Struct, frozen=True):
    """What counts of PEFT's adapter_config.json. `InvalidInput` for a rank below 1."""

    r: int
    lora_alpha: float = 8
    target_modules: list[str] | str | None = None
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def targets(self, module: str) -> bool:
        """Whether the adapter is for this module: a list names ends of paths, a text is a regular expression."""
        asked = self.target_modules
        if asked is None or asked == "all-linear":
            return True
        if isinstance(asked, str):
            return re.fullmatch(asked, module) is not None
        return any(module == one or module.endswith(f".{one}") for one in asked)


def parse_config(config: Mapping[str, Any]) -> LoraConfig:
    """`NotSupported` for a configuration whose result would be another than `Lora` gives, `InvalidInput` for none."""
    unmeant = [key for key in _UNMEANT if config.get(key)]
    if config.get("peft_type", "LORA") != "LORA" or config.get("bias", "none") != "none" or unmeant:
        raise NotSupported(f"an adapter other than plain LoRA ({config.get('peft_type')}, {unmeant})")
    try:
        found = msgspec.convert(config, LoraConfig)
        re.compile(found.target_modules if isinstance(found.target_modules, str) else "")
    except (msgspec.ValidationError, re.error) as error:
        raise InvalidInput(f"{CONFIG}: {error}") from None
    if found.r < 1:
        raise InvalidInput(f"{CONFIG}: rank {found.r}")
    return found


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    scale: float


class Adapter(NamedTuple):
    """One version of an adapter, ready to be added. Never changed: who has it keeps it."""

    base_root: str | None
    pairs: Mapping[torch.nn.Module, Pair]


_active: ContextVar[Mapping[Lora, Adapter]] = ContextVar("tq_adapters", default=MappingProxyType({}))


class Lora:
    """The adapters of a module (of both, for a target with a spare one): `Receiver(target, adapter=lora)`.

    Make it before the module runs in other threads. Hooks run in every forward call of every linear layer, and cost a
    look-up without an adapter; compiled code and CUDA graphs do not see which one is active.
    """

    def __init__(self, *modules: torch.nn.Module) -> None:
        self._modules = modules
        self._adapters: dict[str, Adapter] = {}
        for module in modules:
            for part in module.modules():
                if _is_linear(part) and _add not in part._forward_hooks.values():
                    part.register_forward_hook(_add, with_kwargs=True)

    def prepare(self, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> Adapter:
        """Check it against the module, and copy it to where the layers are. Nothing live changes.

        `UnknownTensor`, `ShapeMismatch`, `Incomplete` (half a layer), `NotSupported`, `BadManifest`, `InvalidInput`."""
        if not manifest.tensors:
            return Adapter(None, {})
        config = parse_config(config_of(manifest))
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            parts = _NAME.fullmatch(name)
            if parts is None or not config.targets(parts[1]):
                raise UnknownTensor(f"{name!r} is no LoRA weight of a target module")
            halves.setdefault(parts[1], {})[parts[2]] = tensor
        pairs: dict[torch.nn.Module, Pair] = {}
        for path, two in halves.items():
            for module in self._modules:
                layer = _layer(path, module)
                if layer in pairs:
                    raise NotSupported(f"{path!r} is a layer that has an adapter by another name")
                pairs[layer] = _pair(path, layer, two, config)
        return Adapter(manifest.base_root, pairs)

    def __call__(self, adapter: Adapter, manifest: Manifest) -> None:
        """The receiver's commit: passes that begin after it have this one, or none when it is a removal."""
        kept = {label: one for label, one in self._adapters.items() if label != manifest.label}
        self._adapters = {**kept, manifest.label: adapter} if manifest.tensors else kept

    @property
    def labels(self) -> list[str]:
        return sorted(self._adapters)

    @contextmanager
    def active(self, label: str, tag: VersionInfo | None = None) -> Iterator[None]:
        """Forward passes within have this adapter, of one version, in this thread or asyncio task; inner ones count.

            with receiver.reading() as live, lora.active("math", live.tag):
                live.module(x)

        `InvalidInput` when there is none with this label. An adapter for certain weights needs `tag`, that of the
        weights it is added to, and raises `StaleBase` when they are others.
        """
        adapter = self._adapters.get(label)
        if adapter is None:
            raise InvalidInput(f"no adapter {label!r}, there are {self.labels}")
        if adapter.base_root is not None and tag is None:
            raise InvalidInput(f"the adapter {label!r} is for certain weights: active(label, live.tag)")
        if adapter.base_root is not None and tag is not None and adapter.base_root != tag.root:
            raise StaleBase(f"the adapter {label!r} was made for other weights than version {tag.version}")
        before = _active.set({**_active.get(), self: adapter})
        try:
            yield
        finally:
            _active.reset(before)


def load(folder: str | Path) -> tuple[WeightSource, dict[str, Any]]:
    """What `send_adapter` takes: the tensors and the configuration of a PEFT folder. `InvalidInput` for another."""
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}") from None
    return SafetensorsSource(folder), config


def save(folder: str | Path, source: WeightSource, config: Mapping[str, Any]) -> None:
    """Write the folder that PEFT, vLLM and `load` read. Not atomic: let nobody read it before this returns."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu() for name, tensor in source.tensors()}
    tensors.update({alias: tensors[name].clone() for alias, name in source.aliases().items()})
    save_file(tensors, Path(folder) / TENSORS, {"format": "pt"})
    (Path(folder) / CONFIG).write_text(json.dumps({"peft_type": "LORA", **config}, indent=2, sort_keys=True))


def config_of(manifest: Manifest) -> dict[str, Any]:
    """The configuration that came with an adapter. `BadManifest` where there is none."""
    try:
        found = json.loads(manifest.meta[ADAPTER_CONFIG])
    except (KeyError, TypeError, ValueError) as error:
        raise BadManifest(f"the adapter {manifest.label!r} has no configuration: {error!r}") from None
    if not isinstance(found, dict):
        raise BadManifest(f"the configuration of the adapter {manifest.label!r} is not an object")
    return found


def _is_linear(part: torch.nn.Module) -> bool:
    """Attention's output layer is a subclass whose forward, and with it hooks, are never called."""
    return isinstance(part, torch.nn.Linear) and "NonDynamically" not in type(part).__name__


def _layer(path: str, module: torch.nn.Module) -> torch.nn.Linear:
    try:
        found = module.get_submodule(path)
    except AttributeError as error:
        raise UnknownTensor(f"the model has no {path!r}: {error}") from None
    if not (isinstance(found, torch.nn.Linear) and _add in found._forward_hooks.values()):
        raise NotSupported(
            f"{path!r} is a {type(found).__name__}: adapters are for torch.nn.Linear there from the start"
        )
    return found


def _pair(path: str, layer: torch.nn.Linear, two: Mapping[str, torch.Tensor], config: LoraConfig) -> Pair:
    if len(two) != 2:
        raise Incomplete(f"the adapter has one half of {path!r}")
    a, b = (two[half].detach().clone().to(layer.weight.device) for half in "AB")
    expected = ((config.r, layer.in_features), (layer.out_features, config.r))
    found = (tuple(a.shape), tuple(b.shape))
    if found != expected or a.dtype != b.dtype or not a.is_floating_point():
        raise ShapeMismatch(f"{path!r} has halves of {found}, {a.dtype} and {b.dtype}, expected {expected}")
    return Pair(a, b, config.scale)


def _add(layer: torch.nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    """The hook. The product is computed in the adapter's dtype, as PEFT does."""
    for adapter in _active.get().values():
        pair = adapter.pairs.get(layer)
        if pair is not None:
            given = args[0] if args else kwargs["input"]
            low = torch.nn.functional.linear(given.to(pair.a.dtype), pair.a)
            output = output + (torch.nn.functional.linear(low, pair.b) * pair.scale).to(output.dtype)
    return output
