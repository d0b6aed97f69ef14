"""Supervised warm start, and the held-out accuracy that both phases are judged by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from demo.arithmetic import END, Problems, is_correct, solutions
from demo.model import Policy, generate, response_log_probs
from demo.settings import Settings

_CHECK_EVERY = 5


def accuracy(policy: Policy, prompts: Tensor) -> float:
    """Share of `prompts` whose likeliest response is exactly right."""
    found = generate(policy, policy.shape, prompts, temperature=0.0)
    rows = zip(prompts, found.tokens, found.lengths.tolist(), strict=True)
    return sum(is_correct(prompt, tokens[:length]) for prompt, tokens, length in rows) / len(prompts)


def warm_start(policy: Policy, problems: Problems, settings: Settings, on_check: Callable[[int, float], None]) -> None:
    """Train `policy` on right answers until it solves `warm_until` of a probe of its own training problems.

    `on_check(updates, probe accuracy)` is called every few updates. Stops after `warm_max_updates` in any case.
    """
    answers = solutions(problems.train)
    counted = ((answers == END).cumsum(1) <= 1).float()
    probe = problems.train[:512]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.warm_learning_rate, betas=(0.9, 0.99))
    for update in range(1, settings.warm_max_updates + 1):
        rows = torch.randint(len(answers), (settings.warm_batch,))
        log_probs = response_log_probs(policy, problems.train[rows], answers[rows])
        optimizer.zero_grad()
        loss = -(log_probs * counted[rows]).sum() / counted[rows].sum()
        torch.autograd.backward(loss)
        optimizer.step()
        if update % _CHECK_EVERY == 0:
            solved = accuracy(policy, probe)
            on_check(update, solved)
            if solved >= settings.warm_until:
                return
