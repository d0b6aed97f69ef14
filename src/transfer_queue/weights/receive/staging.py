"""One open update: which buckets have arrived, verified, in memory of its own. Nothing here touches a model."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from transfer_queue.errors import DigestMismatch, InvalidInput
from transfer_queue.weights.receive.results import Results
from transfer_queue.weights.receive.targets import Staged, Target
from transfer_queue.weights.version import device
from transfer_queue.weights.version.digest import ALGO, Buffer, copy_and_digest, digest_of, host_bytes
from transfer_queue.weights.version.manifest import BucketPart, Manifest
from transfer_queue.weights.version.packing import views
from transfer_queue.weights.version.pieces import Pieces
from transfer_queue.weights.version.tensor_memory import room


class Staging:
    """The buckets of one manifest that are `wanted` (None: all). Thread-safe: several threads may stage at once.

    A bucket stays where it came, or, where that is a GPU and `on_host`, on the host."""

    def __init__(self, manifest: Manifest, wanted: Iterable[int] | None = None, on_host: bool = False) -> None:
        self.manifest = manifest
        self._on_host = on_host
        self._parts = manifest.by_bucket
        self._wanted = list(range(len(self._parts)) if wanted is None else wanted)
        self._lock = threading.Lock()
        self._buckets: dict[int, torch.Tensor] = {}

    @property
    def missing(self) -> list[int]:
        with self._lock:
            return [index for index in self._wanted if index not in self._buckets]

    def bucket(self, index: int) -> torch.Tensor | None:
        """It, if it is here."""
        with self._lock:
            return self._buckets.get(index)

    def stage(self, index: int, data: Buffer, lend: bool, vouched: bool) -> None:
        """Take a bucket; one that is here already is ignored. `DigestMismatch` when a byte of a tensor is wrong."""
        if not 0 <= index < len(self._parts):
            raise InvalidInput(f"bucket {index} of {len(self._parts)}")
        with self._lock:
            if index in self._buckets:
                return
        nbytes, algo = self.manifest.buckets[index], self.manifest.algo
        if algo != ALGO or (isinstance(data, torch.Tensor) and data.device.type != "cpu"):
            there = device.staged(data, nbytes, self._parts[index], algo, lend, self._on_host)
            with self._lock:
                self._buckets.setdefault(index, there)
            return
        source = host_bytes(data)
        if source.nbytes != nbytes:
            raise DigestMismatch(f"bucket {index} came with {source.nbytes} bytes instead of {nbytes}")
        place = torch.from_numpy(source) if lend else room(nbytes)
        into = place.numpy()
        for part in () if lend and vouched else self._parts[index]:
            span = slice(part.offset, part.offset + part.nbytes)
            found = digest_of(into[span]) if lend else copy_and_digest(into[span], source[span])
            if found != part.digest:
                raise DigestMismatch(f"bucket {index}: the bytes of {part.name!r} are not those of the manifest")
        with self._lock:
            self._buckets.setdefault(index, place)

    def parts(self) -> list[tuple[BucketPart, torch.Tensor]]:
        """All that is here, each part of a bucket as a view of it."""
        return [
            (part, view)
            for index, bucket in sorted(self._buckets.items())
            for part, view in zip(self._parts[index], views(bucket, self._parts[index]), strict=True)
        ]

    def tensors(self, target: Target) -> dict[str, Staged | Pieces]:
        """What was wanted, by every name, aliases too; differences are applied to copies of what lives, or, where the
        target takes them, only checked. What is in pieces is put together, or, where the target takes them, left.

        `StaleBase` when the result is not the described one: the live weights were changed by somebody else.
        """
        places = self.parts()
        found: dict[str, Staged | Pieces] = {}
        if self.manifest.kind == "delta":
            found.update(Results(self.manifest, places, target).tensors())
        else:
            found = {part.name: view for part, view in places if part.piece is None}
            found |= self._pieces(places, target.takes_pieces)
        aliases = self.manifest.aliases.items()
        return found | {alias: found[name] for alias, name in aliases if name in found}

    def _pieces(self, places: list[tuple[BucketPart, torch.Tensor]], takes_pieces: bool) -> dict[str, Staged | Pieces]:
        found: dict[str, Pieces] = {}
        for part, view in places:
            if part.piece is not None:
                held = found.setdefault(part.name, Pieces(view.dtype, part.spec.shape, []))
                held.parts.append((part.box, view))
        if takes_pieces:
            return dict(found)
        return {name: pieces.whole() for name, pieces in found.items()}
