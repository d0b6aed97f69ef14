"""Rows that are wanted on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from transfer_queue.codec.nested import over
from transfer_queue.memory import uploads
from transfer_queue.memory.copy import Mover
from transfer_queue.memory.uploads import Upload, upload


def on_device(found: TensorDict, device: torch.device, mover: Mover) -> TensorDict:
    """`found` there. Nobody reads the memory of `found` any more when this returns."""
    if device.type == "cuda":
        large = {name: flat for name, value in found.items() if (flat := _values(value)) is not None}
        places = {name: torch.empty_like(flat, device=device) for name, flat in large.items()}
        upload([Upload(places[name], flat) for name, flat in large.items()], mover)
        for name, place in places.items():
            value = found.get(name)
            found.set(name, over(value, place) if value.is_nested else place)
    return found.to(device)


def _values(value: object) -> torch.Tensor | None:
    """The memory of a field, where it is one contiguous tensor that is worth an upload of its own."""
    if not isinstance(value, torch.Tensor):
        return None
    flat: Any = value
    if value.is_nested:
        if value.layout != torch.jagged or flat._lengths is not None:
            return None
        flat = flat._values
    is_large = flat.nbytes >= uploads.SMALL_NBYTES
    return flat if is_large and uploads.is_plain(flat) else None
