"""One connection: bytes to messages, handshake, then requests to the service.

The order is fixed: length cap, decode, authentication, handler. Whatever is wrong with the bytes closes this connection
and touches no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Protocol, cast

from transfer_queue.errors import (
    Aborted,
    AccessDenied,
    InvalidInput,
    ProtocolError,
    ServiceRestarted,
    StoreFull,
    TooManyConnections,
    TransferQueueError,
)
from transfer_queue.server.block_requests import Answer
from transfer_queue.server.bulk_writer import BulkWriter
from transfer_queue.server.connection_limit import ConnectionLimit
from transfer_queue.server.journal.journal import DiskJournal
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.server.spinner import Spinner
from transfer_queue.server.turns import LONG, Turns
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import tune
from transfer_queue.wire.defects import answered
from transfer_queue.wire.framing import MAX_HEADER_NBYTES, FrameReader, frame
from transfer_queue.wire.peer import peer

log = logging.getLogger("transfer_queue.server")

HELLO_TIMEOUT_S = 5.0
STALLED_S = 10.0
GATHERED_NBYTES = 1 << 16  # of answers that wait for those to the requests that came with theirs
LAST_READS = 64  # of a peer that is gone: more than its socket holds
HELLO_HEADER_NBYTES = 4096
UNIT_REQUESTS = frozenset({m.Join, m.Moved, m.Gathered, m.ResolveCommits, m.ReportUnit})
# What is asked for that lasts where there is a journal; and answers to parked requests that say nothing of the kind.
LASTING = (m.MUTATING | {m.Join, m.ResolveCommits}) - {m.Allocate, m.Lock, m.Unlock, m.Moved, m.Gathered}
PASSING = frozenset({m.Allocated, m.Locked, m.Failed, m.Located})
ONE_WAY = (m.Unpin, m.Discard, m.Cancel, m.Goodbye)


class Listener(Protocol):
    """What a connection asks of the server that took it."""

    connection_limit: ConnectionLimit[ServerConnection]
    turns: Turns
    spinner: Spinner
    service: Service
    scratch: memoryview
    journal: DiskJournal | None

    def welcome(self, local: bool) -> m.Welcome: ...
    def of_unit(self, message: m.Request, host: str, line: ServerConnection) -> m.Reply: ...
    def deliver(self) -> None: ...
    def now(self) -> float: ...
    def stop(self) -> None: ...


class ServerConnection(asyncio.BufferedProtocol):
    """The server's end of one connection. `tokens` are what a TCP peer has to know, by its role ("": no such peer may
    come); on the unix socket a client needs none."""

    def __init__(self, server: Listener, tokens: tuple[str, str], local: bool) -> None:
        self._server = server
        self._tokens = tokens
        self._local = local
        self._pid = 0  # of the peer, where it is on this host
        self._session: ServerSession | None = None
        self._number = 0  # among the connections of its session
        self._life = handshake.ANY
        self._reception = handshake.Reception(m.PROTOCOL_VERSION, self._token)
        self._reader = FrameReader(
            m.decode_client, self._destination, HELLO_HEADER_NBYTES, server.scratch, m.header_limit
        )
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle
        self._tickets: set[tuple[ServerConnection, int]] = set()
        self._incoming: Iterator[tuple[m.Message, memoryview]] = iter(())
        self._bulk: BulkWriter | None = None  # for peers on other hosts
        self._gathers = False  # answers leave together, with one call of the system: each may wake the peer
        self._gathered: list[bytes | bytearray | memoryview] = []
        self._gathered_nbytes = 0
        self._paused = False  # the peer does not read its answers
        self._long: tuple[m.Message, memoryview] | None = None  # a request that waits for its turn
        self._has_room = True
        self._unsent = 0  # how much it had left when it was looked at last

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._transport.abort)
        self._has_room = self._server.connection_limit.enter(self)
        if not self._local:
            tune(transport.get_extra_info("socket"))
            self._bulk = BulkWriter(self._transport, self.pause_writing, self.resume_writing)
        if self._local:
            self._pid, uid = peer(transport.get_extra_info("socket"))
            if uid not in (os.getuid(), 0):
                log.warning("refused a peer of another user")
                self._transport.abort()

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming = self._reader.advance(nbytes)
        self._work()

    def _work(self) -> None:
        """Handle what has arrived, as long as the peer takes the answers."""
        # A client that is alone works on the first answer while the server works on the request after it.
        changed, self._gathers = False, not self._server.spinner.handled_last(self)
        try:
            for message, payload in self._incoming:
                if type(message) in LONG:
                    if not self._server.turns.take(self):
                        self._long = (message, payload)
                        self._transport.pause_reading()
                        break
                    self._receive_long(message, payload)
                elif type(message) is m.Received and self._session is not None:
                    self._server.service.confirm(message, self._session)
                    continue  # of all messages the most frequent one, and nobody waits for what it does
                else:
                    self._received(message, payload)
                changed = True
                if self._paused or self._transport.is_closing():
                    break
        except TransferQueueError as error:
            log.warning("closed a connection: %s", error)
            self._transport.abort()
        finally:
            self._gathers = False
        self.write_gathered()
        if self._paused or self._long is not None or self._transport.is_closing():
            self._reader.keep()
        if changed:  # for others, too
            self._server.deliver()
            self._server.spinner.handled(self)

    def take_turn(self) -> None:
        """Handle the long request that waited for its turn, and what came after it."""
        found, self._long = self._long, None
        if found is None or self._transport.is_closing():
            return
        try:
            self._receive_long(*found)
        except TransferQueueError as error:
            log.warning("closed a connection: %s", error)
            self._transport.abort()
        self._server.deliver()
        self._go_on()

    def _receive_long(self, message: m.Message, payload: memoryview) -> None:
        started = time.perf_counter()
        self._received(message, payload)
        self._server.turns.took(started)

    def _go_on(self) -> None:
        """Handle what was read already, then read on, unless there is a reason to wait."""
        if not self._paused and self._long is None:
            self._work()
        if not self._paused and self._long is None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._paused = True
        self._transport.pause_reading()
        self._unsent = self._transport.get_write_buffer_size()
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(STALLED_S, self._look_whether_it_reads)

    def _look_whether_it_reads(self) -> None:
        """Cut off a peer that took nothing of its answers for `STALLED_S`: they hold memory."""
        unsent = self._transport.get_write_buffer_size()
        if unsent >= self._unsent and not (self._bulk is not None and self._bulk.is_sending):
            log.warning("cut off a peer that does not read its answers: %s bytes", unsent)
            self._transport.abort()
            return
        self._unsent = unsent
        self._timer = asyncio.get_running_loop().call_later(STALLED_S, self._look_whether_it_reads)

    def resume_writing(self) -> None:
        self._paused = False
        self._timer.cancel()
        self._go_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._server.connection_limit.leave(self)
        if error is not None and self._session is not None:
            self._hear_the_last(self._session)
        self._incoming, self._bulk, self._long = iter(()), None, None
        self._reader.forget()  # no cycle is left, so that the memory comes back at once
        self._server.service.unit.forget(self._reception.nonce)
        if self._session is not None:
            for _, rid in self._tickets:
                self._end_other(rid, self._session)
            ended = error is None or isinstance(error, ConnectionError)  # else its host may be cut off
            now = self._server.now()
            self._server.service.members.left(self, now, ended)
            self._server.service.detach(self._session, set(self._tickets), now)
            self._server.deliver()

    def _hear_the_last(self, session: ServerSession) -> None:
        """Take what the peer told before it went. An answer that cannot be sent ends the connection at once, and what
        was not read by then may call off the very request that was answered.

        Its requests are not begun: they may have been called off over another connection."""
        fd = self._transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError, TransferQueueError):
            for _ in range(LAST_READS):
                for message, _payload in self._incoming:
                    if isinstance(message, m.Received):
                        self._server.service.confirm(message, session)
                    elif isinstance(message, ONE_WAY):
                        self._told(message, session)
                nbytes = os.readv(fd, [self._reader.buffer()])
                if not nbytes:
                    break
                self._incoming = self._reader.advance(nbytes)

    # messages

    def _received(self, message: m.Message, payload: memoryview) -> None:
        if self._session is None:
            self._greet(message)
        elif isinstance(message, m.Request):
            self._request(message, payload, self._session)
        elif isinstance(message, ONE_WAY):
            self._told(message, self._session)
        else:
            raise ProtocolError(f"{type(message).__name__} on an open session")

    def _told(self, message: m.Message, session: ServerSession) -> None:
        if isinstance(message, m.Cancel):
            session.call_off(message.rid, self._number)
            self._server.service.controller.expire(self._server.now())  # as before the end of a session
        self._server.service.notify(message, session)

    def _destination(self, message: m.Message, nbytes: int) -> memoryview:
        if self._session is None:
            raise AccessDenied("payload before the handshake")
        into = self._server.service.blocks.destination(message, nbytes, self._session)
        if isinstance(message, m.Write):
            # its memory stays ours while bytes arrive
            self._server.service.unit.pin(message.block, self._reception.nonce)
        return into

    def _greet(self, message: m.Message) -> None:
        if not self._has_room:
            text = f"the server has {len(self._server.connection_limit)} connections, as many as it may"
            self._send(m.Failed(0, TooManyConnections.code, text))
            self._transport.close()
            return
        try:
            challenge = self._reception.take(message)
            if challenge is not None:
                self._send(challenge)
                return
            self._welcome()
        except (AccessDenied, ServiceRestarted) as error:
            self._send(m.Failed(0, error.code, str(error)))
            self._transport.close()
            if isinstance(error, AccessDenied):
                raise

    def _welcome(self) -> None:
        """The peer knows the token: its session begins, or goes on. `ServiceRestarted` when it means another life."""
        hello = self._reception.hello
        assert hello is not None
        self._life = self._server.service.life
        handshake.check_life(handshake.Life(hello.service, hello.unit), self._life)
        self._timer.cancel()
        self._server.connection_limit.known(self)
        self._reader.max_header_nbytes = MAX_HEADER_NBYTES
        host = "" if self._local else self._transport.get_extra_info("peername")[0]
        self._session = self._server.service.sessions.attach(hello.session, self._local, self._pid, host)
        self._number = self._session.opened
        self._server.service.apply_outcomes()  # whoever is told so is known to a standby that takes over, too
        self._send(self._server.welcome(self._local))

    def _token(self, role: int) -> str:
        """What a peer in this role has to know. Raises `AccessDenied` where nobody may come in this role."""
        if role not in handshake.ROLES:
            raise AccessDenied(f"there is no role {role}")
        if role == handshake.UNIT and self._local:
            raise AccessDenied("units join over TCP")
        if role == handshake.UNIT and not self._tokens[role]:
            raise AccessDenied("this server takes no units: start it with server.unit_token_file")
        return self._tokens[role]

    def _request(self, message: m.Request, payload: memoryview, session: ServerSession) -> None:
        if isinstance(message, m.Stop):
            if not self._local:
                self._send(m.Failed(message.rid, AccessDenied.code, "only a process of this host may stop the server"))
                return
            self._send(m.Done(message.rid))
            self._server.stop()
            return
        if isinstance(message, m.Write):
            self._server.service.unit.unpin(message.block, self._reception.nonce)
        if self._life is not self._server.service.life:  # this unit came to serve another life meanwhile
            self._send(m.Failed(message.rid, ServiceRestarted.code, handshake.ANOTHER_SERVICE))
            return
        if type(message) not in m.ENDING and session.is_called_off(message.rid, self._number):
            self._send(m.Failed(message.rid, Aborted.code, "this request was called off before it was read"))
            return
        for name in m.PLAIN.get(type(message), ()):
            if (plain := getattr(message, name)) and m.nests_too_deep(plain):
                text = f"{type(message).__name__}.{name}: lists and dicts in each other, more than {m.MAX_NESTING} deep"
                self._send(m.Failed(message.rid, InvalidInput.code, text))
                return
        ticket = (self, message.rid)
        answer = answered(
            message.rid, type(message).__name__, partial(self._handled, message, payload, session, ticket)
        )
        if answer is None:
            self._tickets.add(ticket)
        else:
            if session.overtaken:
                self._end_other(message.rid, session)
            answer = (answer, ()) if isinstance(answer, m.Failed) else answer
            self._answer_when_kept(answer, type(message) in LASTING and (type(message) is not m.Find or message.create))

    def _end_other(self, rid: int, session: ServerSession) -> None:
        """A request ends that was asked over two connections. That which was read last counts, and its asker may have
        lost it before, and listen to the other one: it asks again where that is lost, too, and hears what came of it.
        """
        other = session.overtaken.pop(rid, None)
        if isinstance(other, tuple) and isinstance(other[0], ServerConnection) and other[0] is not self:
            other[0].abort()

    def _handled(
        self, message: m.Request, payload: memoryview, session: ServerSession, ticket: Hashable
    ) -> Answer | None:
        for_units = type(message) in UNIT_REQUESTS
        if for_units != self._is_unit():
            needed = "not for units" if self._is_unit() else "for units alone, who know the unit token"
            raise AccessDenied(f"{type(message).__name__}: {needed}")
        if for_units:
            return self._of_unit(message), ()
        return self._server.service.handle(message, payload, session, ticket, self._server.now())

    def _answer_when_kept(self, answer: Answer, waits: bool) -> None:
        """Answer, once what it says lasts as long as was promised; at once where nothing that lasts was asked for, or
        where there is no room for it: the disk itself may be what it has to be told of."""
        journal, reply = self._server.journal, answer[0]
        waits = waits and not (isinstance(reply, m.Failed) and reply.code == StoreFull.code)
        if journal is None or not waits or not journal.hold(lambda: self._answer_late(answer)):
            self._answer(answer)

    def _answer_late(self, answer: Answer) -> None:
        """One of many that the disk has now."""
        if self._transport.is_closing():
            return
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self.write_gathered)
        self._gathers = True
        self._answer(answer)
        self._gathers = False

    def _is_unit(self) -> bool:
        return self._reception.hello is not None and self._reception.hello.role == handshake.UNIT

    def _of_unit(self, message: m.Request) -> m.Reply:
        """The reply to a storage unit of another host; its requests are few and it repeats them by itself."""
        host = self._transport.get_extra_info("peername")[0]
        return self._server.of_unit(message, host, self)

    def push(self, message: m.Message) -> None:
        """Send what answers no request."""
        if not self._transport.is_closing():
            self._send(message)

    def answer_parked(self, ticket: Hashable, answer: Answer) -> None:
        """The answer of a request of this connection that was parked, or what it waits for: `write_gathered` sends it
        with the others that came of the same event."""
        if isinstance(answer[0], m.Waiting):
            self.push(answer[0])
            return
        self._tickets.discard(ticket)
        assert self._session is not None
        if self._session.overtaken:
            self._end_other(answer[0].rid, self._session)
        self._server.service.close_request(self._session, answer)  # over a lost connection it is asked for again
        if not self._transport.is_closing():
            self._gathers = True
            self._answer_when_kept(answer, type(answer[0]) not in PASSING)
            self._gathers = False

    def _answer(self, answer: Answer) -> None:
        reply, payload = answer
        nbytes = sum(len(part) for part in payload) if payload else 0
        header = frame(m.encode(reply), nbytes)
        self._gathered += (header, *payload)
        self._gathered_nbytes += len(header) + nbytes
        if not self._gathers or self._gathered_nbytes > GATHERED_NBYTES:
            self.write_gathered()

    def _send(self, message: m.Message) -> None:
        self._gathered.append(frame(m.encode(message)))
        self.write_gathered()

    def write_gathered(self) -> None:
        """Send the answers that there are."""
        if not self._gathered:
            return
        parts, self._gathered, self._gathered_nbytes = self._gathered, [], 0
        if self._transport.is_closing():
            return
        if self._bulk is None:
            self._transport.writelines(parts)
        else:
            self._bulk.write(parts)

    @property
    def session_ident(self) -> bytes:
        """Of whom it is, once that is known."""
        return self._session.ident if self._session is not None else b""

    @property
    def is_local(self) -> bool:
        return self._local

    def abort(self) -> None:
        """Drop the connection at once."""
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()
