"""Snapshot and restore in the server's service, without sockets: pins, blocks, retries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from services import FIELD, captured, commit, filled, send

from transfer_queue.controller import Controller
from transfer_queue.errors import InvalidInput
from transfer_queue.sampler import SequentialSampler
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m


@pytest.fixture
def service() -> Iterator[Service]:
    unit = Unit(1 << 20)
    yield Service(Controller(SequentialSampler(), max_rows=6, reserved_rows=0), unit)
    unit.close()


@pytest.fixture
def session(service: Service) -> ServerSession:
    return service.sessions.attach(b"client", local=True)


def test_blocks_stay_pinned_until_the_saver_releases_them_or_is_gone(service: Service, session: ServerSession) -> None:
    saver = service.sessions.attach(b"saver", local=True)
    for rid in (1, 2):
        send(service, session, commit(rid, 2), b"ab")
    cut, state = captured(service, saver, 1)
    assert state
    assert len(cut.pieces) == 2
    send(service, session, m.Clear(3, "p", None, None))
    assert service.unit.used_nbytes == 128
    service.notify(m.Unpin(cut.rid, [cut.pieces[0].block]), saver)
    assert service.unit.used_nbytes == 64
    service.detach(saver, set(), 0.0)
    assert service.unit.used_nbytes == 0


def test_blocks_are_not_recycled_before_the_saver_had_time_to_pin_them(
    service: Service, session: ServerSession
) -> None:
    saver = service.sessions.attach(b"saver", local=True)
    send(service, session, commit(1, 2), b"ab")
    reply, _ = send(service, saver, m.Snapshot(1))
    send(service, session, m.Clear(3, "p", None, None))
    assert service.unit.used_nbytes == 64
    taken, _ = send(service, saver, m.Pin(2, reply.blocks))
    send(service, saver, m.Recycle(3))
    assert service.unit.used_nbytes == 64
    service.notify(m.Unpin(taken.rid, [piece.block for piece in taken.pieces]), saver)
    assert service.unit.used_nbytes == 0


def test_two_savers_of_one_client_end_each_its_own_snapshot(service: Service, session: ServerSession) -> None:
    saver = service.sessions.attach(b"saver", local=True)
    send(service, session, commit(1, 2), b"ab")
    send(service, saver, m.Snapshot(1))
    reply, _ = send(service, saver, m.Snapshot(2))
    send(service, saver, m.Recycle(3, 1))
    send(service, session, m.Clear(3, "p", None, None))
    taken, _ = send(service, saver, m.Pin(4, reply.blocks))
    send(service, saver, m.Recycle(5, 2))
    assert len(taken.pieces) == 1
    service.notify(m.Unpin(taken.rid, [piece.block for piece in taken.pieces]), saver)
    assert service.unit.used_nbytes == 0


def test_a_saver_that_ends_before_it_pinned_holds_nothing(service: Service, session: ServerSession) -> None:
    saver = service.sessions.attach(b"saver", local=True)
    send(service, session, commit(1, 2), b"ab")
    send(service, saver, m.Snapshot(1))
    send(service, session, m.Clear(3, "p", None, None))
    service.detach(saver, set(), 0.0)
    assert service.unit.used_nbytes == 0


def test_a_snapshot_asked_for_again_pins_once(service: Service, session: ServerSession) -> None:
    send(service, session, commit(1, 2), b"ab")
    for _ in range(2):
        cut, _ = captured(service, session, 2)
    service.notify(m.Unpin(cut.rid, [piece.block for piece in cut.pieces]), session)
    assert service.unit.pinned_nbytes() == {}


def test_a_repeated_restore_gets_its_first_reply(service: Service, session: ServerSession) -> None:
    send(service, session, commit(1, 4), b"abcd")
    cut, state = captured(service, session, 2)
    request = filled(service, session, cut, 10)
    first = send(service, session, request, state)
    assert isinstance(first[0], m.Done)
    send(service, session, m.Clear(3, "p", None, None))
    assert send(service, session, request, state) == first
    assert service.controller.num_rows == 0


@pytest.mark.parametrize("what", ["of another", "published", "twice", "no layout"])
def test_blocks_that_are_not_the_loaders_are_refused(service: Service, session: ServerSession, what: str) -> None:
    for rid in (1, 2):
        send(service, session, commit(rid, 2), b"ab")
    cut, state = captured(service, session, 3)
    request = filled(service, session, cut, 10)
    loader = service.sessions.attach(b"other", local=True) if what == "of another" else session
    if what == "published":
        request.blocks[0].block = cut.pieces[0].block
    elif what == "twice":
        request.blocks[0].block = request.blocks[1].block
    elif what == "no layout":
        request.blocks[0].layout = 7
    reply, _ = send(service, loader, request, state)
    assert reply.code == InvalidInput.code
    assert service.controller.num_rows == 4
    assert set(service.controller.block_index.entries) == {piece.block for piece in cut.pieces}


def test_a_put_that_waits_for_room_is_carried_out_on_the_restored_rows(
    service: Service, session: ServerSession
) -> None:
    send(service, session, commit(1, 2), b"ab")
    cut, state = captured(service, session, 2)
    send(service, session, commit(3, 4), b"cdef")
    allocated, _ = send(service, session, m.Allocate(4, 3, False, 0.0))
    waiting = m.Commit(5, "p", 3, None, None, FIELD, allocated.block, b"", None, 60.0)
    assert send(service, session, waiting) is None
    send(service, session, filled(service, session, cut, 10), state)
    answers = [answer[0] for _, answer in service.answered(0.0)]
    assert [type(reply) for reply in answers] == [m.Committed]
    assert service.controller.num_rows == 5
    assert allocated.block in service.controller.block_index.entries
