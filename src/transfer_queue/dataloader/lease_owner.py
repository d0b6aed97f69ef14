"""Sessions that hold leases and do nothing else, and the client a dataset uses."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from transfer_queue import interface
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.connection import Connection
from transfer_queue.client.retry import connected
from transfer_queue.client.session import Session
from transfer_queue.errors import (
    DeadlineExceeded,
    NotInitialized,
    ServiceError,
    ServiceRestarted,
    ServiceUnavailable,
    TransferQueueError,
    error_from_code,
)
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address
from transfer_queue.wire.handshake import GRACE_S

CONNECT_S = 10.0
LEAVE_S = 2.0  # for a service that is not there at the moment


def renewal_s(lease_s: float) -> float:
    """How long to wait until leases are renewed: so that they do not run out, and so that the session is back in time
    where its connection was lost, which only a renewal finds out."""
    return min(lease_s, GRACE_S) / 3


class LeaseOwner:
    """A session of its own, for as long as this object or its process lives; leases held for it end with it."""

    def __init__(self, client: TransferQueueClient) -> None:
        """Raises as `Session.connect`. `ServiceRestarted` is raised once: the next one is of what is there by then."""
        self.ident = secrets.token_bytes(16)
        self._session = client.session
        try:
            self._line = Line(_connected(self._session, self.ident))
        except ServiceRestarted as error:
            self._session.end(str(error))  # no call of it may follow that would find out as well
            raise
        self.close = weakref.finalize(self, _leave, self._line, self._session, self.ident, os.getpid())
        _HOLDERS.add(self)

    def renew(self, lease_s: float) -> None:
        """All leases held last at least `lease_s` from now on. A connection that was lost, as with a server whose
        standby took over, is opened anew. Raises `ServiceUnavailable`, `DeadlineExceeded`."""
        if not self._line.is_broken:
            with contextlib.suppress(ServiceUnavailable):
                self._ask(lease_s)
                return
        self._open_again()
        self._ask(lease_s)

    def keep(self, lease_s: float) -> None:
        """As `renew`, as far as that is possible: otherwise the next fetch or acknowledgement tells."""
        with contextlib.suppress(TransferQueueError, OSError):
            self.renew(lease_s)

    def leave_after(self, ack: m.Ack | None) -> None:
        """An acknowledgement that was sent and not answered: `close` sends it before it ends the leases. What ends them
        comes over another connection, and a service that stood still may read that one first."""
        self._line.unanswered = ack

    def _open_again(self) -> None:
        fresh, lost = _connected(self._session, self.ident), self._line.connection
        self._line.connection, self._line.is_broken = fresh, False
        lost.close()  # not before: with its last connection a session ends

    def _ask(self, lease_s: float) -> None:
        request = m.Renew(next(self._line.rids), 0, lease_s)
        try:
            reply, _ = self._line.connection.call(request, None, self._session.timeout_s)
        except (ServiceUnavailable, DeadlineExceeded):
            self._line.is_broken = True  # a late answer would be taken for that of the next call
            raise
        if isinstance(reply, m.Failed):
            raise error_from_code(reply.code, reply.text)


def _connected(session: Session, ident: bytes, within_s: float = CONNECT_S) -> Connection:
    """Raises as `Session.connect`."""
    return connected(lambda seconds: session.connect(seconds, ident=ident), session.address.is_local, within_s)


class Line:
    """The connection of a `LeaseOwner`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.is_broken = False
        self.unanswered: m.Ack | None = None
        self.rids = itertools.count(1)


def _leave(line: Line, session: Session, ident: bytes, pid: int) -> None:
    """End the session, and say that nobody tried what it holds: else the rows would count as tried in vain. Over TCP it
    would be waited for after its connection is gone. So it is, as long as this process lives, where a standby took
    over: then it comes back to end. A forked child just closes."""
    fresh: Connection | None = None
    try:
        if os.getpid() == pid:
            with contextlib.suppress(ServiceError):
                if line.connection.is_lost:
                    fresh = _connected(session, ident, LEAVE_S)
                way = fresh or line.connection
                if line.unanswered is not None:
                    way.notify(msgspec.structs.replace(line.unanswered, rid=next(line.rids)))
                way.notify(m.Release(next(line.rids), 0, None, session.service_id))
                if not session.is_local:
                    way.notify(m.Goodbye())
    finally:
        line.connection.close()
        if fresh is not None:
            fresh.close()


_HOLDERS: weakref.WeakSet[LeaseOwner] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked child must not keep its parent's leases alive by its copies of the sockets."""
    for holder in list(_HOLDERS):
        holder.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def client_for(config: Any, owner: object) -> TransferQueueClient:
    """The client of this process, attached to the service `config` names or, without an address, to TQ_ADDRESS's.

    Where this process is attached to another service already, a client that is closed with `owner`. Raises
    `NotInitialized`, `ServiceUnavailable`.
    """
    address = _address_in(config)
    try:
        client = interface.get_client()
    except NotInitialized:
        if not address:
            interface._session()
        else:
            interface.init({"address": address})
        return interface.get_client()
    if not address or client.address == parse_address(address):
        return client
    own = TransferQueueClient.of(Session(parse_address(address)))
    own.session.allow_pickle = client.session.allow_pickle
    weakref.finalize(owner, own.close)
    return own


def _address_in(config: Any) -> str:
    if isinstance(config, Mapping):
        return str(config.get("address") or "")
    return str(getattr(config, "address", None) or "")
