"""Huge-page buffers that are reused.

Fresh pages take bytes many times slower than touched ones (docs/benchmarks.md), small pages slower than huge ones. So
large results live in huge-page-advised mappings that return to a pool when the last tensor over them is gone.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections import deque
from pathlib import Path

import numpy as np

from transfer_queue.memory.bytes import Bytes, ReturnedMemory

HUGE_NBYTES = 2 << 20


class Pool:
    """Huge-page-advised buffers, reused once every tensor over them is gone; at most `keep_nbytes` lie idle.

    `lends_idle`: the kernel may take pages of idle ones when memory is short (MADV_FREE). Until it does, taking them
    again costs nothing. Not for memory that a device has registered.
    """

    def __init__(self, keep_nbytes: int, *, lends_idle: bool = False) -> None:
        self.keep_nbytes = keep_nbytes
        self.lends_idle = lends_idle and _has_huge_pages()
        self.idle_nbytes = 0
        self._idle: list[mmap.mmap] = []
        self._returned: deque[mmap.mmap] = deque()  # not sorted in yet
        self._lock = threading.RLock()
        self._is_busy = False  # a collection may run wherever something is made, and enter this again

    def allocate(self, nbytes: int) -> Bytes:
        """Uninitialised memory of exactly `nbytes`."""
        if nbytes < HUGE_NBYTES:
            return np.empty(nbytes, np.uint8)
        size = -(-nbytes // HUGE_NBYTES) * HUGE_NBYTES
        memory = self._take(size) or self._map(size)
        start = -_address(memory) % HUGE_NBYTES
        return ReturnedMemory(_address(memory) + start, nbytes, memory, lambda: self._give_back(memory)).array()

    def clear(self) -> None:
        with self._lock:
            self._returned.clear()
            self._idle.clear()
            self.idle_nbytes = 0

    def _map(self, size: int) -> mmap.mmap:
        memory = mmap.mmap(-1, size + HUGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _take(self, size: int) -> mmap.mmap | None:
        with self._lock:
            if self._is_busy:
                return None
            self._is_busy = True
            try:
                self._sort_in()
                fits = [m for m in self._idle if size <= len(m) - HUGE_NBYTES <= 2 * size]
                if not fits:
                    return None
                best = min(fits, key=len)
                self._idle.remove(best)
                self.idle_nbytes -= len(best)
                return best
            finally:
                self._is_busy = False

    def _give_back(self, memory: mmap.mmap) -> None:
        """Also where a collection runs amid `_take`: then the next one sorts it in."""
        if len(memory) > self.keep_nbytes:
            return
        if self.lends_idle:
            memory.madvise(mmap.MADV_FREE)
        self._returned.append(memory)
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._is_busy:
                self._is_busy = True
                try:
                    self._sort_in()
                finally:
                    self._is_busy = False
        finally:
            self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._idle.append(memory)
            self.idle_nbytes += len(memory)
        while self.idle_nbytes > self.keep_nbytes:  # the oldest go: sizes that nobody asks for any more
            self.idle_nbytes -= len(self._idle.pop(0))


@functools.cache
def _has_huge_pages() -> bool:
    """Without them MADV_FREE goes through every small page: a fourth of the time that writing them takes."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
