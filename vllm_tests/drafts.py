"""Small models with drafts of every kind that vLLM runs on CPUs, as folders of which there is one for each version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from transfer_queue.weights import SafetensorsSource, WeightSource, with_draft
from vllm_tests.families import SAID, made
from vllm_tests.models import VOCABULARY, drawn, save

Tensors = dict[str, torch.Tensor]
WIDTH = 128
ATTENTION = "CPU_MLA"  # with the one that vLLM takes on processors with AMX it cannot reload by itself, either
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "initializer_range": 0.2, "dtype": torch.float32,
}  # fmt: skip
MTP_SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "glm4_moe": {
        "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "head_dim": 32, "n_shared_experts": 1,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "qwen3_next": {
        "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
}  # fmt: skip


class Folders(NamedTuple):
    """Checkpoints of one version. `draft` None: it lies in the model's."""

    model: Path
    draft: Path | None

    def source(self, *, without_draft: bool = False) -> WeightSource:
        """`without_draft`: as a trainer has it that knows nothing of the draft."""
        if self.draft is not None:
            own = SafetensorsSource(self.model)
            return own if without_draft else with_draft(own, SafetensorsSource(self.draft))
        return Filtered(self.model, "mtp") if without_draft else SafetensorsSource(self.model)


class Filtered(SafetensorsSource):
    """Without the layers that draft (`left_out` "mtp"), or without one tensor."""

    def __init__(self, folder: Path, left_out: str) -> None:
        super().__init__(folder)
        if left_out == "mtp":
            layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
            self._left_out: tuple[str, ...] = ("mtp.", "model.mtp_layers.", f"model.layers.{layers}.")
        else:
            self._left_out = (left_out,)

    def has(self, name: str) -> bool:
        return not name.startswith(self._left_out)

    def specs(self) -> Any:
        return [one for one in super().specs() if self.has(one.name)]

    def tensors(self) -> Any:
        return ((name, one) for name, one in super().tensors() if self.has(name))


class Kind(NamedTuple):
    """`settings`: vLLM's of speculation. `make`: the checkpoints of a version, by its seed. `more`: for vLLM."""

    settings: dict[str, Any]
    make: Callable[[int, Path], Folders]
    more: Mapping[str, Any] = MappingProxyType({})


def _written(tensors: Tensors, config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: one.contiguous() for name, one in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return folder


def _inside(tensors: Tensors, config: dict[str, Any], folder: Path) -> Folders:
    """The model in `plain`, with its tokenizer, and layers that draft."""
    shutil.copytree(folder / "plain", folder / "model")
    return Folders(_written(tensors, config, folder / "model"), None)


def _llama(seed: int, folder: Path) -> Folders:
    """The draft is the model itself, so all of its tokens are accepted."""
    return Folders(save(drawn(seed), folder / "model"), save(drawn(seed), folder / "draft"))


def _eagle(seed: int, folder: Path) -> Folders:
    """The draft has embeddings of its own. Those of seed 0 are the model's, which vLLM shares with it then."""
    model, layer = drawn(seed), drawn(seed + 500, num_hidden_layers=1)
    tensors = _layer_of(layer, "layers.0", without=("input_layernorm",))
    tensors["fc.weight"] = _random(seed, WIDTH, 2 * WIDTH)
    tensors["embed_tokens.weight"] = (model if seed == 0 else layer).model.embed_tokens.weight.detach().clone()
    config = {**layer.config.to_dict(), "architectures": ["EagleLlamaForCausalLM"]}
    return Folders(save(model, folder / "model"), _written(tensors, config, folder / "draft"))


def _eagle3(seed: int, folder: Path) -> Folders:
    """The draft takes hidden states of three of the model's layers, and has a smaller vocabulary of its own."""
    model, layer, few = drawn(seed, num_hidden_layers=10), drawn(seed + 500, num_hidden_layers=1), VOCABULARY // 2
    tensors = _layer_of(layer, "midlayer")
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        tensors[name] = torch.cat([tensors[name], tensors[name]], 1)
    tensors |= {
        "midlayer.hidden_norm.weight": torch.ones(WIDTH), "norm.weight": torch.ones(WIDTH) + seed,
        "fc.weight": _random(seed, WIDTH, 3 * WIDTH), "lm_head.weight": layer.lm_head.weight[:few].detach().clone(),
        "d2t": torch.arange(few) % (seed + 2),
    }  # fmt: skip
    config = {**layer.config.to_dict(), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": few}
    return Folders(save(model, folder / "model"), _written(tensors, config, folder / "draft"))


def _medusa(seed: int, folder: Path) -> Folders:
    tensors = {}
    for head in range(2):
        tensors[f"blocks.{head}.layers.0.weight"] = _random(seed + head, WIDTH, WIDTH)
        tensors[f"lm_heads.{head}.weight"] = _random(seed + 7 + head, VOCABULARY, WIDTH)
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": WIDTH, "vocab_size": VOCABULARY,
        "truncated_vocab_size": VOCABULARY, "num_heads": 2, "num_hidden_layers": 1, "max_seq_len": 4096,
        "torch_dtype": "float32",
    }  # fmt: skip
    return Folders(save(drawn(seed), folder / "model"), _written(tensors, config, folder / "draft"))


def _mimo(seed: int, folder: Path) -> Folders:
    """A Qwen 2 with a layer that drafts, which MiMo calls `mtp_layers.0`."""
    tensors, extra, config, at = _with_one_more("qwen2", seed, folder)
    own = {name.replace(at, "model.mtp_layers.0."): one for name, one in extra.items()}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        own[f"model.mtp_layers.0.{name}.weight"] = torch.ones(WIDTH) + seed
    own["model.mtp_layers.0.input_proj.weight"] = _random(seed, WIDTH, 2 * WIDTH)
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _inside({**tensors, **own}, config, folder)


def _next_layer(family: str) -> Callable[[int, Path], Folders]:
    """The layer after the last one drafts, as with DeepSeek V3: it repeats the embeddings and the head."""

    def make(seed: int, folder: Path) -> Folders:
        tensors, own, config, at = _with_one_more(family, seed, folder)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            own[f"{at}{name}.weight"] = torch.ones(WIDTH) + seed
        own[f"{at}eh_proj.weight"] = _random(seed, WIDTH, 2 * WIDTH)
        own[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        own[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        config |= {"num_nextn_predict_layers": 1, **SAID.get(family, {})}
        return _inside({**tensors, **own}, config, folder)

    return make


def _qwen3_next(seed: int, folder: Path) -> Folders:
    """A layer with attention under names of its own; vLLM's build for CPUs does not run this one."""
    sizes = {**SMALL, **MTP_SIZES["qwen3_next"]}
    save(made("qwen3_next", seed, **sizes), folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    config = json.loads((folder / "plain" / "config.json").read_text())
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    own = {name.replace(last, "mtp.layers.0."): one.clone() for name, one in tensors.items() if name.startswith(last)}
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        own[f"mtp.{name}.weight"] = torch.ones(WIDTH)
    own["mtp.fc.weight"] = _random(seed, WIDTH, 2 * WIDTH)
    return _inside({**tensors, **own}, {**config, "num_nextn_predict_layers": 1}, folder)


def _with_one_more(family: str, seed: int, folder: Path) -> tuple[Tensors, Tensors, dict[str, Any], str]:
    """A model's tensors, those of the layer after its last one, its configuration, and how that layer is called."""
    sizes = {**SMALL, **MTP_SIZES[family]}
    save(made(family, seed, **sizes), folder / "plain")
    config = json.loads((folder / "plain" / "config.json").read_text())
    at = f"model.layers.{config['num_hidden_layers']}."
    save(made(family, seed + 500, **{**sizes, "num_hidden_layers": config["num_hidden_layers"] + 1}), folder / "more")
    more = load_file(folder / "more" / "model.safetensors")
    extra = {name: one for name, one in more.items() if name.startswith(at)}
    return load_file(folder / "plain" / "model.safetensors"), extra, config, at


def _layer_of(model: Any, called: str, without: tuple[str, ...] = ()) -> Tensors:
    found = {}
    for name, one in model.model.layers[0].state_dict().items():
        if not name.startswith(without):
            found[f"{called}.{name}"] = one.clone()
    return found


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


KINDS = {
    "draft_model": Kind({"method": "draft_model", "num_speculative_tokens": 3}, _llama),
    "eagle": Kind({"method": "eagle", "num_speculative_tokens": 2}, _eagle),
    "eagle3": Kind({"method": "eagle3", "num_speculative_tokens": 2}, _eagle3),
    "medusa": Kind({"method": "medusa", "num_speculative_tokens": 2}, _medusa),
    "mimo": Kind({"method": "mtp", "num_speculative_tokens": 1}, _mimo),
    "glm4_moe": Kind({"method": "mtp", "num_speculative_tokens": 1}, _next_layer("glm4_moe")),
    "deepseek_v3": Kind(
        {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": ATTENTION},
        _next_layer("deepseek_v3"),
        {"attention_backend": ATTENTION},
    ),
}
REHEARSED = {**KINDS, "qwen3_next": Kind({"method": "mtp", "num_speculative_tokens": 1}, _qwen3_next)}
