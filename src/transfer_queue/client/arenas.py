"""The arenas of the server in this process's address space.

Every arena is mapped twice: *shared*, for writing blocks and for gathering rows out of them, and *private*, for handing
out views. A private mapping reads the arena's bytes until a page is written; that page then belongs to this process
alone (copy on write, mmap(2) MAP_PRIVATE), so views are writable and isolated without a copy.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

from transfer_queue.errors import AccessDenied, ConfigError, ServiceUnavailable
from transfer_queue.memory.bytes import PAGE, Bytes, address_of
from transfer_queue.memory.memfd import map_shared
from transfer_queue.memory.private_map import (
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    advise,
    map_private,
)
from transfer_queue.wire.address import Address
from transfer_queue.wire.arena_fds import NUMBER, SIZE, received

TOUCH_NBYTES = 2 << 20
VISITS = 3  # for a descriptor
POPULATE_CHUNKS = 32  # mapped in one call: between calls the thread competes for the interpreter


class MappedArena:
    """One arena, mapped on first use. Owns `fd`. Raises `ConfigError` where a limit of this process is too low."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        try:
            shared = map_shared(fd, size)
            private = map_private(fd, size)
        except OSError as error:
            os.close(fd)
            takes = f"it takes {2 * size >> 30} GiB of addresses (ulimit -v) and 3 descriptors (ulimit -n)"
            raise ConfigError(f"this process cannot map an arena of the server: {error}; {takes}") from error
        self.shared: Bytes = np.frombuffer(shared, np.uint8)
        self.private: Bytes = np.frombuffer(private, np.uint8)
        self.private_address = address_of(self.private)
        self._written = np.zeros(-(-size // TOUCH_NBYTES), np.bool_)  # chunks this process has mapped for writing
        self._read = np.zeros(-(-size // TOUCH_NBYTES), np.bool_)  # and in the private mapping

    def map_private(self, offset: int, nbytes: int) -> mmap.mmap:
        """A private mapping of its own of a page-aligned range."""
        return map_private(self.fd, nbytes, offset)

    def writable(self, offset: int, nbytes: int) -> Bytes:
        """Shared memory of a block about to be written, mapped ahead of the copy: faulting in the copy costs more."""
        first, last = offset // TOUCH_NBYTES, -(-(offset + nbytes) // TOUCH_NBYTES)
        if nbytes >= TOUCH_NBYTES and not self._written[first:last].all():
            start = offset // PAGE * PAGE
            advise(address_of(self.shared) + start, offset + nbytes - start, MADV_POPULATE_WRITE)
            self._written[first:last] = True
        return self.shared[offset : offset + nbytes]

    def populate(self, offset: int, nbytes: int, wanted: Callable[[], bool]) -> None:
        """Map a range for reading through the private mapping, as long as it is `wanted`: a fault each costs more.

        Chunks that were mapped once are skipped; walking them again would cost as much as the first time.
        """
        step = POPULATE_CHUNKS
        for first in range(offset // TOUCH_NBYTES, -(-(offset + nbytes) // TOUCH_NBYTES), step):
            if self._read[first : first + step].all():
                continue
            if not wanted():
                return
            start = max(offset, first * TOUCH_NBYTES)
            end = min(offset + nbytes, (first + step) * TOUCH_NBYTES)
            advise(self.private_address + start, end - start, MADV_POPULATE_READ)
            self._read[-(-start // TOUCH_NBYTES) : end // TOUCH_NBYTES] = True

    def close(self) -> None:
        os.close(self.fd)


class MappedArenas:
    """Arenas by number; descriptors come from the server's door."""

    def __init__(self, door: str, timeout_s: float) -> None:
        self._door = door
        self._timeout_s = timeout_s
        self._arenas: dict[int, MappedArena] = {}
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> MappedArena:
        found = self._arenas.get(number)
        if found is None:
            with self._lock:
                found = self._arenas.get(number)
                if found is None:
                    found = self._arenas[number] = MappedArena(*self._enter(number))
        return found

    def _enter(self, number: int) -> tuple[int, int]:
        for _ in range(VISITS):
            found = self._visit(number)
            if found is not None:
                return found
        raise ServiceUnavailable(f"the server has no arena {number}")

    def _visit(self, number: int) -> tuple[int, int] | None:
        """None where nothing comes: who let us in may have been killed, and another one stands at the door."""
        try:
            with Address(path=self._door).connect(self._timeout_s) as visitor:
                visitor.sendall(NUMBER.pack(number))
                data, descriptors = received(visitor, SIZE.size)
        except AccessDenied:
            raise
        except (ConnectionResetError, BrokenPipeError):
            return None
        except OSError as error:
            raise ServiceUnavailable(f"cannot map arena {number}: {error}") from error
        return (descriptors[0], SIZE.unpack(data)[0]) if descriptors else None

    def close(self) -> None:
        """Close the descriptors; mappings stay as long as tensors need them."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
