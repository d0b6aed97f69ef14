"""The manifest of what ranks have packed by their plans, from their digests, in columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from xxhash import xxh3_128_hexdigest

from transfer_queue.errors import ProtocolError, ShapeMismatch
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.structs import decodable
from transfer_queue.weights.version.boxes import whole
from transfer_queue.weights.version.columns import (
    DIGEST_NBYTES,
    alike,
    bytes_of,
    digests_from,
    ends_of,
    first_of,
    hex_of,
    numbered_runs,
    texts_of,
)
from transfer_queue.weights.version.manifest import (
    COLUMNS,
    FORMAT,
    Manifest,
    PieceColumns,
    TensorSpec,
    root_of_specs,
    sharded_json,
)
from transfer_queue.weights.version.plans import ShardPlan
from transfer_queue.weights.version.shard_table import ShardRows, ShardTable
from transfer_queue.weights.version.sharded import TensorShard

_BLANK = "0" * (2 * DIGEST_NBYTES)


@decodable
class ShardDigests(msgspec.Struct, frozen=True):
    """Of each shard of one rank, in its order, also of those that another rank gives, and of the cells of all of them:
    columns of 16 bytes."""

    shards: bytes
    cells: bytes

    @staticmethod
    def of(shards: Iterable[str], cells: Iterable[Sequence[str]]) -> ShardDigests:
        """From hex digits."""
        both = (digests_from(shards), digests_from(itertools.chain.from_iterable(cells)))
        return ShardDigests(*(one.tobytes() for one in both))

    def of_shards(self) -> list[str]:
        """In hex digits."""
        return texts_of(_rows_from(self.shards))

    def check(self, num_shards: int, num_cells: int) -> None:
        """`ProtocolError` when there are not so many, as they came from elsewhere."""
        if (len(self.shards), len(self.cells)) != (num_shards * DIGEST_NBYTES, num_cells * DIGEST_NBYTES):
            raise ProtocolError(f"digests of {num_shards} shards and {num_cells} cells are not as many")


def seal_pieces(
    tables: Sequence[Iterable[TensorShard]],
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
    shards = _Shards(ShardRows([ShardTable.of(table) for table in tables]), plans, digests)
    shards.check_copies()
    columns, places = _placed(shards, plans, digests)
    specs = tuple(
        TensorSpec(name, *form, digest, *place)
        for name, form, digest, place in zip(shards.rows.names, shards.forms(), shards.digests(), places, strict=True)
    )
    is_plain = not names_holders and len(tables) == 1 and not columns.layouts
    holders = tuple(rank for rank, plan in enumerate(plans) for _ in plan.buckets)
    return Manifest(
        format=FORMAT if is_plain else COLUMNS, version=version, epoch=epoch, kind="full", tensors=specs,
        aliases=dict(aliases), buckets=tuple(size for plan in plans for size in plan.buckets),
        root=root_of_specs(specs, aliases), holders=msgspec.UNSET if is_plain else holders,
        pieces=msgspec.UNSET if is_plain else columns,
    )  # fmt: skip


class _Shards:
    """What all ranks hold, with digests. Boxes are numbered by where they start, so that `key` puts the shards of a
    tensor in their order. `boxes`, `number`: all of them, and which one each is."""

    def __init__(self, rows: ShardRows, plans: Sequence[ShardPlan], digests: Sequence[ShardDigests]) -> None:
        self.rows = rows
        used = {kind.box for kind in rows.kinds}.union(*(plan.boxes for plan in plans))
        self.boxes = sorted(used)
        self.number = {box: at for at, box in enumerate(self.boxes)}
        self.held = np.concatenate([_rows_from(one.shards) for one in digests])
        self.counts: Ints = np.concatenate([plan.counts for plan in plans])  # of cells
        self.box: Ints = np.array([self.number[kind.box] for kind in rows.kinds], np.int64)[rows.kind]
        self._key = self.key(rows.tensor, self.box)
        self._order = np.argsort(self._key, kind="stable")

    def key(self, tensor: Ints, box: Ints) -> Ints:
        return tensor * len(self.boxes) + box

    def check_copies(self) -> None:
        one, other = self._order[:-1], self._order[1:]
        same = np.flatnonzero(self._key[one] == self._key[other])
        one, other = one[same], other[same]
        wrong = np.flatnonzero((self.held[one] != self.held[other]).any(axis=1))
        if len(wrong):
            first, second = int(one[wrong[0]]), int(other[wrong[0]])
            name, box = self.rows.names[self.rows.tensor[first]], self.boxes[self.box[first]]
            raise ShapeMismatch(
                f"ranks {self.rows.rank_of(first)} and {self.rows.rank_of(second)} hold different values of {name!r}, "
                f"from {list(box.start)}, {list(box.lengths)}: replicas have drifted apart"
            )

    def forms(self) -> list[tuple[str, tuple[int, ...], int]]:
        """dtype, shape and bytes of each tensor."""
        made = [(one.dtype, one.shape, one._replace(box=whole(one.shape)).nbytes) for one in self.rows.kinds]
        return [made[kind] for kind in self.rows.kind[self.rows.first].tolist()]

    def digests(self) -> list[str]:
        """Of each tensor: its own, or that of the boxes and digests of its shards (`sharded_json`)."""
        tensor = self.rows.tensor
        given = np.flatnonzero(self.counts)
        found = texts_of(self.held[given[first_of(tensor[given], len(self.rows.names))]])
        is_part = (self.counts > 0) & (self.rows.nbytes[self.rows.kind] > 0)
        parts = self._order[is_part[self._order]]
        num_parts = np.bincount(tensor[parts], minlength=len(found))
        begin = ends_of(num_parts)[0]
        for tensors in alike(self.box[parts], num_parts):
            num = int(num_parts[tensors[0]])
            if num > 1:
                lying = parts[begin[tensors][:, None] + np.arange(num)]
                for at, digest in zip(tensors.tolist(), self._sharded(lying), strict=True):
                    found[at] = digest
        return found

    def _sharded(self, rows: Ints) -> list[str]:
        """Of tensors with shards of the same boxes: each has a line of rows."""
        text = sharded_json((self.boxes[at], _BLANK) for at in self.box[rows[0]].tolist())
        lines = np.tile(np.frombuffer(text, np.uint8), (len(rows), 1))
        for column, blank in zip(rows.T, re.finditer(_BLANK.encode(), text), strict=True):
            lines[:, slice(*blank.span())] = hex_of(self.held[column])
        data = lines.tobytes()
        return [xxh3_128_hexdigest(data[at : at + len(text)]) for at in range(0, len(data), len(text))]


def _placed(
    shards: _Shards, plans: Sequence[ShardPlan], digests: Sequence[ShardDigests]
) -> tuple[PieceColumns, list[tuple[int, int]]]:
    """The pieces, and the bucket and offset of each tensor that is in one place (else zeros)."""
    tensor = np.repeat(shards.rows.tensor, shards.counts)
    first_bucket = itertools.accumulate((len(plan.buckets) for plan in plans), initial=0)
    bucket = np.concatenate([plan.columns.bucket + first for plan, first in zip(plans, first_bucket, strict=False)])
    offset = np.concatenate([plan.columns.offset for plan in plans])
    box = np.concatenate(
        [np.array([shards.number[one] for one in plan.boxes], np.int64)[plan.columns.box] for plan in plans]
    )
    num = len(shards.rows.names)
    is_empty = np.array([nbytes == 0 for *_, nbytes in shards.forms()], np.bool_)
    is_whole = (np.bincount(tensor, minlength=num) == 1) | is_empty
    nbytes = np.concatenate([plan.columns.nbytes for plan in plans])
    kept = np.flatnonzero(~is_whole[tensor] & (nbytes > 0))
    kept = kept[np.argsort(shards.key(tensor[kept], box[kept]), kind="stable")]
    cut = np.flatnonzero(~is_whole)
    counts = np.bincount(tensor[kept], minlength=num)[cut]
    layout = np.full(num, -1)
    layout[cut], first = numbered_runs(box[kept], counts)
    begin = ends_of(counts)[0]
    layouts = [box[kept][begin[at] : begin[at] + counts[at]].tolist() for at in first.tolist()]
    found = np.concatenate([_rows_from(one.cells) for one in digests])[kept]
    columns = PieceColumns(
        tuple(tuple(shards.boxes[at] for at in one) for one in layouts), bytes_of(layout),
        bytes_of(bucket[kept]), bytes_of(offset[kept], 8), found.tobytes(),
    )  # fmt: skip
    at = first_of(tensor, num)
    places = np.where(is_whole, (bucket[at], offset[at]), 0).T
    return columns, [(a, b) for a, b in places.tolist()]


def _rows_from(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8).reshape(-1, DIGEST_NBYTES)
