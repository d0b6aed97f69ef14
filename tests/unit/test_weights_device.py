"""Digests of bytes where they lie, buckets that are checked by them, and targets on a GPU (skipped without one)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import ROOM_S, Net, Weights, copy_of, delta, drawn, full, install, lora, merged, root, same

from transfer_queue.errors import BadManifest, DigestMismatch, InvalidInput
from transfer_queue.weights import (
    Flip,
    InPlace,
    Manifest,
    Receiver,
    StateDictSource,
    Swap,
    Target,
    pack,
    plan,
    seal,
)
from transfer_queue.weights.receive.adapters import Lora
from transfer_queue.weights.version import device
from transfer_queue.weights.version.device import digest_at, mix64x2

MASK = 2**64 - 1
quiet = settings(max_examples=100, derandomize=True, deadline=None, database=None)


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


@quiet
@given(st.binary(max_size=100), st.integers(0, 9))
def test_a_digest_is_that_of_the_definition(data: bytes, skipped: int) -> None:
    assert mix64x2(flat(bytes(skipped) + data)[skipped:]) == by_hand(data)


@quiet
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


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("num_bytes", [0, 1, 8, 999, 1 << 20])
def test_a_gpu_gives_the_same_digests(num_bytes: int) -> None:
    data = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    assert mix64x2(data.cuda()) == mix64x2(data)


@pytest.mark.usefixtures("gpu")
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
