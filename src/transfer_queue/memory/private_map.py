"""Private mappings of shared memory: what is written there is seen only here, and can be forgotten.

A private mapping reads the shared bytes until a page is written; that page then belongs to this process alone (copy on
write, mmap(2) MAP_PRIVATE).
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from transfer_queue.memory.bytes import PAGE, Bytes, address_of
from transfer_queue.memory.memfd import MAP_NORESERVE

MADV_DONTNEED, MADV_POPULATE_READ, MADV_POPULATE_WRITE = 4, 22, 23  # madvise(2)
PRESENT, SWAPPED, OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
_libc = ctypes.CDLL(None, use_errno=True)


def map_private(fd: int, nbytes: int, offset: int = 0) -> mmap.mmap:
    """A private mapping, for reading and writing, of a page-aligned range."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=access, offset=offset)


def advise(address: int, nbytes: int, advice: int) -> bool:
    """madvise(2) on a page-aligned address; False when the kernel refuses."""
    return bool(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) == 0)


def drop_written_pages(address: int, nbytes: int) -> None:
    """Forget what this process wrote into a range of a private mapping, so that it shows the arena again.

    Written pages are those the kernel lists as anonymous (pagemap: present or swapped, and not of the file;
    Documentation/admin-guide/mm/pagemap.rst). Where that cannot be read the whole range is forgotten.
    """
    nbytes = -(-nbytes // PAGE) * PAGE
    written = _written_pages(address, nbytes)
    if written is None:
        advise(address, nbytes, MADV_DONTNEED)
        return
    if not len(written):
        return
    breaks = np.flatnonzero(np.diff(written) != 1) + 1
    firsts = written[np.concatenate([[0], breaks])]
    lasts = written[np.concatenate([breaks - 1, [len(written) - 1]])]
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        advise(address + first * PAGE, (last - first + 1) * PAGE, MADV_DONTNEED)


def own_pages(memory: Bytes) -> None:
    """Have this process own all pages of a range of a private mapping, as they are now. They begin where `memory` does;
    bytes are not changed."""
    if not advise(address_of(memory), memory.nbytes, MADV_POPULATE_WRITE):  # before Linux 5.14
        memory[::PAGE] |= 0


def _written_pages(address: int, nbytes: int) -> np.ndarray | None:
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(address // PAGE * 8)
            entries = np.frombuffer(file.read(nbytes // PAGE * 8), np.uint64)
    except OSError:
        return None
    if len(entries) != nbytes // PAGE:
        return None
    return np.flatnonzero((entries & (PRESENT | SWAPPED) != 0) & (entries & OF_FILE == 0))
