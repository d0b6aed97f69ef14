"""Versions of which tensors are moved in pieces: packing them by their plans, and what a receiver has of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

from transfer_queue.errors import ShapeMismatch
from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights.version.boxes import Box, common, do_tile, relative, run_of, whole, within
from transfer_queue.weights.version.columns import ends_of, numbered, numbered_runs, spread
from transfer_queue.weights.version.device import ready, wait_until
from transfer_queue.weights.version.digest import STEP_NBYTES, copy_and_digest, digest_of
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.weights.version.packing import copy_written, read_to_end
from transfer_queue.weights.version.plans import CellPlace, ShardPlan, Wants
from transfer_queue.weights.version.sealing import ShardDigests
from transfer_queue.weights.version.sharded import TensorShard
from transfer_queue.weights.version.tensor_memory import on_host
from transfer_queue.weights.version.threads import AHEAD_NBYTES, Ahead, helpers_for

_NUMPY: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def pack_shards(
    table: Iterable[TensorShard],
    tensors: Iterator[tuple[str, torch.Tensor]],
    where: ShardPlan,
    buckets: Sequence[torch.Tensor],
) -> ShardDigests:
    """Bring the cells to their places in flat uint8 CPU tensors. The shards are read in this thread, in their order.

    Each is contiguous, on any device. `ShapeMismatch` when one is not as the table says.
    """
    into = [bucket.numpy() for bucket in buckets]
    with helpers_for(sum(where.buckets), "tq-pack") as helpers:
        packing: Ahead[tuple[str, list[str]]] = Ahead(helpers, AHEAD_NBYTES)
        for shard, tensor, places in read_shards(table, tensors, where):
            targets = [into[place.bucket][place.offset : place.offset + place.nbytes] for place in places]
            packing.add(tensor.nbytes, _pack_shard, shard.box, tensor, ready(tensor), places, targets)
        found = packing.end()
    return ShardDigests.of([digest for digest, _ in found], [cells for _, cells in found])


def read_shards(
    table: Iterable[TensorShard], tensors: Iterator[tuple[str, torch.Tensor]], where: ShardPlan
) -> Iterator[tuple[TensorShard, torch.Tensor, tuple[CellPlace, ...]]]:
    """Each shard, its tensor, and where its cells lie. `ShapeMismatch` when the source gives something else."""
    for shard, places in zip(table, where.places, strict=True):
        name, tensor = next(tensors, ("no tensor", torch.empty(0)))
        if (name, tensor.dtype, tuple(tensor.shape)) != (shard.name, shard.dtype, shard.box.lengths):
            raise ShapeMismatch(f"the source gave {name!r} {tensor.dtype} {list(tensor.shape)} instead of {shard}")
        yield shard, tensor, places
    read_to_end(tensors)


def _pack_shard(
    shard: Box, tensor: torch.Tensor, written: torch.Event | None, places: Sequence[CellPlace], into: Sequence[Bytes]
) -> tuple[str, list[str]]:
    if len(places) == 1 and places[0].box == shard:
        digest = copy_written(tensor, written, into[0])
        return digest, [digest]
    if written is not None:
        wait_until(written, tensor.device)
        tensor = on_host(tensor)
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
    """The buckets that have something of what is wanted, under whichever name. Tensors that lie alike and are wanted
    alike are looked at once."""
    named = by_name(wants, manifest.aliases)
    parts = manifest.parts
    asked, boxes = numbered(named.get(spec.name, ()) for spec in manifest.tensors)
    lying, _ = numbered(zip(parts.layout.tolist(), (spec.shape for spec in manifest.tensors), strict=True))
    kind, first = numbered_runs(np.stack([lying, asked], axis=1), np.full(len(asked), 2))
    hits = [
        [any(common(part, box) is not None for box in boxes[asked[at]]) for part in parts.boxes_of(at)]
        for at in first.tolist()
    ]
    begin = ends_of(np.array([len(one) for one in hits], np.int64))[0]
    is_hit = np.array([hit for one in hits for hit in one], np.bool_)[spread(begin[kind], parts.counts)]
    return np.unique(parts.bucket[is_hit & ~parts.is_unchanged]).tolist()


def by_name(wants: Wants, aliases: Mapping[str, str]) -> Wants:
    """With what is wanted under an alias under the name."""
    found = {name: boxes for name, boxes in wants.items() if name not in aliases}
    for alias, name in aliases.items():
        boxes = wants.get(alias, ())
        found[name] = tuple(dict.fromkeys((*found.get(name, ()), *boxes)))
    return {name: boxes for name, boxes in found.items() if boxes}
