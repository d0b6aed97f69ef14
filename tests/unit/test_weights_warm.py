"""Memory for versions is made when trainer and receivers meet, not by the first updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_weights_sources import Direct

from transfer_queue.weights import ModuleSource, Receiver, Swap
from transfer_queue.weights.receive.targets import Target
from transfer_queue.weights.transport import registry, shm, tcp
from transfer_queue.weights.version import tensor_memory

DEADLINE_S = 30.0
WIDTH = 1024  # 4 MiB: what is smaller needs no pool


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))


@contextmanager
def meeting(name: str, target: Target, **info: Any) -> Iterator[Callable[[], Any]]:
    """A trainer and a receiver in this process; gives what sends the next version."""
    engine = registry.engine(name)(Receiver(target))
    source = ModuleSource(model())
    trainer = registry.trainer(name).trainer_init(info, client=Direct(engine), source=source)
    try:
        yield lambda: trainer.send_weights(deadline_s=DEADLINE_S)
    finally:
        engine.shutdown()
        trainer.shutdown()


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> list[int]:
    """The sizes that `name` is called for."""
    found: list[int] = []
    make = getattr(where, name)

    def watched(nbytes: int) -> Any:
        found.append(nbytes)
        return make(nbytes)

    monkeypatch.setattr(where, name, watched)
    return found


@pytest.mark.parametrize(("warm", "num_made"), [(True, 0), (False, 3)])
def test_shared_memory_is_made_at_the_start(monkeypatch: pytest.MonkeyPatch, warm: bool, num_made: int) -> None:
    with meeting("shm", Swap(model()), warm=warm) as send:
        made = counted(monkeypatch, shm, "Memory")
        for _ in range(5):
            send()
        assert len(made) == num_made


def test_memory_for_tcp_is_touched_at_the_start_on_both_sides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[int], int]] = []
    monkeypatch.setattr(tcp, "warm", lambda sizes, times: asked.append((list(sizes), times)))
    engine = registry.engine("tcp")(Receiver(Swap(model())))
    for settings in ({}, {"warm": False}):
        trainer = registry.trainer("tcp").trainer_init(
            {"bucket_nbytes": 1 << 20, **settings}, client=Direct(engine), source=ModuleSource(model())
        )
        engine.init_transfer_engine(trainer.receivers_info())
        trainer.shutdown()
    sizes = [WIDTH * WIDTH * 4, WIDTH * 4, WIDTH * WIDTH * 4, WIDTH * 4]
    assert asked == [(sizes, 3), (sizes, 2), ([], 3), ([], 2)]
    engine.shutdown()


def test_pieces_that_were_made_ready_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_memory._pool.clear()
    tensor_memory.warm([4 << 20] * 3, 2)
    mapped = counted(monkeypatch, tensor_memory._pool, "_map")
    held = [tensor_memory.room(4 << 20) for _ in range(6)]
    assert not mapped
    del held
    tensor_memory._pool.clear()


def test_no_more_is_made_ready_than_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_memory, "KEEP_NBYTES", 16 << 20)
    tensor_memory._pool.clear()
    mapped = counted(monkeypatch, tensor_memory._pool, "_map")
    tensor_memory.warm([4 << 20] * 3, 100)
    assert mapped == [4 << 20] * 4
    tensor_memory._pool.clear()
