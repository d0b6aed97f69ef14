"""The handshake: both sides prove that they know the token without sending it.

HMAC-SHA256 over both nonces with a label per direction, so that neither proof can be reflected (a mutual
challenge-response as in RFC 2104's construction). An empty token stands for the socket's own protection: a unix
socket of mode 0600 whose peer has our uid.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_NBYTES = 16


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_NBYTES)


def server_mac(token: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return _mac(token, b"transfer_queue server", client_nonce, server_nonce)


def client_mac(token: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return _mac(token, b"transfer_queue client", client_nonce, server_nonce)


def equal(one: bytes, other: bytes) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(one, other)


def _mac(token: str, label: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    text = b"|".join((label, client_nonce.hex().encode(), server_nonce.hex().encode()))
    return hmac.new(token.encode(), text, hashlib.sha256).digest()
