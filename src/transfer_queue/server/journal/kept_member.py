"""A unit of another host that has a journal of its own: its blocks, and as whom it joined.

A block is a fact before anybody hears of it: before its commit is passed on to the controller, and before the
controller is asked to take it in the place of another. So whatever rows the controller has of this unit, their bytes
are in its journal. What is there beyond that the controller does not know, and says so when the unit joins again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Protocol

import msgspec

from transfer_queue.errors import InvalidInput, JournalCorrupt
from transfer_queue.server.journal.facts import BlockGone, BlockShared, JournalFact, MemberIs
from transfer_queue.server.journal.kept_unit import KeptUnit
from transfer_queue.server.journal.payloads import Place
from transfer_queue.server.pending_commits import PendingCommits
from transfer_queue.server.standby import records as r
from transfer_queue.server.standby.recording import Recorder
from transfer_queue.storage.blocks import NOWHERE, Block, SpillSpace
from transfer_queue.wire import messages as m

UNKNOWN_BLOCKS = 1 << 20  # that may have been made after a copy of a journal


class Membership(msgspec.Struct, array_like=True, tag="unit"):
    """As whom a unit joined: under which number, of which service, and as which incarnation of itself. In a snapshot,
    `next_block` is the number of its next block: the controller may have refused the one before."""

    unit: int
    incarnation: bytes
    service: bytes
    next_block: int = 0


_decode = msgspec.msgpack.Decoder(Membership).decode


def is_membership(state: bytes) -> bool:
    """Whether what a journal has as its state is of a unit that joined a service."""
    try:
        _decode(state)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


class Joining(Protocol):
    """A unit as a member of a service."""

    membership: Membership


class MemberUnit(KeptUnit):
    """The unit of a server that joined a service."""

    says_first = True

    def __init__(
        self, budget_nbytes: int, directory: str | None, recorder: Recorder, spill: SpillSpace = NOWHERE
    ) -> None:
        super().__init__(budget_nbytes, directory, recorder, spill)
        self._said: set[int] = set()  # blocks that are facts
        self._safe: set[int] = set()  # those of them that are on the disk
        self._uses: Counter[Place] = Counter()  # how many blocks have their bytes there

    def is_ready(self, block: Block) -> bool:
        return block.number in self._safe

    def say(self, block: Block) -> None:
        if block.number not in self._said and self.is_kept(block):
            self._said.add(block.number)
            self.facts.append(self.fact_of(block))

    def is_safe_now(self, block: Block) -> None:
        if block.number in self._said:
            self._safe.add(block.number)

    def copied(self, number: int, copy: int) -> None:
        """A block has the bytes of another one, which stays until the controller has heard of the copy."""
        if number in self.places and copy in self._blocks:
            self.recorder.note(r.BlockCopied(number, copy))
            self.lies_at(copy, self.places[number])
            self._said.add(copy)
            self.facts.append(BlockShared(number, copy))

    def drop(self, number: int) -> None:
        place = self.places.get(number)
        if place is not None:
            self._uses[place] -= 1
            if self._uses[place]:
                del self.places[number]  # so that it is not given up
            else:
                del self._uses[place]
        before = len(self.facts)
        super().drop(number)
        self._safe.discard(number)
        if number in self._said:
            self._said.discard(number)
            if len(self.facts) == before:
                self.facts.append(BlockGone(number))

    def lies_at(self, number: int, place: Place) -> None:
        super().lies_at(number, place)
        self._uses[place] += 1

    def lasting(self) -> list[Block]:
        return [self._blocks[number] for number in self._said]

    def begin_anew(self, pending: Collection[int]) -> None:
        """A new journal begins with what is here: published blocks, and those of `pending` commits."""
        self._said = {
            block.number
            for block in self._blocks.values()
            if not block.dropped and (block.published or block.number in pending) and self.is_kept(block)
        }
        self._safe &= self._said


class KeptMember:
    """What the journal of a unit has beside its blocks; a `KeptState`. `pending` has the commits that wait for the
    controller."""

    holds_answers = False
    loads = reserved_rows = 0

    def __init__(self, member: Joining, unit: MemberUnit, pending: PendingCommits) -> None:
        self._member = member
        self._unit = unit
        self._pending = pending
        self._written: Membership | None = None
        self._next_block = 0

    def begin(self, state: bytes, blocks: list[int], reserved_rows: int) -> None:
        if not is_membership(state):
            raise InvalidInput("it is of a service, not of a unit that joined one")
        found = _decode(state)
        self._next_block = found.next_block
        self._member.membership = msgspec.structs.replace(found, next_block=0)

    def apply(self, fact: JournalFact) -> None:
        if not isinstance(fact, MemberIs):
            raise JournalCorrupt(f"{type(fact).__name__} in the journal of a unit")
        self._member.membership = Membership(fact.unit, fact.incarnation, fact.service)

    def finish(self) -> str:
        self._unit.renumber(self._member.membership.unit)
        return f"the blocks of unit {self._unit.number}"

    def wanted(self, known: Collection[int]) -> Collection[int]:
        return known

    def all_back(self) -> None:
        """Which of them rows still lie in, only the controller knows, and which numbers were given since, where this is
        an older copy of the journal."""
        next_block = max(self._next_block, self._unit.next_number, (self._unit.number << m.UNIT_SHIFT) + 1)
        self._unit.put_next(next_block + UNKNOWN_BLOCKS)
        for block in self._unit.lasting():
            self._unit.is_safe_now(block)
            self._pending.doubt(block.number)

    def take_facts(self) -> list[JournalFact]:
        member = self._member.membership
        if member == self._written:
            return []
        self._written = member
        return [MemberIs(member.unit, member.incarnation, member.service)]

    def forget_facts(self) -> None:
        self._written = self._member.membership

    def start(self) -> None:
        self._unit.begin_anew(self._pending.blocks())

    def saved(self) -> tuple[bytes, list[int], list[JournalFact]]:
        membership = msgspec.structs.replace(self._member.membership, next_block=self._unit.next_number)
        return msgspec.msgpack.encode(membership), [], []

    def hold_blocks(self, are_held: bool) -> None:
        """A block that is recycled while a snapshot is written has other bytes there. It is gone in the log after that,
        or else the controller says so: it was asked before, or told the unit."""
