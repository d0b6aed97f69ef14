"""One open update: which buckets have arrived, verified, in memory of its own. Nothing here touches a model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from transfer_queue.errors import DigestMismatch, InvalidInput, StaleBase
from transfer_queue.weights.receive.targets import Staged, Target, Tensors
from transfer_queue.weights.version import delta, device
from transfer_queue.weights.version.digest import ALGO, Buffer, copy_and_digest, digest_of, host_bytes
from transfer_queue.weights.version.manifest import Manifest, TensorSpec
from transfer_queue.weights.version.packing import NUM_THREADS, unpack
from transfer_queue.weights.version.tensor_memory import room


class Staging:
    """The buckets of one manifest. Thread-safe: several threads may stage at once."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._specs = manifest.by_bucket
        self._lock = threading.Lock()
        self._buckets: dict[int, torch.Tensor] = {}

    @property
    def has_differences(self) -> bool:
        return any(spec.delta for spec in self.manifest.tensors)

    @property
    def missing(self) -> list[int]:
        with self._lock:
            return [index for index in range(len(self._specs)) if index not in self._buckets]

    def stage(self, index: int, data: Buffer, lend: bool, vouched: bool) -> None:
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
        for spec in () if lend and vouched else self._specs[index]:
            span = slice(spec.offset, spec.offset + spec.stored.nbytes)
            found = digest_of(into[span]) if lend else copy_and_digest(into[span], source[span])
            if found != spec.stored.digest:
                raise DigestMismatch(f"bucket {index}: the bytes of {spec.name!r} are not those of the manifest")
        with self._lock:
            self._buckets.setdefault(index, place)

    def tensors(self, target: Target) -> dict[str, Staged]:
        """Every name of the manifest, aliases too, with its new value; differences are applied to copies of what lives,
        or, where the target takes them, only checked.

        `StaleBase` when the result is not the described one: the live weights were changed by somebody else.
        """
        bases = target.bases() if self.has_differences else {}
        places = [
            (spec, part)
            for index, specs in enumerate(self._specs)
            for spec, part in zip(specs, unpack(self._buckets[index], specs).values(), strict=True)
        ]
        if not self.has_differences:
            found: dict[str, Staged] = {spec.name: self._value(spec, part, bases, target) for spec, part in places}
        else:
            with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tq-stage") as helpers:
                values = helpers.map(lambda one: self._value(one[0], one[1], bases, target), places)
                found = {spec.name: value for (spec, _), value in zip(places, values, strict=True)}
        found.update({alias: found[name] for alias, name in self.manifest.aliases.items()})
        return found

    def _value(self, spec: TensorSpec, part: torch.Tensor, bases: Tensors, target: Target) -> Staged:
        if self.manifest.kind != "delta":
            return part
        if spec.delta is None:
            return part.clone()  # a small tensor would keep its bucket in memory
        live = bases[spec.name].detach()
        base = live.cpu().contiguous()
        patch = delta.read(part, base)
        in_place = target.takes_patches and base.data_ptr() == live.data_ptr()
        whole = None if in_place else room(base.nbytes).view(base.dtype).reshape(base.shape)
        if patch.result(base, whole) != spec.digest:
            raise StaleBase(f"{spec.name!r} is not what it was when its version was installed: send a full version")
        return patch if whole is None else whole
