"""The handshake: both sides prove that they know the token without sending it.

HMAC-SHA256 over both nonces with a label per direction, so that neither proof can be reflected (a mutual
challenge-response as in RFC 2104's construction). An empty token stands for the socket's own protection: a unix
socket of mode 0600 whose peer has our uid. A peer comes in a role, each with a token and labels of its own: who knows
the clients' token cannot join as a storage unit.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

from transfer_queue.errors import AccessDenied, ProtocolError, ServiceRestarted, error_from_code
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address

NONCE_NBYTES = 16
CLIENT, UNIT = ROLES = range(2)


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_NBYTES)


def server_mac(token: str, client_nonce: bytes, server_nonce: bytes, role: int = CLIENT) -> bytes:
    label = (b"transfer_queue server", b"transfer_queue server of units")[role]
    return _mac(token, label, client_nonce, server_nonce)


def client_mac(token: str, client_nonce: bytes, server_nonce: bytes, role: int = CLIENT) -> bytes:
    label = (b"transfer_queue client", b"transfer_queue unit")[role]
    return _mac(token, label, client_nonce, server_nonce)


def equal(one: bytes, other: bytes) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(one, other)


def _mac(token: str, label: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    text = b"|".join((label, client_nonce.hex().encode(), server_nonce.hex().encode()))
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def proof_of(challenge: m.Message, address: Address, nonce: bytes, role: int = CLIENT) -> m.Proof:
    """The caller's half of the handshake, once the server proved its own; `address` has the token of the role."""
    if isinstance(challenge, m.Failed):
        raise error_from_code(challenge.code, challenge.text)
    if not isinstance(challenge, m.Challenge):
        raise ProtocolError(f"{type(challenge).__name__} instead of a challenge")
    if not equal(challenge.mac, server_mac(address.token, nonce, challenge.nonce, role)):
        raise AccessDenied(f"the server at {address} does not know our {'unit ' * (role == UNIT)}token")
    return m.Proof(client_mac(address.token, nonce, challenge.nonce, role))


class Life(NamedTuple):
    """Which life of a service, and of the server a connection goes to; b"" stands for any."""

    service: bytes = b""
    unit: bytes = b""


ANY = Life()


def check_life(expected: Life, found: Life) -> None:
    """`ServiceRestarted` when a caller holds on to another life than the one that is there. Both ends check."""
    if expected.service and expected.service != found.service:
        raise ServiceRestarted("another service is here now: that of before ended, and its rows are lost")
    if expected.unit and expected.unit != found.unit:
        raise ServiceRestarted("the server here was started anew: the rows that its predecessor held are lost")


def welcome_of(reply: m.Message, life: Life = ANY) -> m.Welcome:
    """The server's word that the session is open. Raises `ServiceRestarted` when it is not of the expected lives."""
    if isinstance(reply, m.Failed):
        raise error_from_code(reply.code, reply.text)
    if not isinstance(reply, m.Welcome):
        raise ProtocolError(f"{type(reply).__name__} instead of a welcome")
    check_life(life, Life(reply.service, reply.unit))
    return reply
