"""Where a version that is read comes from: a folder, or a trainer."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from transfer_queue.errors import InvalidInput, VersionGone
from transfer_queue.weights.receive.staging import Staging
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.faults import system_faults
from transfer_queue.weights.transport.fetching import Source, TrainerLink, fetch
from transfer_queue.weights.transport.tcp import NUM_STREAMS
from transfer_queue.weights.transport.version_folders import (
    LATEST,
    MANIFEST,
    bucket_name,
    leased,
    of_newest,
    read_bucket,
)
from transfer_queue.weights.transport.version_store import newest_key
from transfer_queue.weights.version.manifest import Manifest

TORCH_METADATA = ".metadata"  # of a checkpoint that torch's `FileSystemWriter` has made


class Origin(Protocol):
    """Raises the package's errors only."""

    def open(self) -> Manifest:
        """The version that is there now, which stays until `close`. Lets go of the one before."""

    def fetch(self, staging: Staging) -> None:
        """Stage what is missing."""

    def close(self) -> None: ...


class FolderOrigin:
    """A version's folder, or one with a LATEST. Buckets are mapped: they lie in the page cache, and nowhere else."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._given = Path(folder)
        self._folder = self._given
        self._lease = contextlib.ExitStack()

    @system_faults()
    def open(self) -> Manifest:
        if (self._given / MANIFEST).exists():
            return self._read(self._given)
        try:
            return of_newest(self._given / LATEST, lambda name: self._read(self._given / name))
        except VersionGone:
            _expect_no_other_kind(self._given)
            raise

    def _read(self, folder: Path) -> Manifest:
        """Hold it, too."""
        self.close()
        self._folder = folder
        self._lease.enter_context(leased(self._folder, fcntl.LOCK_SH))
        try:
            return Manifest.decode((self._folder / MANIFEST).read_bytes())
        except FileNotFoundError as error:  # deleted just before we had the lease
            raise VersionGone(f"no version in {self._folder}: {error.strerror}") from None

    @system_faults()
    def fetch(self, staging: Staging) -> None:
        manifest = staging.manifest
        for index in staging.missing:
            take: Callable[..., None] = partial(staging.stage, index, lend=True, vouched=False)
            read_bucket(self._folder / bucket_name(manifest, index), manifest.buckets[index], take)

    def close(self) -> None:
        self._lease.close()


def _expect_no_other_kind(place: Path) -> None:
    """`InvalidInput` where other checkpoints are: no version is ever to come there."""
    if (place / TORCH_METADATA).exists():
        raise InvalidInput(
            f"{place} is a checkpoint of torch's own writer, not a version: dcp.load(state, checkpoint_id=..) reads "
            "it, without a VersionReader; what a VersionWriter saves is a version"
        )
    if any(place.glob("*.safetensors")):
        raise InvalidInput(
            f"{place} is a folder of safetensors files, not a version: SafetensorsSource(folder) reads it, or "
            "safetensors.torch.load_file"
        )


class TrainerOrigin:
    """The newest version that the receivers of a trainer have verified, from all of its ranks. Asking which it is, and
    fetching, may each take `timeout_s`."""

    def __init__(self, address: str, token: str, timeout_s: float) -> None:
        self._link = TrainerLink()
        self._link.address = p.address_of(address, token)
        self._token = token
        self._timeout_s = timeout_s
        self._sources: list[Source] = []

    @system_faults()
    def open(self) -> Manifest:
        deadline = Deadline(self._timeout_s)
        manifest = self._link.manifest(newest_key(""), deadline)
        self._sources = self._link.holders(manifest, self._token, deadline)
        return manifest

    @system_faults()
    def fetch(self, staging: Staging) -> None:
        take = partial(staging.stage, vouched=False)
        fetch(staging.manifest, staging.missing, self._sources * NUM_STREAMS, take, Deadline(self._timeout_s))

    def close(self) -> None:
        self._link.close()
