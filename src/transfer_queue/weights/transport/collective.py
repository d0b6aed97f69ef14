"""Packed broadcast over a torch.distributed process group of its own: rank 0 is the trainer, all others receive.

The trainer fills one buffer while the other is on its way; a receiver checks one bucket while the next arrives. A
version that a receiver refuses is received to the end all the same, so that the others get it, and the trainer hears
why. Every operation has a deadline; after a failed update the next version begins with a new group.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from transfer_queue.errors import (
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    NotOpen,
    ServiceUnavailable,
    TransferQueueError,
)
from transfer_queue.memory.handles import device_called, synchronize
from transfer_queue.weights.receive.receiver import Receiver
from transfer_queue.weights.transport.base import Engine
from transfer_queue.weights.transport.clients import Client
from transfer_queue.weights.transport.deadline import Deadline, TimedCall
from transfer_queue.weights.transport.info import InitInfo, UpdateInfo, key_of
from transfer_queue.weights.transport.pending import PendingVersion
from transfer_queue.weights.transport.serving import listen_tcp
from transfer_queue.weights.transport.ticket import SHUT_DOWN
from transfer_queue.weights.transport.trainer import TrainerEngine, TrainerInfo
from transfer_queue.weights.version.manifest import MAX_NBYTES, Manifest
from transfer_queue.weights.version.packing import digests, pack, plan
from transfer_queue.weights.version.sources import Once, WeightSource
from transfer_queue.weights.version.tensor_memory import room
from transfer_queue.wire.address import Address, advertised, host_towards

T = TypeVar("T")
dist: Any = torch.distributed  # its stubs lack the stores and process groups
ENDING_S = 1.0  # how long a broadcast may still run after the receivers have answered
WAKE_S = 0.1  # torch's rendezvous cannot be woken up: its thread is left behind
LEAVE_S = 5.0  # of a program that ends, for what torch is about to give up
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_making = threading.Lock()  # a group that has no watchdog


class CollectiveTrainerInfo(TrainerInfo, kw_only=True):
    """`world_size` counts the trainer. `device`: where the broadcast's buffers are ("cuda" for nccl)."""

    world_size: int
    host: str = "127.0.0.1"
    port: int = 0
    backend: str = "gloo"
    device: str = "cpu"


class CollectiveInfo(InitInfo, kw_only=True):
    host: str
    port: int
    round: int
    world_size: int
    rank_offset: int = 1
    backend: str = "gloo"
    device: str = "cpu"


class Group:
    """A process group that belongs to nobody else. Broken for good after an error. `device`: where its buffers are."""

    def __init__(self, info: CollectiveInfo, device: torch.device, rank: int, store: Any, deadline: Deadline) -> None:
        self.device = device
        # Works, and how long each had as it began; in no local variable: a traceback would keep connections open.
        self._works: deque[tuple[Any, float]] = deque()
        self._counts_from_begin = info.backend == "nccl"  # the time that a work's `wait` is given
        timeout = timedelta(seconds=deadline.left("the rendezvous"))
        prefixed = dist.PrefixStore(f"round-{info.round}", store)
        try:
            if info.backend == "gloo":
                options = dist.ProcessGroupGloo._Options()
                here = host_towards(Address(host=info.host, port=info.port))
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
                options._timeout = timeout
                self._group: Any = dist.ProcessGroupGloo(prefixed, rank, info.world_size, options)
            elif info.backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                with _without_watchdog():
                    self._group = dist.ProcessGroupNCCL(prefixed, rank, info.world_size, options)
            else:
                raise InvalidInput(f"backend {info.backend!r}: gloo or nccl")
        except (RuntimeError, OSError) as error:
            raise _typed(error) from error

    def begin(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Start to broadcast from rank 0; `end` waits for it."""
        left_s = deadline.left("the broadcast")
        options = dist.BroadcastOptions()  # with a tensor alone torch 2.6 takes no time
        options.rootRank, options.timeout = 0, timedelta(seconds=left_s)
        try:
            self._works.append((self._live().broadcast([tensor], options), left_s))
        except RuntimeError as error:
            raise _typed(error) from error

    def end(self, deadline: Deadline) -> None:
        """Wait for the broadcast that began first."""
        self._live()
        left_s = deadline.left("the broadcast")
        try:
            left_s = self._works[0][1] if self._counts_from_begin else left_s
            self._works[0][0].wait(timedelta(seconds=left_s))
            self._works.popleft()
            synchronize(self.device)
        except (RuntimeError, IndexError) as error:
            raise _typed(error) from error

    def broadcast(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        self.begin(tensor, deadline)
        self.end(deadline)

    def _live(self) -> Any:
        if self._group is None:
            raise ServiceUnavailable("the group was given up")
        return self._group

    def close(self) -> None:
        """Break connections, so that whoever waits for us fails. Does not wait."""
        held = [self._group, *(work for work, _ in self._works)]
        self._group = None
        self._works.clear()
        if held[0] is not None:
            _in_torch(Deadline(ENDING_S), _discard, held)


def _in_torch(
    deadline: Deadline, function: Callable[..., T], *args: Any, known: list[TimedCall[T]] | None = None
) -> TimedCall[T]:
    """A call that waits within torch, until the deadline at most. A thread that comes back from there while the
    interpreter ends is ended within C++, and the process with it (`terminate called`, exit 134). `known`: see
    `BackgroundCall`."""
    call = TimedCall(function, *args, known=known)
    with suppress(DeadlineExceeded):
        call.outlast(deadline.left() + ENDING_S, LEAVE_S)
    return call


def _discard(held: list[Any]) -> None:
    """Connections are broken when nothing refers to the group any more; the last reference waits for what still runs,
    so it must not be the caller's."""
    held[0].abort()
    held.clear()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """torch's watchdog ends the process when a collective over NCCL is late, or a peer is gone. A group whose waits
    block has none: whoever waits is told. torch reads this once, as a group is made; no option of the group says it."""
    with _making:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before


def _typed(error: Exception) -> TransferQueueError:
    text = str(error).splitlines()[0] if str(error) else repr(error)
    if isinstance(error, TransferQueueError):
        return error
    return (DeadlineExceeded if "imed out" in text or "timeout" in text.lower() else ServiceUnavailable)(text)


def _store_at(host: str, listening: socket.socket, limit: timedelta) -> Any:
    """torch's store, which listens there. Its newer backend takes no socket that listens in torch 2.6."""
    port, fd = listening.getsockname()[1], listening.detach()
    terms: dict[str, Any] = {"is_master": True, "timeout": limit, "wait_for_workers": False, "master_listen_fd": fd}
    try:
        return dist.TCPStore(host, port, **terms)
    except NotImplementedError:
        return dist.TCPStore(host, port, use_libuv=False, **terms)


class CollectiveTrainer(TrainerEngine):
    _can_publish = False  # it sends the weights themselves
    init_form = CollectiveTrainerInfo
    _can_join = False

    def __init__(self, info: CollectiveTrainerInfo, client: Client, source: WeightSource) -> None:
        super().__init__(info, client, source)
        limit = timedelta(seconds=info.timeout_s)
        listening, _ = listen_tcp(info.host, info.port)  # a store that makes its own listens on every address
        self._store: Any = _store_at(info.host, listening, limit)
        self._group: Group | None = None
        self._round = 0
        self._draft: Callable[[], Iterator[torch.Tensor]] | None = None  # gives the buckets that are to be sent

    def receivers_info(self) -> dict[str, Any]:
        if self._store is None:
            raise NotOpen(SHUT_DOWN)
        return {
            "host": advertised(self.info.host), "port": self._store.port, "round": self._round, "rank_offset": 1,
            "world_size": self.info.world_size, "backend": self.info.backend, "device": self.info.device,
        }  # fmt: skip

    def _introduce(self, told: dict[str, Any], deadline: Deadline) -> None:
        """In a group that is new: all come into it at once."""
        self._give_up()
        self._round += 1
        told["round"] = self._round
        info = CollectiveInfo(**told)
        device = device_called(info.device)
        asked = self._calls.begin(self._client.init_weight_transfer_engine, told)
        joined = _in_torch(deadline, Group, info, device, 0, self._store, deadline)
        asked.result(deadline, "init_weight_transfer_engine")
        self._group = joined.result(deadline, "the rendezvous")

    def _ready(self, draft: PendingVersion, deadline: Deadline) -> None:
        """A group that was given up forms anew: after an update that failed, and where receivers refused a difference,
        which is sent whole."""
        self._estranged |= self._group is None
        super()._ready(draft, deadline)

    def _publish(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        if draft.keeps:
            return self._publish_cells(draft)
        source = Once(draft.source)  # digests leave before the bytes do, and those from another thread
        where = plan(source.specs(), self.info.bucket_nbytes)
        manifest = draft.seal(where, digests(source))
        self._draft = lambda: (packed.data for packed in pack(source, where))
        return manifest

    def _give(self, manifest: Manifest, buckets: list[torch.Tensor]) -> None:
        self._draft = lambda: iter(buckets)

    def _lead(self, manifest: Manifest, info: dict[str, Any], deadline: Deadline) -> None:
        begun: list[TimedCall[None]] = []
        try:
            sending = _in_torch(deadline, self._send_all, self._draft, manifest, deadline, known=begun)
            super()._lead(manifest, info, deadline)
            sending.result(deadline, "the broadcast")
        except BaseException:  # after an interrupt, also one that struck as it began, the group is out of step
            for sending in begun:
                sending.ended(ENDING_S)
            self._give_up()  # some receiver may have left it
            raise
        finally:
            self._draft = None

    def _send_all(
        self, drafted: Callable[[], Iterator[torch.Tensor]] | None, manifest: Manifest, deadline: Deadline
    ) -> None:
        group = self._group
        assert group is not None
        assert drafted is not None
        try:
            body = torch.frombuffer(bytearray(manifest.encode()), dtype=torch.uint8)
            group.broadcast(torch.tensor([len(body)], device=group.device), deadline)
            group.broadcast(body.to(group.device), deadline)
            for bucket in drafted():
                group.broadcast(bucket.to(group.device), deadline)
        except BaseException:  # it is out of step; the trainer may have another one by now
            group.close()
            raise

    def _give_up(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _close(self) -> None:
        self._give_up()
        self._store = None
        self._draft = None


class CollectiveEngine(Engine):
    """Its rank in the group is `rank_offset` + `rank`."""

    trainer = CollectiveTrainer
    init_form = CollectiveInfo

    def __init__(self, receiver: Receiver, **more: Any) -> None:
        super().__init__(receiver, **more)
        self._group: Group | None = None

    def _connect(self, info: CollectiveInfo) -> None:
        self._close()
        deadline = Deadline(info.timeout_s)
        device = device_called(info.device)  # the GPU of this thread, not of the one that joins

        def join() -> Group:
            limit = timedelta(seconds=deadline.left())
            try:
                store = dist.TCPStore(info.host, info.port, is_master=False, timeout=limit, wait_for_workers=False)
            except (RuntimeError, OSError) as error:
                raise _typed(error) from error
            return Group(info, device, info.rank_offset + self.rank, store, deadline)

        joining = _in_torch(deadline, join)
        try:
            while not joining.ended(min(WAKE_S, deadline.left("the rendezvous"))):
                self._expect_met_last(info.run_id)
        except BaseException:  # a group that comes after that is nobody's
            joining.leave(Group.close)
            raise
        self._group = joining.outcome()

    def _find(self, info: UpdateInfo, deadline: Deadline) -> Manifest:
        group = self._in_group()
        try:
            return _in_torch(deadline, self._find_in, group, info, deadline).result(deadline, "the broadcast")
        except BaseException:  # after an interrupt the group is out of step
            self._close()
            raise

    def _find_in(self, group: Group, info: UpdateInfo, deadline: Deadline) -> Manifest:
        length = torch.zeros(1, dtype=torch.int64, device=group.device)
        group.broadcast(length, deadline)
        if not 0 < int(length) <= MAX_NBYTES:
            raise DigestMismatch(f"a manifest of {int(length)} bytes")
        body = torch.empty(int(length), dtype=torch.uint8, device=group.device)
        group.broadcast(body, deadline)
        manifest = Manifest.decode(body.cpu().numpy().tobytes())
        if key_of(manifest) != info.key:
            raise DigestMismatch("the manifest is not the one that was announced")
        return manifest

    def _stage(self, manifest: Manifest, deadline: Deadline) -> None:
        try:
            wanted = self.receiver.open(manifest, deadline.left())
        except TransferQueueError:
            self._fetch(manifest, [], deadline)
            raise
        self._fetch(manifest, wanted, deadline)
        self._verify(manifest, deadline)

    def _fetch(self, manifest: Manifest, wanted: list[int], deadline: Deadline) -> None:
        group = self._in_group()
        try:
            taking = _in_torch(deadline, self._take_all, group, manifest, wanted, deadline)
            fault = taking.result(deadline, "the broadcast")
        except BaseException:  # after an interrupt the group is out of step
            self._close()
            raise
        if fault is not None:
            raise fault

    def _take_all(
        self, group: Group, manifest: Manifest, wanted: list[int], deadline: Deadline
    ) -> TransferQueueError | None:
        """Receive every bucket, and stage those that are wanted; what was wrong with them."""
        fault: TransferQueueError | None = None
        missing = set(wanted)
        for index, place in _received(group, manifest.buckets, deadline):
            if index in missing and fault is None:
                try:
                    self.receiver.stage(index, place, lend=True)
                except TransferQueueError as error:
                    fault = error
        return fault

    def _in_group(self) -> Group:
        if self._group is None:
            raise NotOpen("there is no group with the trainer: init_transfer_engine first")
        return self._group

    def _newest(self, deadline: Deadline, label: str = "") -> Manifest:
        raise InvalidInput("a broadcast cannot be joined late: use tcp, shm or disk for it")

    def _interrupt(self) -> None:
        self._close()

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _received(group: Group, buckets: tuple[int, ...], deadline: Deadline) -> Iterator[tuple[int, torch.Tensor]]:
    """Each bucket, on the CPU, while the next one arrives."""
    on_cpu = group.device.type == "cpu"

    def begin(index: int) -> torch.Tensor:
        nbytes = buckets[index]
        place = room(nbytes) if on_cpu else torch.empty(nbytes, dtype=torch.uint8, device=group.device)
        group.begin(place, deadline)
        return place

    coming = begin(0) if buckets else None
    for index in range(len(buckets)):
        assert coming is not None
        place = coming
        group.end(deadline)
        coming = begin(index + 1) if index + 1 < len(buckets) else None
        yield index, place if on_cpu else place.cpu()
