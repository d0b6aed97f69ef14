"""Memory of the machine that nobody has used yet: whoever comes first would pay for it."""

from __future__ import annotations

import mmap
import os

TOUCHED_NBYTES = 4 << 30


def touch_memory() -> None:
    """Use memory that the measured processes will get, once. A virtual machine gets each page of its host when it is
    first used, which takes up to fifty times as long as to write it (docs/benchmarks.md)."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(TOUCHED_NBYTES, free // 2)
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1
