"""One GPU's memory between processes: what needs no GPU runs over memory files, the rest is skipped without one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from conftest import until
from engines import Site, answer, expected
from weights import ROOM_S, Net, copy_of, drawn, root, same

from transfer_queue.errors import (
    BadManifest,
    DigestMismatch,
    InvalidInput,
    NotOpen,
    NotSupported,
    ServiceUnavailable,
    StaleVersion,
)
from transfer_queue.memory.handles import CudaHandle, HostHandle, Shared, opened
from transfer_queue.weights import (
    InPlace,
    Receiver,
    StateDictSource,
    Swap,
)
from transfer_queue.weights.transport.cuda_ipc import CudaIpcEngine, CudaIpcTrainer, CudaIpcUpdate
from transfer_queue.weights.transport.info import parse
from transfer_queue.weights.version.sources import WeightSource

CPU = torch.device("cpu")
Start = Callable[..., Site]


# handles

CUDA = CudaHandle("n" * 32, "0b1c-2d", bytes(range(66)), 1 << 34, 512, b"/torch_1_2", 3, bytes(64), True)
TOLD = msgspec.to_builtins(CUDA)


def test_handles_are_json() -> None:
    host = HostHandle("n" * 32, 1, 2, 3)
    told = json.loads(json.dumps(msgspec.to_builtins({"version": 1, "handles": ((CUDA, host),)})))
    assert parse(told, CudaIpcUpdate).handles == ((CUDA, host),)


@pytest.mark.parametrize(
    "wrong",
    [
        {**TOLD, "memory": "?"},
        {**TOLD, "memory": "c2hvcnQ="},
        {**TOLD, "memory": [1] * 64},
        {**TOLD, "nbytes": -1},
        {**TOLD, "offset": "0"},
        {**TOLD, "counter": ""},
        {**TOLD, "event_sync": 1},
        {**TOLD, "device": None},
        {**TOLD, "type": "rocm"},
        {key: value for key, value in TOLD.items() if key != "event"},
        "aGFuZGxl",
        None,
    ],
)
def test_what_is_no_handle_is_refused(wrong: Any) -> None:
    one = CudaIpcEngine(Receiver(InPlace(Net())))
    one.init_transfer_engine({"device": "cpu", "num_receivers": 1})
    one.start_weight_update()
    with pytest.raises(InvalidInput, match="CudaIpcUpdate"):
        one.update_weights({"version": 1, "handles": [[wrong]], "manifest": "{}"})
    one.shutdown()


@pytest.mark.usefixtures("any_gpu")
def test_memory_that_is_not_here() -> None:
    with pytest.raises(NotSupported, match="0b1c-2d"):
        opened(CUDA)
    shared = Shared(CPU, 100)
    handle = shared.export()
    assert isinstance(handle, HostHandle)
    shared.data[:] = 7
    found = opened(handle)
    shared.data[50:] = 8
    assert found.tolist() == [7] * 50 + [8] * 50
    found[0] = 1
    assert shared.data[0] == 7
    with pytest.raises(ServiceUnavailable, match="other memory"):
        opened(msgspec.structs.replace(handle, name="0" * 32))
    shared.close()
    for gone in (handle, msgspec.structs.replace(handle, pid=2**22 + 1)):
        with pytest.raises(ServiceUnavailable):
            opened(gone)
    assert found[1] == 7


# the engine


class Wire:
    """Brings the trainer's calls to engines, as JSON. `called` is asked before each update."""

    def __init__(self, *engines: CudaIpcEngine) -> None:
        self.engines = engines
        self.told: list[dict[str, Any]] = []
        self.called: Callable[[dict[str, Any]], object] = lambda info: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for one in self.engines:
            one.init_transfer_engine(json.loads(json.dumps(init_info)))

    def start_weight_update(self) -> None:
        for one in self.engines:
            one.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.told.append(json.loads(json.dumps(update_info)))
        self.called(self.told[-1])
        for one in self.engines:
            one.update_weights(self.told[-1])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        for one in self.engines:
            one.finish_weight_update()


def meet(source: WeightSource, *modules: torch.nn.Module, **info: Any) -> tuple[CudaIpcTrainer, Wire]:
    wire = Wire(*(CudaIpcEngine(Receiver(Swap(one)), rank=rank) for rank, one in enumerate(modules)))
    more = {"device": "cpu", "num_receivers": len(modules), "bucket_nbytes": 128, **info}
    return CudaIpcTrainer.trainer_init(more, client=wire, source=source), wire


def leave(trainer: CudaIpcTrainer, wire: Wire) -> None:
    trainer.shutdown()
    for one in wire.engines:
        one.shutdown()


def num_mapped() -> int:
    """Mappings of the engine's memory files in this process."""
    with open("/proc/self/maps") as file:
        return sum(len(line.split("/memfd:")[-1].split()[0]) == 32 for line in file if "/memfd:" in line)


def test_mappings_last_until_shutdown_and_are_made_once() -> None:
    before, fds = num_mapped(), len(os.listdir("/proc/self/fd"))
    weights = drawn(Net(), 1)
    modules = [Net(), Net()]
    trainer, wire = meet(StateDictSource(weights), *modules)
    for version in (1, 2, 3):
        trainer.send_weights(deadline_s=ROOM_S)
        assert num_mapped() == before + 2 * (1 + len(modules)), version
    handles = [told["handles"] for told in wire.told if told["manifest"]]
    assert handles == [handles[0]] * 3
    assert len(wire.told) > 2 * len(handles)
    assert all(same(copy_of(one), weights) for one in modules)
    adapter = StateDictSource({"larger": torch.ones(999)})
    with pytest.raises(InvalidInput, match="no adapters"):
        trainer.send_adapter("x", adapter, {}, deadline_s=ROOM_S)
    trainer.send_weights(deadline_s=ROOM_S)
    assert [told["handles"] for told in wire.told if told.get("manifest")][-1] != handles[0]
    leave(trainer, wire)
    assert (num_mapped(), len(os.listdir("/proc/self/fd"))) == (before, fds)
    assert all(same(copy_of(one), weights) for one in modules)


@pytest.mark.parametrize("algo", ["mix64x2", "xxh3_128"])
def test_a_buffer_is_written_again_after_the_answer_for_what_lay_in_it(algo: str) -> None:
    weights = {f"{number}.weight": torch.full((3, 4), float(number)) for number in range(6)}
    source, module = StateDictSource(weights), torch.nn.ModuleList(torch.nn.Linear(4, 3, bias=False) for _ in range(6))
    trainer, wire = meet(source, module, bucket_nbytes=48, algo=algo)
    buffers: list[int] = []

    def lying(number: int) -> float:
        """What the buffer of this bucket holds."""
        return float(trainer._buffers[number % 2].data[:4].view(torch.float32))

    def called(info: dict[str, Any]) -> None:
        buffers.append(info["buffer"])
        number = info["bucket"]
        until(lambda: lying(number + 1) == min(number + 1, 4 + (number + 1) % 2), "the next bucket in the other buffer")
        assert lying(number) == number

    wire.called = called
    report = trainer.send_weights(deadline_s=ROOM_S)
    assert buffers == [0, 1] * 3
    assert same(copy_of(module), weights)
    assert (report.root == root(weights)) == (algo == "xxh3_128")
    leave(trainer, wire)


def test_updates_that_do_not_fit_are_refused_and_the_next_one_is_taken() -> None:
    module = Net()
    weights = drawn(Net(), 1)
    trainer, wire = meet(StateDictSource(weights), module)
    trainer.send_weights(deadline_s=ROOM_S)
    first, one = wire.told[0], wire.engines[0]
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"handles": []}, InvalidInput),
        ({"key": "0" * 32}, DigestMismatch),
        ({"manifest": "{}"}, BadManifest),
        ({"version": 9}, StaleVersion),
        ({"handles": [[TOLD, TOLD]]}, NotSupported),
    ]
    for change, error in refused:
        one.start_weight_update()
        with pytest.raises(error):
            one.update_weights({**first, **change})
    fresh = CudaIpcEngine(Receiver(InPlace(Net())))
    fresh.init_transfer_engine(trainer.introduction(0))
    fresh.start_weight_update()
    wire.called = lambda info: fresh.update_weights(info) if info["bucket"] == 0 else None
    trainer.send_weights(deadline_s=ROOM_S)
    with pytest.raises(NotOpen, match="nothing was received"):  # but one bucket of several
        fresh.finish_weight_update()
    fresh.start_weight_update()
    with pytest.raises(DigestMismatch, match="steps"):  # there is another bucket in that buffer now
        fresh.update_weights(first)
    one.shutdown()
    one.init_transfer_engine(trainer.introduction(0))
    one.start_weight_update()
    with pytest.raises(DigestMismatch):  # the manifest and the handles come with the first bucket
        one.update_weights(wire.told[-1])
    fresh.start_weight_update()
    with pytest.raises(NotOpen, match="buffer 7"):
        fresh.update_weights({**first, "buffer": 7})
    with pytest.raises(InvalidInput, match="join"):
        fresh.join(timeout_s=ROOM_S)
    fresh.shutdown()
    leave(trainer, wire)


def test_what_cannot_be_met_is_refused() -> None:
    source = StateDictSource(drawn(Net(), 1))
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"anchor_every": 2}, InvalidInput),
        ({"num_receivers": 0}, InvalidInput),
        ({"algo": "md5"}, InvalidInput),
        ({"device": "nonsense"}, InvalidInput),
        ({"device": "cuda:99"}, NotSupported),
        ({"device": "meta"}, NotSupported),
    ]
    for info, error in refused:
        with pytest.raises(error):
            meet(source, Net(), **info)
    if not torch.cuda.is_available():
        with pytest.raises(NotSupported):
            meet(source, Net(), device="cuda")
    one = CudaIpcEngine(Receiver(InPlace(Net())), rank=1)
    with pytest.raises(NotSupported, match="GPU-7"):
        one.init_transfer_engine({"device": "GPU-7", "num_receivers": 2})
    with pytest.raises(InvalidInput, match="rank 1"):
        one.init_transfer_engine({"device": "cpu", "num_receivers": 1})
    one.shutdown()


# on a GPU


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("algo", ["mix64x2", "xxh3_128"])
def test_versions_and_adapters_over_a_gpus_memory(algo: str, site: Start) -> None:
    here = site(f"cuda_ipc-{algo}", device="cuda")
    for seed in range(1, 4):
        here.send(seed)
        assert here.roots() == [expected(seed)] * 2
    with pytest.raises(DigestMismatch):
        here.send(4, fault="corrupt")
    assert here.roots() == [expected(3)] * 2
    here.send(5)
    here.send_adapter("math", 1)
    assert here.answers("math") == [answer(5, 1)] * 2
    here.receivers[1].kill()
    here.receivers.pop()
    here.send(6)
    for one in here.receivers:
        one.call("shutdown")
    here.end_trainer()
    assert here.roots() == [expected(6)]
    here.start_trainer()
    here.send(7)
    assert here.roots() == [expected(7)]
