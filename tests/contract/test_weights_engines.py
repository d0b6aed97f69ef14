"""What every engine keeps to, with the trainer and the receivers in processes of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from conftest import until
from engines import Site, expected

from transfer_queue.errors import (
    DeadlineExceeded,
    DigestMismatch,
    ServiceUnavailable,
    TransferQueueError,
    UnknownTensor,
)

ENGINES = ["shm", "tcp", "disk", "collective", "cuda_ipc"]
Start = Callable[..., Site]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_receiver_has_each_version_bit_for_bit(engine: str, site: Start) -> None:
    here = site(engine)
    before = here.roots()
    assert expected(1) not in before
    report = here.send(1)
    assert (report.version, report.kind) == (1, "full")
    assert report.root == expected(1) or engine == "cuda_ipc"  # which has digests of its own
    assert here.roots() == [expected(1)] * 2
    fds = []
    for seed in range(2, 7):
        assert here.send(seed).version == seed
        assert here.roots() == [expected(seed)] * 2
        fds.append([one.call("fds") for one in here.receivers])
    assert here.versions() == [6, 6]
    assert fds[-1] == fds[-2], "the trainer's memory stays mapped"


@pytest.mark.parametrize("engine", ["shm", "tcp", "disk"])
def test_an_update_may_be_repeated(engine: str, site: Start) -> None:
    here = site(engine)
    here.send(1)
    one = here.receivers[0]
    for _ in range(2):
        one.call("start_weight_update")
        one.call("update_weights", here.updates[-1])
        one.call("update_weights", here.updates[-1])
        one.call("finish_weight_update")
        one.call("finish_weight_update")
    assert one.call("installed").version == 1
    assert here.roots() == [expected(1)] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fault_leaves_the_old_version_and_the_next_one_is_taken(engine: str, site: Start) -> None:
    here = site(engine)
    here.send(1)
    with pytest.raises(DigestMismatch):
        here.send(2, fault="corrupt")
    assert here.roots() == [expected(1)] * 2
    assert here.send(3).version == 3
    with pytest.raises(UnknownTensor, match="unheard_of"):
        here.send(4, fault="unknown")
    assert (here.roots(), here.versions()) == ([expected(3)] * 2, [3, 3])
    assert here.send(5).version == 5
    assert here.roots() == [expected(5)] * 2


@pytest.mark.parametrize("engine", ["shm", "tcp", "collective"])
def test_differences_and_a_receiver_without_their_base(engine: str, site: Start) -> None:
    here = site(engine, anchor_every=10)
    assert [here.send(seed).kind for seed in (1, 2, 3)] == ["full", "delta", "delta"]
    assert here.roots() == [expected(3)] * 2
    here.receivers[1].kill()
    here.receivers[1] = here.receiver(1)
    if engine != "collective":  # which introduces itself to all again
        here.receivers[1].call("init_transfer_engine", here.init_info)
    assert here.send(4).kind == "full"
    assert here.send(5).kind == "delta"
    assert here.roots() == [expected(5)] * 2


POINTS = [
    ("packing", "before"),
    ("start_weight_update", "before"),
    ("update_weights", "before"),
    ("update_weights", "underway"),
    ("finish_weight_update", "before"),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trainer_killed_anywhere_leaves_the_old_version(engine: str, site: Start) -> None:
    here = site(engine)
    here.send(1)
    for number, point in enumerate(POINTS):
        seed = 100 + number

        def hook(name: str, when: str, point: tuple[str, str] = point) -> None:
            if (name, when) == ("update_weights", "before") and point[1] == "underway":
                here.trainer.signal(signal.SIGSTOP)  # type: ignore[union-attr]
            if (name, when) == point:
                here.end_trainer()

        before = here.roots()
        with pytest.raises(ServiceUnavailable):
            here.send(seed, fault="packing" if point[0] == "packing" else "", hook=hook)
        assert here.roots() == before, point
        here.start_trainer()
        assert here.send(number + 2).version == 1
        assert here.roots() == [expected(number + 2)] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_receiver_killed_in_an_update_fails_it_for_all(engine: str, site: Start) -> None:
    here = site(engine)
    here.send(1)

    def hook(name: str, when: str) -> None:
        if (name, when) == ("update_weights", "underway"):
            here.receivers[1].kill()

    with pytest.raises(TransferQueueError):
        here.send(2, hook=hook, deadline_s=5.0)
    here.receivers.pop()
    assert here.roots() == [expected(1)]
    if here.name == "collective":
        here.info["world_size"] = 2
        here.start_trainer()
    here.send(3)
    assert here.roots() == [expected(3)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_receiver_does_not_hold_the_trainer_beyond_its_deadline(engine: str, site: Start) -> None:
    here = site(engine)
    here.send(1)
    here.patience_s = 1.0
    here.receivers[1].signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        here.send(2, deadline_s=0.5)
    assert time.monotonic() - started < 6
    here.receivers[1].signal(signal.SIGCONT)
    here.patience_s = 20.0
    assert here.roots() == [expected(1)] * 2
    here.start_trainer()
    here.send(3)
    assert here.roots() == [expected(3)] * 2


@pytest.mark.parametrize("engine", ["shm", "tcp", "collective"])
def test_a_frozen_trainer_does_not_hold_receivers_beyond_the_deadline(engine: str, site: Start) -> None:
    here = site(engine)
    here.send(1)
    trainer = here.trainer
    assert trainer is not None
    trainer.signal(signal.SIGSTOP)
    for one in here.receivers:
        one.call("start_weight_update")
        started = time.monotonic()
        with pytest.raises((DeadlineExceeded, ServiceUnavailable)):
            one.call("update_weights", {**here.updates[-1], "version": 2, "timeout_s": 0.3})
        assert time.monotonic() - started < 3
    assert here.roots() == [expected(1)] * 2


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_where_nothing_may_raise_the_trainer_learns_of_faults(engine: str, site: Start) -> None:
    here = site(engine, on_fault="record")
    here.send(1)
    one = here.receivers[0]
    one.call("finish_weight_update")
    one.call("update_weights", {"version": "not a number"})
    assert one.call("outcome").code == "invalid_input"
    one.call("finish_weight_update")
    with pytest.raises(DigestMismatch, match="rank"):
        here.send(2, fault="corrupt")
    assert here.roots() == [expected(1)] * 2
    here.send(3)
    assert here.roots() == [expected(3)] * 2
    assert one.call("outcome").installed


def test_shared_memory_is_lent_until_the_weights_in_it_are_gone(site: Start) -> None:
    here = site("shm", keep=1)
    trainer = here.trainer
    assert trainer is not None
    for seed in range(1, 5):
        here.send(seed)
    until(lambda: trainer.call("lent") == 1, "the return of all but the memory that the swapped module lives in")
    here.receivers[1].kill()
    until(lambda: trainer.call("lent") == 0, "the return of a killed receiver's memory")
    here.end_trainer()
    assert here.receivers[0].call("root") == expected(4)
