"""Broadcasts that an interrupt strikes, and meetings that are begun anew while one waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleets import Server, Source, expected

from transfer_queue.errors import WrongEpoch
from transfer_queue.weights.transport import collective, registry
from transfer_queue.weights.transport.deadline import TimedCall
from transfer_queue.weights.transport.trainer import TrainerEngine

Meet = Callable[..., TrainerEngine]


@pytest.fixture(scope="module", autouse=True)
def first_group() -> None:
    """torch keeps the pipe that it makes for the first one."""
    server = Server("collective")
    registry.trainer("collective").trainer_init({"world_size": 2}, client=server, source=Source()).shutdown()
    server.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("collective")
    yield made
    made.stop()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def meet(server: Server, source: Source) -> Iterator[Meet]:
    made: list[TrainerEngine] = []

    def start(**info: Any) -> TrainerEngine:
        trainer = registry.trainer("collective").trainer_init({"world_size": 2, **info}, client=server, source=source)
        made.append(trainer)
        return trainer

    yield start
    for trainer in made:
        trainer.shutdown()


def test_an_update_after_an_interrupt_that_struck_as_the_broadcast_began_is_good(
    server: Server, source: Source, meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(TimedCall[Any]):
        def __init__(self, function: Callable[..., Any], *args: Any, **more: Any) -> None:
            super().__init__(function, *args, **more)
            if function.__name__ == "_send_all":
                monkeypatch.undo()
                raise KeyboardInterrupt

    trainer = meet()
    monkeypatch.setattr(collective, "TimedCall", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.send_weights(deadline_s=20)
    source.seed = 2
    trainer.send_weights(deadline_s=20)
    assert server.root() == expected(2)


def test_a_server_that_waits_for_others_in_a_meeting_goes_to_that_of_the_next_trainer(
    server: Server, meet: Meet
) -> None:
    told, waits = threading.Event(), server.engine._connect

    def tell(info: Any) -> None:
        told.set()
        waits(info)

    server.engine._connect = tell
    first = TimedCall(lambda: meet(world_size=3, timeout_s=3))
    assert told.wait(10)
    meet(timeout_s=20).send_weights(deadline_s=20)
    assert server.root() == expected(0)
    assert first.ended(10)
    with pytest.raises(WrongEpoch):
        first.outcome()
