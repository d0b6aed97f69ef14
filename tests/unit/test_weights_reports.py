"""Replicas whose calls never raise (as in vLLM's workers): the trainer hears every step of each, over any transport."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from transfer_queue.errors import (
    DeadlineExceeded,
    InternalError,
    NotSupported,
    ServiceUnavailable,
    TransferQueueError,
    UnknownTensor,
    VersionGone,
)
from transfer_queue.weights import InPlace, Receiver, StateDictSource
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.base import Engine
from transfer_queue.weights.transport.ranks import RankFault
from transfer_queue.weights.transport.reports import expect_not_silent
from transfer_queue.weights.transport.trainer import TrainerEngine

TRANSPORTS = ["shm", "tcp", "disk"]


class Silent:
    """A client of engines that record; it has vLLM's labels. `deaf`: engines whose calls get lost."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        self.deaf: list[Engine] = []
        self.label = "default"
        self.calls: list[str] = []

    def silent_workers(self) -> int:
        return len(self.engines)

    def get_weight_version(self) -> str:
        return self.label

    def update_weight_version(self, new_version: str) -> None:
        self.label = new_version

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")
        self.label = weight_version or self.label

    def _all(self, name: str, *args: Any) -> None:
        self.calls.append(name)
        for engine in self.engines:
            if engine not in self.deaf:
                getattr(engine, name)(*args)


def drawn(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 3), value), "bias": torch.full((3,), value)}


def replica(transport: str, rank: int = 0) -> Engine:
    return registry.engine(transport)(Receiver(InPlace(torch.nn.Linear(3, 3))), rank=rank, on_fault="record")


def value(engine: Engine) -> float:
    with engine.receiver.reading() as live:
        return float(live.module.state_dict()["bias"][0])


class Group:
    """A trainer and its replicas, all with rank 0, as workers of different servers are."""

    def __init__(self, transport: str, folder: Path, num: int, **info: Any) -> None:
        self.weights = drawn(1.0)
        self.engines = [replica(transport) for _ in range(num)]
        self.client = Silent(*self.engines)
        if transport == "disk":
            info["folder"] = str(folder)
        self.trainer: TrainerEngine = registry.trainer(transport).trainer_init(
            info, client=self.client, source=StateDictSource(self.weights)
        )

    def send(self, number: float, deadline_s: float = 20) -> int:
        for tensor in self.weights.values():
            tensor.fill_(number)
        return self.trainer.send_weights(deadline_s=deadline_s).version

    def close(self) -> None:
        for engine in self.engines:
            engine.shutdown()
        self.trainer.shutdown()


@pytest.fixture(params=TRANSPORTS)
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = Group(request.param, tmp_path, 2)
    yield made
    made.close()


def test_faults_of_any_replica_reach_the_trainer(group: Group) -> None:
    assert group.send(2.0) == 1
    assert group.client.label == "1"
    assert group.client.calls[-1] == "reset"
    group.engines[0].receiver._target._module.register_buffer("more", torch.zeros(1))  # type: ignore[attr-defined]
    with pytest.raises(TransferQueueError, match="rank 0"):
        group.send(3.0)
    assert [value(engine) for engine in group.engines] == [2.0, 2.0]
    assert group.client.label == "1"
    del group.engines[0].receiver._target._module.more  # type: ignore[attr-defined]
    assert group.send(4.0) == 3
    assert [value(engine) for engine in group.engines] == [4.0, 4.0]


def test_a_fault_whose_text_is_too_long_for_a_message_is_heard(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(staged: Any) -> Any:
        raise RuntimeError("the reason " + "x" * 100_000 + "\udcff the end")

    monkeypatch.setattr(group.engines[0].receiver._target, "prepare", refuse)
    with pytest.raises(InternalError, match=r"the reason x+ \.\.\. \d+ characters \.\.\. x+.* the end") as raised:
        group.send(3.0)
    assert len(str(raised.value)) < 5000


def test_what_a_rank_or_a_server_says_of_a_fault_fits_into_a_message() -> None:
    error = InternalError("begin " + "x" * 100_000 + " end")
    fault = RankFault.of(error)
    assert (len(fault.text) < 5000, fault.text[:7], fault.text[-5:]) == (True, "begin x", "x end")
    assert RankFault.of(InternalError("short")).text == "short"


def test_a_replica_that_does_not_report_is_waited_for_until_the_deadline(group: Group) -> None:
    group.send(2.0)
    group.client.deaf = group.engines[1:]
    with pytest.raises(DeadlineExceeded, match="1 of 2 workers"):
        group.send(3.0, deadline_s=0.5)
    assert [value(engine) for engine in group.engines] == [2.0, 2.0]
    group.client.deaf = []
    group.send(4.0)
    assert [value(engine) for engine in group.engines] == [4.0, 4.0]


def test_a_label_taken_without_the_weights_is_given_back(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    group.send(2.0)

    def refuse(*_: object) -> None:
        raise ServiceUnavailable("the test wants it")

    with monkeypatch.context() as patch:
        for engine in group.engines:
            patch.setattr(engine.receiver, "commit", refuse)
        with pytest.raises(TransferQueueError):
            group.send(3.0, deadline_s=2)
    assert group.client.label == "1"
    with monkeypatch.context() as patch:
        patch.setattr(group.engines[1].receiver, "commit", refuse)
        with pytest.raises(TransferQueueError):
            group.send(4.0, deadline_s=2)
    assert group.client.label == "unknown"
    group.send(5.0)
    assert group.client.label == "4"
    assert [value(engine) for engine in group.engines] == [5.0, 5.0]


def test_nothing_is_asked_of_workers_that_may_have_no_update_open(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses calls out of order, and refusals put its workers out of step; `init` is never refused."""
    group.send(2.0)
    before = len(group.client.calls)

    def lost(*_: object) -> None:
        group.client.calls.append("lost")
        raise ServiceUnavailable("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(group.client, "start_weight_update", lost)
        with pytest.raises(ServiceUnavailable):
            group.send(3.0)
    assert group.client.calls[before:] == ["lost"]
    group.send(4.0)
    assert group.client.calls[before + 1] == "init_transfer_engine"
    assert [value(engine) for engine in group.engines] == [4.0, 4.0]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_late_replica_joins_also_after_differences(transport: str, tmp_path: Path) -> None:
    group = Group(transport, tmp_path, 1, anchor_every=5)
    late = replica(transport)
    try:
        with pytest.raises(VersionGone):
            group.trainer.join(Silent(late), deadline_s=20)
        group.send(2.0)
        group.weights["bias"][0] = 7.0
        assert group.trainer.send_weights(deadline_s=20).kind == "delta"
        group.weights["bias"][0] = 9.0  # trained on since
        client = Silent(late)
        assert group.trainer.join(client, deadline_s=20) == 2
        assert (value(late), client.label) == (7.0, "2")
        assert group.trainer.send_weights(deadline_s=20).version == 3
        assert (value(late), value(group.engines[0])) == (7.0, 9.0)
    finally:
        late.shutdown()
        group.close()


def test_the_newest_version_is_taken_without_a_trainer(tmp_path: Path) -> None:
    group = Group("disk", tmp_path, 1)
    group.send(6.0)
    group.close()
    late = replica("disk")
    late.init_transfer_engine({"folder": str(tmp_path)})
    late.start_weight_update()
    late.update_weights({"newest": True, "timeout_s": 20})
    late.finish_weight_update()
    assert (value(late), late.outcome.version, late.outcome.code) == (6.0, 1, "")


def test_an_unknown_tensor_is_reported(tmp_path: Path) -> None:
    weights = {**drawn(1.0), "surplus": torch.zeros(1)}
    engine = replica("shm")
    trainer = registry.trainer("shm").trainer_init({}, client=Silent(engine), source=StateDictSource(weights))
    with pytest.raises(UnknownTensor):
        trainer.send_weights(deadline_s=20)
    engine.shutdown()
    trainer.shutdown()


def test_a_server_that_only_reports_is_refused_where_nobody_waits_for_reports() -> None:
    engine = replica("shm")
    with pytest.raises(NotSupported, match="fleet"):
        expect_not_silent(Silent(engine))
    expect_not_silent(Silent())
    engine.shutdown()
