"""The handshake: both sides prove that they know the token without sending it. Messages in, messages out, no I/O.

HMAC-SHA256 over both nonces with a label per direction, so that neither proof can be reflected (a mutual
challenge-response as in RFC 2104's construction). An empty token stands for the socket's own protection: a unix
socket of mode 0600 whose peer has our uid. A peer comes in a role, each with a token and labels of its own: who knows
the clients' token cannot join as a storage unit.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar, cast

from transfer_queue.errors import AccessDenied, ProtocolError, ServiceRestarted, error_from_code
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address

NONCE_NBYTES = 16
GRACE_S = 60.0  # a session of another host outlives its connections for so long: a cut network may come back
CLIENT, UNIT = ROLES = range(2)
ANOTHER_SERVICE = "another service is here now: that of before ended, and with it all rows but those of a journal"
M = TypeVar("M", bound=m.Message)


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_NBYTES)


class Life(NamedTuple):
    """Which life of a service, and of the server a connection goes to; b"" stands for any."""

    service: bytes = b""
    unit: bytes = b""


ANY = Life()
Greeting: TypeAlias = "Generator[m.Message, m.Message, m.Welcome]"


def greeting(address: Address, version: int, session: bytes = b"", life: Life = ANY, role: int = CLIENT) -> Greeting:
    """The caller's half: yields what to send, is sent what came back, and returns the welcome.

    `address` has the token of the role. Raises `AccessDenied` where either side does not know it, `ServiceRestarted`
    where the server is not of this life, and what the server says instead.
    """
    own = nonce()
    challenge = _expected(m.Challenge, (yield m.Hello(version, session, own, *life, role)))
    if not _equal(challenge.mac, server_mac(address.token, own, challenge.nonce, role)):
        raise AccessDenied(f"the server at {address} does not know our {'unit ' * (role == UNIT)}token")
    welcome = _expected(m.Welcome, (yield m.Proof(client_mac(address.token, own, challenge.nonce, role))))
    check_life(life, Life(welcome.service, welcome.unit))
    return welcome


def carry_out(steps: Greeting, exchange: Callable[[m.Message], m.Message]) -> m.Welcome:
    """A greeting over a blocking connection; `exchange` sends a message and receives the answer."""
    message = next(steps)
    while True:
        try:
            message = steps.send(exchange(message))
        except StopIteration as stop:
            return cast(m.Welcome, stop.value)


class Reception:
    """The server's half, for one peer. `token(role)`: what a peer in that role has to know; it may refuse."""

    def __init__(self, version: int, token: Callable[[int], str]) -> None:
        self.nonce = nonce()
        self.hello: m.Hello | None = None  # what the peer says of itself: true once `take` has seen its proof
        self._version = version
        self._token = token

    def take(self, message: m.Message) -> m.Challenge | None:
        """The answer to a greeting; None once the peer has proved that it knows the token, and may be welcomed.

        Raises `AccessDenied`, which the peer is to be told, or `ProtocolError` for anything else in this place.
        """
        if isinstance(message, m.Hello) and self.hello is None:
            if message.version != self._version:
                raise AccessDenied(f"protocol version {message.version}, this server speaks {self._version}")
            token = self._token(message.role)
            self.hello = message
            return m.Challenge(self.nonce, server_mac(token, message.nonce, self.nonce, message.role))
        if isinstance(message, m.Proof) and self.hello is not None:
            role = self.hello.role
            if not _equal(message.mac, client_mac(self._token(role), self.hello.nonce, self.nonce, role)):
                raise AccessDenied("wrong token")
            return None
        raise ProtocolError(f"{type(message).__name__} before the handshake")


def server_mac(token: str, client_nonce: bytes, server_nonce: bytes, role: int = CLIENT) -> bytes:
    label = (b"transfer_queue server", b"transfer_queue server of units")[role]
    return _mac(token, label, client_nonce, server_nonce)


def client_mac(token: str, client_nonce: bytes, server_nonce: bytes, role: int = CLIENT) -> bytes:
    label = (b"transfer_queue client", b"transfer_queue unit")[role]
    return _mac(token, label, client_nonce, server_nonce)


def _equal(one: bytes, other: bytes) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(one, other)


def _mac(token: str, label: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    text = b"|".join((label, client_nonce.hex().encode(), server_nonce.hex().encode()))
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def check_life(expected: Life, found: Life) -> None:
    """`ServiceRestarted` when a caller holds on to another life than the one that is there. Both ends check."""
    if expected.service and expected.service != found.service:
        raise ServiceRestarted(ANOTHER_SERVICE)
    if expected.unit and expected.unit != found.unit:
        raise ServiceRestarted("the server here was started anew: its rows are lost, but those of a journal")


def _expected(kind: type[M], reply: m.Message) -> M:
    if isinstance(reply, m.Failed):
        raise error_from_code(reply.code, reply.text)
    if not isinstance(reply, kind):
        raise ProtocolError(f"{type(reply).__name__} instead of a {kind.__name__.lower()}")
    return reply
