"""Memory that is kept for the next values."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer_queue.memory.pool import Pool, _has_huge_pages

NBYTES = 64 << 20


def lazily_free_nbytes() -> int:
    """What the kernel may take from this process at once."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("LazyFree:")) * 1024


def test_idle_memory_is_taken_again() -> None:
    pool = Pool(2 * NBYTES, lends_idle=True)
    data = pool.allocate(NBYTES)
    where = data.ctypes.data
    data[:] = 7
    del data
    assert pool.idle_nbytes >= NBYTES
    again = pool.allocate(NBYTES)
    assert (again.ctypes.data, pool.idle_nbytes) == (where, 0)
    again[:] = 8
    assert int(again[::4096].min()) == 8


@pytest.mark.skipif(not _has_huge_pages(), reason="this host has no huge pages")
@pytest.mark.parametrize("lends_idle", [True, False])
def test_the_kernel_may_take_idle_memory_where_it_is_lent(lends_idle: bool) -> None:
    pool = Pool(2 * NBYTES, lends_idle=lends_idle)
    data = pool.allocate(NBYTES)
    data[:] = 7
    before = lazily_free_nbytes()
    del data
    assert (lazily_free_nbytes() - before >= NBYTES * 3 // 4) == lends_idle
