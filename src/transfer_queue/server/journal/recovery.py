"""Making the state of before from the last snapshot and the facts after it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from transfer_queue.errors import InvalidInput, JournalCorrupt, StoreFull
from transfer_queue.server.journal import snapshots
from transfer_queue.server.journal.facts import (
    BlockGone,
    BlockInEngine,
    BlockLogged,
    BlockRenamed,
    BlockShared,
    BlockStored,
    EngineIs,
    JournalFact,
    LeftInEngine,
    SnapshotComplete,
    decoded,
    decoded_events,
)
from transfer_queue.server.journal.files import DRAFT, FrameFile, name_of, numbers
from transfer_queue.server.journal.kept_state import KeptState
from transfer_queue.server.journal.kept_unit import KeptUnit
from transfer_queue.server.journal.payloads import Payloads, Place
from transfer_queue.storage.engines.sealed import prefix_of

log = logging.getLogger("transfer_queue.server")


class Recovered(NamedTuple):
    """What was found: the number of the next event, and of the last log or snapshot (-1: there was no journal)."""

    position: int
    number: int


def last_number(directory: Path) -> int:
    """Of all logs and snapshots, begun ones included; -1 where there are none."""
    drafts = [int(path.stem.rpartition("-")[2]) for path in directory.glob(f"snapshot-????????{DRAFT}")]
    return max([*numbers(directory, "log"), *numbers(directory, "snapshot"), *drafts], default=-1)


def recover(directory: Path, kept: KeptState, unit: KeptUnit) -> Recovered:
    """Bring state and unit, which nobody has asked anything, to what the journal says.

    The journal is only read. Raises `JournalCorrupt`, `JournalUnsupported`, `CheckpointCorrupt`, `InvalidInput` where
    it is of another kind of server or of another sampler, and `StoreFull` where the blocks do not fit.
    """
    unit.directory_inode = os.stat(directory).st_ino
    snapshot = max(numbers(directory, "snapshot"), default=-1)
    logs = _logs(directory, snapshot)
    if snapshot < 0:
        if logs:
            raise JournalCorrupt(f"{directory}: there are logs, and the snapshot that they follow is missing")
        log.warning("%s: a new journal begins here", directory)
        return Recovered(0, last_number(directory))
    if logs[:1] != [snapshot]:
        raise JournalCorrupt(f"{directory / name_of('log', snapshot)} is missing")
    found = snapshots.read(directory, snapshot)
    try:
        kept.begin(found.state, found.numbers, found.head.reserved_rows)
    except InvalidInput as error:
        raise InvalidInput(f"the journal in {directory} is not for this server: {error}") from error
    blocks = KnownBlocks()
    for fact in found.facts:
        _apply(fact, kept, blocks)
    position = found.head.position
    for number in logs:
        position = _replay(directory, number, position, kept, blocks)
    back = kept.finish()
    blocks.put_back(directory, kept, unit)
    kept.all_back()
    log.warning("%s: %s are back", directory, back)
    return Recovered(position, last_number(directory))


def _logs(directory: Path, snapshot: int) -> list[int]:
    """The logs that count with this snapshot (-1: there is none). Raises `JournalCorrupt` where a later one is missing.

    A log without a head is one whose machine stopped, or whose disk was full, when it was begun. One that does not
    follow the log before counts with a snapshot of its own; without that, nobody was told of anything since.
    """
    found = []
    for number in numbers(directory, "log"):
        if number < snapshot:
            continue
        with FrameFile(directory, "log", number) as file:
            if file.head is None:
                continue
            if number > snapshot and not file.head.follows:
                facts = (fact for frame in file.frames() for fact in decoded(frame.payload))
                if any(fact == SnapshotComplete(number) for fact in facts):
                    raise JournalCorrupt(f"{directory / name_of('snapshot', number)} is missing")
                break
        found.append(number)
    return found


def _apply(fact: JournalFact, kept: KeptState, blocks: KnownBlocks) -> None:
    if not blocks.apply(fact):
        kept.apply(fact)


def _replay(directory: Path, number: int, position: int, kept: KeptState, blocks: KnownBlocks) -> int:
    """Carry out the facts of a log; returns the number of the next event."""
    with FrameFile(directory, "log", number) as file:
        for frame in file.frames():
            if frame.position != position:
                text = f"event {frame.position} at byte {frame.offset}, expected was {position}"
                raise JournalCorrupt(f"{file.path}: {text}")
            events = list(decoded_events(frame.payload))
            position += len(events)
            try:
                for fact in itertools.chain.from_iterable(events):
                    _apply(fact, kept, blocks)
            except JournalCorrupt as error:
                raise JournalCorrupt(f"{file.path}, byte {frame.offset}: {error}") from error
    return position


class KnownBlocks:
    """Where the bytes of each block are that was said to be there."""

    def __init__(self) -> None:
        self._small: dict[int, BlockLogged] = {}
        self._large: dict[int, tuple[bytes, Place]] = {}
        self._in_engine: dict[int, BlockInEngine] = {}
        self._left: list[str] = []
        self._engine = EngineIs("")
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
            case BlockInEngine():
                self._in_engine[fact.block] = fact
                self._last = max(self._last, fact.block)
            case LeftInEngine():
                self._left += fact.keys
            case EngineIs():
                self._engine = fact
            case BlockRenamed() | BlockShared():
                if fact.block not in self._large:
                    raise JournalCorrupt(f"a copy of block {fact.block}, which is not there")
                self._large[fact.copy] = self._large[fact.block]
                if isinstance(fact, BlockRenamed):
                    del self._large[fact.block]
                self._last = max(self._last, fact.copy)
            case BlockGone():
                self._small.pop(fact.block, None)
                self._large.pop(fact.block, None)
            case SnapshotComplete():
                pass
            case _:
                return False
        return True

    def put_back(self, directory: Path, kept: KeptState, unit: KeptUnit) -> None:
        """Those that are needed, into memory. What nobody needs of the engine is to be deleted there."""
        in_memory = self._small.keys() | self._large.keys()
        needed = set(kept.wanted(in_memory | self._in_engine.keys()))
        wanted = sorted(needed - self._in_engine.keys())
        missing = [number for number in wanted if number not in in_memory]
        if missing:
            raise JournalCorrupt(f"{directory}: blocks {missing[:8]} are missing")
        left = dict.fromkeys([*self._left, *(fact.key for fact in self._in_engine.values())])
        unit.engine_place = self._engine.place
        unit.shared_prefixes = tuple(self._shared(directory, unit.directory_inode, left))
        for number, fact in self._in_engine.items():
            if number in needed:
                unit.put_back_in_engine(fact)
                del left[fact.key]
        unit.left_in_engine += unit.only_here(left)
        places = {number: self._large[number][1] for number in wanted if number in self._large}
        payloads = Payloads(directory, set(places.values()))
        try:
            for number in sorted(wanted, key=self._nbytes, reverse=True):
                self._put_back(number, payloads, unit)
        finally:
            payloads.close()
        unit.take_facts()  # they are in the journal
        unit.put_next(self._last + 1)

    def _shared(self, directory: Path, inode: int, keys: Collection[str]) -> list[str]:
        """What the keys begin with of blocks that another journal may need."""
        if not keys or self._engine.directory in (0, inode):
            return self._engine.shared
        text = "%s is a copy of another journal, which may need the %d blocks in the storage engine: they stay there"
        log.warning(text, directory, len(keys))
        return sorted({*self._engine.shared, *(prefix_of(key) for key in keys)})

    def _nbytes(self, number: int) -> int:
        small = self._small.get(number)
        return len(small.data) if small is not None else self._large[number][1].nbytes

    def _put_back(self, number: int, payloads: Payloads, unit: KeptUnit) -> None:
        small, nbytes = self._small.get(number), self._nbytes(number)
        block = unit.put_back(number, nbytes)
        if block is None:
            raise StoreFull(f"the journal has more than there is room for: {unit.full(nbytes)}")
        if small is not None:
            unit.memory(block)[:] = memoryview(small.data)
            unit.publish(number, small.layout)
        else:
            layout, place = self._large[number]
            payloads.read(place, unit.memory(block))
            unit.lies_at(number, place)
            unit.publish(number, layout)
