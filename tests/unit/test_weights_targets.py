"""How staged tensors become live: all three modes, all or nothing, dtypes, ties, strides, partial versions."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from weights import Net, Tied, copy_of, delta, drawn, full, install, same

from transfer_queue.errors import (
    CommitFailed,
    DeadlineExceeded,
    Incomplete,
    InvalidInput,
    NotSupported,
    ShapeMismatch,
    UnknownTensor,
)
from transfer_queue.weights import Flip, InPlace, ModuleSource, Receiver, State, Swap
from transfer_queue.weights.receive import stand_ins, targets
from transfer_queue.weights.receive.targets import Target

MODES = {"in place": InPlace, "swap": Swap, "flip": lambda module, **more: Flip(module, type(module)(), **more)}
Make = Callable[..., Target]


@pytest.fixture(params=MODES.values(), ids=MODES)
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def live(receiver: Receiver) -> dict[str, torch.Tensor]:
    with receiver.reading() as found:
        return copy_of(found.module)


def test_a_version_becomes_live(make: Make) -> None:
    receiver = Receiver(make(Net()))
    for version in (1, 2, 3):
        weights = drawn(Net(), version)
        install(receiver, full(weights, version))
        assert same(live(receiver), weights)


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_in_the_middle_changes_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    held = list(module.parameters())  # so `Swap` sets them one by one
    receiver = Receiver(MODES[mode](module, **({"undo": True} if mode == "in place" else {})))
    old, new = drawn(Net(), 1), drawn(Net(), 2)
    install(receiver, full(old, 1))
    good = {targets: ("_put", targets._put), stand_ins: ("point", stand_ins.point)}
    calls = []

    def failing(put: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def step(into: torch.Tensor, tensor: torch.Tensor) -> None:
            calls.append(into)
            if len(calls) == 3:
                raise OSError("the device fell off")
            put(into, tensor)

        return step

    for place, (name, put) in good.items():
        monkeypatch.setattr(place, name, failing(put))
    with pytest.raises(CommitFailed, match="fell off"):
        install(receiver, full(new, 2))
    assert same(live(receiver), old)
    assert (receiver.installed().version, receiver.state) == (1, State.INSTALLED)
    install(receiver, full(new, 2))
    assert same(live(receiver), new)
    assert len(held) == 4


def test_a_copy_that_was_interrupted_is_done_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver(InPlace(Net()))
    old, new, newest = (drawn(Net(), seed) for seed in (1, 2, 3))
    install(receiver, full(old, 1))
    put, calls = targets._put, []

    def interrupted(into: torch.Tensor, tensor: torch.Tensor) -> None:
        calls.append(into)
        if len(calls) == 3:
            raise KeyboardInterrupt
        put(into, tensor)

    monkeypatch.setattr(targets, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        install(receiver, full(new, 2))
    assert (receiver.installed().version, receiver.state) == (2, State.INSTALLED)
    assert same(live(receiver), new)
    install(receiver, delta(new, newest, 3, 2))
    assert same(live(receiver), newest)


def test_a_failure_that_cannot_be_undone_fences_until_a_whole_version(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    receiver = Receiver(InPlace(module, strict=False))
    old, new = drawn(module, 1), drawn(module, 2)
    install(receiver, full(old, 1))
    with monkeypatch.context() as patch:
        patch.setattr(targets, "_put", lambda into, tensor: 1 / 0)
        with pytest.raises(CommitFailed, match="division"):
            install(receiver, full(new, 2))
    assert receiver.state is State.DIRTY
    assert receiver.installed().dirty
    with pytest.raises(CommitFailed, match="mixture"), receiver.reading():
        pass
    with pytest.raises(Incomplete, match="mixture"):
        receiver.open(full({"steps": new["steps"]}, 3).manifest, 1)
    install(receiver, full(old, 1))  # the version that it names, again
    assert same(live(receiver), old)
    assert not receiver.installed().dirty


def test_what_does_not_fit_is_refused_at_once(make: Make) -> None:
    receiver = Receiver(make(Net()))
    weights = drawn(Net(), 1)
    before = live(receiver)
    for error, bad in (
        (UnknownTensor, {**weights, "third": torch.ones(1)}),
        (ShapeMismatch, {**weights, "steps": torch.zeros(1, dtype=torch.int64)}),
        (ShapeMismatch, {**weights, "first.bias": weights["first.bias"].double()}),
        (Incomplete, {"steps": weights["steps"]}),
    ):
        with pytest.raises(error):
            receiver.open(full(bad, 1).manifest, 1)
    assert receiver.state is State.IDLE
    assert same(live(receiver), before)


def test_a_partial_version_leaves_the_rest(make: Make) -> None:
    receiver = Receiver(make(Net(), strict=False))
    first, second = drawn(Net(), 1), drawn(Net(), 2)
    install(receiver, full(first, 1))
    install(receiver, full({"first.bias": second["first.bias"]}, 2))
    assert same(live(receiver), {**first, "first.bias": second["first.bias"]})
    install(receiver, full({"steps": second["steps"]}, 3))
    assert same(live(receiver), {**first, "first.bias": second["first.bias"], "steps": second["steps"]})


def test_what_versions_lack_keeps_the_value_that_the_server_gave_it(make: Make) -> None:
    receiver = Receiver(make(Net(), strict=False))
    for version in (1, 2, 3, 4):
        weights = drawn(Net(), version)
        del weights["steps"]
        install(receiver, full(weights, version))
        with receiver.reading() as found:
            assert found.module.steps == version - 1
            found.module.steps += 1


def test_casting_is_by_choice_and_among_floats(make: Make) -> None:
    weights = drawn(Net(), 1)
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    receiver = Receiver(make(Net(), cast=True))
    install(receiver, full(wide, 1))
    assert same(live(receiver), weights)
    with pytest.raises(ShapeMismatch, match="steps"):
        receiver.open(full({**wide, "steps": weights["steps"].double()}, 2).manifest, 1)


@pytest.mark.parametrize("source_tied", [True, False])
@pytest.mark.parametrize("target_tied", [True, False])
def test_ties_on_either_side(make: Make, source_tied: bool, target_tied: bool) -> None:
    trainer = Tied(source_tied)
    with torch.no_grad():
        trainer.head.weight.copy_(trainer.embed.weight)
    target = make(Tied()) if target_tied else (
        Flip(Tied(False), Tied(False)) if make is MODES["flip"] else make(Tied(False))
    )  # fmt: skip
    receiver = Receiver(target)
    install(receiver, full(ModuleSource(trainer), 1))
    assert same(live(receiver), copy_of(trainer))
    with receiver.reading() as found:
        assert (found.module.head.weight.data_ptr() == found.module.embed.weight.data_ptr()) == target_tied


def test_weights_tied_by_memory_only_stay_tied() -> None:
    module = Tied(False)
    module.head.weight.data = module.embed.weight.data
    weights = {"embed.weight": torch.ones(5, 3)}
    install(Receiver(Swap(module)), full(weights, 1))
    assert torch.equal(module.head.weight, torch.ones(5, 3))
    assert module.head.weight.data_ptr() == module.embed.weight.data_ptr()


def test_different_values_for_a_tied_weight_are_refused(make: Make) -> None:
    weights = {"embed.weight": torch.zeros(5, 3), "head.weight": torch.ones(5, 3)}
    with pytest.raises(ShapeMismatch, match="one tensor for both"):
        Receiver(make(Tied())).open(full(weights, 1).manifest, 1)


@pytest.mark.parametrize("make_target", [InPlace, Swap])
def test_a_model_without_memory_is_refused(make_target: Callable[[torch.nn.Module], Target]) -> None:
    receiver = Receiver(make_target(Net().to("meta")))
    with pytest.raises(NotSupported, match="meta"):
        receiver.open(full(drawn(Net(), 1), 1).manifest, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_lazy_model_that_nobody_has_called_is_refused_with_what_to_do(mode: str) -> None:
    sent = full({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, 1)
    targets_of = {"flip": lambda lazy: Flip(lazy, torch.nn.LazyLinear(2))}
    with pytest.raises(NotSupported, match="lazy: call that once"):
        Receiver(targets_of.get(mode, MODES[mode])(torch.nn.LazyLinear(2))).open(sent.manifest, 1)


def test_in_place_keeps_addresses_and_swap_keeps_parameters() -> None:
    for make, kept in ((InPlace, True), (Swap, False)):
        module = Net()
        parameters = list(module.parameters())
        addresses = [one.data_ptr() for one in parameters]
        install(Receiver(make(module)), full(drawn(module, 1), 1))
        assert [id(one) for one in module.parameters()] == [id(one) for one in parameters]
        assert ([one.data_ptr() for one in parameters] == addresses) == kept
        assert all(one.requires_grad and one.is_leaf for one in parameters)


def test_strides_are_kept(make: Make) -> None:
    class Image(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)

    weights = {"conv.weight": torch.randn(4, 3, 3, 3)}
    receiver = Receiver(make(Image()))
    install(receiver, full(weights, 1))
    assert same(live(receiver), weights)
    with receiver.reading() as found:
        assert found.module.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_flip_does_not_wait_for_readers_but_for_stragglers_in_the_module_to_write() -> None:
    receiver = Receiver(Flip(Net(), Net()))
    states = [drawn(Net(), seed) for seed in range(4)]
    install(receiver, full(states[1], 1))
    with receiver.reading() as old:
        assert install(receiver, full(states[2], 2)).drain_s == 0
        new_version, new = contextvars.Context().run(lambda: (receiver.installed().version, live(receiver)))
        assert (old.tag.version, new_version) == (1, 2)  # another task, or thread
        assert same(copy_of(old.module), states[1])
        assert same(new, states[2])
        with pytest.raises(DeadlineExceeded):
            install(receiver, full(states[3], 3), timeout_s=0.05)
        assert receiver.state is State.INSTALLED
        assert receiver.installed().version == 2
    install(receiver, full(states[3], 3))
    assert same(live(receiver), states[3])


def test_who_reads_within_reading_sees_the_same_version() -> None:
    receiver = Receiver(target := Flip(Net(), Net()))
    install(receiver, full(drawn(Net(), 1), 1))
    with receiver.reading() as outer:
        committing = threading.Thread(target=install, args=(receiver, full(drawn(Net(), 2), 2)))
        committing.start()
        committing.join()
        assert target.tag.version == 2
        with receiver.reading() as inner, receiver.reading() as innermost:
            assert inner == outer == innermost
        context = contextvars.copy_context()  # what a task has that is started here, and goes on
    with receiver.reading() as after:
        assert after.tag.version == receiver.installed().version
    context.run(lambda: _assert_newest(receiver))


def _assert_newest(receiver: Receiver) -> None:
    with receiver.reading() as found:
        assert found.tag.version == receiver.installed().version
    install(receiver, full(drawn(Net(), 3), 3))


def test_generators_of_one_thread_that_have_contexts_of_their_own_do_not_see_each_others_version() -> None:
    receiver = Receiver(Flip(Net(), Net()))

    def request() -> Iterator[int | None]:
        with receiver.reading() as live:
            yield live.tag.version
            yield live.tag.version

    running, found = [], []
    for number in (1, 2):
        install(receiver, full(drawn(Net(), number), number))
        context, generator = contextvars.copy_context(), request()
        running.append((context, generator))
        found.append(context.run(next, generator))
    assert found == [1, 2]
    assert [context.run(next, generator) for context, generator in running] == [1, 2]


def test_flip_wants_two_alike_and_apart() -> None:
    module = Net()
    for spare in (module, Net(4), Tied()):
        with pytest.raises(InvalidInput):
            Flip(module, spare)


class Sharing(torch.nn.Module):
    """Elements of `weight` lie in the same memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


SHARING = {
    "expanded": lambda: Sharing(torch.zeros(1).expand(6)),
    "windows": lambda: Sharing(torch.zeros(4).as_strided((3, 2), (1, 1))),
}


@pytest.mark.parametrize("name", SHARING)
def test_flip_refuses_at_once_a_parameter_whose_elements_share_memory(name: str) -> None:
    make = SHARING[name]
    apart = Sharing(make().weight.detach().clone(memory_format=torch.contiguous_format))
    for modules in ((make(), make()), (make(), apart), (apart, make())):
        with pytest.raises(NotSupported, match="'weight'"):
            Flip(*modules)


def test_flip_refuses_a_version_before_it_comes_where_a_buffer_has_become_one_that_cannot_be_written() -> None:
    modules = [torch.nn.BatchNorm1d(4, affine=False) for _ in range(2)]
    receiver = Receiver(Flip(*modules))
    modules[1].running_mean = torch.ones(1).expand(4)
    with pytest.raises(NotSupported, match="'running_mean'"):
        receiver.open(full(copy_of(modules[0]), 1).manifest, 30)


@pytest.mark.parametrize("name", SHARING)
def test_a_parameter_whose_elements_share_memory_gets_every_value(name: str) -> None:
    module = SHARING[name]()
    weights = {"weight": torch.arange(6.0).reshape(module.weight.shape)}
    receiver = Receiver(InPlace(module))
    install(receiver, full(weights, 1))
    assert same(live(receiver), weights)


@pytest.mark.parametrize("make", [InPlace, Swap])
def test_a_commit_waits_for_readers_until_its_deadline_and_may_be_tried_again(make: Make) -> None:
    receiver = Receiver(make(Net()))
    weights = drawn(Net(), 1)
    version = full(weights, 1)
    entered, leave = threading.Event(), threading.Event()

    def read() -> None:
        with receiver.reading(), receiver.reading():
            entered.set()
            leave.wait(10)

    reader = threading.Thread(target=read)
    reader.start()
    assert entered.wait(10)
    for index in receiver.open(version.manifest, 30):
        receiver.stage(index, version.buckets[index])
    receiver.verify()
    with pytest.raises(DeadlineExceeded, match="2 forward passes"):
        receiver.commit(timeout_s=0.02)
    assert receiver.state is State.READY
    assert receiver.installed().version is None
    leave.set()
    receiver.commit()
    reader.join()
    assert same(live(receiver), weights)


def test_a_thread_that_reads_cannot_commit() -> None:
    receiver = Receiver(InPlace(Net()))
    with receiver.reading(), pytest.raises(InvalidInput, match="reading"):
        install(receiver, full(drawn(Net(), 1), 1))
    assert receiver.state is State.READY
    receiver.commit()


def test_passes_in_threads_of_an_event_loop_let_a_commit_in() -> None:
    receiver = Receiver(Swap(Net()))
    is_over = False

    def forward() -> None:
        with receiver.reading() as found:
            copy_of(found.module)

    async def request() -> None:
        while not is_over:
            await asyncio.to_thread(forward)

    async def main() -> None:
        nonlocal is_over
        tasks = [asyncio.create_task(request()) for _ in range(4)]
        try:
            await asyncio.to_thread(install, receiver, full(drawn(Net(), 1), 1))
        finally:
            is_over = True
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert receiver.installed().version == 1


def test_readers_wait_for_a_writer_until_their_deadline() -> None:
    target = InPlace(Net())
    found: list[BaseException] = []

    def read() -> None:
        try:
            with target.reading(0.02):
                pass
        except DeadlineExceeded as error:
            found.append(error)

    with target.exclusive(1):
        reader = threading.Thread(target=read)
        reader.start()
        reader.join()
    assert len(found) == 1
