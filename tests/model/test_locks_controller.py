"""The controller's locks: order, leases, sessions, and what nobody received. No server, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tables import Box, reloaded

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import DeadlineExceeded, InvalidInput, LockLostError, error_from_code
from transfer_queue.sampler import SequentialSampler
from transfer_queue.wire import messages as m

LEASE_S = 10.0


class LockBox(Box):
    """A controller and its locks, by short calls."""

    def lock(self, *keys: str, session: bytes = b"one", wait_s: float = 0.0, lease_s: float = LEASE_S,
             ticket: Any = None, rid: int = 1, received: bool = True, partition: str = "p") -> int | None:  # fmt: skip
        """The number of the lock, or None when the request was parked."""
        reply = self.handle(m.Lock(rid, partition, list(keys), lease_s, wait_s, {"pid": 1}), ticket, session)
        if reply is not None and received:
            self.controller.received(session, rid)
        return None if reply is None else reply.lock

    def keep(self, number: int, session: bytes = b"one", lease_s: float = LEASE_S) -> None:
        self.handle(m.KeepLock(1, number, lease_s), None, session)

    def unlock(self, number: int, session: bytes = b"one") -> None:
        self.handle(m.Unlock(1, number), None, session)

    def listed(self, partition: str | None = None) -> Any:
        return self.handle(m.ListLocks(1, partition)).values

    def told(self) -> dict[Any, Any]:
        """The number of the lock or the error that each request got that was parked, by ticket; of what is due now."""
        deadline = self.controller.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.expire(self.now)
        found: dict[Any, Any] = {}
        for ticket, reply in self.controller.outbox:
            if isinstance(reply, m.Failed):
                found[ticket] = error_from_code(reply.code, reply.text)
            elif isinstance(reply, m.Locked):
                found[ticket] = reply.lock
        self.controller.outbox.clear()
        return found


def test_numbers_grow_over_lives_though_the_clock_was_put_back() -> None:
    """Stores that refuse writers which are too late go by them."""
    ledger, box = Ledger(), LockBox()
    box.controller = Controller(SequentialSampler(), reserved_rows=0, lock_number=9_000_000_000, ledger=ledger)
    before, facts = exported(box.controller.state), ledger.take()
    first = box.lock("a")
    facts += ledger.take()
    last = box.lock("b")
    assert first is not None
    assert last == first + 1
    assert not ledger.take(), "not each lock is written down"
    heir = LockBox()
    heir.controller = Controller(SequentialSampler(), reserved_rows=0, lock_number=5_000_000_000, ledger=Ledger())
    recovery = Recovery(heir.controller, *before, 0)
    for fact in facts:
        recovery.apply(fact)
    recovery.finish()
    later = LockBox()
    later.controller = reloaded(box).controller  # a checkpoint
    for one in (heir, later):
        number = one.lock("a")
        assert number is not None
        assert number > last


def test_a_waiter_for_two_keys_is_not_overtaken_on_the_free_one() -> None:
    box = LockBox()
    first = box.lock("a")
    assert first is not None
    assert box.lock("a", "b", wait_s=9, ticket="both") is None
    with pytest.raises(DeadlineExceeded):
        box.lock("b")
    assert box.lock("b", wait_s=9, ticket="only b") is None
    box.unlock(first)
    told = box.told()
    assert list(told) == ["both"]
    box.unlock(told["both"])
    assert list(box.told()) == ["only b"]


def test_keys_of_other_partitions_are_other_keys() -> None:
    box = LockBox()
    assert box.lock("a")
    assert box.lock("a", partition="q")


def test_opposite_orders_of_keys_do_not_deadlock() -> None:
    box = LockBox()
    first = box.lock("a", "b")
    assert box.lock("b", "a", wait_s=9, ticket="other") is None
    assert first is not None
    box.unlock(first)
    assert list(box.told()) == ["other"]


def test_a_waiter_that_gives_up_lets_the_next_one_through() -> None:
    box = LockBox()
    box.lock("a", lease_s=100)
    box.lock("a", "b", wait_s=1, ticket="both")
    box.lock("b", wait_s=9, ticket="only b")
    box.expire(1.0)
    told = box.told()
    assert isinstance(told["both"], DeadlineExceeded)
    assert isinstance(told["only b"], int)


def test_a_waiter_whose_connection_is_gone_lets_the_next_one_through() -> None:
    box = LockBox()
    box.lock("a")
    box.lock("a", "b", wait_s=9, ticket="both")
    box.lock("b", wait_s=9, ticket="only b")
    box.forget("both")
    assert list(box.told()) == ["only b"]


def test_the_number_grows_with_each_holder() -> None:
    box = LockBox()
    numbers = []
    for _ in range(3):
        number = box.lock("a")
        assert number is not None
        numbers.append(number)
        box.unlock(number)
    assert numbers == sorted(set(numbers))


def test_a_lease_passes_down_the_line_when_nobody_renews_it() -> None:
    box = LockBox()
    dead = box.lock("a", lease_s=1)
    box.lock("a", wait_s=9, lease_s=1, ticket="first", session=b"two")
    box.lock("a", wait_s=9, ticket="second", session=b"three")
    box.expire(1.0)
    assert list(box.told()) == ["first"]
    box.expire(2.0)
    assert list(box.told()) == ["second"]
    assert dead is not None
    for late in (box.keep, box.unlock):
        with pytest.raises(LockLostError):
            late(dead)


def test_a_renewed_lease_lasts() -> None:
    box = LockBox()
    number = box.lock("a", lease_s=2)
    assert number is not None
    for now in (1.0, 2.0, 3.0):
        box.expire(now)
        box.keep(number, lease_s=2)
    with pytest.raises(DeadlineExceeded):
        box.lock("a", session=b"two")
    box.expire(5.0)
    assert box.lock("a", session=b"two")


def test_a_lease_that_is_over_is_no_obstacle_even_before_the_timer_says_so() -> None:
    box = LockBox()
    box.lock("a", lease_s=1)
    box.now = 1.0
    assert box.lock("a", session=b"two")


def test_a_lock_granted_at_the_end_of_a_session_has_its_whole_lease() -> None:
    """The end of a session brings no time: the lease begins with the next event that does."""
    box = LockBox()
    box.lock("a", lease_s=100)
    box.lock("a", wait_s=90, lease_s=5, ticket="next", session=b"two")
    box.end_session(b"one")
    box.now = 50.0
    assert list(box.told()) == ["next"]
    assert box.listed()["holders"][0]["lease_remaining_s"] == 5.0


def test_another_session_cannot_end_or_renew_a_lock() -> None:
    box = LockBox()
    number = box.lock("a")
    assert number is not None
    for deed in (box.keep, box.unlock):
        with pytest.raises(LockLostError):
            deed(number, session=b"two")
    box.unlock(number)


@pytest.mark.parametrize("ended", ["cancelled", "session"])
def test_a_lock_that_nobody_received_is_given_back(ended: str) -> None:
    box = LockBox()
    box.lock("a", rid=7, received=False)
    box.lock("a", session=b"two", wait_s=9, ticket="next")
    if ended == "cancelled":
        box.controller.take_back(b"one", 7)
    else:
        box.end_session(b"one")
    assert list(box.told()) == ["next"]


def test_a_lock_whose_asker_was_interrupted_right_after_it_confirmed_is_given_back() -> None:
    box = LockBox()
    box.lock("a", rid=7)
    box.lock("a", session=b"two", wait_s=9, ticket="next")
    box.controller.take_back(b"one", 7)
    assert list(box.told()) == ["next"]


@pytest.mark.parametrize(("keys", "lease_s"), [([], 1.0), (["a", "a"], 1.0), (["a"], 0.0), (["a"], float("nan"))])
def test_what_cannot_be_locked_is_refused(keys: list[str], lease_s: float) -> None:
    with pytest.raises(InvalidInput):
        LockBox().lock(*keys, lease_s=lease_s)


def test_holders_and_waiters_are_listed_by_partition() -> None:
    box = LockBox()
    box.lock("a", "b")
    box.lock("c", partition="q")
    box.lock("a", wait_s=9, ticket="waits")
    box.expire(4.0)
    listed = box.listed("p")
    assert [(one["partition_id"], one["key"], one["held_s"]) for one in listed["holders"]] == [
        ("p", "a", 4.0), ("p", "b", 4.0),
    ]  # fmt: skip
    assert listed["waiters"] == 1
    assert box.listed("q")["waiters"] == 0
    assert len(box.listed()["holders"]) == 3


def test_who_waits_for_long_is_told_who_has_the_key() -> None:
    box = LockBox()
    box.lock("a", lease_s=100)
    box.lock("a", wait_s=90, ticket="waits", session=b"two")
    box.expire(10.0)
    ((ticket, told),) = box.controller.outbox
    assert ticket == "waits"
    assert isinstance(told, m.Waiting)
    assert "'a' is held by {'pid': 1}" in told.text


class LocksModel(RuleBasedStateMachine):
    """No two live locks share a key, whatever happens to requests, leases and sessions; all ends well."""

    def __init__(self) -> None:
        super().__init__()
        self.box = LockBox()
        self.live: dict[int, tuple[set[str], bytes, float]] = {}  # keys, session, end of the lease
        self.waiting: dict[int, tuple[set[str], bytes, float]] = {}  # keys, session, lease_s
        self.count = 0

    def settle(self) -> None:
        for ticket, found in self.box.told().items():
            keys, session, lease_s = self.waiting.pop(ticket)
            if isinstance(found, int):
                self.box.controller.received(session, ticket)
                self.live[found] = (keys, session, self.box.now + lease_s)

    @rule(keys=st.sets(st.sampled_from("abc"), min_size=1), session=st.sampled_from([b"one", b"two", b"three"]),
          wait_s=st.sampled_from([0.0, 3.0, 50.0]), lease_s=st.sampled_from([1.0, 4.0, 20.0]))  # fmt: skip
    def lock(self, keys: set[str], session: bytes, wait_s: float, lease_s: float) -> None:
        self.count += 1
        names, ticket = sorted(keys), self.count
        try:
            found = self.box.lock(*names, session=session, wait_s=wait_s, lease_s=lease_s, ticket=ticket, rid=ticket)
        except DeadlineExceeded:
            taken = [mine for mine, _, _ in (*self.live.values(), *self.waiting.values())]
            assert any(keys & mine for mine in taken), "nothing was in its way"
            return
        if found is None:
            self.waiting[ticket] = (keys, session, lease_s)
        else:
            self.live[found] = (keys, session, self.box.now + lease_s)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def end_or_keep(self, data: st.DataObject, keep: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        keys, session, _ = self.live[number]
        if keep:
            self.box.keep(number, session, 4.0)
            self.live[number] = (keys, session, max(self.live[number][2], self.box.now + 4.0))
        else:
            self.box.unlock(number, session)
            del self.live[number]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[ticket]
        self.box.forget(ticket)

    @rule(session=st.sampled_from([b"one", b"two"]))
    def end_session(self, session: bytes) -> None:
        """As the server does it: first the requests of its connections, then what it has."""
        gone = [ticket for ticket, (_, owner, _) in self.waiting.items() if owner == session]
        for ticket in gone:
            del self.waiting[ticket]
        self.box.forget(*gone)
        self.box.end_session(session)
        self.live = {number: one for number, one in self.live.items() if one[1] != session}

    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.live = {n: one for n, one in self.live.items() if one[2] > self.box.now + 1.0}
            self.box.expire(self.box.now + 1.0)
            self.settle()

    @invariant()
    def nobody_shares_a_key(self) -> None:
        self.settle()
        held = [key for keys, _, _ in self.live.values() for key in keys]
        assert len(held) == len(set(held))
        listed = self.box.listed()
        assert sorted(one["key"] for one in listed["holders"]) == sorted(held)
        assert listed["waiters"] == len(self.waiting)

    def teardown(self) -> None:
        while self.live or self.waiting:
            self.time_passes(5)
        assert self.box.controller.next_deadline() is None
        assert self.box.lock("a", "b", "c")


TestLocksModel = LocksModel.TestCase
TestLocksModel.settings = settings(
    max_examples=120, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
