"""The files of a journal: their names, and frames, each written at once and checked when it is read.

A frame that was not finished when the machine lost its power is the end of its file, and counts as not written. A bad
one with a good one after it was damaged later: that is an error, for what comes after it may rest on it.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64

from transfer_queue.errors import ConfigError, JournalCorrupt, JournalInUse, JournalUnsupported

log = logging.getLogger("transfer_queue.server")

FORMAT = 1
MAGIC = b"TQJ\n"
FRAME = struct.Struct("<4sQQQQ")  # magic, bytes, xxh3-64 of all that follows, position, time.time_ns()
CHECKED = struct.Struct("<QQ")
NAME = re.compile(r"(snapshot|log|blocks)-(\d{8})")
LOCK = "lock"
VACATE_S = 3.0  # how long the server before, or a snapshot of it, may take to end


class Head(msgspec.Struct):
    """The first frame of a snapshot or a log. `position`: the number of the first event in the log with this number.
    `follows`: it goes on where the log before ends; else it counts only together with its snapshot. `reserved_rows`:
    of a partition, in the service of a snapshot."""

    format: int
    kind: str
    number: int
    position: int
    follows: bool = True
    reserved_rows: int = 0


class Frame(NamedTuple):
    """`position`: the number of the first event in it."""

    offset: int
    position: int
    payload: memoryview


def name_of(kind: str, number: int) -> str:
    return f"{kind}-{number:08d}"


def numbers(directory: Path, kind: str) -> list[int]:
    """Of the files of this kind, ascending."""
    found = (NAME.fullmatch(name) for name in os.listdir(directory))
    return sorted(int(one[2]) for one in found if one is not None and one[1] == kind)


def framed(position: int, payload: Sequence[bytes]) -> list[bytes]:
    """A frame as buffers, to be written at once."""
    digest = xxh3_64(checked := CHECKED.pack(position, time.time_ns()))
    for part in payload:
        digest.update(part)
    size = sum(map(len, payload))
    return [FRAME.pack(MAGIC, size, digest.intdigest(), *CHECKED.unpack(checked)), *payload]


def write_all(fd: int, parts: Sequence[bytes | memoryview], at: int) -> int:
    """Write buffers one after the other at an offset; returns the offset after them. Raises `OSError`."""
    data = memoryview(b"".join(parts))
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
    return at + len(data)


def frames(path: Path) -> Iterator[Frame]:
    """The frames of a file in order, up to one that was not finished. Raises `JournalCorrupt` for a damaged one."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        data = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
    at = 0
    while at < size:
        frame = _frame(data, at)
        if frame is None:
            if _any_frame(data, at + 1):
                raise JournalCorrupt(f"{path} is damaged at byte {at}")
            log.warning("%s: what was being written at byte %d when its machine stopped is left out", path, at)
            return
        yield frame
        at += FRAME.size + len(frame.payload)


def _frame(data: memoryview, at: int) -> Frame | None:
    """The frame there; None where there is no good one."""
    if at + FRAME.size > len(data):
        return None
    magic, size, digest, position, when = FRAME.unpack(data[at : at + FRAME.size])
    if magic != MAGIC or at + FRAME.size + size > len(data):
        return None
    payload = data[at + FRAME.size : at + FRAME.size + size]
    found = xxh3_64(CHECKED.pack(position, when))
    found.update(payload)
    return Frame(at, position, payload) if found.intdigest() == digest else None


def _any_frame(data: memoryview, at: int) -> bool:
    """Whether a good frame begins somewhere from there on."""
    found = re.finditer(re.escape(MAGIC), data[at:])
    return any(_frame(data, at + one.start()) is not None for one in found)


def head_of(path: Path, kind: str, number: int, found: Iterator[Frame]) -> Head:
    """The head of a file, whose frames these are. Raises `JournalCorrupt` or `JournalUnsupported`."""
    first = next(found, None)
    if first is None:
        raise JournalCorrupt(f"{path} has no head")
    try:
        head = msgspec.msgpack.decode(first.payload, type=Head)
    except msgspec.MsgspecError as error:
        raise JournalCorrupt(f"{path} has no head: {error}") from None
    if head.format != FORMAT:
        raise JournalUnsupported(f"{path} is of format {head.format}, this version reads {FORMAT}")
    if (head.kind, head.number) != (kind, number):
        raise JournalCorrupt(f"{path} is {name_of(head.kind, head.number)}")
    return head


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claim(directory: Path) -> int:
    """Make the directory of a journal (mode 0700) and hold it (flock(2)); the descriptor that does.

    Raises `JournalInUse` where another server holds it, `ConfigError` where there can be none.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"server.journal_dir: {error}") from error
    deadline = time.monotonic() + VACATE_S
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)  # nothing is served yet
                continue
            os.close(held)
            raise JournalInUse(f"another server keeps its journal in {directory}") from None
        return held
