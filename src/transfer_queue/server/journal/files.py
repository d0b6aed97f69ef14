"""The files of a journal: their names, and frames, each written at once and checked when it is read.

A frame that was not finished when the machine lost its power is the end of its file, and counts as not written. A bad
one with a good one after it was damaged later: that is an error, for what comes after it may rest on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_64

from transfer_queue.errors import ConfigError, JournalCorrupt, JournalInUse, JournalUnsupported
from transfer_queue.memory.memfd import make_directory, write_file
from transfer_queue.structs import decodable

log = logging.getLogger("transfer_queue.server")

FORMAT = 1
MAGIC = b"TQJ\n"
FRAME = struct.Struct("<4sQQQQ")  # magic, bytes, xxh3-64 of all that follows, position, time.time_ns()
CHECKED = struct.Struct("<QQ")
NAME = re.compile(r"(snapshot|log|blocks)-(\d{8})")
LOCK, DRAFT = "lock", ".tmp"
HEAD_NBYTES = 512  # the first frame, and zeros
BUFFER_NBYTES = 1 << 20
VACATE_S = 3.0  # how long the server before may take to end

FileId: TypeAlias = tuple[int, int]  # its device and its inode
ClaimId: TypeAlias = tuple[FileId, FileId]  # of the directory and of its lock


@decodable
class Head(msgspec.Struct):
    """The first frame of a snapshot or a log. `position`: the number of the first event in the log with this number.
    `seed`: random; part of what is checked in the frames after it, so that they are no other file's. `follows`: it goes
    on where the log before ends; else it counts only together with its snapshot. `reserved_rows`: of a partition, in
    the service of a snapshot."""

    format: int
    kind: str
    number: int
    position: int
    seed: int
    follows: bool = True
    reserved_rows: int = 0


class Frame(NamedTuple):
    """`position`: the number of the first event in it."""

    offset: int
    position: int
    payload: bytes


def name_of(kind: str, number: int) -> str:
    return f"{kind}-{number:08d}"


def numbers(directory: Path, kind: str) -> list[int]:
    """Of the files of this kind, ascending."""
    found = (NAME.fullmatch(name) for name in os.listdir(directory))
    return sorted(int(one[2]) for one in found if one is not None and one[1] == kind)


def framed(position: int, payload: Sequence[bytes], seed: int = 0) -> list[bytes]:
    """A frame as buffers, to be written at once; in a file whose head has this seed (0: it is the head)."""
    digest = xxh3_64(checked := CHECKED.pack(position, time.time_ns()), seed)
    for part in payload:
        digest.update(part)
    size = sum(map(len, payload))
    return [FRAME.pack(MAGIC, size, digest.intdigest(), *CHECKED.unpack(checked)), *payload]


def frame_at(at: int, end: int, read: Callable[[int, int], bytes], seed: int = 0) -> Frame | None:
    """The frame at an offset of a file that ends there, of which `read(offset, bytes)` gives parts; None where there is
    no good one."""
    start = read(at, FRAME.size)
    if len(start) < FRAME.size:
        return None
    magic, size, digest, position, when = FRAME.unpack(start)
    if magic != MAGIC or at + FRAME.size + size > end:
        return None
    payload = read(at + FRAME.size, size)
    found = xxh3_64(CHECKED.pack(position, when), seed)
    found.update(payload)
    return Frame(at, position, payload) if found.intdigest() == digest else None


def headed(head: Head) -> list[bytes]:
    """The beginning of a file as buffers, `HEAD_NBYTES` in all."""
    parts = framed(head.position, [msgspec.msgpack.encode(head)])
    return [*parts, bytes(HEAD_NBYTES - sum(map(len, parts)))]


def write_all(fd: int, parts: Sequence[bytes | memoryview], at: int) -> int:
    """Write buffers one after the other at an offset; returns the offset after them. Raises `OSError`."""
    data = b"".join(parts)
    write_file(fd, at, data)
    return at + len(data)


class FrameFile:
    """A file of a journal that is read: its head, and the frames after it up to one that was not finished.

    `head` is None where the machine stopped before it was written.
    """

    def __init__(self, directory: Path, kind: str, number: int) -> None:
        """Raises `JournalCorrupt` and `JournalUnsupported`."""
        self.path = directory / name_of(kind, number)
        try:
            self._size = os.stat(self.path).st_size
            self._file = open(self.path, "rb", buffering=BUFFER_NBYTES)  # noqa: SIM115  closed by `close`
        except FileNotFoundError:
            raise JournalCorrupt(f"{self.path} is missing") from None
        first = self._frame(0, 0)
        if first is None and self._size > HEAD_NBYTES:  # what is behind it was written when it was on the disk
            self.close()
            raise JournalCorrupt(f"{self.path} is damaged at byte 0")
        self._at = HEAD_NBYTES
        self.head = None if first is None else self._head(first, kind, number)

    def _head(self, first: Frame, kind: str, number: int) -> Head:
        try:
            head = msgspec.msgpack.decode(first.payload, type=Head)
        except msgspec.MsgspecError as error:
            self.close()
            raise JournalCorrupt(f"{self.path} has no head: {error}") from None
        if head.format != FORMAT:
            self.close()
            raise JournalUnsupported(f"{self.path} is of format {head.format}, this version reads {FORMAT}")
        if (head.kind, head.number) != (kind, number):
            self.close()
            raise JournalCorrupt(f"{self.path} is {name_of(head.kind, head.number)}")
        return head

    def frames(self) -> Iterator[Frame]:
        """Those after the head, once. Raises `JournalCorrupt` for a damaged one."""
        if self.head is None:
            return
        last = self.head.position - 1
        while self._at < self._size:
            frame = self._frame(self._at, self.head.seed)
            if frame is None:
                if self._any_frame(self._at + 1, self.head.seed, last + 1):
                    raise JournalCorrupt(f"{self.path} is damaged at byte {self._at}")
                text = "%s: what was being written at byte %d when its machine stopped is left out"
                log.warning(text, self.path, self._at)
                return
            last = frame.position
            self._at += FRAME.size + len(frame.payload)
            yield frame

    def _read(self, at: int, nbytes: int) -> bytes:
        try:
            self._file.seek(at)
            return self._file.read(nbytes)
        except OSError as error:
            raise JournalCorrupt(f"{self.path} cannot be read at byte {at}: {error}") from error

    def _frame(self, at: int, seed: int) -> Frame | None:
        return frame_at(at, self._size, self._read, seed)

    def _any_frame(self, at: int, seed: int, position: int = 0) -> bool:
        """Whether a good frame of this event or a later one begins somewhere from there on."""
        data = self._read(at, self._size - at)
        for found in re.finditer(re.escape(MAGIC), data):
            frame = self._frame(at + found.start(), seed)
            if frame is not None and frame.position >= position:
                return True
        return False

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FrameFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HeldDirectory(NamedTuple):
    """Descriptors of a directory, whose inode is nobody else's meanwhile, and of the lock in it (flock(2))."""

    directory: int
    lock: int

    def close(self) -> None:
        for fd in self:
            os.close(fd)

    @property
    def id(self) -> ClaimId:
        return _file_id(self.directory), _file_id(self.lock)


def claim(directory: Path) -> HeldDirectory:
    """Make the directory of a journal (mode 0700) and hold it.

    Raises `JournalInUse` where another server holds it, `ConfigError` where there can be none.
    """
    try:
        make_directory(directory, 0o700)
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            held = HeldDirectory(opened, os.open(LOCK, flags, 0o600, dir_fd=opened))
        except OSError:
            os.close(opened)
            raise
    except OSError as error:
        raise ConfigError(f"server.journal_dir: {error}") from error
    deadline = time.monotonic() + VACATE_S
    while True:
        try:
            fcntl.flock(held.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)  # nothing is served yet
                continue
            held.close()
            raise JournalInUse(f"another server keeps its journal in {directory}") from None
        return held


def _file_id(file: int | Path) -> FileId:
    """Raises `OSError`."""
    found = os.stat(file)
    return found.st_dev, found.st_ino


def check_claim(directory: Path, claimed: ClaimId | None) -> None:
    """Raises `FileNotFoundError` where the directory is not the one that was claimed so (None: any): it was removed or
    moved away, or its lock was and another server has it by now. What lies at its path may be another journal."""
    if claimed is None:
        return
    lock = claimed[1]
    with contextlib.suppress(FileNotFoundError):  # who clears up by age takes the lock first: nobody writes it
        lock = _file_id(directory / LOCK)
    if (_file_id(directory), lock) != claimed:
        raise FileNotFoundError(
            errno.ENOENT, "it was removed or moved away, and another journal is there", str(directory)
        )
