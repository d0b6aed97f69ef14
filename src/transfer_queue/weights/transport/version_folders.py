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
from typing import IO, Any, TypeVar
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
NEW_FOLDER_TRIES = 10
T = TypeVar("T")


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
        self.folder, self._owner = folder, os.getpid()
        flags = os.O_RDONLY if kind == fcntl.LOCK_SH else os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(folder / LEASE, flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in FULL:
                raise
            raise VersionGone(f"no version in {folder}: {error.strerror}") from None
        try:
            self._lock(kind)
            self._expect_there()
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
            raise VersionGone(f"{self.folder} is in use, or being deleted") from None

    def _expect_there(self) -> None:
        """Who deletes it may have had the lock until now."""
        try:
            is_there = os.path.samestat(os.fstat(self._fd), os.stat(self.folder / LEASE))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise VersionGone(f"{self.folder} was deleted just now")


def new_folder(root: Path) -> VersionLease:
    """The lease of a new folder for a version that is to be written. Another writer that begins just now may take it
    for a leftover before it has its lease, and delete it: then it is another one."""
    for _ in range(NEW_FOLDER_TRIES - 1):
        with contextlib.suppress(VersionGone):
            return _try_new_folder(root)
    return _try_new_folder(root)


def _try_new_folder(root: Path) -> VersionLease:
    folder = root / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        folder.mkdir()
        return VersionLease(folder, fcntl.LOCK_EX)
    except BaseException:  # an interrupt must not leave it
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def leased(folder: Path, kind: int) -> Iterator[None]:
    """Hold the lease of a version while within."""
    lease = VersionLease(folder, kind)
    try:
        yield
    finally:
        lease.end()


def of_newest(latest: Path, read: Callable[[str], T]) -> T:
    """What `read` makes of the version that this LATEST names. Where that is deleted meanwhile, as a newer one came, of
    the newer one."""
    name = newest_name(latest)
    while True:
        try:
            return read(name)
        except VersionGone:
            before, name = name, newest_name(latest)
            if name == before:
                raise


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
    for folder in found[: -max(keep, 1)]:
        remove_version(folder, newest.parent / LATEST)


def remove_leftovers(root: Path) -> None:
    """Delete what writers that died have left, and nothing of those that live."""
    for folder in root.glob(f"{TEMPORARY}*"):
        if folder.is_dir():
            remove_version(folder)


def remove_version(folder: Path, latest: Path | None = None) -> None:
    """Unless somebody holds it, or this LATEST names it: who wrote it held it until then, so it is looked at only once
    nobody does."""
    if not folder.exists():
        return
    with contextlib.suppress(VersionGone), leased(folder, fcntl.LOCK_EX):
        if latest is not None and is_named(folder, latest):
            return
        doomed = folder.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        os.rename(folder, doomed)  # nobody opens it half deleted
        shutil.rmtree(doomed, ignore_errors=True)


def is_named(folder: Path, latest: Path) -> bool:
    """Whether this LATEST names that version."""
    try:
        return newest_name(latest) == folder.name
    except TransferQueueError:
        return False


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
