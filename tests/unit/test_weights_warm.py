"""Memory for versions is made when trainer and receivers meet, not by the first updates."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from test_weights_sources import Direct

from transfer_queue.errors import ShapeMismatch
from transfer_queue.weights import Control, InPlace, ModuleSource, Receiver, Swap
from transfer_queue.weights.fleet import Fleet
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


def test_what_the_kernel_may_take_stays_beyond_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's share of a large model: each update wrote into fresh memory."""
    if not tensor_memory._pool.lends_idle:
        pytest.skip("without huge pages nothing is lent to the kernel")
    tensor_memory._pool.clear()
    sizes = [tensor_memory.KEEP_NBYTES * 3 // 4] * 2
    held = [tensor_memory.room(nbytes) for nbytes in sizes]  # never touched, so it takes no memory here
    mapped = counted(monkeypatch, tensor_memory._pool, "_map")
    del held
    held = [tensor_memory.room(nbytes) for nbytes in sizes]
    assert not mapped
    del held
    tensor_memory._pool.clear()


def test_a_child_that_is_forked_amid_an_allocation_and_a_copy_makes_its_own() -> None:
    held, forked = threading.Event(), threading.Event()

    def amid() -> None:
        with tensor_memory._pool._lock, tensor_memory._mover._lock:
            held.set()
            forked.wait(DEADLINE_S)

    other = threading.Thread(target=amid)
    other.start()
    held.wait(DEADLINE_S)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(DEADLINE_S))
        tensor_memory.write(tensor_memory.room(8 << 20), tensor_memory.room(8 << 20))
        os._exit(0)
    forked.set()
    other.join()
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture(scope="module")
def copier() -> None:
    """The thread that copies beside others is started; it lives as long as the process."""
    tensor_memory.write(torch.empty(8 << 20, dtype=torch.uint8), torch.zeros(8 << 20, dtype=torch.uint8))


def is_reused(monkeypatch: pytest.MonkeyPatch, step: Callable[[], Any]) -> bool:
    """Whether six more steps after six map no memory."""
    for _ in range(6):
        step()
    mapped = counted(monkeypatch, tensor_memory._pool, "_map")
    for _ in range(6):
        step()
    return not mapped


@pytest.mark.usefixtures("copier", "no_collections")
@pytest.mark.parametrize("info", [{}, {"anchor_every": 3}])
@pytest.mark.parametrize("target", [Swap, InPlace])
def test_the_memory_of_versions_goes_round_without_a_collection(
    monkeypatch: pytest.MonkeyPatch, target: Callable[[torch.nn.Module], Target], info: dict[str, Any]
) -> None:
    with meeting("tcp", target(model()), **info) as send:
        assert is_reused(monkeypatch, send)


class Fickle(ModuleSource):
    """Its tensors have the shapes of the model, unless they are to be `wrong`."""

    wrong = False

    def specs(self) -> Any:
        return [one._replace(shape=(*one.shape, 1)) if self.wrong else one for one in super().specs()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, one.unsqueeze(-1) if self.wrong else one) for name, one in super().tensors())


@pytest.mark.usefixtures("copier", "no_collections")
def test_the_memory_of_a_failed_update_goes_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, source = Receiver(Swap(model())), Fickle(model())
    engine = registry.engine("tcp")(receiver)
    fleet = Fleet({"a": Control(engine, receiver)})
    trainer = registry.trainer("tcp").trainer_init({"anchor_every": 3}, client=fleet, source=source)

    def both() -> None:
        for source.wrong in (True, False):
            with pytest.raises(ShapeMismatch) if source.wrong else nullcontext():
                trainer.send_weights(deadline_s=DEADLINE_S)

    try:
        assert is_reused(monkeypatch, both)
    finally:
        trainer.shutdown()
        fleet.close()
        engine.shutdown()


@pytest.mark.parametrize(("name", "maker"), [("tcp", (tcp, "warm")), ("shm", (shm, "Memory"))])
def test_memory_that_cannot_be_made_leaves_no_server(
    monkeypatch: pytest.MonkeyPatch, name: str, maker: tuple[Any, str]
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("as much as that there is not")

    monkeypatch.setattr(*maker, fail)
    with pytest.raises(MemoryError), meeting(name, Swap(model())):
        pass
    assert not [one for one in threading.enumerate() if one.name.startswith("tq-weights-serve")]
