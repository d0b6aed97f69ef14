"""What a difference leads to: every changed tensor, from what is live and what has come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.errors import StaleBase
from transfer_queue.weights.receive.lazy import Supplied
from transfer_queue.weights.receive.targets import Staged, Target
from transfer_queue.weights.version import delta
from transfer_queue.weights.version.boxes import Box, strides_of, whole, within
from transfer_queue.weights.version.delta import Indices, Patch
from transfer_queue.weights.version.manifest import BucketPart, Manifest, TensorSpec
from transfer_queue.weights.version.pieces import Pieces
from transfer_queue.weights.version.tensor_memory import room
from transfer_queue.weights.version.threads import helpers_for


class ChangedPart(NamedTuple):
    """A box of a changed tensor: what has come for it (None: it is as it was)."""

    box: Box
    came: torch.Tensor | None
    result: str | None  # the digest, where what came is a difference


class Results:
    """Of a version of kind delta, for a target whose live tensors it applies to.

    A target that has not all of the model has no use for what it lacks. `StaleBase` when a result is not the described
    one: the live weights were changed by somebody else.
    """

    def __init__(self, manifest: Manifest, came: Iterable[tuple[BucketPart, torch.Tensor]], target: Target) -> None:
        self._target = target
        self._bases = target.bases() if manifest.parts.needs_base else {}
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._parts: defaultdict[str, list[ChangedPart]] = defaultdict(list)
        for part, view in came:
            self._parts[part.name].append(ChangedPart(part.box, view, part.result))
        for spec, box in manifest.parts.unchanged():
            self._parts[spec.name].append(ChangedPart(box, None, None))

    def tensors(self) -> dict[str, Staged | Pieces]:
        """By name; those that the target lacks are left out."""
        with helpers_for(sum(spec.nbytes for spec in self._specs.values()), "tq-stage") as helpers:
            values = helpers.map(lambda one: self._result(self._specs[one[0]], one[1]), self._parts.items())
            return {name: value for name, value in zip(self._parts, values, strict=True) if value is not None}

    def _result(self, spec: TensorSpec, parts: list[ChangedPart]) -> Staged | Pieces | None:
        held = self._bases.get(spec.name)
        if len(parts) == 1 and parts[0].box == whole(spec.shape):
            (_, came, result) = parts[0]
            assert came is not None
            if result is None:
                return came.clone()  # a small tensor would keep its bucket in memory
            return None if held is None else self._patched(spec, held, came, result)
        if self._target.takes_pieces:
            return _pieces(spec, parts, held)
        if all(part.came is not None and part.result is None for part in parts):
            return Pieces(
                torch_dtype(spec.dtype), spec.shape, [(box, came) for box, came, _ in parts if came is not None]
            ).whole()
        if held is None:
            return None
        live = _tensor_of(held)
        if self._is_in_place(live) and all(part.came is None or part.result for part in parts):
            return _joined(spec, [_patch(spec, live, part) for part in parts if part.came is not None])
        return _put_together(spec, live, parts)

    def _is_in_place(self, live: torch.Tensor) -> bool:
        """Whether the target changes these very bytes."""
        return self._target.takes_patches and live.is_contiguous()

    def _patched(self, spec: TensorSpec, held: Supplied, came: torch.Tensor, result: str) -> Staged:
        live = _tensor_of(held)
        base = live.contiguous()
        into = None if self._is_in_place(live) else room(base.nbytes).view(base.dtype).reshape(base.shape)
        patch = _checked(spec, base, came, result, into)
        return patch if into is None else into


def _tensor_of(held: Supplied) -> torch.Tensor:
    return (held.whole() if isinstance(held, Pieces) else held).detach()


def _pieces(spec: TensorSpec, parts: list[ChangedPart], held: Supplied | None) -> Pieces | None:
    """The boxes that the target has, or is given, as they are now."""
    dtype = torch_dtype(spec.dtype)
    found = Pieces(dtype, spec.shape, [])
    for box, came, result in parts:
        base = None if came is not None and result is None else _box_of(held, box)
        if base is not None and came is not None and result is not None:
            base = base.contiguous()
            place = room(base.nbytes).view(dtype).reshape(box.lengths)
            _checked(spec, base, came, result, place)
            found.parts.append((box, place))
        elif base is not None:
            found.parts.append((box, base))
        elif came is not None and result is None:
            found.parts.append((box, came.clone()))
    return found if found.parts else None


def _box_of(held: Supplied | None, box: Box) -> torch.Tensor | None:
    """What the target has of a box, if it has all of it."""
    if not isinstance(held, Pieces):
        return None if held is None else held.detach()[within(box, whole(tuple(held.shape)))]
    try:
        return held.of(box)
    except LookupError:
        return None


def _put_together(spec: TensorSpec, live: torch.Tensor, parts: list[ChangedPart]) -> torch.Tensor:
    """A new tensor with what came in its boxes."""
    made = room(live.nbytes).view(live.dtype).reshape(live.shape).copy_(live)
    for box, came, result in parts:
        place = made[within(box, whole(spec.shape))]
        if came is not None and result is not None:
            base = place.contiguous()  # where it lies, or a copy
            _checked(spec, base, came, result, base)
            place.copy_(base)
        elif came is not None:
            place.copy_(came)
    return made


def _patch(spec: TensorSpec, live: torch.Tensor, part: ChangedPart) -> Patch:
    """What changes in the whole tensor, given the difference of a box."""
    assert part.came is not None
    assert part.result is not None
    base = live[within(part.box, whole(spec.shape))].contiguous()
    found = _checked(spec, base, part.came, part.result)
    return Patch(_in_whole(found.indices, part.box, spec.shape, max(1, live.element_size() // 8)), found.values)


def _in_whole(indices: Indices, box: Box, shape: tuple[int, ...], per_element: int) -> Indices:
    """Where elements of a box lie in the tensor. Those of 16 bytes have two indices each."""
    element, half = np.divmod(indices, per_element) if per_element > 1 else (indices, 0)
    found = np.zeros(len(indices), np.int64)
    for start, length, stride in zip(box.start[::-1], box.lengths[::-1], strides_of(shape)[::-1], strict=True):
        element, at = np.divmod(element, length)
        found += (at + start) * stride
    return found * per_element + half


def _joined(spec: TensorSpec, patches: list[Patch]) -> Patch:
    """One for all of these, by ascending indices."""
    indices = np.concatenate([patch.indices for patch in patches])
    order = np.argsort(indices, kind="stable")
    return Patch(indices[order], np.concatenate([patch.values for patch in patches])[order])


def _checked(
    spec: TensorSpec, base: torch.Tensor, came: torch.Tensor, result: str, into: torch.Tensor | None = None
) -> Patch:
    """The patch that came for `base`. What it leads to is written to `into`, and is what `result` says."""
    patch = delta.read(came, base)
    if patch.result(base, into) != result:
        raise StaleBase(f"{spec.name!r} is not what it was when its version was installed: send a full version")
    return patch
