"""Models, sources and whole updates for the tests of weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from transfer_queue.weights import InPlace, Manifest, Receiver, StateDictSource, WeightSource, pack, plan, seal
from transfer_queue.weights.receive.receiver import CommitInfo
from transfer_queue.weights.transport.pending import PendingVersion
from transfer_queue.weights.version import threads
from transfer_queue.weights.version.manifest import root_of
from transfer_queue.weights.version.plans import plan_pieces
from transfer_queue.weights.version.sources import named_weights

Weights = dict[str, torch.Tensor]
ROOM_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def in_threads() -> Iterator[None]:
    """For modules that import it: threads copy, whatever the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "ALONE_NBYTES", -1)
        yield


class Net(torch.nn.Module):
    """Several dtypes, a buffer, and two linear layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, 1, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


class Tied(torch.nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def copy_of(module: torch.nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in named_weights(module).items()}


def drawn(module: torch.nn.Module, seed: int) -> Weights:
    """Random weights for the module."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-99, 99, tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in named_weights(module).items()
    }


def lora(seed: int, rank: int = 2, width: int = 8) -> Weights:
    """An adapter for `Net.first`, in PEFT's names; its numbers are whole, so sums of products are exact."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"A": (rank, width), "B": (width, rank)}
    return {
        f"base_model.model.first.lora_{half}.weight": torch.randint(-9, 9, shape, generator=generator).float()
        for half, shape in shapes.items()
    }


def merged(weights: Weights, adapter: Weights, scale: float) -> Weights:
    """The weights of `Net` with the adapter added by hand."""
    a, b = (adapter[f"base_model.model.first.lora_{half}.weight"] for half in "AB")
    return {**weights, "first.weight": weights["first.weight"] + scale * (b @ a)}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Version:
    """A manifest with its buckets."""

    def __init__(self, manifest: Manifest, buckets: list[torch.Tensor]) -> None:
        self.manifest = manifest
        self.buckets = buckets


def full(weights: Mapping[str, torch.Tensor] | WeightSource, version: int, epoch: str = "e", **more: Any) -> Version:
    source = StateDictSource(weights) if isinstance(weights, Mapping) else weights
    where = plan(source.specs(), more.pop("bucket_nbytes", 128))
    buckets, digests = [], {}
    for packed in pack(source, where):
        buckets.append(packed.data.clone())
        digests.update(packed.digests)
    return Version(seal(where, digests, version=version, epoch=epoch, aliases=source.aliases(), **more), buckets)


def delta(old: Weights, new: Weights, version: int, base: int, epoch: str = "e") -> Version:
    return change(StateDictSource(old), StateDictSource(new), version, base, epoch)


def change(old: WeightSource, new: WeightSource, version: int, base: int, epoch: str = "e") -> Version:
    """The difference, as a trainer of one rank makes it."""
    planned = functools.partial(plan_pieces, bucket_nbytes=128)
    before = PendingVersion(old, base, epoch, keeps=True)
    before.read_alone(planned)
    after = PendingVersion(new, version, epoch, before.settled(), keeps=True)
    found = after.read_alone(planned)
    assert found.kind == "delta"
    return Version(found, after.buckets)


def root(weights: Mapping[str, torch.Tensor]) -> str:
    return root_of(full(weights, 1).manifest.contents())


def install(receiver: Receiver, version: Version, timeout_s: float = ROOM_S) -> CommitInfo:
    for index in receiver.open(version.manifest, timeout_s):
        receiver.stage(index, version.buckets[index])
    receiver.verify()
    return receiver.commit()


def receiver_of(module: torch.nn.Module, **more: Any) -> Receiver:
    return Receiver(InPlace(module), **more)


class Direct:
    """A client that brings the calls to its `engine` itself, without a `Control`."""

    engine: Any

    def init_weight_transfer_engine(self, info: Any) -> None:
        self.engine.init_transfer_engine(info)

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, info: Any) -> None:
        self.engine.update_weights(info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()
