"""One open update: which buckets have arrived, verified, in memory of its own. Nothing here touches a model."""

from __future__ import annotations

import threading

import torch

from transfer_queue.errors import DigestMismatch, InvalidInput, StaleBase
from transfer_queue.weights import delta, device
from transfer_queue.weights.digest import ALGO, Buffer, copy_and_digest, digest_of, digest_tensor, host_bytes
from transfer_queue.weights.manifest import Manifest, TensorSpec
from transfer_queue.weights.packing import unpack
from transfer_queue.weights.room import room
from transfer_queue.weights.targets import Target, Tensors


class Staging:
    """The buckets of one manifest. Thread-safe: several threads may stage at once."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._specs: list[list[TensorSpec]] = [[] for _ in manifest.buckets]
        for spec in manifest.tensors:
            self._specs[spec.bucket].append(spec)
        self._lock = threading.Lock()
        self._buckets: dict[int, torch.Tensor] = {}

    @property
    def has_differences(self) -> bool:
        return any(spec.delta for spec in self.manifest.tensors)

    @property
    def missing(self) -> list[int]:
        with self._lock:
            return [index for index in range(len(self._specs)) if index not in self._buckets]

    def stage(self, index: int, data: Buffer, lend: bool = False) -> None:
        """Take a bucket; one that is here already is ignored. `DigestMismatch` when a byte of a tensor is wrong."""
        if not 0 <= index < len(self._specs):
            raise InvalidInput(f"bucket {index} of {len(self._specs)}")
        with self._lock:
            if index in self._buckets:
                return
        nbytes, algo = self.manifest.buckets[index], self.manifest.algo
        if algo != ALGO or (isinstance(data, torch.Tensor) and data.device.type != "cpu"):
            there = device.staged(data, nbytes, self._specs[index], algo, lend)
            with self._lock:
                self._buckets.setdefault(index, there)
            return
        source = host_bytes(data)
        if source.nbytes != nbytes:
            raise DigestMismatch(f"bucket {index} came with {source.nbytes} bytes instead of {nbytes}")
        place = torch.from_numpy(source) if lend else room(nbytes)
        into = place.numpy()
        for spec in self._specs[index]:
            span = slice(spec.offset, spec.offset + spec.stored.nbytes)
            found = digest_of(into[span]) if lend else copy_and_digest(into[span], source[span])
            if found != spec.stored.digest:
                raise DigestMismatch(f"bucket {index}: the bytes of {spec.name!r} are not those of the manifest")
        with self._lock:
            self._buckets.setdefault(index, place)

    def tensors(self, target: Target) -> dict[str, torch.Tensor]:
        """Every name of the manifest, aliases too, with its new value. Differences are applied to copies of what lives.

        `StaleBase` when the result is not the described one: the live weights were changed by somebody else.
        """
        found: dict[str, torch.Tensor] = {}
        bases = target.bases() if self.has_differences else {}
        for index, specs in enumerate(self._specs):
            parts = unpack(self._buckets[index], specs)
            found.update({spec.name: self._whole(spec, parts[spec.name], bases) for spec in specs})
        found.update({alias: found[name] for alias, name in self.manifest.aliases.items()})
        return found

    def _whole(self, spec: TensorSpec, part: torch.Tensor, bases: Tensors) -> torch.Tensor:
        if self.manifest.kind != "delta":
            return part
        if spec.delta is None:
            return part.clone()  # a small tensor would keep its bucket in memory
        whole = bases[spec.name].detach().cpu().clone(memory_format=torch.contiguous_format)
        delta.decode(part, whole)
        if digest_tensor(whole) != spec.digest:
            raise StaleBase(f"{spec.name!r} is not what it was when its version was installed: send a full version")
        return whole
