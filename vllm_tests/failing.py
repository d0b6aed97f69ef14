"""Loaders that fail in the middle, in workers of whichever server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def fail(model: Any, num_times: int) -> None:
    """The next loads of this model fail after half of the tensors."""
    whole = type(model).load_weights
    left = [num_times]

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        found = list(weights)
        if not left[0]:
            return whole(model, iter(found))
        left[0] -= 1
        whole(model, iter(found[: len(found) // 2]))
        raise RuntimeError("the loader fails, as the test wanted")

    model.load_weights = load_weights
