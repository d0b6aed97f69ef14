"""Adapters through engines, with the trainer and the receivers in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from engines import Site, answer

from transfer_queue.errors import (
    DigestMismatch,
    InvalidInput,
    ServiceUnavailable,
    StaleBase,
    TransferQueueError,
    VersionGone,
)

ENGINES = ["shm", "tcp", "disk", "collective", "cuda_ipc"]
Start = Callable[..., Site]


@pytest.mark.parametrize("engine", ENGINES)
def test_receivers_add_replace_and_drop_adapters(engine: str, site: Start) -> None:
    here = site(engine)
    with pytest.raises(InvalidInput, match="for_base=False"):
        here.send_adapter("math", 1)
    here.send(1)
    assert here.send_adapter("math", 1).version == 1
    report = here.send_adapter("org/code", 2, for_base=False)
    assert (report.version, report.kind) == (1, "adapter")
    assert here.answers("math") == [answer(1, 1)] * 2
    assert here.answers("org/code") == [answer(1, 2)] * 2
    assert here.answers() == [answer(1)] * 2
    assert here.send_adapter("math", 3).version == 2
    assert here.answers("math") == [answer(1, 3)] * 2
    with pytest.raises(DigestMismatch):
        here.send_adapter("math", 4, fault="corrupt")
    assert here.answers("math") == [answer(1, 3)] * 2
    report = here.send(2)
    assert (report.version, report.outdated) == (2, ("math",))
    for one in here.receivers:
        with pytest.raises(StaleBase):
            one.call("infer", "math")
    assert here.send_adapter("math", 5).version == 4
    assert here.answers("math") == [answer(2, 5)] * 2
    here.remove_adapter("math")
    assert here.send(3).outdated == ()
    assert here.answers("org/code") == [answer(3, 2)] * 2
    assert [set(one.call("installed").adapters) for one in here.receivers] == [{"org/code"}] * 2


@pytest.mark.parametrize("engine", ["shm", "tcp", "disk"])
def test_a_late_receiver_asks_for_the_labels_it_wants(engine: str, site: Start) -> None:
    here = site(engine, num=1, keep=1)
    here.send(1)
    for seed in (1, 2, 3):
        here.send_adapter("math", seed)
    here.send_adapter("code", 4)
    here.remove_adapter("code")
    late = here.receiver(1)
    here.receivers.append(late)
    late.call("init_transfer_engine", here.init_info)
    with pytest.raises(StaleBase):
        late.call("join", {"timeout_s": 5.0, "label": "math"})
    late.call("join", {"timeout_s": 5.0})
    late.call("join", {"timeout_s": 5.0, "label": "math"})
    assert here.answers("math") == [answer(1, 3)] * 2
    late.call("join", {"timeout_s": 5.0, "label": "code"})
    assert set(late.call("installed").adapters) == {"math"}
    with pytest.raises(VersionGone):
        late.call("join", {"timeout_s": 5.0, "label": "unheard_of"})


POINTS = [("packing", "before"), ("update_weights", "underway"), ("finish_weight_update", "before")]


@pytest.mark.parametrize("engine", ["shm", "disk"])
def test_a_trainer_killed_anywhere_leaves_the_old_adapter(engine: str, site: Start) -> None:
    here = site(engine)
    here.send(1)
    here.send_adapter("math", 1)
    for number, point in enumerate(POINTS):

        def hook(name: str, when: str, point: tuple[str, str] = point) -> None:
            if (name, when) == ("update_weights", "before") and point[1] == "underway":
                here.trainer.signal(signal.SIGSTOP)  # type: ignore[union-attr]
            if (name, when) == point:
                here.end_trainer()

        before = here.answers("math")
        with pytest.raises(ServiceUnavailable):
            here.send_adapter("math", 100, fault="packing" if point[0] == "packing" else "", hook=hook)
        assert here.answers("math") == before, point
        here.start_trainer()
        here.send(1)
        assert here.answers("math") == before, point  # the same weights by another trainer
        assert here.send_adapter("math", number + 2).version == 1
        assert here.answers("math") == [answer(1, number + 2)] * 2


@pytest.mark.parametrize("engine", ["shm", "disk"])
def test_a_receiver_killed_in_an_update_fails_it_for_all(engine: str, site: Start) -> None:
    here = site(engine)
    here.send(1)
    here.send_adapter("math", 1)

    def hook(name: str, when: str) -> None:
        if (name, when) == ("update_weights", "underway"):
            here.receivers[1].kill()

    with pytest.raises(TransferQueueError):
        here.send_adapter("math", 2, hook=hook)
    here.receivers.pop()
    assert here.answers("math") == [answer(1, 1)]
    here.send_adapter("math", 3)
    assert here.answers("math") == [answer(1, 3)]
