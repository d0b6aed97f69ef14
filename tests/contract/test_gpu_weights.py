"""Weights from GPU to GPU by every engine, and how they become live there (skipped without a GPU)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Child
from engines import Site, expected
from weights import ROOM_S, Weights, copy_of, delta, drawn, full, install, root, same

from transfer_queue.errors import InvalidInput, StaleBase
from transfer_queue.weights import Control, Flip, InPlace, ModuleSource, Receiver, Swap
from transfer_queue.weights.receive.targets import Target
from transfer_queue.weights.transport import registry
from transfer_queue.weights.version import tensor_memory
from transfer_queue.weights.version.delta import difference

Start = Callable[..., Site]
pytestmark = pytest.mark.usefixtures("gpu")
MB = 1 << 20
LONG = 200_000_000  # cycles: a tenth of a second
KINDS: list[Callable[[torch.nn.Module], Target]] = [
    InPlace,
    lambda module: InPlace(module, stage_on="device"),
    lambda module: InPlace(module, stage_on="host"),
    lambda module: InPlace(module, undo=True),
    Swap,
]


@pytest.mark.parametrize(
    ("engine", "anchor_every"),
    [("shm", 1), ("shm", 3), ("tcp", 1), ("tcp", 3), ("disk", 1), ("collective", 1), ("collective", 3)],
)
def test_every_engine_moves_weights_from_gpu_to_gpu(engine: str, anchor_every: int, site: Start) -> None:
    here = site(engine, on="cuda", anchor_every=anchor_every)
    kinds = [here.send(seed).kind for seed in range(1, 7) if here.roots()]
    assert here.roots() == [expected(6)] * 2
    assert ("delta" in kinds) is (anchor_every > 1)


@pytest.fixture(autouse=True)
def copying() -> Iterator[None]:
    """The threads that copy weights stay with the process; they end with the test."""
    yield
    tensor_memory._mover.close()


class Large(torch.nn.Module):
    """64 MB in several tensors, one of which is no multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 2048, bias=False) for _ in range(8))
        self.norm = torch.nn.Parameter(torch.ones(1001, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum(layer(inputs).sum().double() for layer in self.layers) + self.norm.double().sum()


def nudged(weights: Weights) -> Weights:
    """One element in a hundred is another one."""
    found = {}
    for name, tensor in weights.items():
        flat = tensor.flatten().clone()
        flat[::100] += 1
        found[name] = flat.view(tensor.shape)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_full_versions_and_differences_are_installed_bit_for_bit(kind: Callable[..., Target]) -> None:
    module = Large().cuda()
    receiver = Receiver(kind(module))
    first, second = drawn(module, 1), drawn(module, 2)
    install(receiver, full(first, 1))
    assert same(copy_of(module), {name: one.cuda() for name, one in first.items()})
    install(receiver, full(second, 2))
    install(receiver, delta(second, nudged(second), 3, 2))
    assert root({name: one.cpu() for name, one in copy_of(module).items()}) == root(nudged(second))


def test_a_spare_module_takes_versions_in_turn() -> None:
    one, other = Large().cuda(), Large().cuda()
    receiver = Receiver(Flip(one, other))
    weights = drawn(one, 1)
    install(receiver, full(weights, 1))
    for version in (2, 3):
        weights, old = nudged(weights), weights
        install(receiver, delta(old, weights, version, version - 1))
        with receiver.reading() as live:
            assert root({name: tensor.cpu() for name, tensor in copy_of(live.module).items()}) == root(weights)


def test_a_difference_is_refused_where_somebody_changed_the_weights() -> None:
    module = Large().cuda()
    receiver = Receiver(InPlace(module))
    weights = drawn(module, 1)
    install(receiver, full(weights, 1))
    with torch.no_grad():
        module.norm[7] += 1
    before = {name: one.cpu() for name, one in copy_of(module).items()}
    with pytest.raises(StaleBase, match="norm"):
        install(receiver, delta(weights, nudged(weights), 2, 1))
    assert root({name: one.cpu() for name, one in copy_of(module).items()}) == root(before)


def test_a_base_is_read_after_what_is_queued_before(tmp_path: Path) -> None:
    """A box that lies in strides is copied together first, behind what the default stream has to do."""
    module = torch.nn.Linear(2048, 2048, bias=False).cuda().requires_grad_(False)
    boxed = module.weight[:, :1024]
    changed = boxed.clone()
    changed[::7, ::9] += 1
    found = difference(boxed.contiguous().cpu(), changed)
    assert found.patch is not None
    torch.cuda._sleep(LONG)
    assert found.patch.result(boxed.contiguous()) == found.digest


def test_versions_are_committed_in_inference_mode() -> None:
    with torch.inference_mode():
        module = Large().cuda()
        for kind in (InPlace, Swap, lambda module: InPlace(module, stage_on="device")):
            receiver = Receiver(kind(module))
            weights = drawn(module, 1)
            install(receiver, full(weights, 1))
            install(receiver, delta(weights, nudged(weights), 2, 1))
            assert root({name: one.cpu() for name, one in copy_of(module).items()}) == root(nudged(weights))


def test_a_difference_of_many_elements_needs_little_of_the_gpu() -> None:
    module = Large().cuda()
    receiver = Receiver(InPlace(module, undo=False))
    weights = drawn(module, 1)
    install(receiver, full(weights, 1))
    found = {name: one.clone() for name, one in weights.items()}
    for one in found.values():
        one.view(-1)[::5] += 1
    assert peak_mb(lambda: install(receiver, delta(weights, found, 2, 1))) < 40
    assert root({name: one.cpu() for name, one in copy_of(module).items()}) == root(found)


def peak_mb(update: Callable[[], object]) -> float:
    """How much more of the GPU's memory than before was in use at once."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    update()
    return (torch.cuda.max_memory_allocated() - before) / MB


def test_no_second_model_is_on_the_gpu_unless_asked() -> None:
    module = Large().cuda()
    receiver = Receiver(InPlace(module))
    weights = drawn(module, 1)
    assert peak_mb(lambda: install(receiver, full(weights, 1))) < 1
    assert peak_mb(lambda: install(receiver, delta(weights, nudged(weights), 2, 1))) < 9
    receiver = Receiver(InPlace(module, stage_on="device"))
    assert 64 <= peak_mb(lambda: install(receiver, full(weights, 1))) < 66
    version = full(weights, 2)
    version.buckets = [bucket.cuda() for bucket in version.buckets]
    receiver = Receiver(InPlace(module, stage_on="host"))
    assert peak_mb(lambda: install(receiver, version)) < 1
    with pytest.raises(InvalidInput, match="stage_on"):
        InPlace(module, stage_on="disk")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS[:4])
def test_captured_graphs_and_compiled_addresses_see_the_new_weights(kind: Callable[..., Target]) -> None:
    module = Large().cuda().requires_grad_(False)
    inputs = torch.ones(1, 1024, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        module(inputs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = module(inputs)
    receiver = Receiver(kind(module))
    weights = {name: torch.ones_like(one) for name, one in drawn(module, 1).items()}
    for version in (1, 2, 3):
        new = {name: one * version for name, one in weights.items()}
        install(receiver, full(new, version))
        graph.replay()
        assert answer.item() == version * (8 * 1024 * 2048 + 1001)


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_waits_for_kernels_that_read_the_old_weights(kind: Callable[..., Target]) -> None:
    module = Large().cuda().requires_grad_(False)
    receiver = Receiver(kind(module))
    install(receiver, full({name: torch.ones_like(one) for name, one in drawn(module, 1).items()}, 1))
    with receiver.reading() as live, torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        answer = live.module(torch.ones(1, 1024, device="cuda"))  # queued, and the reader leaves
    install(receiver, full({name: torch.zeros_like(one) for name, one in drawn(module, 1).items()}, 2))
    assert answer.item() == 8 * 1024 * 2048 + 1001


@contextmanager
def serving(engine: str, folder: Path) -> Iterator[tuple[torch.nn.Module, Callable[..., Any]]]:
    """A module that takes versions, and what starts a trainer for it."""
    module = Large().cuda()
    receiver = Receiver(InPlace(module))
    made = registry.engine(engine)(receiver)
    trainers: list[Any] = []

    def trainer(source: torch.nn.Module, **info: Any) -> Any:
        kind, more = registry.trainer(engine), {"folder": str(folder)} if engine == "disk" else {}
        client = Control(made, receiver)
        trainers.append(kind.trainer_init({**more, **info}, client=client, source=ModuleSource(source)))
        return trainers[-1]

    yield module, trainer
    for one in trainers:
        one.shutdown()
    made.shutdown()


@pytest.mark.parametrize("engine", ["tcp", "shm", "disk"])
def test_weights_are_those_of_the_stream_that_sends(engine: str, tmp_path: Path) -> None:
    """An optimizer's step may still wait in the stream when they are sent."""
    mine = Large().cuda().requires_grad_(False)
    with serving(engine, tmp_path) as (module, start):
        trainer = start(mine)
        for turn in range(1, 4):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(LONG)
                for tensor in mine.parameters():
                    tensor.fill_(turn)
                trainer.send_weights(deadline_s=ROOM_S)
            assert all((tensor == turn).all() for tensor in module.parameters())


def test_differences_are_of_the_weights_in_the_stream_that_sends(tmp_path: Path) -> None:
    mine, kinds = Large().cuda().requires_grad_(False), []
    with serving("tcp", tmp_path) as (module, start):
        trainer = start(mine, anchor_every=9)
        for turn in range(1, 5):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(LONG)
                for tensor in mine.parameters():
                    tensor.view(-1)[::50] = turn
                kinds.append(trainer.send_weights(deadline_s=ROOM_S).kind)
            assert all((tensor.view(-1)[::50] == turn).all() for tensor in module.parameters())
    assert kinds == ["full", "delta", "delta", "delta"]


def test_a_trainer_needs_no_second_model_on_its_gpu(tmp_path: Path) -> None:
    mine = Large().cuda().requires_grad_(False)
    with serving("tcp", tmp_path) as (_, start):
        trainer = start(mine, anchor_every=9)
        assert peak_mb(lambda: trainer.send_weights(deadline_s=ROOM_S)) < 1
        for tensor in mine.parameters():
            tensor.view(-1)[::50] += 1
        assert peak_mb(lambda: trainer.send_weights(deadline_s=ROOM_S)) < 9


@pytest.mark.parametrize("engine", ["tcp", "shm", "disk"])
def test_training_goes_on_while_published_weights_are_taken(engine: str, tmp_path: Path) -> None:
    mine = Large().cuda().requires_grad_(False)
    with serving(engine, tmp_path) as (module, start):
        trainer = start(mine)
        for turn in range(1, 4):
            for tensor in mine.parameters():
                tensor.fill_(turn)
            ticket = trainer.publish(deadline_s=ROOM_S)
            for tensor in mine.parameters():
                tensor.fill_(-1)
            assert ticket.result().version == turn
            assert all((tensor == turn).all() for tensor in module.parameters())


def test_ranks_meet_over_nccl(child: Callable[[str], Child]) -> None:
    """A group of one: NCCL takes no two ranks on one GPU."""
    one = child("""
        import torch, torch.distributed as dist
        from transfer_queue.bridge.ranks import _broadcast
        from transfer_queue.weights.transport.deadline import Deadline
        from transfer_queue.weights.transport.group_meeting import GroupMeeting, MeetingPlace, _broadcast as brought
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        GroupMeeting(0, 1).tell(MeetingPlace("10.0.0.1:80", "secret"), Deadline(20.0))
        print(brought("what a torch without a store tells"), flush=True)
        print(_broadcast(torch.arange(3), None).tolist(), flush=True)
        dist.destroy_process_group()
        print("left", flush=True)
    """)
    assert [one.line() for _ in range(3)] == ["what a torch without a store tells", "[0, 1, 2]", "left"]


def test_memory_of_the_gpu_is_lent_two_hundred_times(site: Start, gpu: torch.device) -> None:
    here = site("cuda_ipc", device="cuda")
    free = []
    for seed in range(1, 201):
        here.send(seed)
        if seed % 20 == 0:
            free.append(torch.cuda.mem_get_info(gpu)[0])
    assert here.roots() == [expected(200)] * 2
    assert max(free[1:]) - min(free[1:]) < 32 * MB
