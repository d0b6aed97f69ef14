"""What the receivers of a trainer have, packed, and what leads from there to its weights now.

    anchor    the cells of the last version that this rank gives, in host memory, in the buckets of their plan
    changes   what the next version has instead: of each cell nothing, the elements that changed, or all of it

Nothing of the anchor is on the trainer's device, and it is all that is kept: it follows the changes that were taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights.version.boxes import Box, relative, run_of
from transfer_queue.weights.version.delta import Difference, Patch, difference_of, in_steps, steps_from, units_from
from transfer_queue.weights.version.device import ready, wait_until
from transfer_queue.weights.version.digest import digest_of
from transfer_queue.weights.version.pieces import copy_box, pack_shards, read_shards
from transfer_queue.weights.version.plans import CellPlace, ShardPlan
from transfer_queue.weights.version.sealing import ShardDigests
from transfer_queue.weights.version.shard_table import ShardTable
from transfer_queue.weights.version.sources import ReadThrough
from transfer_queue.weights.version.stored_cells import ITSELF, UNCHANGED, StoredCells
from transfer_queue.weights.version.tensor_memory import on_host, room
from transfer_queue.weights.version.threads import AHEAD_NBYTES, Ahead, helpers_for

Change: TypeAlias = "Patch | Bytes"  # what a cell has instead


class CellChanges:
    """What leads from an anchor to the weights as they were read: `buckets` has it packed, as `stored` says. `digests`
    are those of all shards and cells now."""

    def __init__(self, where: ShardPlan, found: Sequence[tuple[str, list[CellChange]]]) -> None:
        cells = [cell for _, row in found for cell in row]
        self.digests = ShardDigests.of(
            [digest for digest, _ in found], [[one.digest for one in row] for _, row in found]
        )
        nbytes = [one.num_stored for one in cells]
        self.stored = StoredCells.of(nbytes, [None if one.found is None else digest_of(one.found) for one in cells])
        places = self.stored.places(where)
        self.buckets = [room(size) for size in places.buckets]
        self._cells = [(at, cells[at].change) for at in np.flatnonzero(nbytes).tolist()]
        into = [bucket.numpy() for bucket in self.buckets]
        for at, change in self._cells:
            data = cells[at].found if isinstance(change, Patch) else change
            assert data is not None
            start = int(places.offset[at])
            np.copyto(into[places.bucket[at]][start : start + data.nbytes], data)

    def __iter__(self) -> Iterator[tuple[int, Change]]:
        """Of the cells that changed: the number in the plan, and the change."""
        return iter(self._cells)


class CellChange(NamedTuple):
    """`digest` of the cell now. `found`: the changed elements as they are stored. `change`: an empty patch, if it has
    none."""

    digest: str
    change: Change
    found: Bytes | None

    @property
    def num_stored(self) -> int:
        if not isinstance(self.change, Patch):
            return ITSELF
        return UNCHANGED if self.found is None else self.found.nbytes


class VersionAnchor:
    """The buckets of a plan for the shards of `table`; they are this object's to write. For one thread at a time."""

    def __init__(self, table: ShardTable, where: ShardPlan, buckets: list[torch.Tensor]) -> None:
        self.table, self.where, self.buckets = table, where, buckets

    @staticmethod
    def pack(
        table: ShardTable, tensors: Iterator[tuple[str, torch.Tensor]], where: ShardPlan
    ) -> tuple[VersionAnchor, ShardDigests]:
        """As `pieces.pack_shards`, into buckets that are made for it."""
        with ReadThrough(tensors) as parts:
            buckets = [room(nbytes) for nbytes in where.buckets]
            digests = pack_shards(table, parts, where, buckets)
        return VersionAnchor(table, where, buckets), digests

    def fits(self, table: ShardTable, where: ShardPlan) -> bool:
        """Whether shards and plan are the same still."""
        return table.key == self.table.key and where == self.where

    def compare(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> CellChanges:
        """Read the shards of the table, in this thread, and compare them in others. `ShapeMismatch` when they are other
        ones."""
        old = [bucket.numpy() for bucket in self.buckets]
        with ReadThrough(tensors) as parts, helpers_for(sum(self.where.buckets), "tq-delta") as helpers:
            comparing: Ahead[tuple[str, list[CellChange]]] = Ahead(helpers, AHEAD_NBYTES)
            for shard, tensor, places in read_shards(self.table, parts, self.where):
                cells = [old[place.bucket][place.offset : place.offset + place.nbytes] for place in places]
                comparing.add(tensor.nbytes, _compared, shard.box, tensor, ready(tensor), places, cells)
            return CellChanges(self.where, comparing.end())

    def follow(self, changes: CellChanges, *, copy: bool = False) -> None:
        """These were taken. `copy`: the buckets become new ones, for somebody may read those that were there."""
        if copy:
            self.buckets = [room(bucket.nbytes).copy_(bucket) for bucket in self.buckets]
        into = [bucket.numpy() for bucket in self.buckets]
        cells = self.where.columns
        with helpers_for(sum(self.where.buckets), "tq-delta") as helpers:
            list(helpers.map(lambda one: _write(into, cells.bucket, cells.offset, cells.nbytes, *one), changes))


def _write(into: Sequence[Bytes], bucket: Ints, offset: Ints, nbytes: Ints, at: int, change: Change) -> None:
    start = int(offset[at])
    place = into[int(bucket[at])][start : start + int(nbytes[at])]
    if isinstance(change, Patch):
        place.view(change.values.dtype)[change.indices] = change.values
    else:
        np.copyto(place, change)


def _compared(
    shard: Box, tensor: torch.Tensor, written: torch.Event | None, places: Sequence[CellPlace], old: Iterable[Bytes]
) -> tuple[str, list[CellChange]]:
    """The digest of a shard, and what changed in its cells."""
    if written is not None:
        wait_until(written, tensor.device)
    itemsize = tensor.element_size()
    if len(places) == 1 and places[0].box == shard:
        (before,) = old
        one = difference_of(units_from(before, itemsize), in_steps(tensor))
        return one.digest, [_change(one, tensor)]
    tensor = on_host(tensor)
    found = []
    for place, before in zip(places, old, strict=True):
        run = run_of(relative(place.box, shard), shard.lengths)
        if run is None:
            data = room(place.nbytes).numpy()
            copy_box(tensor, shard, place.box, data)
        else:
            data = byte_view(tensor).numpy()[run.start * itemsize : run.stop * itemsize]
        one = difference_of(units_from(before, itemsize), steps_from(data, itemsize))
        found.append(_change(one, torch.from_numpy(data)))
    return digest_of(byte_view(tensor).numpy()), found


def _change(found: Difference, tensor: torch.Tensor) -> CellChange:
    if found.patch is not None:
        return CellChange(found.digest, found.patch, found.stored)
    data = byte_view(on_host(tensor)).numpy()
    return CellChange(found.digest, data.copy() if tensor.device.type == "cpu" else data, None)
