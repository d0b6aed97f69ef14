"""The server's service without sockets: what it remembers and what it forgets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from services import commit

from transfer_queue.controller import Controller
from transfer_queue.sampler import SequentialSampler
from transfer_queue.server import sessions
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import GRACE_S, ServerSession
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m


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
    assert 1 <= len(session.replies) <= 10_000 // 800
    assert 49 in session.replies


def test_replies_are_forgotten_with_their_session(service: Service) -> None:
    session = service.sessions.attach(b"client", local=True)
    send(service, session, commit(1, 4), b"abcd")
    service.detach(session, set(), 0.0)
    assert not service.sessions.by_ident
    again = service.sessions.attach(b"client", local=True)
    send(service, again, commit(1, 4), b"abcd")
    assert service.controller.num_rows == 8


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
