"""Sessions that hold leases and do nothing else, and the client a dataset uses."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import weakref
from collections.abc import Mapping
from typing import Any

from transfer_queue import interface
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.connection import Connection
from transfer_queue.client.session import Session
from transfer_queue.errors import DeadlineExceeded, NotInitialized, ServiceUnavailable, error_from_code
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address


class LeaseOwner:
    """A session of its own, for as long as this object or its process lives; leases held for it end with it."""

    def __init__(self, client: TransferQueueClient) -> None:
        self.ident = secrets.token_bytes(16)
        self._timeout_s = client.session.timeout_s
        self._connection = client.session.connect(ident=self.ident)
        self._rids = itertools.count(1)
        self.close = weakref.finalize(self, _leave, self._connection, client.session.is_local, os.getpid())
        _HOLDERS.add(self)

    def renew(self, lease_s: float) -> None:
        """All leases held last at least `lease_s` from now on. Raises `ServiceUnavailable`, `DeadlineExceeded`."""
        reply, _ = self._connection.call(m.Renew(next(self._rids), 0, lease_s), None, self._timeout_s)
        if isinstance(reply, m.Failed):
            raise error_from_code(reply.code, reply.text)


def _leave(connection: Connection, is_local: bool, pid: int) -> None:
    """End the session; over TCP it would be waited for after its connection is gone. A forked child just closes."""
    if not is_local and os.getpid() == pid:
        with contextlib.suppress(ServiceUnavailable, DeadlineExceeded):
            connection.notify(m.Goodbye())
    connection.close()


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
