"""Names of partitions, rows and tags that more than one kind of worker uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tags = Mapping[str, Any]

STOP = -1
"""The step of a ticket that tells a rollout worker that there are no more."""

DONE = "done"
"""The trainer's last phase."""

REFERENCE = "reference"
"""The row of `weights`: the model after the warm start, which the reference worker keeps."""

REPLICAS = "replicas"
"""Where each rollout worker tells where it takes weights."""

TRAINED = "step"
"""In the trainer's `status`: optimiser steps that will not be undone."""

METRICS = ("at", "step", "reward", "accuracy", "loss", "kl", "clipped", "lag", "grad_norm", "mixed")
"""What the row of a step in `metrics` holds, in this order, as float64; accuracy is NaN where it was not measured.

kl: per token, over all samples; lag: versions behind, of the oldest sample; mixed: samples that several versions
made."""


def train_partition(step: int) -> str:
    """Where the samples for optimiser step `step` are."""
    return f"train_{step}"
