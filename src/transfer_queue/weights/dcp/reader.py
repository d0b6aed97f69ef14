"""`torch.distributed.checkpoint` reads a version, into plain tensors and DTensors of any mesh."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.errors import (
    InvalidInput,
    NotSupported,
    ShapeMismatch,
    TransferQueueError,
    UnknownTensor,
    VersionGone,
)
from transfer_queue.weights.dcp.origins import FolderOrigin, Origin, TrainerOrigin
from transfer_queue.weights.receive.slots import writable
from transfer_queue.weights.receive.staging import Staging
from transfer_queue.weights.transport.version_folders import LATEST, MANIFEST
from transfer_queue.weights.version.boxes import Box, whole, within
from transfer_queue.weights.version.manifest import Manifest, TensorSpec
from transfer_queue.weights.version.sharded import held_of, is_sharded

Key: TypeAlias = "tuple[str, tuple[int, ...]]"  # of a part: the tensor's name, and where its box starts


class VersionReader(StorageReader):
    """For `dcp.load(state_dict, storage_reader=VersionReader(folder))`: reads the folder of a version, as the engine
    `disk` and `VersionWriter` leave it, or what LATEST in `folder` names; or, with `address` and `token`, the newest
    version of a running trainer of the engine `tcp`. Each `load` looks anew.

    A rank reads the buckets that have something it wants, and checks every byte of them before any rank copies one:
    when a bucket is damaged (`DigestMismatch`) or cannot be had, at whichever rank, no state dict was changed. torch
    raises what went wrong at a rank as a `CheckpointException` on all; its `failures` have our errors.

    From a folder, buckets are mapped, not copied, and the version is not deleted meanwhile. Over tcp they are in memory
    until all is copied. `timeout_s`: for asking which version there is, and for fetching.
    """

    def __init__(
        self, folder: str | os.PathLike[str] = "", *, address: str = "", token: str = "", timeout_s: float = 600.0
    ) -> None:
        if bool(os.fspath(folder)) == bool(address):
            raise InvalidInput("a version lies in a folder, or at a trainer's address: name one of them")
        self._origin: Origin = TrainerOrigin(address, token, timeout_s) if address else FolderOrigin(folder)
        self._manifest: Manifest | None = None
        self._buckets: dict[Key, int] = {}
        self._held: dict[Key, torch.Tensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.close()
        if checkpoint_id is not None:
            self._origin = FolderOrigin(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors of the version, by all of their names. What is wrong with it is raised when they are looked at,
        and by `set_up_storage_reader`: of errors that are raised here, torch leaves only the text."""
        self.close()
        try:
            self._manifest = manifest = self._origin.open()
            if manifest.kind != "full":
                raise NotSupported(f"the version there is one of kind {manifest.kind}, not all of the weights")
        except TransferQueueError as error:
            return _Unreadable(error)
        self._buckets = {(part.name, part.box.start): part.bucket for parts in manifest.by_bucket for part in parts}
        return metadata_of(manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(metadata, _Unreadable):
            raise metadata.fault

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Fetches and checks what the plan needs: what is raised in this step keeps all ranks from the next one."""
        self._stage(plan.items)
        return dataclasses.replace(plan, storage_data=self._opened().key)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise VersionGone("ranks found different versions, as one came meanwhile: load again, or name a folder")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            self._stage(plan.items)
            self._check_boxes(plan.items, getattr(planner, "state_dict", {}))
            targets = [self._target(item, planner) for item in plan.items]
            for item, target in zip(plan.items, targets, strict=True):
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                held = self._held[self._key(item.storage_index)]
                target.detach().copy_(held[within(box, whole(held.shape))])
                planner.commit_tensor(item, target)
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        folder = Path(checkpoint_id)
        return (folder / MANIFEST).exists() or (folder / LATEST).exists()

    def close(self) -> None:
        """Let go of the version, and of what was read of it. Ends each `load`; repeatable."""
        self._manifest = None
        self._buckets, self._held = {}, {}
        self._origin.close()

    def _opened(self) -> Manifest:
        if self._manifest is None:
            raise InvalidInput("no version is being read: `dcp.load` calls `read_metadata` first")
        return self._manifest

    def _key(self, index: MetadataIndex) -> Key:
        name = self._opened().aliases.get(index.fqn, index.fqn)
        key = (name, tuple(index.offset or ()))
        if key not in self._buckets:
            raise UnknownTensor(f"the version has no part of {index.fqn!r} that starts at {list(key[1])}")
        return key

    def _stage(self, items: Iterable[ReadItem]) -> None:
        """Have all that these need in memory, checked."""
        manifest = self._opened()
        wanted = {self._buckets[key] for item in items if (key := self._key(item.storage_index)) not in self._held}
        if wanted:
            staging = Staging(manifest, sorted(wanted))
            self._origin.fetch(staging)
            self._held |= {(part.name, part.box.start): view for part, view in staging.parts()}

    def _check_boxes(self, items: Iterable[ReadItem], state: dict[str, Any]) -> None:
        """torch takes what a rank holds of a DTensor for one box, and would fill it wrongly where it is several."""
        for name in {item.dest_index.fqn for item in items}:
            tensor: Any = state.get(name)
            if is_sharded(tensor) and len(held_of(name, tensor)) > 1:
                raise NotSupported(f"{name!r} is split unevenly twice ({tensor.placements}): torch cannot load into it")

    def _target(self, item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
        target = planner.resolve_tensor(item)
        held = self._held[self._key(item.storage_index)]
        if target.dtype != held.dtype or target.shape != item.lengths:
            raise ShapeMismatch(
                f"{item.dest_index.fqn!r} is {held.dtype} {list(item.lengths)} in the version, and {target.dtype} "
                f"{list(target.shape)} in the state dict: convert it after loading"
            )
        if not writable(target):
            raise NotSupported(
                f"elements of {item.dest_index.fqn!r} share memory, as after expand: it takes no values one by one; "
                "give it memory of its own (clone)"
            )
        return target


class _Unreadable(Metadata):
    """Instead of what cannot be read: whoever looks at its tensors hears why."""

    def __init__(self, fault: TransferQueueError) -> None:
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        raise self.fault


def metadata_of(manifest: Manifest) -> Metadata:
    """A chunk for each part of each tensor, aliases too."""
    parts = manifest.parts
    found: dict[str, Any] = {spec.name: _tensor(spec, parts.boxes_of(at)) for at, spec in enumerate(manifest.tensors)}
    found |= {alias: found[name] for alias, name in manifest.aliases.items()}
    return Metadata(found, planner_data={name: (name,) for name in found})


def _tensor(spec: TensorSpec, boxes: Iterable[Box]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.lengths)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(spec.dtype)), torch.Size(spec.shape), chunks)
