"""The reward worker: one point for an answer that is exactly right."""

from __future__ import annotations

import torch

from demo.arithmetic import is_correct
from demo.port import Doing, Port
from demo.settings import Settings
from demo.stream import samples


def run(worker: str, settings: Settings) -> None:
    """Fill in `reward`, float32 (B,), of every row of every step."""
    port = Port(worker, settings)
    for rows in samples(port, settings, ["prompt", "response"]):
        with port.spending(Doing.WORK):
            pairs = zip(rows.data["prompt"].unbind(), rows.data["response"].unbind(), strict=True)
            reward = torch.tensor([float(is_correct(prompt, response)) for prompt, response in pairs])
        port.answer(rows, reward=reward)
        port.finish(len(rows))
    port.report_last()
