"""One GPU's memory between processes: what needs no GPU runs over memory files, the rest is skipped without one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import until
from engines import Site, answer, expected, processes
from hypothesis import given
from hypothesis import strategies as st
from weights import ROOM_S, Net, Weights, copy_of, delta, drawn, full, install, lora, merged, root, same

from transfer_queue.errors import (
    BadManifest,
    DigestMismatch,
    InvalidInput,
    NotOpen,
    NotSupported,
    ServiceUnavailable,
    StaleVersion,
)
from transfer_queue.weights import (
    Flip,
    InPlace,
    Manifest,
    Receiver,
    StateDictSource,
    Swap,
    Target,
    device,
    pack,
    plan,
    seal,
)
from transfer_queue.weights.adapters import Lora
from transfer_queue.weights.device import digest_at, mix64x2
from transfer_queue.weights.engines.base import parse
from transfer_queue.weights.engines.cuda_ipc import CudaIpcEngine, CudaIpcTrainer, CudaIpcUpdate
from transfer_queue.weights.engines.handles import CudaHandle, HostHandle, Shared, opened
from transfer_queue.weights.sources import WeightSource

CPU = torch.device("cpu")
MASK = 2**64 - 1
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Start = Callable[..., Site]


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    with processes() as found:
        yield found


@pytest.fixture
def site(context: Any, tmp_path: Path) -> Iterator[Start]:
    made: list[Site] = []

    def start(engine: str, **more: Any) -> Site:
        made.append(Site(context, engine, tmp_path, **more))
        made[-1].start_trainer()
        return made[-1]

    yield start
    for one in made:
        one.close()


# digests


def by_hand(data: bytes) -> str:
    first = second = 0
    for index in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * index : 8 * index + 8].ljust(8, b"\0"), "little")
        mixed = (word + (index + 1) * 0x9E3779B97F4A7C15) & MASK
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & MASK
        mixed ^= mixed >> 31
        first += mixed
        mixed = mixed * 0xFF51AFD7ED558CCD & MASK
        second += mixed ^ mixed >> 33
    return f"{first & MASK:016x}{second & MASK:016x}"


def flat(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@given(st.binary(max_size=100), st.integers(0, 9))
def test_a_digest_is_that_of_the_definition(data: bytes, skipped: int) -> None:
    assert mix64x2(flat(bytes(skipped) + data)[skipped:]) == by_hand(data)


@given(st.binary(min_size=16, max_size=64), st.data())
def test_a_digest_sees_what_changed(data: bytes, draw: st.DataObject) -> None:
    bits = draw.draw(st.sets(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=4))
    changed = int.from_bytes(data, "little")
    for bit in bits:
        changed ^= 1 << bit
    assert mix64x2(flat(changed.to_bytes(len(data), "little"))) != mix64x2(flat(data))
    if data[:8] != data[8:16]:
        assert mix64x2(flat(data[8:16] + data[:8] + data[16:])) != mix64x2(flat(data))


def test_a_digest_does_not_depend_on_how_many_words_are_taken_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(256, (999,), dtype=torch.uint8)
    monkeypatch.setattr(device, "STEP", 7)
    assert mix64x2(data) == by_hand(data.numpy().tobytes())
    signs = torch.ones(64, dtype=torch.bfloat16)
    flipped = signs.clone()
    flipped[[3, 7]] = -1
    assert digest_at(signs, "mix64x2") != digest_at(flipped, "mix64x2")


def mixed(weights: Weights, version: int, bucket_nbytes: int = 128, **more: Any) -> tuple[Manifest, list[torch.Tensor]]:
    source = StateDictSource(weights)
    where = plan(source.specs(), bucket_nbytes)
    digests = {name: digest_at(tensor, "mix64x2") for name, tensor in source.tensors()}
    manifest = seal(where, digests, version=version, epoch="e", algo="mix64x2", **more)
    return manifest, [packed.data.clone() for packed in pack(source, where)]


@pytest.mark.parametrize("lend", [False, True])
def test_buckets_with_these_digests_are_checked_and_installed(lend: bool) -> None:
    module = Net()
    receiver = Receiver(InPlace(module))
    manifest, buckets = mixed(drawn(module, 1), 1)
    assert Manifest.decode(manifest.encode()) == manifest
    for index in receiver.open(manifest, ROOM_S):
        damaged = buckets[index].clone()
        damaged[0] ^= 1
        for wrong in (damaged, buckets[index][:-1], buckets[index].view(torch.int8)):
            with pytest.raises(DigestMismatch):
                receiver.stage(index, wrong, lend)
        receiver.stage(index, buckets[index].numpy() if index else buckets[index], lend)
    receiver.verify()
    receiver.commit()
    assert same(copy_of(module), drawn(module, 1))
    with pytest.raises(BadManifest, match="delta"):
        msgspec.structs.replace(delta(drawn(module, 1), drawn(module, 2), 2, 1).manifest, algo="mix64x2")
    with pytest.raises(BadManifest, match="crc"):
        msgspec.structs.replace(manifest, algo="crc")
    with pytest.raises(InvalidInput, match="crc"):
        digest_at(buckets[0], "crc")


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


class Counted(StateDictSource):
    """How many tensors were read of the last pass."""

    num_read = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_read = 0
        for one in super().tensors():
            self.num_read += 1
            yield one


@pytest.mark.parametrize("algo", ["mix64x2", "xxh3_128"])
def test_a_buffer_is_written_again_after_the_answer_for_what_lay_in_it(algo: str) -> None:
    weights = {f"{number}.weight": torch.full((3, 4), float(number)) for number in range(6)}
    source, module = Counted(weights), torch.nn.ModuleList(torch.nn.Linear(4, 3, bias=False) for _ in range(6))
    trainer, wire = meet(source, module, bucket_nbytes=48, algo=algo)
    buffers: list[int] = []

    def called(info: dict[str, Any]) -> None:
        buffers.append(info["buffer"])
        until(lambda: source.num_read == min(info["bucket"] + 2, 6), "the next bucket, and no more")

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
    fresh.start_weight_update()
    wire.called = lambda info: fresh.update_weights(info) if info["bucket"] == 0 else None
    trainer.send_weights(deadline_s=ROOM_S)
    with pytest.raises(NotOpen, match="nothing was received"):  # but one bucket of several
        fresh.finish_weight_update()
    fresh.start_weight_update()
    with pytest.raises(DigestMismatch, match="steps"):  # there is another bucket in that buffer now
        fresh.update_weights(first)
    one.shutdown()
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


@gpu
@pytest.mark.parametrize("num_bytes", [0, 1, 8, 999, 1 << 20])
def test_a_gpu_gives_the_same_digests(num_bytes: int) -> None:
    data = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    assert mix64x2(data.cuda()) == mix64x2(data)


@gpu
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


@gpu
@pytest.mark.parametrize("kind", [InPlace, Swap, Flip])
@pytest.mark.parametrize("staged_on", ["cpu", "cuda"])
def test_targets_on_a_gpu(kind: type[Target], staged_on: str) -> None:
    modules = [Net().cuda() for _ in range(2 if kind is Flip else 1)]
    adapters = Lora(*modules)
    receiver = Receiver(kind(*modules), adapter=adapters)
    weights = {seed: drawn(Net(), seed) for seed in (1, 2)}
    for seed, one in weights.items():
        version = full(one, seed)
        version.buckets = [bucket.to(staged_on) for bucket in version.buckets]
        install(receiver, version)
        with receiver.reading() as live:
            assert root(copy_of(live.module)) == root(one)
    changed = {**weights[2], "first.weight": weights[2]["first.weight"] + torch.eye(8)}
    install(receiver, delta(weights[2], changed, 3, 2))
    meta = {"adapter_config": json.dumps({"r": 2, "lora_alpha": 4})}
    install(receiver, full(lora(1), 1, kind="adapter", label="math", meta=meta))
    inputs = torch.arange(8.0)
    with receiver.reading() as live, adapters.active("math", live.tag):
        found = live.module.first(inputs.cuda()).cpu()
    by_merging = merged(changed, lora(1), 2.0)
    assert torch.equal(found, torch.nn.functional.linear(inputs, by_merging["first.weight"], by_merging["first.bias"]))
