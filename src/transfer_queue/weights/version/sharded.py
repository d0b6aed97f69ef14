"""Which boxes of a sharded tensor (torch's DTensor) this rank holds, found without asking anybody.

FSDP2, HSDP and tensor parallelism leave a rank with a local tensor and placements on a mesh. Per dimension the indexes
are dealt out as the placements say, from left to right; the runs of what this rank is dealt are its boxes. That also
holds for uneven shards and for dimensions that two axes of a mesh split (`_StridedShard`), which can be several boxes.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any, NamedTuple

import torch

from transfer_queue.errors import UnsupportedValue
from transfer_queue.weights.version.boxes import Box, whole


class TensorShard(NamedTuple):
    """A box of a tensor of `shape` that a rank holds."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box


class Held(NamedTuple):
    """A shard, and where it is in the local tensor."""

    shard: TensorShard
    local: tuple[slice, ...]


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor. Imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """What a DTensor has here: without padding, and without a part in the graph of autograd."""
    local: torch.Tensor = tensor._local_tensor.detach()
    return local


def held_of(name: str, tensor: torch.Tensor) -> list[Held]:
    """What this rank holds of a tensor: of a plain one all of it, of a DTensor its boxes, none where its part is empty.
    A DTensor without elements is all of it at each rank.

    `UnsupportedValue` where ranks hold summands (`Partial`).
    """
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return [Held(TensorShard(name, tensor.dtype, shape, whole(shape)), tuple(slice(0, n) for n in shape))]
    given: Any = tensor
    mesh = given.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    try:
        boxes = boxes_held(shape, tuple(mesh.shape), tuple(coordinate), tuple(given.placements))
    except UnsupportedValue as error:
        raise UnsupportedValue(f"{name!r}: {error}") from None
    if 0 in shape:
        boxes = [(whole(shape), tuple(slice(0, n) for n in shape))]
    return [Held(TensorShard(name, tensor.dtype, shape, box), local) for box, local in boxes]


@functools.lru_cache(1 << 12)
def boxes_held(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes of the rank at `coordinate`, each with its place in the local tensor. Cached: a model has few kinds."""
    indexes = [torch.arange(n) for n in shape]
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise UnsupportedValue(f"ranks hold summands of it ({placement}), not parts: redistribute it first")
        dim = placement.dim
        lying = indexes[dim].view([1] * dim + [-1])
        parts, _ = placement._split_tensor(lying, mesh_shape[axis], with_padding=False, contiguous=True)
        indexes[dim] = parts[coordinate[axis]].flatten()
    found = []
    for runs in itertools.product(*(_runs(index) for index in indexes)):
        box = Box(tuple(start for start, _, _ in runs), tuple(n for _, n, _ in runs))
        found.append((box, tuple(slice(at, at + n) for _, n, at in runs)))
    return found


def _runs(index: torch.Tensor) -> list[tuple[int, int, int]]:
    """(first index, how many, where they are) of each run of consecutive indexes."""
    if not len(index):
        return []
    ends = (torch.nonzero(index.diff() != 1).flatten() + 1).tolist()
    starts = [0, *ends]
    return [(int(index[a]), b - a, a) for a, b in zip(starts, [*ends, len(index)], strict=True)]
