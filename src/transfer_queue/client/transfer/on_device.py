"""Rows that are wanted on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from transfer_queue.codec.nested import Offsets, jagged
from transfer_queue.errors import InvalidInput
from transfer_queue.memory.copy import Mover
from transfer_queue.memory.handles import device_called
from transfer_queue.memory.tensors import is_plain
from transfer_queue.memory.uploads import Upload, upload


def device_here(name: torch.device | str) -> torch.device:
    """As `device_called`. `InvalidInput` also for a device that this process does not have."""
    device = device_called(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter of a torch that was built without such devices
        raise InvalidInput(f"device {name!r}: {error}") from None
    return device


def on_device(found: TensorDict, device: torch.device, mover: Mover) -> TensorDict:
    """`found` there. When this returns, nobody reads the memory of what went to a GPU.

    Tensors are uploaded together. Jagged ones that have their offsets in common have them in common there.
    """
    if device.type != "cuda":
        return found.to(device)
    fields: dict[str, Any] = dict(found.items())
    uploaded: list[Upload] = []
    offsets: dict[int, Offsets] = {}

    def moved(values: torch.Tensor) -> torch.Tensor:
        if not is_plain(values):
            return values.to(device)
        uploaded.append(Upload(torch.empty_like(values, device=device), values))
        return uploaded[-1].into

    for name, value in fields.items():
        rows: Any = value
        if not isinstance(value, torch.Tensor):
            fields[name] = value.to(device) if hasattr(value, "to") else value
        elif not value.is_nested:
            fields[name] = moved(value)
        elif value.layout == torch.jagged and rows._lengths is None:
            if id(rows._offsets) not in offsets:
                offsets[id(rows._offsets)] = Offsets.elsewhere(rows, device)
            fields[name] = jagged(moved(rows._values), offsets[id(rows._offsets)], rows._ragged_idx)
        else:
            fields[name] = value.to(device)
    upload(uploaded, mover)
    return TensorDict._new_unsafe(fields, batch_size=found.batch_size, device=device)
