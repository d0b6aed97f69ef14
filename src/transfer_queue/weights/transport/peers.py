"""A receiver among those of an update that give each other buckets: what it gives, and how it fetches (`tracker`)."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import torch

from transfer_queue.errors import DigestMismatch, InvalidInput, ServiceUnavailable, TransferQueueError, kept
from transfer_queue.weights.receive.receiver import Receiver
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.fetching import MAX_FAULTS, Source, TrainerLink, Transfers
from transfer_queue.weights.transport.info import key_of
from transfer_queue.weights.transport.protocol import Came, Peer
from transfer_queue.weights.transport.serving import WeightServer, gone, listen_tcp
from transfer_queue.weights.transport.tracker import Assignment
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.wire.address import Address, is_loopback
from transfer_queue.wire.blocking import at_most

log = logging.getLogger("transfer_queue.weights")
WAIT_S = 5.0  # for the trainer to have something to do
MAX_ANSWER_NBYTES = 4096
REACH_S = 2.0  # of another receiver
MIN_NBYTES = 4 << 20  # a smaller version is there before others could be asked


class StagedBuckets:
    """What a receiver's open update has staged and verified, until its commit begins or it is given up."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def manifest(self, key: str) -> bytes:
        raise gone(key)

    def bucket(self, key: str, index: int) -> torch.Tensor:
        found = self._receiver.staged(key, index)
        if found is None:
            raise gone(key)
        return found

    def holders(self, key: str) -> list[str]:
        raise gone(key)

    def lend(self, key: str) -> tuple[int, Callable[[], None]]:
        raise InvalidInput("memory is not lent over TCP")


class Sharing:
    """Where a receiver gives what it has staged, as long as it is open.

    `host`: where it listens. "": at its own end of the connection to the trainer, an address of the network in which
    that is reached."""

    def __init__(self, receiver: Receiver, host: str = "") -> None:
        self._receiver = receiver
        self._host = host
        self._server: WeightServer | None = None
        self._opened: tuple[str, str] | None = None
        self._is_always = False  # however small the version is
        self._num_reached = self._num_unreached = 0  # connections to other receivers
        self._is_apart = False  # the network keeps receivers from each other
        self.address = ""  # "": it does not listen

    @property
    def num_served_nbytes(self) -> int:
        """Bytes of buckets that others have fetched here since it was opened."""
        return 0 if self._server is None else self._server.num_served_nbytes

    def open(self, trainer: Peer, token: str, peers: bool | None) -> None:
        """Listen if the trainer wants it: True; None: if it is on another host."""
        sock = trainer.stream.socket
        here, there = sock.getsockname()[0], sock.getpeername()[0]
        if not (peers or (peers is None and here != there and not is_loopback(there))):
            self.close()
        elif self._opened != (here, token):
            self.close()
            listening, self.address = listen_tcp(self._host or here, 0)
            self._server = WeightServer(listening, token, StagedBuckets(self._receiver))
            self._opened = (here, token)
        self._is_always = bool(peers)
        self._num_reached = self._num_unreached = 0
        self._is_apart = False

    def takes(self, manifest: Manifest) -> bool:
        """Whether this version is to be fetched so."""
        may = bool(self.address) and not self._is_apart
        return may and (self._is_always or manifest.nbytes >= MIN_NBYTES)

    def fetch(
        self,
        manifest: Manifest,
        wanted: list[int],
        link: TrainerLink,
        sources: Sequence[Source],
        streams: int,
        deadline: Deadline,
        stall_s: float,
    ) -> list[int]:
        """Fetch wanted buckets as the trainer's tracker says. Returns those that did not come so, to be fetched
        otherwise: all of them where the trainer knows of no such update. Raises what ended the update, or its
        deadline."""
        message = p.JoinSwarm(key_of(manifest), self.address, stall_s)
        try:
            link.ask(message, deadline, body=msgspec.json.encode(wanted))
        except TransferQueueError as error:
            log.info("version %s is fetched from the trainer: %s", manifest.version, error)
            return wanted
        assert link.address is not None
        stage, session = self._receiver.stage, self._receiver.session
        work = _Shared(manifest, wanted, link.address, self.address, sources, stage, deadline, stall_s)
        threads = [threading.Thread(target=work.run, name="tq-weights-share", daemon=True) for _ in range(streams)]
        work.carry_out(threads, session)
        self._judge(work)
        return sorted(work.left)

    def _judge(self, work: _Shared) -> None:
        self._num_reached += work.num_reached
        self._num_unreached += work.num_unreached
        if self._num_unreached >= MAX_FAULTS and not self._num_reached:
            log.warning("no other receiver can be reached from here: versions are fetched from the trainer from now on")
            self._is_apart = True

    def close(self) -> None:
        """Repeatable."""
        if self._server is not None:
            self._server.close()
        self._server, self._opened, self.address = None, None, ""


class _Shared(Transfers):
    """The buckets of one receiver. Each thread asks for one after another, until it is told that there is no more."""

    def __init__(
        self,
        manifest: Manifest,
        wanted: list[int],
        trainer: Address,
        name: str,
        sources: Sequence[Source],
        stage: Callable[..., None],
        deadline: Deadline,
        stall_s: float,
    ) -> None:
        super().__init__(manifest, stage, deadline, stall_s)
        self.left = set(wanted)
        self.num_reached = self.num_unreached = 0  # connections to other receivers
        self._trainer = trainer
        self._name = name
        self._ranks = {source.holder: source.address for source in sources}
        self._faults: Counter[str] = Counter()  # of the trainer's ranks ("")

    def run(self) -> None:
        links: dict[Address, Peer] = {}
        came: Came = ""
        try:
            while self.stopped is None and self._faults[""] < MAX_FAULTS:
                told = self._next(self._link(links, self._trainer), came)
                if told.is_done:
                    break
                came = self._fetched(links, told) if told.bucket >= 0 else ""
        except (TransferQueueError, OSError) as error:
            log.info("what is left of version %s is fetched from the trainer: %s", self._manifest.version, error)
            self.stopped = self.stopped or self._ends_all(_typed(error))
        finally:
            for link in links.values():
                self._leave(link)

    def _link(self, links: dict[Address, Peer], address: Address) -> Peer:
        if address not in links:
            links[address] = self._met(address)
        return links[address]

    def _linked(self, links: dict[Address, Peer], told: Assignment) -> Peer:
        """With who gives it. Other receivers are not waited for long: networks may keep receivers apart."""
        address = self._address(told)
        if not told.peer or address in links:
            return self._link(links, address)
        try:
            links[address] = self._met(address, REACH_S)
            self.num_reached += 1
        except TransferQueueError:
            self.num_unreached += 1
            raise
        return links[address]

    def _next(self, trainer: Peer, came: Came) -> Assignment:
        wait_s = min(WAIT_S, self._deadline.left())
        message = p.NextBucket(self._key, self._name, came, wait_s)
        body = trainer.ask(message, wait_s + self._stall_s, at_most(MAX_ANSWER_NBYTES))
        return msgspec.json.decode(body, type=Assignment)

    def _fetched(self, links: dict[Address, Peer], told: Assignment) -> Came:
        """How it went."""
        if told.bucket not in self.left:
            return "staged"
        address = self._address(told)
        try:
            self._bring(self._linked(links, told), told.bucket)
        except (TransferQueueError, OSError) as error:
            log.info("bucket %s did not come from %s: %s", told.bucket, told.peer or "the trainer", error)
            if address in links:
                self._leave(links.pop(address))
            self.stopped = self.stopped or self._ends_all(_typed(error))
            if not told.peer:
                self._faults[""] += 1
            return "damaged" if isinstance(error, DigestMismatch) else "lost"
        with self._changed:
            self.left.discard(told.bucket)
        return "staged"

    def _address(self, told: Assignment) -> Address:
        if told.peer:
            return p.address_of(told.peer, self._trainer.token)
        holder = self._manifest.holder(told.bucket)
        return self._ranks[holder] if holder in self._ranks else self._ranks[None]


def _typed(error: TransferQueueError | OSError) -> TransferQueueError:
    return kept(error) if isinstance(error, TransferQueueError) else ServiceUnavailable(str(error))
