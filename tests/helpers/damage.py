"""Numbers that damaged data may hold, and uses of it that may only fail with this package's errors."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings

from transfer_queue.errors import TransferQueueError

NUMBERS = [0, 1, -1, 2, 3, 7, 8, 63, 64, 65, 2**16, 2**31, 2**40, 2**56, 2**62, 2**63 - 1, -(2**31), -(2**63)]
FUZZ = settings(max_examples=250, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))  # fmt: skip


def attempt(work: Any) -> None:
    with contextlib.suppress(TransferQueueError):
        work()


def touch(value: Any) -> None:
    """Read every byte of what came back."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            touch(list(value.unbind()))
        elif value.numel():
            value.contiguous().reshape(-1).view(torch.uint8).sum()
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        value.tobytes()
    elif isinstance(value, dict):
        touch(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            touch(item)
