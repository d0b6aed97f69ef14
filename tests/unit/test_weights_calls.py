"""Calls that a trainer makes to a server, one after the other, and what comes between them or late."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import until
from fleets import SEND_S, Server, Source, expected
from weights import Direct, Net, copy_of, root

from transfer_queue.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidInput,
    NotInitialized,
    ServiceUnavailable,
    WrongEpoch,
)
from transfer_queue.weights import Control, Receiver, StateDictSource, Swap
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient, serve
from transfer_queue.weights.transport import registry

dist: Any = torch.distributed  # its stubs lack the stores


@pytest.fixture(scope="module", autouse=True)
def store() -> None:
    """The first one leaves a pipe, for as long as the process lives."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Pipe(Direct):
    """Does something after one of them, once."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.after_update: Callable[[], object] | None = None
        self.start()

    def start(self) -> None:
        self.module = Net()
        self.engine = registry.engine(self._kind)(Receiver(Swap(self.module)))

    def restart(self) -> None:
        self.engine.shutdown()
        self.start()

    def root(self) -> str:
        return root(copy_of(self.module))

    def update_weights(self, info: Any) -> None:
        super().update_weights(info)
        act, self.after_update = self.after_update, None
        if act is not None:
            act()


class Site:
    def __init__(self, client: Any, kind: str) -> None:
        self.client, self.kind = client, kind
        self.source = Source()
        self.trainers = [self.start()]
        self.send(1)

    def start(self) -> Any:
        info = {"world_size": 2} if self.kind == "collective" else {}
        return registry.trainer(self.kind).trainer_init(info, client=self.client, source=self.source)

    def send(self, seed: int, deadline_s: float = SEND_S, trainer: int = 0) -> Any:
        self.source.seed = seed
        return self.trainers[trainer].send_weights(deadline_s=deadline_s)

    def close(self) -> None:
        for one in self.trainers:
            one.shutdown()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_an_engine_that_was_started_anew_is_introduced_by_the_next_update(kind: str) -> None:
    pipe = Pipe(kind)
    site = Site(pipe, kind)
    pipe.restart()
    site.send(2)
    assert pipe.root() == expected(2)
    pipe.engine.shutdown()
    site.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_an_engine_that_was_started_anew_before_the_commit_has_committed_nothing(kind: str) -> None:
    pipe = Pipe(kind)
    site = Site(pipe, kind)
    pipe.after_update = pipe.restart
    with pytest.raises(NotInitialized):
        site.send(2)
    site.send(3)
    assert pipe.root() == expected(3)
    pipe.engine.shutdown()
    site.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_trainer_hears_who_took_over_between_its_version_and_the_commit(kind: str) -> None:
    pipe = Pipe(kind)
    site = Site(pipe, kind)
    pipe.after_update = lambda: site.trainers.append(site.start())
    with pytest.raises(WrongEpoch, match="took over"):
        site.send(2)
    assert pipe.root() == expected(1)
    site.send(3, trainer=1)
    assert pipe.root() == expected(3)
    pipe.engine.shutdown()
    site.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_server_that_was_started_anew_and_met_a_trainer_of_before_comes_back_to_the_one_that_followed(
    kind: str,
) -> None:
    pipe = Pipe(kind)
    site = Site(pipe, kind)
    site.trainers.append(site.start())
    site.send(2, trainer=1)
    pipe.restart()
    site.send(3)  # it was frozen, and nobody has told it
    with pytest.raises(NotInitialized, match="was not introduced here"):
        site.send(4, trainer=1)
    site.send(4, trainer=1)
    assert pipe.root() == expected(4)
    with pytest.raises(WrongEpoch, match="took over"):
        site.send(5)
    assert pipe.root() == expected(4)
    pipe.engine.shutdown()
    site.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_trainer_hears_of_a_server_that_joined_the_version_before_in_place_of_its_commit(kind: str) -> None:
    pipe = Pipe(kind)
    site = Site(pipe, kind)
    pipe.after_update = lambda: pipe.engine.join(timeout_s=SEND_S)
    with pytest.raises(Aborted, match="was joined here"):
        site.send(2)
    assert pipe.root() == expected(1)
    site.send(3)
    assert pipe.root() == expected(3)
    pipe.engine.shutdown()
    site.close()


def test_a_server_that_is_started_anew_again_while_it_is_brought_up_takes_the_next_adapter() -> None:
    server: Any = Server("tcp")
    site = Site(server, "tcp")
    adapter = StateDictSource({"x": torch.ones(2)})
    server.restart()
    server.faults["finish_weight_update"] = ServiceUnavailable("it ended")
    with pytest.raises(ServiceUnavailable):
        site.trainers[0].send_adapter("a", adapter, {}, deadline_s=SEND_S)
    server.restart()
    site.trainers[0].send_adapter("a", adapter, {}, deadline_s=SEND_S)
    assert (server.root(), list(server.receiver.installed().adapters)) == (expected(1), ["a"])
    server.stop()
    site.close()


def test_an_adapter_goes_to_no_server_without_weights_that_an_introduction_was_lost_to() -> None:
    server: Any = Server("tcp")
    site = Site(server, "tcp")
    adapter = StateDictSource({"x": torch.ones(2)})
    server.restart()
    meet = server.control.init_weight_transfer_engine

    def met(info: Any) -> None:
        del server.control.init_weight_transfer_engine
        meet(info)
        raise ServiceUnavailable("the answer is lost")

    server.control.init_weight_transfer_engine = met
    with pytest.raises(ServiceUnavailable):
        site.trainers[0].send_adapter("a", adapter, {}, for_base=False, deadline_s=SEND_S)
    site.trainers[0].send_adapter("a", adapter, {}, for_base=False, deadline_s=SEND_S)
    assert (server.root(), list(server.receiver.installed().adapters)) == (expected(1), ["a"])
    server.stop()
    site.close()


@pytest.mark.parametrize("is_adapter", [True, False])
def test_a_server_of_several_that_missed_the_removal_of_an_adapter_hears_of_it_with_the_next_update(
    is_adapter: bool,
) -> None:
    servers = [Server("tcp"), Server("tcp")]
    adapter = StateDictSource({"x": torch.ones(2)})
    with serve(servers[0].control, token="t") as one, serve(servers[1].control, token="t") as two:
        site = Site(WeightSyncClient([one.url, two.url], "t"), "tcp")
        trainer = site.trainers[0]
        trainer.send_adapter("a", adapter, {}, for_base=False, deadline_s=SEND_S)
        held = servers[1].control._busy
        with held:
            assert list(trainer.remove_adapter("a", deadline_s=SEND_S).missed) == [two.url]
        if is_adapter:
            trainer.send_adapter("b", adapter, {}, for_base=False, deadline_s=SEND_S)
        else:
            site.send(2)
        assert [list(each.receiver.installed().adapters) for each in servers] == [["b"] * is_adapter] * 2
        site.close()
    for each in servers:
        each.stop()


@pytest.mark.parametrize("kind", ["tcp", "collective"])
def test_a_commit_that_comes_late_meets_no_later_version(kind: str) -> None:
    server: Any = Server(kind)
    site = Site(server, kind)
    introduced, verified = threading.Event(), threading.Event()
    meet, update = server.control.init_weight_transfer_engine, server.control.update_weights

    def wait() -> None:
        del server.hooks["finish_weight_update"]
        assert introduced.wait(SEND_S)
        verified.wait(0.3)  # a trainer that waits for this call sends no other version before it has ended

    def met(info: Any) -> None:
        meet(info)
        introduced.set()

    def updated(info: Any) -> None:
        update(info)
        if introduced.is_set():
            verified.set()

    server.hooks["finish_weight_update"] = wait
    with pytest.raises(DeadlineExceeded):
        site.send(2, deadline_s=0.5)
    server.control.init_weight_transfer_engine = met
    server.control.update_weights = updated
    assert site.send(3).version == 3
    assert (server.root(), server.control.get_weight_version()) == (expected(3), "3")
    server.stop()
    site.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("pause", "freeze"), ("pause", True), ("pause", ["keep"]), ("fence", "freeze"), ("fence", ""), ("min_ready", "1")],
)
def test_a_mode_or_number_that_is_none_is_refused_when_a_fleet_is_made(name: str, value: Any) -> None:
    """Where replicas were told of it, none would ever commit, or be brought up."""
    with pytest.raises(InvalidInput):
        Fleet(**{name: value})


@pytest.mark.parametrize("way", ["a control", "an engine"])
def test_an_update_that_its_trainer_is_interrupted_in_is_no_fault_of_who_takes_it(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is called off there before the version is withdrawn, while it is being taken."""
    pipe = Pipe("tcp")
    client: Any = pipe if way == "an engine" else Control(pipe.engine, pipe.engine.receiver)
    trainer = registry.trainer("tcp").trainer_init({}, client=client, source=StateDictSource(copy_of(Net())))
    find, withdraw, finding, withdrawn = pipe.engine._find, trainer._withdraw, threading.Event(), threading.Event()

    def slow(info: Any, deadline: Any) -> Any:
        session = pipe.engine.receiver.session
        finding.set()
        until(lambda: withdrawn.is_set() or session.end is not None, "an end of the update")
        return find(info, deadline)

    def struck(manifest: Any, info: Any, deadline: Any) -> None:
        trainer._calls.begin(client.update_weights, info)
        assert finding.wait(SEND_S)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_withdraw", lambda manifest: (withdraw(manifest), withdrawn.set()))
        patch.setattr(pipe.engine, "_find", slow)
        patch.setattr(trainer, "_lead", struck)
        with pytest.raises(KeyboardInterrupt):
            trainer.send_weights(deadline_s=SEND_S)
    until(lambda: not trainer._calls.late(), "the ends of the calls")
    assert [one.message for one in caplog.records if one.levelno >= logging.WARNING] == []
    assert pipe.engine.receiver.session is None
    trainer.send_weights(deadline_s=SEND_S)
    trainer.shutdown()
    pipe.engine.shutdown()


@pytest.mark.parametrize("name", ["shm", "tcp", "disk", "collective", "cuda_ipc"])
def test_a_setting_that_a_trainer_does_not_have_is_refused_with_the_nearest_one(name: str) -> None:
    trainer, source = registry.trainer(name), StateDictSource(copy_of(Net()))
    with pytest.raises(InvalidInput, match="no 'anchor_evry'; the nearest is 'anchor_every'"):
        trainer.trainer_init({"anchor_evry": 20}, client=Pipe("tcp"), source=source)
    if name != "tcp":
        with pytest.raises(InvalidInput, match="'world' is 2, and this transport has one rank"):
            trainer.trainer_init({"rank": 0, "world": 2}, client=Pipe("tcp"), source=source)


def test_the_nearest_setting_is_called_by_its_name_of_today() -> None:
    for wrong in ("path", "epoc"):
        with pytest.raises(InvalidInput, match=f"no '{wrong}'; the nearest is 'run_id'"):
            registry.trainer("shm").trainer_init({wrong: "x"}, client=Pipe("shm"), source=StateDictSource({}))


def test_a_trainer_with_one_rank_may_be_told_so() -> None:
    pipe, source = Pipe("shm"), StateDictSource(copy_of(Net()))
    told = {"rank": 0, "world": 1, "epoch": "run"}
    trainer = registry.trainer("shm").trainer_init(told, client=pipe, source=source)
    assert trainer.run_id == "run"
    trainer.shutdown()
    pipe.engine.shutdown()
