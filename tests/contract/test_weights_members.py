"""What a fleet may ask of a server, whatever it is: a `Control` of this process, a server of ours over HTTP, or one
with vLLM's routes and silent workers. And who owns an update, a pause, a number."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import until
from fleets import Site, Source, expected
from starlette.responses import JSONResponse
from weights import Net, copy_of, root

from transfer_queue.errors import (
    GenerationPaused,
    InvalidInput,
    NotInitialized,
    NotOpen,
    ProtocolError,
    ServiceUnavailable,
    StaleVersion,
    TransferQueueError,
    UpdateInProgress,
    WrongEpoch,
)
from transfer_queue.weights import Control, Gate, InPlace, Receiver, StateDictSource, VersionInfo
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient, control_app
from transfer_queue.weights.http.serving import HttpServer
from transfer_queue.weights.receive.receiver import AdapterInfo
from transfer_queue.weights.receive.status import OpenUpdate, ServerStatus, decode, encode
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.clients import Member
from transfer_queue.weights.version.spans import Spans

TOKEN, SEND_S = "t", 20.0
CALLS = [name for name in dir(Member) if not name.startswith("_")]


class Vllm:
    """An app with vLLM's routes, and none of ours."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/tqw"):
            await JSONResponse({"detail": "Not Found"}, 404)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class Kind:
    """One server, and the member through which it is reached."""

    def __init__(self, name: str, over: str) -> None:
        self.module, self.gate = Net(), Gate()
        self.receiver = Receiver(InPlace(self.module), adapter=lambda tensors, manifest: None)
        self.engine = registry.engine("shm")(self.receiver, on_fault="record" if name == "vllm" else "raise")
        self.control = Control(self.engine, self.receiver, generation=self.gate)
        self.member: Any = self.control
        self.server: HttpServer | None = None
        if over == "http":
            app = control_app(self.control, TOKEN)
            self.server = HttpServer(Vllm(app) if name == "vllm" else app, "127.0.0.1", 0, TOKEN)
            self.member = WeightSyncClient(self.server.url, TOKEN)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.engine.shutdown()


KINDS = {"control": "process", "http": "http", "vllm": "http"}


@pytest.fixture
def made() -> Iterator[Callable[[str], Kind]]:
    found: list[Kind] = []

    def start(name: str) -> Kind:
        found.append(Kind(name, KINDS[name]))
        return found[-1]

    yield start
    for one in found:
        one.close()


@pytest.fixture
def kind(request: pytest.FixtureRequest, made: Callable[[str], Kind]) -> Kind:
    return made(request.param)


every = pytest.mark.parametrize("kind", list(KINDS), indirect=True)
ours = pytest.mark.parametrize("kind", ["control", "http"], indirect=True)


def trainer_of(client: Any, seed: int = 1, **info: Any) -> Any:
    source = Source()
    source.seed = seed
    return registry.trainer("shm").trainer_init(info, client=client, source=source)


# the member


@every
def test_it_has_every_call_of_the_protocol(kind: Kind) -> None:
    for name in CALLS:
        wanted = list(inspect.signature(getattr(Member, name)).parameters)[1:]
        found = list(inspect.signature(getattr(kind.member, name)).parameters)
        assert found[: len(wanted)] == wanted or name == "abort_weight_update", name


@every
def test_a_fleet_brings_it_versions_and_pauses(kind: Kind) -> None:
    fleet = Fleet({"one": kind.member}, pause="keep", heartbeat_s=0.05)
    trainer = trainer_of(fleet)
    for seed in (1, 2):
        trainer._source.seed = seed
        trainer.send_weights(deadline_s=SEND_S)
        assert fleet.ready() == ["one"]
        assert root(copy_of(kind.module)) == expected(seed)
    assert not kind.gate.is_paused()
    status = kind.member.status()
    assert isinstance(status, ServerStatus)
    assert (status.label, status.paused) == ("2", False)
    fleet.close()
    trainer.shutdown()


@ours
def test_its_status_says_all_there_is_to_know(kind: Kind) -> None:
    trainer = trainer_of(kind.member)
    trainer.send_weights(deadline_s=SEND_S)
    trainer.send_adapter("x", StateDictSource({"a": torch.ones(2)}), {}, deadline_s=SEND_S)
    kind.member.start_weight_update()
    kind.member.pause_generation("keep", True, trainer.run_id, 60.0)
    status = kind.member.status()
    assert status.installed == kind.receiver.installed()
    assert (status.run_id, status.paused_by) == (trainer.run_id, trainer.run_id)
    assert (status.installed.version, list(status.installed.adapters), status.paused) == (1, ["x"], True)
    assert status.update == OpenUpdate(trainer.run_id, 3, "started", status.update.left_s)
    assert 500 < status.update.left_s < 600
    assert status.life == kind.control.status().life != ""
    kind.member.abort_weight_update()
    kind.member.resume_generation()
    assert (kind.member.status().update, kind.member.status().paused_by) == (None, "")
    trainer.shutdown()


def test_a_status_is_read_as_it_was_written_and_from_earlier_releases() -> None:
    info = VersionInfo(3, "run", "r", "l", {"x": AdapterInfo(1, "run", "r", None)})
    status = ServerStatus(installed=info, label="l", update=OpenUpdate("run", 4, "ready", None), life="z")
    body = encode(status)
    assert decode(body) == status
    assert (body["updating"], body["installed"]["epoch"], body["installed"]["adapters"]["x"]["epoch"]) == (
        True, "run", "run",
    )  # fmt: skip
    earlier = {
        "installed": {"version": 3, "epoch": "run", "root": "r", "dirty": False},
        "label": "l",
        "updating": False,
    }
    found = decode(earlier).installed
    assert found is not None
    assert (found.version, found.run_id, found.epoch) == (3, "run", "run")
    for nonsense in (
        None,
        [],
        {"label": 3},
        {"label": "x", "installed": 3},
        {"label": "x", "installed": {"adapters": 1}},
    ):
        with pytest.raises(ProtocolError):
            decode(nonsense)


def test_the_first_adapter_that_is_sent_to_an_http_fleet_fences_nobody(made: Callable[[str], Kind]) -> None:
    one = made("http")
    fleet = Fleet({"one": one.member}, heartbeat_s=0.02)
    trainer = trainer_of(fleet)
    trainer.send_weights(deadline_s=SEND_S)
    trainer.send_adapter("x", StateDictSource({"a": torch.ones(2)}), {}, deadline_s=SEND_S)
    heard = [one.heard_s for one in fleet.status()]
    until(lambda: [one.heard_s for one in fleet.status()] != heard, "a heartbeat")
    fleet.wait_ready(["one"], 5)
    trainer.send_weights(deadline_s=SEND_S)
    assert fleet.ready() == ["one"]
    assert not one.gate.is_paused()
    fleet.close()
    trainer.shutdown()


# whose update it is


@ours
def test_a_new_run_takes_over_an_open_update_and_the_old_one_is_told_who(kind: Kind) -> None:
    old = trainer_of(kind.member, run_id="old")
    kind.member.start_weight_update()
    new = trainer_of(kind.member, run_id="new")
    assert kind.member.status().update is None
    with pytest.raises(WrongEpoch, match="'new' took over"):
        kind.member.update_weights({"version": 1, "run_id": "old"})
    with pytest.raises(WrongEpoch, match="'new' took over"):
        kind.member.init_weight_transfer_engine({**old.introduction(0)})
    new.send_weights(deadline_s=SEND_S)
    with pytest.raises(WrongEpoch, match="'new' took over"):
        old.send_weights(deadline_s=SEND_S)
    assert root(copy_of(kind.module)) == expected(1)
    old.shutdown()
    new.shutdown()


@ours
def test_an_info_of_another_run_harms_nobodys_update(kind: Kind) -> None:
    trainer = trainer_of(kind.member)
    kind.member.start_weight_update()
    open_update = kind.member.status().update
    for key in ("run_id", "epoch"):
        with pytest.raises(NotInitialized, match="not introduced"):
            kind.member.update_weights({"version": 7, key: "nobody"})
    assert kind.member.status().update.update_id == open_update.update_id
    trainer.send_weights(deadline_s=SEND_S)
    assert kind.member.status().installed.version == 1
    trainer.shutdown()


@ours
def test_an_introduction_by_the_same_run_ends_what_it_left(kind: Kind) -> None:
    trainer = trainer_of(kind.member)
    for _ in range(2):
        kind.member.start_weight_update()
        with pytest.raises(UpdateInProgress):
            kind.member.start_weight_update()
        kind.member.init_weight_transfer_engine(trainer.introduction(0))
        kind.member.init_weight_transfer_engine(trainer.introduction(0))
        assert kind.member.status().update is None
        with pytest.raises(NotOpen):
            kind.member.finish_weight_update()
    trainer.shutdown()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_fetch_from_a_trainer_that_does_not_answer_is_woken_up(transport: str) -> None:
    receiver = Receiver(InPlace(Net()))
    engine = registry.engine(transport)(receiver)
    control = Control(engine, receiver)
    asked, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> Any:
        asked.set()
        assert go_on.wait(30)
        raise ServiceUnavailable("too late")

    old = registry.trainer(transport).trainer_init({}, client=control, source=Source())
    old.store.bucket = old.store.lend = hang  # type: ignore[attr-defined]
    ended: list[Exception] = []

    def send() -> None:
        try:
            old.send_weights(deadline_s=60)
        except TransferQueueError as error:
            ended.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    assert asked.wait(20)
    begun = time.monotonic()
    new = registry.trainer(transport).trainer_init({}, client=control, source=Source())
    assert time.monotonic() - begun < 5
    until(lambda: len(ended) == 1, "the end of the old trainer's update")
    assert isinstance(ended[0], WrongEpoch)
    new.send_weights(deadline_s=SEND_S)
    assert control.status().installed.run_id == new.run_id  # type: ignore[union-attr]
    go_on.set()
    sending.join()
    for one in (old, new, engine):
        one.shutdown()


def test_a_client_tells_servers_of_ours_whose_calls_these_are(made: Callable[[str], Kind]) -> None:
    one = made("http")
    assert one.server is not None
    clients = [WeightSyncClient(one.server.url, TOKEN) for _ in range(2)]
    old, new = (trainer_of(client) for client in clients)
    clients[1].start_weight_update()
    for call in (clients[0].start_weight_update, clients[0].finish_weight_update, clients[0].abort_weight_update):
        with pytest.raises(WrongEpoch, match="took over"):
            call()
    assert one.control.status().updating
    old.shutdown()
    new.shutdown()


@ours
def test_an_introduction_that_comes_late_takes_nothing_over(kind: Kind) -> None:
    first = trainer_of(Kept(), run_id="first")
    second = trainer_of(kind.member, run_id="second")
    with pytest.raises(WrongEpoch, match="'second' took over"):
        kind.member.init_weight_transfer_engine(first.introduction(0))
    second.send_weights(deadline_s=SEND_S)
    skewed = {**first.introduction(0), "run_id": "third", "begun": time.time() - 1e6}
    kind.member.init_weight_transfer_engine(skewed)
    assert kind.member.status().run_id == "third"
    first.shutdown()
    second.shutdown()


class Kept:
    """A client whose introduction does not arrive yet."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        del init_info


def test_run_ids_are_known_by_their_older_name_too() -> None:
    receiver = Receiver(InPlace(Net()))
    engine = registry.engine("shm")(receiver)
    control = Control(engine, receiver)
    trainer = trainer_of(control, epoch="monday")
    report = trainer.send_weights(deadline_s=SEND_S)
    assert trainer.epoch == trainer.run_id == report.epoch == report.run_id == "monday"
    assert receiver.installed().epoch == receiver.installed().run_id == "monday"
    info = trainer.update_info(trainer._newest[""], _Long())
    assert info["epoch"] == info["run_id"] == "monday"
    control.start_weight_update()
    control.update_weights({key: value for key, value in info.items() if key != "run_id"})
    control.finish_weight_update()
    spans = Spans()
    spans.add(receiver.installed(), 2)
    assert spans.tag()["weight_epoch"] == "monday"
    assert spans.spans[0].epoch == spans.spans[0].run_id == "monday"
    engine.shutdown()
    trainer.shutdown()


class _Long:
    def left(self) -> float:
        return SEND_S


# numbers


def test_a_number_that_failed_may_be_sent_again() -> None:
    here = Site(1)
    here.send(1)
    assert here.trainer is not None
    here.servers["a"].faults["update_weights"] = ServiceUnavailable("the connection is lost")
    with pytest.raises(TransferQueueError):
        here.trainer.send_weights(7, deadline_s=SEND_S)
    here.source.seed = 2
    assert here.trainer.send_weights(7, deadline_s=SEND_S).version == 7
    assert here.roots() == {"a": expected(2)}
    with pytest.raises(StaleVersion):
        here.trainer.send_weights(7, deadline_s=SEND_S)
    here.close()


# pauses


@ours
def test_a_pause_of_a_trainer_that_died_ends_with_its_lease(kind: Kind) -> None:
    kind.member.pause_generation("keep", True, "run", 0.3)
    assert kind.member.is_paused()
    until(lambda: not kind.gate.is_paused(), "the end of the lease")
    assert kind.member.status().paused_by == ""


@ours
def test_a_new_run_ends_the_pauses_of_the_one_before_and_nobody_elses(kind: Kind) -> None:
    old = trainer_of(kind.member)
    kind.member.pause_generation("keep", True, old.run_id, 60.0)
    new = trainer_of(kind.member)
    assert not kind.gate.is_paused()
    with pytest.raises(WrongEpoch, match="took over"):
        kind.member.pause_generation("keep", True, old.run_id, 60.0)
    kind.member.pause_generation("keep")
    third = trainer_of(kind.member)
    assert kind.gate.is_paused(), "somebody's own pause lasts until it is resumed"
    kind.member.resume_generation()
    for one in (old, new, third):
        one.shutdown()


@ours
def test_a_pause_of_somebody_else_outlasts_those_of_a_fleet(kind: Kind) -> None:
    fleet = Fleet({"one": kind.member}, pause="keep", heartbeat_s=0.05)
    trainer = trainer_of(fleet)
    kind.member.pause_generation("keep")
    trainer.send_weights(deadline_s=SEND_S)
    fleet.wait_ready(["one"], SEND_S)
    assert kind.gate.is_paused()
    kind.member.pause_generation("keep", True, trainer.run_id, 60.0)
    kind.member.resume_generation("")
    assert kind.gate.is_paused(), "its owner's lasts, too"
    kind.member.resume_generation(trainer.run_id)
    assert not kind.gate.is_paused()
    fleet.close()
    trainer.shutdown()


@ours
def test_a_fleet_ends_its_own_pause_beside_one_of_another_name(kind: Kind) -> None:
    fleet = Fleet({"one": kind.member}, pause="keep", heartbeat_s=0.05)
    trainer = trainer_of(fleet)
    trainer.send_weights(deadline_s=SEND_S)
    one = fleet._replicas["one"]
    for owner in ("ops", trainer.run_id):
        kind.member.pause_generation("keep", True, owner, 60.0)
        assert kind.member.status().paused_by == owner
        with one.busy:  # otherwise a look that goes on may find it ready
            fleet.fence(one, "it did not answer")
        fleet.wait_ready(["one"], SEND_S)
        assert (kind.member.status().paused_by, kind.gate.is_paused()) == ("ops", True)
    kind.member.resume_generation("ops")
    assert not kind.gate.is_paused()
    fleet.close()
    trainer.shutdown()


class OlderMember:
    """A member of somebody else, written when `resume_generation` had no owner."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def resume_generation(self) -> None:
        self._control.resume_generation()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)


def test_a_member_whose_resume_takes_no_owner_is_sent_versions_and_joins_late(made: Callable[[str], Kind]) -> None:
    first, late = made("control"), made("control")
    fleet = Fleet({"first": OlderMember(first.control)}, pause="keep", heartbeat_s=0.05)
    trainer = trainer_of(fleet)
    trainer.send_weights(deadline_s=SEND_S)
    fleet.join("late", OlderMember(late.control), wait_s=SEND_S)
    for one in (first, late):
        assert root(copy_of(one.module)) == expected(1)
        assert not one.gate.is_paused()
    fleet.close()
    trainer.shutdown()


@ours
def test_a_lease_that_lapses_ends_that_pause_alone(kind: Kind) -> None:
    kind.member.pause_generation("keep")
    kind.member.pause_generation("keep", True, "run", 0.1)
    until(lambda: kind.member.status().paused_by == "", "the end of the lease")
    assert kind.gate.is_paused()
    kind.member.resume_generation()
    assert not kind.gate.is_paused()


@ours
def test_while_a_stronger_pause_lasts_a_weaker_one_lets_no_requests_in(kind: Kind) -> None:
    kind.member.pause_generation("wait")
    kind.member.pause_generation("keep", True, "run", 60.0)
    with pytest.raises(GenerationPaused), kind.gate.request("late"):
        pass
    kind.member.resume_generation()
    with kind.gate.request("later"):
        pass


@ours
def test_a_weaker_pause_that_lasts_is_as_weak_as_before_the_stronger_one(kind: Kind) -> None:
    kind.member.pause_generation("keep")
    kind.member.pause_generation("abort", True, "run", 60.0)
    kind.member.resume_generation("run")
    with kind.gate.request("queued"):
        assert kind.gate.is_paused()
    kind.member.resume_generation("")
    assert not kind.gate.is_paused()


def test_a_repeated_pause_begins_its_lease_anew(made: Callable[[str], Kind]) -> None:
    one = made("control")
    one.control.pause_generation("keep", True, "run", 0.2)
    one.control.pause_generation("keep", True, "run", 60.0)
    one.control.pause_generation("keep", True, "run", None)
    until(lambda: not [one for one in threading.enumerate() if one.name == "tq-weights-pause"], "the end of timers")
    assert one.gate.is_paused()
    one.control.resume_generation()


def test_several_servers_have_several_statuses(made: Callable[[str], Kind]) -> None:
    found = [made("http"), made("http")]
    urls = [one.server.url for one in found if one.server is not None]
    client = WeightSyncClient(urls, TOKEN)
    assert list(client.statuses()) == urls
    with pytest.raises(InvalidInput, match="statuses"):
        client.status()
