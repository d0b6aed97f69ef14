"""One large region of shared memory.

A memory file has no name: it needs no /dev/shm (which is tiny in containers) and vanishes with the last process that
holds it, however that process ends. Clients get its descriptor over the unix socket. Untouched parts cost nothing.

A memory file is sealed: no holder of the descriptor can change its size, so nobody else reads past its end (SIGBUS). A
file in a directory cannot be sealed: its clients are trusted not to truncate it. Its space is reserved before it is
written, because writing into a hole of a full file system is SIGBUS as well. Memory is not reserved: the unit's budget
bounds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

import numpy as np

from transfer_queue.codec.layout import Bytes
from transfer_queue.errors import ConfigError
from transfer_queue.storage.shm.extents import Extents

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # mmap(2); Python names it from 3.11 on some builds only
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
PAGE = 4096
CHUNK_NBYTES = 1 << 20  # reserved together, and remembered: reserving again would walk every page
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """`size` bytes handed out in multiples of `grain`; a file in `directory` instead of a memory file when given."""

    def __init__(self, size: int, grain: int, directory: str | None = None) -> None:
        self.size = size
        self.extents = Extents(size, grain)
        self.fd = _open(directory)
        os.ftruncate(self.fd, size)
        self._reserved: np.ndarray | None = None  # chunks whose space is ours; None: not in a directory
        if directory is None:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        else:
            self._reserved = np.zeros(-(-size // CHUNK_NBYTES), np.bool_)
        self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | MAP_NORESERVE)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)

    def reserve(self, start: int, nbytes: int) -> bool:
        """Make sure that a range can be written; False when the file system has no space for it."""
        if self._reserved is None:
            return True
        first, last = start // CHUNK_NBYTES, -(-(start + nbytes) // CHUNK_NBYTES)
        if self._reserved[first:last].all():
            return True
        end = min(last * CHUNK_NBYTES, self.size)
        if _reserve(self.fd, first * CHUNK_NBYTES, end - first * CHUNK_NBYTES):
            self._reserved[first:last] = True
            return True
        start, end = start // PAGE * PAGE, -(-(start + nbytes) // PAGE) * PAGE  # nearly full: no more than needed
        return _reserve(self.fd, start, end - start)

    def slice(self, start: int, nbytes: int) -> Bytes:
        return self.memory[start : start + nbytes]

    def resident_nbytes(self) -> int:
        """Bytes that occupy memory, used or free."""
        return os.fstat(self.fd).st_blocks * 512

    def trim(self, nbytes: int) -> None:
        """Return about `nbytes` of free memory to the system, from the largest free ranges first."""
        for start, size in self.extents.free():
            if nbytes <= 0:
                return
            before = self.resident_nbytes()
            _punch(self.fd, start, size)
            if self._reserved is not None:
                self._reserved[start // CHUNK_NBYTES : -(-(start + size) // CHUNK_NBYTES)] = False
            nbytes -= before - self.resident_nbytes()

    def close(self) -> None:
        """Give the memory back, as soon as nobody looks at it any more; the mapping holds a descriptor of its own."""
        os.close(self.fd)
        self.memory = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def free_nbytes(directory: str) -> int | None:
    """What the file system of an arena directory has free; None where it has no bound.

    Raises `ConfigError` when arenas cannot lie there.
    """
    try:
        probe = _open(directory)
        try:
            os.ftruncate(probe, PAGE)
            _reserve(probe, 0, PAGE)
            found = os.fstatvfs(probe)
        finally:
            os.close(probe)
    except OSError as error:
        raise ConfigError(f"backend.SimpleStorage.arena_dir: {directory!r} cannot hold arenas: {error}") from error
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _open(directory: str | None) -> int:
    if directory is None:
        return os.memfd_create("transfer_queue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _reserve(fd: int, start: int, nbytes: int) -> bool:
    """Whether the file system has space for a range of a file, which is reserved then."""
    try:
        _fallocate(fd, 0, start, nbytes)
    except OSError as error:
        if error.errno in NO_SPACE:
            return False
        raise
    return True


def _punch(fd: int, start: int, nbytes: int) -> None:
    _fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, start, nbytes)


def _fallocate(fd: int, mode: int, start: int, nbytes: int) -> None:
    """fallocate(2). posix_fallocate would write into blocks in use where the file system cannot reserve."""
    while _libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
