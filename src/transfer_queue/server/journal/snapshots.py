"""The whole state on a disk: written by a fork of the server, which goes on meanwhile.

    head; the state; the numbers of the blocks in it; what else is to be known and all blocks, as facts; end

Nothing that the fork reads changes: its memory is a copy, and blocks of before are not recycled until it is done.
"""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from transfer_queue.errors import JournalCorrupt
from transfer_queue.memory.memfd import start_writing, sync_directory
from transfer_queue.server.forks import disconnect, watch
from transfer_queue.server.journal.facts import EngineIs, JournalFact, LeftInEngine, decoded, encoded
from transfer_queue.server.journal.files import (
    DRAFT,
    FORMAT,
    ClaimId,
    FrameFile,
    Head,
    check_claim,
    framed,
    headed,
    name_of,
    write_all,
)
from transfer_queue.server.journal.kept_state import KeptState
from transfer_queue.server.journal.kept_unit import KeptUnit
from transfer_queue.wire.arrays import numbers_of

PART_NBYTES = 8 << 20
END = b"end"


class ReadSnapshot(NamedTuple):
    """A state, which is opaque here, the blocks that it refers to, and what is known besides."""

    head: Head
    state: bytes
    numbers: list[int]
    facts: list[JournalFact]


class SnapshotProcess(NamedTuple):
    """A snapshot that is being written by process `pid`; `watch` is readable when that has ended (pidfd_open(2))."""

    number: int
    pid: int
    watch: int


def fork(
    directory: Path, number: int, position: int, kept: KeptState, unit: KeptUnit, claimed: ClaimId
) -> SnapshotProcess:
    """Begin to write a snapshot of now. Raises `OSError`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child needs none of theirs
        pid = os.fork()
    if not pid:
        _write_and_exit(directory, head_of(number, position, kept), kept, unit, claimed)
    return SnapshotProcess(number, pid, watch(pid))


def head_of(number: int, position: int, kept: KeptState) -> Head:
    """Of a snapshot of now, after which event `position` is the next."""
    return Head(FORMAT, "snapshot", number, position, secrets.randbits(63), True, kept.reserved_rows)


def _write_and_exit(directory: Path, head: Head, kept: KeptState, unit: KeptUnit, claimed: ClaimId) -> NoReturn:
    """The fork's whole life. It is deep inside the server's event loop, which is never run again, nor taken apart.

    It does not hold the directory: a server that begins meanwhile has higher numbers, and removes what this one left.
    """
    status = 1
    try:
        gc.freeze()
        gc.disable()
        disconnect(set())
        write(directory, head, kept, unit, claimed)
        status = 0
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(status)


def write(directory: Path, head: Head, kept: KeptState, unit: KeptUnit, claimed: ClaimId | None = None) -> None:
    """Blocks until it is on the disk under its name. Raises `OSError`, also where by then another one claimed the
    directory, or it is elsewhere."""
    check_claim(directory, claimed)
    path = directory / name_of("snapshot", head.number)
    draft = path.with_suffix(DRAFT)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        at = write_all(fd, headed(head), 0)
        state, numbers, facts = kept.saved()
        parts = itertools.chain(([state], [np.array(numbers, np.int64).tobytes()]), _parts(facts, unit), ([END],))
        for place, part in enumerate(parts):
            start, at = at, write_all(fd, framed(head.position + place, part, head.seed), at)
            start_writing(fd, start, at - start)  # while the next part is made
        os.fsync(fd)
    finally:
        os.close(fd)
    check_claim(directory, claimed)
    os.rename(draft, path)
    sync_directory(directory)


def _parts(found: list[JournalFact], unit: KeptUnit) -> Iterator[list[bytes]]:
    """These facts and the blocks, some megabytes at a time: encoded together, small ones take a third less time."""
    nbytes = 0
    if unit.engine_place:
        engine = EngineIs(unit.engine_place, unit.directory_inode, list(unit.shared_prefixes))
        found += [engine, LeftInEngine(unit.to_delete)]
    for block in unit.lasting():
        found.append(unit.fact_of(block))
        nbytes += len(block.layout) + (0 if block.number in unit.places else block.nbytes)
        if nbytes > PART_NBYTES:
            yield [encoded(found)]
            found, nbytes = [], 0
    if found:
        yield [encoded(found)]


def read(directory: Path, number: int) -> ReadSnapshot:
    """Raises `JournalCorrupt` and `JournalUnsupported`."""
    with FrameFile(directory, "snapshot", number) as file:
        parts = [frame.payload for frame in file.frames()]
        if file.head is None or len(parts) < 3 or parts[-1] != END:
            raise JournalCorrupt(f"{file.path} has no end")
    state, blocks_of_state, *facts, _ = parts
    known = [fact for part in facts for fact in decoded(part)]
    return ReadSnapshot(file.head, state, numbers_of(blocks_of_state).tolist(), known)
