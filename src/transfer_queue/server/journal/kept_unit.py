"""A unit whose blocks are in a journal, too: which ones are new, and where large ones lie on the disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from transfer_queue.server.journal.facts import BlockInEngine, BlockLogged, BlockRenamed, BlockStored, JournalFact
from transfer_queue.server.journal.payloads import Place
from transfer_queue.server.standby import records as r
from transfer_queue.server.standby.recording import Recorder, RecordingUnit
from transfer_queue.storage.blocks import NOWHERE, Block, SpillSpace
from transfer_queue.storage.shm import SMALL_NBYTES


class KeptUnit(RecordingUnit):
    """`places` has the large blocks that are on the disk. `given_up(place)` is called when one is gone from here.

    A block is a fact once it is published and its bytes can be named: at once where they are few, or lie in an engine.
    Where the unit `says_first`, it is one before that: see `MemberUnit`.

    What nobody needs of the engine is deleted when the journal has that: it may not have those of `unneeded`, and is
    about to have those that are `leaving`. `can_delete()` is called when it has some, in an event of its own. Keys that
    begin as one of `shared_prefixes` are never deleted: another journal may have them, of which this one is a copy.
    `directory_inode` is that of this one.
    """

    says_first = False

    def __init__(
        self, budget_nbytes: int, directory: str | None, recorder: Recorder, spill: SpillSpace = NOWHERE
    ) -> None:
        super().__init__(budget_nbytes, directory, recorder, spill)
        self.places: dict[int, Place] = {}
        self.unneeded: list[str] = []
        self.leaving: dict[str, None] = {}
        self.shared_prefixes: tuple[str, ...] = ()
        self.directory_inode = 0
        self.can_delete: Callable[[], None] = lambda: None
        self.facts: list[JournalFact] = []
        self.given_up: Callable[[Place], None] = lambda place: None

    def is_kept(self, block: Block) -> bool:
        """Whether its bytes are on the disk, or will be with the fact of it, or last in the engine."""
        return block.nbytes <= SMALL_NBYTES or block.number in self.places or block.is_in_engine

    def is_ready(self, block: Block) -> bool:
        """Whether nothing is left to be done before rows may lie in it."""
        return self.is_kept(block)

    def publish(self, number: int, layout: bytes, digest: int = 0) -> None:
        super().publish(number, layout, digest)
        self.say(self._blocks[number])

    def stored(self, number: int, place: r.Range) -> None:
        """The bytes of a block are on the disk."""
        self.recorder.note(r.BlockOnDisk(number, place))
        self.lies_at(number, Place(*place))
        block = self._blocks[number]
        if block.published:
            self.say(block)

    def copied(self, number: int, copy: int) -> None:
        """A block has the bytes of another one, which is about to go: on the disk they are its own now."""
        if number in self.places and copy in self._blocks:
            self.recorder.note(r.BlockCopied(number, copy))
            self.places[copy] = self.places.pop(number)
            self.facts.append(BlockRenamed(number, copy))

    def lies_at(self, number: int, place: Place) -> None:
        """The bytes of a block are there on the disk."""
        self.places[number] = place

    def say(self, block: Block) -> None:
        """It is a fact, if it can be one."""
        if self.is_kept(block):
            self.facts.append(self.fact_of(block))

    def fact_of(self, block: Block) -> JournalFact:
        """What a journal says of a block that is kept."""
        place = self.places.get(block.number)
        if block.is_in_engine:
            return BlockInEngine(block.number, block.layout, block.nbytes, block.key)
        if place is not None:
            return BlockStored(block.number, block.layout, *place)
        return BlockLogged(block.number, block.layout, self.shm.arenas[block.arena].copied(block.offset, block.nbytes))

    def drop(self, number: int) -> None:
        super().drop(number)
        last = self.facts[-1] if self.facts else None
        if isinstance(last, BlockLogged) and last.block == number:  # a part of a block, made for one reader
            self.facts.pop()
        place = self.places.pop(number, None)
        if place is not None:
            self.given_up(place)

    def leave_in_engine(self, key: str) -> None:
        self.unneeded += self.only_here([key])

    def only_here(self, keys: Iterable[str]) -> list[str]:
        """Those that no other journal can need."""
        return [key for key in keys if not key.startswith(self.shared_prefixes)]

    def take_unneeded(self) -> Callable[[], None]:
        """What is to be called when the journal has all that happened so far."""
        keys, self.unneeded = self.unneeded, []
        self.leaving.update(dict.fromkeys(keys))
        return functools.partial(self._left, keys)

    def _left(self, keys: list[str]) -> None:
        for key in keys:
            del self.leaving[key]
        self.left_in_engine.extend(keys)
        self.can_delete()

    def begin_log(self) -> None:
        """A new process has the journal: nothing is about to be there."""
        self.unneeded += self.leaving
        self.leaving.clear()

    @property
    def to_delete(self) -> list[str]:
        """What the engine has in vain, or will have if nothing more becomes of it: blocks that somebody still reads or
        fills."""
        open_ = [block.key for block in self._blocks.values() if block.is_in_engine and not self._lasts(block)]
        return self.only_here([*self.left_in_engine, *self.leaving, *self.unneeded, *open_])

    @staticmethod
    def _lasts(block: Block) -> bool:
        return block.published and not block.dropped

    def take_facts(self) -> list[JournalFact]:
        """What became of blocks since they were taken last."""
        found, self.facts = self.facts, []
        return found

    def is_safe_now(self, block: Block) -> None:
        """What was said of it is on the disk."""

    def lasting(self) -> list[Block]:
        """The blocks that are facts: those that only the controller can drop."""
        return [one for one in self._blocks.values() if self._lasts(one) and self.is_kept(one)]

    def put_back_in_engine(self, fact: BlockInEngine) -> None:
        """A block that is there."""
        self._next = fact.block
        self.place_in_engine(fact.nbytes, None, fact.key)
        self.publish(fact.block, fact.layout)

    def put_back(self, number: int, nbytes: int) -> Block | None:
        """Room for a block of this number; None where there is none.

        What fits in memory and on the disk together may not fit in the pieces that it comes in: then memory takes more
        than its budget, and nothing else before less is left.
        """
        self._next = number
        block = self.place_anywhere(nbytes, None)
        room = self.budget_nbytes + self.spill.budget_nbytes - self.used_nbytes - self.spilled_nbytes
        if block is None and self.spill.budget_nbytes and nbytes <= room:
            budget_nbytes, self.budget_nbytes = self.budget_nbytes, self.used_nbytes + 2 * self.shm.rounded(nbytes)
            block = self.place(nbytes, None)
            self.budget_nbytes = budget_nbytes
        return block

    @property
    def next_number(self) -> int:
        return self._next

    def put_next(self, number: int) -> None:
        """The next block gets this number, which is above those of all blocks here."""
        self._next = max(self._next, number)
