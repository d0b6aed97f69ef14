"""Folders with a version each, on a file system that those who write and read them share.

    v000000000007-RUN/  manifest.json, the buckets, lease
    LATEST              the name of the newest one
    adapter-LABEL/      the same, for the versions of an adapter

A version is written to a folder called `.tmp-...`, synced, and renamed: it is there whole or not at all. Who writes it
holds an exclusive lock on `lease` (flock(2)), readers a shared one; a folder is deleted once nobody holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np

from transfer_queue.arguments import text
from transfer_queue.errors import (
    BadManifest,
    DigestMismatch,
    InvalidInput,
    ServiceUnavailable,
    StoreFull,
    TransferQueueError,
    VersionGone,
)
from transfer_queue.memory.memfd import sync_directory
from transfer_queue.saved.filesystem import FULL
from transfer_queue.weights.version.manifest import FORMAT, Manifest

LATEST, LEASE, MANIFEST, TEMPORARY, PLAIN = "LATEST", "lease", "manifest.json", ".tmp-", ".bucket"
LENGTH = struct.Struct("<Q")
NAME_NBYTES = 255  # of a file at most (NAME_MAX)


def version_name(version: int, run_id: str) -> str:
    """What the folder of a version is called; `InvalidInput` for a run that cannot be part of a file's name."""
    if not text(run_id, "run_id") or os.sep in run_id or "\0" in run_id:
        raise InvalidInput(f"{run_id!r} is no name of a run: it is to be part of a file's name")
    name = f"v{version:012}-{run_id}"
    if len(os.fsencode(name)) > NAME_NBYTES:
        raise InvalidInput(f"run_id {run_id!r:.64}... is too long to be part of a file's name")
    return name


def place_of(root: Path, label: str) -> Path:
    """The folder with the versions of the weights (""), or of an adapter."""
    return root / f"adapter-{quote(label, safe='')}" if label else root


def check_name(name: str) -> str:
    """`name`, if a version's folder can be called so, or `InvalidInput`: it may have come from a file, or a trainer."""
    if Path(name).name != name or not name.startswith("v") or "\0" in name:
        raise InvalidInput(f"{name!r} is no version's folder")
    return name


def newest_name(latest: Path) -> str:
    """The version that this LATEST names; `VersionGone` where there is none, `InvalidInput` where it names none."""
    try:
        return check_name(latest.read_bytes().decode())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise VersionGone(f"no version there yet: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{latest} does not name a version: {error}") from None


def shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def piece_name(rank: int, index: int) -> str:
    return f"rank-{rank:05}-{index:05}{PLAIN}"


def bucket_name(manifest: Manifest, index: int) -> str:
    """The file with a bucket: a safetensors shard; with pieces its bytes alone, numbered for the rank that wrote it."""
    if manifest.format == FORMAT:
        return shard_name(index, len(manifest.buckets))
    rank = manifest.holder(index)
    return piece_name(rank, sum(manifest.holder(before) == rank for before in range(index)))


def flush(file: IO[bytes], sync: bool = True) -> None:
    """Hand what was written to the system, and with `sync` to the disk."""
    file.flush()
    if sync:
        os.fsync(file.fileno())


def point_to(final: Path, sync: bool = True) -> None:
    """Have LATEST, beside the folder of a version, name it. Others may do that for theirs at the same time."""
    temporary = final / f"{TEMPORARY}{LATEST}"
    with writing(final.parent):
        try:
            with open(temporary, "wb") as file:
                file.write(final.name.encode())
                flush(file, sync)
            os.rename(temporary, final.parent / LATEST)
        finally:
            temporary.unlink(missing_ok=True)
        if sync:
            sync_directory(final.parent)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the file system refuses within is raised as `StoreFull` where room is missing, else `ServiceUnavailable`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TransferQueueError):
            raise
        if error.errno in FULL:
            raise StoreFull(f"the file system of {folder} is full, no version was left there: {error}") from error
        raise ServiceUnavailable(f"nothing can be written to {folder}: {error}") from error


class VersionLease:
    """A lock on a version's folder, until `end` or the end of the process; `VersionGone` when it is being deleted, or
    was. `kind`: `LOCK_EX` of who writes or deletes it, `LOCK_SH` of those that keep it there."""

    def __init__(self, folder: Path, kind: int) -> None:
        self._folder, self._owner = folder, os.getpid()
        flags = os.O_RDONLY if kind == fcntl.LOCK_SH else os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(folder / LEASE, flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in FULL:
                raise
            raise VersionGone(f"no version in {folder}: {error.strerror}") from None
        try:
            self._lock(kind)
        except BaseException:
            os.close(self._fd)
            raise

    def share(self) -> None:
        """It is written: others may read it, and nobody deletes it."""
        self._lock(fcntl.LOCK_SH)

    def end(self) -> None:
        """Repeatable. Children that were forked meanwhile have the lock, too, and do not keep it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if os.getpid() == self._owner:
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _lock(self, kind: int) -> None:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VersionGone(f"{self._folder} is in use, or being deleted") from None


@contextlib.contextmanager
def leased(folder: Path, kind: int) -> Iterator[None]:
    """Hold the lease of a version while within."""
    lease = VersionLease(folder, kind)
    try:
        yield
    finally:
        lease.end()


def retain(newest: Path, keep: int) -> None:
    """Delete all versions but `newest` and the `keep` - 1 before it, as far as nobody reads them, and not the one that
    somebody else had LATEST name meanwhile. Those of its run are in the order of their numbers, as a clock may have
    been put back; before them others, by when they were written."""
    run = newest.name.partition("-")[2]

    def age(path: Path) -> tuple[bool, int, str]:
        number, _, of_run = path.name.partition("-")
        return (True, 0, number) if of_run == run else (False, path.stat().st_mtime_ns, "")

    others = (path for path in newest.parent.glob("v*-*") if path.is_dir() and path != newest)
    found = [*sorted(others, key=age), newest]
    named = newest.name
    with contextlib.suppress(TransferQueueError):
        named = newest_name(newest.parent / LATEST)
    for folder in found[: -max(keep, 1)]:
        if folder.name != named:
            remove_version(folder)


def remove_leftovers(root: Path) -> None:
    """Delete what writers that died have left, and nothing of those that live."""
    for folder in root.glob(f"{TEMPORARY}*"):
        if folder.is_dir():
            remove_version(folder)


def remove_version(folder: Path) -> None:
    if not folder.exists():
        return
    with contextlib.suppress(VersionGone), leased(folder, fcntl.LOCK_EX):
        doomed = folder.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        os.rename(folder, doomed)  # nobody opens it half deleted
        shutil.rmtree(doomed, ignore_errors=True)


def withdraw_version(folder: Path) -> list[Path]:
    """Nobody is to have it: its name is free at once. Where somebody reads it still, who may be frozen, returns the
    folder that is to be removed later."""
    doomed = folder.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        os.rename(folder, doomed)
    except FileNotFoundError:
        return []
    remove_version(doomed)
    return [doomed] if doomed.exists() else []


def read_bucket(path: Path, nbytes: int, take: Callable[[Any], None]) -> None:
    """Give the bytes of a bucket, all of them, to `take`, straight from the page cache. They may be damaged.

    The array may be written to: what is written stays in this process.
    """
    with open(path, "rb") as file:
        is_plain, size = path.suffix == PLAIN, os.fstat(file.fileno()).st_size
        if not is_plain and size < LENGTH.size:
            raise BadManifest(f"{path} is no safetensors file")
        if is_plain and not size:
            mapped: Any = bytearray()
        else:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # unmapped with the last array over it
    start = 0 if is_plain else LENGTH.size + LENGTH.unpack_from(mapped)[0]
    if len(mapped) - start != nbytes:
        raise DigestMismatch(f"{path} has {len(mapped) - start} bytes of tensors instead of {nbytes}")
    take(np.frombuffer(mapped, np.uint8)[start:])
