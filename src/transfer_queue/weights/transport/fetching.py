"""Fetching versions from servers: the manifest from the trainer, buckets from as many as have them."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import msgspec

from transfer_queue.errors import (
    DeadlineExceeded,
    DigestMismatch,
    Incomplete,
    InternalError,
    InvalidInput,
    NotOpen,
    ProtocolError,
    ServiceUnavailable,
    TooManyConnections,
    TransferQueueError,
    WrongEpoch,
    kept,
)
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.receive.update_session import UpdateSession
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.deadline import Deadline, TimedCall
from transfer_queue.weights.transport.info import Outcome, key_of
from transfer_queue.weights.transport.protocol import Peer
from transfer_queue.weights.transport.wants import MAX_NBYTES as MAX_SPECS_NBYTES
from transfer_queue.weights.transport.wants import Specs, WantsReport
from transfer_queue.weights.version.manifest import MAX_NBYTES, Manifest
from transfer_queue.weights.version.plans import Wants
from transfer_queue.weights.version.tensor_memory import room
from transfer_queue.wire.address import Address
from transfer_queue.wire.blocking import SLOWEST, at_most

# A bucket of which nothing came for so long is asked for again; also one that others have, if it has not come by then,
# and by its bytes at `SLOWEST`.
STALL_S = 10.0
REACH_S = 1.0  # of one of several addresses
MAX_FAULTS = 3  # of one peer in one fetch
REST_S = 0.2  # after a peer had no room for one more connection


class Source(NamedTuple):
    """Who has a version's buckets: all of them, or those of one rank of the trainer (`Manifest.holder`)."""

    address: Address
    holder: int | None = None


class TrainerLink:
    """The connection to the trainer for what is small; made anew after it broke. Thread-safe."""

    def __init__(self) -> None:
        self.address: Address | None = None
        self._peer: Peer | None = None
        self._lock = threading.RLock()
        self._works = self._was_interrupted = False

    @contextmanager
    def work(self) -> Iterator[None]:
        """For what belongs together: an `interrupt` also ends what is asked after it, until the block is left."""
        self._was_interrupted, self._works = False, True
        try:
            yield
        finally:
            self._works = False

    @property
    def _is_over(self) -> bool:
        return self._works and self._was_interrupted

    def ask(self, message: Any, deadline: Deadline, limit: int = 0, body: bytes | None = None) -> memoryview:
        with self._lock:
            return self._ask(message, deadline, limit, body)

    def _ask(self, message: Any, deadline: Deadline, limit: int, body: bytes | None) -> memoryview:
        if self.address is None:
            raise NotOpen("the trainer's address is not known: init_transfer_engine first")
        for last in (False, True):
            fresh = self._peer is None
            try:
                return self._linked(self.address, deadline).ask(message, deadline.left(), at_most(limit), body)
            except (ServiceUnavailable, DeadlineExceeded, ProtocolError) as error:
                self.close()
                if fresh or last or self._is_over or not isinstance(error, ServiceUnavailable):
                    raise
            except TransferQueueError:  # the answer
                raise
            except BaseException:  # an interrupt: the next question would get the answer to this one
                self.close()
                raise
        raise AssertionError

    def _linked(self, address: Address, deadline: Deadline) -> Peer:
        if self._peer is None:
            try:
                return p.Peer(address, deadline.left(), self._begin)
            except BaseException:  # also what the trainer answers: it is no connection
                self.close()
                raise
        return self._peer

    def _begin(self, peer: Peer) -> None:
        """`interrupt` finds it from now on."""
        self._peer = peer
        if self._is_over:
            peer.interrupt()

    def meet(self, addresses: Sequence[Address], timeout_s: float) -> Peer:
        """`met_first`, which `interrupt` ends. The connection is the caller's."""
        with self._lock:
            self.close()
            try:
                return met_first(addresses, timeout_s, self._begin)
            finally:
                self._peer = None

    def manifest(self, key: str, deadline: Deadline) -> Manifest:
        return Manifest.decode(bytes(self.ask(p.GetManifest(key), deadline, MAX_NBYTES)))

    def holders(self, manifest: Manifest, token: str, deadline: Deadline) -> list[Source]:
        """Who has its buckets. Rank 0 is where it was met, whatever it calls itself."""
        assert self.address is not None
        if manifest.holders is msgspec.UNSET or not any(manifest.holders):
            return [Source(self.address)]
        body = self.ask(p.GetHolders(key_of(manifest)), deadline, MAX_NBYTES)
        found = msgspec.json.decode(body, type=list[str])
        if max(manifest.holders) >= len(found):
            raise ProtocolError(f"{len(found)} holders, and buckets of rank {max(manifest.holders)}")
        others = [Source(p.address_of(one, token), rank) for rank, one in enumerate(found[1:], 1)]
        return [Source(self.address, 0), *others]

    def tell_wants(
        self, key: str, wants_of: Callable[[Metas], Wants | None], who: str, rank: int, due: Deadline
    ) -> Wants | None:
        """Say which parts are needed of the tensors to come (`key`), if it is not all of them; they are returned."""
        specs = msgspec.json.decode(self.ask(p.GetSpecs(), due, MAX_SPECS_NBYTES), type=Specs)
        wants = wants_of(specs.named())
        if wants is not None:
            report = WantsReport(who, rank, key, {name: tuple(boxes) for name, boxes in wants.items()})
            self.ask(p.WantsMessage(), due, body=msgspec.json.encode(report))
        return wants

    def tell(self, outcome: Outcome, deadline: Deadline) -> None:
        if self.address is not None:
            self.ask(p.OutcomeMessage(msgspec.json.encode(outcome)), deadline)

    def interrupt(self) -> None:
        """Wake up who waits for the trainer. Never blocks."""
        self._was_interrupted = True
        peer = self._peer
        if peer is not None:
            peer.interrupt()

    def close(self) -> None:
        with self._lock:
            if self._peer is not None:
                self._peer.close()
                self._peer = None

    def leave(self) -> None:
        """Nothing is asked any more, until there is another address."""
        with self._lock:
            self.close()
            self.address = None


def met_first(addresses: Sequence[Address], timeout_s: float, begun: Callable[[Peer], object] | None = None) -> Peer:
    """A connection to a server by the first of its addresses at which it is reached: each is tried shortly, then each
    for its part of what time is left. `begun`: see `Peer`. Raises what was wrong with the first address."""
    due = Deadline(timeout_s)
    faults: list[TransferQueueError] = []
    for is_short in (True, False) if len(addresses) > 1 else (False,):
        for address in addresses:
            try:
                left_s = due.left()
                return Peer(address, min(REACH_S, left_s) if is_short else left_s / len(addresses), begun)
            except TransferQueueError as error:
                faults.append(error)
    raise faults[0]


def newest_of(peers: list[Address], deadline: Deadline, stall_s: float) -> tuple[Manifest, list[Address]]:
    """The newest version among the peers, and who has it. All are asked at once: one that is frozen costs the others
    nothing but time, at most half of what there is."""
    found: list[tuple[Manifest, Address]] = []
    last: TransferQueueError = InvalidInput("no peers to join from")
    due = Deadline(min(stall_s, deadline.left() / 2))
    asked = [(address, TimedCall(_newest_at, address, due)) for address in peers]
    for address, call in asked:
        try:
            found.append((call.result(due, f"asking {address} for its version"), address))
        except TransferQueueError as error:
            last = kept(error)
    if not found:
        raise ServiceUnavailable(f"none of {len(peers)} peers has a version: {last}") from last
    run_id = Counter(manifest.epoch for manifest, _ in found).most_common(1)[0][0]
    newest = max((one for one, _ in found if one.epoch == run_id), key=lambda one: one.version)
    return newest, [address for manifest, address in found if manifest == newest]


def _newest_at(address: Address, due: Deadline) -> Manifest:
    peer = Peer(address, due.left())
    try:
        return Manifest.decode(bytes(peer.ask(p.GetManifest(""), due.left(), at_most(MAX_NBYTES))))
    finally:
        peer.close()


def fetch(
    manifest: Manifest,
    wanted: list[int],
    sources: Sequence[Source],
    stage: Callable[..., None],
    deadline: Deadline,
    stall_s: float = STALL_S,
    session: UpdateSession | None = None,
) -> None:
    """Every wanted bucket, from any of the sources that have it (one connection each), into `stage`. Ends with
    `session`.

    Raises the last fault when no source is left for a bucket that has not failed too often.
    """
    num_each = Counter(manifest.holder(index) for index in wanted)
    lacking = set(num_each) - {source.holder for source in sources}
    if lacking and all(source.holder is not None for source in sources):
        raise Incomplete(f"nobody gives the buckets of rank {min(lacking)}")
    begun: Counter[int | None] = Counter()
    threads = []
    work = _Work(manifest, wanted, sources, stage, deadline, stall_s)
    for source in sources:
        begun[source.holder] += 1
        if begun[source.holder] <= (len(wanted) if source.holder is None else num_each[source.holder]):
            threads.append(threading.Thread(target=work.run, args=(source,), name="tq-weights-fetch", daemon=True))
    work.carry_out(threads, session)
    if work.num_left:
        raise Incomplete(f"{work.num_left} buckets did not come")


class Transfers:
    """Fetches buckets of a version into `stage`, over connections that `stop` ends. For several threads.

    `stopped`: why it has ended before all came. The first reason stays: others are what its end did to connections."""

    def __init__(self, manifest: Manifest, stage: Callable[..., None], deadline: Deadline, stall_s: float) -> None:
        self.stopped: TransferQueueError | None = None
        self._manifest = manifest
        self._key = key_of(manifest)
        self._stage = stage
        self._deadline = deadline
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._peers: list[Peer] = []

    def carry_out(self, threads: Sequence[threading.Thread], session: UpdateSession | None) -> None:
        """Run these, which end by themselves, or with `session`. Raises what has stopped them."""
        with session.interrupting(self.stop) if session is not None else nullcontext():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self.stopped is not None:
            raise kept(self.stopped)

    def stop(self) -> None:
        """The update is over: nobody is waited for any more. Never blocks."""
        with self._changed:
            self.stopped = self.stopped or NotOpen("the update is over")
            for peer in self._peers:
                peer.interrupt()
            self._changed.notify_all()

    def _met(self, address: Address, timeout_s: float = math.inf) -> Peer:
        begun: list[Peer] = []

        def begin(peer: Peer) -> None:
            with self._changed:
                begun.append(peer)
                self._peers.append(peer)
                if self.stopped is not None:
                    peer.interrupt()

        try:
            return Peer(address, min(self._stall_s, self._deadline.left(), timeout_s), begin)
        except BaseException:
            with self._changed:
                self._peers = [one for one in self._peers if one not in begun]
            raise

    def _leave(self, peer: Peer | None) -> None:
        if peer is not None:
            with self._changed:
                self._peers.remove(peer)
            peer.close()

    def _bring(self, peer: Peer, index: int, *, is_only: bool = False) -> None:
        """`is_only`: nobody else has it, so it may be slow, as long as something comes."""
        nbytes, left_s = self._manifest.buckets[index], self._deadline.left()
        timeout_s = left_s if is_only else min(self._stall_s + nbytes / SLOWEST, left_s)
        place = room(nbytes)
        got = peer.ask(p.GetBucket(self._key, index), timeout_s, p.exactly(place.numpy()), None, self._stall_s)
        if len(got) != nbytes:
            raise DigestMismatch(f"bucket {index} came with {len(got)} bytes instead of {nbytes}")
        self._stage(index, place, lend=True)

    def _ends_all(self, error: TransferQueueError) -> TransferQueueError | None:
        """What ends the whole fetch, after this fault: the update is over, whoever ended it, or late."""
        if isinstance(error, (NotOpen, WrongEpoch)):
            return error
        try:
            self._deadline.left()
        except DeadlineExceeded as late:
            return late
        return None


class _Work(Transfers):
    """The buckets that are still to be fetched, which connections take in turn."""

    def __init__(
        self,
        manifest: Manifest,
        wanted: list[int],
        sources: Sequence[Source],
        stage: Callable[..., None],
        deadline: Deadline,
        stall_s: float,
    ) -> None:
        super().__init__(manifest, stage, deadline, stall_s)
        self._sources = sources
        self._todo = list(wanted)
        self._faults: Counter[Address] = Counter()
        self._linked: Counter[Address] = Counter()  # connections that are open
        self.num_left = len(wanted)

    def run(self, source: Source) -> None:
        """Fetch from one source until nothing is left to do, or it failed too often."""
        error: TransferQueueError | None = InternalError("a thread that fetched ended: see its traceback")
        try:
            self._run(source)
            error = None
        finally:  # nobody waits for what it was about to fetch
            if error is not None:
                self._end(error)

    def _run(self, source: Source) -> None:
        peer: Peer | None = None
        try:
            while (index := self._take(source)) is not None:
                try:
                    peer = peer or self._linked_to(source.address)
                    self._bring(peer, index, is_only=not self._has_others(source, index))
                    self._came()
                except TooManyConnections as error:
                    if not self._rested(source.address, index, error):
                        return
                except (TransferQueueError, OSError) as error:
                    self._unlink(source.address, peer)
                    peer = None
                    self._failed(source.address, index, error)
        finally:
            self._unlink(source.address, peer)

    def _linked_to(self, address: Address) -> Peer:
        peer = self._met(address)
        with self._changed:
            self._linked[address] += 1
        return peer

    def _unlink(self, address: Address, peer: Peer | None) -> None:
        if peer is not None:
            with self._changed:
                self._linked[address] -= 1
        self._leave(peer)

    def _rested(self, address: Address, index: int, error: TooManyConnections) -> bool:
        """There is no room there for this connection: others to it go on without it, the only one waits for some."""
        with self._changed:
            self._todo.append(index)
            self._changed.notify_all()
            if self._linked[address]:
                return False
            try:
                is_over = self._deadline.left() <= REST_S
            except DeadlineExceeded:
                is_over = True
            if is_over:
                self.stopped = self.stopped or DeadlineExceeded(f"the update did not end before its deadline: {error}")
                self._changed.notify_all()
            self._changed.wait_for(lambda: self.stopped is not None or not self.num_left, REST_S)
            return True

    def _take(self, source: Source) -> int | None:
        """A bucket to fetch; waits while others fetch the last ones, which may fail."""
        with self._changed:
            while self.num_left and self.stopped is None and self._faults[source.address] < MAX_FAULTS:
                index = next((index for index in self._todo if self._has(source, index)), None)
                if index is not None:
                    self._todo.remove(index)
                    return index
                try:
                    self._changed.wait(self._deadline.left())
                except DeadlineExceeded as late:
                    self.stopped = self.stopped or late
            return None

    def _end(self, error: TransferQueueError) -> None:
        with self._changed:
            self.stopped = self.stopped or error
            self._changed.notify_all()

    def _has(self, source: Source, index: int) -> bool:
        return source.holder is None or source.holder == self._manifest.holder(index)

    def _came(self) -> None:
        with self._changed:
            self.num_left -= 1
            self._changed.notify_all()

    def _failed(self, address: Address, index: int, error: TransferQueueError | OSError) -> None:
        typed = kept(error) if isinstance(error, TransferQueueError) else ServiceUnavailable(str(error))
        with self._changed:
            self._todo.append(index)
            self._faults[address] += 1
            able = self._able(index)
            self.stopped = self.stopped or self._ends_all(typed) or (None if able else typed)
            self._changed.notify_all()

    def _able(self, index: int) -> set[Address]:
        """Who has it and has not failed too often."""
        able = (one for one in self._sources if self._has(one, index))
        return {one.address for one in able if self._faults[one.address] < MAX_FAULTS}

    def _has_others(self, source: Source, index: int) -> bool:
        with self._changed:
            return bool(self._able(index) - {source.address})
