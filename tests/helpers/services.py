"""Requests to a service in this process, without sockets."""

from __future__ import annotations

from typing import Any

from transfer_queue.schema import FieldSchema
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.wire import messages as m

FIELD = [FieldSchema("x", "dense", "uint8", ())]


def commit(rid: int, count: int, tags: list[m.Tags] | None = None) -> m.Commit:
    return m.Commit(rid, "p", count, None, None, FIELD, 0, b"", tags, 0.0)


def send(service: Service, session: ServerSession, message: m.Request, payload: bytes = b"") -> Any:
    """(reply, payload), or None when the request was parked."""
    answer = service.handle(message, memoryview(payload), session, ("link", message.rid), 0.0)
    service.check_invariants()
    return None if answer is None else (answer[0], b"".join(bytes(part) for part in answer[1]))


def captured(service: Service, session: ServerSession, rid: int) -> tuple[m.Taken, bytes]:
    """The pinned blocks and the state of a snapshot."""
    reply, state = send(service, session, m.Snapshot(rid))
    taken, _ = send(service, session, m.Pin(1000 + rid, reply.blocks))
    send(service, session, m.Recycle(2000 + rid))
    return taken, state


def filled(service: Service, session: ServerSession, cut: m.Taken, first_rid: int) -> m.Restore:
    """The request that puts a cut back, its blocks allocated and filled."""
    blocks = []
    for number, piece in enumerate(cut.pieces):
        allocated, _ = send(service, session, m.Allocate(first_rid + number, piece.nbytes, False, 0.0))
        block, held = service.unit.block(allocated.block), service.unit.block(piece.block)
        assert block is not None
        assert held is not None
        service.unit.memory(block)[:] = service.unit.memory(held)
        blocks.append(m.Refilled(piece.block, allocated.block, piece.layout))
    return m.Restore(first_rid + len(blocks), blocks, cut.layouts)
