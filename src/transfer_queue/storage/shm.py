"""The memory of one host's blocks: arenas of shared memory, and which ranges of them are free.

A memory file has no name: it needs no /dev/shm (which is tiny in containers) and vanishes with the last process that
holds it, however that process ends. Clients get its descriptor over the unix socket. Untouched parts cost nothing.

A memory file is sealed: no holder of the descriptor can change its size, so nobody else reads past its end (SIGBUS). A
file in a directory cannot be sealed: its clients are trusted not to truncate it. Its space is reserved before it is
written, because writing into a hole of a full file system is SIGBUS as well. Memory is not reserved: the unit's budget
bounds it.
"""

from __future__ import annotations

import contextlib
import errno
import os

import numpy as np

from transfer_queue.errors import ConfigError
from transfer_queue.memory import memfd
from transfer_queue.memory.bytes import PAGE, Bytes
from transfer_queue.storage.extents import Extents

SMALL_NBYTES = 64 << 10
ARENA_NBYTES = 4 << 30
GRAINS = (64, PAGE)  # of small blocks and of large ones
LIMITS = {errno.ENOMEM: "v", errno.EFBIG: "f", errno.EMFILE: "n"}  # address space, size of a file, descriptors
CHUNK_NBYTES = 1 << 20  # reserved together, and remembered: reserving again would walk every page


class Arena:
    """`size` bytes handed out in multiples of `grain`; a file in `directory` instead of a memory file when given.

    `fd`: an arena of this size that another process has made; nothing of it is taken here. `spills`: it is for blocks
    that have no room in memory.
    """

    def __init__(
        self, size: int, grain: int, directory: str | None = None, fd: int | None = None, spills: bool = False
    ) -> None:
        self.size = size
        self.spills = spills
        self.extents = Extents(size, grain)
        self.fd = memfd.create(directory) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, size)
                if directory is None:
                    memfd.seal(self.fd)
            self._map = memfd.map_shared(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.is_pinned = False  # a network card reads these very pages: none may be given back
        self._reserved: np.ndarray | None = None  # chunks whose space is ours; None: not in a directory
        if directory is not None:
            self._reserved = np.zeros(-(-size // CHUNK_NBYTES), np.bool_)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)

    def reserve(self, start: int, nbytes: int) -> bool:
        """Make sure that a range can be written; False when the file system has no space for it."""
        if self._reserved is None:
            return True
        first, last = start // CHUNK_NBYTES, -(-(start + nbytes) // CHUNK_NBYTES)
        if self._reserved[first:last].all():
            return True
        end = min(last * CHUNK_NBYTES, self.size)
        if memfd.reserve(self.fd, first * CHUNK_NBYTES, end - first * CHUNK_NBYTES):
            self._reserved[first:last] = True
            return True
        start, end = start // PAGE * PAGE, -(-(start + nbytes) // PAGE) * PAGE  # nearly full: no more than needed
        return memfd.reserve(self.fd, start, end - start)

    def unreserve(self) -> None:
        """Another process had it meanwhile, and may have given back what was reserved."""
        if self._reserved is not None:
            self._reserved[:] = False

    def slice(self, start: int, nbytes: int) -> Bytes:
        return self.memory[start : start + nbytes]

    def copied(self, start: int, nbytes: int) -> bytes:
        return self._map[start : start + nbytes]

    def resident_nbytes(self) -> int:
        """Bytes that occupy memory, used or free."""
        return os.fstat(self.fd).st_blocks * 512

    def trim(self, nbytes: int) -> None:
        """Return about `nbytes` of free memory to the system, from the largest free ranges first."""
        for start, size in self.extents.free():
            if nbytes <= 0 or self.is_pinned or size < PAGE:
                return
            before = self.resident_nbytes()
            memfd.punch(self.fd, start, size)
            if self._reserved is not None:
                self._reserved[start // CHUNK_NBYTES : -(-(start + size) // CHUNK_NBYTES)] = False
            nbytes -= before - self.resident_nbytes()

    def close(self) -> None:
        """Give the memory back, as soon as nobody looks at it any more; the mapping holds a descriptor of its own."""
        os.close(self.fd)
        self.memory = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def _limit(error: OSError) -> str:
    """What to raise where a limit of this process forbids an arena."""
    name = LIMITS.get(error.errno or 0)
    return (
        f". Untouched it takes no memory: raise the limit `ulimit -{name}` where the server is started" if name else ""
    )


class SharedMemory:
    """Ranges of arenas, which are opened as they are needed. `directory`: see `Arena`. `spill_directory`: where the
    arenas of blocks are that have no room in memory (None: nowhere).

    Small blocks share pages, the others are page-aligned, so that they can be viewed: each kind has its own arenas.
    """

    def __init__(self, directory: str | None = None, spill_directory: str | None = None) -> None:
        self.directory = directory
        self.spill_directory = spill_directory
        self.trouble = ""  # with that directory, when it was asked last
        self.arenas: list[Arena] = []

    def open(self) -> None:
        """Open an arena for small blocks and one for large ones: untouched they cost address space only, and later
        there may be no descriptor left for them. Raises `ConfigError` where this process may have none."""
        for grain in GRAINS:
            if all(arena.extents.grain != grain or arena.spills for arena in self.arenas):
                try:
                    self.add(Arena(ARENA_NBYTES, grain, self.directory))
                except OSError as error:
                    raise ConfigError(
                        f"no arena of {ARENA_NBYTES >> 30} GiB can be made: {error}{_limit(error)}"
                    ) from error

    def add(self, arena: Arena) -> None:
        """One more arena; its number is its place."""
        self.arenas.append(arena)

    @staticmethod
    def rounded(nbytes: int) -> int:
        """What a block of `nbytes` takes."""
        grain = GRAINS[nbytes > SMALL_NBYTES]
        return max(1, -(-nbytes // grain)) * grain

    def has_space(self, nbytes: int) -> bool:
        """Whether the file system says that so much is free. To reserve what is not costs as much as there is."""
        try:
            found = os.statvfs(self.directory) if self.directory else None
        except OSError:  # somebody removed the directory: the arenas are where they were
            found = None
        return found is None or not found.f_blocks or found.f_bavail * found.f_frsize >= nbytes

    def take(self, nbytes: int, spills: bool = False) -> tuple[int, int] | None:
        """Arena and offset of a range that can be written; None when the file system has no space for it. Where blocks
        spill, one that fails has none: `trouble` says so."""
        try:
            place = self._take(nbytes, spills)
        except OSError as error:
            if not spills:
                raise
            self.trouble = str(error)
            return None
        if spills:
            self.trouble = "its file system is full" if place is None else ""
        return place

    def _take(self, nbytes: int, spills: bool) -> tuple[int, int] | None:
        for attempt in range(2):
            if attempt:
                self.trim(self.resident_nbytes(spills), spills)  # free ranges elsewhere hold space
            place = self._find(nbytes, spills)
            if place is None:
                continue
            arena, offset = self.arenas[place[0]], place[1]
            reserved = False
            try:
                reserved = arena.reserve(offset, nbytes)
            finally:
                if not reserved:
                    arena.extents.give(offset, nbytes)
            if reserved:
                return place
        return None

    def _find(self, nbytes: int, spills: bool) -> tuple[int, int] | None:
        """A range of an arena, if need be of a new one; None when there is no space for its file."""
        grain = GRAINS[nbytes > SMALL_NBYTES]
        for number, arena in enumerate(self.arenas):
            if arena.extents.grain == grain and arena.spills == spills:
                offset = arena.extents.take(nbytes)
                if offset is not None:
                    return number, offset
        size = max(ARENA_NBYTES, -(-nbytes // PAGE) * PAGE)
        try:
            self.add(Arena(size, grain, self.spill_directory if spills else self.directory, spills=spills))
        except OSError as error:
            if error.errno not in memfd.NO_SPACE:
                raise
            return None
        offset = self.arenas[-1].extents.take(nbytes)
        assert offset is not None
        return len(self.arenas) - 1, offset

    def claim(self, arena: int, offset: int, nbytes: int) -> None:
        """Take this very range. Raises `KeyError` when it is not free."""
        self.arenas[arena].extents.claim(offset, nbytes)

    def give(self, arena: int, offset: int, nbytes: int) -> None:
        """The range is free again."""
        self.arenas[arena].extents.give(offset, nbytes)

    def slice(self, arena: int, offset: int, nbytes: int) -> Bytes:
        return self.arenas[arena].slice(offset, nbytes)

    def resident_nbytes(self, spills: bool = False) -> int:
        """Bytes that occupy memory, or where blocks are that have no room there, used or free."""
        return sum(arena.resident_nbytes() for arena in self.arenas if arena.spills == spills)

    def trim(self, nbytes: int, spills: bool = False) -> None:
        """Return about `nbytes` of what is free there to the system."""
        for arena in self.arenas:
            if nbytes <= 0:
                return
            if arena.spills != spills:
                continue
            before = arena.resident_nbytes()
            arena.trim(nbytes)
            nbytes -= before - arena.resident_nbytes()

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()

    def check_invariants(self, used: list[tuple[int, int, int]]) -> None:
        """The ranges in use, as (arena, offset, nbytes), do not overlap and fill exactly what the free ones leave."""
        for number, arena in enumerate(self.arenas):
            own = [(offset, arena.extents.rounded(nbytes)) for one, offset, nbytes in used if one == number]
            at = 0
            for start, nbytes in sorted(own + arena.extents.free()):
                assert start == at, "arena ranges overlap or leak"
                at += nbytes
            assert at == arena.size
