"""The policy: a small decoder-only transformer, and batched generation with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.arithmetic import END, MAX_RESPONSE_LEN, PROMPT_LEN, VOCABULARY


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the transformer."""

    width: int = 64
    num_layers: int = 3
    num_heads: int = 4
    max_len: int = PROMPT_LEN + MAX_RESPONSE_LEN


class Cache:
    """Keys and values of the tokens seen so far, one pair of (B, heads, max_len, head width) buffers per layer."""

    def __init__(self, shape: Shape, batch_size: int) -> None:
        size = (shape.num_layers, 2, batch_size, shape.num_heads, shape.max_len, shape.width // shape.num_heads)
        self._buffer = torch.empty(size)
        self.length = 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the newest keys and values of `layer`; return those of every token so far."""
        end = self.length + key.shape[2]
        self._buffer[layer, 0, :, :, self.length : end] = key
        self._buffer[layer, 1, :, :, self.length : end] = value
        return self._buffer[layer, 0, :, :, :end], self._buffer[layer, 1, :, :, :end]


Forward: TypeAlias = Callable[[Tensor, Cache], Tensor]


class Block(nn.Module):
    """Pre-norm attention and feed-forward, both residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor, layer: int, cache: Cache | None) -> Tensor:
        """x: (B, T, width). With a cache, T is either the whole prompt (cache empty) or 1."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        # A single new token may look at everything before it, so only whole sequences need the causal mask.
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Policy(nn.Module):
    """Next-token logits over VOCABULARY."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(len(VOCABULARY), shape.width)
        self.position = nn.Embedding(shape.max_len, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, len(VOCABULARY), bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """(B, T) tokens -> (B, T, vocabulary) logits; with a cache, the tokens follow those already in it."""
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + tokens.shape[1])
        x = self.token(tokens) + self.position(positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Responses padded with the end mark to MAX_RESPONSE_LEN; only the first `lengths[i]` tokens of row i count."""

    tokens: Tensor
    """(B, MAX_RESPONSE_LEN) int64."""
    log_probs: Tensor
    """(B, MAX_RESPONSE_LEN) float32, of each sampled token under the policy at temperature 1."""
    lengths: Tensor
    """(B,) int64, end mark included."""


@torch.inference_mode()
def generate(
    forward: Forward, shape: Shape, prompts: Tensor, temperature: float, generator: torch.Generator | None = None
) -> Generation:
    """Sample one response to each of (B, PROMPT_LEN) prompts; temperature 0 takes the likeliest token.

    `forward` is a policy of this shape, or something that calls one: once for each token.
    """
    cache = Cache(shape, len(prompts))
    logits = forward(prompts, cache)[:, -1]
    done = torch.zeros(len(prompts), dtype=torch.bool)
    lengths = torch.zeros(len(prompts), dtype=torch.int64)
    tokens, log_probs = [], []
    for position in range(MAX_RESPONSE_LEN):
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(1)
        else:
            token = logits.argmax(-1)
        token = token.masked_fill(done, END)
        lengths += ~done
        done = done | (token == END)
        tokens.append(token)
        log_probs.append(logits.log_softmax(-1).gather(1, token[:, None]).squeeze(1))
        if position + 1 < MAX_RESPONSE_LEN:
            logits = forward(token[:, None], cache)[:, -1]
    return Generation(tokens=torch.stack(tokens, 1), log_probs=torch.stack(log_probs, 1), lengths=lengths)


def token_log_probs(policy: Policy, prompts: Tensor, responses: Tensor) -> Tensor:
    """(B, R, vocabulary) log-probabilities of every token in place of each of padded `responses`, given the prompt and
    the tokens before it."""
    logits: Tensor = policy(torch.cat([prompts, responses[:, :-1]], dim=1))[:, prompts.shape[1] - 1 :]
    return logits.log_softmax(-1)


def chosen(log_probs: Tensor, responses: Tensor) -> Tensor:
    """(B, R): of (B, R, vocabulary) `log_probs`, those of the tokens of `responses`."""
    return log_probs.gather(2, responses[:, :, None]).squeeze(2)


def response_log_probs(policy: Policy, prompts: Tensor, responses: Tensor) -> Tensor:
    """(B, R) log-probabilities of padded `responses`, each token given the prompt and the tokens before it."""
    return chosen(token_log_probs(policy, prompts, responses), responses)


def num_parameters(policy: nn.Module) -> int:
    """How many numbers `flatten` yields."""
    return sum(parameter.numel() for parameter in policy.parameters())


def flatten(policy: nn.Module) -> Tensor:
    """A copy of all parameters as one (num_parameters,) float32 vector: what travels as a weights row."""
    return nn.utils.parameters_to_vector(policy.parameters()).detach().clone()


def unflatten(policy: nn.Module, vector: Tensor) -> None:
    """Load what `flatten` of a policy of the same shape gave."""
    with torch.no_grad():
        nn.utils.vector_to_parameters(vector, policy.parameters())
