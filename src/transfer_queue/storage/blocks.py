"""Blocks of one host: allocation within a byte budget, publication, pins, and what vanished clients leave behind."""

from __future__ import annotations

import itertools
from collections.abc import Container, Hashable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from transfer_queue.errors import DataLost, InternalError, InvalidInput, RowCleared, StoreFull
from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.memfd import read_file
from transfer_queue.storage.pins import NO_REQUEST, Pins
from transfer_queue.storage.shm import SMALL_NBYTES, SharedMemory
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire.messages import (
    REMOTE,
    UNIT_SHIFT,
    Allocate,
    Allocated,
    Commit,
    Failed,
    InArena,
    InEngine,
    Piece,
    Reply,
    Waiting,
    WaitOverview,
)

GIVEN_SHARE, GIVEN_NBYTES = 1 / 16, 32 << 20  # of the budget, at most: memory goes back to the system in such steps
FULL_SHARE, ROOMY_SHARE = 0.85, 0.75  # of the budget: blocks are moved to a disk above the one, down to the other


class SpillSpace(NamedTuple):
    """A directory for blocks that have no room in memory, and how many bytes of them it takes."""

    directory: str | None
    budget_nbytes: int


NOWHERE = SpillSpace(None, 0)
IN_ENGINE = -1  # in place of an arena's number


class Block:
    """A range of an arena, or what lies in the storage engine under `key`. It lives until it is dropped by its owner
    or the controller, and no pin is left."""

    __slots__ = (
        "arena", "digest", "dropped", "key", "layout", "nbytes", "number", "offset", "owner", "pins", "published",
        "stays",
    )  # fmt: skip

    def __init__(self, number: int, arena: int, offset: int, nbytes: int, key: str = "") -> None:
        self.number = number
        self.key = key
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.owner: bytes | None = None  # the session that is filling it
        self.layout = b""
        self.digest = 0  # xxh3-64 of its bytes, where they lie on a disk
        self.pins = 0
        self.published = False
        self.dropped = False
        self.stays = False  # it was to be moved to a disk, which could not be done

    @property
    def is_in_engine(self) -> bool:
        return self.arena == IN_ENGINE

    @property
    def location(self) -> InArena | InEngine:
        return InEngine(self.key) if self.arena == IN_ENGINE else InArena(self.arena, self.offset, self.digest)


class Unit:
    """`budget_nbytes` bounds the bytes of all blocks, pinned ones included. Block numbers begin with the unit's
    `number` and are never used again.

    An allocation that does not fit now is parked, and answered in `outbox` when memory is released, first come, first
    served. Arenas in a `directory` need space of its file system as well: none is as if the budget had no room.

    `spill`: where blocks can be moved that have no room in memory, and how many bytes of them; they do not count in
    the budget.

    With an `engine_prefix`, large blocks that clients ask for lie in the service's storage engine, which has its own
    budget, under keys that begin so; `left_in_engine` lists those that are to be deleted there.
    """

    def __init__(self, budget_nbytes: int, directory: str | None = None, spill: SpillSpace = NOWHERE) -> None:
        self.budget_nbytes = budget_nbytes
        self.spill = spill
        self.number = 0
        self.used_nbytes = 0
        self.spilled_nbytes = self.num_spilled = 0
        self.engine_prefix = ""
        self.engine_place = ""  # where that is, as a journal remembers it
        self.engine_nbytes = 0
        self.left_in_engine: list[str] = []
        self.peak_nbytes = 0  # since the last rotation of the trimmer
        self._touched_nbytes = (
            0  # of memory at most: what was placed since it was measured may have been touched before
        )
        self._look_nbytes = budget_nbytes  # when more may be touched, free memory is given back
        self.shm = SharedMemory(directory, spill.directory)
        self.outbox: list[tuple[Hashable, Reply]] = []
        self._blocks: dict[int, Block] = {}
        self._next = 1
        self._unpublished: dict[bytes, set[int]] = {}
        self._pins = Pins()
        self.is_spilling = False  # blocks are being moved to the disk
        self.disk_is_short = False  # there was no room for the last ones
        self._resting: dict[int, None] = {}  # large blocks in memory that nobody reads, the longest unread first
        self._waiting: WaitQueue[Allocate] = WaitQueue()
        self._disk_is_full = False  # why the latest block that found no room found none
        self._refused: Waiter[Allocate] | None = None  # waits for space of the file system, and none was released yet

    def renumber(self, number: int) -> None:
        """Number the blocks from here on as those of unit `number`."""
        self._next += (number - self.number) << UNIT_SHIFT
        self.number = number

    # writing

    def allocate(self, message: Allocate, ticket: Hashable, session: bytes, now: float) -> Allocated | None:
        """A block for `session`, or None after parking the request; `StoreFull` when it can never fit."""
        if message.nbytes < 1:
            raise InvalidInput(f"a block of {message.nbytes} bytes")
        if message.nbytes > max(self.budget_nbytes, self.spill.budget_nbytes) and not self.engine_prefix:
            raise StoreFull(f"{message.nbytes} bytes exceed the store's budget of {self.budget_nbytes} bytes")
        is_first = not len(self._waiting)
        allocated = self._allocated(message, session) if is_first else None
        if allocated is not None:
            return allocated
        if message.timeout_s <= 0:
            raise StoreFull(self.full(message.nbytes))
        parked = Waiter(ticket, session, message, now + message.timeout_s, now)
        self._waiting.add(parked)
        if is_first and self._disk_is_full:
            self._refused = parked
        return None

    def _allocated(self, message: Allocate, session: bytes) -> Allocated | None:
        waits = message.timeout_s > 0 and message.nbytes <= self.budget_nbytes
        if self.engine_prefix and message.nbytes > SMALL_NBYTES:
            block: Block | None = self.place_in_engine(message.nbytes, session)
        else:
            block = self.place_anywhere(message.nbytes, session, waits)
        if block is None:
            return None
        if message.pin:
            self.pin(block.number, session, message.rid)
        return Allocated(message.rid, block.number, block.location)

    def place_anywhere(self, nbytes: int, session: bytes | None, waits: bool = False) -> Block | None:
        """As `place`, in memory; else on the disk. Who `waits` gets memory as long as some can be given free."""
        block = self.place(nbytes, session)
        waits = waits and not self.disk_is_short and bool(self._resting or self.is_spilling)
        if block is None and self.spill.budget_nbytes and not waits:
            block = self.place(nbytes, session, spills=True)
        return block

    def place(self, nbytes: int, session: bytes | None, spills: bool = False) -> Block | None:
        """A new block, or None when the budget or the file system has no room for it now. `spills`: where those are
        that have no room in memory."""
        size = self.shm.rounded(nbytes)
        if spills:
            fits = self.spilled_nbytes + size <= self.spill.budget_nbytes
            spilled = self.shm.take(nbytes, spills=True) if fits else None
            return None if spilled is None else self._enter(*spilled, nbytes, session)
        self._disk_is_full = False
        if self.used_nbytes + size > self.budget_nbytes:
            return None
        if self._touched_nbytes + size > self._look_nbytes:
            self._give_back(size)
        place = self.shm.take(nbytes)
        if place is None:
            self._disk_is_full = True
            return None
        return self._enter(*place, nbytes, session)

    def _give_back(self, nbytes: int) -> None:
        """Free memory that was touched is resident. Give so much of it to the system that `nbytes` more are within the
        budget; where it cannot be given, look again when some more was placed."""
        step = min(GIVEN_NBYTES, int(GIVEN_SHARE * self.budget_nbytes))
        self._touched_nbytes, self._look_nbytes = self.shm.resident_nbytes(), self.budget_nbytes
        surplus = self._touched_nbytes + nbytes - self.budget_nbytes
        if surplus > 0:
            self.shm.trim(surplus + step)
            self._touched_nbytes = self.shm.resident_nbytes()
            if self._touched_nbytes + nbytes > self.budget_nbytes:
                self._look_nbytes = self._touched_nbytes + nbytes + step

    def place_at(self, arena: int, offset: int, nbytes: int, session: bytes | None) -> Block:
        """A new block in this very range, where `place` put it before. Raises `KeyError` when it is not free."""
        self.shm.claim(arena, offset, nbytes)
        return self._enter(arena, offset, nbytes, session)

    def place_in_engine(self, nbytes: int, session: bytes | None, key: str = "") -> Block:
        """A new block there. It has a key of its own ("": one that nothing was ever called)."""
        return self._enter(IN_ENGINE, 0, nbytes, session, key or f"{self.engine_prefix}{self._next}")

    def _enter(self, arena: int, offset: int, nbytes: int, session: bytes | None, key: str = "") -> Block:
        block = Block(self._next, arena, offset, nbytes, key)
        self._next += 1
        self._blocks[block.number] = block
        self.hand_over(block, session)
        self._count(block, self.shm.rounded(nbytes))
        return block

    def _count(self, block: Block, nbytes: int) -> None:
        """So many bytes more (or less) are taken where the block lies."""
        if block.is_in_engine:
            self.engine_nbytes += nbytes
        elif self.spill.budget_nbytes and self.is_spilled(block):
            self.spilled_nbytes += nbytes
            self.num_spilled += 1 if nbytes > 0 else -1
            self.disk_is_short = self.disk_is_short and nbytes > 0
        else:
            self.used_nbytes += nbytes
            self._touched_nbytes += max(0, nbytes)
            self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)

    def is_spilled(self, block: Block) -> bool:
        return not block.is_in_engine and self.shm.arenas[block.arena].spills

    def hand_over(self, block: Block, owner: bytes | None) -> None:
        """From now on `owner` fills it (None: nobody)."""
        if block.owner is not None:
            self._unpublished[block.owner].discard(block.number)
        block.owner = owner
        if owner is not None:
            self._unpublished.setdefault(owner, set()).add(block.number)

    def unpublished(self, number: int, session: bytes) -> Block:
        """A block that `session` is filling, or `InvalidInput`: also for one that it gave up and still has pinned."""
        block = self._blocks.get(number)
        if block is None or block.owner != session or block.dropped:
            raise InvalidInput(f"block {number} is not one this client is filling")
        return block

    def memory(self, block: Block) -> Bytes:
        if block.is_in_engine:
            raise InternalError(f"block {block.number} lies in the storage engine, not in memory")
        return self.shm.slice(block.arena, block.offset, block.nbytes)

    def content(self, block: Block, start: int = 0, end: int | None = None) -> Bytes:
        """Bytes of a published block, to be looked at. Those of a disk are read, for a look at mapped ones would end
        this process where the disk fails (SIGBUS); all of a block are compared with what was written. Raises
        `DataLost`."""
        end = block.nbytes if end is None else end
        if block.is_in_engine or not self.is_spilled(block):
            return self.memory(block)[start:end]
        where = f"block {block.number}: the disk that its rows were moved to"
        try:
            data = read_file(self.shm.arenas[block.arena].fd, block.offset + start, end - start)
        except OSError as error:
            raise DataLost(f"{where} has an error: {error}") from error
        compares = block.digest != 0 and len(data) == block.nbytes
        if compares and xxh3_64_intdigest(memoryview(data)) != block.digest:  # type: ignore[arg-type]
            raise DataLost(f"{where} gives other bytes than were written")
        return data

    def publish(self, number: int, layout: bytes, digest: int = 0) -> None:
        """The block's content is final; from now on the controller decides when it goes. `digest`: see `Block`."""
        block = self._blocks[number]
        self.hand_over(block, None)
        block.layout, block.published, block.digest = layout, True, digest
        if self.spill.budget_nbytes:
            self._rest(block)

    def drop(self, number: int) -> None:
        """Nobody needs the block any more; its memory is free once the last pin is gone."""
        block = self._blocks[number]
        block.dropped = True
        self._resting.pop(number, None)
        if block.owner is not None:
            self._unpublished[block.owner].discard(number)
        if not block.pins:
            self._free(block)

    def _free(self, block: Block) -> None:
        del self._blocks[block.number]
        if block.is_in_engine:
            self.leave_in_engine(block.key)
        else:
            self.shm.give(block.arena, block.offset, block.nbytes)
        self._count(block, -self.shm.rounded(block.nbytes))
        self._refused = None

    def leave_in_engine(self, key: str) -> None:
        """Nobody needs what lies there."""
        self.left_in_engine.append(key)

    # reading

    def holds(self, number: int, dropped: bool = False) -> bool:
        """Whether a block of this number is here; False for another unit's.

        A block that was dropped and is only pinned still does not count unless `dropped`: the number may be another
        unit's by now. Raises `RowCleared` for one that was here and is gone.
        """
        block = self._blocks.get(number)
        if block is not None and (dropped or not block.dropped):
            return True
        if number >> UNIT_SHIFT == self.number:
            raise RowCleared("the rows were cleared")
        return False

    def describe(self, pieces: list[Piece], layouts: list[bytes], dropped: bool = False) -> list[Piece]:
        """Those of `pieces` that are here, with where they lie filled in and their layouts added to `layouts`.

        `dropped`: see `holds`; cuts that live as long as their pins are wanted, too.
        """
        numbers: dict[bytes, int] = {}
        found = [piece for piece in pieces if piece.location == REMOTE and self.holds(piece.block, dropped)]
        for piece in found:
            block = self._blocks[piece.block]
            piece.location, piece.nbytes = block.location, block.nbytes
            if block.layout not in numbers:
                numbers[block.layout] = len(layouts)
                layouts.append(block.layout)
            piece.layout = numbers[block.layout]
        return found

    def published(self) -> list[int]:
        """The numbers of the blocks that only the controller can drop."""
        return [block.number for block in self._blocks.values() if block.published and not block.dropped]

    def in_engine(self) -> dict[str, int]:
        """The keys of the blocks that the storage engine has to have, and their numbers."""
        return {block.key: block.number for block in self._blocks.values() if block.is_in_engine and block.published}

    def block(self, number: int) -> Block | None:
        return self._blocks.get(number)

    def pin(self, number: int, session: bytes, rid: int = NO_REQUEST) -> None:
        self._blocks[number].pins += 1
        self._pins.add(number, session, rid)
        self._resting.pop(number, None)

    def unpin(self, number: int, session: bytes, rid: int = NO_REQUEST) -> None:
        """Release one pin of a request; unknown ones are ignored."""
        if self._pins.remove(number, session, rid):
            self._release_pin(number)

    def unpin_request(self, session: bytes, rid: int) -> None:
        """Release everything that a request pinned and that was not released yet."""
        for number in self._pins.of_request(session, rid):
            self.unpin(number, session, rid)

    def _release_pin(self, number: int) -> None:
        block = self._blocks[number]
        block.pins -= 1
        if block.dropped and not block.pins:
            self._free(block)
        elif self.spill.budget_nbytes:
            self._rest(block)

    def pinned(self, number: int, session: bytes) -> Block:
        """A block `session` has pinned. Raises `RowCleared` when it has not, or no longer: it locates the rows anew."""
        if not self._pins.holds(number, session):
            raise RowCleared(f"block {number} is not pinned by this client, or no longer")
        return self._blocks[number]

    def pins_of(self, session: bytes, rid: int) -> list[int]:
        """The blocks that a request holds pinned, once for each pin."""
        return self._pins.of_request(session, rid)

    def adopt(self, session: bytes, parent: bytes) -> None:
        """Give `session` a pin on everything `parent` has pinned."""
        for number in self._pins.of(parent):
            self.pin(number, session)

    # moving to a disk

    def _rest(self, block: Block) -> None:
        """Nobody reads the block now; it may be moved, before those that are read later."""
        if block.pins or not block.published or block.dropped or block.stays or block.is_in_engine:
            return
        if block.nbytes > SMALL_NBYTES and not self.is_spilled(block):
            self._resting[block.number] = None

    def surplus_nbytes(self) -> int:
        """How many bytes of memory are to be given free: for the first that waits, or for those that come next."""
        if not self.spill.budget_nbytes:
            return 0
        first = next(iter(self._waiting), None)
        if first is not None and first.message.nbytes <= self.budget_nbytes:
            return max(1, self.used_nbytes + self.shm.rounded(first.message.nbytes) - self.budget_nbytes)
        if self.used_nbytes <= (ROOMY_SHARE if self.is_spilling else FULL_SHARE) * self.budget_nbytes:
            return 0
        return self.used_nbytes - int(ROOMY_SHARE * self.budget_nbytes)

    @property
    def can_spill(self) -> bool:
        """Whether there are blocks to be moved."""
        return bool(self._resting)

    def rest_again(self) -> None:
        """Blocks that could not be moved, or had been, may be once more: their rows may lie in them again."""
        for block in self._blocks.values():
            if block.stays:
                block.stays = False
                self._rest(block)

    def longest_unread(self, nbytes: int) -> list[Block]:
        """Blocks of `nbytes` together, at least one, to be moved; fewer when there are no more."""
        found: list[Block] = []
        for number in self._resting:
            if nbytes <= 0:
                break
            found.append(self._blocks[number])
            nbytes -= found[-1].nbytes
        return found

    # trouble and time

    def forget(self, session: bytes) -> None:
        """A client is gone: free what it was filling, release its pins."""
        for number in list(self._unpublished.pop(session, ())):
            self._blocks[number].owner = None
            self.drop(number)
        for number in self._pins.end(session):
            self._release_pin(number)

    def keep(self, sessions: Container[bytes], pending: Container[int]) -> None:
        """Only these are left: what others were filling or reading goes, and what nobody is filling any more, but for
        `pending` blocks."""
        for holder in dict.fromkeys([*self._unpublished, *(session for session, _ in self._pins.sessions())]):
            if holder not in sessions:
                self.forget(holder)
        for block in list(self._blocks.values()):
            if block.owner is None and self.is_open(block) and block.number not in pending:
                self.drop(block.number)

    def is_open(self, block: Block) -> bool:
        """Whether it is here, and neither published nor dropped."""
        return self._blocks.get(block.number) is block and not block.published and not block.dropped

    def forget_waiting(self) -> None:
        """Whoever waits for room asks again."""
        self._waiting.forget({parked.ticket for parked in self._waiting})
        self._refused = None

    def forget_tickets(self, tickets: set[Hashable]) -> None:
        self._waiting.forget(tickets)
        self.retry()

    def retry(self) -> None:
        """Memory may have been released: answer waiting allocations in order, as far as it goes."""
        for parked in self._waiting:
            if parked is self._refused:
                return  # asking the file system again costs as much as it has free
            allocated = self._allocated(parked.message, parked.session)
            if allocated is None:
                self._refused = parked if self._disk_is_full else None
                return
            self._waiting.remove(parked)
            self.outbox.append((parked.ticket, allocated))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waits(self, most: int, now: float) -> list[WaitOverview]:
        """The first `most` of those who wait for room. What a put writes to is not known yet."""
        pinned = self._pinned_nbytes() if self._waiting else 0
        return [
            WaitOverview(
                "put", "", "", one.session, None if one.since is None else now - one.since, one.deadline - now,
                self._lack(one.message.nbytes, pinned),
            )
            for one in itertools.islice(self._waiting, most)
        ]  # fmt: skip

    def next_deadline(self) -> float | None:
        return self._waiting.next_deadline()

    def notice_after(self, seconds: Sequence[float]) -> None:
        """When those who wait for room are told who has it; ascending."""
        self._waiting.notice_after_s = seconds

    def expire(self, now: float) -> None:
        for parked, waited_s in self._waiting.due(now):
            text = f"put waits for {waited_s:g} s: {self._lack(parked.message.nbytes, self._pinned_nbytes())}"
            self.outbox.append((parked.ticket, Waiting(parked.message.rid, text)))
        for parked in self._waiting.expired(now):
            text = f"{self.full(parked.message.nbytes)} after waiting {parked.message.timeout_s:g} s"
            self.outbox.append((parked.ticket, Failed(parked.message.rid, StoreFull.code, text)))
        self._refused = None
        self.retry()  # a smaller request may have stood behind one that did not fit

    def _pinned_nbytes(self) -> int:
        """The bytes of blocks that somebody reads."""
        return sum(self._blocks[number].nbytes for number in self._pins.counts())

    def _lack(self, nbytes: int, pinned: int) -> str:
        """What a writer of `nbytes` who waits is told."""
        return f"{self.full(nbytes)}, readers hold {pinned} of them"

    def full(self, nbytes: int) -> str:
        """Why a block of `nbytes` found no room just now."""
        why = f"the file system of {self.shm.directory} is full, " if self._disk_is_full else ""
        text = f"{nbytes} bytes do not fit: {why}{self.used_nbytes} of {self.budget_nbytes} bytes are in use"
        if self.spill.budget_nbytes:
            text += f", {self.spilled_nbytes} of {self.spill.budget_nbytes} in {self.spill.directory}"
            text += f" ({self.shm.trouble})" if self.shm.trouble else ""
        return text

    def trim(self, keep_nbytes: int) -> None:
        """Return free memory to the system until at most `keep_nbytes` (or what is in use) stays resident."""
        self.shm.trim(self.shm.resident_nbytes() - max(keep_nbytes, self.used_nbytes))
        self.shm.trim(self.shm.resident_nbytes(spills=True) - self.spilled_nbytes, spills=True)

    def pinned_by_session(self) -> dict[bytes, int]:
        """Bytes pinned by each client."""
        return {session: sum(self._blocks[number].nbytes for number in held) for session, held in self._pins.sessions()}

    def pinned_nbytes(self) -> dict[str, int]:
        """The same, with short names."""
        return {session.hex()[:8]: nbytes for session, nbytes in self.pinned_by_session().items()}

    def close(self) -> None:
        self.shm.close()

    def check_invariants(self) -> None:
        """Blocks do not overlap and fill exactly what the extents miss; tests call this after each event."""
        blocks = [block for block in self._blocks.values() if not block.is_in_engine]
        self.shm.check_invariants([(block.arena, block.offset, block.nbytes) for block in blocks])
        sizes = [0, 0]
        for block in blocks:
            sizes[self.is_spilled(block)] += self.shm.rounded(block.nbytes)
        assert sizes == [self.used_nbytes, self.spilled_nbytes]
        assert self.used_nbytes <= self.budget_nbytes
        assert self.spilled_nbytes <= self.spill.budget_nbytes
        assert all(not self._blocks[number].pins and self._blocks[number].published for number in self._resting)
        pins = self._pins.counts()
        assert all(block.pins == pins[block.number] for block in self._blocks.values())


def blocks_of(message: Commit) -> list[int]:
    """The blocks that are new with a commit, as it names them; 0: one of its payload."""
    return [message.block] * (message.block >= 0) + [one.block for one in message.shared if one.is_new]


def name_blocks(message: Commit, first: int) -> None:
    """The first new block has this number; their layouts are for their unit alone."""
    if message.block >= 0:
        message.block, message.layout = first, b""
    for one in message.shared:
        one.layout = b""
