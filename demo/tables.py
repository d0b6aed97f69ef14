"""Names of partitions, rows and tags that more than one kind of worker uses."""

from __future__ import annotations

from collections.abc import Mapping

Tags = Mapping[str, int | float | str | bool | None]

STOP = -1
"""The step of a ticket that tells a rollout worker that there are no more."""

REFERENCE = "reference"
"""The row of `weights` that never changes: the model after the warm start."""

METRICS = ("at", "step", "reward", "accuracy", "loss", "kl", "clipped", "lag", "grad_norm")
"""What the row of a step in `metrics` holds, in this order, as float64; accuracy is NaN where it was not measured."""


def train_partition(step: int) -> str:
    """Where the samples for optimiser step `step` are."""
    return f"train_{step}"


def weights_key(version: int) -> str:
    """The row of `weights` with the parameters after `version` optimiser steps."""
    return f"version {version}"


def newest_version(weights: Mapping[str, Tags]) -> int:
    """The highest version among the tags of `weights`."""
    return max(int(tags["version"] or 0) for key, tags in weights.items() if key != REFERENCE)
