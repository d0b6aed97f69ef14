"""The server's service without sockets: what it remembers and what it forgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from services import commit

from transfer_queue.controller import Controller
from transfer_queue.errors import StoreFull
from transfer_queue.groups import GroupPolicy
from transfer_queue.sampler import SequentialSampler
from transfer_queue.server import sessions
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.storage.blocks import Block, Unit
from transfer_queue.wire import messages as m
from transfer_queue.wire.handshake import GRACE_S


@pytest.fixture
def service() -> Iterator[Service]:
    unit = Unit(1 << 20)
    yield Service(Controller(SequentialSampler(), reserved_rows=0), unit)
    unit.close()


def send(service: Service, session: ServerSession, message: m.Request, payload: bytes = b"") -> m.Reply:
    answer = service.handle(message, memoryview(payload), session, ("link", message.rid), 0.0)
    assert answer is not None
    service.check_invariants()
    return answer[0]


def test_a_repeated_request_gets_its_first_reply_and_stores_nothing_again(service: Service) -> None:
    session = service.sessions.attach(b"client", local=True)
    first = send(service, session, commit(1, 4), b"abcd")
    assert send(service, session, commit(1, 4), b"abcd") is first
    assert service.controller.num_rows == 4


def test_the_same_number_of_another_session_is_another_request(service: Service) -> None:
    one, other = service.sessions.attach(b"one", local=True), service.sessions.attach(b"other", local=True)
    send(service, one, commit(1, 4), b"abcd")
    send(service, other, commit(1, 4), b"abcd")
    assert service.controller.num_rows == 8


def test_remembered_replies_are_bounded_in_bytes(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REMEMBERED_NBYTES", 10_000)
    session = service.sessions.attach(b"client", local=True)
    for rid in range(50):
        send(service, session, commit(rid, 100), bytes(100))
    assert isinstance(session.replies[49][0], m.Committed)
    assert sum(isinstance(reply, m.Committed) for reply, _ in session.replies.values()) <= 10_000 // 800


def test_a_request_whose_answer_is_not_kept_is_not_carried_out_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "REMEMBERED_NBYTES", 10_000)
    session = service.sessions.attach(b"client", local=True)
    for rid in (1, 2, 3):
        send(service, session, commit(rid, 1000), bytes(1000))
    again = send(service, session, commit(1, 1000), bytes(1000))
    assert isinstance(again, m.Failed)
    assert "carried out" in again.text
    assert service.controller.num_rows == 3000


def test_replies_are_forgotten_with_their_session(service: Service) -> None:
    session = service.sessions.attach(b"client", local=True)
    send(service, session, commit(1, 4), b"abcd")
    service.detach(session, set(), 0.0)
    assert not service.sessions.by_ident
    again = service.sessions.attach(b"client", local=True)
    send(service, again, commit(1, 4), b"abcd")
    assert service.controller.num_rows == 8


def test_refills_whose_request_was_cancelled_are_asked_for_anew(service: Service) -> None:
    session, other = service.sessions.attach(b"client", local=True), service.sessions.attach(b"other", local=True)
    send(service, session, m.OpenPool(1, "p", GroupPolicy(), None))
    send(service, session, m.OpenGroup(2, "p", "g", 1, 1, "", {}, None, None, False))
    for rid in range(3, 6):
        claimed = send(service, session, m.ClaimSlots(2 * rid, "p", 1, None, 0.0))
        assert isinstance(claimed, m.SlotsClaimed)
        attempts = [m.Attempt(one.group, one.slot, one.attempt) for one in claimed.slots]
        send(service, session, m.FailSlots(2 * rid + 1, "p", attempts, "infra"))
    taken = m.TakeRefills(20, "p", 1, 0.0)
    assert isinstance(send(service, session, taken), m.Counted)
    service.notify(m.Cancel(20), session)
    assert isinstance(send(service, other, m.TakeRefills(1, "p", 1, 0.0)), m.Counted)
    assert isinstance(send(service, session, taken), m.Failed), "somebody else has them"


def test_a_session_of_another_host_outlives_its_connections_for_a_while(service: Service) -> None:
    session = service.sessions.attach(b"client", local=False)
    first = send(service, session, commit(1, 4), b"abcd")
    service.detach(session, set(), now=0.0)
    service.expire(GRACE_S - 1)
    again = service.sessions.attach(b"client", local=False)
    assert send(service, again, commit(1, 4), b"abcd") is first
    service.detach(again, set(), now=0.0)
    assert service.next_deadline() == GRACE_S
    service.expire(GRACE_S)
    assert not service.sessions.by_ident


def test_a_session_that_says_goodbye_ends_with_its_connection(service: Service) -> None:
    session = service.sessions.attach(b"client", local=False)
    service.notify(m.Goodbye(), session)
    service.detach(session, set(), now=0.0)
    assert not service.sessions.by_ident


def test_an_answer_that_was_not_sent_yet_is_given_to_whoever_asks_again(service: Service) -> None:
    """The link was cut in silence: the rows must not go over the one before."""
    session = service.sessions.attach(b"client", local=False)
    fetch = m.Fetch(7, "p", ["x"], 2, "t", {}, 9.0, True)
    assert service.handle(fetch, memoryview(b""), session, ("before", 7), 0.0) is None
    send(service, session, commit(8, 2), b"ab")
    answer = service.handle(fetch, memoryview(b""), session, ("now", 7), 0.0)
    assert answer is not None
    assert isinstance(answer[0], m.RowSet)
    assert len(answer[0].rows) == 2 * 8
    assert not list(service.answered(0.0))
    assert not session.parked
    assert service.handle(fetch, memoryview(b""), session, ("later", 7), 0.0) == answer


def test_memory_that_was_allocated_is_given_to_whoever_asks_again(service: Service) -> None:
    session = service.sessions.attach(b"client", local=True)
    held = send(service, session, m.Allocate(1, 1 << 20, False, 0.0))
    assert isinstance(held, m.Allocated)
    asked = m.Allocate(2, 1000, False, 9.0)
    assert service.handle(asked, memoryview(b""), session, ("before", 2), 0.0) is None
    service.notify(m.Discard(held.block), session)
    answer = service.handle(asked, memoryview(b""), session, ("now", 2), 0.0)
    assert answer is not None
    assert isinstance(answer[0], m.Allocated)
    service.notify(m.Discard(answer[0].block), session)
    assert service.unit.used_nbytes == 0


def test_a_lease_of_rows_that_a_dead_client_had_begins_when_it_died(service: Service) -> None:
    """Also where nothing else happened since those rows were put."""
    one, other = service.sessions.attach(b"one", local=True), service.sessions.attach(b"other", local=True)
    send(service, one, commit(1, 4), b"abcd")
    lent = send(service, one, m.Fetch(2, "p", ["x"], 4, "t", {}, 0.0, False, 1000.0))
    assert isinstance(lent, m.RowSet)
    assert lent.lease
    waiting = m.Fetch(3, "p", ["x"], 4, "t", {}, 500.0, False, 10.0)
    assert service.handle(waiting, memoryview(b""), other, ("link", 3), 0.0) is None
    service.detach(one, set(), 300.0)
    (lease,) = service.controller.state.fetching.leases.listed(None)
    assert lease.left_s == 310.0, "it is said when it ends"


class FullDisk:
    """A journal whose disk has no space."""

    def has(self, block: Block) -> bool:
        return True

    async def keep(self, block: Block, wait_s: float) -> None: ...

    def copied(self, block: int, copy: int) -> None: ...

    def hold(self, send: Callable[[], None]) -> bool:
        return False

    def check_room(self) -> None:
        raise StoreFull("the disk is full")

    def statistics(self) -> dict[str, Any]:
        return {}


def test_a_commit_that_may_have_been_carried_out_is_asked_again_though_the_disk_is_full(service: Service) -> None:
    session = service.sessions.attach(b"client", local=True)
    held = send(service, session, m.Allocate(1, 1 << 17, False, 0.0))
    assert isinstance(held, m.Allocated)
    block = service.unit.block(held.block)
    assert block is not None
    service.journal = FullDisk()
    refused = send(service, session, commit(2, 4), b"abcd")
    assert isinstance(refused, m.Failed)
    assert refused.code == StoreFull.code
    service.pending.hold(("link", 3), (session.ident, 3), [(block, b"layout")])
    service.pending.lose_connections(were_passed_on=True)
    again = msgspec.structs.replace(commit(3, 4), block=block.number)
    assert isinstance(send(service, session, again), m.Committed)
    service.pending.remember((session.ident, 4), 0)
    assert isinstance(send(service, session, commit(4, 4)), m.Committed)
