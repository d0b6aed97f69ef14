"""What a lost server means for those who are attached to it, in words."""

from __future__ import annotations

from transfer_queue.client.retry import NotJoined, nobody_listens
from transfer_queue.errors import ServiceRestarted, ServiceUnavailable
from transfer_queue.wire.address import Address


def explained(error: ServiceUnavailable, address: Address, server_pid: int, to: str = "") -> ServiceUnavailable:
    """`error` of a connection to the own server at `address`, or to the one at `to`. `server_pid`: 0 before the first
    connection."""
    if to and isinstance(error, ServiceRestarted):
        return NotJoined(f"the storage unit at {to} serves another service, or has not joined this one again")
    if to or not server_pid:
        return error
    if isinstance(error, ServiceRestarted):
        return ServiceRestarted(restarted(address, str(error)))
    if nobody_listens(error):
        text = "transfer_queue.init() attaches to another one or starts it"
        lost = "the rows it held are lost, unless they are in a journal"
        return ServiceUnavailable(f"the server (pid {server_pid}) at {address} is gone, and {lost}; {text} ({error})")
    return error


def raise_if_gone(error: ServiceUnavailable) -> None:
    """Raise it where nobody listens. A server that is killed amid a handshake has a standby at the same address."""
    if nobody_listens(error):
        raise error


def restarted(address: Address, why: str) -> str:
    """The server at `address` may be the same: a unit that stays serves the next life of its controller."""
    return f"at {address}: {why}. The next call works on what is there now"
