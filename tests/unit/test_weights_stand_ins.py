"""`Swap` with a short pause: parameters give way to stand-ins over the new memory, and come back after the pause."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from weights import Net, Tied, copy_of, drawn, full, install, same

from transfer_queue.errors import CommitFailed
from transfer_queue.weights import ModuleSource, Receiver, State, Swap
from transfer_queue.weights.receive.stand_ins import Exchange

GIVEN = torch.arange(8.0)


def exchange(module: torch.nn.Module) -> Exchange:
    """Ready for its pause, with zeros as the new weights."""
    made = Exchange(module, [(one, torch.zeros_like(one)) for one in module.parameters()])
    made.ready()
    return made


def after_the_pause(monkeypatch: pytest.MonkeyPatch, look: Callable[[], object]) -> list[Any]:
    """What `look` finds when readers run again and the parameters are not back in their places yet."""
    found: list[Any] = []
    put_back = Exchange.put_back

    def late(self: Exchange) -> None:
        found.append(look())
        put_back(self)

    monkeypatch.setattr(Exchange, "put_back", late)
    return found


def test_what_only_modules_hold_is_not_set_one_by_one_in_the_pause() -> None:
    assert exchange(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(100)))).num_single == 0
    assert exchange(Tied()).num_single == 0


def held_by_a_list(module: torch.nn.Module) -> object:
    return [module.first.weight]


def held_weakly(module: torch.nn.Module) -> object:
    return weakref.ref(module.first.weight)


def held_with_a_gradient(module: torch.nn.Module) -> object:
    module.first(GIVEN).sum().backward()
    module.first.bias.grad = None
    return None


def held_with_an_attribute(module: torch.nn.Module) -> object:
    module.first.weight.loader = 3
    return None


def held_with_a_hook(module: torch.nn.Module) -> object:
    return module.first.weight.register_hook(lambda grad: grad)


@pytest.mark.parametrize(
    "hold", [held_by_a_list, held_weakly, held_with_a_gradient, held_with_an_attribute, held_with_a_hook]
)
def test_what_somebody_else_looks_at_is_set_one_by_one(hold: Callable[[torch.nn.Module], object]) -> None:
    module = Net()
    holder = hold(module)
    assert exchange(module).num_single == 1
    del holder


def test_the_weights_that_an_lstm_keeps_in_a_list_are_new_as_soon_as_the_pause_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, twin = torch.nn.LSTM(4, 3), torch.nn.LSTM(4, 3)
    receiver, given = Receiver(Swap(module)), torch.randn(2, 1, 4)
    seen = after_the_pause(monkeypatch, lambda: module(given)[0].detach())
    install(receiver, full(copy_of(twin), 1))
    assert torch.equal(seen[0], twin(given)[0])
    assert torch.equal(module(given)[0], twin(given)[0])


def test_readers_see_the_new_weights_as_soon_as_the_pause_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    ids = [id(one) for one in module.parameters()]
    receiver, weights = Receiver(Swap(module)), drawn(Net(), 1)
    seen = after_the_pause(monkeypatch, lambda: copy_of(module))
    install(receiver, full(weights, 1))
    assert same(seen[0], weights)
    assert same(copy_of(module), weights)
    assert [id(one) for one in module.parameters()] == ids


def test_tied_parameters_stay_tied_through_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Tied()
    seen = after_the_pause(monkeypatch, lambda: module.head.weight is module.embed.weight)
    install(Receiver(Swap(module)), tied(3.0))
    assert seen == [True]
    assert module.head.weight is module.embed.weight
    assert module.head.weight.eq(3.0).all()


def tied(value: float) -> Any:
    other = Tied()
    other.embed.weight.data.fill_(value)
    return full(ModuleSource(other), 1)


def test_a_gradient_of_a_pass_that_met_a_stand_in_reaches_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    begun = after_the_pause(monkeypatch, lambda: module.first(GIVEN).sum())
    install(Receiver(Swap(module)), full(drawn(Net(), 1), 1))
    begun.pop().backward()
    assert module.first.weight.grad is not None
    assert torch.equal(module.first.weight.grad, GIVEN.expand(8, 8))


def test_a_parameter_that_was_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module, other = Net(), torch.nn.Parameter(torch.ones(8))
    after_the_pause(monkeypatch, lambda: setattr(module.first, "bias", other))
    install(Receiver(Swap(module)), full(drawn(Net(), 1), 1))
    assert module.first.bias is other


class Breaking(dict[str, Any]):
    """Takes no new value for `weight` until `mended`."""

    mended = False

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "weight" and not self.mended:
            self.mended = True
            raise MemoryError("no room")
        super().__setitem__(name, value)


def test_a_fault_in_the_middle_of_the_pause_leaves_all_old_weights() -> None:
    module = Net()
    module.second._parameters = Breaking(module.second._parameters)
    receiver, old = Receiver(Swap(module)), copy_of(module)
    with pytest.raises(CommitFailed, match="no room"):
        install(receiver, full(drawn(Net(), 1), 1))
    assert same(copy_of(module), old)
    assert receiver.state is State.IDLE
    install(receiver, full(drawn(Net(), 2), 2))
    assert same(copy_of(module), drawn(Net(), 2))


def test_a_parameter_that_was_replaced_since_the_check_fails_the_commit() -> None:
    module = Net()
    receiver, version = Receiver(Swap(module)), full(drawn(Net(), 1), 1)
    for index in receiver.open(version.manifest, 30.0):
        receiver.stage(index, version.buckets[index])
    receiver.verify()
    module.first.bias = torch.nn.Parameter(torch.ones(8))
    weight = copy.deepcopy(module.first.weight)
    with pytest.raises(CommitFailed, match="another 'bias'"):
        receiver.commit()
    assert torch.equal(module.first.weight, weight)


def test_the_old_memory_is_freed_and_no_stand_in_stays() -> None:
    module = Net()
    receiver = Receiver(Swap(module))
    install(receiver, full(drawn(Net(), 1), 1))
    gc.collect()
    before = _num_tensors()
    for version in range(2, 6):
        install(receiver, full(drawn(Net(), version), version))
    gc.collect()
    assert _num_tensors() == before


def _num_tensors() -> int:
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
