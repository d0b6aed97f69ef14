"""vLLM's sources of weights as ours, told by what they have, so that no release of it is needed.

GatheredSource   full tensors, which the ranks that own them gather together, in lockstep. Each is dealt to one of these
                 ranks, which keeps it while it is packed; the others let go of it at once.
PlacedSource     what a rank has of each tensor, and where in it that lies (since 0.33): nothing is gathered
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from transfer_queue.errors import InvalidInput, NotSupported, UnsupportedValue
from transfer_queue.weights.version.boxes import Box, whole
from transfer_queue.weights.version.sharded import TensorShard, boxes_held, is_sharded
from transfer_queue.weights.version.sources import ModuleSource, TensorMeta, WeightSource, shards_of


def vllm_source(given: Any, rank: int = 0, world: int = 1) -> WeightSource:
    """What ours take as it is, a module as a `ModuleSource`, a source of vLLM's as a `PlacedSource` where there are
    several ranks and it has `iter_local()`, else as a `GatheredSource`.

    Of vLLM's it reads `metadata` (a method as in 0.32, or a property) and perhaps `held_names`. `InvalidInput` for
    anything else, `NotSupported` for a source of 0.32 that only gives local shards (M2N): a module gives these, too.
    """
    if isinstance(given, torch.nn.Module):
        return ModuleSource(given)
    if callable(getattr(given, "specs", None)) and callable(getattr(given, "tensors", None)):
        return given
    full = getattr(given, "iter_full", None)
    if _gives(given, "local") and (world > 1 or not _gives(given, "full")):
        return PlacedSource(given, rank, world)
    if full is None and hasattr(given, "mesh"):
        raise NotSupported(f"a {type(given).__name__} gives shards whose places are not told: give the module itself")
    if not hasattr(given, "metadata") or not (callable(full) or isinstance(given, Iterable)):
        raise InvalidInput(f"a {type(given).__name__} is no source of weights: it has no metadata, or no tensors")
    return GatheredSource(given, rank, world)


def _gives(given: Any, mode: str) -> bool:
    """Whether a source of 0.33, which has all methods, implements this one."""
    asked = getattr(given, f"implements_iter_{mode}", None)
    return callable(asked) and bool(asked())


class GatheredSource:
    """Full tensors, dealt to the ranks of a trainer: a `ShardSource`.

    A rank whose own source fails, or that dies, leaves the others waiting for it wherever the source has them gather:
    the time-out of their process group ends that. One that fails at what it is given goes through the rest with them.
    A source that says which names a rank holds (`held_names`) may give None for the others; then a rank keeps all that
    it holds, and who of several gives a tensor is settled when all have met.
    """

    def __init__(self, given: Any, rank: int, world: int) -> None:
        metas = list(given.metadata() if callable(given.metadata) else given.metadata)
        self._specs = _specs(metas)
        self._read: Callable[[], Iterable[tuple[str, torch.Tensor | None]]] = getattr(
            given, "iter_full", given.__iter__
        )
        held = given.held_names() if hasattr(given, "held_names") else None
        self._mine = dealt(self._specs, world, _owners(metas, world))[rank] if held is None else set(held)
        unknown = sorted(self._mine - {spec.name for spec in self._specs})
        if unknown:
            raise InvalidInput(f"{unknown[0]!r} is held, and not in the metadata ({len(unknown)} such names)")
        self.is_sharded = len(self._mine) < len(self._specs)

    def specs(self) -> list[TensorMeta]:
        return list(self._specs)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._read():
            yield name, _full(name, tensor)

    def aliases(self) -> dict[str, str]:
        return {}

    def shards(self) -> list[TensorShard]:
        return shards_of(spec for spec in self._specs if spec.name in self._mine)

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of this rank. With the last one the source has been gone through, to its end."""
        reading = iter(self._read())
        return self._parts(reading) if self._mine else _through(reading)

    def _parts(self, reading: Iterator[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, _full(name, tensor)) for name, tensor in _those(self._mine, reading))


class PlacedSource:
    """What `iter_local()` gives of each tensor here, by the owners, mesh and placements in the metadata: a
    `ShardSource`. `InvalidInput` for owners that are no ranks of this trainer. Of what several ranks have one is asked.
    """

    def __init__(self, given: Any, rank: int, world: int) -> None:
        metas = list(given.metadata)
        self._given, self._specs = given, _specs(metas)
        owned = zip(metas, self._specs, _owners(metas, world), strict=True)
        places = {spec.name: _place(meta, rank, owners) for meta, spec, owners in owned if rank in owners}
        self._shards = {
            spec.name: TensorShard(*spec, box)
            for spec in self._specs
            if (box := places.get(spec.name)) is not None and box.size
        }
        there = {spec.name: whole(spec.shape) for spec in self._specs}
        self.is_sharded = there != {name: shard.box for name, shard in self._shards.items()}

    def specs(self) -> list[TensorMeta]:
        return list(self._specs)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.is_sharded:
            raise UnsupportedValue("the source gives no full tensors: they are on several ranks")
        return self.parts()

    def aliases(self) -> dict[str, str]:
        return {}

    def shards(self) -> list[TensorShard]:
        return list(self._shards.values())

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """With the last one the source has been gone through, to its end."""
        reading = iter(self._given.iter_local())
        return self._parts(reading) if self._shards else _through(reading)

    def _parts(self, reading: Iterator[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _those(self._shards, reading):
            lengths = self._shards[name].box.lengths
            if tensor is None or is_sharded(tensor) or tuple(tensor.shape) != lengths:
                found = "a DTensor" if is_sharded(tensor) else None if tensor is None else tuple(tensor.shape)
                raise UnsupportedValue(f"the source's part of {name!r} is {found}, and {lengths} by its placements")
            yield name, tensor.detach().contiguous()


def _specs(metas: Sequence[Any]) -> list[TensorMeta]:
    return [TensorMeta(one.name, one.dtype, tuple(one.shape)) for one in metas]


def _owners(metas: Sequence[Any], world: int) -> list[Sequence[int]]:
    """The ranks that have each tensor, or parts of it. `InvalidInput` for one that there is not."""
    found: list[Sequence[int]] = []
    for one in metas:
        owners = getattr(one, "owners", None)
        found.append(range(world) if owners is None else tuple(owners))
        if max(found[-1]) >= world:
            raise InvalidInput(f"{one.name!r} is owned by rank {max(found[-1])} of a trainer that has {world}")
    return found


def _place(meta: Any, rank: int, owners: Sequence[int]) -> Box | None:
    """What of a tensor its owner `rank` has. None: nothing, as there are more owners than indexes."""
    if meta.placements is None:
        return whole(meta.shape)
    from torch.distributed.tensor import Replicate, Shard

    mesh = tuple(meta.mesh_shape)
    coordinate = tuple(int(at) for at in np.unravel_index(list(owners).index(rank), mesh))
    placements = tuple(Shard(one.dim) if hasattr(one, "dim") else Replicate() for one in meta.placements)
    held = boxes_held(tuple(meta.shape), mesh, coordinate, placements)
    return held[0][0] if held else None


def dealt(specs: Sequence[TensorMeta], world: int, owners: Sequence[Sequence[int]]) -> list[set[str]]:
    """The names of each rank, of those that it owns, about the same bytes for all. Every rank finds the same."""
    names: list[set[str]] = [set() for _ in range(world)]
    load = [0] * world
    those = ((_nbytes(spec), spec.name, ranks) for spec, ranks in zip(specs, owners, strict=True))
    for nbytes, name, ranks in sorted(those, key=lambda one: one[:2], reverse=True):
        rank = min(ranks, key=lambda one: (load[one], one))
        names[rank].add(name)
        load[rank] += nbytes
    return names


def _nbytes(spec: TensorMeta) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _those(
    names: Collection[str], reading: Iterator[tuple[str, torch.Tensor | None]]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """What of it has these names. Before the last one is given all is read."""
    num_left = len(names)
    for name, tensor in reading:
        if name in names:
            num_left -= 1
            if not num_left:
                yield from _through(reading)
            yield name, tensor


def _through(reading: Iterator[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Nothing, once all is read: the others gather with this rank."""
    for _ in reading:
        pass
    return iter(())


def _full(name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None or is_sharded(tensor):
        raise UnsupportedValue(f"the source gives no full tensor for {name!r}")
    return tensor.detach().contiguous()
