"""The rules of updates, versions and checks, without HTTP; in threads and in an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import until
from weights import receiver_of
from weights_inline import INIT_INFO, Inline, TinyServer, infos, model, numbered

from transfer_queue.errors import (
    Aborted,
    CommitFailed,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NotInitialized,
    NotOpen,
    NotSupported,
    ServiceUnavailable,
    UpdateInProgress,
)
from transfer_queue.weights import AsyncControl, Control, Flip, ModuleSource, Receiver, State
from transfer_queue.weights.control.control_async import NUM_THREADS
from transfer_queue.weights.transport import registry

ROOM_S = 20.0


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(8) as found:
        yield found


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def started(**more: Any) -> TinyServer:
    tiny = TinyServer(**more)
    tiny.control.init_weight_transfer_engine(INIT_INFO)
    tiny.control.start_weight_update()
    return tiny


def send(control: Control, number: int, label: str | None = None) -> None:
    for part in infos(numbered(number)):
        control.update_weights(part)
    control.finish_weight_update(label)


def test_an_update_that_is_not_finished_ends_by_itself() -> None:
    clock = Clock()
    control = started(update_timeout_s=10, clock=clock).control
    control.update_weights(infos(numbered(1))[0])
    clock.now = 9.9
    with pytest.raises(UpdateInProgress):
        control.start_weight_update()
    clock.now = 10.0
    assert not control.status().updating
    with pytest.raises(NotOpen):
        control.finish_weight_update("late")
    assert control.status().state is State.IDLE
    control.start_weight_update()
    send(control, 2)
    assert control.get_weight_version() == "2"


class Stuck:
    """The way to a server on which the named call is stuck, once: it goes on when the trainer is here again."""

    def __init__(self, control: Control, stuck: str) -> None:
        self._control, self._stuck = control, stuck
        self._is_here, self._has_started, self._is_over = threading.Event(), threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._control, name)

        def call(*args: Any) -> Any:
            if name == self._stuck:
                self._stuck = ""
                assert self._is_here.wait(ROOM_S)
                self._has_started.wait(0.5)
                try:
                    return inner(*args)
                finally:
                    self._is_over.set()
            if name == "abort_weight_update" or (args and isinstance(args[0], dict) and args[0].get("abort")):
                raise DeadlineExceeded("no answer")
            result = inner(*args)
            if name == "start_weight_update" and self._is_here.is_set():
                self._has_started.set()
                assert self._is_over.wait(ROOM_S)
            if not self._stuck and name == "init_weight_transfer_engine":
                self._is_here.set()
            return result

        return call


@pytest.mark.parametrize("stuck", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_a_call_that_is_stuck_goes_on_before_the_next_update_and_not_in_it(stuck: str) -> None:
    receiver = receiver_of(module := model())
    control = Control(registry.engine("shm")(receiver), receiver)
    way: Any = Stuck(control, stuck)
    trainer = registry.trainer("shm").trainer_init({}, client=way, source=ModuleSource(module))
    with pytest.raises(DeadlineExceeded):
        trainer.send_weights(deadline_s=0.5)
    trainer.send_weights(deadline_s=ROOM_S)
    assert control.get_weight_version() == "2"
    trainer.shutdown()
    control.shutdown_weight_transfer_engine()


def test_the_label_is_that_of_the_bytes() -> None:
    tiny = started()
    control = tiny.control
    assert control.get_weight_version() == "default"
    send(control, 1, "one")
    assert control.get_weight_version() == "one"
    control.start_weight_update()
    send(control, 2)  # without a label: not "one", which were others
    assert control.get_weight_version() == "2"
    control.update_weight_version("two")
    control.start_weight_update()
    with pytest.raises(UpdateInProgress):
        control.update_weight_version("x")
    send(control, 2, "two again")
    assert control.get_weight_version() == "two again"
    version = numbered(3)
    for index in tiny.receiver.open(version.manifest, ROOM_S):  # behind the control's back: a late join
        tiny.receiver.stage(index, version.buckets[index])
    tiny.receiver.verify()
    tiny.receiver.commit()
    assert control.get_weight_version() == "3"


def test_a_finish_that_commits_nothing_gives_no_label() -> None:
    class GivenUp(Inline):
        def finish_weight_update(self) -> None:
            self.receiver.abort("the trainer gave it up")

    receiver = receiver_of(model())
    control = Control(GivenUp(receiver), receiver)
    control.init_weight_transfer_engine(INIT_INFO)
    control.start_weight_update()
    receiver.abort("the trainer gave it up")
    control.finish_weight_update("never")
    assert control.get_weight_version() == "default"
    control.start_weight_update()


def test_during_a_commit_the_label_is_one_of_the_two(threads: ThreadPoolExecutor) -> None:
    asked: list[str] = []

    class Looking(Inline):
        def finish_weight_update(self) -> None:
            asked.append(control.get_weight_version())
            super().finish_weight_update()
            asked.append(control.get_weight_version())

    receiver = receiver_of(model())
    control = Control(Looking(receiver), receiver)
    control.init_weight_transfer_engine(INIT_INFO)
    control.start_weight_update()
    send(control, 1, "one")
    assert asked == ["default", "one"]


def test_a_commit_that_readers_hold_up_may_be_tried_again(threads: ThreadPoolExecutor) -> None:
    class Hasty(Inline):
        def finish_weight_update(self) -> None:
            self.receiver.verify()
            self.receiver.commit(0.01)

    receiver = receiver_of(model())
    control = Control(Hasty(receiver), receiver)
    control.init_weight_transfer_engine(INIT_INFO)
    control.start_weight_update()
    with receiver.reading():
        held = threads.submit(send, control, 1, "one")
        with pytest.raises(DeadlineExceeded):
            held.result(ROOM_S)
        assert control.status().updating
    control.finish_weight_update("one")
    assert control.get_weight_version() == "one"


def test_an_abort_reaches_an_update_that_runs(threads: ThreadPoolExecutor) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Inline):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            inside.set()
            assert go_on.wait(ROOM_S)
            super().update_weights(update_info)

    receiver = receiver_of(model())
    control = Control(Slow(receiver), receiver)
    control.init_weight_transfer_engine(INIT_INFO)
    assert control.abort_weight_update() is False
    control.start_weight_update()
    running = threads.submit(control.update_weights, infos(numbered(1))[0])
    assert inside.wait(ROOM_S)
    for call in (control.start_weight_update, control.finish_weight_update, control.shutdown_weight_transfer_engine):
        with pytest.raises(UpdateInProgress, match="another call"):
            call()
    assert control.abort_weight_update("enough") is True
    go_on.set()
    with pytest.raises(Aborted, match="enough"):
        running.result(ROOM_S)
    assert (control.status().updating, receiver.state) == (False, State.IDLE)
    control.start_weight_update()
    assert control.abort_weight_update() is True
    control.start_weight_update()


def test_an_init_that_failed_has_to_be_repeated() -> None:
    tiny = TinyServer()
    control = tiny.control
    with pytest.raises(NotInitialized):
        control.start_weight_update()
    control.init_weight_transfer_engine(INIT_INFO)
    with pytest.raises(InvalidInput):
        control.init_weight_transfer_engine({})
    with pytest.raises(NotInitialized):
        control.start_weight_update()
    control.shutdown_weight_transfer_engine()
    control.init_weight_transfer_engine(INIT_INFO)
    control.start_weight_update()
    control.init_weight_transfer_engine(INIT_INFO)
    assert not control.status().updating, "whoever introduces itself ends what was left open"


def test_a_reset_makes_the_receiver_dirty_until_a_whole_version() -> None:
    tiny = started(allow_reset=True)
    control, receiver = tiny.control, tiny.receiver
    send(control, 1)
    before = control.compute_weight_checksums()
    receiver.open(numbered(2).manifest, ROOM_S)
    with pytest.raises(UpdateInProgress):
        control.reset_weights()
    receiver.abort("to reset")
    control.reset_weights()
    assert control.compare_weights(before).mismatches == sorted(before)
    assert control.status().installed.dirty
    assert control.status().label == ""
    with pytest.raises(CommitFailed):
        control.get_weight_version()
    with pytest.raises(CommitFailed), receiver.reading():
        pass
    control.start_weight_update()
    send(control, 1)
    assert control.compare_weights(before) == (True, [])
    assert control.get_weight_version() == "1"
    flipped = Receiver(Flip(model(), model()))
    with pytest.raises(NotSupported):
        flipped.scramble(ROOM_S)
    with flipped.inspecting() as module:
        assert len(list(module.parameters())) == 8


def test_updates_by_rank() -> None:
    tiny = started(rank=1)
    parts = infos(numbered(1))
    tiny.control.update_weights({"update_info": parts[0]})  # as vLLM's own methods wrap it
    tiny.control.update_weights(SimpleNamespace(update_info=parts[0]))  # type: ignore[arg-type]
    for part in parts:
        tiny.control.update_weights([{"for": "another rank"}, part])
    tiny.control.finish_weight_update()
    tiny.control.start_weight_update()
    with pytest.raises(InvalidInput, match="1 ranks"):
        tiny.control.update_weights([parts[0]])


def test_the_same_calls_in_an_event_loop() -> None:
    tiny = TinyServer(allow_reset=True)
    control = AsyncControl(tiny.control)

    async def all_of_it() -> None:
        await control.init_weight_transfer_engine(INIT_INFO)
        await control.start_weight_update()
        assert await control.abort_weight_update()
        await control.start_weight_update()
        for part in infos(numbered(1)):
            await control.update_weights(part)
        await control.pause_generation("keep")
        assert await control.is_paused()
        await control.finish_weight_update("one")
        await control.resume_generation()
        assert (await control.status()).label == await control.get_weight_version() == "one"
        await control.update_weight_version("uno")
        sums = await control.compute_weight_checksums()
        await control.reset_weights()
        assert not (await control.compare_weights(sums)).match
        assert await control.abort_requests(["a"]) == 0
        assert await control.get_world_size() == 1
        with pytest.raises(NotSupported):
            await control.start_draft_weight_update()
        await control.shutdown_weight_transfer_engine()

    asyncio.run(all_of_it())


def test_threads_are_limited_and_a_cancelled_call_goes_on() -> None:
    go_on = threading.Event()
    ended: list[int] = []
    control = AsyncControl(TinyServer().control)

    def block() -> None:
        assert go_on.wait(ROOM_S)
        ended.append(1)

    def exit_() -> None:
        raise SystemExit(1)

    async def all_of_it() -> None:
        calls = [asyncio.create_task(control._run(block)) for _ in range(NUM_THREADS)]
        await asyncio.sleep(0)
        with pytest.raises(ServiceUnavailable):
            await control.status()
        calls[0].cancel()
        go_on.set()
        await asyncio.gather(*calls[1:])
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        with pytest.raises(InternalError, match="SystemExit"):
            await control._run(exit_)

    asyncio.run(all_of_it())
    until(lambda: len(ended) == NUM_THREADS, "the end of all")


@pytest.mark.usefixtures("no_collections")
def test_what_a_failed_call_held_goes_without_a_collection() -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    control = AsyncControl(TinyServer().control)

    def fail() -> None:
        staged = torch.zeros(1)
        held.append(weakref.ref(staged))
        raise InvalidInput("no such tensor")

    async def call() -> None:
        with suppress(InvalidInput):
            await control._run(fail)

    asyncio.run(call())
    until(lambda: held[0]() is None, "the end of what was staged")  # its thread may have a step to go


REFUSED: list[Callable[[Control], object]] = [
    lambda control: control.pause_generation(),
    lambda control: control.is_paused(),
    lambda control: control.abort_requests(),
    lambda control: control.reset_weights(),
    lambda control: control.start_draft_weight_update(),
]


@pytest.mark.parametrize("call", REFUSED)
def test_what_a_server_lacks_is_not_supported(call: Callable[[Control], object]) -> None:
    with pytest.raises(NotSupported):
        call(Control(None, receiver_of(model())))
