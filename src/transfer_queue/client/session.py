"""What a process shares with one life of a server: connections, mapped arenas, memory. For many threads and loops.

All connections of a process belong to one session. When the last of them closes, the server frees what the session
left unfinished and unpins what it read: `holding` keeps it from that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import select
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

from transfer_queue.background_call import Helpers
from transfer_queue.client import forks
from transfer_queue.client.arenas import MappedArenas
from transfer_queue.client.carried import CHANGING, Carrying
from transfer_queue.client.connection import Connection, decode_reply
from transfer_queue.client.effects import Call
from transfer_queue.client.endings import explained, raise_if_gone, restarted
from transfer_queue.client.engine import EngineAccess
from transfer_queue.client.holding import Hold, Uses
from transfer_queue.client.listing import Listings
from transfer_queue.client.loops import LoopConnections
from transfer_queue.client.one_way import OneWay, Owed
from transfer_queue.client.remarks import warn_once
from transfer_queue.client.retry import Retry, left_s
from transfer_queue.client.spilled import SpilledBlocks
from transfer_queue.client.transport import TransportAccess
from transfer_queue.client.views import Views
from transfer_queue.errors import (
    DeadlineExceeded,
    InvalidInput,
    ServiceRestarted,
    ServiceUnavailable,
    TransferQueueError,
    error_from_code,
)
from transfer_queue.memory.copy import Mover
from transfer_queue.memory.pool import Pool
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, parse_address
from transfer_queue.wire.aio import AsyncConnection
from transfer_queue.wire.handshake import ANY, Life

MAX_IDLE = 16
NOTIFY_S = HOLD_S = 1.0
STREAMS = 4  # calls to other servers at the same time


class Interrupted(Exception):
    """Another thread ended the call with `Session.interrupt`; the server was told that nobody waits any more."""


class Session:
    """Attached to one life of the server at `address`; raises `ServiceUnavailable` when there is none.

    `life` names that life, and everything here belongs to it: the connections, the mapped arenas, the views, what is
    known of keys. When another life answers at the address, every call that is in flight raises `ServiceRestarted` and
    the session has `ended`; views that were handed out keep their bytes. `successor` attaches to what is there now.

    `config` is what the service was started with: timeout_s, polling_mode, pool_nbytes, copy_threads, spin_s; and for
    processes of the server's host the token of the other servers. `allow_pickle` is this process's own choice.
    After a fork the child gets a session of its own on first use; what it inherited stays readable.
    """

    def __init__(self, address: Address, connect_timeout_s: float = 10.0, predecessor: Session | None = None) -> None:
        self.address = address
        self.life = ANY
        self.ended: str | None = None  # why nothing of it is of use any more
        self.closed = False
        self.allow_pickle = False
        self._finished = False
        self._estates: list[Connection] = []  # they hold the pins of inherited views, to the end
        self._child_session: tuple[bytes, Connection] | None = None  # while a fork is under way
        self._connect_timeout_s = connect_timeout_s
        self._spin_s = 0.0
        self.server_pid = 0
        self._start(secrets.token_bytes(16))
        try:
            connection = self._connected(connect_timeout_s)
        except ServiceUnavailable as error:
            raise_if_gone(error)
            connection = self._connected(connect_timeout_s)
        welcome = connection.welcome
        self.life = Life(welcome.service, welcome.unit)
        self.config: dict[str, Any] = json.loads(welcome.config)
        warn_once(f"the service at {address}", str(self.config.get("remark", "")))
        self._spin_s = float(self.config.get("spin_s", 0.0))
        connection.spin(self._spin_s)
        self._door = welcome.door
        self._give_back(connection)
        if predecessor is None or predecessor._pid != self._pid:
            self.mover = Mover(self.config.get("copy_threads"))
            self.pool = Pool(int(self.config.get("pool_nbytes", 1 << 30)))
        else:  # these are the process's; those of a parent may be locked for good
            self.mover, self.pool = predecessor.mover, predecessor.pool
        self._open_memory()
        forks.sessions.add(self)

    def successor(self) -> Session:
        """A session with what answers at the address now. Raises as the constructor."""
        try:
            found = Session(self.address, self._connect_timeout_s, self)
        except ServiceUnavailable as error:
            raise explained(error, self.address, self.server_pid) from error.__cause__
        found.allow_pickle = self.allow_pickle
        return found

    def _start(self, ident: bytes) -> None:
        self.ident = ident
        self._pid = os.getpid()
        self._idle: dict[str, list[Connection]] = {"": []}  # by server
        self._helpers: Helpers | None = None
        self._lock = threading.Lock()
        self.listings = Listings()
        self.carrying = Carrying()
        self.changes = 0  # the number of the last change of cells
        self._change_numbers = itertools.count(1)  # no two threads get the same
        self._rids = itertools.count(1)
        self._one_way = OneWay()
        self.given_up = self._one_way.given_up  # calls that are to have had no effect: append, then `settle`
        self._waiting: dict[int, Connection] = {}  # of each parked request of a blocking call
        self._hold = Hold(self._connected, lambda: self._one_way.again(""))  # it may not have read what it was told
        self.uses = Uses()
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._loops = LoopConnections(self._open_on_loop, self._one_way.again)

    def _open_memory(self) -> None:
        self.arenas = MappedArenas(self._door, self._connect_timeout_s)
        self.spilled = SpilledBlocks(self.arenas)
        self.engine = EngineAccess(self.config.get("engine"), self.pool)
        self.transport = TransportAccess(self.config.get("transport"), self.address, self.pool)
        self.views = Views(self.arenas, self._unpin, self.hold, lambda: self.uses.end_with(self._disconnect))

    @property
    def is_local(self) -> bool:
        """Whether blocks are mapped rather than sent."""
        return bool(self._door)

    @property
    def service_id(self) -> bytes:
        """The life of the service that rows, leases and keys belong to."""
        return self.life.service

    @property
    def timeout_s(self) -> float:
        return float(self.config["timeout_s"])

    def next_rid(self) -> int:
        return next(self._rids)

    # connections

    def connect(self, timeout_s: float | None = None, to: str = "", ident: bytes | None = None) -> Connection:
        """A new connection to this life of the service, for this session or another `ident`.

        Raises `ServiceRestarted` when another life answers, `ServiceUnavailable`, `AccessDenied`, `DeadlineExceeded`.
        """
        within_s = min(self.timeout_s if timeout_s is None else timeout_s, self._connect_timeout_s)
        if to or ident is not None:
            return self._connected(within_s, to, ident)
        self._hold.ensure(within_s)
        connection = self._connected(within_s)
        try:
            self._hold.ensure(within_s)  # a standby answered this one: what was open a moment ago is lost
        except BaseException:
            self._give_back(connection)  # it may be the last one that the session has
            raise
        return connection

    def _connected(self, within_s: float, to: str = "", ident: bytes | None = None) -> Connection:
        self._check_open()
        expected, spin_s = Life(self.life.service) if to else self.life, 0.0 if to else self._spin_s
        try:
            connection = Connection(self._address_of(to), ident or self.ident, within_s, spin_s, expected)
        except ServiceUnavailable as error:
            raise explained(error, self.address, self.server_pid, to) from error.__cause__
        if not to:
            self.server_pid = connection.welcome.pid  # that of its standby, once that has taken over
        self._connections.add(connection)
        return connection

    @property
    def is_held(self) -> bool:
        """Whether it outlives the connections of its calls: see `hold`."""
        return self._hold.is_open

    def hold(self) -> None:
        """From now on the session has what must not go with a call that is broken off, such as leases."""
        self._hold.is_needed = True
        with contextlib.suppress(ServiceUnavailable, DeadlineExceeded):  # the next connection asks for it again
            self._hold.ensure(HOLD_S)

    async def hold_async(self) -> None:
        """As `hold`, on the running loop."""
        self._hold.is_needed = True
        with contextlib.suppress(ServiceUnavailable, DeadlineExceeded):
            await self._ensure_held(HOLD_S)

    async def _ensure_held(self, within_s: float) -> None:
        if self._hold.is_missing:
            await asyncio.wrap_future(self.mover.start(lambda: self._hold.ensure(within_s)))

    def _borrow(self, timeout_s: float, to: str = "") -> Connection:
        """A connection of our own for one call, which may break it. Where others are at work, theirs is not taken but
        kept: the session lives on by it."""
        try:
            connection = self._idle[to].pop()
        except (IndexError, KeyError):
            return self.connect(timeout_s, to)
        if to or self.is_held or self.uses.num_active < 2 or not self._hold.takes(connection):
            return connection
        return self.connect(timeout_s)

    def _address_of(self, to: str) -> Address:
        """Where the server `to` is; all servers of a service have one token."""
        if not to:
            return self.address
        return parse_address(f"tcp:{to.removeprefix('tcp:')}", self.address.token or str(self.config.get("token", "")))

    def _give_back(self, connection: Connection, to: str = "", is_whole: bool = True) -> None:
        idle = self._idle.setdefault(to, [])
        if is_whole and len(idle) < MAX_IDLE and not self._finished:
            idle.append(connection)
        else:
            connection.close()

    def check(self, timeout_s: float) -> None:
        """Whether this life of the service still answers. Raises `ServiceRestarted`, `ServiceUnavailable`, or
        `DeadlineExceeded` when it does not answer in time, which says nothing about its life."""
        self._check_open()
        try:
            self._give_back(self.connect(timeout_s))
        except ServiceRestarted as error:
            self.end(str(error))
            raise

    def _check_open(self) -> None:
        if self.closed:
            raise ServiceUnavailable("this client was closed")
        if self.ended is not None:
            raise ServiceRestarted(self.ended)

    # blocking

    def call(self, effect: Call) -> tuple[Any, memoryview]:
        """Send and wait. Over a lost connection the request is sent again, see `Retry`.

        Raises `ServiceRestarted` (then the session has ended), `ServiceUnavailable`, `DeadlineExceeded`, or what the
        server answered.
        """
        try:
            return self._call(effect)
        finally:
            self._note_change(effect)

    def _call(self, effect: Call) -> tuple[Any, memoryview]:
        timeout_s = effect.wait_s + effect.grace_s if effect.wait_s else self.timeout_s
        deadline = time.monotonic() + timeout_s
        retry: Retry | None = None
        while True:
            try:
                found = self._exchange(effect, timeout_s)
                break
            except ServiceUnavailable as error:
                self._judge(error)
                retry = retry or self._retry(effect, deadline)
                pause_s = retry.pause_s(error)
                if pause_s is None:
                    raise
            self._drop_lost(effect.to)
            if pause_s:
                select.select([], [], [], pause_s)
            timeout_s = left_s(effect, deadline - time.monotonic())
        return self._checked(found)

    def _note_change(self, effect: Call) -> None:
        """The call has ended; it may have changed cells, whatever came of it."""
        if type(effect.request) in CHANGING:
            self.changes = next(self._change_numbers)

    def _retry(self, effect: Call, deadline: float) -> Retry:
        m.check_request(effect.request)  # a server closes the connection over what it cannot read
        self._one_way.again(effect.to)
        return Retry(self._address_of(effect.to).is_local, deadline)

    def _judge(self, error: ServiceUnavailable) -> None:
        """What came of a lost connection. Raises when it is the end of the session, or this client was closed."""
        if isinstance(error, ServiceRestarted):
            self.end(str(error))
        self._check_open()

    def _checked(self, found: tuple[Any, memoryview]) -> tuple[Any, memoryview]:
        reply = found[0]
        if type(reply) is m.Failed:
            if reply.code == ServiceRestarted.code:  # this host's unit came to serve another life
                self.end(restarted(self.address, reply.text))
                self._check_open()
            raise error_from_code(reply.code, reply.text)  # kept in no variable: its traceback would be a cycle
        return found

    def _exchange(self, effect: Call, timeout_s: float) -> tuple[Any, memoryview]:
        self._check_open()
        connection = self._borrow(timeout_s, effect.to)
        if effect.wait_s:
            self._waiting[effect.request.rid] = connection
        try:
            self._check_open()  # `close` does not see who is not waiting yet
            # First of all: what the call waits for may be given back by it.
            told = self._one_way.pay_one(effect.to, connection.notify) if self._one_way.owed else ()
            found = connection.call(effect.request, effect.payload, timeout_s, effect.into)
        except BaseException as error:
            # Unless nothing was sent, the answer may still come: nobody else must take it for theirs.
            self._give_back(connection, effect.to, type(error) is InvalidInput)
            if effect.wait_s and self._waiting.pop(effect.request.rid, None) is None:
                raise Interrupted from None
            if isinstance(error, DeadlineExceeded):
                self._one_way.owe_cancel(effect.request.rid, effect.to, unanswered=True)
            raise
        was_interrupted = effect.wait_s and self._waiting.pop(effect.request.rid, None) is None  # just too late
        if effect.to or was_interrupted or not self._hold.stands_in(connection):
            self._give_back(connection, effect.to, not was_interrupted)
        if self._one_way.owed or self._one_way.missed or self.given_up:
            self._one_way.heard_from(effect.to, told)
            self._one_way.pay(self._notify)
        return found

    def call_together(self, calls: Sequence[Call]) -> list[tuple[Any, memoryview]]:
        """Send and wait for several, at the same time where there are threads to do it."""
        with self._lock:
            if self._helpers is None and len(calls) > 1:
                self._helpers = Helpers(STREAMS - 1, thread_name_prefix="tq-stream")
        others = [self._helpers.submit(self.call, call) for call in calls[1:]] if self._helpers is not None else []
        try:
            first = [self.call(call) for call in calls[:1]]
        finally:
            wait(others)  # they receive into memory of the caller
        return first + [other.result() for other in others]

    def interrupt(self, rid: int) -> None:
        """Make the blocking call of another thread whose request is parked raise `Interrupted`; else nothing."""
        connection = self._waiting.pop(rid, None)
        if connection is not None:
            connection.shut()

    def notify(self, message: m.Message, to: str = "") -> None:
        """Tell the server; when it does not listen now, the next call does. Once it is gone, nobody needs to know."""
        self.tell([(message, to)])

    def tell(self, untold: list[Owed]) -> None:
        """As `notify`, of all of these: what one server is told goes with one system call. The list is empty then."""
        if not untold:
            return
        told, untold[:] = list(untold), []
        for message, to in told:
            self._one_way.said(message, to)
        for server in dict.fromkeys(to for _, to in told):
            self._tell([message for message, to in told if to == server], server)

    def _notify(self, message: m.Message, to: str) -> None:
        self._tell([message], to)

    def _tell(self, messages: Sequence[m.Message], to: str) -> None:
        if self.ended is not None or self.closed:
            # The server may live on: a unit whose controller was started anew, or a service that others use. What is
            # pinned there is told over the connection that holds the pins.
            for message in () if to else messages:
                self._hold.notify(message)
            return
        try:
            connection = self._borrow(NOTIFY_S, to)
        except ServiceRestarted:
            return
        except (ServiceUnavailable, DeadlineExceeded):
            self._owe(messages, to)
            return
        try:
            connection.notify(*messages)
        except (ServiceUnavailable, DeadlineExceeded):
            connection.close()
            self._one_way.again(to)  # nor may it have read what it was told before
            self._owe(messages, to)
            return
        except BaseException:
            connection.close()
            raise
        self._give_back(connection, to)

    def _owe(self, messages: Sequence[m.Message], to: str) -> None:
        for message in messages:
            self._one_way.owe(message, to)

    def settle(self, is_answered: bool) -> None:
        """Cancel the calls that were `given_up`. What a server that just did not answer, or a second interrupt, keeps
        from being said now is said with the next call."""
        if is_answered:
            self._one_way.pay(self._notify)
        else:
            self._one_way.settle()

    def _unpin(self, rid: int, blocks: list[int]) -> None:
        self.notify(m.Unpin(rid, blocks))

    # asyncio

    async def call_async(self, effect: Call) -> tuple[Any, memoryview]:
        """As `call`, on the running loop."""
        try:
            return await self._call_async(effect)
        except (asyncio.CancelledError, DeadlineExceeded) as error:
            self._one_way.called_off(effect.request.rid, effect.to, unanswered=isinstance(error, DeadlineExceeded))
            raise
        finally:
            self._note_change(effect)

    async def _call_async(self, effect: Call) -> tuple[Any, memoryview]:
        timeout_s = effect.wait_s + effect.grace_s if effect.wait_s else self.timeout_s
        deadline = time.monotonic() + timeout_s
        retry: Retry | None = None
        while True:
            try:
                connection = await self._connection(timeout_s, effect.to)
                told = self._one_way.pay_one(effect.to, connection.notify) if self._one_way.owed else ()
                found = await connection.call(effect.request, effect.payload, timeout_s, effect.into)
                if self._one_way.owed or self._one_way.missed or self.given_up:
                    self._one_way.heard_from(effect.to, told)
                    self._one_way.pay_one(effect.to, connection.notify)
                break
            except ServiceUnavailable as error:
                self._judge(error)
                retry = retry or self._retry(effect, deadline)
                pause_s = retry.pause_s(error)
                if pause_s is None:
                    raise
            if pause_s:
                await asyncio.sleep(pause_s)
            timeout_s = left_s(effect, deadline - time.monotonic())
        if self._hold.is_needed and not self._hold.is_open:  # the service stood still when one was to be opened
            await self.hold_async()
        return self._checked(found)

    def confirmation(self, rid: int) -> m.Received:
        """What tells that the answer to a request was received."""
        self._one_way.confirmed.append(rid)
        return m.Received([rid])

    def confirm_on_loop(self, rid: int, to: str = "") -> None:
        """Tell that the answer to a request was received: with what the running loop sends next, or in a moment."""
        self._one_way.confirmed.append(rid)
        connection = self._loops.here(to)
        if connection is not None:
            connection.confirm(rid)
            return
        self._one_way.owe(m.Received([rid]), to)

    def notify_on_loop(self, message: m.Message, to: str = "") -> None:
        """As `notify`, from the running loop and without waiting: over its connection, else with the next call."""
        self._one_way.said(message, to)
        connection = self._loops.here(to)
        if connection is not None:
            connection.notify(message)
            return
        self._one_way.owe(message, to)

    async def _connection(self, timeout_s: float, to: str) -> AsyncConnection:
        """The connection of the running loop to one server."""
        self._check_open()
        within_s = min(timeout_s, self._connect_timeout_s)
        found = await self._loops.get(to, within_s)
        if found is None:
            raise DeadlineExceeded(f"no connection to {self._address_of(to)} within {within_s:g} s")
        return found

    async def _open_on_loop(self, to: str) -> AsyncConnection:
        connection, expected = AsyncConnection(self._address_of(to), decode_reply), Life(self.life.service)
        if not to:
            await self._ensure_held(self._connect_timeout_s)
        try:
            await connection.open(self.ident, self._connect_timeout_s, expected if to else self.life)
        except ServiceUnavailable as error:
            raise explained(error, self.address, self.server_pid, to) from error.__cause__  # that says who listens
        if self.closed or self.ended is not None:
            connection.close()
        elif not to:
            try:
                with contextlib.suppress(ServiceUnavailable, DeadlineExceeded):  # see `connect`
                    await self._ensure_held(self._connect_timeout_s)
            except BaseException:
                connection.close()
                raise
        return connection

    # ending and forking

    def _drop_lost(self, to: str) -> None:
        """Not those that another thread has opened since: with its last connection a session ends."""
        idle = self._idle.get(to, [])
        with contextlib.suppress(IndexError):  # another thread took the rest
            for _ in range(len(idle)):
                connection = idle.pop(0)
                if connection.is_lost:
                    connection.close()
                else:
                    idle.append(connection)

    def end(self, why: str) -> None:
        """Another life answers: nothing of this one is of use any more but the views that were handed out."""
        with self._lock:
            if self.ended is not None or self.closed:
                return
            self.ended = why
        self._detach(ServiceRestarted(why))

    def close(self) -> None:
        """Detach. Tensors that were read stay valid: a connection lasts as long as they do, and with it their pins.

        Operations under way in other threads end with what they have; what they ask for from now on is refused, and
        what they wait for is not waited for any more.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if self.ended is None:
            self._detach(ServiceUnavailable("this client was closed"))
        self.uses.end_with(self._release)

    def _release(self) -> None:
        """What copies is needed no longer."""
        if self._helpers is not None:
            self._helpers.shutdown()
        self.engine.close()
        self.transport.close()
        self.mover.close()
        self.pool.clear()

    def _detach(self, reason: ServiceUnavailable) -> None:
        forks.sessions.discard(self)
        self.changes = next(self._change_numbers)
        self._loops.abandon(reason)
        for parked in list(self._waiting.values()):
            parked.shut()
        self.views.close()

    def _disconnect(self) -> None:
        """The last view is gone, and the last operation: nobody looks at memory that is the session's."""
        self._finished = True
        if not self.is_local:
            self._hold.notify(m.Goodbye())
        for to, idle in self._idle.items():
            if idle and (to or not (self.is_local or self.is_held)):
                with contextlib.suppress(ServiceUnavailable, DeadlineExceeded):
                    idle[0].notify(m.Goodbye())
            while idle:
                idle.pop().close()
        self._hold.close()
        self.arenas.close()

    def before_fork(self) -> None:
        """Have a session for the child pin what is being read here, before the two part. Where the server does not
        answer now, the pages are copied: this process may give up its pins before that can be made up for."""
        self._child_session = heir = forks.heir(self.connect, self.ident) if self.views.num_open else None
        if heir is not None:
            self._connections.discard(heir[1])  # the child keeps it
        elif self.views.num_open:
            self.views.make_private()

    def after_fork_in_parent(self) -> None:
        if self._child_session is not None:
            self._child_session[1].close()

    def after_fork_in_child(self) -> None:
        """Leave the parent's sockets and mappings alone, and start over."""
        inherited, over_loops = list(self._connections), self._loops.all()
        ident, estate = self._child_session or (secrets.token_bytes(16), None)
        self._start(ident)  # first of all: whatever else fails, this process does not speak in its parent's name
        for connection in inherited:
            connection.close()
        for one in over_loops:
            forks.leave(one._transport.get_extra_info("socket"))
        self.arenas.close()
        self.engine.leave_behind()
        self.mover = Mover(self.config.get("copy_threads"))
        self.pool = Pool(self.pool.keep_nbytes)
        self._open_memory()
        if estate is not None:
            self._estates.append(estate)
            with contextlib.suppress(TransferQueueError):  # the server has to know whose the views are now
                self.hold()
