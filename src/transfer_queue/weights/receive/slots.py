"""What a module has at its places once a version is committed, whatever forward passes put there since it was verified.

A version is prepared for the tensors that the module has then. A forward pass that assigns a buffer puts another one in
the place, which may be another weight, a view of one, or memory that nobody can write. So a commit never writes into
what it finds there: in the pause each place gets back the tensor that the version was prepared for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from transfer_queue.errors import CommitFailed

Place = tuple[dict[str, Any], str]
Entry = tuple[dict[str, Any], str, torch.Tensor]


def places_of(module: torch.nn.Module) -> dict[int, list[Place]]:
    """Where modules have each parameter and buffer, by its id."""
    found: dict[int, list[Place]] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            if isinstance(held, dict):
                for name, tensor in held.items():
                    found.setdefault(id(tensor), []).append((held, name))
    return found


class Slots:
    """Which tensor belongs at which places. In the pause: `look`, then `put_back`, or `undo` when the commit failed."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._others: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []  # what is there, and belongs

    def add(self, places: Iterable[Place], tensor: torch.Tensor) -> None:
        self._entries += [(held, name, tensor) for held, name in places]

    def look(self) -> None:
        """`CommitFailed` when a place has a tensor of another kind: then the module is not what the version fits."""
        self._others = []
        for held, name, tensor in self._entries:
            now = held.get(name)
            if now is not tensor:
                if now is None or (now.dtype, now.shape, now.device) != (tensor.dtype, tensor.shape, tensor.device):
                    raise CommitFailed(f"the module has another {name!r} than when the update was verified")
                self._others.append((held, name, now, tensor))

    def put_back(self) -> None:
        for held, name, _, tensor in self._others:
            held[name] = tensor

    def undo(self) -> None:
        for held, name, now, _ in self._others:
            held[name] = now


def writable(tensor: torch.Tensor) -> bool:
    """Whether each element has memory of its own: not what `expand` gives, nor windows that lie over each other."""
    reach = 0  # how far the dimensions with smaller strides go
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return not tensor.numel()
            reach += (size - 1) * stride
    return True


def within_parameters(slots: Mapping[str, torch.Tensor], same: Mapping[str, str]) -> set[int]:
    """The ids of buffers that lie in the memory of parameters, as one that a forward pass has assigned may: who writes
    such a buffer writes the parameter. Not of those that are the same tensor (`same`: `ties`)."""
    own = {same.get(name, name) for name, one in slots.items() if isinstance(one, torch.nn.Parameter)}
    buffers = [one for name, one in slots.items() if same.get(name, name) not in own and one.numel()]
    if not buffers:
        return set()
    lying: dict[int, list[tuple[int, int]]] = {}
    for name in own:
        lying.setdefault(slots[name].untyped_storage().data_ptr(), []).append(_extent(slots[name]))
    found = set()
    for one in buffers:
        first, end = _extent(one)
        if any(first < other and at < end for at, other in lying.get(one.untyped_storage().data_ptr(), ())):
            found.add(id(one))
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """From which address to which it lies."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def replacement(tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, as what a module can have instead of a parameter or buffer that cannot be given these values."""
    if not isinstance(tensor, torch.nn.Parameter):
        return new
    made = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made
