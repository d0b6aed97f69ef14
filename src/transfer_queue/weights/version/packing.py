"""Tensors into buckets and back: where each one lies, and the copying, which overlaps with what moves the buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import torch

from transfer_queue.codec.dtypes import dtype_name, torch_dtype
from transfer_queue.codec.layout import ALIGN
from transfer_queue.errors import InvalidInput, ShapeMismatch
from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.downloads import downloaded
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights.version.device import ready, wait_until
from transfer_queue.weights.version.digest import ALGO, collect_and_digest, copy_and_digest, digest_tensor
from transfer_queue.weights.version.manifest import BucketPart, Entry, Kind, Manifest, TensorSpec, expand, root_of
from transfer_queue.weights.version.sources import TensorMeta, WeightSource
from transfer_queue.weights.version.threads import AHEAD_NBYTES, Ahead, helpers_for

BUCKET_NBYTES = 256 << 20
SMALL_NBYTES = 64 << 10  # handing over a copy to a thread costs more


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

    def by_bucket(self) -> list[list[Placement]]:
        """The placements of each bucket, in their order. Goes through all of them."""
        found: list[list[Placement]] = [[] for _ in self.buckets]
        for placement in self.placements:
            found[placement.bucket].append(placement)
        return found


class Packed(NamedTuple):
    """A filled bucket. `data` is valid until the next one is asked for."""

    bucket: int
    data: torch.Tensor
    digests: dict[str, str]


def nbytes_of(specs: Iterable[TensorMeta]) -> int:
    """Bytes of all tensors, without what lies between them in buckets."""
    return sum(map(_nbytes, specs))


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


def pack(source: WeightSource, where: Plan, buffers: Sequence[torch.Tensor] | None = None) -> Iterator[Packed]:
    """The filled buckets, in order. While the caller moves one, threads fill the next into the other buffer; where all
    of it is small, its caller has done so before.

    The source is read in the caller's thread, the next bucket's tensors before a bucket is given.
    `buffers` are two flat uint8 CPU tensors as large as the largest bucket (made here when None): all memory used.
    Close the generator to stop early; it ends when the bucket in work is filled. Raises `ShapeMismatch` when the
    source gives other tensors than the plan has.
    """
    largest = max(where.buckets, default=0)
    if buffers is None:
        buffers = [torch.empty(largest, dtype=torch.uint8, device="cpu") for _ in where.buckets[:2]]
    if len(buffers) < min(2, len(where.buckets)) or any(len(buffer) < largest for buffer in buffers):
        raise InvalidInput(f"two buffers of {largest} bytes are needed")
    return _pack(source, where, buffers)


def _pack(source: WeightSource, where: Plan, buffers: Sequence[torch.Tensor]) -> Iterator[Packed]:
    tensors = iter(source.tensors())
    by_bucket = where.by_bucket()
    with helpers_for(sum(where.buckets), "tq-pack") as helpers:
        filling = _Filling(helpers)
        if by_bucket:
            filling.fill(by_bucket[0], tensors, buffers[0])
        for bucket, nbytes in enumerate(where.buckets):
            found = filling.end()
            if bucket + 1 < len(by_bucket):
                filling.fill(by_bucket[bucket + 1], tensors, buffers[(bucket + 1) % 2])
            else:
                read_to_end(tensors)
            yield Packed(bucket, buffers[bucket % 2][:nbytes], found)


def pack_into(source: WeightSource, where: Plan, places: Sequence[torch.Tensor]) -> dict[str, str]:
    """Fill all buckets, each into its own flat uint8 CPU tensor; the digests. Reads and raises as `pack` does; holds
    not much more than `AHEAD_NBYTES` of what the source gave, and one large tensor."""
    tensors = iter(source.tensors())
    with helpers_for(sum(where.buckets), "tq-pack") as helpers:
        filling = _Filling(helpers, AHEAD_NBYTES)
        for found, data in zip(where.by_bucket(), places, strict=True):
            filling.fill(found, tensors, data)
        read_to_end(tensors)
        return filling.end()


def read_to_end(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """A source that has given all that was expected may have more to do, such as letting go of what it gathered.
    `ShapeMismatch` when it gives something else."""
    for name, _ in tensors:
        raise ShapeMismatch(f"the source gave {name!r} beyond what it said it would give")


class _Filling:
    """Tensors on their way to their places: small ones are copied at once, threads copy the others, ahead as `Ahead`
    lets them."""

    def __init__(self, helpers: Executor, ahead_nbytes: float = math.inf) -> None:
        self._digests: dict[str, str] = {}
        self._copying: Ahead[tuple[str, str]] = Ahead(helpers, ahead_nbytes)

    def fill(
        self, places: Sequence[Placement], tensors: Iterator[tuple[str, torch.Tensor]], data: torch.Tensor
    ) -> None:
        """Take the next tensors, in this thread, and bring them to their places in `data`."""
        into = data.numpy()
        for place in places:
            name, tensor = next(tensors, ("no tensor", data))
            if name != place.name or tensor.dtype != place.dtype or tensor.shape != place.shape:
                raise ShapeMismatch(f"the source gave {name!r} {tensor.dtype} {list(tensor.shape)} instead of {place}")
            part = into[place.offset : place.offset + place.nbytes]
            if place.nbytes < SMALL_NBYTES and tensor.device.type == "cpu":
                self._digests[name] = copy_and_digest(part, byte_view(tensor).numpy())
                continue
            self._copying.add(place.nbytes, _copy_named, name, tensor, ready(tensor), part)

    def end(self) -> dict[str, str]:
        """The digests, once all is copied."""
        found, self._digests = {**self._digests, **dict(self._copying.end())}, {}
        return found


def _copy_named(name: str, tensor: torch.Tensor, written: torch.Event | None, into: Bytes) -> tuple[str, str]:
    return name, copy_written(tensor, written, into)


def copy_written(tensor: torch.Tensor, written: torch.Event | None, into: Bytes) -> str:
    """The bytes of a contiguous tensor, on any device, to `into`, once it is `written` (`device.ready`); their
    digest."""
    if written is None:
        return copy_and_digest(into, byte_view(tensor).numpy())
    wait_until(written, tensor.device)
    return collect_and_digest(into, downloaded(byte_view(tensor)))


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


def unpack(bucket: torch.Tensor, parts: Iterable[BucketPart]) -> dict[str, torch.Tensor]:
    """The tensors of a bucket (`Manifest.in_bucket`) of a version whose tensors are not in pieces, as `views` has
    them."""
    parts = list(parts)
    return dict(zip((part.name for part in parts), views(bucket, parts), strict=True))


def views(bucket: torch.Tensor, parts: Iterable[BucketPart]) -> list[torch.Tensor]:
    """What a bucket has, in the order of `parts`, as views of it where offsets permit that dtype. What is stored as a
    difference comes as its flat uint8 bytes, a piece with the shape of its box."""
    found = []
    for part in parts:
        flat = bucket[part.offset : part.offset + part.nbytes]
        dtype, shape = torch_dtype(part.spec.dtype), part.box.lengths
        if part.result is not None:
            found.append(flat)
        elif not part.nbytes:
            found.append(torch.empty(shape, dtype=dtype, device=bucket.device))
        else:
            if flat.data_ptr() % dtype.itemsize or flat.storage_offset() % dtype.itemsize:
                flat = flat.clone()
            found.append(flat.view(dtype).reshape(shape))
    return found


def _nbytes(spec: TensorMeta) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
