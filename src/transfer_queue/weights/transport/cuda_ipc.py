"""Versions through memory of one GPU, for receivers on the trainer's GPU: no byte leaves it, and nothing is pickled.

The trainer fills two buffers in turn and names each bucket in a call of `update_weights`; a receiver maps the buffers
(cudaIpcOpenMemHandle, through torch), copies the bucket to memory of its own and checks it there. A buffer is written
again only after every receiver has answered for what lay in it; after a failed update new ones are made.

Torch counts who uses exported memory, one count per export, so each receiver has exports of its own, each opened once.
`device="cpu"` takes the same steps over memory files (memfd_create(2)); `shm` does that faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from transfer_queue.errors import DigestMismatch, InvalidInput, NotOpen, ShapeMismatch
from transfer_queue.memory.handles import (
    Handle,
    Shared,
    device_called,
    device_of,
    opened,
    synchronize,
    uuid_of,
)
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights.receive.receiver import Receiver
from transfer_queue.weights.transport.base import Engine
from transfer_queue.weights.transport.clients import Client
from transfer_queue.weights.transport.deadline import Deadline, TimedCall
from transfer_queue.weights.transport.info import InitInfo, Outcome, UpdateInfo, key_of
from transfer_queue.weights.transport.pending import PendingVersion
from transfer_queue.weights.transport.trainer import TrainerEngine, TrainerInfo
from transfer_queue.weights.version.device import digest_at
from transfer_queue.weights.version.digest import DEVICE_ALGO
from transfer_queue.weights.version.manifest import Count, Manifest
from transfer_queue.weights.version.packing import Plan, plan
from transfer_queue.weights.version.sources import Once, WeightSource

NUM_BUFFERS = 2


class CudaIpcTrainerInfo(TrainerInfo, kw_only=True):
    """`num_receivers` have the ranks from 0 on. `algo`: digests on the GPU ("mix64x2"), or those of the other engines
    ("xxh3_128", for which all bytes are copied to the host on both sides)."""

    device: str = "cuda"
    num_receivers: int = 1
    algo: str = DEVICE_ALGO


class CudaIpcInfo(InitInfo, kw_only=True):
    """`device`: the GPU's UUID, or "cpu"."""

    device: str
    num_receivers: int


class CudaIpcUpdate(UpdateInfo, kw_only=True):
    """One bucket, in one of the buffers (None: there is none). `manifest` (canonical JSON) and `handles`, by rank and
    buffer, come with the first bucket of an update."""

    manifest: str = ""
    handles: tuple[tuple[Handle, ...], ...] = ()
    bucket: int | None = None
    buffer: Count = 0


class CudaIpcTrainer(TrainerEngine):
    _can_publish = False  # it sends the weights themselves
    init_form = CudaIpcTrainerInfo
    _can_join = False

    def __init__(self, info: CudaIpcTrainerInfo, client: Client, source: WeightSource) -> None:
        if info.anchor_every > 1 or info.num_receivers < 1:
            raise InvalidInput("cuda_ipc sends full versions (anchor_every=1), to one receiver or more")
        super().__init__(info, client, source)
        self._device = device_called(info.device)
        self._uuid = uuid_of(self._device)
        digest_at(torch.empty(0, device="cpu"), info.algo)
        self._buffers: list[Shared] = []
        self._handles: tuple[tuple[Handle, ...], ...] = ()
        self._draft: tuple[WeightSource, Plan] | None = None

    def receivers_info(self) -> dict[str, Any]:
        return {"device": self._uuid, "num_receivers": self.info.num_receivers}

    def _publish(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        synchronize(self._device)  # weights may have been written in other streams
        source = Once(draft.source)  # digests leave before the bytes do
        where = plan(source.specs(), self.info.bucket_nbytes)
        found = {name: digest_at(tensor.to(self._device), self.info.algo) for name, tensor in source.tensors()}
        self._draft = (source, where)
        return draft.seal(where, found, self.info.algo)

    def _lead(self, manifest: Manifest, info: dict[str, Any], deadline: Deadline) -> None:
        assert self._draft is not None
        source, where = self._draft
        told = {**info, "manifest": manifest.encode().decode()}
        asked: TimedCall[object] | None = None
        try:
            self._make_buffers(where)
            told["handles"] = msgspec.to_builtins(self._handles)
            for bucket in self._filled(source, where):
                if asked is not None:
                    asked.result(deadline, "update_weights")
                left_s = deadline.left("packing")
                more = {"bucket": bucket, "buffer": bucket % NUM_BUFFERS, "timeout_s": left_s}
                asked = self._calls.begin(self._client.update_weights, {**told, **more})
                told.update(manifest="", handles=[])
            if asked is None:
                asked = self._calls.begin(self._client.update_weights, told)
            asked.result(deadline, "update_weights")
        except BaseException:  # an interrupt leaves a late receiver that may still read them
            self._drop_buffers()  # a receiver that is late may still read them
            raise
        finally:
            self._draft = None

    def _make_buffers(self, where: Plan) -> None:
        nbytes = max(where.buckets, default=0)
        if not self._buffers or self._buffers[0].data.nbytes < nbytes:
            self._drop_buffers()
            self._buffers = [Shared(self._device, nbytes) for _ in range(NUM_BUFFERS)]
            ranks = range(self.info.num_receivers)
            self._handles = tuple(tuple(one.export() for one in self._buffers) for _ in ranks)

    def _filled(self, source: WeightSource, where: Plan) -> Iterator[int]:
        """Each bucket, once it lies in its buffer, which is written again two buckets later."""
        tensors = iter(source.tensors())
        for bucket, places in enumerate(where.by_bucket()):
            data = self._buffers[bucket % NUM_BUFFERS].data
            for place in places:
                name, tensor = next(tensors, ("no tensor", data))
                if (name, tensor.dtype, tuple(tensor.shape)) != place[:3]:
                    raise ShapeMismatch(f"the source gave {name!r} {tensor.dtype} instead of {place}")
                data[place.offset : place.offset + place.nbytes].copy_(byte_view(tensor))
            synchronize(self._device)
            yield bucket

    def _drop_buffers(self) -> None:
        for one in self._buffers:
            one.close()
        self._buffers, self._handles = [], ()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _close(self) -> None:
        self._drop_buffers()


class CudaIpcEngine(Engine):
    trainer = CudaIpcTrainer
    init_form = CudaIpcInfo
    update_form = CudaIpcUpdate

    def __init__(self, receiver: Receiver, **more: Any) -> None:
        super().__init__(receiver, **more)
        self._handles: tuple[Handle, ...] = ()
        self._mapped: list[torch.Tensor] = []
        self._known: Manifest | None = None
        self._now = CudaIpcUpdate()
        self._wanted: set[int] = set()  # buckets that have not come yet

    def _connect(self, info: CudaIpcInfo) -> None:
        self._close()
        device_of(info.device)
        if not 0 <= self.rank < info.num_receivers:
            raise InvalidInput(f"rank {self.rank} of {info.num_receivers} receivers")

    def _find(self, info: CudaIpcUpdate, deadline: Deadline) -> Manifest:
        if info.manifest:
            self._map(info)
            self._known = Manifest.decode(info.manifest.encode())
        if self._known is None or key_of(self._known) != info.key:
            raise DigestMismatch("the manifest is not the one that was announced")
        self._now = info
        return self._known

    def _map(self, info: CudaIpcUpdate) -> None:
        if self.rank >= len(info.handles):
            raise InvalidInput(f"the trainer has memory for {len(info.handles)} receivers, none for rank {self.rank}")
        if info.handles[self.rank] != self._handles:
            self._close()
            self._mapped = [opened(handle) for handle in info.handles[self.rank]]
            self._handles = info.handles[self.rank]

    def _stage(self, manifest: Manifest, deadline: Deadline) -> None:
        """Takes the bucket of this call; verifies when it was the last one."""
        if self._now.manifest:
            self._wanted = set(self.receiver.open(manifest, deadline.left()))
        if self._now.bucket in self._wanted:
            self._fetch(manifest, [self._now.bucket], deadline)
            self._wanted.remove(self._now.bucket)
        if not self._wanted:
            self._verify(manifest, deadline)

    def _fetch(self, manifest: Manifest, wanted: list[int], deadline: Deadline) -> None:
        if self._now.buffer >= len(self._mapped):
            raise NotOpen(f"buffer {self._now.buffer} of {len(self._mapped)}: its handle did not come")
        data = self._mapped[self._now.buffer]
        for bucket in wanted:
            self.receiver.stage(bucket, data[: manifest.buckets[bucket]])
        synchronize(data.device)  # the trainer may write it once this call has returned

    def _tell(self, outcome: Outcome, deadline: Deadline) -> None:
        """A bucket that came is no news; that the version is verified, committed or refused is."""
        if outcome.version is None or outcome.code or outcome.installed or self.ready:
            super()._tell(outcome, deadline)

    def _newest(self, deadline: Deadline, label: str = "") -> Manifest:
        raise InvalidInput("there is nothing to join: use tcp, shm or disk for it")

    def _close(self) -> None:
        self._handles, self._mapped, self._known = (), [], None
