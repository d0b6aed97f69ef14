"""The bytes of large blocks on a disk: ranges of files, written whole before anything refers to them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64

from transfer_queue.errors import JournalCorrupt, StoreFull
from transfer_queue.memory import memfd
from transfer_queue.memory.bytes import PAGE, Bytes
from transfer_queue.server.journal.files import ClaimId, check_claim, name_of, numbers
from transfer_queue.storage.extents import Extents

FILE_NBYTES = 4 << 30  # of addresses: what was not written takes no space
CHUNK_NBYTES = 8 << 20
SHRINK_NBYTES, STEP_NBYTES = 64 << 20, 1 << 30  # what is worth to be cut off, and how much at once: others wait


class Place(NamedTuple):
    """Where the bytes of a block lie; `digest` is their xxh3-64."""

    file: int
    offset: int
    nbytes: int
    digest: int = 0


class Payloads:
    """The blocks files of a journal. Taking and giving is the loop's; `write` and `read` run in helper threads."""

    def __init__(self, directory: Path, used: Iterable[Place] | None, claimed: ClaimId | None = None) -> None:
        """`used` is what blocks have there, everything else is free; None: no file is opened. No new file is made where
        the directory was claimed otherwise. Raises `JournalCorrupt` where two overlap, and `OSError`."""
        self._directory = directory
        self._claimed = claimed
        self._files: dict[int, tuple[int, Extents]] = {}
        self.used_nbytes = 0
        try:
            for number in () if used is None else numbers(directory, "blocks"):
                self._open(number)
            for place in used or ():
                if place.file not in self._files:
                    raise JournalCorrupt(f"{directory / name_of('blocks', place.file)} is missing")
                self._files[place.file][1].claim(place.offset, place.nbytes)
                self.used_nbytes += place.nbytes
        except KeyError:
            self.close()
            raise JournalCorrupt(f"{directory}: blocks overlap") from None
        except (JournalCorrupt, OSError):
            self.close()
            raise

    def _open(self, number: int, nbytes: int = 0) -> None:
        fd = os.open(self._directory / name_of("blocks", number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = max(os.fstat(fd).st_size, FILE_NBYTES, nbytes)
        self._files[number] = fd, Extents(-(-size // PAGE) * PAGE, PAGE)

    def take(self, nbytes: int) -> Place:
        """A range that can be written. Raises `StoreFull` where the disk has no space for it."""
        for number, (fd, extents) in self._files.items():
            offset = extents.take(nbytes)
            if offset is None:
                continue
            place = Place(number, offset, nbytes)
            if not self._reserve(fd, place):
                extents.give(offset, nbytes)
                raise StoreFull(f"{nbytes} bytes do not fit: the disk of the journal, {self._directory}, is full")
            self.used_nbytes += nbytes
            return place
        number = max(self._files, default=-1) + 1
        try:
            check_claim(self._directory, self._claimed)
            self._open(number, nbytes)
            memfd.sync_directory(self._directory)
        except OSError as error:
            raise StoreFull(f"{nbytes} bytes do not fit: {self._directory}: {error}") from error
        return self.take(nbytes)

    def _reserve(self, fd: int, place: Place) -> bool:
        """Whether the range has space on the disk; below the end of its file it has."""
        more, free = place.offset + place.nbytes - os.fstat(fd).st_size, os.fstatvfs(fd)
        if more <= 0:
            return True
        if more > free.f_bavail * free.f_frsize:  # to try would take all that others could still have
            return False
        try:
            return memfd.reserve(fd, place.offset, place.nbytes)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            return True  # this file system has no such call: the write will tell

    def give(self, place: Place) -> None:
        """Nothing on the disk refers to the range any more."""
        self._files[place.file][1].give(place.offset, place.nbytes)
        self.used_nbytes -= place.nbytes

    def write(self, place: Place, data: Bytes) -> int:
        """Blocks until the bytes are on the disk; their xxh3-64. Raises `OSError`."""
        fd, view, digest = self._files[place.file][0], memoryview(data), xxh3_64()  # type: ignore[arg-type]
        for at in range(0, len(view), CHUNK_NBYTES):
            part = bytes(view[at : at + CHUNK_NBYTES])  # whoever maps it may write into it, and then neither fits
            memfd.write_file(fd, place.offset + at, part)
            memfd.start_writing(fd, place.offset + at, len(part))
            digest.update(part)
        os.fdatasync(fd)
        return digest.intdigest()

    def read(self, place: Place, into: Bytes) -> None:
        """Raises `JournalCorrupt` where other bytes lie there than were written."""
        fd, view, digest = self._files[place.file][0], memoryview(into), xxh3_64()  # type: ignore[arg-type]
        at = 0
        while at < len(view):
            count = os.preadv(fd, [view[at : at + CHUNK_NBYTES]], place.offset + at)
            if not count:
                break
            digest.update(view[at : at + count])
            at += count
        if at < len(view) or digest.intdigest() != place.digest:
            name = name_of("blocks", place.file)
            raise JournalCorrupt(f"{self._directory / name} is damaged from byte {place.offset} to {place.offset + at}")

    def shrink(self) -> bool:
        """Cut off what is free at the end of a file, where that is much; whether there is more of it to do.

        Holes elsewhere stay, for later blocks.
        """
        for fd, extents in self._files.values():
            size, end = os.fstat(fd).st_size, extents.end
            if size - end >= SHRINK_NBYTES:
                os.ftruncate(fd, max(end, size - STEP_NBYTES))
                return True
        return False

    def close(self) -> None:
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()
