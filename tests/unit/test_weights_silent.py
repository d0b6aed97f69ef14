"""A trainer and a vLLM's workers that were started anew, joined, or left behind: their calls raise nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import until
from vllm_stand_in import Client, Model, config, put_in_place, weights

from transfer_queue.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotSupported,
    ServiceUnavailable,
    TransferQueueError,
)
from transfer_queue.integrations.vllm.adapters import LabeledAdapters
from transfer_queue.weights import Control, Receiver, StateDictSource, Swap
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.transport import registry, reports

SEND_S = 20.0


class Server(Client):
    """As a route or an `LLM` has it: with the label that vLLM keeps. Its worker does one call at a time."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind, self._calling = folder, kind, threading.Lock()
        self.restart()

    def restart(self) -> None:
        from transfer_queue.integrations.vllm import engine as workers

        if "weight_transfer_engine" in vars(self):
            self.weight_transfer_engine.shutdown()
        kind = {"tcp": workers.TcpWorker, "shm": workers.ShmWorker}[self._kind]
        super().__init__(kind(None, config(self._folder), torch.device("cpu"), Model()))
        self.label = "default"

    def init_weight_transfer_engine(self, info: Any) -> None:
        with self._calling:
            super().init_weight_transfer_engine(info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        with self._calling:
            super().finish_weight_update()
        self.label = weight_version or self.label

    def get_weight_version(self) -> str:
        return self.label

    def status(self) -> None:
        raise NotSupported("vLLM has no such route")

    def update_weight_version(self, new_version: str) -> None:
        self.label = new_version

    @property
    def bias(self) -> float:
        return float(self.weight_transfer_engine.model.linear.bias.detach().max())


class Site:
    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.server = Server(folder, kind)
        self.given = weights(2.0)
        self.trainer = self.start({})

    def start(self, info: dict[str, Any]) -> Any:
        return registry.trainer(self.kind).trainer_init(info, client=self.server, source=StateDictSource(self.given))

    def send(self, value: float, deadline_s: float = SEND_S) -> Any:
        self.given["linear.bias"].fill_(value)
        return self.trainer.send_weights(deadline_s=deadline_s)


@pytest.fixture(params=["tcp", "shm"])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    put_in_place(monkeypatch)
    made = Site(tmp_path, request.param)
    yield made
    made.server.weight_transfer_engine.shutdown()
    made.trainer.shutdown()
    vars(made).clear()  # the model's copies lie in mapped memory


@pytest.mark.parametrize("is_silent", [True, False])
def test_servers_that_are_as_they_were_are_introduced_once(site: Site, is_silent: bool) -> None:
    engine = registry.engine(site.kind)(Receiver(Swap(Model())))
    client: Any = site.server if is_silent else Control(engine, engine.receiver)
    told: list[Any] = []
    meet = client.init_weight_transfer_engine

    def noted(info: Any) -> None:
        told.append(info)
        meet(info)

    client.init_weight_transfer_engine = noted
    site.trainer.shutdown()
    site.trainer = registry.trainer(site.kind).trainer_init({}, client=client, source=StateDictSource(site.given))
    for value in (2.0, 3.0, 4.0):
        site.send(value)
    assert len(told) == 1
    engine.shutdown()


def test_a_server_that_was_started_anew_takes_the_next_version(site: Site) -> None:
    site.send(2.0)
    site.server.restart()
    assert site.send(3.0).version == 2
    assert site.server.bias == 3.0


def test_a_server_that_lacks_the_base_since_it_was_started_anew_is_sent_all_of_it(site: Site) -> None:
    site.trainer.shutdown()
    site.trainer = site.start({"anchor_every": 5})
    site.send(2.0)
    assert site.send(3.0).kind == "delta"
    site.server.restart()
    assert site.send(4.0).kind == "full"
    assert site.server.bias == 4.0


def test_a_server_that_was_started_anew_is_sent_the_adapters_that_it_lacks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LabeledAdapters, "prepare", lambda adapters, tensors, manifest: tensors)
    for method in ("__call__", "unload"):
        monkeypatch.setattr(LabeledAdapters, method, lambda *_: None)
    source = StateDictSource({"a": torch.ones(2)})
    site.send(2.0)
    site.trainer.send_adapter("free", source, {}, for_base=False, deadline_s=SEND_S)
    site.server.restart()
    site.send(3.0)
    assert set(site.server.weight_transfer_engine.installed().adapters) == {"free"}
    site.server.restart()
    site.trainer.send_adapter("bound", source, {}, deadline_s=SEND_S)
    assert set(site.server.weight_transfer_engine.installed().adapters) == {"bound", "free"}
    assert site.server.bias == 3.0
    site.server.restart()
    site.send(4.0)
    assert set(site.server.weight_transfer_engine.installed().adapters) == {"free"}


def test_a_server_that_was_joined_takes_the_next_version_too(site: Site) -> None:
    site.send(2.0)
    site.server.restart()
    assert site.trainer.join(site.server, deadline_s=SEND_S) == 1
    assert site.server.bias == 2.0
    assert site.send(3.0).version == 2
    assert site.server.bias == 3.0


def test_a_server_that_does_not_say_what_it_has_takes_the_version_after_the_one_that_it_missed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Server, "get_weight_version")
    site.send(2.0)
    site.server.restart()
    with pytest.raises(DeadlineExceeded):
        site.send(3.0, deadline_s=0.5)
    site.send(4.0)
    assert site.server.bias == 4.0


@pytest.mark.parametrize("trouble", ["stopped", "started anew"])
@pytest.mark.parametrize(
    "call", ["get_weight_version", "start_weight_update", "update_weights", "finish_weight_update"]
)
def test_a_server_in_trouble_in_any_call_has_the_next_version(
    call: str, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(monkeypatch)
    site = Site(tmp_path, "tcp")
    site.send(2.0)
    real, awake = getattr(site.server, call), threading.Event()

    def in_trouble(*args: Any) -> Any:
        delattr(site.server, call)
        if trouble == "stopped":
            assert awake.wait(SEND_S)
        else:
            site.server.restart()
        return real(*args)

    setattr(site.server, call, in_trouble)
    with contextlib.suppress(TransferQueueError, AssertionError):  # vLLM refuses what no session was started for
        site.send(3.0, deadline_s=0.5)
    awake.set()
    site.send(4.0)
    assert site.server.bias == 4.0
    site.server.weight_transfer_engine.shutdown()
    site.trainer.shutdown()


def test_an_update_that_was_started_late_after_the_introduction_is_ended(site: Site) -> None:
    site.send(2.0)
    start, meet = site.server.start_weight_update, site.server.init_weight_transfer_engine
    introduced = threading.Event()

    def start_late() -> None:
        del site.server.start_weight_update  # type: ignore[method-assign]
        assert introduced.wait(SEND_S)
        start()

    def meet_first(info: Any) -> None:
        meet(info)
        introduced.set()

    site.server.start_weight_update = start_late  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded):
        site.send(3.0, deadline_s=0.5)
    site.server.init_weight_transfer_engine = meet_first  # type: ignore[method-assign]
    site.send(4.0)
    assert site.server.bias == 4.0


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_label_that_is_set_late_is_taken_back_where_the_version_was_not_committed(
    site: Site, is_committed: bool
) -> None:
    site.send(2.0)
    finish, go_on = site.server.finish_weight_update, threading.Event()

    def finish_late(weight_version: str | None = None) -> None:
        del site.server.finish_weight_update  # type: ignore[method-assign]
        if is_committed:
            finish()
        assert go_on.wait(SEND_S)
        if not is_committed:
            finish()
        site.server.label = weight_version or ""

    site.server.finish_weight_update = finish_late  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded):
        site.send(3.0, deadline_s=0.5)
    [late] = site.trainer._calls.late()
    session = site.server.weight_transfer_engine._receiver.session
    until(lambda: session is None or session.left_s() <= 0, "the end of the worker's time")
    go_on.set()
    assert late.ended(SEND_S)
    assert (site.server.label, site.server.bias) == (("2", 3.0) if is_committed else ("1", 2.0))
    assert site.send(4.0).version == 3
    assert (site.server.label, site.server.bias) == ("3", 4.0)


def test_an_introduction_that_comes_late_ends_no_update_of_the_next_trainer(site: Site) -> None:
    late = site.trainer.introduction(1)
    new = site.start({})
    start = site.server.start_weight_update

    def start_and_be_late() -> None:
        start()
        site.server.init_weight_transfer_engine(late)

    site.server.start_weight_update = start_and_be_late  # type: ignore[method-assign]
    site.trainer.shutdown()
    site.trainer = new
    assert site.send(3.0).version == 1
    assert site.server.bias == 3.0


def test_a_replica_that_was_started_anew_holds_up_nobody_and_has_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(monkeypatch)
    servers = {name: Server(tmp_path, "tcp") for name in "ab"}
    fleet = Fleet(servers, heartbeat_s=60.0, fence=None)
    given = weights(2.0)
    trainer = registry.trainer("tcp").trainer_init({}, client=fleet, source=StateDictSource(given))
    trainer.send_weights(deadline_s=SEND_S)
    servers["b"].restart()
    given["linear.bias"].fill_(3.0)
    assert trainer.send_weights(deadline_s=SEND_S).update_s < SEND_S / 4
    fleet.wait_ready(["a", "b"], SEND_S)  # where a heartbeat found it first, its own thread brings it up
    assert {name: one.bias for name, one in servers.items()} == {"a": 3.0, "b": 3.0}
    fleet.close()
    for one in servers.values():
        one.weight_transfer_engine.shutdown()
    trainer.shutdown()


@pytest.mark.parametrize("call", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_a_fleet_whose_server_did_a_call_and_answered_too_late_has_the_next_version(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(monkeypatch)
    server: Any = Server(tmp_path, "tcp")
    fleet = Fleet({"a": server}, heartbeat_s=60.0, fence=None)
    given = weights(2.0)
    trainer = registry.trainer("tcp").trainer_init({}, client=fleet, source=StateDictSource(given))
    trainer.send_weights(deadline_s=SEND_S)
    real = getattr(server, call)

    def late(*args: Any) -> None:
        delattr(server, call)
        real(*args)
        raise DeadlineExceeded("its answer came too late")

    setattr(server, call, late)
    with pytest.raises(DeadlineExceeded):
        trainer.send_weights(deadline_s=SEND_S)
    given["linear.bias"].fill_(4.0)
    trainer.send_weights(deadline_s=SEND_S)
    assert server.bias == 4.0
    fleet.close()
    server.weight_transfer_engine.shutdown()
    trainer.shutdown()


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_fleet_that_brings_a_version_to_a_server_hears_when_it_has_ended_or_was_started_anew(
    has_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(monkeypatch)
    monkeypatch.setattr(reports, "LOOK_S", 0.05)
    servers: dict[str, Any] = {name: Server(tmp_path, "tcp") for name in "ab"}
    fleet = Fleet({"a": servers["a"]}, heartbeat_s=0.1, fence=None)
    trainer = registry.trainer("tcp").trainer_init({}, client=fleet, source=StateDictSource(weights(2.0)))
    trainer.send_weights(deadline_s=SEND_S)
    late = servers["b"]
    late.label = "of a life before"
    ended = threading.Event()

    def update(info: Any) -> None:
        del late.update_weights
        late.restart()
        if has_ended:
            late.get_weight_version = lost

    def lost() -> str:
        del late.get_weight_version
        ended.set()
        raise ServiceUnavailable("nobody listens")

    late.update_weights = update
    fleet.join("b", late, wait_s=SEND_S)
    assert (late.bias, late.label, ended.is_set()) == (2.0, "1", has_ended)
    fleet.close()
    for one in servers.values():
        one.weight_transfer_engine.shutdown()
    trainer.shutdown()


def test_a_trainer_meets_servers_that_have_different_versions(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(server: Server) -> str:
        raise InvalidInput("the servers have different versions")

    with monkeypatch.context() as patch:
        patch.setattr(Server, "get_weight_version", differ)
        new = site.start({})
    site.trainer.shutdown()
    site.trainer = new
    site.send(3.0)
    assert site.server.bias == 3.0


def test_a_call_of_a_version_before_that_comes_late_is_no_answer_to_the_meeting(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that no update is open for it, while the trainer waits for what the workers say of the next one."""
    real_update, real_meet, late = site.server.update_weights, site.server.init_weight_transfer_engine, []

    def swallowed(info: Any) -> None:
        monkeypatch.setattr(site.server, "update_weights", real_update)
        late.append(info)

    def meet(info: Any) -> None:
        real_meet(info)
        while late:
            site.server.weight_transfer_engine.update_weights(late.pop())
        server: Any = site.trainer.reports._server
        until(lambda: len(server._outcomes) == 2, "both reports")

    monkeypatch.setattr(site.server, "update_weights", swallowed)
    with pytest.raises(DeadlineExceeded):
        site.send(3.0, deadline_s=0.5)
    monkeypatch.setattr(site.server, "init_weight_transfer_engine", meet)
    site.send(4.0)
    assert not late
    assert site.server.bias == 4.0
