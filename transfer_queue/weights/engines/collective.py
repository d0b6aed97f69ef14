"""Packed broadcast over a torch.distributed process group of its own: rank 0 is the trainer, all others receive.

The trainer fills one buffer while the other is on its way; a receiver checks one bucket while the next arrives. A
version that a receiver refuses is received to the end all the same, so that the others get it, and the trainer hears
why. Every operation has a deadline; after a failed update the next version begins with a new group.

`packing="vllm"` sends the bytes exactly as vLLM's packed broadcast cuts them, and no manifest: names, dtypes and shapes
come in the update's info, and receivers compute the digests themselves and compare the root.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
import torch.distributed

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.errors import (
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    NotOpen,
    ServiceUnavailable,
    TransferQueueError,
)
from transfer_queue.weights.digest import digest_tensor
from transfer_queue.weights.engines.base import Engine, InitInfo, UpdateInfo, key_of
from transfer_queue.weights.engines.drafts import Draft
from transfer_queue.weights.engines.trainer import Client, TrainerEngine, TrainerInfo
from transfer_queue.weights.engines.waiting import Call, Deadline
from transfer_queue.weights.manifest import MAX_NBYTES, Kind, Manifest
from transfer_queue.weights.packing import Plan, digests, pack, plan, plan_vllm, seal, unpack
from transfer_queue.weights.receiver import Receiver
from transfer_queue.weights.room import room
from transfer_queue.weights.sources import TensorMeta, WeightSource
from transfer_queue.wire.address import Address, host_towards

dist: Any = torch.distributed  # its stubs lack the stores and process groups
ENDING_S = 1.0  # how long a broadcast may still run after the receivers have answered
Packing = Literal["tq", "vllm"]


class CollectiveTrainerInfo(TrainerInfo, kw_only=True):
    """`world_size` counts the trainer. `device`: where the broadcast's buffers are ("cuda" for nccl)."""

    world_size: int
    host: str = "127.0.0.1"
    port: int = 0
    backend: str = "gloo"
    device: str = "cpu"
    packing: Packing = "tq"


class CollectiveInfo(InitInfo, kw_only=True):
    host: str
    port: int
    round: int
    world_size: int
    rank_offset: int = 1
    backend: str = "gloo"
    device: str = "cpu"
    packing: Packing = "tq"


class CollectiveUpdate(UpdateInfo, kw_only=True):
    """The lists, `root` and `buffer_nbytes` are those of vLLM's packing only."""

    names: tuple[str, ...] = ()
    dtype_names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    aliases: dict[str, str] = msgspec.field(default_factory=dict)
    root: str = ""
    buffer_nbytes: int = 1 << 30
    kind: Kind = "full"
    label: str = ""
    base_root: str | None = None
    meta: dict[str, Any] = msgspec.field(default_factory=dict)


class Group:
    """A process group that belongs to nobody else. Broken for good after an error."""

    def __init__(self, info: CollectiveInfo, rank: int, store: Any, deadline: Deadline) -> None:
        self.device = torch.device(info.device)
        self._works: deque[Any] = deque()  # in no local variable: an error's traceback would keep connections open
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
                self._group = dist.ProcessGroupNCCL(prefixed, rank, info.world_size, options)
            else:
                raise InvalidInput(f"backend {info.backend!r}: gloo or nccl")
        except (RuntimeError, OSError) as error:
            raise _typed(error) from error

    def begin(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Start to broadcast from rank 0; `end` waits for it."""
        try:
            self._works.append(self._live().broadcast(tensor, 0, timedelta(seconds=deadline.left("the broadcast"))))
        except RuntimeError as error:
            raise _typed(error) from error

    def end(self, deadline: Deadline) -> None:
        """Wait for the broadcast that began first."""
        self._live()
        try:
            self._works[0].wait(timedelta(seconds=deadline.left("the broadcast")))
            self._works.popleft()
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
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
        held = [self._group, *self._works]
        self._group = None
        self._works.clear()
        if held[0] is not None:
            Call(_discard, held)


def _discard(held: list[Any]) -> None:
    """Connections are broken when nothing refers to the group any more; the last reference waits for what still runs,
    so it must not be the caller's."""
    held[0].abort()
    held.clear()


def _typed(error: Exception) -> TransferQueueError:
    text = str(error).splitlines()[0] if str(error) else repr(error)
    if isinstance(error, TransferQueueError):
        return error
    return (DeadlineExceeded if "imed out" in text or "timeout" in text.lower() else ServiceUnavailable)(text)


class CollectiveTrainer(TrainerEngine):
    init_form = CollectiveTrainerInfo

    def __init__(self, info: CollectiveTrainerInfo, client: Client, source: WeightSource) -> None:
        if info.packing == "vllm" and info.anchor_every > 1:
            raise InvalidInput("vLLM's packing has no differences")
        super().__init__(info, client, source)
        limit = timedelta(seconds=info.timeout_s)
        self._store: Any = dist.TCPStore(info.host, info.port, is_master=True, timeout=limit, wait_for_workers=False)
        self._group: Group | None = None
        self._round = 0
        self._draft: tuple[Draft, Plan] | None = None

    def receivers_info(self) -> dict[str, Any]:
        return {
            "host": self.info.host, "port": self._store.port, "round": self._round, "rank_offset": 1,
            "world_size": self.info.world_size, "backend": self.info.backend, "device": self.info.device,
            "packing": self.info.packing,
        }  # fmt: skip

    def _meet(self, deadline: Deadline) -> None:
        self._round += 1
        told = {**self.introduction(self._num_silent), "timeout_s": deadline.left()}
        asked = Call(self._client.init_weight_transfer_engine, told)
        info = CollectiveInfo(**told)
        joined = Call(Group, info, 0, self._store, deadline)
        asked.result(deadline, "init_weight_transfer_engine")
        self._group = joined.result(deadline, "the rendezvous")

    def _publish(self, draft: Draft, deadline: Deadline) -> Manifest:
        if self._group is None:
            self._meet(deadline)
        specs, nbytes = draft.source.specs(), self.info.bucket_nbytes
        where = plan_vllm(specs, nbytes) if self.info.packing == "vllm" else plan(specs, nbytes)
        manifest = draft.seal(where, digests(draft.source))
        self._draft = (draft, where)
        return manifest

    def update_info(self, manifest: Manifest, deadline: Deadline) -> dict[str, Any]:
        info = super().update_info(manifest, deadline)
        if self.info.packing == "vllm":
            info.update(
                names=[spec.name for spec in manifest.tensors],
                dtype_names=[spec.dtype for spec in manifest.tensors],
                shapes=[list(spec.shape) for spec in manifest.tensors],
                aliases=manifest.aliases, root=manifest.root, buffer_nbytes=self.info.bucket_nbytes,
                kind=manifest.kind, label=manifest.label, base_root=manifest.base_root, meta=manifest.meta,
            )  # fmt: skip
        return info

    def _lead(self, manifest: Manifest, info: dict[str, Any], deadline: Deadline) -> None:
        sending = Call(self._send_all, manifest, deadline)
        try:
            super()._lead(manifest, info, deadline)
            sending.result(deadline, "the broadcast")
        except BaseException:
            sending.ended(ENDING_S)
            self._give_up()  # some receiver may have left it
            raise

    def _send_all(self, manifest: Manifest, deadline: Deadline) -> None:
        group, drafted = self._group, self._draft
        assert group is not None
        assert drafted is not None
        draft, where = drafted
        try:
            if self.info.packing == "tq":
                body = torch.frombuffer(bytearray(manifest.encode()), dtype=torch.uint8)
                group.broadcast(torch.tensor([len(body)]).to(group.device), deadline)
                group.broadcast(body.to(group.device), deadline)
            for packed in pack(draft.source, where):
                group.broadcast(packed.data.to(group.device), deadline)
        except BaseException:
            self._give_up()
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
    update_form = CollectiveUpdate

    def __init__(self, receiver: Receiver, **more: Any) -> None:
        super().__init__(receiver, **more)
        self._group: Group | None = None
        self._packing: Packing = "tq"
        self._came: list[torch.Tensor] = []  # buckets of vLLM's packing, before there is a manifest

    def _connect(self, info: CollectiveInfo) -> None:
        self._close()
        deadline = Deadline(info.timeout_s)
        self._packing = info.packing

        def join() -> Group:
            limit = timedelta(seconds=deadline.left())
            try:
                store = dist.TCPStore(info.host, info.port, is_master=False, timeout=limit, wait_for_workers=False)
            except (RuntimeError, OSError) as error:
                raise _typed(error) from error
            return Group(info, info.rank_offset + self.rank, store, deadline)

        self._group = Call(join).result(deadline, "the rendezvous")

    def _find(self, info: CollectiveUpdate, deadline: Deadline) -> Manifest:
        group = self._in_group()
        try:
            return Call(self._find_in, group, info, deadline).result(deadline, "the broadcast")
        except BaseException:
            self._close()
            raise

    def _find_in(self, group: Group, info: CollectiveUpdate, deadline: Deadline) -> Manifest:
        if self._packing == "vllm":
            return self._find_vllm(group, info, deadline)
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

    def _find_vllm(self, group: Group, info: CollectiveUpdate, deadline: Deadline) -> Manifest:
        told = zip(info.names, info.dtype_names, info.shapes, strict=True)
        where = plan_vllm([TensorMeta(name, torch_dtype(dtype), shape) for name, dtype, shape in told],
                          info.buffer_nbytes)  # fmt: skip
        self._came = [place for _, place in _received(group, where.buckets, deadline)]
        blank = {place.name: "0" * 32 for place in where.placements}
        layout = _sealed(where, blank, info)
        found: dict[str, str] = {}
        for index, data in enumerate(self._came):
            parts = unpack(data, layout.in_bucket(index))
            found.update({name: digest_tensor(tensor) for name, tensor in parts.items()})
        manifest = _sealed(where, found, info)
        if manifest.root != info.root:
            raise DigestMismatch("the bytes that came are not those that the trainer announced")
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
        if self._packing == "vllm":
            for index in wanted:
                self.receiver.stage(index, self._came[index], lend=True)
            return
        group = self._in_group()
        try:
            fault = Call(self._take_all, group, manifest, wanted, deadline).result(deadline, "the broadcast")
        except BaseException:
            self._close()
            raise
        if fault is not None:
            raise fault

    def _take_all(
        self, group: Group, manifest: Manifest, wanted: list[int], deadline: Deadline
    ) -> TransferQueueError | None:
        """Receive every bucket, and stage those that are wanted; what was wrong with them."""
        fault: TransferQueueError | None = None
        for index, place in _received(group, manifest.buckets, deadline):
            if index in wanted and fault is None:
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

    def _ended(self) -> None:
        self._came = []

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _sealed(where: Plan, found: dict[str, str], info: CollectiveUpdate) -> Manifest:
    return seal(
        where, found, version=info.version, epoch=info.epoch, aliases=info.aliases, kind=info.kind, label=info.label,
        base_root=info.base_root, meta=info.meta,
    )  # fmt: skip


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
