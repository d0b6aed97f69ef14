"""The task: sums of two-digit numbers, one token per character, answers checked exactly.

A prompt is always six characters, `37+45=` or `08+01=`. A response is the answer in plain decimal
followed by the end mark, `82$` or `9$`: different lengths, so responses are a ragged column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = "0123456789+=$"
END = VOCABULARY.index("$")
PROMPT_LEN = 6
MAX_RESPONSE_LEN = 4

_TOKEN = {char: token for token, char in enumerate(VOCABULARY)}
_OPERANDS = 100
_HELD_OUT = 512
_SPLIT_SEED = 20_240_229


def encode(text: str) -> Tensor:
    """The tokens of `text`, int64, shape (len(text),)."""
    return torch.tensor([_TOKEN[char] for char in text], dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """The text of a 1-d tensor of tokens."""
    return "".join(VOCABULARY[token] for token in tokens.tolist())


def solve(prompt: str) -> str:
    """The one response to `prompt` that earns a reward, end mark included."""
    return f"{int(prompt[0:2]) + int(prompt[3:5])}$"


def is_correct(prompt: Tensor, response: Tensor) -> bool:
    """Whether `response` is the exact answer: every digit, the end mark and nothing after it."""
    return decode(response) == solve(decode(prompt))


@dataclass(frozen=True, kw_only=True)
class Problems:
    """All 10 000 prompts, split once for every run: what is held out is never trained on, by either phase."""

    train: Tensor
    """(9 488, PROMPT_LEN) int64."""
    held_out: Tensor
    """(512, PROMPT_LEN) int64."""


def all_problems() -> Problems:
    """The split is the same in every process and for every seed."""
    texts = [f"{left:02}+{right:02}=" for left in range(_OPERANDS) for right in range(_OPERANDS)]
    prompts = torch.stack([encode(text) for text in texts])
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    return Problems(train=prompts[order[_HELD_OUT:]], held_out=prompts[order[:_HELD_OUT]])


def solutions(prompts: Tensor) -> Tensor:
    """The right responses to (N, PROMPT_LEN) prompts, padded with the end mark to (N, MAX_RESPONSE_LEN)."""
    answers = [encode(solve(decode(prompt)).ljust(MAX_RESPONSE_LEN, "$")) for prompt in prompts]
    return torch.stack(answers)
