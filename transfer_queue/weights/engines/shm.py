"""Versions in shared memory, for receivers on the trainer's host.

The trainer packs a version into a memfd (memfd_create(2): it has no name, and vanishes with the last process that has
it) and hands read-only descriptors over a unix socket. Receivers map it privately and stage it where it lies: the only
copy is the one into the live weights, and with `Swap` there is none. A connection is the lease on the memory: it is
closed with the last tensor there, also by kill -9; only memory without leases is written again.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

import torch

from transfer_queue.client.mapping import MADV_POPULATE_READ, MADV_POPULATE_WRITE, advise
from transfer_queue.codec.layout import Bytes
from transfer_queue.codec.memory import Anchor
from transfer_queue.errors import InvalidInput, ProtocolError, ServiceUnavailable
from transfer_queue.weights.engines import protocol as p
from transfer_queue.weights.engines.base import Engine, InitInfo, Outcome, UpdateInfo, key_of
from transfer_queue.weights.engines.fetching import Control
from transfer_queue.weights.engines.serving import Server, gone, listen_unix
from transfer_queue.weights.engines.trainer import Client, Draft, TrainerEngine, TrainerInfo
from transfer_queue.weights.engines.waiting import Deadline
from transfer_queue.weights.manifest import Manifest
from transfer_queue.weights.packing import pack_into, plan
from transfer_queue.weights.receiver import Receiver
from transfer_queue.weights.sources import WeightSource

HUGE_NBYTES = 2 << 20


class ShmTrainerInfo(TrainerInfo, kw_only=True):
    """`keep`: versions that can be fetched, and pieces of memory kept for the next. `socket`: a path, or `@NAME`
    (default: a name made up) for one without a file."""

    socket: str = ""
    token: str = ""
    keep: int = 2


class ShmInfo(InitInfo, kw_only=True):
    address: str
    token: str


def starts_of(manifest: Manifest) -> list[int]:
    """Where each bucket starts in the memory; the last number is where it all ends."""
    return _starts(manifest.buckets)


def _starts(buckets: tuple[int, ...]) -> list[int]:
    found = [0]
    for nbytes in buckets:
        found.append(found[-1] + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return found


class Memory:
    """A memfd, mapped here. `num_borrowers` may be reading it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // HUGE_NBYTES) * HUGE_NBYTES
        fd = os.memfd_create("transfer_queue.weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, self.nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._mapped = mmap.mmap(fd, self.nbytes)
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # what others get
        finally:
            os.close(fd)
        self.data = torch.frombuffer(self._mapped, dtype=torch.uint8)
        advise(self.data.data_ptr(), self.nbytes, MADV_POPULATE_WRITE)  # a fault for each page costs more
        self.num_borrowers = 0

    def close(self) -> None:
        os.close(self.fd)


class Ring:
    """Versions in memory, and memory to be written next."""

    def __init__(self, keep: int) -> None:
        if keep < 1:
            raise InvalidInput(f"{keep} versions to keep")
        self._keep = keep
        self._lock = threading.Lock()
        self._held: dict[str, tuple[bytes, Memory]] = {}
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

    def add(self, manifest: Manifest, memory: Memory) -> None:
        with self._lock:
            self._held[key_of(manifest)] = (manifest.encode(), memory)
            for key in list(self._held)[: -self._keep]:
                self._idle.append(self._held.pop(key)[1])
            self._trim(self._keep)

    def put_back(self, memory: Memory) -> None:
        """`take`n, and not used."""
        with self._lock:
            self._idle.append(memory)

    def _trim(self, num_kept: int) -> None:
        """Let go of idle memory beyond `num_kept`; what is lent lives on with its borrowers."""
        while len(self._idle) > num_kept:
            self._idle.pop(0).close()

    def _find(self, key: str) -> tuple[bytes, Memory]:
        found = self._held.get(key or next(reversed(self._held), ""))
        if found is None:
            raise gone(key)
        return found

    def manifest(self, key: str) -> bytes:
        with self._lock:
            return self._find(key)[0]

    def bucket(self, key: str, index: int) -> bytes:
        raise InvalidInput("shared memory is lent, not sent")

    def lend(self, key: str) -> tuple[int, Callable[[], None]]:
        with self._lock:
            memory = self._find(key)[1]
            memory.num_borrowers += 1
            return memory.fd, lambda: self._returned(memory)

    def _returned(self, memory: Memory) -> None:
        with self._lock:
            memory.num_borrowers -= 1

    def close(self) -> None:
        with self._lock:
            for _, memory in self._held.values():
                memory.close()
            self._held.clear()
            self._trim(0)


class ShmTrainer(TrainerEngine):
    init_form = ShmTrainerInfo
    takes_reports = True

    def __init__(self, info: ShmTrainerInfo, client: Client, source: WeightSource) -> None:
        super().__init__(info, client, source)
        self.token = info.token or secrets.token_urlsafe(24)
        self.shelf = Ring(info.keep)
        listening, self.address = listen_unix(info.socket or f"@tq-weights-{secrets.token_hex(8)}")
        self._path = "" if self.address.startswith("unix:@") else info.socket
        self._server = Server(listening, self.token, self.shelf)

    def receivers_info(self) -> dict[str, Any]:
        return {"address": self.address, "token": self.token}

    def _publish(self, draft: Draft, deadline: Deadline) -> Manifest:
        where = plan(draft.source.specs(), self.info.bucket_nbytes)
        starts = _starts(where.buckets)
        memory = self.shelf.take(starts[-1])
        try:
            places = [memory.data[at : at + size] for at, size in zip(starts, where.buckets, strict=False)]
            manifest = draft.seal(where, pack_into(draft.source, where, places))
        except BaseException:
            self.shelf.put_back(memory)
            raise
        self.shelf.add(manifest, memory)
        return manifest

    def _outcomes(self, version: int | None, timeout_s: float = 0.0) -> list[Outcome]:
        return self._server.outcomes(version, timeout_s)

    def _close(self) -> None:
        self._server.close()
        self.shelf.close()
        if self._path and os.path.exists(self._path):
            os.unlink(self._path)
            self._path = ""


class ShmEngine(Engine):
    trainer = ShmTrainer
    init_form = ShmInfo

    def __init__(self, receiver: Receiver, **more: Any) -> None:
        super().__init__(receiver, **more)
        self._control = Control()

    def _connect(self, info: ShmInfo) -> None:
        self._control.close()
        self._control.address = p.address_of(info.address, info.token)
        p.Peer(self._control.address, info.timeout_s).close()

    def _find(self, info: UpdateInfo, deadline: Deadline) -> Manifest:
        return self._control.manifest(info.key, deadline)

    def _newest(self, deadline: Deadline) -> Manifest:
        return self._control.manifest("", deadline)

    def _fetch(self, manifest: Manifest, wanted: list[int], deadline: Deadline) -> None:
        starts = starts_of(manifest)
        assert self._control.address is not None
        memory = borrow(p.Peer(self._control.address, deadline.left()), key_of(manifest), starts[-1], deadline)
        for index in wanted:
            deadline.left()
            start = starts[index]
            self.receiver.stage(index, memory[start : start + manifest.buckets[index]], lend=True)

    def _tell(self, outcome: Outcome, deadline: Deadline) -> None:
        self._control.tell(outcome, deadline)

    def _close(self) -> None:
        self._control.close()


def borrow(peer: p.Peer, key: str, nbytes: int, deadline: Deadline) -> Bytes:
    """The memory of a version, mapped: what is written here is seen only here. The connection is closed with the last
    array or tensor over it."""
    try:
        peer.ask(p.GetMemory(key), deadline.left())
        if len(peer.stream.fds) != 1:
            raise ServiceUnavailable("the trainer sent no memory")
        fd = peer.stream.fds[0]
        if os.fstat(fd).st_size < nbytes:
            raise ProtocolError(f"memory of {os.fstat(fd).st_size} bytes instead of {nbytes}")
        mapped = mmap.mmap(fd, max(nbytes, 1), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(peer.stream.fds.pop())
    except BaseException:
        peer.close()
        raise
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    advise(address, nbytes, MADV_POPULATE_READ)
    return Anchor(address, nbytes, mapped, peer.close).array()
