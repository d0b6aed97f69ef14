"""What a journal keeps beside the bytes of blocks: of the controller's server, its state and who its units are."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any, Protocol

from transfer_queue.controller import Controller
from transfer_queue.controller.facts import SamplerIs, UnitGivenUp
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported, sampler_state
from transfer_queue.errors import InvalidInput, JournalCorrupt, SamplerFailed
from transfer_queue.server.journal.facts import JournalFact, UnitKnown, UnitsNumbered
from transfer_queue.server.journal.kept_member import is_membership
from transfer_queue.server.unit_registry import UnitInfo, UnitRegistry, unit_of

log = logging.getLogger("transfer_queue.server")

OWNER = b"journal"


class KeptState(Protocol):
    """`loads` is another number where facts cannot follow: everything was replaced. `reserved_rows`: of a partition.
    `holds_answers`: whoever asks for something that lasts is answered when it is on the disk."""

    holds_answers: bool

    @property
    def loads(self) -> int: ...
    @property
    def reserved_rows(self) -> int: ...

    def begin(self, state: bytes, blocks: list[int], reserved_rows: int) -> None:
        """Become a saved state, before anybody has asked anything. Raises `InvalidInput` where it is of another
        kind, and `CheckpointCorrupt`."""

    def apply(self, fact: JournalFact) -> None:
        """Raises `JournalCorrupt` where it does not fit."""

    def finish(self) -> str:
        """Nobody is left who was there. What came back, for the log."""

    def wanted(self, known: Collection[int]) -> Collection[int]:
        """The blocks that are needed, of those that the journal has or others."""

    def all_back(self) -> None:
        """Those blocks are in the unit again."""

    def start(self) -> None:
        """A new log begins, with the state of now."""

    def take_facts(self) -> list[JournalFact]:
        """Those since they were taken last."""

    def forget_facts(self) -> None:
        """They are in the state of now."""

    def saved(self) -> tuple[bytes, list[int], list[JournalFact]]:
        """The state of now, the blocks that it refers to, and what it does not say itself."""

    def hold_blocks(self, are_held: bool) -> None:
        """While they are, no block of before is recycled: somebody writes them down."""


class KeptService:
    """A controller with a ledger, and the units that joined it."""

    holds_answers = True

    def __init__(self, controller: Controller, members: UnitRegistry) -> None:
        self._controller = controller
        self._members = members
        self._recovery: Recovery | None = None
        self._known: list[JournalFact] = []
        self._sampler: Any = None
        self._num_calls = 0
        members.joined = lambda member: self._known.append(_known(member))

    @property
    def loads(self) -> int:
        return self._controller.lineage.loads

    @property
    def reserved_rows(self) -> int:
        return self._controller.reserved_rows

    def begin(self, state: bytes, blocks: list[int], reserved_rows: int) -> None:
        if is_membership(state):
            raise InvalidInput("it is of a unit that joined a service (server.join)")
        self._recovery = Recovery(self._controller, state, blocks, reserved_rows)

    def apply(self, fact: JournalFact) -> None:
        if self._recovery is None:
            raise JournalCorrupt("facts without a state before them")
        if isinstance(fact, UnitsNumbered):
            self._members.count_from(fact.last)
            return
        if isinstance(fact, UnitKnown):
            member = UnitInfo(fact.unit, fact.incarnation)
            member.address, member.away_s, member.lasts = fact.address, fact.away_s, fact.lasts
            self._members.expect(member, time.monotonic())
            return
        if isinstance(fact, UnitGivenUp):
            self._members.remove(fact.unit)
        self._recovery.apply(fact)  # type: ignore[arg-type]

    def finish(self) -> str:
        assert self._recovery is not None
        self._recovery.finish({member.number for member in self._members.members()})
        return f"{self._controller.num_rows} rows"

    def wanted(self, known: Collection[int]) -> Collection[int]:
        """Those of other hosts are there."""
        return [block for block in self._controller.block_index.entries if not unit_of(block)]

    def all_back(self) -> None:
        """The controller knows which they are."""

    def start(self) -> None:
        """Facts begin with the next event."""

    def take_facts(self) -> list[JournalFact]:
        facts: list[JournalFact] = [*self._known, *self._controller.state.ledger.take()]  # type: ignore[union-attr]
        self._known.clear()
        self._look_at_sampler(facts)
        return facts

    def forget_facts(self) -> None:
        self._controller.state.ledger.take()  # type: ignore[union-attr]
        self._known.clear()
        self._sampler = None

    def saved(self) -> tuple[bytes, list[int], list[JournalFact]]:
        state, blocks = exported(self._controller.state, strict=False)
        known = [_known(member) for member in self._members.members()]
        return state, blocks, [*known, UnitsNumbered(self._members.last)]

    def hold_blocks(self, are_held: bool) -> None:
        captures = self._controller.state.captures
        (captures.add if are_held else captures.discard)((OWNER, 0))

    def _look_at_sampler(self, facts: list[JournalFact]) -> None:
        """What the sampler remembers, where it was asked and remembers another thing than before."""
        fetching = self._controller.state.fetching
        if fetching.calls.num_calls == self._num_calls:
            return
        self._num_calls = fetching.calls.num_calls
        try:
            state = sampler_state(fetching.sampler)
        except SamplerFailed as error:
            log.error("what the sampler remembers is not in the journal: %s", error)
            return
        if state != self._sampler:
            facts.append(SamplerIs(state))
            self._sampler = state


def _known(member: UnitInfo) -> JournalFact:
    return UnitKnown(member.number, member.incarnation, member.address, member.away_s, member.lasts)
