"""One blocking connection: one request at a time, with a deadline."""

from __future__ import annotations

from typing import Any

import msgspec

from transfer_queue.client.address import Address
from transfer_queue.codec.values import Lifting
from transfer_queue.errors import (
    AccessDenied,
    DeadlineExceeded,
    ProtocolError,
    ServiceUnavailable,
    error_from_code,
)
from transfer_queue.wire import hello
from transfer_queue.wire import messages as m
from transfer_queue.wire.framing import FrameReader, frame, owned_buffer

_lifting = Lifting()
decode_reply = msgspec.msgpack.Decoder(m.ServerMessage, ext_hook=_lifting._lift).decode
JOIN_NBYTES = 256 << 10


def proof_of(challenge: m.Message, address: Address, nonce: bytes) -> m.Proof:
    """Our half of the handshake, once the server proved its own."""
    if isinstance(challenge, m.Failed):
        raise error_from_code(challenge.code, challenge.text)
    if not isinstance(challenge, m.Challenge):
        raise ProtocolError(f"{type(challenge).__name__} instead of a challenge")
    if not hello.equal(challenge.mac, hello.server_mac(address.token, nonce, challenge.nonce)):
        raise AccessDenied(f"the server at {address} does not know our token")
    return m.Proof(hello.client_mac(address.token, nonce, challenge.nonce))


def welcome_of(reply: m.Message) -> m.Welcome:
    if isinstance(reply, m.Failed):
        raise error_from_code(reply.code, reply.text)
    if not isinstance(reply, m.Welcome):
        raise ProtocolError(f"{type(reply).__name__} instead of a welcome")
    return reply


class Connection:
    """A socket after the handshake. Not for concurrent use; broken for good once a call failed half-way."""

    def __init__(self, address: Address, session: bytes, timeout_s: float) -> None:
        self.address = address
        try:
            self._socket = address.connect(timeout_s)
        except (OSError, ValueError) as error:
            raise ServiceUnavailable(f"no server at {address}: {error}") from error
        self._reader = FrameReader(decode_reply, owned_buffer)
        self._timeout_s = timeout_s
        try:
            nonce = hello.nonce()
            self._send(m.encode(m.Hello(m.PROTOCOL_VERSION, session, nonce)), None)
            challenge, _ = self._receive("connect", timeout_s)
            self._send(m.encode(proof_of(challenge, address, nonce)), None)
            reply, _ = self._receive("connect", timeout_s)
            self.welcome = welcome_of(reply)
        except BaseException:
            self._socket.close()
            raise

    def call(self, request: m.Request, payload: memoryview | None, timeout_s: float) -> tuple[Any, memoryview]:
        """The reply and its payload.

        Raises `DeadlineExceeded` or `ServiceUnavailable`; close the connection then.
        """
        if timeout_s != self._timeout_s:
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s
        self._send(m.encode(request), payload)
        reply, data = self._receive(type(request).__name__, timeout_s)
        if getattr(reply, "rid", None) != request.rid:
            raise ProtocolError(f"answer {reply!r} to another request")
        return reply, data

    def notify(self, message: m.Message) -> None:
        self._send(m.encode(message), None)

    def _send(self, header: bytes, payload: memoryview | None) -> None:
        try:
            if payload is None:
                self._socket.sendall(frame(header))
            elif len(payload) <= JOIN_NBYTES:
                self._socket.sendall(b"".join((frame(header, len(payload)), payload)))
            else:
                self._socket.sendall(frame(header, len(payload)))
                self._socket.sendall(payload)
        except TimeoutError:
            raise DeadlineExceeded(f"the server at {self.address} does not read") from None
        except OSError as error:
            raise ServiceUnavailable(f"lost the server at {self.address}: {error}") from error

    def _receive(self, what: str, timeout_s: float) -> tuple[m.Message, memoryview]:
        while True:
            try:
                nbytes = self._socket.recv_into(self._reader.buffer())
            except TimeoutError:
                raise DeadlineExceeded(f"{what}: no answer from {self.address} within {timeout_s:g} s") from None
            except OSError as error:
                raise ServiceUnavailable(f"lost the server at {self.address}: {error}") from error
            if not nbytes:
                raise ServiceUnavailable(f"the server at {self.address} closed the connection")
            found = list(self._reader.advance(nbytes))
            if found:
                return found[0]

    def close(self) -> None:
        self._socket.close()
