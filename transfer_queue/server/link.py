"""One connection: bytes to messages, handshake, then requests to the service.

The order is fixed: length cap, decode, authentication, handler. Whatever is wrong with the bytes closes this connection
and touches no other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, cast

from transfer_queue.errors import AccessDenied, InternalError, ProtocolError, TransferQueueError
from transfer_queue.server.blocks import Answer
from transfer_queue.server.bulk import BulkWriter, Parts
from transfer_queue.server.sessions import Session
from transfer_queue.wire import hello
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import tune
from transfer_queue.wire.framing import MAX_HEADER_NBYTES, FrameReader, frame

if TYPE_CHECKING:
    from transfer_queue.server.process import Server

log = logging.getLogger("transfer_queue.server")

HELLO_TIMEOUT_S = 5.0
HELLO_HEADER_NBYTES = 4096
UNIT_REQUESTS = (m.Join, m.Moved, m.Settle)
ONE_WAY = (m.Unpin, m.Discard, m.Cancel, m.Goodbye)
CREDENTIALS = struct.Struct("3i")


class Link(asyncio.BufferedProtocol):
    """The server's end of one connection. `token` is what a TCP peer has to know, "" on the unix socket."""

    def __init__(self, server: Server, token: str, local: bool) -> None:
        self._server = server
        self._token = token
        self._local = local
        self._session: Session | None = None
        self._hello: m.Hello | None = None
        self._nonce = hello.nonce()
        self._reader = FrameReader(m.decode_client, self._destination, HELLO_HEADER_NBYTES)
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle
        self._tickets: set[Hashable] = set()
        self._incoming: Iterator[tuple[m.Message, memoryview]] = iter(())
        self._bulk: BulkWriter | None = None  # for peers on other hosts
        self._paused = False  # the peer does not read its answers

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.links.add(self)
        self._timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._transport.abort)
        if not self._local:
            tune(transport.get_extra_info("socket"))
            self._bulk = BulkWriter(self._transport, self.pause_writing, self.resume_writing)
        if self._local and peer_uid(transport.get_extra_info("socket")) not in (os.getuid(), 0):
            log.warning("refused a peer of another user")
            self._transport.abort()

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming = self._reader.advance(nbytes)
        self._work()

    def _work(self) -> None:
        """Handle what has arrived, as long as the peer takes the answers."""
        try:
            for message, payload in self._incoming:
                self._received(message, payload)
                if self._paused or self._transport.is_closing():
                    break
        except TransferQueueError as error:
            log.warning("closed a connection: %s", error)
            self._transport.abort()
        self._server.deliver()

    def pause_writing(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._work()
        if not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        self._timer.cancel()
        self._server.links.discard(self)
        self._server.service.unit.forget(self._nonce)
        if self._session is not None:
            self._server.service.members.left(self, time.monotonic())
            self._server.service.detach(self._session, self._tickets, time.monotonic())
            self._server.deliver()

    # messages

    def _received(self, message: m.Message, payload: memoryview) -> None:
        if self._session is None:
            self._greet(message)
        elif isinstance(message, m.Request):
            self._request(message, payload, self._session)
        elif isinstance(message, ONE_WAY):
            self._server.service.notify(message, self._session)
        else:
            raise ProtocolError(f"{type(message).__name__} on an open session")

    def _destination(self, message: m.Message, nbytes: int) -> memoryview:
        if self._session is None:
            raise AccessDenied("payload before the handshake")
        into = self._server.service.blocks.destination(message, nbytes, self._session)
        if isinstance(message, m.Write):
            self._server.service.unit.pin(message.block, self._nonce)  # its memory stays ours while bytes arrive
        return into

    def _greet(self, message: m.Message) -> None:
        match message:
            case m.Hello(version=version, nonce=nonce) if self._hello is None:
                if version != m.PROTOCOL_VERSION:
                    self._refuse(f"protocol version {version}, this server speaks {m.PROTOCOL_VERSION}")
                self._hello = message
                self._send(m.Challenge(self._nonce, hello.server_mac(self._token, nonce, self._nonce)))
            case m.Proof(mac=mac) if self._hello is not None:
                if not hello.equal(mac, hello.client_mac(self._token, self._hello.nonce, self._nonce)):
                    self._refuse("wrong token")
                self._timer.cancel()
                self._reader.max_header_nbytes = MAX_HEADER_NBYTES
                self._session = self._server.service.sessions.attach(self._hello.session, self._local)
                self._send(self._server.welcome(self._local))
            case _:
                raise AccessDenied(f"{type(message).__name__} before the handshake")

    def _refuse(self, reason: str) -> None:
        self._send(m.Failed(0, AccessDenied.code, reason))
        self._transport.close()
        raise AccessDenied(reason)

    def _request(self, message: m.Request, payload: memoryview, session: Session) -> None:
        if isinstance(message, m.Stop):
            if not self._local:
                self._send(m.Failed(message.rid, AccessDenied.code, "only a process of this host may stop the server"))
                return
            self._send(m.Done(message.rid))
            self._server.stop()
            return
        if isinstance(message, m.Write):
            self._server.service.unit.unpin(message.block, self._nonce)
        ticket = (self, message.rid)
        try:
            if isinstance(message, UNIT_REQUESTS):
                answer: Answer | None = (self._of_unit(message), ())
            else:
                answer = self._server.service.handle(message, payload, session, ticket, time.monotonic())
        except Exception:
            log.exception("%s failed", type(message).__name__)
            answer = (
                m.Failed(message.rid, InternalError.code, f"{type(message).__name__} failed; see the server's log"),
                (),
            )
        if answer is None:
            self._tickets.add(ticket)
        else:
            self._answer(answer)

    def _of_unit(self, message: m.Request) -> m.Reply:
        """The reply to a storage unit of another host; its requests are few and it repeats them by itself."""
        if self._local:
            return m.Failed(message.rid, AccessDenied.code, "units join over TCP")
        host = self._transport.get_extra_info("peername")[0]
        return self._server.of_unit(message, host, self)

    def push(self, message: m.Message) -> None:
        """Send what answers no request."""
        if not self._transport.is_closing():
            self._send(message)

    def answer_parked(self, ticket: Hashable, answer: Answer) -> None:
        """Send the answer of a request of this connection that was parked, or what it waits for."""
        if isinstance(answer[0], m.Waiting):
            self.push(answer[0])
            return
        self._tickets.discard(ticket)
        assert self._session is not None
        if not self._transport.is_closing():
            self._server.service.close_request(self._session, answer)
            self._answer(answer)
        elif isinstance(answer[0], (m.RowSet, m.Handed)):
            rows = answer[0].rows if isinstance(answer[0], m.Handed) else answer[0]
            self._server.service.controller.take_back(rows, self._session.ident)
        elif isinstance(answer[0], m.Admitted):
            self._server.service.controller.take_back(answer[0], self._session.ident)

    def _answer(self, answer: Answer) -> None:
        reply, payload = answer
        if not payload:
            self._send(reply)
            return
        header = frame(m.encode(reply), sum(len(part) for part in payload))
        self._write([header, *payload])

    def _send(self, message: m.Message) -> None:
        self._write([frame(m.encode(message))])

    def _write(self, parts: Parts) -> None:
        if self._bulk is None:
            self._transport.writelines(parts)
        else:
            self._bulk.write(parts)

    def close(self) -> None:
        self._transport.close()


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a unix socket (SO_PEERCRED, unix(7))."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    uid: int = CREDENTIALS.unpack(data)[1]
    return uid
