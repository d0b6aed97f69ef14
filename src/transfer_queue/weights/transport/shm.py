"""Versions in shared memory, for receivers on the trainer's host.

The trainer packs a version into a memfd (memfd_create(2): it has no name, and vanishes with the last process that has
it), digests it where it lies, and hands read-only descriptors over a unix socket. Receivers map it privately and stage
it where it lies: they do not read again what the trainer has digested and nobody else can write (unless told to
`recheck`). So the only copy is the one into the live weights, with `Swap` there is none, and more receivers cost next
to nothing. A connection is the lease on the memory: it is closed with the last tensor there, also by kill -9; only
memory without leases is written again.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from transfer_queue.errors import InvalidInput, ProtocolError, ServiceUnavailable
from transfer_queue.memory import memfd
from transfer_queue.memory.bytes import PAGE, Bytes, ReturnedMemory, address_of
from transfer_queue.memory.pool import HUGE_NBYTES
from transfer_queue.memory.private_map import (
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    advise,
    drop_written_pages,
    map_private,
)
from transfer_queue.weights.receive.receiver import Receiver
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.base import Engine
from transfer_queue.weights.transport.clients import Client
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.fetching import TrainerLink
from transfer_queue.weights.transport.info import InitInfo, Outcome, UpdateInfo, key_of
from transfer_queue.weights.transport.pending import PendingVersion
from transfer_queue.weights.transport.serving import WeightServer, listen_unix
from transfer_queue.weights.transport.trainer import TrainerEngine, TrainerInfo
from transfer_queue.weights.transport.version_store import VersionStore, newest_key
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.weights.version.packing import pack_into, plan
from transfer_queue.weights.version.sources import WeightSource
from transfer_queue.weights.version.tensor_memory import write

CLEAN_AFTER_S = 0.1  # then other receivers of the host have committed, too
NUM_MAPPED = 4  # more than a trainer has in turn, with its default settings


class ShmTrainerInfo(TrainerInfo, kw_only=True):
    """`keep`: versions that can be fetched, and pieces of memory kept for the next. `socket`: a path, or `@NAME`
    (default: a name made up) for one without a file. `recheck`: receivers read everything again to check it.

    `warm`: make that memory at once, `keep` + 1 pieces; else the first updates do, and take several times as long."""

    socket: str = ""
    token: str = ""
    keep: int = 2
    recheck: bool = False
    warm: bool = True


class ShmInfo(InitInfo, kw_only=True):
    address: str
    token: str
    recheck: bool = False


def starts_of(buckets: tuple[int, ...]) -> list[int]:
    """Where each bucket starts in the memory; the last number is where it all ends."""
    found = [0]
    for nbytes in buckets:
        found.append(found[-1] + -(-nbytes // PAGE) * PAGE)
    return found


class Memory:
    """A memfd, mapped here. `num_borrowers` may be reading it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // HUGE_NBYTES) * HUGE_NBYTES
        fd = memfd.create(None, "transfer_queue.weights")
        try:
            os.ftruncate(fd, self.nbytes)
            memfd.seal(fd)
            self._mapped = memfd.map_shared(fd, self.nbytes)
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # what others get
        finally:
            os.close(fd)
        self._closing = weakref.finalize(self, os.close, self.fd)  # an interrupt may lose it
        self.data = torch.frombuffer(self._mapped, dtype=torch.uint8)
        advise(self.data.data_ptr(), self.nbytes, MADV_POPULATE_WRITE)  # a fault for each page costs more
        self.num_borrowers = 0

    def close(self) -> None:
        self._closing()


class SharedMemoryStore(VersionStore[Memory]):
    """Versions in memory, and memory to be written next."""

    def __init__(self, keep: int) -> None:
        super().__init__(keep)
        self._idle: list[Memory] = []  # nobody may fetch them any more; some may be lent still

    def take(self, nbytes: int) -> Memory:
        """Memory that nobody reads."""
        with self._lock:
            fits = [
                one for one in self._idle if not one.num_borrowers and nbytes <= one.nbytes <= 2 * nbytes + HUGE_NBYTES
            ]
            if fits:
                self._idle.remove(fits[0])
                return fits[0]
        return Memory(nbytes)

    def put_back(self, memories: list[Memory]) -> None:
        """Let go of idle memory beyond as much as is kept; what is lent lives on with its borrowers."""
        with self._lock:
            self._idle += memories
            while len(self._idle) > self._keep:
                self._idle.pop(0).close()

    def warm(self, nbytes: int) -> None:
        """Have memory for as many versions of this size as there are at a time."""
        with self._lock:
            self._idle += [Memory(nbytes) for _ in range(self._keep + 1)]

    def bucket(self, key: str, index: int) -> bytes:
        raise InvalidInput("shared memory is lent, not sent")

    def lend(self, key: str) -> tuple[int, Callable[[], None]]:
        with self._lock:  # found and lent in one step: idle memory may be written or closed
            memory = self._found(key, reads=True).content
            memory.num_borrowers += 1
            return os.dup(memory.fd), lambda: self._returned(memory)

    def _returned(self, memory: Memory) -> None:
        with self._lock:
            memory.num_borrowers -= 1

    def close(self) -> None:
        for memory in self.clear() + self._idle:
            memory.close()
        self._idle.clear()


class ShmTrainer(TrainerEngine):
    init_form = ShmTrainerInfo

    def __init__(self, info: ShmTrainerInfo, client: Client, source: WeightSource) -> None:
        super().__init__(info, client, source)
        self.token = info.token or secrets.token_urlsafe(24)
        self.store = SharedMemoryStore(info.keep)
        where = plan(source.specs(), info.bucket_nbytes)
        if info.warm and where.buckets:
            self.store.warm(starts_of(where.buckets)[-1])
        listening, self.address = listen_unix(info.socket or f"@tq-weights-{secrets.token_hex(8)}")  # see `TcpTrainer`
        self._path = "" if self.address.startswith("unix:@") else info.socket
        self._server = WeightServer(listening, self.token, self.store)
        self.reports.come_to(self._server)

    def receivers_info(self) -> dict[str, Any]:
        return {"address": self.address, "token": self.token, "recheck": self.info.recheck}

    def _publish(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        if draft.keeps:
            return self._publish_cells(draft)
        where = plan(draft.source.specs(), self.info.bucket_nbytes)
        return self._lent(where.buckets, lambda places: draft.seal(where, pack_into(draft.source, where, places)))

    def _give(self, manifest: Manifest, buckets: list[torch.Tensor]) -> None:
        """A copy: receivers may keep what they are lent."""

        def fill(places: list[torch.Tensor]) -> Manifest:
            for place, bucket in zip(places, buckets, strict=True):
                write(place, bucket)
            return manifest

        self._lent(manifest.buckets, fill)

    def _lent(self, buckets: tuple[int, ...], fill: Callable[[list[torch.Tensor]], Manifest]) -> Manifest:
        """What `fill` puts to these buckets, given to receivers."""
        starts = starts_of(buckets)
        memory = self.store.take(starts[-1])
        try:
            manifest = fill([memory.data[at : at + size] for at, size in zip(starts, buckets, strict=False)])
        except BaseException:  # an interrupt must not leave the memory taken
            self.store.put_back([memory])
            raise
        self.store.add(manifest, memory)
        return manifest

    def _decide(self, manifest: Manifest) -> None:
        self.store.put_back(self.store.decide(manifest))

    def _withdraw(self, manifest: Manifest) -> None:
        self.store.put_back(self.store.withdraw(manifest))

    def _close(self) -> None:
        self._server.close()
        self.store.close()
        if self._path and os.path.exists(self._path):
            os.unlink(self._path)
            self._path = ""


class ShmEngine(Engine):
    trainer = ShmTrainer
    init_form = ShmInfo

    def __init__(self, receiver: Receiver, **more: Any) -> None:
        super().__init__(receiver, **more)
        self._control = TrainerLink()
        self._mappings = Mappings()
        self._recheck = False

    def _connect(self, info: ShmInfo) -> None:
        self._recheck = info.recheck
        self._mappings.clear()
        self._control.close()
        self._control.address = p.address_of(info.address, info.token)
        self._control.meet([self._control.address], info.timeout_s).close()

    def _find(self, info: UpdateInfo, deadline: Deadline) -> Manifest:
        return self._control.manifest(info.key, deadline)

    def _newest(self, deadline: Deadline, label: str = "") -> Manifest:
        return self._control.manifest(newest_key(label), deadline)

    def _fetch(self, manifest: Manifest, wanted: list[int], deadline: Deadline) -> None:
        starts = starts_of(manifest.buckets)
        assert self._control.address is not None
        peer, session = p.Peer(self._control.address, deadline.left()), self.receiver.session
        with session.interrupting(peer.interrupt) if session is not None else nullcontext():
            memory = self._mappings.borrow(peer, key_of(manifest), starts[-1], deadline)
        for index in wanted:
            deadline.left()
            start = starts[index]
            self.receiver.stage(
                index, memory[start : start + manifest.buckets[index]], lend=True, vouched=not self._recheck
            )

    def _ended(self) -> None:
        self._mappings.clean()

    def _work(self) -> AbstractContextManager[None]:
        return self._control.work()

    def _interrupt(self) -> None:
        self._control.interrupt()

    def _tell(self, outcome: Outcome, deadline: Deadline) -> None:
        self._control.tell(outcome, deadline)

    def _close(self) -> None:
        self._control.leave()
        self._mappings.clear()


class Mapped:
    """A piece of the trainer's memory in this process. `lent`: a tensor lies there."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lent = False
        self._memory = map_private(fd, nbytes)
        self._address = address_of(self._memory)
        self._used = False
        self._cleaning = threading.Timer(0.0, lambda: None)
        advise(self._address, nbytes, MADV_POPULATE_READ)

    def lend(self, nbytes: int, peer: p.Peer) -> Bytes:
        """The memory as the trainer has it now. The connection is closed with the last array or tensor over it."""
        self.settle()
        self._clean()
        self.lent = self._used = True

        def returned() -> None:
            self.lent = False
            peer.close()

        return ReturnedMemory(self._address, nbytes, self._memory, returned).array()

    def clean(self) -> None:
        """Drop what was written here, which would hide the next version, once the update is over everywhere."""
        if self._used and not self.lent and not self._cleaning.is_alive():
            self._cleaning = threading.Timer(CLEAN_AFTER_S, self._clean)
            self._cleaning.daemon = True
            self._cleaning.start()

    def settle(self) -> None:
        """Nothing goes on here any more."""
        self._cleaning.cancel()
        if self._cleaning.is_alive():
            self._cleaning.join()

    def _clean(self) -> None:
        if self._used:
            drop_written_pages(self._address, self.nbytes)
            self._used = False


class Mappings:
    """The trainer's memory in this process, mapped privately: what is written here is seen only here.

    The trainer writes versions to the same few pieces of memory in turn, so they stay mapped."""

    def __init__(self) -> None:
        self._mapped: dict[int, Mapped] = {}  # by inode: the one used last is the last

    def borrow(self, peer: p.Peer, key: str, nbytes: int, deadline: Deadline) -> Bytes:
        """The memory of a version (see `Mapped.lend`)."""
        try:
            peer.ask(p.GetMemory(key), deadline.left())
            if len(peer.stream.fds) != 1:
                raise ServiceUnavailable("the trainer sent no memory")
            found = os.fstat(peer.stream.fds[0])
            if found.st_size < nbytes:
                raise ProtocolError(f"memory of {found.st_size} bytes instead of {nbytes}")
            mapped = self._mapped.pop(found.st_ino, None) or Mapped(peer.stream.fds[0], found.st_size)
            self._mapped[found.st_ino] = mapped
            while len(self._mapped) > NUM_MAPPED:
                self._mapped.pop(next(iter(self._mapped))).settle()
            os.close(peer.stream.fds.pop())
        except BaseException:  # an interrupt must not leave the memory taken
            peer.close()
            raise
        return mapped.lend(nbytes, peer)

    def clean(self) -> None:
        """What is not lent any more is made ready for its next version."""
        for mapped in self._mapped.values():
            mapped.clean()

    def clear(self) -> None:
        for mapped in self._mapped.values():
            mapped.settle()
        self._mapped.clear()
