"""Small models of many architectures, made on the spot, and what their checkpoints have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from transfer_queue.codec.dtypes import dtype_name
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.version.sources import SafetensorsSource

BLOCK = 128  # rows and columns of fp8 blocks, each with a scale of its own
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
SIZES = {
    "vocab_size": 1001, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OWN_SIZES: dict[str, dict[str, int]] = {
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 256},
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32},
    "deepseek_v3": {
        "num_key_value_heads": 8, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
}  # fmt: skip
BLOCK_SIZES = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "head_dim": BLOCK}
SAID = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}  # in the configurations of the originals


def made(family: str, seed: int = 0, **sizes: Any) -> Any:
    """A model with random weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **OWN_SIZES.get(family, {}), **sizes})
    return AutoModelForCausalLM.from_config(config, dtype=sizes.get("dtype", torch.bfloat16)).eval()


def checkpoint(family: str, folder: Path, *, fp8: bool = False) -> Metas:
    """Write one to a folder; the tensors that it has, by the names that vLLM's loader knows. With `fp8` just what it
    would have: weights of layers in blocks, and their scales."""
    model = made(family, **(BLOCK_SIZES if fp8 else {}))
    routers = [name for name, _ in model.named_modules() if name.endswith("mlp.gate")]
    said = {"quantization_config": {**FP8, "modules_to_not_convert": routers}} if fp8 else {}
    for name, value in {**SAID.get(family, {}), **said}.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    found = dict(metas_of(folder))
    for name in [one for one in found if fp8 and one.endswith("_proj.weight")]:
        rows, columns = found[name][1]
        found[name] = ("float8_e4m3fn", (rows, columns))
        found[f"{name}_scale_inv"] = ("float32", (-(-rows // BLOCK), -(-columns // BLOCK)))
    return found


def metas_of(folder: Path) -> Metas:
    return {one.name: (dtype_name(one.dtype), one.shape) for one in SafetensorsSource(folder).specs()}
