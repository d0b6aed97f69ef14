"""Extents and units over random histories; their invariants hold after every event."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from units import LARGE, Shell

from transfer_queue.errors import StoreFull
from transfer_queue.storage.extents import Extents
from transfer_queue.wire.messages import Allocated


class ExtentsModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(64 * 40, 64)
        self.held: dict[int, int] = {}

    @rule(nbytes=st.integers(1, 64 * 12))
    def take(self, nbytes: int) -> None:
        largest = max((size for _, size in self.extents.free()), default=0)
        start = self.extents.take(nbytes)
        assert (start is None) == (self.extents.rounded(nbytes) > largest)
        if start is not None:
            self.held[start] = nbytes

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        if self.held:
            start = data.draw(st.sampled_from(sorted(self.held)))
            self.extents.give(start, self.held.pop(start))

    def teardown(self) -> None:
        used = [(start, self.extents.rounded(nbytes)) for start, nbytes in self.held.items()]
        at = 0
        for start, size in sorted(used + self.extents.free()):
            assert start == at
            at += size
        assert at == self.extents.size
        free = sorted(self.extents.free())
        assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(free)), "neighbours not joined"


SEARCH = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
TestExtentsModel = ExtentsModel.TestCase
TestExtentsModel.settings = SEARCH


class UnitModel(RuleBasedStateMachine):
    """Random histories; the invariants hold after each event, and content stays what its writer wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.shell = Shell(1 << 18)
        self.now = 0.0
        self.content: dict[int, int] = {}
        self.pins: list[tuple[int, bytes]] = []
        self.filling: dict[int, bytes] = {}

    sessions = st.sampled_from([b"a", b"b", b"c"])
    sizes = st.sampled_from([1, 63, 64, 1000, LARGE, 2 * LARGE])

    def settled(self) -> None:
        unit = self.shell.unit
        for _, reply in unit.outbox:
            if isinstance(reply, Allocated):
                block = unit.block(reply.block)
                assert block is not None
                assert block.owner is not None
                self.filling[reply.block] = block.owner
        unit.outbox.clear()
        unit.check_invariants()
        for number, content in self.content.items():
            if unit.block(number) is not None:
                assert bool((self.shell.bytes_of(number) == content).all())

    @rule(session=sessions, nbytes=sizes, wait_s=st.integers(0, 5), ticket=st.integers(0, 10**6))
    def allocate(self, session: bytes, nbytes: int, wait_s: int, ticket: int) -> None:
        try:
            number = self.shell.allocate(nbytes, session, ticket, wait_s, self.now)
        except StoreFull:
            assert not wait_s
            return
        if number is not None:
            self.filling[number] = session
        self.settled()

    @rule(data=st.data(), content=st.integers(0, 255))
    def publish(self, data: st.DataObject, content: int) -> None:
        if self.filling:
            number = data.draw(st.sampled_from(sorted(self.filling)))
            self.shell.bytes_of(number)[:] = content
            self.content[number] = content
            self.shell.unit.publish(number, b"")
            del self.filling[number]
        self.settled()

    @rule(data=st.data(), session=sessions)
    def pin(self, data: st.DataObject, session: bytes) -> None:
        if self.content:
            number = data.draw(st.sampled_from(sorted(self.content)))
            self.shell.unit.pin(number, session)
            self.pins.append((number, session))
        self.settled()

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            number, session = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
            self.shell.unit.unpin(number, session)
            self.shell.unit.retry()
        self.settled()

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.content:
            number = data.draw(st.sampled_from(sorted(self.content)))
            self.shell.unit.drop(number)
            if any(number == pinned for pinned, _ in self.pins):
                assert self.shell.unit.block(number) is not None
            else:
                assert self.shell.unit.block(number) is None
            del self.content[number]
            self.shell.unit.retry()
        self.settled()

    @rule(session=sessions)
    def vanish(self, session: bytes) -> None:
        self.shell.unit.forget(session)
        self.pins = [(number, held) for number, held in self.pins if held != session]
        self.filling = {number: owner for number, owner in self.filling.items() if owner != session}
        self.settled()

    @rule(seconds=st.integers(1, 4))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        self.shell.unit.expire(self.now)
        self.settled()

    def teardown(self) -> None:
        self.shell.unit.close()


TestUnitModel = UnitModel.TestCase
TestUnitModel.settings = SEARCH
