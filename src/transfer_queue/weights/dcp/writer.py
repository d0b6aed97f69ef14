"""`torch.distributed.checkpoint` writes a version: each rank what it holds, one folder for all."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from transfer_queue.codec.dtypes import dtype_name
from transfer_queue.errors import InvalidInput, NotSupported, ServiceUnavailable, StaleVersion, UnsupportedValue
from transfer_queue.memory.memfd import sync_directory
from transfer_queue.weights.transport.info import checked_version
from transfer_queue.weights.transport.version_folders import (
    LATEST,
    MANIFEST,
    VersionLease,
    bucket_name,
    flush,
    new_folder,
    piece_name,
    point_to,
    remove_leftovers,
    remove_version,
    version_name,
    writing,
)
from transfer_queue.weights.version.boxes import Box
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.weights.version.packing import BUCKET_NBYTES
from transfer_queue.weights.version.pieces import pack_shards
from transfer_queue.weights.version.plans import CellPlace, ShardPlan, plan_pieces
from transfer_queue.weights.version.sealing import ShardDigests, seal_pieces
from transfer_queue.weights.version.sharded import TensorShard
from transfer_queue.weights.version.sources import check_plain
from transfer_queue.weights.version.tensor_memory import room


class Portion(NamedTuple):
    """What one rank writes, and where: its items, in their order, each to its place."""

    folder: str
    rank: int
    table: list[TensorShard]
    places: list[CellPlace]
    buckets: tuple[int, ...]

    @property
    def plan(self) -> ShardPlan:
        return ShardPlan.of([(place,) for place in self.places], self.buckets)


class VersionWriter(StorageWriter):
    """For `dcp.save(state_dict, storage_writer=VersionWriter(folder, version=7, run_id="run-1"))`, from one process or
    from all ranks of a process group with the same file system.

    Each rank writes what it holds, a bucket at a time, to a folder that nobody else looks at. When all have, the
    coordinator writes the manifest, renames the folder to the version's, and has LATEST name it. All of it is synced.
    Until then, and whatever fails, there is no version. What a save that failed has left is deleted by `close`, what a
    process that died has left by the next writer. A version that is there already is `StaleVersion`.

    Of what several ranks hold (replicas) torch has one write it; whether the others have the same is not checked. Tied
    tensors are written under each of their names, as torch's plans do not say what is tied. What is no plain tensor is
    `UnsupportedValue` before anything is written. torch raises errors of any rank as a `CheckpointException` on all.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, version: int, run_id: str, bucket_nbytes: int = BUCKET_NBYTES
    ) -> None:
        self._version, self._run_id = checked_version(version), run_id
        if self._version < 0 or bucket_nbytes < 1:
            raise InvalidInput(f"version {version}, in buckets of {bucket_nbytes} bytes")
        self._root = Path(folder)
        self._name = version_name(self._version, run_id)
        self._bucket_nbytes = bucket_nbytes
        self._temporary: Path | None = None
        self._lease: VersionLease | None = None  # until LATEST names it
        self._shares: list[Portion] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.close()
        if checkpoint_id is not None:
            self._root = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.close()
        if not kwargs.get("use_collectives", True):
            raise NotSupported("without collectives each rank would write a version of its own")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not getattr(plan, "usable", True):
            raise NotSupported("this planner keeps plans from one save to the next, and so where they were written")
        for item in plan.items:
            _check(item)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        tables = [[_shard(item) for item in plan.items] for plan in plans]
        wheres = plan_pieces(tables, bucket_nbytes=self._bucket_nbytes)
        folder = self._begin()
        self._shares, mine = [], []
        for rank, (plan, table, where) in enumerate(zip(plans, tables, wheres, strict=True)):
            found = list(where.places)
            given = [index for index, places in enumerate(found) if places]  # not by another rank
            places = [place for (place,) in (found[index] for index in given)]
            share = Portion(folder, rank, [table[index] for index in given], places, where.buckets)
            self._shares.append(share)
            mine.append(dataclasses.replace(plan, items=[plan.items[index] for index in given], storage_data=share))
        return mine

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        share: Portion = plan.storage_data
        by_bucket: dict[int, list[int]] = defaultdict(list)
        for index, place in enumerate(share.places):
            by_bucket[place.bucket].append(index)
        results: list[WriteResult] = []
        with writing(self._root):
            for bucket, members in sorted(by_bucket.items()):
                results += self._write(bucket, members, plan.items, planner, share)
            sync_directory(self._root / share.folder)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            manifest = self._sealed([[one.storage_data for one in found] for found in results])
            with writing(self._root):
                final = self._decide(manifest)
            self._point_to(final)
        finally:
            self.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def close(self) -> None:
        """Give up the version that is being written and delete what there is of it. After a `save` there is none."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        self._end_lease()

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.end()
            self._lease = None

    def _point_to(self, final: Path) -> None:
        """Have LATEST name it. Until then it is held: a trainer that deletes old versions is not to take it for one."""
        try:
            with writing(self._root):
                sync_directory(self._root)
            point_to(final)
        except BaseException:
            self._end_lease()
            remove_version(final, self._root / LATEST)  # where an interrupt came after that, it is there
            raise

    def _decide(self, manifest: Manifest) -> Path:
        """Make it the version, by its name; its folder."""
        temporary, final = self._temporary, self._root / self._name
        assert temporary is not None
        assert self._lease is not None
        _check_files(temporary, manifest)
        with open(temporary / MANIFEST, "xb") as file:
            file.write(manifest.encode())
            flush(file)
        sync_directory(temporary)
        if final.exists():  # somebody made it meanwhile
            raise StaleVersion(f"{final} exists already")
        self._lease.share()
        os.rename(temporary, final)
        self._temporary = None
        return final

    def _begin(self) -> str:
        """Make the folder that all write to, and lease it; its name."""
        with writing(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._root)
            if (self._root / self._name).exists():
                raise StaleVersion(f"{self._root / self._name} exists already")
            self._lease = new_folder(self._root)
            self._temporary = self._lease.folder
        return self._temporary.name

    def _write(
        self, bucket: int, members: list[int], items: list[WriteItem], planner: SavePlanner, share: Portion
    ) -> list[WriteResult]:
        """Pack the items with these indexes, which are those of a bucket, and write it."""
        nbytes = share.buckets[bucket]
        data = room(nbytes).zero_()  # there are gaps
        places = [share.places[index]._replace(bucket=0) for index in members]
        tensors = ((items[index].index.fqn, _resolved(items[index], planner)) for index in members)
        where = ShardPlan.of([(place,) for place in places], (nbytes,))
        packed = pack_shards([share.table[index] for index in members], tensors, where, [data])
        with open(self._root / share.folder / piece_name(share.rank, bucket), "xb") as file:
            file.write(data.numpy().data)
            flush(file)
        return [
            WriteResult(items[index].index, place.nbytes, digest)
            for index, place, digest in zip(members, places, packed.of_shards(), strict=True)
        ]

    def _sealed(self, digests: list[list[str]]) -> Manifest:
        """In format 3 in any case: the buckets' files are not safetensors."""
        tables, plans = [share.table for share in self._shares], [share.plan for share in self._shares]
        found = [ShardDigests.of(one, [one]) for one in digests]
        named: Any = {"version": self._version, "epoch": self._run_id, "aliases": {}}
        return seal_pieces(tables, plans, found, names_holders=True, **named)


def _check(item: WriteItem) -> None:
    name, data = item.index.fqn, item.tensor_data
    if data is None:
        raise UnsupportedValue(f"{name!r} is no tensor, and a version of weights has nothing else: save it elsewhere")
    if data.properties.layout != torch.strided:
        raise UnsupportedValue(f"{name!r} is not dense ({data.properties.layout})")
    dtype_name(data.properties.dtype)


def _shard(item: WriteItem) -> TensorShard:
    data = item.tensor_data
    assert data is not None
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return TensorShard(item.index.fqn, data.properties.dtype, tuple(data.size), box)


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    check_plain(item.index.fqn, tensor)
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _check_files(folder: Path, manifest: Manifest) -> None:
    for index, nbytes in enumerate(manifest.buckets):
        path = folder / bucket_name(manifest, index)
        if not path.exists() or path.stat().st_size != nbytes:
            raise ServiceUnavailable(
                f"what rank {manifest.holder(index)} wrote is not in {folder}: all ranks need one file system"
            )
