"""Files without a name to lie in: in memory, or in a directory. They vanish with the last process that holds them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from transfer_queue.errors import ConfigError
from transfer_queue.memory.bytes import PAGE, Bytes

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
SYNC_FILE_RANGE_WRITE = 2
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # mmap(2); Python names it from 3.11 on some builds only
IN_MEMORY = ("tmpfs", "ramfs")
OF_ONE_HOST = (*IN_MEMORY, "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_libc = ctypes.CDLL(None, use_errno=True)


def free_nbytes(directory: str, setting: str = "arena_dir") -> int | None:
    """What the file system of an arena directory has free; None where it has no bound.

    Raises `ConfigError`, which names the `setting`, when arenas cannot lie there.
    """
    try:
        probe = create(directory)
        try:
            os.ftruncate(probe, PAGE)
            reserve(probe, 0, PAGE)
            found = os.fstatvfs(probe)
        finally:
            os.close(probe)
    except OSError as error:
        raise ConfigError(f"backend.SimpleStorage.{setting}: {directory!r} cannot hold arenas: {error}") from error
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def is_memory(directory: str) -> bool:
    """Whether the files of a directory lie in memory."""
    return file_system(directory) in IN_MEMORY


def is_of_this_host(directory: str) -> bool:
    """Whether no other host has the files of a directory too; False where that is not certain."""
    return file_system(directory) in OF_ONE_HOST


def file_system(directory: str) -> str:
    """The kind of the file system that a directory lies in (proc(5), mountinfo); "" where it is not listed."""
    status = os.stat(directory)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == device:
                return kind.split()[0]
    return ""


def create(directory: str | None, name: str = "transfer_queue") -> int:
    """A file without a name, in `directory` or (None) in memory; sealable there. `name`: what /proc shows."""
    if directory is None:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def reserve(fd: int, start: int, nbytes: int) -> bool:
    """Whether the file system has space for a range of a file, which is reserved then."""
    try:
        _fallocate(fd, 0, start, nbytes)
    except OSError as error:
        if error.errno in NO_SPACE:
            return False
        raise
    return True


def reserve_ahead(fd: int, start: int, nbytes: int) -> bool:
    """Whether the file system has space for a range behind the end of a file, which is reserved then, or cannot say."""
    try:
        _fallocate(fd, FALLOC_FL_KEEP_SIZE, start, nbytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return True
        if error.errno in NO_SPACE:
            return False
        raise
    return True


def start_writing(fd: int, start: int, nbytes: int) -> None:
    """Have the system write a range of a file to its disk soon, so that its pages can go when memory is short. What
    became of it shows in `os.fsync`; here nothing is reported, for nothing depends on it."""
    _libc.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), SYNC_FILE_RANGE_WRITE)


def read_file(fd: int, start: int, nbytes: int) -> Bytes:
    """A range of a file, copied. Raises `OSError`."""
    data = np.empty(nbytes, np.uint8)
    view, at = memoryview(data), 0  # type: ignore[arg-type]
    while at < nbytes:
        count = os.preadv(fd, [view[at:]], start + at)
        if not count:
            raise OSError(errno.EIO, f"the file ends at {start + at}")
        at += count
    return data


def write_file(fd: int, start: int, data: memoryview | bytes) -> None:
    """Write bytes at an offset of a file. Raises `OSError`."""
    view, at = memoryview(data), 0
    while at < len(view):
        count = os.pwrite(fd, view[at:], start + at)
        if not count:
            raise OSError(errno.EIO, "nothing was written")
        at += count


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Blocks until the names in a directory are on its disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Make a directory, with those above it, where there is none; all of their names are on the disk then.
    `NotADirectoryError` where one of them is something else."""
    new = [one for one in (directory, *directory.parents) if not one.exists()]
    try:
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
    except FileExistsError as error:  # what its callers raise where something was saved already
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None
    for one in new:
        sync_directory(one.parent)


def seal(fd: int) -> None:
    """From now on nobody can change the size of a memory file, so no mapping of it ends (SIGBUS)."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """A mapping through which everybody who maps the file sees the same bytes."""
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | MAP_NORESERVE)


def punch(fd: int, start: int, nbytes: int) -> None:
    """Return a range of a file to the system; it reads as zeros from then on."""
    _fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, start, nbytes)


def _fallocate(fd: int, mode: int, start: int, nbytes: int) -> None:
    """fallocate(2). posix_fallocate would write into blocks in use where the file system cannot reserve."""
    while _libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
