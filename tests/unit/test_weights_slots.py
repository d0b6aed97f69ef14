"""Forward passes that put other tensors in the places of buffers between a version's verification and its commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from weights import copy_of, delta, drawn, full, install, same

from transfer_queue.errors import CommitFailed
from transfer_queue.weights import InPlace, Receiver, Swap
from transfer_queue.weights.receive import targets
from transfer_queue.weights.receive.targets import Target

Make = Callable[..., Target]
TARGETS: dict[str, Make] = {
    "in place": InPlace,
    "in place, undo": lambda module: InPlace(module, undo=True),
    "swap": Swap,
}


@pytest.fixture(params=TARGETS.values(), ids=TARGETS)
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


class Counting(torch.nn.Module):
    """`prev` lies before `cur`, and each forward pass does to them what it was made with."""

    def __init__(self, step: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 4))
        self.register_buffer("prev", torch.zeros(3, 4))
        self.register_buffer("cur", torch.zeros(3, 4))
        self._step = step

    def forward(self) -> None:
        if self._step is not None:
            self._step(self)


def count(module: Any) -> None:
    module.cur = module.cur + 1


def shift(module: Any) -> None:
    module.prev, module.cur = module.cur, module.cur + 1


def exchange(module: Any) -> None:
    module.prev, module.cur = module.cur, module.prev


def put_a_view_of_a_weight(module: Any) -> None:
    module.cur = module.weight.detach()


def put_what_cannot_be_written(module: Any) -> None:
    module.cur = torch.ones(1, 4).expand(3, 4)


STEPS = [count, shift, exchange, put_a_view_of_a_weight, put_what_cannot_be_written]


def verified(receiver: Receiver, version: Any) -> None:
    for index in receiver.open(version.manifest, 30):
        receiver.stage(index, version.buckets[index])
    receiver.verify()


def forward(receiver: Receiver) -> None:
    with receiver.reading() as live:
        live.module()


@pytest.mark.parametrize("step", STEPS)
def test_every_place_has_the_versions_value_whatever_a_pass_put_there(step: Callable[[Any], None], make: Make) -> None:
    module = Counting(step)
    receiver = Receiver(make(module))
    for number in (1, 2, 3):
        weights = drawn(Counting(), number)
        verified(receiver, full(weights, number))
        forward(receiver)
        receiver.commit()
        assert same(copy_of(module), weights)
        assert not receiver.installed().dirty


@pytest.mark.parametrize("step", STEPS)
def test_what_a_pass_put_there_is_as_it_was_when_the_commit_is_undone(
    step: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Counting(step)
    receiver = Receiver(InPlace(module, undo=True))
    verified(receiver, full(drawn(Counting(), 1), 1))
    forward(receiver)
    before, held = copy_of(module), module.cur
    good, calls = targets._put, []

    def failing(into: torch.Tensor, tensor: torch.Tensor) -> None:
        calls.append(into)
        if len(calls) == 3:
            raise OSError("the device fell off")
        good(into, tensor)

    monkeypatch.setattr(targets, "_put", failing)
    with pytest.raises(CommitFailed, match="undone"):
        receiver.commit()
    assert same(copy_of(module), before)
    assert module.cur is held


def test_in_place_keeps_the_address_of_a_buffer_that_a_pass_assigned() -> None:
    module = Counting(count)
    receiver, address = Receiver(InPlace(module)), module.cur.data_ptr()
    verified(receiver, full(drawn(Counting(), 1), 1))
    forward(receiver)
    receiver.commit()
    assert module.cur.data_ptr() == address


def test_a_name_that_shares_memory_with_another_has_the_versions_value_and_shares_it_again(make: Make) -> None:
    def tied(step: Callable[[Any], None] | None = None) -> Counting:
        made = Counting(step)
        made.cur = made.prev.view(3, 4)
        return made

    module, weights = tied(count), drawn(Counting(), 1)
    weights["cur"] = weights["prev"]
    receiver = Receiver(make(module))
    verified(receiver, full(weights, 1))
    forward(receiver)
    receiver.commit()
    assert same(copy_of(module), weights)
    assert module.cur.data_ptr() == module.prev.data_ptr()


@pytest.mark.parametrize("when", ["before the check", "after it"])
def test_buffers_that_were_assigned_in_inference_mode_can_be_read_in_parts(when: str, make: Make) -> None:
    module = Counting(count)
    receiver, weights = Receiver(make(module)), drawn(Counting(), 1)
    if when == "before the check":
        with torch.inference_mode():
            forward(receiver)
    verified(receiver, full(weights, 1))
    with torch.inference_mode():
        forward(receiver)
    receiver.commit()
    with torch.inference_mode():
        assert torch.equal(module.cur[:2], weights["cur"][:2])
    assert same(copy_of(module), weights)


def test_parameters_that_were_made_in_inference_mode_can_be_read_in_parts(make: Make) -> None:
    with torch.inference_mode():
        module = Counting()
    module.weight.loader = 3  # type: ignore[attr-defined]
    receiver, weights = Receiver(make(module)), drawn(Counting(), 1)
    install(receiver, full(weights, 1))
    with torch.inference_mode():
        assert torch.equal(module.weight[:2], weights["weight"][:2])
    assert isinstance(module.weight, torch.nn.Parameter)
    assert module.weight.loader == 3  # type: ignore[attr-defined]
    assert same(copy_of(module), weights)


def test_a_buffer_that_cannot_be_written_from_the_start_takes_versions(make: Make) -> None:
    module = Counting()
    put_what_cannot_be_written(module)
    receiver = Receiver(make(module))
    for number in (1, 2):
        weights = drawn(Counting(), number)
        install(receiver, full(weights, number))
        assert same(copy_of(module), weights)


def test_a_buffer_of_another_shape_than_was_verified_fails_the_commit_and_nothing_changes(make: Make) -> None:
    module = Counting()
    receiver = Receiver(make(module))
    verified(receiver, full(drawn(Counting(), 1), 1))
    module.cur = torch.zeros(4)
    before = copy_of(module)
    with pytest.raises(CommitFailed, match="another 'cur'"):
        receiver.commit()
    assert same(copy_of(module), before)
    assert not receiver.installed().dirty


@pytest.mark.parametrize("step", STEPS)
def test_a_difference_is_written_to_what_it_was_verified_for(step: Callable[[Any], None]) -> None:
    module = Counting(step)
    receiver = Receiver(InPlace(module))
    old = drawn(Counting(), 1)
    install(receiver, full(old, 1))
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor[0, 0] += 1
    verified(receiver, delta(old, new, 2, 1))
    forward(receiver)
    receiver.commit()
    assert same(copy_of(module), new)


def put_a_row_of_the_weight(module: Any) -> None:
    module.cur = module.weight.detach()[:2]


class Rows(Counting):
    """Has a weight behind its buffers, too."""

    def __init__(self) -> None:
        super().__init__(put_a_row_of_the_weight)
        self.cur = torch.zeros(2, 4)
        self.behind = Counting()


def test_a_buffer_that_lies_in_a_weight_takes_values_of_its_own(make: Make) -> None:
    module = Rows()
    module()
    module.behind.cur = module.behind.weight.detach().T.contiguous().T  # not in it
    module.behind.prev = module.behind.weight.detach().as_strided((3, 4), (1, 3))
    receiver = Receiver(make(module))
    weights = drawn(module, 1)
    install(receiver, full(weights, 1))
    assert same(copy_of(module), weights)
    install(receiver, full(drawn(module, 2), 2))
    assert same(copy_of(module), drawn(module, 2))


def test_a_difference_leaves_a_buffer_that_lies_in_a_weight_as_it_was(make: Make) -> None:
    module = Rows()
    receiver = Receiver(make(module))
    weights = drawn(module, 1)
    weights["cur"] = weights["weight"][:2].clone()
    install(receiver, full(weights, 1))
    module()
    changed = {name: one.clone() for name, one in weights.items()}
    changed["weight"][0, 0] += 1
    install(receiver, delta(weights, changed, 2, 1))
    assert same(copy_of(module), changed)
    module()
    changed["cur"], changed["weight"] = changed["weight"][:2].clone(), changed["weight"].clone()
    found = {name: one.clone() for name, one in changed.items()}
    found["cur"][1, 1] += 1
    install(receiver, full(changed, 3))
    module()
    install(receiver, delta(changed, found, 4, 3))
    assert same(copy_of(module), found)
