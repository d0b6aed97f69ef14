"""What the examples of weights share: a policy of one matrix that learns to count, and a server that samples from it.

Row i of the matrix holds the logits of the token that follows token i. The reward of a response is the share of its
tokens that are one more than the token before. Responses have a fixed length, so all columns are dense.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from transfer_queue.weights import Control, Gate, Receiver, Spans, Swap
from transfer_queue.weights.engines import registry

VOCABULARY = 16
FIELDS = ["prompt", "response", "log_probs"]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the tokens that follow."""
        logits: Tensor = self.table(tokens)
        return logits


class Sampler:
    """An inference server, without a network. `control` takes new weights, also while `sample` runs."""

    def __init__(self, engine: str, seed: int = 0) -> None:
        self.receiver = Receiver(Swap(Policy()))
        self.engine = registry.engine(engine)(self.receiver)
        self._gate = Gate()
        self.control = Control(self.engine, self.receiver, generation=self._gate)
        self._generator = torch.Generator().manual_seed(seed)
        self._numbers = itertools.count()

    @torch.inference_mode()
    def sample(self, count: int, length: int) -> tuple[TensorDict, list[dict[str, Any]]]:
        """Fields and tags of `count` rows. Between two tokens the weights may change; log-probs are as sampled."""
        prompt = torch.randint(VOCABULARY, (count,), generator=self._generator)
        tokens, log_probs, last, spans = [], [], prompt, Spans()
        with self._gate.request(f"request {next(self._numbers)}") as request:
            for _ in range(length):
                with request.step(), self.receiver.reading() as live:
                    chances = live.module(last).log_softmax(-1)
                    spans.add(live.tag)
                last = torch.multinomial(chances.exp(), 1, generator=self._generator).squeeze(1)
                tokens.append(last)
                log_probs.append(chances.gather(1, last[:, None]).squeeze(1))
        columns = {"prompt": prompt, "response": torch.stack(tokens, 1), "log_probs": torch.stack(log_probs, 1)}
        return TensorDict({name: column.clone() for name, column in columns.items()}, count), [spans.tag()] * count


def train(policy: Policy, optimizer: torch.optim.Optimizer, rows: TensorDict) -> float:
    """One step of the clipped policy gradient; the mean reward. Ratios are to the log-probs that were recorded, so rows
    that several versions made are right."""
    prompt, response, old_log_probs = (torch.stack(list(rows[name].unbind())) for name in FIELDS)
    before = torch.cat([prompt.view(-1, 1), response[:, :-1]], 1)
    reward = (response == (before + 1) % VOCABULARY).float()
    log_probs = policy(before).log_softmax(-1).gather(2, response[:, :, None]).squeeze(2)
    ratio = (log_probs - old_log_probs).exp()
    advantage = reward - reward.mean()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return float(reward.mean())
