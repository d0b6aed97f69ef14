"""What a trainer needs to go on where another one was killed: one small file beside the run, replaced at every step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Checkpoint:
    """The file belongs to one run: that of another is as good as none.

    A process that is killed leaves the file before or the new one, whole. It is not synced: a machine that loses power
    loses the queue as well.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id

    def save(self, step: int, policy: nn.Module, optimizer: torch.optim.Optimizer, notes: dict[str, Any]) -> None:
        """After `step` optimiser steps. `notes`: numbers and lists of numbers."""
        state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
        aside = self._path.with_suffix(".new")
        torch.save({"run_id": self._run_id, "step": step, "notes": notes, **state}, aside)
        os.replace(aside, self._path)

    def load(self, policy: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]] | None:
        """Fill in both and return (step, notes); None when this run has saved nothing yet."""
        if not self._path.exists():
            return None
        found = torch.load(self._path, weights_only=True)
        if found["run_id"] != self._run_id:
            return None
        policy.load_state_dict(found["policy"])
        optimizer.load_state_dict(found["optimizer"])
        return found["step"], found["notes"]
