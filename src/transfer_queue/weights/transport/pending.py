"""Versions that a trainer is about to send, and what it says of those that were taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from transfer_queue.structs import decodable
from transfer_queue.weights.version.delta import DeltaSource
from transfer_queue.weights.version.digest import ALGO
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.weights.version.packing import Plan, seal
from transfer_queue.weights.version.sources import TensorMeta, WeightSource
from transfer_queue.weights.version.tensor_memory import write


class PendingAdapter(NamedTuple):
    """What makes a version one of the adapter `label`: for the weights with `base_root`, or for any."""

    label: str
    base_root: str | None
    meta: dict[str, Any]


class PendingBase:
    """An earlier version with its weights: for differences, and as a source for receivers that lack theirs."""

    def __init__(self, manifest: Manifest, source: WeightSource) -> None:
        self.manifest = manifest
        self.digests = {spec.name: spec.digest for spec in manifest.tensors}
        self.weights = {name: tensor.clone() for name, tensor in source.tensors()}
        self._specs = source.specs()
        self._aliases = source.aliases()

    def follow(self, manifest: Manifest, source: WeightSource) -> None:
        """These are the weights now. Copies what changed."""
        changed = {spec.name for spec in manifest.tensors}
        for name, tensor in source.tensors():
            if name in changed:
                write(self.weights[name], tensor.detach())
        self.manifest = manifest
        self.digests.update((spec.name, spec.digest) for spec in manifest.tensors)

    def specs(self) -> list[TensorMeta]:
        return self._specs

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def aliases(self) -> dict[str, str]:
        return self._aliases


class PendingVersion:
    """A version about to be packed."""

    def __init__(
        self,
        source: WeightSource,
        version: int,
        run_id: str,
        base: PendingBase | None = None,
        adapter: PendingAdapter | None = None,
    ) -> None:
        self.version = version
        self.run_id = run_id
        self.adapter = adapter
        self.read = source  # what the version was read from
        self.label = adapter.label if adapter else ""
        self.is_whole = base is None and adapter is None
        self._base = base
        self._delta = DeltaSource(base.weights, base.manifest.root, source, base.digests) if base else None
        self.source: WeightSource = self._delta or source

    def seal(self, where: Plan, digests: Mapping[str, str], algo: str = ALGO) -> Manifest:
        if self._delta is None or self._base is None:
            label, base_root, meta = self.adapter or PendingAdapter("", None, {})
            return seal(
                where, digests, version=self.version, epoch=self.run_id, aliases=self.source.aliases(),
                kind="adapter" if self.adapter else "full", base_root=base_root, label=label, meta=meta,
                algo=algo,
            )  # fmt: skip
        base = self._base.manifest.version
        return self._delta.manifest(where, digests, version=self.version, epoch=self.run_id, base=base)


@decodable
class SyncReport(msgspec.Struct, frozen=True):
    """A version that every receiver committed. `pack_s`: until it could be fetched; `update_s`: until all had verified
    it; `commit_s`: until all had committed. `outdated`: adapters sent before that were for the weights it replaced.
    `missed`: servers of a plain client that did not answer in time, and why; they are brought up with the next one."""

    version: int
    run_id: str
    root: str
    kind: str
    nbytes: int
    pack_s: float
    update_s: float
    commit_s: float
    outdated: tuple[str, ...] = ()
    missed: dict[str, str] = {}

    @property
    def epoch(self) -> str:
        """The run, by its older name."""
        return self.run_id


def label_of(manifest: Manifest) -> str:
    """The adapter's label; "" for weights."""
    return manifest.label if manifest.kind == "adapter" else ""
