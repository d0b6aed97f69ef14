"""A server of weights: a thread for each peer, who knows the token or is shown out."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from transfer_queue.errors import AccessDenied, InvalidInput, ProtocolError, TransferQueueError, VersionGone
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.faults import as_typed, cut_text
from transfer_queue.weights.transport.info import Outcome
from transfer_queue.weights.transport.ranks import MAX_NBYTES as MAX_TABLE_NBYTES
from transfer_queue.weights.transport.ranks import RankMeeting
from transfer_queue.weights.transport.tracker import Assignment, Tracker
from transfer_queue.weights.transport.wants import MAX_NBYTES, WantTables
from transfer_queue.weights.version.digest import Buffer, host_bytes
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, advertised, tune
from transfer_queue.wire.blocking import FrameSocket, at_most
from transfer_queue.wire.peer import peer_uid
from transfer_queue.wire.reception import admit
from transfer_queue.wire.visitors import Visitors

log = logging.getLogger("transfer_queue.weights")
HELLO_TIMEOUT_S = 5.0
SEND_TIMEOUT_S, SLOWEST_LINK = 60.0, 1e6  # for a message or a bucket, and by its bytes at this rate
MAX_PEERS = 4096  # a receiver has one connection that lasts, and one for each stream while it fetches
MAX_OUTCOMES = 4096
MAX_LIST_NBYTES = 16 << 20  # of the buckets that a receiver lacks


class VersionSource(Protocol):
    """What a server gives. Called by several threads; `VersionGone` for what is not there."""

    def manifest(self, key: str) -> bytes: ...

    def bucket(self, key: str, index: int) -> Buffer: ...

    def holders(self, key: str) -> list[str]:
        """The addresses of those that have the buckets of a version that several ranks give, by rank."""

    def lend(self, key: str) -> tuple[int, Callable[[], None]]:
        """A descriptor of the memory with all buckets, and what to call once the borrower has left."""


class Empty:
    """The store of a server that only takes reports."""

    def manifest(self, key: str) -> bytes:
        raise gone(key)

    def bucket(self, key: str, index: int) -> Buffer:
        raise gone(key)

    def holders(self, key: str) -> list[str]:
        raise gone(key)

    def lend(self, key: str) -> tuple[int, Callable[[], None]]:
        raise gone(key)


class WeightServer:
    """Listens at `address` (TCP, or a unix socket whose peers have our uid) until `close`. `wants`: whom receivers tell
    which parts of the tensors they need. `ranks`: where other ranks of the trainer come to. `tracker`: who knows what
    receivers give each other. Peers that know the token have `max_peers` connections at once: see `wire.visitors`."""

    def __init__(
        self,
        listening: socket.socket,
        token: str,
        store: VersionSource,
        wants: WantTables | None = None,
        ranks: RankMeeting | None = None,
        tracker: Tracker | None = None,
        max_peers: int = MAX_PEERS,
    ) -> None:
        if not token:
            raise InvalidInput("a server of weights needs a token")
        self.token = token
        self._store = store
        self._wants, self._ranks, self._tracker = wants, ranks, tracker
        self._max_nbytes = {  # that a peer may bring; nothing with other messages
            p.WantsMessage: MAX_NBYTES if wants else 0,
            p.RankMessage: MAX_TABLE_NBYTES if ranks else 0,
            p.JoinSwarm: MAX_LIST_NBYTES if tracker else 0,
        }
        self._lock = threading.Lock()
        self._noted = threading.Condition()
        self._outcomes: list[Outcome] = []
        self.num_served_nbytes = 0  # of buckets; whoever has one whole finds it counted
        self._visitors = Visitors(listening, self._serve, "tq-weights-serve", max_peers)

    def outcomes(self, replicas: Collection[str], timeout_s: float = 0.0) -> list[Outcome]:
        """The reports of these since this was asked last, oldest first. Waits for one, at most `timeout_s`."""
        with self._noted:
            self._noted.wait_for(lambda: any(one.replica in replicas for one in self._outcomes), timeout_s)
            found = [one for one in self._outcomes if one.replica in replicas]
            self._outcomes = [one for one in self._outcomes if one.replica not in replicas]
        return found

    def close(self) -> None:
        """Show everybody out and wait for the threads. Repeatable."""
        self._visitors.show_out()
        self._visitors.join()

    def _serve(self, sock: socket.socket, where: object, enter: Callable[[], None]) -> None:
        del where
        stream = p.stream_over(sock, p.decode_client, "a peer")
        visit = _Visit(stream, self._store, self._wants, self._ranks, self._tracker, self._count)
        try:
            if sock.family == socket.AF_UNIX:
                if peer_uid(sock) not in (os.getuid(), 0):
                    raise AccessDenied("a peer of another user")
            else:
                tune(sock)
            admit(stream, p.PROTOCOL, self.token, HELLO_TIMEOUT_S, enter)
            stream.max_nbytes = lambda message: self._max_nbytes.get(type(message), 0)
            most = at_most(max(self._max_nbytes.values()))
            while True:
                message, payload = visit.stream.receive(None, most)
                if isinstance(message, p.OutcomeMessage):
                    self._note(message)
                visit.answer(message, payload)
                if isinstance(message, p.RankMessage) and self._ranks is not None:
                    self._ranks.told(visit)
        except (TransferQueueError, OSError) as error:
            log.debug("a peer left: %s", error)
        finally:
            visit.end()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.num_served_nbytes += nbytes

    def _note(self, message: p.OutcomeMessage) -> None:
        try:
            found = msgspec.json.decode(message.body, type=Outcome)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"not a report: {error}") from None
        with self._noted:
            self._outcomes = [*self._outcomes, found][-MAX_OUTCOMES:]
            self._noted.notify_all()


class _Visit:
    """One connection, and what its peer borrowed."""

    def __init__(
        self,
        stream: FrameSocket[m.Message],
        store: VersionSource,
        wants: WantTables | None,
        ranks: RankMeeting | None,
        tracker: Tracker | None,
        count: Callable[[int], None],
    ) -> None:
        self.stream = stream
        self._store = store
        self._wants, self._ranks, self._tracker = wants, ranks, tracker
        self._count = count  # of the bytes of buckets
        self._rank: int | None = None  # of the trainer, if that is who came
        self._has_entered = False  # as a rank of this run
        self._give_back: list[Callable[[], None]] = []

    def answer(self, message: m.Message, came: memoryview) -> None:
        """What was asked for, or why not."""
        payload: memoryview | bytes = b""
        fd = None
        try:
            if isinstance(message, p.GetManifest):
                payload = self._store.manifest(message.key)
            elif isinstance(message, p.GetBucket):
                payload = host_bytes(self._store.bucket(message.key, message.bucket)).data
            elif isinstance(message, p.GetMemory):
                fd, give_back = self._store.lend(message.key)
                self._give_back.append(give_back)
            elif isinstance(message, p.GetHolders):
                payload = msgspec.json.encode(self._store.holders(message.key))
            elif isinstance(message, p.EnterRank) and self._ranks is not None:
                payload = self._ranks.enter(message).encode()
                self._has_entered = True
            elif isinstance(message, p.RankMessage) and self._ranks is not None and self._has_entered:
                self._rank = message.rank
                payload = self._ranks.bring(message, bytes(came), self, lambda: self.stream.is_lost)
            elif isinstance(message, p.GetSpecs) and self._wants is not None:
                payload = self._wants.body
            elif isinstance(message, p.WantsMessage) and self._wants is not None:
                self._wants.note(came)
            elif isinstance(message, p.JoinSwarm) and self._tracker is not None:
                self._tracker.join(self, message.key, message.name, _buckets(came), message.stall_s)
            elif isinstance(message, p.NextBucket) and self._tracker is not None:
                payload = msgspec.json.encode(self._assigned(self._tracker, message))
            elif not isinstance(message, p.OutcomeMessage):
                raise ProtocolError(f"{type(message).__name__} is no request")
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 the peer is told, and goes elsewhere
            typed = as_typed(error)
            self.stream.send(m.Failed(0, typed.code, cut_text(str(typed))), SEND_TIMEOUT_S)
            return
        num_served = len(payload) if isinstance(message, p.GetBucket) else 0
        self._count(num_served)  # before the peer can have it
        try:
            self.stream.send(p.Sent(), SEND_TIMEOUT_S + len(payload) / SLOWEST_LINK, payload, fd)
        except BaseException:
            self._count(-num_served)
            raise
        finally:
            if fd is not None:
                os.close(fd)

    def _assigned(self, tracker: Tracker, message: p.NextBucket) -> Assignment:
        return tracker.ask(self, message.key, message.name, message.came, message.timeout_s)

    def end(self) -> None:
        self.stream.close()
        if self._tracker is not None:
            self._tracker.left(self)
        if self._rank is not None and self._ranks is not None:
            self._ranks.left(self._rank, self)
        for give_back in self._give_back:
            give_back()


def _buckets(body: memoryview) -> list[int]:
    try:
        return msgspec.json.decode(body, type=list[int])
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a list of buckets: {error}") from None


def listen_tcp(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and the address to tell others (`wire.address.advertised`); port 0 takes a free one."""
    if not 0 <= port < 1 << 16:
        raise InvalidInput(f"port {port}: there are 0 to 65535")
    sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)
    return sock, str(Address(host=advertised(host), port=sock.getsockname()[1]))


def listen_unix(name: str) -> tuple[socket.socket, str]:
    """`@NAME` leaves nothing behind whatever happens; a path has mode 0600 and is replaced when nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if name.startswith("@"):
            sock.bind("\0" + name[1:])
        else:
            _remove_stale(name)
            before = os.umask(0o177)
            try:
                sock.bind(name)
            finally:
                os.umask(before)
        sock.listen(128)
    except BaseException:  # an interrupt must not leave the socket
        sock.close()
        raise
    return sock, f"unix:{name}"


def _remove_stale(path: str) -> None:
    if not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise InvalidInput(f"somebody listens at {path} already")


def gone(key: str) -> VersionGone:
    return VersionGone(f"no version with manifest {key}" if key else "no version yet")
