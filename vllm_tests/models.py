"""Llamas with 0.1 M parameters, made on the spot, and what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 320
PROMPT = [5, 17, 250, 3, 99]
NUM_TOKENS = 12


LARGE = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
         "num_attention_heads": 16, "num_key_value_heads": 8, "initializer_range": 0.02}  # fmt: skip


def drawn(seed: int, tied: bool = False, **sizes: Any) -> LlamaForCausalLM:
    """A model with random weights, large enough that greedy answers differ clearly."""
    torch.manual_seed(seed)
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4,
    }  # fmt: skip
    config = LlamaConfig(
        max_position_embeddings=4096, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        torch_dtype="float32", **{**small, **sizes},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def constant(token: int, into: LlamaForCausalLM) -> None:
    """Have the model (not a tied one) say this token, whatever it is asked."""
    with torch.no_grad():
        for name, weight in into.named_parameters():
            weight.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        into.lm_head.weight[token] = 1.0


def answer(model: PreTrainedModel, num_tokens: int = NUM_TOKENS, prompt: list[int] = PROMPT) -> list[int]:
    """The greedy continuation of the prompt."""
    said = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
    return said[len(prompt) :]


def save(model: PreTrainedModel, folder: Path) -> Path:
    """A folder that vLLM loads."""
    model.save_pretrained(folder, safe_serialization=True)
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2").save_pretrained(
        folder
    )
    return folder
