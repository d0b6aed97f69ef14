"""The manifest of what ranks have packed by their plans, from their digests, in columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from transfer_queue.errors import ProtocolError, ShapeMismatch
from transfer_queue.memory.bytes import Ints
from transfer_queue.structs import decodable
from transfer_queue.weights.version.boxes import whole
from transfer_queue.weights.version.columns import (
    DIGEST_NBYTES,
    alike,
    bytes_of,
    digest_rows,
    digests_from,
    ends_of,
    first_of,
    hex_of,
    numbered_runs,
    texts_of,
)
from transfer_queue.weights.version.manifest import (
    CHANGES,
    COLUMNS,
    FORMAT,
    Manifest,
    PieceColumns,
    Stored,
    TensorSpec,
    root_of_specs,
    sharded_json,
)
from transfer_queue.weights.version.plans import ShardPlan
from transfer_queue.weights.version.shard_table import ShardRows, ShardTable
from transfer_queue.weights.version.sharded import TensorShard
from transfer_queue.weights.version.stored_cells import UNCHANGED, StoredCells

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
        return texts_of(digest_rows(self.shards))

    def check(self, num_shards: int, num_cells: int) -> None:
        """`ProtocolError` when there are not so many, as they came from elsewhere."""
        if (len(self.shards), len(self.cells)) != (num_shards * DIGEST_NBYTES, num_cells * DIGEST_NBYTES):
            raise ProtocolError(f"digests of {num_shards} shards and {num_cells} cells are not as many")


@decodable
class PackedCells(msgspec.Struct, frozen=True):
    """What a rank has read and packed: `stored` where that is a difference."""

    digests: ShardDigests
    stored: StoredCells | None = None

    def check(self, num_shards: int, where: ShardPlan, *, compares: bool) -> None:
        """`ProtocolError` when it is not of this plan, as it came from elsewhere."""
        num_cells = len(where.columns.box)
        self.digests.check(num_shards, num_cells)
        if (self.stored is not None) != compares:
            raise ProtocolError("a rank has packed all of it, and others a difference")
        if self.stored is not None:
            self.stored.check(num_cells)


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
    """As `Sealing.whole`, for who seals nothing else."""
    return Sealing(tables, plans, digests).whole(
        version=version, epoch=epoch, aliases=aliases, names_holders=names_holders
    )


class Sealing:
    """Makes the manifests of what ranks have read, by their plans and `digests`: of all of it, and of what changed."""

    def __init__(
        self,
        tables: Sequence[Iterable[TensorShard]],
        plans: Sequence[ShardPlan],
        digests: Sequence[ShardDigests],
    ) -> None:
        """`ShapeMismatch` when ranks hold different values of one box: their replicas have drifted apart."""
        self._plans = plans
        self._shards = _Shards(ShardRows([ShardTable.of(table) for table in tables]), plans, digests)
        self._shards.check_copies()
        self._cells = _Cells(self._shards, plans, digests)

    def whole(self, *, version: int, epoch: str, aliases: Mapping[str, str], names_holders: bool = False) -> Manifest:
        """Of what was packed by the plans; the buckets of all ranks, one rank's after the other's.

        In format 1 where each tensor is in one place, all of them at one rank, unless it `names_holders`.
        """
        shards, cells = self._shards, self._cells
        columns = [(plan.columns.bucket, plan.columns.offset, plan.buckets) for plan in self._plans]
        bucket, offset, buckets, holders = _numbered(columns)
        pieces = cells.pieces(cells.kept, bucket, offset)
        places = np.where(cells.is_whole, (bucket[cells.first], offset[cells.first]), 0).T.tolist()
        specs = tuple(
            TensorSpec(name, *form, digest, *place)
            for name, form, digest, place in zip(
                shards.rows.names, shards.forms(), shards.digests(), places, strict=True
            )
        )
        is_plain = not names_holders and len(self._plans) == 1 and not pieces.layouts
        return Manifest(
            format=FORMAT if is_plain else COLUMNS, version=version, epoch=epoch, kind="full", tensors=specs,
            aliases=dict(aliases), buckets=buckets, root=root_of_specs(specs, aliases),
            holders=msgspec.UNSET if is_plain else holders, pieces=msgspec.UNSET if is_plain else pieces,
        )  # fmt: skip

    def changes(self, base: Manifest, whole: Manifest, stored: Sequence[StoredCells]) -> Manifest:
        """Of the difference from `base` to `whole`, that of these digests; both have the same tables, plans and ties.
        It has the tensors that changed, in the buckets that `StoredCells.places` says.
        """
        cells = self._cells
        bucket, offset, buckets, holders = _numbered(
            [one.places(plan) for one, plan in zip(stored, self._plans, strict=True)]
        )
        nbytes = np.concatenate([one.column for one in stored])
        bucket = np.where(nbytes == UNCHANGED, 0, bucket)
        found = np.concatenate([digest_rows(one.digests) for one in stored])
        changed = np.array([a.digest != b.digest for a, b in zip(base.tensors, whole.tensors, strict=True)], np.bool_)
        specs = []
        for at in np.flatnonzero(changed).tolist():
            spec, cell = whole.tensors[at], int(cells.first[at])
            if cells.is_whole[at]:
                is_patch = nbytes[cell] > 0
                delta = Stored(int(nbytes[cell]), texts_of(found[cell : cell + 1])[0]) if is_patch else None
                spec = replace(spec, bucket=int(bucket[cell]), offset=int(offset[cell]), delta=delta)
            specs.append(spec)
        names = {spec.name for spec in specs}
        told: dict[str, Any] = {"format": FORMAT}
        if whole.format != FORMAT:
            kept = cells.kept[changed[cells.tensor[cells.kept]]]
            pieces = replace(
                cells.pieces(kept, bucket, offset, changed),
                stored=bytes_of(nbytes[kept], 8), stored_digests=found[kept].tobytes(),
            )  # fmt: skip
            told = {"format": CHANGES, "holders": holders, "pieces": pieces}
        return Manifest(
            **told, version=whole.version, epoch=whole.epoch, kind="delta", base=base.version, base_root=base.root,
            tensors=tuple(specs), aliases={alias: name for alias, name in whole.aliases.items() if name in names},
            buckets=buckets, root=whole.root,
        )  # fmt: skip


class _Shards:
    """What all ranks hold, with digests. Boxes are numbered by where they start, so that `key` puts the shards of a
    tensor in their order. `boxes`, `number`: all of them, and which one each is."""

    def __init__(self, rows: ShardRows, plans: Sequence[ShardPlan], digests: Sequence[ShardDigests]) -> None:
        self.rows = rows
        used = {kind.box for kind in rows.kinds}.union(*(plan.boxes for plan in plans))
        self.boxes = sorted(used)
        self.number = {box: at for at, box in enumerate(self.boxes)}
        self.held = np.concatenate([digest_rows(one.shards) for one in digests])
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


class _Cells:
    """The cells of all ranks. `kept`: those that are pieces, in the order of the manifest; other tensors are
    `is_whole`, in their `first` cell."""

    def __init__(self, shards: _Shards, plans: Sequence[ShardPlan], digests: Sequence[ShardDigests]) -> None:
        self._boxes = shards.boxes
        self.tensor = np.repeat(shards.rows.tensor, shards.counts)
        self.box = np.concatenate(
            [np.array([shards.number[one] for one in plan.boxes], np.int64)[plan.columns.box] for plan in plans]
        )
        num = len(shards.rows.names)
        is_empty = np.array([nbytes == 0 for *_, nbytes in shards.forms()], np.bool_)
        self.is_whole = (np.bincount(self.tensor, minlength=num) == 1) | is_empty
        self.first = first_of(self.tensor, num)
        nbytes = np.concatenate([plan.columns.nbytes for plan in plans])
        kept = np.flatnonzero(~self.is_whole[self.tensor] & (nbytes > 0))
        self.kept = kept[np.argsort(shards.key(self.tensor[kept], self.box[kept]), kind="stable")]
        self.digests = np.concatenate([digest_rows(one.cells) for one in digests])

    def pieces(self, kept: Ints, bucket: Ints, offset: Ints, chosen: NDArray[np.bool_] | None = None) -> PieceColumns:
        """The columns of these cells, all those of the `chosen` tensors (default: all), given where each cell lies."""
        is_here = np.ones(len(self.is_whole), np.bool_) if chosen is None else chosen
        cut = np.flatnonzero(~self.is_whole & is_here)
        counts = np.bincount(self.tensor[kept], minlength=len(is_here))[cut]
        layout = np.full(len(is_here), -1)
        layout[cut], first = numbered_runs(self.box[kept], counts)
        begin = ends_of(counts)[0]
        layouts = [self.box[kept][begin[at] : begin[at] + counts[at]].tolist() for at in first.tolist()]
        return PieceColumns(
            tuple(tuple(self._boxes[at] for at in one) for one in layouts), bytes_of(layout[is_here]),
            bytes_of(bucket[kept]), bytes_of(offset[kept], 8), self.digests[kept].tobytes(),
        )  # fmt: skip


def _numbered(
    ranks: Iterable[tuple[Ints, Ints, Sequence[int]]],
) -> tuple[Ints, Ints, tuple[int, ...], tuple[int, ...]]:
    """The buckets and offsets of the cells of all ranks, given those of each rank and its buckets; the sizes of all
    buckets, and their holders."""
    rows = list(ranks)
    first = itertools.accumulate((len(buckets) for *_, buckets in rows), initial=0)
    bucket = np.concatenate([one + number for (one, *_), number in zip(rows, first, strict=False)])
    sizes = tuple(size for *_, buckets in rows for size in buckets)
    holders = tuple(rank for rank, (*_, buckets) in enumerate(rows) for _ in buckets)
    return bucket, np.concatenate([offset for _, offset, _ in rows]), sizes, holders
