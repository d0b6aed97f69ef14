"""Making the state of before from the last snapshot and the facts after it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from transfer_queue.controller import Controller
from transfer_queue.controller.recovery import Recovery
from transfer_queue.errors import JournalCorrupt, StoreFull
from transfer_queue.server.journal import snapshots
from transfer_queue.server.journal.facts import (
    LENGTH_NBYTES,
    BlockLogged,
    BlockRenamed,
    BlockStored,
    JournalFact,
    SnapshotComplete,
    decoded,
)
from transfer_queue.server.journal.files import Frame, frames, head_of, name_of, numbers
from transfer_queue.server.journal.kept_unit import KeptUnit
from transfer_queue.server.journal.payloads import Payloads, Place

log = logging.getLogger("transfer_queue.server")


class Recovered(NamedTuple):
    """What was found: the number of the next event, and of the last log or snapshot (-1: there was no journal)."""

    position: int
    number: int


def last_number(directory: Path) -> int:
    """Of all logs and snapshots, begun ones included; -1 where there are none."""
    drafts = [int(path.stem.rpartition("-")[2]) for path in directory.glob("snapshot-????????.tmp")]
    return max([*numbers(directory, "log"), *numbers(directory, "snapshot"), *drafts], default=-1)


def recover(directory: Path, controller: Controller, unit: KeptUnit) -> Recovered:
    """Bring controller and unit, which nobody has asked anything, to what the journal says.

    The journal is only read. Raises `JournalCorrupt`, `JournalUnsupported`, `CheckpointCorrupt`, `InvalidInput` where
    it is of another sampler, and `StoreFull` where the blocks do not fit.
    """
    snapshot = max(numbers(directory, "snapshot"), default=-1)
    logs = [number for number in numbers(directory, "log") if number >= snapshot]
    if logs and logs[-1] > snapshot and next(frames(directory / name_of("log", logs[-1])), None) is None:
        del logs[-1]  # its machine stopped when it was begun
    if snapshot < 0:
        if any(_follows(directory, number, snapshot) for number in logs):
            raise JournalCorrupt(f"{directory}: there are logs, and the snapshot that they follow is missing")
        return Recovered(0, last_number(directory))
    found = snapshots.read(directory, snapshot)
    blocks = KnownBlocks()
    for fact in found.blocks:
        blocks.apply(fact)
    recovery = Recovery(controller, found.state, found.numbers, found.head.reserved_rows)
    position = found.head.position
    if logs[:1] != [snapshot]:
        raise JournalCorrupt(f"{directory / name_of('log', snapshot)} is missing")
    for number in logs:
        if not _follows(directory, number, snapshot):
            break  # what came after it was promised to nobody
        position = _replay(directory, number, position, recovery, blocks)
    recovery.finish()
    blocks.put_back(directory, controller, unit)
    log.warning("%s: %d rows are back, after %d events", directory, controller.num_rows, position)
    return Recovered(position, last_number(directory))


def _follows(directory: Path, number: int, snapshot: int) -> bool:
    """Whether a log counts with this snapshot; else only with one that was not finished. Raises `JournalCorrupt` where
    that was, and is missing."""
    path = directory / name_of("log", number)
    if number == snapshot:
        return True
    found = frames(path)
    if head_of(path, "log", number, found).follows:
        return True
    if any(fact == SnapshotComplete(number) for frame in found for fact in decoded(frame.payload)):
        raise JournalCorrupt(f"{directory / name_of('snapshot', number)} is missing")
    return False


def _replay(directory: Path, number: int, position: int, recovery: Recovery, blocks: KnownBlocks) -> int:
    """Carry out the facts of a log; returns the number of the next event."""
    path = directory / name_of("log", number)
    found = frames(path)
    head = head_of(path, "log", number, found)
    if head.position > position and next(found, None) is None:
        return position  # the machine stopped when it was begun: the end of the one before was not written yet
    if head.position != position:
        raise JournalCorrupt(f"{path} begins with event {head.position}, the one before it ends with {position}")
    for frame in found:
        if frame.position != position:
            raise JournalCorrupt(f"{path}: event {frame.position} at byte {frame.offset}, expected {position}")
        position += _num_events(frame)
        try:
            for fact in decoded(frame.payload):
                if not blocks.apply(fact):
                    recovery.apply(fact)  # type: ignore[arg-type]
        except JournalCorrupt as error:
            raise JournalCorrupt(f"{path}, byte {frame.offset}: {error}") from error
    return position


def _num_events(frame: Frame) -> int:
    at = count = 0
    while at < len(frame.payload):
        at += LENGTH_NBYTES + int.from_bytes(frame.payload[at : at + LENGTH_NBYTES], "little")
        count += 1
    return count


class KnownBlocks:
    """Where the bytes of each block are that was said to be there."""

    def __init__(self) -> None:
        self._small: dict[int, BlockLogged] = {}
        self._large: dict[int, tuple[bytes, Place]] = {}
        self._last = 0

    def apply(self, fact: JournalFact) -> bool:
        """Whether it was about a block. Raises `JournalCorrupt`."""
        match fact:
            case BlockLogged():
                self._small[fact.block] = fact
                self._last = max(self._last, fact.block)
            case BlockStored():
                place = Place(fact.file, fact.offset, fact.nbytes, fact.digest)
                self._large[fact.block] = fact.layout, place
                self._last = max(self._last, fact.block)
            case BlockRenamed():
                if fact.block not in self._large:
                    raise JournalCorrupt(f"a copy of block {fact.block}, which is not there")
                self._large[fact.copy] = self._large.pop(fact.block)
                self._last = max(self._last, fact.copy)
            case SnapshotComplete():
                pass
            case _:
                return False
        return True

    def put_back(self, directory: Path, controller: Controller, unit: KeptUnit) -> None:
        """Those that rows lie in, into memory."""
        wanted = sorted(controller.block_index.entries)
        missing = [number for number in wanted if number not in self._small and number not in self._large]
        if missing:
            raise JournalCorrupt(f"{directory}: blocks {missing[:8]} are missing")
        places = {number: self._large[number][1] for number in wanted if number in self._large}
        payloads = Payloads(directory, places.values())
        try:
            for number in wanted:
                self._put_back(number, payloads, unit)
        finally:
            payloads.close()
        unit.put_next(self._last + 1)

    def _put_back(self, number: int, payloads: Payloads, unit: KeptUnit) -> None:
        small = self._small.get(number)
        nbytes = len(small.data) if small is not None else self._large[number][1].nbytes
        block = unit.put_back(number, nbytes)
        if block is None:
            raise StoreFull(f"the journal has more than there is room for: {unit.full(nbytes)}")
        if small is not None:
            unit.memory(block)[:] = memoryview(small.data)
            unit.publish(number, small.layout)
        else:
            layout, place = self._large[number]
            payloads.read(place, unit.memory(block))
            unit.places[number] = place
            unit.publish(number, layout)
        unit.take_facts()  # they are in the journal
