"""Whether a version fits a model, and its tensors in the model's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.errors import Incomplete, NotSupported, ShapeMismatch, UnknownTensor
from transfer_queue.weights.version.manifest import Contents
from transfer_queue.weights.version.sources import LAZY, ties


def check_fits(contents: Contents, slots: Mapping[str, torch.Tensor], strict: bool, cast: bool) -> None:
    """Raise unless it does: `UnknownTensor`, `ShapeMismatch` (also of ties), `NotSupported` (a model on meta, or a lazy
    one), and, if `strict`, `Incomplete`. `cast`: floating dtypes may differ."""
    expect_shaped(slots)
    same = ties(slots)
    _check_known(contents, slots, cast)
    held: dict[str, tuple[str, str]] = {}
    for name, entry in contents.items():
        first, digest = held.setdefault(same.get(name, name), (name, entry.digest))
        if digest != entry.digest:
            raise ShapeMismatch(
                f"{first!r} and {name!r} differ, and the model has one tensor for both: tie them at the trainer, "
                "untie them here, or do not send one of them"
            )
    missing = {same.get(name, name) for name in slots} - set(held)
    if strict and missing:
        raise Incomplete(f"the version lacks {len(missing)} tensors of the model, such as {min(missing)!r}")


def expect_shaped(slots: Mapping[str, torch.Tensor]) -> None:
    """`NotSupported` for a lazy module that nobody has called yet."""
    name = next((name for name, slot in slots.items() if is_lazy(slot)), None)
    if name is not None:
        raise NotSupported(f"{name!r} {LAZY}")


def once(staged: Mapping[str, Any], same: Mapping[str, str]) -> dict[str, Any]:
    """The staged tensors under the first name that the model has for each."""
    return {same.get(name, name): tensor for name, tensor in staged.items()}


def alike(live: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, which is on the device of `live`, in its dtype and with its strides."""
    moved = new.to(live.dtype)
    if moved.stride() == live.stride():
        return moved
    return torch.empty_like(live.detach()).copy_(moved)


def kinds(slots: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (slot.dtype, slot.shape) for name, slot in slots.items()}


def _check_known(contents: Contents, slots: Mapping[str, torch.Tensor], cast: bool) -> None:
    for name, entry in contents.items():
        if name not in slots:
            raise UnknownTensor(f"the model has no {name!r}")
        live = slots[name]
        if live.is_meta:
            raise NotSupported(f"{name!r} has no memory in this model, it is on meta: to_empty(device=..) first")
        fits = entry.dtype == dtype_name(live.dtype)
        if not fits and cast:
            fits = live.is_floating_point() and torch_dtype(entry.dtype).is_floating_point
        if not fits or entry.shape != tuple(live.shape):
            raise ShapeMismatch(
                f"{name!r} is {entry.dtype} {list(entry.shape)}, the model's is {live.dtype} {list(live.shape)}"
            )
