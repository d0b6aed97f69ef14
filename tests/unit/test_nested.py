"""Jagged tensors that are put together here are those that torch's constructor makes."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch._subclasses import FakeTensorMode
from torch.nested._internal.nested_int import NestedIntNode
from torch.nested._internal.nested_tensor import NestedTensor

from transfer_queue.codec import nested
from transfer_queue.codec.nested import Offsets

OFFSETS = Offsets.of(np.array([0, 2, 2, 6]))
SHAPES = [((6,), 1), ((6, 4), 1), ((2, 6), 2), ((2, 6, 3), 2), ((6, 0), 1), ((3, 2, 6), 3)]


def test_this_torch_is_known() -> None:
    assert nested._is_known()


@pytest.mark.parametrize(("shape", "ragged"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_it_is_made_as_torch_makes_it(shape: tuple[int, ...], ragged: int, dtype: torch.dtype) -> None:
    values = torch.arange(6 if 0 not in shape else 0).repeat(24)[: int(np.prod(shape))].view(shape).to(dtype)
    theirs, ours = (make(values, OFFSETS, ragged) for make in (nested.constructed, nested._put_together))
    assert nested._described(ours) == nested._described(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours.unbind(), theirs.unbind(), strict=True))


def test_it_does_what_a_jagged_tensor_does() -> None:
    values = torch.arange(12.0).view(6, 2)
    theirs, ours = (make(values.clone(), OFFSETS, 1) for make in (nested.constructed, nested._put_together))
    assert ours.shape == theirs.shape, "tensors of the same offsets combine"
    assert torch.equal((ours + theirs).values(), 2 * values)
    assert torch.equal(ours.to_padded_tensor(0.0), theirs.to_padded_tensor(0.0))
    assert torch.equal(ours.sum(1), theirs.sum(1))
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours.clone(), ours.to(torch.float64).float()):  # noqa: S301
        assert torch.equal(again.values(), values)
    ours.values().mul_(2)
    assert torch.equal(ours.values(), 2 * values)
    learned = ours.detach().requires_grad_()
    learned.values().square().sum().backward()  # type: ignore[no-untyped-call]
    assert learned.grad is not None
    assert torch.equal(learned.grad.values(), 4 * values)


def test_another_torch_is_asked_to_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested, "_is_known", lambda: False)
    found = nested.jagged(torch.arange(6), OFFSETS, 1)
    assert [row.tolist() for row in found.unbind()] == [[0, 1], [], [2, 3, 4, 5]]


def test_a_torch_whose_tensors_have_another_attribute_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nested.constructed

    def newer(values: torch.Tensor, offsets: Offsets, ragged: int) -> torch.Tensor:
        found = made(values, offsets, ragged)
        found._something = 1  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(nested, "constructed", newer)
    assert not nested._is_known.__wrapped__()


@pytest.mark.parametrize(("shape", "ragged"), SHAPES)
def test_a_row_by_its_number_is_the_row_that_torch_gives(shape: tuple[int, ...], ragged: int) -> None:
    values = torch.arange(float(np.prod(shape))).view(shape)
    theirs, ours = (make(values, OFFSETS, ragged) for make in (nested.constructed, nested._put_together))
    for index in range(-3, 3):
        found = ours[index]
        assert torch.equal(found, theirs[index])
        assert found.untyped_storage().data_ptr() == values.untyped_storage().data_ptr(), "a view, as torch's is"
        assert torch.equal(TensorDict({"x": ours}, [3])[index]["x"], theirs[index])


@pytest.mark.parametrize("index", [3, -4])
def test_a_row_that_is_not_there_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError):
        nested._put_together(torch.arange(6.0), OFFSETS, 1)[index]


def test_a_row_of_what_learns_is_differentiated() -> None:
    learned = nested._put_together(torch.arange(6.0), OFFSETS, 1).detach().requires_grad_()
    again = nested._remade(nested.JaggedRows, learned)
    for one in (learned, again):
        one[2].sum().backward()
        assert one.grad.values().tolist() == [0, 0, 1, 1, 1, 1]


def test_copies_are_plain_nested_tensors() -> None:
    ours = nested._put_together(torch.arange(6.0), OFFSETS, 1)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    copies = [copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file)]  # noqa: S301
    for one in [*copies, ours.clone(), ours + 1, ours.detach()]:
        assert type(one) is NestedTensor
    assert copies[1].values().data_ptr() != ours.values().data_ptr()
    twice = copy.deepcopy([ours, ours])
    assert twice[0] is twice[1]


def test_a_compiled_function_takes_it_as_any_nested_tensor() -> None:
    ours = nested._put_together(torch.arange(6.0), OFFSETS, 1)
    doubled = torch.compile(lambda rows: rows * 2, backend="eager", fullgraph=True)(ours)
    assert type(doubled) is NestedTensor
    assert doubled.values().tolist() == [0, 2, 4, 6, 8, 10]


def test_an_interrupt_inside_torch_stays_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks in Python whether a length is a number, and makes a TypeError of what is raised there."""
    values, offsets = torch.zeros(6, 4), Offsets.of(np.array([0, 2, 6]))
    nested.jagged(values, offsets, 1)

    def interrupted(self: NestedIntNode) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(NestedIntNode, "is_int", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nested.jagged(values, offsets, 1)


def test_lengths_that_tensors_share_are_of_no_mode_of_who_asked_first() -> None:
    nested._length.cache_clear()
    with torch.inference_mode():
        inferred = Offsets.uniform(2, 901).lengths["max_seqlen"]
    with FakeTensorMode():
        fake = nested._length(902)
    assert not inferred.is_inference()
    assert type(fake) is torch.Tensor
    assert inferred is Offsets.uniform(5, 901).lengths["max_seqlen"]


@pytest.mark.parametrize("length", [0, 3])
def test_offsets_of_equal_rows(length: int) -> None:
    offsets = Offsets.uniform(2, length)
    assert offsets.marks.dtype == torch.int64
    assert offsets.marks.tolist() == [0, length, 2 * length]
    assert [offsets.lengths[name].shape for name in ("min_seqlen", "max_seqlen")] == [(length, 0), (length, 0)]
