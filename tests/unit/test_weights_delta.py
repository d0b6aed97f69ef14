"""Exact differences, the versions made of them, and chains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weights import Net, Tied, change, delta, drawn, full, install, receiver_of, root, same

from transfer_queue.errors import ProtocolError, ShapeMismatch
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights import Manifest, ModuleSource, StateDictSource
from transfer_queue.weights.version.delta import difference, read
from transfer_queue.weights.version.digest import digest_tensor

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return byte_view(tensor.contiguous()).numpy().tobytes()


def encode(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """The difference as it is stored, or the new tensor itself; None when nothing changed."""
    found = difference(old.contiguous(), new.contiguous())
    assert found.digest == digest_tensor(new)
    if found.patch is None:
        return new
    return None if found.stored is None else torch.from_numpy(found.stored)


def decode(stored: torch.Tensor, onto: torch.Tensor) -> None:
    read(stored, onto).apply(onto)


def after(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, made of `old` and the difference."""
    found = encode(old, new)
    if found is None or found is new:
        return old if found is None else new
    assert found.nbytes < new.nbytes
    copy = old.clone(memory_format=torch.contiguous_format)
    decode(found, copy)
    once = bits(copy)
    decode(found, copy)
    assert bits(copy) == once  # applying it twice is applying it once
    return copy


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of random bits of one dtype and shape, that differ in a few elements, or many, or none."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 40), max_size=3))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    nbytes = int(np.prod(shape)) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    old = random.integers(0, high, nbytes, np.uint8)
    changed = random.random(nbytes) < draw(st.sampled_from([0, 0.001, 0.01, 0.1, 1]))
    new = np.where(changed, random.integers(0, high, nbytes, np.uint8), old)
    if not nbytes:
        return torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    a, b = (torch.from_numpy(part.copy()).view(dtype).reshape(shape) for part in (old, new))
    return a, b


@given(pairs())
def test_a_difference_gives_the_same_bits(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    old, new = pair
    assert bits(after(old, new)) == bits(new)
    assert (encode(old, new) is None) == (bits(old) == bits(new))


@given(st.integers(1, 3_000_000), st.data())
def test_gaps_of_every_size(numel: int, data: st.DataObject) -> None:
    old = torch.zeros(numel, dtype=torch.int8)
    new = old.clone()
    new[data.draw(st.lists(st.integers(0, numel - 1), max_size=5))] = 1
    assert torch.equal(after(old, new), new)


def test_nans_signed_zeros_and_0d() -> None:
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    old = torch.zeros(100)
    old[3] = quiet
    new = old.clone()
    new[3], new[50] = other, -0.0
    assert bits(after(old, new)) == bits(new)
    assert encode(new, new.clone()) is None
    assert bits(after(torch.tensor(1.0), torch.tensor(2.0))) == bits(torch.tensor(2.0))
    slanted = torch.arange(600.0).reshape(20, 30).t()
    assert torch.equal(after(slanted, slanted + (slanted == 7)), slanted + (slanted == 7))


def test_one_percent_of_bf16_is_a_twentieth_of_the_bytes() -> None:
    old = torch.zeros(1_000_000, dtype=torch.bfloat16)
    new = old + (torch.rand(len(old), generator=torch.Generator().manual_seed(0)) < 0.01)
    found = encode(old, new)
    assert found is not None
    assert found.nbytes < new.nbytes / 50


@given(st.data())
def test_damaged_differences_are_refused_or_harmless(data: st.DataObject) -> None:
    old = torch.zeros(500, dtype=torch.int16)
    new = old.clone()
    new[[4, 300]] = 9
    stored = encode(old, new)
    assert stored is not None
    stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    stored = stored[: data.draw(st.integers(len(stored) - 9, len(stored)))]
    copy = old.clone()
    try:
        decode(stored, copy)
    except ProtocolError:
        assert torch.equal(copy, old)


def test_other_dtypes_and_shapes_have_no_difference() -> None:
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ShapeMismatch):
            encode(torch.zeros(2), other)


def changed(weights: dict[str, torch.Tensor], name: str = "first.weight") -> dict[str, torch.Tensor]:
    found = {key: tensor.clone() for key, tensor in weights.items()}
    found[name].view(-1)[0] += 1
    return found


def test_a_delta_version_has_only_what_changed_and_names_the_result() -> None:
    old = drawn(Net(), 0)
    new = changed(old)
    found = delta(old, new, 2, 1).manifest
    assert [spec.name for spec in found.tensors] == ["first.weight"]
    assert found.tensors[0].delta is not None
    assert (found.base, found.base_root, found.root) == (1, root(old), root(new))
    assert found.nbytes < full(new, 2).manifest.nbytes / 5
    assert Manifest.decode(found.encode()) == found
    assert delta(old, old, 2, 1).manifest.nbytes == 0


def test_a_chain_of_deltas_arrives() -> None:
    module = Net()
    states = [drawn(module, 0)]
    receiver = receiver_of(module)
    install(receiver, full(states[0], 1))
    for version, name in enumerate(("first.weight", "steps", "second.bias", "first.weight"), 2):
        states.append(changed(states[-1], name))
        install(receiver, delta(states[-2], states[-1], version, version - 1))
        assert same(dict(module.state_dict()), states[-1])
        assert receiver.installed().root == root(states[-1])


def test_a_delta_of_tied_weights_reaches_an_untied_model() -> None:
    trainer = Tied()
    module = Tied(tied=False)
    receiver = receiver_of(module)
    install(receiver, full(ModuleSource(trainer), 1))
    before = StateDictSource({name: tensor.clone() for name, tensor in trainer.state_dict().items()})
    tied = dict.fromkeys(trainer.state_dict(), before._tensors["embed.weight"])
    with torch.no_grad():
        trainer.embed.weight[0, 0] += 1
    found = change(StateDictSource(tied), ModuleSource(trainer), 2, 1)
    assert found.manifest.aliases == {"head.weight": "embed.weight"}
    install(receiver, found)
    assert torch.equal(module.head.weight, trainer.embed.weight)
