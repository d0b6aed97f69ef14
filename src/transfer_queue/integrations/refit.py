"""One version of the weights, from a rank of a trainer to workers that load it themselves, all or none.

For frameworks whose engine is handed tensors one by one and hands them on so. `Sender` is the rank that has full
tensors, a `Taker` is each worker; both live for one update. Bytes travel over tcp, to hosts that know the token.

    Sender.send   reads the tensors once, packs them, waits until every worker has verified all of them, decides
    Taker.take    fetches and verifies, reports, waits for the decision, gives the tensors
    RefitEngine   either, one update after another, under a framework's names in its subclasses

Until the decision nobody gives a tensor: where a byte is wrong, or somebody dies or is late, everybody raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from transfer_queue.background_call import BackgroundCall
from transfer_queue.codec.layout import ALIGN
from transfer_queue.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidInput,
    NotOpen,
    ServiceUnavailable,
    StaleVersion,
    TransferQueueError,
    error_from_code,
)
from transfer_queue.weights.receive.staging import Staging
from transfer_queue.weights.receive.update_session import SessionKey, UpdateEnd, UpdateSession
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.faults import as_typed, cut_text, system_faults
from transfer_queue.weights.transport.fetching import Source, fetch
from transfer_queue.weights.transport.info import Outcome, key_of
from transfer_queue.weights.transport.serving import WeightServer, gone, listen_tcp
from transfer_queue.weights.version.manifest import MAX_NBYTES, Manifest
from transfer_queue.weights.version.packing import Placement, Plan, pack_into, plan, seal, unpack
from transfer_queue.weights.version.sources import StateDictSource, TensorMeta
from transfer_queue.weights.version.tensor_memory import room
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import advertised
from transfer_queue.wire.blocking import at_most

TIMEOUT_S = 600.0
BUCKET_NBYTES = 64 << 20  # at most: tensors wait for their bucket where the trainer's rank has them
NUM_STREAMS = 2
MEET_S = 30.0
REPORT_S = 2.0  # of telling the sender of a fault
PACKED, DECIDED = "packed", ""  # what workers ask for: the version as soon as it is there, and once all have it
Named = tuple[str, torch.Tensor]
T = TypeVar("T")


class Offer:
    """The version of one update, at its sender (a `VersionSource`). Whoever asks for it early waits. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._manifest: Manifest | None = None
        self._buckets: list[torch.Tensor] = []
        self._is_decided = False
        self._why = ""  # it is over

    def add(self, manifest: Manifest, buckets: list[torch.Tensor]) -> None:
        with self._changed:
            self._manifest, self._buckets = manifest, buckets
            self._changed.notify_all()

    def decide(self) -> None:
        """Every worker has verified it: it is to be loaded."""
        with self._changed:
            self._is_decided = True
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """Nobody is given anything any more; who waits is told why. Repeatable; the first reason stays."""
        with self._changed:
            self._why = self._why or why
            self._buckets = []
            self._changed.notify_all()

    def manifest(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._why or self._has(key))
            return self._there().encode()

    def bucket(self, key: str, index: int) -> torch.Tensor:
        with self._changed:
            if key != key_of(self._there()):
                raise gone(key)
            if not 0 <= index < len(self._buckets):
                raise InvalidInput(f"bucket {index} of {len(self._buckets)}")
            return self._buckets[index]

    def holders(self, key: str) -> list[str]:
        return []

    def lend(self, key: str) -> tuple[int, Callable[[], None]]:
        raise InvalidInput("memory is not lent over TCP")

    def _has(self, key: str) -> bool:
        return self._is_decided if key == DECIDED else self._manifest is not None

    def _there(self) -> Manifest:
        if self._why:
            raise Aborted(self._why)
        if self._manifest is None:
            raise gone("")
        return self._manifest


class RefitReport(NamedTuple):
    """How an update went: `pack_s` until it could be fetched, `take_s` until every worker had verified it."""

    nbytes: int
    pack_s: float
    take_s: float


class Sender:
    """Listens from the start, so that workers may come before the tensors do, until `close`.

    Holds the packed version in host memory, and at most a bucket and a tensor of those that it was given.
    """

    def __init__(self, host: str = "", bucket_nbytes: int = BUCKET_NBYTES) -> None:
        """`host`: the address of this host to listen at; by default the one that it sends from to other hosts."""
        self.run_id = secrets.token_hex(8)
        self.token = secrets.token_urlsafe(24)
        self._bucket_nbytes = min(bucket_nbytes, BUCKET_NBYTES)
        self._is_used = False
        self._offer = Offer()
        with system_faults():
            listening, self.address = listen_tcp(host or advertised("0.0.0.0"), 0)
        self._server = WeightServer(listening, self.token, self._offer)

    async def send(self, weights: Iterable[Named], version: int, num_workers: int, timeout_s: float) -> RefitReport:
        """Read the tensors once, in this thread, to the end; return once all workers have verified them, and may load.

        Blocks the event loop while it reads, as the tensors may be the result of collectives of this thread. Raises
        what `weights` raises, `UnsupportedValue` for what is no plain tensor, `BadManifest` for a name that came twice,
        `DeadlineExceeded` when a worker has not verified in time, or what a worker raised. Nobody loads anything then.
        `NotOpen` for a second call: workers that took the first version would be given it again.
        """
        deadline = Deadline(timeout_s)
        if self._is_used:
            read_along(weights)
            raise NotOpen("this update has sent its version: another one begins with another sender")
        self._is_used = True
        try:
            begun = time.monotonic()
            manifest = self._pack(weights, version)
            packed = time.monotonic()
            await beside(self._await_workers, manifest, num_workers, deadline)
        except BaseException as error:  # workers that wait must hear of an interrupt too
            self._offer.end(f"the trainer gave version {version} up: {error!r}")
            raise
        self._offer.decide()
        return RefitReport(manifest.nbytes, packed - begun, time.monotonic() - packed)

    def close(self) -> None:
        """End the update and free its memory. Repeatable."""
        self._offer.end("the update is over")
        self._server.close()

    @torch.no_grad()
    def _pack(self, weights: Iterable[Named], version: int) -> Manifest:
        rest = iter(weights)
        try:
            where, digests, buckets = _packed(rest, self._bucket_nbytes)
            manifest = seal(where, digests, version=version, epoch=self.run_id)
        except BaseException:  # also out of memory: the trainer's other ranks are in a collective for each tensor
            read_along(rest)
            raise
        self._offer.add(manifest, buckets)
        return manifest

    def _await_workers(self, manifest: Manifest, num_workers: int, deadline: Deadline) -> None:
        verified: set[int] = set()
        while len(verified) < num_workers:
            try:
                reports = self._server.outcomes({""}, deadline.left())
            except DeadlineExceeded:
                raise DeadlineExceeded(
                    f"{len(verified)} of {num_workers} workers have verified version {manifest.version} in time"
                ) from None
            for one in {one.rank: one for one in reports}.values():  # the last word of each
                if one.code:
                    raise error_from_code(one.code, f"worker {one.rank}: {one.text}")
                if one.key == key_of(manifest):
                    verified.add(one.rank)


class Taker:
    """A worker's end. Holds the version in host memory until its tensors are taken, bucket by bucket."""

    def __init__(self, address: str, token: str, rank: int, timeout_s: float) -> None:
        """Meet the sender, which listens already. `rank` tells workers apart. Raises `ServiceUnavailable` and
        `DeadlineExceeded`, after `MEET_S` at most."""
        self.rank = rank
        self._address = p.address_of(address, token)
        self._session = UpdateSession(SessionKey("", rank), time.monotonic, None)
        self._busy = threading.Lock()
        self._is_used = False
        self._peer = p.Peer(self._address, min(timeout_s, MEET_S))

    async def take(
        self, version: int | None, timeout_s: float, device: torch.device | None = None
    ) -> AsyncIterator[list[Named]]:
        """The tensors of each bucket, in the order in which they were sent, on `device` (default: the host).

        Gives the first ones when every worker has verified all of them. Before that it raises `StaleVersion` when
        another version than `version` (if given) was sent, `DigestMismatch` for bytes that stay wrong,
        `DeadlineExceeded`, `ServiceUnavailable` when the sender is gone, `Aborted` when it gave up, `NotOpen` for a
        second call.
        """
        if self._is_used:
            raise NotOpen("this worker has taken the version of this update: another one begins with another sender")
        self._is_used = True
        manifest, buckets = await beside(self._verified, version, Deadline(timeout_s))
        for specs in manifest.by_bucket:
            found = unpack(buckets.pop(0), specs)
            yield [(name, tensor.to(device)) for name, tensor in found.items()]

    def close(self) -> None:
        """Leave. A call that waits in another thread raises. Repeatable."""
        for wake_up in self._session.close(UpdateEnd.ABORTED, "the worker left"):
            wake_up()
        with self._busy:
            self._peer.close()

    def _verified(self, version: int | None, deadline: Deadline) -> tuple[Manifest, list[torch.Tensor]]:
        with self._busy, self._session.interrupting(self._peer.interrupt), system_faults():
            try:
                manifest = Manifest.decode(self._ask(p.GetManifest(PACKED), deadline))
                if version is not None and manifest.version != version:
                    raise StaleVersion(f"version {manifest.version} was sent instead of {version}")
                buckets = self._fetch(manifest, deadline)
            except (TransferQueueError, OSError) as error:
                self._tell_fault(as_typed(error))
                raise
            self._ask(report(Outcome(self.rank, version=manifest.version, key=key_of(manifest))), deadline)
            self._ask(p.GetManifest(DECIDED), deadline)
            return manifest, buckets

    def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[torch.Tensor]:
        staging = Staging(manifest)
        found: dict[int, torch.Tensor] = {}

        def stage(index: int, place: torch.Tensor, lend: bool) -> None:
            staging.stage(index, place, lend, vouched=False)
            found[index] = place

        sources = [Source(self._address)] * NUM_STREAMS
        fetch(manifest, staging.missing, sources, stage, deadline, session=self._session)
        return [found[index] for index in range(len(manifest.buckets))]

    def _ask(self, message: m.Message, deadline: Deadline) -> bytes:
        return bytes(self._peer.ask(message, deadline.left(), at_most(MAX_NBYTES)))

    def _tell_fault(self, error: TransferQueueError) -> None:
        """So that the others need not wait for this worker until their deadline. Over a connection of its own: on this
        one an answer may still come."""
        if isinstance(error, ServiceUnavailable):
            return
        with contextlib.suppress(TransferQueueError), contextlib.closing(p.Peer(self._address, REPORT_S)) as peer:
            peer.ask(report(Outcome(self.rank, code=error.code, text=cut_text(str(error)))), REPORT_S)


def report(outcome: Outcome) -> p.OutcomeMessage:
    return p.OutcomeMessage(msgspec.json.encode(outcome))


class RefitEngine:
    """What one process has of updates, for the engine of a framework: it sends one, takes one, or only reads along.

    Memory: the rank that sends holds the packed version on the host from `_send` to `finalize`, and up to a bucket and
    a tensor of what was gathered; other ranks of the trainer one tensor. A worker holds the version on the host, which
    is freed bucket by bucket as it is taken, and a bucket of it on `device`. Up to 1 GiB stays with each process for
    the next update.
    """

    def __init__(self, bucket_size: int, host: str = "", timeout_s: float = TIMEOUT_S, device: str = "") -> None:
        """`bucket_size`: bytes, taken as 64 MiB where it is more. `host`: where the trainer listens (`Sender`).
        `timeout_s`: of each end, from its call on. `device`: where workers give tensors, by default their accelerator,
        or the host where there is none."""
        if bucket_size < 1 or timeout_s <= 0:
            raise InvalidInput(f"bucket_size={bucket_size} and timeout_s={timeout_s}: more than 0 is needed")
        self._bucket_nbytes, self._host, self._timeout_s = bucket_size, host, timeout_s
        self._device = torch.device(device) if device else _accelerator()
        self._num_workers = 0
        self._sender: Sender | None = None
        self._taker: Taker | None = None

    def finalize(self) -> None:
        """Free what the update held, and close its connections. Repeatable."""
        sender, self._sender = self._sender, None
        taker, self._taker = self._taker, None
        if taker is not None:
            taker.close()
        if sender is not None:
            sender.close()

    def _offer(self) -> dict[str, Any]:
        """Begin an update, and drop what a failed one left. Where workers find it, and the token, as plain data."""
        self.finalize()
        self._sender = Sender(self._host, self._bucket_nbytes)
        return {"address": self._sender.address, "token": self._sender.token}

    def _meet(self, offer: Mapping[str, Any], rank: int) -> None:
        self._taker = Taker(offer["address"], offer["token"], rank, self._timeout_s)

    async def _send(self, weights: Iterable[Named], version: int) -> RefitReport:
        """As `Sender.send`; `NotOpen` unless an update was begun since the last one ended."""
        if self._sender is None:
            read_along(weights)
            raise NotOpen("no update was begun here since the last one ended: call prepare first")
        return await self._sender.send(weights, version, self._num_workers, self._timeout_s)

    async def _take(self, version: int | None) -> AsyncIterator[list[Named]]:
        """As `Taker.take`; `NotOpen` unless this worker has met a sender since the last update ended."""
        if self._taker is None:
            raise NotOpen("this worker has met no sender since the last update ended: call prepare first")
        async for batch in self._taker.take(version, self._timeout_s, self._device):
            yield batch


async def beside(function: Callable[..., T], *arguments: Any) -> T:
    """What it returns or raises, in a thread of its own: workers of one event loop wait for each other, so a pool with
    fewer threads would never end. A thread that nobody waits for any more ends with the call, or with the process."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def call() -> T:
        try:
            return function(*arguments)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(done.set)

    running = BackgroundCall("tq-refit", call)
    await done.wait()
    while not running.ended(1.0):  # it only has to leave `call`
        pass
    return running.outcome()


@torch.no_grad()
def read_along(weights: Iterable[Named]) -> None:
    """To the end: every tensor is a collective of all ranks of the trainer, whoever needs it."""
    for _ in weights:
        pass


def _packed(weights: Iterator[Named], bucket_nbytes: int) -> tuple[Plan, dict[str, str], list[torch.Tensor]]:
    """All of it: where each tensor lies, the digests, the filled buckets."""
    placements: list[Placement] = []
    digests: dict[str, str] = {}
    buckets: list[torch.Tensor] = []
    for part in _bucketfuls(weights, bucket_nbytes):
        where = plan(part.specs(), bucket_nbytes)
        places = [room(nbytes) for nbytes in where.buckets]
        digests |= pack_into(part, where, places)
        placements += [one._replace(bucket=one.bucket + len(buckets)) for one in where.placements]
        buckets += places
    if not placements:
        raise InvalidInput("no weights were given")
    return Plan(tuple(placements), tuple(one.nbytes for one in buckets)), digests, buckets


class Bucketful:
    """Tensors that make a bucket, as a source."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sources: list[StateDictSource] = []

    def add(self, source: StateDictSource, nbytes: int) -> None:
        self._sources.append(source)
        self.nbytes += nbytes

    def specs(self) -> list[TensorMeta]:
        return [spec for source in self._sources for spec in source.specs()]

    def tensors(self) -> Iterator[Named]:
        for source in self._sources:
            yield from source.tensors()

    def aliases(self) -> dict[str, str]:
        return {}


def _bucketfuls(weights: Iterator[Named], bucket_nbytes: int) -> Iterator[Bucketful]:
    part = Bucketful()
    for name, tensor in weights:
        source = StateDictSource({name: tensor})  # one by one: a buffer that is used again is no tie
        nbytes = -(-tensor.nbytes // ALIGN) * ALIGN
        if part.nbytes and part.nbytes + nbytes > bucket_nbytes:
            yield part
            part = Bucketful()
        part.add(source, nbytes)
    yield part


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
