"""vLLM's sources of weights as ours, told by what they have, so that no release of it is needed.

They give full tensors, which the ranks of a trainer gather together, so all ranks go through all of them in lockstep.
Each tensor is dealt to one rank, which keeps it while it is packed; the others let go of it at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from transfer_queue.errors import InvalidInput, NotSupported, UnsupportedValue
from transfer_queue.weights.version.sharded import TensorShard, is_sharded
from transfer_queue.weights.version.sources import ModuleSource, TensorMeta, WeightSource, shards_of


def vllm_source(given: Any, rank: int = 0, world: int = 1) -> WeightSource:
    """What ours take as it is, a module as a `ModuleSource`, a source of vLLM's as a `GatheredSource`.

    Of the latter it reads `metadata` (a method as in 0.32, or a property) and perhaps `held_names`, and goes through
    `iter_full()` or the source itself. `InvalidInput` for anything else, `NotSupported` for a source that only gives
    local shards (M2N): a module gives these, too.
    """
    if isinstance(given, torch.nn.Module):
        return ModuleSource(given)
    if callable(getattr(given, "specs", None)) and callable(getattr(given, "tensors", None)):
        return given
    full = getattr(given, "iter_full", None)
    if full is None and hasattr(given, "mesh"):
        raise NotSupported(f"a {type(given).__name__} gives shards whose places are not told: give the module itself")
    if not hasattr(given, "metadata") or not (callable(full) or isinstance(given, Iterable)):
        raise InvalidInput(f"a {type(given).__name__} is no source of weights: it has no metadata, or no tensors")
    return GatheredSource(given, rank, world)


class GatheredSource:
    """Full tensors, dealt to the ranks of a trainer: a `ShardSource`.

    A rank whose own source fails, or that dies, leaves the others waiting for it wherever the source has them gather:
    the time-out of their process group ends that. One that fails at what it is given goes through the rest with them.
    A source that says which names a rank holds (`held_names`) may give None for the others; then a rank keeps all that
    it holds, and who of several gives a tensor is settled when all have met.
    """

    def __init__(self, given: Any, rank: int, world: int) -> None:
        metas = given.metadata() if callable(given.metadata) else given.metadata
        self._specs = [TensorMeta(one.name, one.dtype, tuple(one.shape)) for one in metas]
        self._read: Callable[[], Iterable[tuple[str, torch.Tensor | None]]] = getattr(
            given, "iter_full", given.__iter__
        )
        held = given.held_names() if hasattr(given, "held_names") else None
        self._mine = dealt(self._specs, world)[rank] if held is None else set(held)
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
        num_left = len(self._mine)
        for name, tensor in reading:
            if name in self._mine:
                num_left -= 1
                full = _full(name, tensor)
                if not num_left:
                    yield from _through(reading)
                yield name, full


def dealt(specs: Sequence[TensorMeta], world: int) -> list[set[str]]:
    """The names of each rank, about the same bytes for all. Every rank finds the same."""
    names: list[set[str]] = [set() for _ in range(world)]
    load = [0] * world
    for nbytes, name in sorted(((_nbytes(spec), spec.name) for spec in specs), reverse=True):
        rank = load.index(min(load))
        names[rank].add(name)
        load[rank] += nbytes
    return names


def _nbytes(spec: TensorMeta) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _through(reading: Iterator[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Nothing, once all is read: the others gather with this rank."""
    for _ in reading:
        pass
    return iter(())


def _full(name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None or is_sharded(tensor):
        raise UnsupportedValue(f"the source gives no full tensor for {name!r}")
    return tensor.detach().contiguous()
