"""A small rollout batch as frameworks make it, and its schema."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from transfer_queue.bridge import Numbers, Objects, Ragged, RolloutSchema

N = 10
SCHEMA = RolloutSchema({
    "tokens": Ragged(dtype="int64", stored="int32"),
    "loss_masks": Ragged(dtype="int32", stored="uint8"),
    "log_probs": Ragged(dtype="float32"),
    "experts": Ragged(dtype="int32", shape=(2, 3), stored="uint8", optional=True),
    "rewards": Numbers(),
    "done": Numbers(dtype="bool", optional=True),
    "images": Objects(optional=True),
    "values": Ragged(dtype="float32", optional=True),
})  # fmt: skip


def rollout(n: int = N) -> dict[str, Any]:
    """A batch as frameworks make it: lists of ints and floats, arrays, dicts with tensors, None."""
    rng = np.random.default_rng(0)
    return {
        "tokens": [rng.integers(0, 150_000, row + 1).tolist() for row in range(n)],
        "loss_masks": [[1] * (row + 1) for row in range(n)],
        "log_probs": [rng.standard_normal(row + 1).astype(np.float32).tolist() for row in range(n)],
        "experts": [rng.integers(0, 128, (row, 2, 3), np.int32) for row in range(n)],
        "rewards": [float(row) for row in range(n)],
        "done": [row % 2 == 0 for row in range(n)],
        "images": [None if row % 3 == 1 else {"pixels": torch.full((4, 3), float(row))} for row in range(n)],
    }
