"""One large region of shared memory.

A memory file has no name: it needs no /dev/shm (which is tiny in containers) and vanishes with the last process that
holds it, however that process ends. Clients get its descriptor over the unix socket. Untouched parts cost nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

from transfer_queue.codec.layout import Bytes
from transfer_queue.storage.shm.extents import Extents

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # mmap(2); Python names it from 3.11 on some builds only
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """`size` bytes handed out in multiples of `grain`; a file in `directory` instead of a memory file when given."""

    def __init__(self, size: int, grain: int, directory: str | None = None) -> None:
        self.size = size
        self.extents = Extents(size, grain)
        self.fd = _open(directory)
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | MAP_NORESERVE)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)

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
            nbytes -= before - self.resident_nbytes()

    def close(self) -> None:
        """Give the memory back, as soon as nobody looks at it any more; the mapping holds a descriptor of its own."""
        os.close(self.fd)
        self.memory = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def _open(directory: str | None) -> int:
    if directory is None:
        return os.memfd_create("transfer_queue", os.MFD_CLOEXEC)
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _punch(fd: int, start: int, nbytes: int) -> None:
    mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    if _libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes)):
        raise OSError(ctypes.get_errno(), "fallocate")
