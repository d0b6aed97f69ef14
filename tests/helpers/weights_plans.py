"""Plans and manifests of versions in pieces, made one object at a time: what the columns are compared with.

The manifest is in format 2, as releases wrote it that had no columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from transfer_queue.codec.dtypes import dtype_name
from transfer_queue.codec.layout import ALIGN
from transfer_queue.weights.version.boxes import Box, cut
from transfer_queue.weights.version.columns import DIGEST_NBYTES
from transfer_queue.weights.version.manifest import (
    PIECES,
    Manifest,
    TensorPiece,
    TensorSpec,
    root_of,
    sharded_digest,
)
from transfer_queue.weights.version.plans import CellPlace, Wants
from transfer_queue.weights.version.sealing import ShardDigests
from transfer_queue.weights.version.sharded import TensorShard

Table = Sequence[TensorShard]
Places = list[list[CellPlace]]


def planned_one_by_one(tables: Sequence[Table], wants: Sequence[Wants], nbytes: int) -> list[tuple[Places, list[int]]]:
    """Of each rank, where the cells of each of its shards lie, and the sizes of its buckets. Takes tables that fit."""
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = defaultdict(list)
    names = dict.fromkeys(shard.name for table in tables for shard in table)
    for name in names:
        for rank, table in enumerate(tables):
            for index, shard in enumerate(table):
                if shard.name == name:
                    holders[name, shard.box].append((rank, index))
    load = [0] * len(tables)
    given: set[tuple[int, int]] = set()
    for has_choice in (False, True):
        for found in holders.values():
            if (len(found) > 1) == has_choice:
                rank, index = min(found, key=lambda one: load[one[0]])
                given.add((rank, index))
                load[rank] += tables[rank][index].box.size * tables[rank][index].dtype.itemsize
    return [_filled(rank, table, given, wants, nbytes) for rank, table in enumerate(tables)]


def _filled(
    rank: int, table: Table, given: set[tuple[int, int]], wants: Sequence[Wants], limit: int
) -> tuple[Places, list[int]]:
    sizes: list[int] = []
    last: dict[int, int] = {}
    places: Places = []
    for index, shard in enumerate(table):
        places.append([])
        if (rank, index) not in given:
            continue
        for box, takers in cut(shard.box, tuple(one.get(shard.name, ()) for one in wants)):
            nbytes = box.size * shard.dtype.itemsize
            bucket = last.get(takers, -1)
            offset = -(-sizes[bucket] // ALIGN) * ALIGN if bucket >= 0 else 0
            if bucket < 0 or (offset and offset + nbytes > limit):
                bucket, offset = len(sizes), 0
                sizes.append(0)
                last[takers] = bucket
            sizes[bucket] = offset + nbytes
            places[-1].append(CellPlace(box, bucket, offset, nbytes))
    return places, sizes


def sealed_one_by_one(
    tables: Sequence[Table], plans: Sequence[tuple[Places, list[int]]], digests: Sequence[ShardDigests]
) -> Manifest:
    metas: dict[str, TensorShard] = {}
    shards: dict[str, dict[Box, str]] = defaultdict(dict)
    pieces: dict[str, list[TensorPiece]] = defaultdict(list)
    first = 0
    for table, (places, sizes), found in zip(tables, plans, digests, strict=True):
        cells = iter(_texts(found.cells))
        for shard, here, digest in zip(table, places, _texts(found.shards), strict=True):
            metas.setdefault(shard.name, shard)
            if here:
                shards[shard.name][shard.box] = digest
            for box, bucket, offset, nbytes in here:
                pieces[shard.name].append(TensorPiece(*box, nbytes, next(cells), first + bucket, offset))
        first += len(sizes)
    specs = tuple(_spec(shard, shards[name], pieces[name]) for name, shard in metas.items())
    holders = tuple(rank for rank, (_, sizes) in enumerate(plans) for _ in sizes)
    buckets = tuple(size for _, sizes in plans for size in sizes)
    root = root_of({spec.name: spec.entry for spec in specs})
    return Manifest(
        format=PIECES, version=1, epoch="e", kind="full", tensors=specs, buckets=buckets, root=root, holders=holders
    )


def _spec(shard: TensorShard, shards: dict[Box, str], pieces: list[TensorPiece]) -> TensorSpec:
    nbytes = math.prod(shard.shape) * shard.dtype.itemsize
    boxes = {box: digest for box, digest in shards.items() if box.size}
    digest = sharded_digest(boxes.items()) if len(boxes) > 1 else next(iter(shards.values()))
    told = (shard.name, dtype_name(shard.dtype), shard.shape, nbytes, digest)
    if len(pieces) == 1 or not nbytes:
        return TensorSpec(*told, pieces[0].bucket, pieces[0].offset)
    inside = sorted((piece for piece in pieces if piece.nbytes), key=lambda piece: piece.start)
    return TensorSpec(*told, 0, 0, None, tuple(inside))


def _texts(digests: bytes) -> list[str]:
    return [digests[at : at + DIGEST_NBYTES].hex() for at in range(0, len(digests), DIGEST_NBYTES)]
