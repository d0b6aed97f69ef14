"""Tensors into buckets and back: where each one lies, and the copying, which overlaps with what moves the buckets."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.codec.layout import ALIGN
from transfer_queue.errors import InvalidInput, ShapeMismatch
from transfer_queue.weights.digest import ALGO, byte_view, copy_and_digest, digest_of, digest_tensor
from transfer_queue.weights.manifest import Entry, Kind, Manifest, TensorSpec, expand, root_of
from transfer_queue.weights.sources import TensorMeta, WeightSource

BUCKET_NBYTES = 256 << 20
NUM_THREADS = min(4, os.cpu_count() or 1)


class Placement(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    bucket: int
    offset: int


class Plan(NamedTuple):
    """Where each tensor of a source lies, in its order, and the bytes of each bucket."""

    placements: tuple[Placement, ...]
    buckets: tuple[int, ...]


class Packed(NamedTuple):
    """A filled bucket. `data` is valid until the next one is asked for."""

    bucket: int
    data: torch.Tensor
    digests: dict[str, str]


def plan(specs: Iterable[TensorMeta], bucket_nbytes: int = BUCKET_NBYTES, align: int = ALIGN) -> Plan:
    """Fill buckets in order, each tensor at a multiple of `align` bytes. One larger than a bucket has its own."""
    if bucket_nbytes < 1 or align < 1:
        raise InvalidInput(f"buckets of {bucket_nbytes} bytes, aligned to {align}")
    placements: list[Placement] = []
    buckets: list[int] = []
    for spec in specs:
        nbytes = _nbytes(spec)
        offset = -(-buckets[-1] // align) * align if buckets else 0
        if not buckets or (buckets[-1] and offset + nbytes > bucket_nbytes):
            buckets.append(0)
            offset = 0
        placements.append(Placement(*spec, nbytes, len(buckets) - 1, offset))
        buckets[-1] = offset + nbytes
    return Plan(tuple(placements), tuple(buckets))


def plan_vllm(specs: Iterable[TensorMeta], buffer_nbytes: int = 1 << 30) -> Plan:
    """The buckets of vLLM's packed broadcast: tensors without gaps, cut after the one with which there are more than
    `buffer_nbytes` (so a bucket may be larger than that). It is a wire format: sender and receiver compute it alone."""
    placements: list[Placement] = []
    buckets: list[int] = []
    for spec in specs:
        if not buckets or buckets[-1] > buffer_nbytes:
            buckets.append(0)
        placements.append(Placement(*spec, _nbytes(spec), len(buckets) - 1, buckets[-1]))
        buckets[-1] += _nbytes(spec)
    return Plan(tuple(placements), tuple(buckets))


def pack(source: WeightSource, where: Plan, buffers: Sequence[torch.Tensor] | None = None) -> Iterator[Packed]:
    """The filled buckets, in order. While the caller moves one, threads fill the next into the other buffer.

    `buffers` are two flat uint8 CPU tensors as large as the largest bucket (made here when None): all memory used.
    Close the generator to stop early; it ends when the bucket in work is filled. Raises `ShapeMismatch` when the
    source gives other tensors than the plan has.
    """
    largest = max(where.buckets, default=0)
    if buffers is None:
        buffers = [torch.empty(largest, dtype=torch.uint8) for _ in where.buckets[:2]]
    if len(buffers) < min(2, len(where.buckets)) or any(len(buffer) < largest for buffer in buffers):
        raise InvalidInput(f"two buffers of {largest} bytes are needed")
    return _pack(source, where, buffers)


def _pack(source: WeightSource, where: Plan, buffers: Sequence[torch.Tensor]) -> Iterator[Packed]:
    tensors = iter(source.tensors())
    by_bucket: list[list[Placement]] = [[] for _ in where.buckets]
    for placement in where.placements:
        by_bucket[placement.bucket].append(placement)

    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tq-pack") as helpers:

        def fill(bucket: int) -> list[Future[dict[str, str]]]:
            share = _Share(by_bucket[bucket], tensors, buffers[bucket % 2])
            return [helpers.submit(share.copy) for _ in range(NUM_THREADS)]

        filling = fill(0) if by_bucket else []
        for bucket, nbytes in enumerate(where.buckets):
            found: dict[str, str] = {}
            for copied in filling:
                found.update(copied.result())
            if bucket + 1 < len(by_bucket):
                filling = fill(bucket + 1)
            yield Packed(bucket, buffers[bucket % 2][:nbytes], found)


def pack_into(source: WeightSource, where: Plan, places: Sequence[torch.Tensor]) -> dict[str, str]:
    """Fill all buckets, each into its own flat uint8 CPU tensor; the digests. Raises as `pack` does."""
    tensors = iter(source.tensors())
    found: dict[str, str] = {}
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tq-pack") as helpers:
        for bucket, data in enumerate(places):
            share = _Share([place for place in where.placements if place.bucket == bucket], tensors, data)
            for copied in [helpers.submit(share.copy) for _ in range(NUM_THREADS)]:
                found.update(copied.result())
    return found


class _Share:
    """The tensors of one bucket, which several threads take in turn and copy at the same time."""

    def __init__(
        self, places: list[Placement], tensors: Iterator[tuple[str, torch.Tensor]], data: torch.Tensor
    ) -> None:
        self._places = iter(places)
        self._tensors = tensors
        self._data = data
        self._turn = threading.Lock()

    def copy(self) -> dict[str, str]:
        """Copy until none is left; the digests of those that this thread copied."""
        found = {}
        while (taken := self._take()) is not None:
            place, tensor = taken
            found[place.name] = _copy(tensor, self._data[place.offset : place.offset + place.nbytes])
        return found

    def _take(self) -> tuple[Placement, torch.Tensor] | None:
        with self._turn:
            place = next(self._places, None)
            if place is None:
                return None
            places, self._places = self._places, iter(())  # no other thread goes on after an error
            name, tensor = next(self._tensors, ("no tensor", self._data))
            if (name, tensor.dtype, tuple(tensor.shape)) != place[:3]:
                raise ShapeMismatch(f"the source gave {name!r} {tensor.dtype} {list(tensor.shape)} instead of {place}")
            self._places = places
            return place, tensor


def _copy(tensor: torch.Tensor, into: torch.Tensor) -> str:
    if tensor.device.type == "cpu":
        return copy_and_digest(into.numpy(), byte_view(tensor).numpy())
    into.copy_(byte_view(tensor))
    return digest_of(into.numpy())


def digests(source: WeightSource) -> dict[str, str]:
    """Every tensor's digest: for a manifest that has to leave before the buckets."""
    return {name: digest_tensor(tensor) for name, tensor in source.tensors()}


def seal(
    where: Plan,
    digests: Mapping[str, str],
    *,
    version: int,
    epoch: str,
    aliases: Mapping[str, str] | None = None,
    kind: Kind = "full",
    base_root: str | None = None,
    label: str = "",
    meta: Mapping[str, Any] | None = None,
    algo: str = ALGO,
) -> Manifest:
    """The manifest of a full version or an adapter that is packed by this plan."""
    tensors = [
        TensorSpec(place.name, dtype_name(place.dtype), place.shape, place.nbytes, digests[place.name], *place[4:])
        for place in where.placements
    ]
    entries: dict[str, Entry] = {spec.name: spec.entry for spec in tensors}
    return Manifest(
        version=version, epoch=epoch, kind=kind, base_root=base_root, label=label, tensors=tuple(tensors),
        aliases=dict(aliases or {}), buckets=where.buckets, root=root_of(expand(entries, aliases or {})),
        meta=dict(meta or {}), algo=algo,
    )  # fmt: skip


def unpack(bucket: torch.Tensor, specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, as views of it where their offsets permit that dtype. What is stored as a difference
    comes as its flat uint8 bytes."""
    found = {}
    for spec in specs:
        flat = bucket[spec.offset : spec.offset + spec.stored.nbytes]
        if spec.delta is not None:
            found[spec.name] = flat
            continue
        dtype = torch_dtype(spec.dtype)
        if not spec.nbytes:
            found[spec.name] = torch.empty(spec.shape, dtype=dtype, device=bucket.device)
            continue
        if flat.data_ptr() % dtype.itemsize or flat.storage_offset() % dtype.itemsize:
            flat = flat.clone()
        found[spec.name] = flat.view(dtype).reshape(spec.shape)
    return found


def _nbytes(spec: TensorMeta) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
