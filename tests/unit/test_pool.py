"""Memory that is kept for the next values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transfer_queue.memory import pool as pool_module
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


def test_memory_that_comes_back_while_another_is_chosen_is_in_nobody_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may run there, and give back the last tensor over it."""
    pool = Pool(12 << 20)
    del_soon = [pool.allocate(8 << 20)]
    pool.allocate(4 << 20)

    def collected(sizes: Any, key: Any) -> Any:
        del_soon.clear()
        return min(sizes, key=key)

    monkeypatch.setattr(pool_module, "min", collected, raising=False)
    assert len(pool.allocate(3 << 20)) == 3 << 20
    assert 0 < pool.idle_nbytes <= 12 << 20


def test_no_more_lies_idle_than_was_said() -> None:
    pool = Pool(12 << 20)
    several = [pool.allocate(4 << 20) for _ in range(5)]
    several.clear()
    assert 0 < pool.idle_nbytes <= 12 << 20


@pytest.mark.skipif(not _has_huge_pages(), reason="this host has no huge pages")
@pytest.mark.parametrize("lends_idle", [True, False])
def test_the_kernel_may_take_idle_memory_where_it_is_lent(lends_idle: bool) -> None:
    pool = Pool(2 * NBYTES, lends_idle=lends_idle)
    data = pool.allocate(NBYTES)
    data[:] = 7
    before = lazily_free_nbytes()
    del data
    assert (lazily_free_nbytes() - before >= NBYTES * 3 // 4) == lends_idle
