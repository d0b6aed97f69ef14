"""Dealing over random histories of ranks that ask, work, die, come back and are joined by strangers of the same task.

The controller's invariants hold throughout. Here: no row is handed to two ranks but as a repeated one; every rank that
does not die gets the same number of micro-batches of every batch, and the same end; and nothing is lost.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from tables import Box, indexes

from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from transfer_queue.wire import messages as m

LEASE_S = 1e6
SAMPLERS = [SequentialSampler, GRPOGroupNSampler, RankAwareSampler]


class Rank:
    """One rank's process. `held`: rows of its current batch that it has not used, on `lease`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.life = 0
        self.batch = 0
        self.lease = 0
        self.held: list[int] = []
        self.used = 0  # of this batch
        self.sizes: dict[int, int] = {}  # rows with the repeated ones, by batch
        self.has_ended = False
        self.ever_died = False
        self.has_left = False

    @property
    def session(self) -> bytes:
        return b"%d.%d" % (self.number, self.life)


class DealingModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.consumed: set[int] = set()
        self.strange: dict[int, list[int]] = {}
        self.strangers = 0
        self.ranks: list[Rank] = []

    @precondition(lambda self: not self.ranks)
    @rule(dp_size=st.integers(1, 4), size=st.integers(1, 4), rows=st.integers(1, 30), kind=st.sampled_from(SAMPLERS))
    def begin(self, dp_size: int, size: int, rows: int, kind: Any) -> None:
        self.box = Box(kind())
        self.size, self.rows = size, rows
        self.ranks = [Rank(number) for number in range(dp_size)]
        self.box.handle(m.SetPartition(1, "p", rows, {}))

    @precondition(lambda self: self.ranks and self.total < self.rows)
    @rule(count=st.integers(1, 12))
    def put(self, count: int) -> None:
        count = min(count, self.rows - self.total)
        self.total += count
        self.box.put(count)

    def fetch(self, rank: Rank, wait_s: float = 0.0) -> Any:
        sampling = {"dp_rank": rank.number, "batch_index": rank.batch}
        return self.box.handle(
            m.Fetch(1, "p", ["a"], self.size, "t", sampling, wait_s, True, LEASE_S, True, dp_size=len(self.ranks),
                    used=rank.used),
            rank.session, rank.session,
        )  # fmt: skip

    def ask(self, rank: Rank) -> bool:
        """Whether the rank got its next batch, or the end."""
        reply = self.fetch(rank)
        self.box.controller.received(rank.session, 1)
        if reply.lease == m.DONE:
            rank.has_ended = True
            return True
        if reply.lease == m.PASSED:
            assert rank.ever_died
            rank.sizes[rank.batch] = 0
            rank.batch, rank.used = rank.batch + 1, 0
            return True
        if not reply.rows:
            return False
        rows = indexes(reply)
        own = rows[: len(rows) - reply.repeated]
        assert not self.consumed & set(own), "used rows come back only as repeated ones"
        others = [row for other in self.ranks if other is not rank for row in other.held]
        others += [row for held in self.strange.values() for row in held]
        assert not set(others) & set(own), "nobody else works on them"
        rank.lease, rank.held = reply.lease, own
        if not rank.ever_died:
            rank.sizes[rank.batch] = len(rows)
        if not own:
            rank.batch, rank.used = rank.batch + 1, 0
        return True

    ready = precondition(lambda self: self.ranks)
    number = st.integers(0, 3)

    @ready
    @rule(number=number)
    def work(self, number: int) -> None:
        """A rank uses a row, or asks for the next batch."""
        rank = self.ranks[number % len(self.ranks)]
        if rank.has_ended:
            return
        if not rank.held:
            self.ask(rank)
            return
        row = rank.held.pop(0)
        self.box.ack(rank.lease, [row])
        self.consumed.add(row)
        rank.used += 1
        if not rank.held:
            rank.batch, rank.used = rank.batch + 1, 0

    @ready
    @rule(number=number, delay_s=st.sampled_from([0.0, 5.0]))
    def refuse(self, number: int, delay_s: float) -> None:
        """A rank refuses a row, and goes on with the next one."""
        rank = self.ranks[number % len(self.ranks)]
        if rank.has_ended or not rank.held:
            return
        self.box.nack(rank.lease, [rank.held.pop(0)], delay_s)
        rank.used += 1
        if not rank.held:
            rank.batch, rank.used = rank.batch + 1, 0

    @ready
    @rule()
    def wait(self) -> None:
        """The delays of rows that were refused are over; leases last on."""
        self.box.expire(self.box.now + 5.0)

    @ready
    @rule(number=number)
    def peer(self, number: int) -> None:
        """A tensor-parallel peer of a rank asks for what the rank has."""
        rank = self.ranks[number % len(self.ranks)]
        if rank.held and not rank.ever_died:
            assert set(rank.held) <= set(indexes(self.fetch(rank)))

    @ready
    @rule(number=number)
    def die(self, number: int) -> None:
        """The process of a rank ends; a new one goes on where it was."""
        rank = self.ranks[number % len(self.ranks)]
        if len(self.ranks) == 1 or any(other.ever_died for other in self.ranks if other is not rank):
            return  # one rank stays to keep the group, and dies again and again
        if any(other.has_left for other in self.ranks):
            return
        self.box.end_session(rank.session)
        rank.life, rank.ever_died = rank.life + 1, True
        rank.held, rank.lease = [], 0

    @ready
    @rule(number=number)
    def leave(self, number: int) -> None:
        """The process of a rank that came to its end is gone, maybe before another one began."""
        rank = self.ranks[number % len(self.ranks)]
        if rank.has_ended and not rank.has_left and not any(other.ever_died for other in self.ranks):
            self.box.end_session(rank.session)
            rank.has_left = True

    @ready
    @rule(count=st.integers(1, 2))
    def stranger(self, count: int) -> None:
        """Somebody of the task, but of no rank, takes rows that are on offer."""
        self.strangers += 1
        message = m.Fetch(1, "p", ["a"], count, "t", {"dp_rank": 9, "batch_index": self.strangers}, 0.0, True, LEASE_S)
        reply = self.box.handle(message, None, b"stranger")
        self.box.controller.received(b"stranger", 1)
        if reply.rows:
            rows = indexes(reply)
            assert not self.consumed & set(rows)
            assert not any(set(rank.held) & set(rows) for rank in self.ranks)
            self.strange[reply.lease] = rows

    @precondition(lambda self: self.strange)
    @rule(used=st.booleans())
    def stranger_ends(self, used: bool) -> None:
        lease, rows = self.strange.popitem()
        if used:
            self.box.ack(lease)
            self.consumed |= set(rows)
        else:
            self.box.release(lease)

    def teardown(self) -> None:
        if not self.ranks:
            return
        if self.total < self.rows:
            self.box.put(self.rows - self.total)
        for _ in range(len(self.strange)):
            self.stranger_ends(False)
        self.box.expire(self.box.now + 5.0)
        for _ in range(6 * self.rows + 6 * len(self.ranks)):
            for rank in self.ranks:
                self.work(rank.number)
        assert all(rank.has_ended for rank in self.ranks), "no rank waits for ever"
        steady = [rank for rank in self.ranks if not rank.ever_died]
        assert all(rank.sizes == steady[0].sizes for rank in steady), "as many rows of every batch in every rank"
        assert len({rank.batch for rank in self.ranks}) == 1, "and as many batches"
        for rank in self.ranks:
            self.box.end_session(rank.session)
        left: list[int] = []
        if len(self.consumed) < self.rows:
            sampling = {"dp_rank": 9, "batch_index": self.strangers + 1}  # which RankAwareSampler insists on
            count = self.rows - len(self.consumed)
            left = indexes(self.box.handle(m.Fetch(1, "p", ["a"], count, "t", sampling, 0.0, True), None, b"last"))
        assert sorted([*left, *self.consumed]) == sorted(self.box.consumed()), "nothing is lost"


TestDealing = DealingModel.TestCase
TestDealing.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
