"""A unit whose blocks are in a journal, too: which ones are new, and where large ones lie on the disk."""

from __future__ import annotations

from collections.abc import Callable

from transfer_queue.server.journal.facts import BlockLogged, BlockRenamed, BlockStored, JournalFact
from transfer_queue.server.journal.payloads import Place
from transfer_queue.server.standby import records as r
from transfer_queue.server.standby.recording import Recorder, RecordingUnit
from transfer_queue.storage.blocks import NOWHERE, Block, SpillSpace
from transfer_queue.storage.shm import SMALL_NBYTES


class KeptUnit(RecordingUnit):
    """`places` has the large blocks that are on the disk. `given_up(place)` is called when one is gone from here.

    A block is a fact once it is published and its bytes can be named: at once where they are few. Where the unit
    `says_first`, it is one before that: see `MemberUnit`.
    """

    says_first = False

    def __init__(
        self, budget_nbytes: int, directory: str | None, recorder: Recorder, spill: SpillSpace = NOWHERE
    ) -> None:
        super().__init__(budget_nbytes, directory, recorder, spill)
        self.places: dict[int, Place] = {}
        self.facts: list[JournalFact] = []
        self.given_up: Callable[[Place], None] = lambda place: None

    def is_kept(self, block: Block) -> bool:
        """Whether its bytes are on the disk, or will be with the fact of it."""
        return block.nbytes <= SMALL_NBYTES or block.number in self.places

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

    def take_facts(self) -> list[JournalFact]:
        """What became of blocks since they were taken last."""
        found, self.facts = self.facts, []
        return found

    def is_safe_now(self, block: Block) -> None:
        """What was said of it is on the disk."""

    def lasting(self) -> list[Block]:
        """The blocks that are facts: those that only the controller can drop."""
        return [one for one in self._blocks.values() if one.published and not one.dropped and self.is_kept(one)]

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
