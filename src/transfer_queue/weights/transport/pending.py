"""Versions that a trainer is about to send, and what it says of those that were taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from transfer_queue.errors import InvalidInput
from transfer_queue.structs import decodable
from transfer_queue.weights.version.anchor import CellChanges, VersionAnchor
from transfer_queue.weights.version.digest import ALGO
from transfer_queue.weights.version.drafts import DRAFT
from transfer_queue.weights.version.manifest import ADAPTER_CONFIG, Manifest
from transfer_queue.weights.version.packing import Plan, seal
from transfer_queue.weights.version.plans import ShardPlan
from transfer_queue.weights.version.sealing import PackedCells, Sealing
from transfer_queue.weights.version.shard_table import ShardTable
from transfer_queue.weights.version.sources import WeightSource, shards_of

MAX_LABEL = 80  # characters: labels become file names, percent-encoded


class PendingAdapter(NamedTuple):
    """What makes a version one of the adapter `label`: for the weights with `base_root`, or for any."""

    label: str
    base_root: str | None
    meta: dict[str, Any]

    @classmethod
    def of(cls, label: str, source: WeightSource, config: Mapping[str, Any]) -> PendingAdapter:
        """`InvalidInput` for a label of which there is none, no tensors, or a configuration that is not JSON."""
        try:
            meta = {ADAPTER_CONFIG: json.dumps(dict(config), sort_keys=True)}
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"the adapter's configuration is not JSON: {error}") from None
        if not source.specs():
            raise InvalidInput(f"the adapter {label!r} has no tensors")
        return cls(_checked(label), None, meta)

    @classmethod
    def none(cls, label: str) -> PendingAdapter:
        """Of a version that removes it."""
        return cls(_checked(label), None, {})


class Base(NamedTuple):
    """The version that all receivers have, for differences, and for receivers that lack theirs: this rank's cells of
    it, the manifest of all of it, and the shards (their keys) and plans of all ranks."""

    anchor: VersionAnchor
    manifest: Manifest
    tables: tuple[str, ...]
    plans: Sequence[ShardPlan]


class PendingVersion:
    """A version about to be packed, and what was packed of it: all of it, or what differs from `base` (see `compares`).
    `keeps`: this rank's cells stay here, as the base of the next versions."""

    def __init__(
        self,
        source: WeightSource,
        version: int,
        run_id: str,
        base: Base | None = None,
        adapter: PendingAdapter | None = None,
        keeps: bool = False,
    ) -> None:
        self.version = version
        self.run_id = run_id
        self.adapter = adapter
        self.source = source
        self.label = adapter.label if adapter else ""
        self.base = base
        self.keeps = keeps
        self.pack_s = 0.0
        self.buckets: list[torch.Tensor] = []  # what this rank gives
        self.whole: Manifest | None = None  # of all of it, also where only a difference is sent
        self.changes: CellChanges | None = None
        self._anchor: VersionAnchor | None = None
        self._tables: tuple[str, ...] = ()
        self._plans: Sequence[ShardPlan] = ()

    def compares(self, tables: Sequence[ShardTable], plans: Sequence[ShardPlan]) -> bool:
        """Whether there is a base with these shards, plans and ties."""
        base = self.base
        if base is None or base.manifest.aliases != self.source.aliases():
            return False
        return base.tables == tuple(table.key for table in tables) and base.plans == plans

    def read(
        self, table: ShardTable, parts: Iterator[tuple[str, torch.Tensor]], where: ShardPlan, *, compares: bool
    ) -> PackedCells:
        """Read what the source gives here, `parts` by `table`, and pack it, or how it differs from the base."""
        if compares:
            assert self.base is not None
            self.changes = self.base.anchor.compare(parts)
            self.buckets = self.changes.buckets
            return PackedCells(self.changes.digests, self.changes.stored)
        self._anchor, digests = VersionAnchor.pack(table, parts, where)
        self.buckets = self._anchor.buckets
        return PackedCells(digests)

    def read_alone(self, planned: Callable[[list[ShardTable]], list[ShardPlan]]) -> Manifest:
        """Read and seal, where no other rank takes part, by the plan for its table."""
        table = ShardTable.of(shards_of(self.source.specs()))
        plans = planned([table])
        compares = self.compares([table], plans)
        packed = self.read(table, iter(self.source.tensors()), plans[0], compares=compares)
        return self.seal_cells([table], plans, [packed])

    def seal_cells(
        self, tables: Sequence[ShardTable], plans: Sequence[ShardPlan], packed: Sequence[PackedCells]
    ) -> Manifest:
        """The manifest of what all ranks have read."""
        sealing = Sealing(tables, plans, [one.digests for one in packed])
        self.whole = sealing.whole(version=self.version, epoch=self.run_id, aliases=self.source.aliases())
        self._tables, self._plans = tuple(table.key for table in tables), plans
        if self.changes is None or self.base is None:
            return self.whole
        stored = [one.stored for one in packed if one.stored is not None]
        return sealing.changes(self.base.manifest, self.whole, stored)

    def seal(self, where: Plan, digests: Mapping[str, str], algo: str = ALGO) -> Manifest:
        """The manifest of a source that was packed in whole tensors."""
        label, base_root, meta = self.adapter or PendingAdapter("", None, {})
        return seal(
            where, digests, version=self.version, epoch=self.run_id, aliases=self.source.aliases(),
            kind="adapter" if self.adapter else "full", base_root=base_root, label=label, meta=meta, algo=algo,
        )  # fmt: skip

    @property
    def is_ahead(self) -> bool:
        """Whether it changes the base, which has not followed yet."""
        return self.changes is not None and self._anchor is None

    def settled(self, *, copy: bool = False) -> Base | None:
        """The base of the next versions, now that this one was taken, or is to be sent whole: the anchor follows what
        changed (`copy`: in new buckets). None where nothing was kept."""
        if self.is_ahead and self.base is not None and self.changes is not None:
            self._anchor = self.base.anchor
            self._anchor.follow(self.changes, copy=copy)
        if self._anchor is None or self.whole is None or not self.keeps:
            return None
        return Base(self._anchor, self.whole, self._tables, self._plans)


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


def _checked(label: str) -> str:
    """`InvalidInput` unless an adapter may have it."""
    if not 0 < len(label) <= MAX_LABEL:
        raise InvalidInput(f"an adapter's label of {len(label)} characters, at most {MAX_LABEL}")
    if label == DRAFT:
        raise InvalidInput(f"the label {label!r} is that of a draft: see `send_draft`")
    return label


def label_of(manifest: Manifest) -> str:
    """The adapter's label; "" for weights."""
    return manifest.label if manifest.kind == "adapter" else ""
