"""Plain tensors as bytes."""

from __future__ import annotations

import torch


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its elements, one after the other."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a flat uint8 tensor over the same memory."""
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,):  # of an empty tensor, or one element that was expanded
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)
