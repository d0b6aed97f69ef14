"""Commits that the controller has yet to answer, and the blocks that they hold.

A block of such a commit is neither published nor its client's to change. The answer decides: it is published, or
dropped. Where nobody waits for the answer any more the client has its block back, unless the controller is elsewhere
and may have carried the commit out: then the block is *in doubt*, which is as published, until the controller says.

A commit that was passed on to another host outlives the connection over which it came, and the process that passed it
on: it is an *orphan* then, known by its session and request id alone, until it is asked again or its session ends. One
that was carried out, or may have been, can be asked again as well, by a client that did not hear what came of it: the
controller has the answer.

The copy that is to take the place of a block is held in the same way, by this process alone: nobody asks for it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

from transfer_queue.storage.blocks import Block, Unit

REMEMBERED = 4096  # commits that were carried out, perhaps
COPIES = b"copies"  # in the place of a session: no session is called so

Asked: TypeAlias = tuple[bytes, int]  # session and rid
Filled: TypeAlias = tuple[Block, bytes]  # with its layout


class HeldBlock(NamedTuple):
    """`owner`: the session that filled it; None where its bytes came with the commit."""

    block: Block
    owner: bytes | None


class PendingCommits:
    """`held` has the blocks of every commit that waits; `done` the first block of those that were carried out, perhaps,
    as far as they are remembered. `in_doubt` are blocks of `unit`; what the controller says of them is for the caller
    to find out."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.held: dict[Asked, list[HeldBlock]] = {}
        self._asked: dict[Hashable, Asked] = {}  # by ticket
        self._tickets: dict[Asked, Hashable] = {}  # an orphan has none
        self._since_before: set[Asked] = set()  # held when the unit joined the controller again
        self.in_doubt: list[int] = []
        self.done: OrderedDict[Asked, int] = OrderedDict()

    def hold(self, ticket: Hashable, asked: Asked, blocks: Sequence[Filled]) -> None:
        """Readers of other hosts may hear of the rows before the answer is here, so the layout is known from now on."""
        self._asked[ticket], self._tickets[asked] = asked, ticket
        self.held[asked] = [HeldBlock(block, block.owner) for block, _ in blocks]
        for block, layout in blocks:
            self._unit.hand_over(block, None)
            block.layout = layout

    def hold_copy(self, copy: Block, layout: bytes) -> Hashable:
        """Until `answered` or `leave_in_doubt` with the ticket. A controller that the unit joins again meanwhile is not
        told of the copy: it would say that no row lies there, shortly before it is asked to take it."""
        asked = (COPIES, copy.number)
        self.hold(asked, asked, [(copy, layout)])
        return asked

    def join_again(self) -> None:
        """The unit is about to join the controller again, which does not hear of these blocks then. Those that it has
        committed may have been cleared meanwhile, with nobody there to be told: they will be in doubt."""
        self._since_before = set(self.held)

    def holds(self, ticket: Hashable) -> bool:
        return ticket in self._asked

    def answered(self, ticket: Hashable, committed: bool) -> None:
        """The controller's word."""
        asked = self._asked[ticket]
        if committed:
            self._remember_first(asked)
        for block, _ in self.release(asked):
            if committed:
                self._unit.publish(block.number, block.layout, block.digest)
                if asked in self._since_before:
                    self.doubt(block.number)
            else:
                self._unit.drop(block.number)

    def _remember_first(self, asked: Asked) -> None:
        if asked[0] == COPIES:
            return
        blocks = self.held[asked]
        self.remember(asked, blocks[0].block.number if blocks else 0)

    def remember(self, asked: Asked, block: int) -> None:
        """A commit was carried out, perhaps, of which this is the first block (0: it had none)."""
        self.done[asked] = block
        if len(self.done) > REMEMBERED:
            self.done.popitem(last=False)

    def withdraw(self, ticket: Hashable) -> None:
        """Nobody waits for the answer, and the controller will not carry it out."""
        for block, owner in self.release(self._asked[ticket]):
            if owner is None:
                self._unit.drop(block.number)

    def leave_in_doubt(self, ticket: Hashable) -> None:
        """No answer came, or nobody waits for it; the controller may have carried it out, or may yet."""
        self._doubt_all(self._asked[ticket])

    def _doubt_all(self, asked: Asked) -> None:
        self._remember_first(asked)
        for block, _ in self.release(asked):
            self._unit.publish(block.number, block.layout, block.digest)
            self.doubt(block.number)

    def doubt(self, number: int) -> None:
        """Only the controller knows whether rows lie in this published block."""
        self.in_doubt.append(number)

    def release(self, asked: Asked) -> list[HeldBlock]:
        """What a commit held, given back to its owner, as far as it is still there: the answer may come after the word
        that no row needs the block any more."""
        blocks = self.held.pop(asked)
        self._asked.pop(self._tickets.pop(asked, None), None)
        here = [one for one in blocks if self._unit.is_open(one.block)]
        for block, owner in here:
            self._unit.hand_over(block, owner)
        return here

    def knows(self, session: bytes, rid: int) -> bool:
        """Whether this commit was passed on: the controller has carried it out, perhaps."""
        return (session, rid) in self.held or (session, rid) in self.done

    def of_block(self, number: int, owner: bytes) -> Asked | None:
        """The commit that holds a block of this session."""
        for asked, blocks in self.held.items():
            if any((block.number, one) == (number, owner) for block, one in blocks):
                return asked
        return None

    def ticket(self, asked: Asked) -> Hashable | None:
        """Of the request; None where it is an orphan."""
        return self._tickets.get(asked)

    def blocks(self) -> set[int]:
        """Everything that is held."""
        return {block.number for blocks in self.held.values() for block, _ in blocks}

    # orphans

    def lose_ticket(self, ticket: Hashable) -> None:
        """It is about to be asked again."""
        del self._tickets[self._asked.pop(ticket)]

    def lose_connections(self, were_passed_on: bool) -> None:
        """Everybody's: every commit that was passed on is an orphan, the others will not be carried out."""
        for ticket, asked in list(self._asked.items()):
            if not were_passed_on:
                self.withdraw(ticket)
            elif asked[0] == COPIES:
                self.leave_in_doubt(ticket)
            else:
                self.lose_ticket(ticket)

    def resume(self, ticket: Hashable, asked: Asked) -> list[Block]:
        """The blocks of an orphan that is asked again, and pending again with it; none where there is no such one."""
        if asked not in self.held:
            return []
        self._asked[ticket], self._tickets[asked] = asked, ticket
        return [block for block, _ in self.held[asked]]

    def give_up(self, asked: Asked) -> None:
        """An orphan will not be asked again. Others are ignored."""
        if asked in self.held and asked not in self._tickets:
            self._doubt_all(asked)

    def end_session(self, session: bytes) -> None:
        """None of its orphans will be."""
        for asked in [one for one in self.held if one[0] == session]:
            self.give_up(asked)
        for asked in [one for one in self.done if one[0] == session]:
            del self.done[asked]
