"""The reward worker: one point for an answer that is exactly right."""

from __future__ import annotations

import torch

from demo.arithmetic import is_correct
from demo.port import Doing, Port
from demo.settings import Settings
from demo.tables import train_partition


def run(worker: str, settings: Settings) -> None:
    """Fill in `reward`, float32 (B,), of every row of every step."""
    port = Port(worker, settings)
    for step in range(settings.steps):
        for _ in range(0, settings.rows_per_step, settings.rows_per_read):
            rows = port.take(train_partition(step), ["prompt", "response"], settings.rows_per_read)
            with port.spending(Doing.WORK):
                pairs = zip(rows.data["prompt"].unbind(), rows.data["response"].unbind(), strict=True)
                reward = torch.tensor([float(is_correct(prompt, response)) for prompt, response in pairs])
            port.fill(rows, reward=reward)
            port.finish(len(rows))
    port.report()
