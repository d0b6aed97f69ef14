"""Blocks that lie on a disk: what it gives back is compared with what was written, once in each process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import numpy as np
from xxhash import xxh3_64

from transfer_queue.client.arenas import MappedArenas
from transfer_queue.errors import DataLost
from transfer_queue.wire.messages import InArena, Piece

CHUNK_NBYTES = 4 << 20
MAX_KNOWN = 1 << 16
MAX_ARENAS = 1 << 16


class SpilledBlocks:
    """Those whose bytes were found to be right. They are read with pread(2): where a disk fails, that is an error, and
    a look at mapped memory the end of the process (SIGBUS). Afterwards they are in the system's page cache."""

    def __init__(self, arenas: MappedArenas) -> None:
        self._arenas = arenas
        self._known: dict[tuple[int, int], None] = {}  # by block and digest
        self._lock = threading.Lock()

    def unknown(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Those that lie on a disk, as far as the reply says so rightly, and were not compared."""
        found = [piece for piece in pieces if isinstance(piece.location, InArena) and piece.location.digest]
        return [piece for piece in found if not self._is_known(piece) and self._is_there(piece)]

    def _is_known(self, piece: Piece) -> bool:
        assert isinstance(piece.location, InArena)
        return (piece.block, piece.location.digest) in self._known

    def _is_there(self, piece: Piece) -> bool:
        """Whether it lies within an arena; whoever reads it refuses one that does not."""
        lies = piece.location
        assert isinstance(lies, InArena)
        if not 0 <= lies.arena < MAX_ARENAS or min(lies.offset, piece.nbytes) < 0:
            return False
        return lies.offset + piece.nbytes <= self._arenas[lies.arena].size

    def check(self, block: int, where: InArena, nbytes: int) -> None:
        """Raises `DataLost` unless these are the bytes that were written. The caller has the block pinned."""
        if (block, where.digest) in self._known:
            return
        try:
            found = _digest(self._arenas[where.arena].fd, where.offset, nbytes)
        except OSError as error:
            raise DataLost(f"block {block}: the disk that its rows were moved to has an error: {error}") from error
        if found != where.digest:
            raise DataLost(f"block {block}: the disk that its rows were moved to gives other bytes than were written")
        with self._lock:
            if len(self._known) >= MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[block, where.digest] = None


def _digest(fd: int, offset: int, nbytes: int) -> int:
    """xxh3-64 of a range of a file. Raises `OSError`."""
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
    buffer = memoryview(np.empty(min(nbytes, CHUNK_NBYTES), np.uint8))  # type: ignore[arg-type]
    state, at = xxh3_64(), 0
    while at < nbytes:
        count = os.preadv(fd, [buffer[: nbytes - at]], offset + at)
        if not count:
            raise OSError(f"the file ends at {offset + at}")
        state.update(buffer[:count])
        at += count
    return state.intdigest()
