"""Versions of which tensors are moved in pieces: shards of the trainer's ranks, cut along what receivers want.

    shards   what each rank holds; `plan_pieces` picks one holder for each box that several have
    cells    each shard along the edges of the wants (`boxes.cut`)
    buckets  cells of one holder that the same tables of wants take lie together: nobody fetches what only others want

The plan is a pure function of shards and wants, and linear in the number of cells.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from xxhash import xxh3_128

from transfer_queue.codec.dtypes import dtype_name
from transfer_queue.codec.layout import ALIGN
from transfer_queue.errors import InvalidInput, ShapeMismatch
from transfer_queue.memory.bytes import Bytes
from transfer_queue.weights.version.boxes import MAX_TAKERS, Box, common, cut, do_tile, relative, run_of, whole, within
from transfer_queue.weights.version.device import ready
from transfer_queue.weights.version.digest import STEP_NBYTES, byte_view, copy_and_digest, digest_of
from transfer_queue.weights.version.manifest import (
    FORMAT,
    PIECES,
    Entry,
    Manifest,
    TensorPiece,
    TensorSpec,
    expand,
    root_of,
    sharded_digest,
)
from transfer_queue.weights.version.packing import AHEAD_NBYTES, BUCKET_NBYTES, NUM_THREADS, Ahead, copy_written
from transfer_queue.weights.version.sharded import TensorShard
from transfer_queue.weights.version.tensor_memory import room

_NUMPY: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
Wants: TypeAlias = "Mapping[str, tuple[Box, ...]]"  # by name; a tensor that is not there is not wanted


class CellPlace(NamedTuple):
    """Where a cell lies: in which bucket of its rank, and how many bytes."""

    box: Box
    bucket: int
    offset: int
    nbytes: int


class ShardPlan(NamedTuple):
    """For each shard of one rank, in its order, where its cells lie: nowhere, when another rank gives that box.
    `buckets`: their sizes."""

    places: tuple[tuple[CellPlace, ...], ...]
    buckets: tuple[int, ...]


class ShardDigests(NamedTuple):
    """Of each shard of one rank, in its order, also of those that another rank gives, and of the cells of each."""

    shards: list[str]
    cells: list[list[str]]


def plan_pieces(
    tables: Sequence[Sequence[TensorShard]], wants: Sequence[Wants] = (), bucket_nbytes: int = BUCKET_NBYTES
) -> list[ShardPlan]:
    """Who gives what, for the shards of each rank. Boxes that nobody wants are given all the same: others may come.

    `ShapeMismatch` when the shards of a tensor are not its elements, each once but for equal boxes, or ranks disagree
    on its dtype or shape.
    """
    if len(wants) > MAX_TAKERS:
        raise InvalidInput(f"{len(wants)} tables of wants, at most {MAX_TAKERS}")
    named = _by_name(tables)
    given = _chosen(named, len(tables))
    wanted = {name: tuple(one.get(name, ()) for one in wants) for name in named}
    return [_filled(table, mine, wanted, bucket_nbytes) for table, mine in zip(tables, given, strict=True)]


Holding: TypeAlias = "tuple[int, int, TensorShard]"  # rank, index in its table


def _by_name(tables: Sequence[Sequence[TensorShard]]) -> dict[str, list[Holding]]:
    named: dict[str, list[Holding]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for index, shard in enumerate(table):
            found = named[shard.name]
            found.append((rank, index, shard))
            first = found[0][2]
            if first.shape != shard.shape or first.dtype is not shard.dtype:
                raise ShapeMismatch(
                    f"rank {rank} has {shard.name!r} as {shard.dtype} {list(shard.shape)}, another one as "
                    f"{first.dtype} {list(first.shape)}"
                )
    return named


def _chosen(named: Mapping[str, list[Holding]], num_ranks: int) -> list[set[int]]:
    """Which of its shards each rank gives. Of equal boxes, the rank that has the least to give so far."""
    given: list[set[int]] = [set() for _ in range(num_ranks)]
    load = [0] * num_ranks
    copied: list[tuple[int, list[Holding]]] = []
    for name, found in named.items():
        shape, itemsize = found[0][2].shape, found[0][2].dtype.itemsize
        groups = _copies(shape, tuple(shard.box for _, _, shard in found))
        if groups is None:
            raise ShapeMismatch(f"the shards of {name!r} are not its elements, each of them once")
        for group in groups:
            rank, index, shard = found[group[0]]
            nbytes = shard.box.size * itemsize
            if len(group) == 1:
                given[rank].add(index)
                load[rank] += nbytes
            else:
                copied.append((nbytes, [found[at] for at in group]))
    for nbytes, holdings in copied:  # after those without a choice
        rank, index, _ = min(holdings, key=lambda one: load[one[0]])
        given[rank].add(index)
        load[rank] += nbytes
    return given


@functools.lru_cache(1 << 12)
def _copies(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The places of equal boxes, together; None when the boxes do not tile the shape. Cached, as `cut`."""
    groups: dict[Box, list[int]] = {}
    for at, box in enumerate(boxes):
        groups.setdefault(box, []).append(at)
    if list(groups) != [whole(shape)] and not do_tile(shape, tuple(box for box in groups if box.size)):
        return None
    return tuple(map(tuple, groups.values()))


def _filled(
    table: Sequence[TensorShard],
    mine: Collection[int],
    wanted: Mapping[str, tuple[tuple[Box, ...], ...]],
    bucket_nbytes: int,
) -> ShardPlan:
    """Fill buckets for one rank: cells with the same takers together, in the order of the table."""
    buckets: list[int] = []
    last: dict[int, int] = {}  # by takers, the bucket that is being filled
    places: list[tuple[CellPlace, ...]] = []
    for number, shard in enumerate(table):
        found = []
        for box, takers in cut(shard.box, wanted[shard.name]) if number in mine else ():
            nbytes = box.size * shard.dtype.itemsize
            bucket = last.get(takers, -1)
            offset = -(-buckets[bucket] // ALIGN) * ALIGN if bucket >= 0 else 0
            if bucket < 0 or (offset and offset + nbytes > bucket_nbytes):
                bucket, offset = len(buckets), 0
                buckets.append(0)
                last[takers] = bucket
            found.append(CellPlace(box, bucket, offset, nbytes))
            buckets[bucket] = offset + nbytes
        places.append(tuple(found))
    return ShardPlan(tuple(places), tuple(buckets))


def pack_shards(
    table: Sequence[TensorShard],
    tensors: Iterator[tuple[str, torch.Tensor]],
    where: ShardPlan,
    buckets: Sequence[torch.Tensor],
) -> ShardDigests:
    """Bring the cells to their places in flat uint8 CPU tensors. The shards are read in this thread, in their order.

    Each is contiguous, on any device. `ShapeMismatch` when one is not as the table says.
    """
    into = [bucket.numpy() for bucket in buckets]
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tq-pack") as helpers:
        packing: Ahead[tuple[str, list[str]]] = Ahead(helpers, AHEAD_NBYTES)
        for shard, places in zip(table, where.places, strict=True):
            name, tensor = next(tensors, ("no tensor", torch.empty(0)))
            if (name, tensor.dtype, tuple(tensor.shape)) != (shard.name, shard.dtype, shard.box.lengths):
                raise ShapeMismatch(f"the source gave {name!r} {tensor.dtype} {list(tensor.shape)} instead of {shard}")
            targets = [into[place.bucket][place.offset : place.offset + place.nbytes] for place in places]
            packing.add(tensor.nbytes, _pack_shard, shard.box, tensor, ready(tensor), places, targets)
        found = packing.end()
    return ShardDigests([digest for digest, _ in found], [cells for _, cells in found])


def pack_here(
    table: Sequence[TensorShard], tensors: Iterator[tuple[str, torch.Tensor]], where: ShardPlan
) -> tuple[list[torch.Tensor], ShardDigests]:
    """As `pack_shards`, into buckets that are made for it."""
    buckets = [room(nbytes) for nbytes in where.buckets]
    return buckets, pack_shards(table, tensors, where, buckets)


def _pack_shard(
    shard: Box, tensor: torch.Tensor, written: torch.Event | None, places: Sequence[CellPlace], into: Sequence[Bytes]
) -> tuple[str, list[str]]:
    if len(places) == 1 and places[0].box == shard:
        digest = copy_written(tensor, written, into[0])
        return digest, [digest]
    if written is not None:
        written.synchronize()
        tensor = tensor.cpu()
    digest = digest_of(byte_view(tensor).numpy())
    return digest, [copy_box(tensor, shard, place.box, part) for place, part in zip(places, into, strict=True)]


def copy_box(tensor: torch.Tensor, around: Box, box: Box, into: Bytes) -> str:
    """The bytes of `box`, of a contiguous CPU tensor that holds `around`, to `into`; the digest of what is there."""
    itemsize = tensor.element_size()
    run = run_of(relative(box, around), around.lengths)
    if run is not None:
        return copy_and_digest(into, byte_view(tensor).numpy()[run.start * itemsize : run.stop * itemsize])
    source, place = _elements(tensor)[within(box, around)], into.view(_NUMPY[itemsize]).reshape(box.lengths)
    rows = max(1, STEP_NBYTES // max(1, place[0].nbytes))
    state = xxh3_128()
    for at in range(0, len(place), rows):  # in steps that stay in a core's cache between the copy and the digest
        np.copyto(place[at : at + rows], source[at : at + rows])
        state.update(into[at * place[0].nbytes : (at + rows) * place[0].nbytes].data)
    return state.hexdigest()


def _elements(tensor: torch.Tensor) -> Any:
    """A contiguous tensor as an array of the same shape, whatever the dtype."""
    return byte_view(tensor).numpy().view(_NUMPY[tensor.element_size()]).reshape(tensor.shape)


def seal_pieces(
    tables: Sequence[Sequence[TensorShard]],
    plans: Sequence[ShardPlan],
    digests: Sequence[ShardDigests],
    *,
    version: int,
    epoch: str,
    aliases: Mapping[str, str],
    names_holders: bool = False,
) -> Manifest:
    """The manifest of what ranks have packed by their plans; the buckets of all ranks, one rank's after the other's.

    In format 1 where each tensor is in one place, all of them at one rank, unless it `names_holders`. `ShapeMismatch`
    when ranks hold different values of one box: their replicas have drifted apart.
    """
    _check_copies(tables, digests)
    first_bucket = np.cumsum([0, *(len(plan.buckets) for plan in plans)]).tolist()
    shards: dict[str, dict[Box, str]] = defaultdict(dict)
    pieces: dict[str, list[TensorPiece]] = defaultdict(list)
    metas: dict[str, TensorShard] = {}
    for rank, (table, plan, found) in enumerate(zip(tables, plans, digests, strict=True)):
        for shard, places, digest, cells in zip(table, plan.places, *found, strict=True):
            metas.setdefault(shard.name, shard)
            if places:
                shards[shard.name][shard.box] = digest
            for place, cell in zip(places, cells, strict=True):
                at = first_bucket[rank] + place.bucket
                pieces[shard.name].append(TensorPiece(*place.box, place.nbytes, cell, at, place.offset))
    specs = [_spec(shard, shards[name], pieces[name]) for name, shard in metas.items()]
    entries: dict[str, Entry] = {spec.name: spec.entry for spec in specs}
    is_plain = not names_holders and len(tables) == 1 and all(spec.pieces is msgspec.UNSET for spec in specs)
    holders = tuple(rank for rank, plan in enumerate(plans) for _ in plan.buckets)
    return Manifest(
        format=FORMAT if is_plain else PIECES, version=version, epoch=epoch, kind="full", tensors=tuple(specs),
        aliases=dict(aliases), buckets=tuple(size for plan in plans for size in plan.buckets),
        root=root_of(expand(entries, aliases)), holders=msgspec.UNSET if is_plain else holders,
    )  # fmt: skip


def _check_copies(tables: Sequence[Sequence[TensorShard]], digests: Sequence[ShardDigests]) -> None:
    held: dict[tuple[str, Box], tuple[int, str]] = {}
    for rank, (table, found) in enumerate(zip(tables, digests, strict=True)):
        for shard, digest in zip(table, found.shards, strict=True):
            first, same = held.setdefault((shard.name, shard.box), (rank, digest))
            if same != digest:
                raise ShapeMismatch(
                    f"ranks {first} and {rank} hold different values of {shard.name!r}, from {list(shard.box.start)}, "
                    f"{list(shard.box.lengths)}: replicas have drifted apart"
                )


def _spec(shard: TensorShard, shards: Mapping[Box, str], pieces: list[TensorPiece]) -> TensorSpec:
    name, shape = shard.name, shard.shape
    nbytes = math.prod(shape) * shard.dtype.itemsize
    boxes = {box: digest for box, digest in shards.items() if box.size}
    digest = next(iter(shards.values())) if len(boxes) <= 1 else sharded_digest(boxes.items())
    kind = dtype_name(shard.dtype)
    if len(pieces) == 1 or not nbytes:
        return TensorSpec(name, kind, shape, nbytes, digest, pieces[0].bucket, pieces[0].offset)
    pieces = sorted((piece for piece in pieces if piece.nbytes), key=lambda piece: piece.start)
    return TensorSpec(name, kind, shape, nbytes, digest, 0, 0, None, tuple(pieces))


# at a receiver


class Pieces:
    """What a receiver has of a tensor: some boxes of it, each a contiguous tensor."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], parts: list[tuple[Box, torch.Tensor]]) -> None:
        self.dtype, self.shape, self.parts = dtype, shape, parts

    def of(self, box: Box) -> torch.Tensor:
        """The elements of a box: where one part has all of it a view of that, else a copy. `LookupError` when some are
        not here."""
        found = [(part, held, tensor) for held, tensor in self.parts if (part := common(box, held)) is not None]
        for part, held, tensor in found:
            if part == box:
                return tensor[within(box, held)]
        if not do_tile(box.lengths, tuple(relative(part, box) for part, _, _ in found)):
            raise LookupError(f"{list(box.lengths)} from {list(box.start)} is not here")
        made = torch.empty(box.lengths, dtype=self.dtype, device=found[0][2].device)
        for part, held, tensor in found:
            made[within(part, box)] = tensor[within(part, held)]
        return made

    def whole(self) -> torch.Tensor:
        return self.of(whole(self.shape))

    def cpu(self) -> Pieces:
        """The same on the host."""
        return Pieces(self.dtype, self.shape, [(box, tensor.cpu()) for box, tensor in self.parts])


def wanted_buckets(manifest: Manifest, wants: Wants) -> list[int]:
    """The buckets that have something of what is wanted, under whichever name."""
    named = by_name(wants, manifest.aliases)
    found: set[int] = set()
    for spec in manifest.tensors:
        boxes = named.get(spec.name, ())
        if boxes:
            found |= {part.bucket for part in spec.parts if any(common(part.box, box) is not None for box in boxes)}
    return sorted(found)


def by_name(wants: Wants, aliases: Mapping[str, str]) -> Wants:
    """With what is wanted under an alias under the name."""
    found = {name: boxes for name, boxes in wants.items() if name not in aliases}
    for alias, name in aliases.items():
        boxes = wants.get(alias, ())
        found[name] = tuple(dict.fromkeys((*found.get(name, ()), *boxes)))
    return {name: boxes for name, boxes in found.items() if boxes}
