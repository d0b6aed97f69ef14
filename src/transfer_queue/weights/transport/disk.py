"""One folder per version, as safetensors loaders read it, on a file system that trainer and receivers share.

    v000000000007-EPOCH/  model-00001-of-00003.safetensors ..., model.safetensors.index.json, manifest.json, lease
    LATEST                the name of the newest one that every receiver verified
    adapter-LABEL/        the same, for the versions of an adapter

How they are written, leased and deleted: `version_folders`. Versions beyond `keep` go once nobody holds theirs.

A receiver that was given a root (TQ_WEIGHTS_ROOT, or by who serves it) takes folders below it only, whatever a trainer
says; one that is called over a network takes none without.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from transfer_queue.errors import (
    DigestMismatch,
    InvalidInput,
    NotSupported,
    ServiceUnavailable,
    StaleVersion,
    UnsupportedValue,
    VersionGone,
)
from transfer_queue.memory.memfd import sync_directory
from transfer_queue.weights.receive.receiver import Receiver
from transfer_queue.weights.transport.base import Engine
from transfer_queue.weights.transport.clients import Client
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.info import InitInfo, UpdateInfo, key_of
from transfer_queue.weights.transport.pending import PendingVersion, label_of
from transfer_queue.weights.transport.trainer import TrainerEngine, TrainerInfo
from transfer_queue.weights.transport.version_folders import (
    LATEST,
    LENGTH,
    MANIFEST,
    VersionLease,
    bucket_name,
    check_name,
    flush,
    is_named,
    leased,
    new_folder,
    of_newest,
    place_of,
    point_to,
    read_bucket,
    remove_leftovers,
    remove_version,
    retain,
    shard_name,
    version_name,
    withdraw_version,
    writing,
)
from transfer_queue.weights.version.manifest import OTHER_TRAINER, Manifest
from transfer_queue.weights.version.packing import Placement, Plan, pack, plan
from transfer_queue.weights.version.sources import _SAFETENSORS, INDEX, TensorMeta, WeightSource

_SPELLED = {dtype: spelled for spelled, dtype in _SAFETENSORS.items()}
ROOT_VARIABLE = "TQ_WEIGHTS_ROOT"


class DiskTrainerInfo(TrainerInfo, kw_only=True):
    """`sync=False` leaves writing out to the kernel: a version may be lost when the machine stops."""

    folder: str
    keep: int = 2
    sync: bool = True


class DiskInfo(InitInfo, kw_only=True):
    folder: str


class Aligned:
    """A source with its tensors ordered so that all are aligned without gaps: those of the size of elements that most
    bytes have, then the others, larger elements first. Others that came before are held until then."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._specs = source.specs()
        nbytes: Counter[int] = Counter()
        for _, dtype, shape in self._specs:
            nbytes[dtype.itemsize] += math.prod(shape) * dtype.itemsize
        self._main = max(nbytes, key=lambda size: nbytes[size], default=1)
        self._sizes = [self._main, *sorted(set(nbytes) - {self._main}, reverse=True)]

    def specs(self) -> list[TensorMeta]:
        return sorted(self._specs, key=lambda spec: self._sizes.index(spec.dtype.itemsize))

    def plan(self, bucket_nbytes: int) -> Plan:
        """Without gaps; the others have buckets of their own."""
        specs = self.specs()
        num = sum(spec.dtype.itemsize == self._main for spec in specs)
        main, rest = (plan(part, bucket_nbytes, align=1) for part in (specs[:num], specs[num:]))
        moved = (place._replace(bucket=place.bucket + len(main.buckets)) for place in rest.placements)
        return Plan((*main.placements, *moved), main.buckets + rest.buckets)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        held: dict[int, list[tuple[str, torch.Tensor]]] = {size: [] for size in self._sizes}
        for name, tensor in self._source.tensors():
            if tensor.dtype.itemsize == self._main:
                yield name, tensor
            else:
                held.setdefault(tensor.dtype.itemsize, []).append((name, tensor))
        for found in held.values():
            yield from found

    def aliases(self) -> dict[str, str]:
        return self._source.aliases()


def _check_dtypes(source: WeightSource) -> None:
    """`UnsupportedValue` for what no safetensors file can have."""
    for name, dtype, _ in source.specs():
        if dtype not in _SPELLED:
            raise UnsupportedValue(
                f"{name!r} is {dtype}, for which safetensors files have no name: send it by another engine (shm, tcp), "
                "or convert it"
            )


def _header(places: list[Placement]) -> bytes:
    """The beginning of a safetensors file (its length is a multiple of 64, so the tensors are aligned in the file)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for place in places:
        span = [place.offset, place.offset + place.nbytes]
        entries[place.name] = {"dtype": _SPELLED[place.dtype], "shape": list(place.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + LENGTH.size) % 64)
    return LENGTH.pack(len(text)) + text


class DiskTrainer(TrainerEngine):
    init_form = DiskTrainerInfo

    def __init__(self, info: DiskTrainerInfo, client: Client, source: WeightSource) -> None:
        if info.anchor_every > 1:
            raise InvalidInput("versions on disk are full ones: other loaders could not read differences")
        if not info.folder or info.keep < 1:
            raise InvalidInput(f"{info.keep} versions to keep in folder {info.folder!r}")
        super().__init__(info, client, source)
        _check_dtypes(source)
        self.root = Path(info.folder)
        self._withdrawn: list[Path] = []  # that were read then, maybe by somebody frozen; a ticket's thread adds to it
        self._undecided: set[Path] = set()  # that were begun, and neither decided nor withdrawn since
        self._leases: dict[Path, VersionLease] = {}  # on those and the newest: not for others to delete
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            for place in (self.root, *self.root.glob("adapter-*")):
                remove_leftovers(place)
            self._device = self.root.stat().st_dev
            self._has_latest = (self.root / LATEST).exists()

    def receivers_info(self) -> dict[str, Any]:
        return {"folder": str(self.root.resolve())}

    def folder_of(self, version: int, label: str = "") -> Path:
        return place_of(self.root, label) / version_name(version, self.run_id)

    def update_info(self, manifest: Manifest, deadline: Deadline) -> dict[str, Any]:
        return {**super().update_info(manifest, deadline), "name": self.folder_of(manifest.version).name}

    def _publish(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        _check_dtypes(draft.source)  # also of an adapter; a module's may have changed
        final = self.folder_of(draft.version, draft.label)
        with writing(self.root):
            self._expect_folder()
            self._clean()
            final.parent.mkdir(exist_ok=True)
            if final in self._undecided and not self._turns.is_on_its_way(draft.version):
                self._withdraw_folder(final)  # an interrupt struck when it had its name, and nobody was told of it
            if final.exists():
                raise StaleVersion(f"{final} exists already: {OTHER_TRAINER}")
            self._undecided.add(final)
            lease: VersionLease | None = None
            try:
                lease = self._leases[final] = new_folder(self.root)
                manifest = self._write(draft, lease.folder, deadline)
                lease.share()
                os.rename(lease.folder, final)
                self._sync(final.parent)
            except BaseException:
                self._end_leases(final)
                if lease is not None:
                    shutil.rmtree(lease.folder, ignore_errors=True)
                remove_version(final)
                raise
        return manifest

    def _expect_folder(self) -> None:
        """Raises `ServiceUnavailable` where the folder is not there, or, as its file system is not, only the place for
        that: what is written there is on another disk, where nobody else looks."""
        if not self.root.is_dir():
            raise ServiceUnavailable(
                f"the folder {self.root} is not there any more: mount its file system, or make the folder again"
            )
        device = self.root.stat().st_dev
        if device != self._device and self._has_latest and not (self.root / LATEST).exists():
            raise ServiceUnavailable(
                f"{self.root} is on another file system than before, without its versions: mount the one it was on, or "
                "make the trainer anew where this is meant"
            )
        self._device = device

    def _decide(self, manifest: Manifest) -> None:
        final = self.folder_of(manifest.version, label_of(manifest))
        point_to(final, self.info.sync)
        self._has_latest |= final.parent == self.root
        self._undecided.discard(final)
        past = [one for one in list(self._leases) if one.parent == final.parent and one not in self._undecided]
        self._end_leases(*(one for one in past if one != final))
        retain(final, self.info.keep)

    def _withdraw(self, manifest: Manifest) -> None:
        self._withdraw_folder(self.folder_of(manifest.version, label_of(manifest)))

    def _end_leases(self, *folders: Path) -> None:
        for one in folders:
            lease = self._leases.pop(one, None)
            if lease is not None:
                lease.end()

    def _withdraw_folder(self, folder: Path) -> None:
        if is_named(folder, folder.parent / LATEST):  # an interrupt came as it was decided
            self._name_before(folder)
        self._end_leases(folder)
        self._withdrawn.extend(withdraw_version(folder))
        self._undecided.discard(folder)

    def _name_before(self, folder: Path) -> None:
        """Have LATEST name what was decided before this one, or nothing."""
        others = [one for one in self._leases if one.parent == folder.parent and one not in self._undecided]
        before = [one for one in others if one != folder]
        if before:
            point_to(before[-1], self.info.sync)
        else:
            (folder.parent / LATEST).unlink(missing_ok=True)

    def _clean(self) -> None:
        """Remove what was withdrawn, as far as nobody reads it any more."""
        for folder in list(self._withdrawn):
            remove_version(folder)
            if not folder.exists():
                self._withdrawn.remove(folder)

    def _write(self, draft: PendingVersion, folder: Path, deadline: Deadline) -> Manifest:
        source = Aligned(draft.source)
        where = source.plan(self.info.bucket_nbytes)
        digests: dict[str, str] = {}
        by_bucket = where.by_bucket()
        for packed in pack(source, where):
            deadline.left("writing the version")
            with open(folder / shard_name(packed.bucket, len(where.buckets)), "wb") as file:
                file.write(_header(by_bucket[packed.bucket]))
                file.write(packed.data.numpy().data)
                flush(file, self.info.sync)
            digests.update(packed.digests)
        manifest = draft.seal(where, digests)
        for name, body in ((MANIFEST, manifest.encode()), (INDEX, _index(where, manifest))):
            with open(folder / name, "wb") as file:
                file.write(body)
                flush(file, self.info.sync)
        self._sync(folder)
        return manifest

    def _sync(self, folder: Path) -> None:
        if self.info.sync:
            sync_directory(folder)

    def _close(self) -> None:
        """Versions stay on the disk."""
        self._end_leases(*list(self._leases))
        self._clean()


def _index(where: Plan, manifest: Manifest) -> bytes:
    files = {place.name: shard_name(place.bucket, len(where.buckets)) for place in where.placements}
    return json.dumps({"metadata": {"total_size": manifest.nbytes}, "weight_map": files}, indent=1).encode()


class DiskUpdate(UpdateInfo, kw_only=True):
    name: str = ""
    label: str = ""


class DiskEngine(Engine):
    trainer = DiskTrainer
    init_form = DiskInfo
    update_form = DiskUpdate

    def __init__(self, receiver: Receiver, *, root: str | os.PathLike[str] = "", **more: Any) -> None:
        super().__init__(receiver, **more)
        self._allowed = os.fspath(root) or os.environ.get(ROOT_VARIABLE, "")
        self._is_remote = False
        self._root: Path | None = None
        self._folder: Path | None = None
        self._leases = contextlib.ExitStack()

    def confine(self, root: str = "") -> None:
        self._allowed = root or self._allowed
        self._is_remote = True

    def _connect(self, info: DiskInfo) -> None:
        if self._is_remote and not self._allowed:
            raise NotSupported(
                f"this server was started without a folder for weights: weights_root, or {ROOT_VARIABLE}"
            )
        root = self._permitted(Path(self._allowed, info.folder))
        if not root.is_dir():
            raise InvalidInput(f"there is no folder {info.folder}")
        self._root = root

    def _permitted(self, path: Path) -> Path:
        """`path` where it really is, if it is below the root; without a root as it came."""
        if not self._allowed:
            return path
        try:
            found = path.resolve()
        except RuntimeError as error:  # links that lead in a circle, before Python 3.13
            raise InvalidInput(f"{path} leads nowhere: {error}") from None
        if not found.is_relative_to(Path(self._allowed).resolve()):
            raise InvalidInput(f"{path} is not below {self._allowed}, the only place this server takes weights from")
        return found

    def _find(self, info: DiskUpdate, deadline: Deadline) -> Manifest:
        manifest = self._open(info.name, info.label)
        if key_of(manifest) != info.key:
            raise DigestMismatch(f"the manifest in {info.name} is not the one that was announced")
        return manifest

    def _newest(self, deadline: Deadline, label: str = "") -> Manifest:
        latest = self._permitted(place_of(self._root or Path(), label) / LATEST)
        return of_newest(latest, lambda name: self._open(name, label))

    def _open(self, name: str, label: str) -> Manifest:
        """Lease a version's folder until the update ends."""
        if self._root is None:
            raise InvalidInput("the folder is not known: init_transfer_engine first")
        check_name(name)
        self._leases.close()
        folder = self._permitted(place_of(self._root, label) / name)
        self._leases.enter_context(leased(folder, fcntl.LOCK_SH))
        self._folder = folder
        try:
            return Manifest.decode(self._permitted(folder / MANIFEST).read_bytes())
        except OSError as error:  # deleted just before we had the lease
            raise VersionGone(f"no version in {folder}: {error.strerror}") from None

    def _fetch(self, manifest: Manifest, wanted: list[int], deadline: Deadline) -> None:
        assert self._folder is not None
        for index in wanted:
            deadline.left()
            path = self._permitted(self._folder / bucket_name(manifest, index))
            read_bucket(path, manifest.buckets[index], functools.partial(self.receiver.stage, index))

    def _ended(self) -> None:
        self._leases.close()

    def _close(self) -> None:
        self._root = None
