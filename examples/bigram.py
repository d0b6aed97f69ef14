"""A policy of one matrix: row i holds the logits of the token that follows token i.

It learns to count: the reward of a response is the share of its tokens that are one more than the token before.
All functions take ragged columns as transfer_queue returns them, and work on their packed values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from demo.columns import ragged

VOCABULARY = 16
PROMPT_LEN = 4


def prompts(count: int, generator: torch.Generator) -> Tensor:
    """(count, PROMPT_LEN) tokens."""
    return torch.randint(VOCABULARY, (count, PROMPT_LEN), generator=generator)


def respond(table: Tensor, prompt: Tensor, max_len: int, generator: torch.Generator) -> Tensor:
    """A ragged column of one sampled response per row, each of 1 to `max_len` tokens."""
    chances = table.softmax(-1)
    tokens, last = [], prompt[:, -1]
    for _ in range(max_len):
        last = torch.multinomial(chances[last], 1, generator=generator).squeeze(1)
        tokens.append(last)
    return ragged(torch.stack(tokens, 1), torch.randint(1, max_len + 1, (len(prompt),), generator=generator))


def like(column: Tensor, values: Tensor) -> Tensor:
    """A ragged column of other values, shaped like `column`."""
    return torch.nested.nested_tensor_from_jagged(values, column.offsets())  # type: ignore[attr-defined]


def _before(prompt: Tensor, response: Tensor) -> Tensor:
    """The token before each token of the responses, packed."""
    before = response.values().roll(1)
    before[response.offsets()[:-1]] = prompt.values().view(-1, PROMPT_LEN)[:, -1]  # type: ignore[attr-defined]
    return before


def log_probs(table: Tensor, prompt: Tensor, response: Tensor) -> Tensor:
    """Of every token of the responses, packed; differentiable in `table`."""
    return table.log_softmax(-1)[_before(prompt, response), response.values()]


def rewards(prompt: Tensor, response: Tensor) -> Tensor:
    """(B,) in [0, 1]."""
    right = (response.values() == (_before(prompt, response) + 1) % VOCABULARY).float()
    lengths = response.offsets().diff()  # type: ignore[attr-defined]
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    share: Tensor = torch.zeros(len(lengths)).index_add_(0, row, right) / lengths
    return share
