"""Who gives what: the shards of a trainer's ranks, cut along what receivers want, and where the cells lie.

    shards   what each rank holds; one holder is picked for each box that several have
    cells    each shard along the edges of the wants (`boxes.cut`)
    buckets  cells of one holder that the same tables of wants take lie together: nobody fetches what only others want

The plan is a pure function of shards and wants, and linear in the number of cells. Tensors whose shards and wants are
the same, but for names, are cut once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.codec.layout import ALIGN
from transfer_queue.errors import InvalidInput, ProtocolError, ShapeMismatch
from transfer_queue.memory.bytes import Ints
from transfer_queue.structs import decodable
from transfer_queue.weights.version.boxes import MAX_TAKERS, Box, cut, do_tile, whole
from transfer_queue.weights.version.columns import (
    bytes_of,
    column_of,
    ends_of,
    numbered,
    numbered_runs,
    order_of,
    spread,
)
from transfer_queue.weights.version.packing import BUCKET_NBYTES
from transfer_queue.weights.version.shard_table import ShardRows, ShardTable
from transfer_queue.weights.version.sharded import TensorShard

Wants: TypeAlias = "Mapping[str, tuple[Box, ...]]"  # by name; a tensor that is not there is not wanted


class CellPlace(NamedTuple):
    """Where a cell lies: in which bucket of its rank, and how many bytes."""

    box: Box
    bucket: int
    offset: int
    nbytes: int


class CellColumns(NamedTuple):
    """Of the cells of a plan, one shard's after the other's: which of its boxes, and the rest as `CellPlace`."""

    box: Ints
    bucket: Ints
    offset: Ints
    nbytes: Ints


@decodable
class ShardPlan(msgspec.Struct, frozen=True, dict=True):
    """For each shard of one rank, in its order, where its cells lie: nowhere, when another rank gives that box.

    `buckets`: their sizes. `num_cells` of each shard and `cells` are columns; `boxes` are those that are there.
    """

    buckets: tuple[int, ...]
    boxes: list[Box]
    num_cells: bytes
    cells: tuple[bytes, bytes, bytes, bytes]

    @staticmethod
    def of(places: Iterable[Sequence[CellPlace]], buckets: Sequence[int]) -> ShardPlan:
        rows = list(places)
        box, boxes = numbered(place.box for row in rows for place in row)
        rest = np.array([place[1:] for row in rows for place in row], np.int64).reshape(-1, 3).T
        counts = np.array([len(row) for row in rows], np.int64)
        return ShardPlan.made(buckets, boxes, counts, CellColumns(box, *rest))

    @staticmethod
    def made(buckets: Sequence[int], boxes: list[Box], counts: Ints, cells: CellColumns) -> ShardPlan:
        box, bucket, offset, nbytes = cells
        data = (bytes_of(box), bytes_of(bucket), bytes_of(offset, 8), bytes_of(nbytes, 8))
        return ShardPlan(tuple(buckets), boxes, bytes_of(counts), data)

    def check(self, num_shards: int) -> None:
        """`ProtocolError` when it is not one for so many shards, as it came from elsewhere."""
        try:
            counts, (box, bucket, offset, nbytes) = self.counts, self.columns
        except ValueError as error:
            raise ProtocolError(f"not a plan: {error}") from None
        fits = len(counts) == num_shards and {len(bucket), len(offset), len(nbytes), int(counts.sum())} == {len(box)}
        if not fits or (len(counts) and counts.min() < 0):
            raise ProtocolError(f"a plan of {len(counts)} shards and {len(box)} cells, for {num_shards} shards")
        if not len(box):
            return
        is_known = 0 <= box.min() <= box.max() < len(self.boxes) and 0 <= bucket.min() <= bucket.max() < len(
            self.buckets
        )
        sizes = np.array(self.buckets, np.int64)
        if not is_known or min(offset.min(), nbytes.min()) < 0 or (offset > sizes[bucket] - nbytes).any():
            raise ProtocolError("a plan has cells that are nowhere")

    @functools.cached_property
    def counts(self) -> Ints:
        return column_of(self.num_cells).astype(np.int64)

    @functools.cached_property
    def columns(self) -> CellColumns:
        box, bucket, offset, nbytes = self.cells
        return CellColumns(
            column_of(box).astype(np.int64), column_of(bucket).astype(np.int64), column_of(offset, 8),
            column_of(nbytes, 8),
        )  # fmt: skip

    @property
    def places(self) -> Iterator[tuple[CellPlace, ...]]:
        """Of each shard; made as they are asked for."""
        box, *rest = (column.tolist() for column in self.columns)
        cells = (CellPlace(self.boxes[at], *place) for at, *place in zip(box, *rest, strict=True))
        return (tuple(itertools.islice(cells, count)) for count in self.counts.tolist())


def plan_pieces(
    tables: Sequence[Iterable[TensorShard]], wants: Sequence[Wants] = (), bucket_nbytes: int = BUCKET_NBYTES
) -> list[ShardPlan]:
    """Who gives what, for the shards of each rank. Boxes that nobody wants are given all the same: others may come.

    `ShapeMismatch` when the shards of a tensor are not its elements, each once but for equal boxes, or ranks disagree
    on its dtype or shape.
    """
    if len(wants) > MAX_TAKERS:
        raise InvalidInput(f"{len(wants)} tables of wants, at most {MAX_TAKERS}")
    rows = ShardRows([ShardTable.of(table) for table in tables])
    slots = _Slots(rows, wants)
    counts = np.where(_given(rows, slots), slots.num_cells[slots.of_row], 0)
    cells = spread(slots.first_cell[slots.of_row], counts)
    ends = np.concatenate([[0], np.cumsum(counts)])
    found = []
    for begin, end in itertools.pairwise(rows.begin):
        mine = cells[ends[begin] : ends[end]]
        buckets, bucket, offset = _filled(slots.takers[mine], slots.nbytes[mine], bucket_nbytes)
        columns = CellColumns(slots.box[mine], bucket, offset, slots.nbytes[mine])
        found.append(ShardPlan.made(buckets, slots.boxes, counts[begin:end], columns))
    return found


class _Slots:
    """Tensors of which ranks hold the same, and of which the same is wanted, have one slot for each of their shards:
    all that is asked of boxes is asked of slots. `of_row`: the slot of each row.

    The cells of slot n are `num_cells[n]` from `first_cell[n]` on, in columns: the box (a number in `boxes`), who takes
    it, bytes. `order` has the rows by tensor, `num_rows` how many each one has.
    """

    def __init__(self, rows: ShardRows, wants: Sequence[Wants]) -> None:
        num = len(rows.names)
        self.order = np.argsort(rows.tensor, kind="stable")
        self.num_rows = np.bincount(rows.tensor, minlength=num)
        wanted = [numbered(table.get(name, ()) for name in rows.names) for table in wants]
        asked, first_asked = numbered_runs(np.array([one for one, _ in wanted]).T.ravel(), np.full(num, len(wants)))
        boxes = [tuple(kinds[one[at]] for one, kinds in wanted) for at in first_asked.tolist()]
        held = rows.kind[self.order] * max(1, len(boxes)) + np.repeat(asked, self.num_rows)
        self.group, first = numbered_runs(held, self.num_rows)  # of each tensor; the first one of each
        self._cut(rows, first, [boxes[at] for at in asked[first].tolist()])

    def _cut(self, rows: ShardRows, first: Ints, asked: Sequence[tuple[tuple[Box, ...], ...]]) -> None:
        begin = ends_of(self.num_rows)[0]
        self.first_slot = ends_of(self.num_rows[first])[0]  # of each group
        self.of_row = np.empty(len(rows.tensor), np.int64)
        self.of_row[self.order] = spread(self.first_slot[self.group], self.num_rows)
        self.copies: list[list[tuple[int, ...]]] = []  # of each group, its shards with equal boxes
        num_cells, cells = [], []
        for tensor, wants in zip(first.tolist(), asked, strict=True):
            here = self.order[begin[tensor] : begin[tensor] + self.num_rows[tensor]]
            kinds = [rows.kinds[at] for at in rows.kind[here].tolist()]
            groups = _copies(kinds[0].shape, tuple(kind.box for kind in kinds))
            if groups is None:
                raise ShapeMismatch(f"the shards of {rows.names[tensor]!r} are not its elements, each of them once")
            self.copies.append([group for group in groups if len(group) > 1])
            for kind in kinds:
                found = cut(kind.box, wants)
                itemsize = torch_dtype(kind.dtype).itemsize
                num_cells.append(len(found))
                cells += [(cell.box, cell.takers, cell.box.size * itemsize) for cell in found]
        self.num_cells: Ints = np.array(num_cells, np.int64)
        self.first_cell = ends_of(self.num_cells)[0]
        self.box, self.boxes = numbered(box for box, _, _ in cells)
        self.takers: Ints = np.array([takers for _, takers, _ in cells], np.int64)
        self.nbytes: Ints = np.array([nbytes for _, _, nbytes in cells], np.int64)


def _given(rows: ShardRows, slots: _Slots) -> NDArray[np.bool_]:
    """Which rows are given. Of equal boxes, those of the rank that has the least to give so far."""
    is_lone = np.ones(len(slots.num_cells), np.bool_)
    for first, copies in zip(slots.first_slot.tolist(), slots.copies, strict=True):
        is_lone[[first + at for group in copies for at in group]] = False
    given = is_lone[slots.of_row]
    sizes = rows.nbytes[rows.kind]
    load = [int(sizes[a:b][given[a:b]].sum()) for a, b in itertools.pairwise(rows.begin)]
    has_copies = np.array([bool(copies) for copies in slots.copies], np.bool_)
    copied = np.flatnonzero(has_copies[slots.group])
    order, begin = slots.order.tolist(), ends_of(slots.num_rows)[0][copied].tolist()
    rank_of = np.repeat(np.arange(len(load)), np.diff(rows.begin)).tolist() if begin else []
    for first, group in zip(begin, slots.group[copied].tolist(), strict=True):  # after those without a choice
        for places in slots.copies[group]:
            row = min((order[first + at] for at in places), key=lambda row: load[rank_of[row]])
            given[row] = True
            load[rank_of[row]] += int(sizes[row])
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


def _filled(takers: Ints, nbytes: Ints, bucket_nbytes: int) -> tuple[list[int], Ints, Ints]:
    """Fill buckets for one rank: cells with the same takers together, in their order. The sizes of the buckets, and of
    each cell the bucket and the offset there."""
    order = order_of(takers)
    edges = [0, *(np.flatnonzero(np.diff(takers[order])) + 1).tolist(), len(order)]
    opened: list[tuple[int, Ints, int]] = []  # the first cell, all of them, bytes
    offset = np.empty(len(order), np.int64)
    for begin, end in itertools.pairwise(edges):
        cells = order[begin:end]
        start, ends = ends_of(-(-nbytes[cells] // ALIGN) * ALIGN)
        ends = start + nbytes[cells]
        at = 0
        while at < len(cells):
            # The next bucket begins where this one would be too full, unless nothing is in it so far.
            first = int(start[at])
            after = max(np.searchsorted(ends, first + bucket_nbytes, "right"), np.searchsorted(start, first, "right"))
            offset[cells[at:after]] = start[at:after] - first
            opened.append((int(cells[at]), cells[at:after], int(ends[after - 1]) - first))
            at = int(after)
    opened.sort(key=lambda one: one[0])
    bucket = np.empty(len(order), np.int64)
    for number, (_, cells, _) in enumerate(opened):
        bucket[cells] = number
    return [size for *_, size in opened], bucket, offset
