"""What is left, and whose it is, when something comes between: interrupts, late calls, servers that begin anew."""

from __future__ import annotations

import gc
import math
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from conftest import until
from fleets import Server, Source, expected
from weights import Net, drawn, full, lora, receiver_of, root

from transfer_queue.errors import (
    DeadlineExceeded,
    GenerationPaused,
    InternalError,
    InvalidInput,
    NotSupported,
    StaleVersion,
    TransferQueueError,
    WrongEpoch,
)
from transfer_queue.weights import Control, InPlace, Receiver, StateDictSource, Swap
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient, control_app, serve
from transfer_queue.weights.http.serving import HttpServer
from transfer_queue.weights.receive.gate import Gate
from transfer_queue.weights.receive.pauses import Pauses
from transfer_queue.weights.transport import protocol, registry
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.info import key_of
from transfer_queue.weights.transport.reports import Reports
from transfer_queue.weights.transport.shm import Memory, SharedMemoryStore

TOKEN = "for these tests"


class HttpSide:
    """A server over HTTP that takes adapters; one with the port of another takes its place."""

    def __init__(self, port: int = 0) -> None:
        self.receiver = Receiver(InPlace(Net()), adapter=lambda tensors, manifest: None)
        self.engine = registry.engine("shm")(self.receiver)
        self.control = Control(self.engine, self.receiver, generation=Gate())
        self.http = HttpServer(control_app(self.control, TOKEN), "127.0.0.1", port, TOKEN)

    @property
    def has(self) -> tuple[int | None, list[str]]:
        installed = self.receiver.installed()
        return installed.version, list(installed.adapters)

    def close(self) -> None:
        self.http.close()
        self.engine.shutdown()


class Two:
    """Two such servers and their trainer."""

    def __init__(self, **info: Any) -> None:
        self.one, self.other = HttpSide(), HttpSide()
        self.client = WeightSyncClient([self.one.http.url, self.other.http.url], TOKEN)
        self.source = Source()
        self.source.seed = 1
        self.trainer = registry.trainer("shm").trainer_init(info, client=self.client, source=self.source)

    def send(self, seed: int) -> Any:
        self.source.seed = seed
        return self.trainer.send_weights(deadline_s=20)

    def close(self) -> None:
        self.trainer.shutdown()
        self.one.close()
        self.other.close()


@pytest.mark.parametrize("anchor_every", [1, 5])
def test_a_server_that_began_anew_is_sent_its_adapters(anchor_every: int) -> None:
    """With differences its first try is one that it cannot take."""
    two = Two(anchor_every=anchor_every)
    two.send(1)
    two.trainer.send_adapter("math", StateDictSource(lora(1)), {"r": 2}, for_base=False, deadline_s=20)
    port = int(two.other.http.url.rpartition(":")[2])
    two.other.close()
    two.other = HttpSide(port)
    assert two.send(2).missed == {}
    assert two.one.has == two.other.has == (2, ["math"])
    two.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_the_only_server_of_a_client_that_began_anew_is_sent_what_it_lacks(kind: str) -> None:
    server, source = Server(kind), Source()
    source.seed = 1
    trainer = registry.trainer(kind).trainer_init({}, client=server, source=source)
    adapter = StateDictSource(lora(1))
    trainer.send_weights(deadline_s=20)
    trainer.send_adapter("free", adapter, {"r": 2}, for_base=False, deadline_s=20)
    server.restart()
    source.seed = 2
    trainer.send_weights(deadline_s=20)
    assert set(server.receiver.installed().adapters) == {"free"}
    server.restart()
    trainer.send_adapter("bound", adapter, {"r": 2}, deadline_s=20)
    assert set(server.receiver.installed().adapters) == {"bound", "free"}
    assert server.root() == expected(2)
    server.stop()
    trainer.shutdown()


def test_a_commit_that_a_server_refused_is_missed() -> None:
    two = Two()
    two.send(1)
    finish = two.client.finish_weight_update

    def meanwhile(version: str | None = None) -> None:
        with two.other.control._busy:  # somebody else's call
            finish(version)

    two.client.finish_weight_update = meanwhile  # type: ignore[method-assign]
    assert list(two.send(2).missed) == [two.other.http.url]
    two.client.finish_weight_update = finish  # type: ignore[method-assign]
    assert two.send(3).missed == {}
    assert two.other.has[0] == 3
    two.close()


class Odd(Server):
    """Raises what is no error of ours when it is met."""

    is_odd = False

    def silent_workers(self) -> int:
        if self.is_odd:
            raise KeyError("world_size")
        return 0


def test_a_fleet_survives_what_a_client_raises() -> None:
    servers = {"a": Odd(), "b": Odd()}
    fleet = Fleet(servers, heartbeat_s=0.05, call_timeout_s=5.0)
    source = Source()
    source.seed = 1
    kind = registry.trainer("shm")
    first = kind.trainer_init({}, client=fleet, source=source)
    first.send_weights(deadline_s=20)
    first.shutdown()
    servers["b"].is_odd = True
    second = kind.trainer_init({"timeout_s": 5.0}, client=fleet, source=source)
    for one in fleet._replicas.values():
        until(lambda: not one.busy.locked(), "the end of the meeting")  # noqa: B023
    servers["b"].is_odd = False
    source.seed = 5
    second.send_weights(deadline_s=20)
    until(lambda: servers["a"].root() == servers["b"].root() == root(drawn(Net(), 5)), "the new weights at both")
    second.shutdown()
    fleet.close()
    for server in servers.values():
        server.stop()


class Labelled(Server):
    """Has only a label, as vLLM."""

    def status(self) -> Any:
        raise NotSupported("no such route")


def test_a_server_that_has_only_a_label_is_ready_once_it_was_brought_to_the_version() -> None:
    """Another trainer's version 1 has that label, too."""
    servers = {"a": Server(), "b": Labelled()}
    source, kind = Source(), registry.trainer("shm")

    def begin() -> tuple[Fleet, Any]:
        fleet = Fleet(servers, heartbeat_s=0.02, call_timeout_s=5.0)
        return fleet, kind.trainer_init({}, client=fleet, source=source)

    source.seed = 1
    fleet, trainer = begin()
    trainer.send_weights(deadline_s=20)
    fleet.close()
    trainer.shutdown()
    fleet, trainer = begin()
    source.seed, servers["b"].faults["update_weights"] = 2, DeadlineExceeded("slow")
    trainer.send_weights(deadline_s=20)
    until(lambda: "b" in fleet.ready(), "the return of b")
    assert servers["b"].root() == root(drawn(Net(), 2))
    servers["b"].faults["update_weights"] = DeadlineExceeded("slow")
    trainer.send_adapter("math", StateDictSource(lora(1)), {"r": 2}, deadline_s=20)
    until(lambda: "b" in fleet.ready(), "the return of b")
    assert list(servers["b"].receiver.installed().adapters) == ["math"]
    fleet.close()
    trainer.shutdown()
    for server in servers.values():
        server.stop()


class Inline:
    """Brings calls to one engine; `gate` holds updates, of which `at` tells."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.gate, self.at = threading.Event(), threading.Event()
        self.gate.set()

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(info)

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        self.at.set()
        assert self.gate.wait(60)
        self.engine.update_weights(info)

    def finish_weight_update(self, version: str | None = None) -> None:
        self.engine.finish_weight_update()


@pytest.fixture
def inline() -> Iterator[tuple[Any, Inline, Source, Any]]:
    """A receiver, the way to it, and the source of a trainer over tcp."""
    receiver = Receiver(InPlace(Net()), adapter=lambda tensors, manifest: None)
    engine = registry.engine("tcp")(receiver)
    client, source = Inline(engine), Source()
    source.seed = 1
    info = {"bucket_nbytes": 128, "timeout_s": 20.0}
    trainer = registry.trainer("tcp").trainer_init(info, client=client, source=source)
    yield receiver, client, source, trainer
    trainer.shutdown()
    engine.shutdown()


def test_an_adapter_waits_for_the_version_on_its_way_until_its_deadline(inline: Any) -> None:
    _, client, source, trainer = inline
    trainer.send_weights(deadline_s=20)
    client.gate.clear()
    client.at.clear()
    source.seed = 2
    ticket = trainer.publish(deadline_s=30)
    assert client.at.wait(20)
    with pytest.raises(DeadlineExceeded, match="on its way"):
        trainer.send_adapter("math", StateDictSource(lora(1)), {"r": 2}, deadline_s=0.2)
    sending = threading.Timer(0.1, client.gate.set)
    sending.start()
    report = trainer.send_adapter("math", StateDictSource(lora(1)), {"r": 2}, deadline_s=20)  # for the weights now
    assert report.kind == "adapter"
    assert ticket.result(20).version == 2
    sending.join()


def test_a_number_that_is_on_its_way_is_not_published_again(inline: Any) -> None:
    _, client, _, trainer = inline
    client.gate.clear()
    ticket = trainer.publish(7, deadline_s=20)
    assert client.at.wait(20)
    with pytest.raises(StaleVersion, match="on its way"):
        trainer.publish(7, deadline_s=20)
    client.gate.set()
    assert ticket.result(20).version == 7
    late = registry.engine("tcp")(Receiver(InPlace(Net())))
    trainer.join(Inline(late), deadline_s=20)
    assert late.receiver.installed().version == 7
    late.shutdown()


def test_settings_that_cannot_be_are_refused_before_anybody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    receiver = Receiver(InPlace(Net()))
    engine, source = registry.engine("tcp")(receiver), Source()
    kind = registry.trainer("tcp")
    with pytest.raises(InvalidInput, match="bytes"):
        kind.trainer_init({"port": port, "bucket_nbytes": -1}, client=Inline(engine), source=source)
    with pytest.raises(InvalidInput, match="port 65536"):
        kind.trainer_init({"port": 1 << 16}, client=Inline(engine), source=source)
    kind.trainer_init({"port": port}, client=Inline(engine), source=source).shutdown()
    engine.shutdown()


@pytest.mark.parametrize("info", [{"folder": ""}, {"folder": "x", "keep": 0}])
def test_a_folder_that_nobody_named_or_that_keeps_nothing_is_refused_and_nothing_is_written(
    info: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = registry.engine("disk")(Receiver(InPlace(Net())))
    with pytest.raises(InvalidInput, match="versions to keep in folder"):
        registry.trainer("disk").trainer_init(info, client=Inline(engine), source=Source())
    assert not list(tmp_path.iterdir())
    engine.shutdown()


def test_a_thread_that_dies_while_it_fetches_ends_the_update(inline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, client, source, trainer = inline
    stage, died = receiver.stage, []
    monkeypatch.setattr(threading, "excepthook", lambda given: died.append(given.exc_type))

    def once(*given: Any, **more: Any) -> Any:
        receiver.stage = stage
        raise MemoryError("no memory")

    receiver.stage = once
    with pytest.raises(InternalError):
        trainer.send_weights(deadline_s=20)
    assert set(died) == {MemoryError}
    assert not client.engine._busy.locked()
    source.seed = 2
    assert trainer.send_weights(deadline_s=20).version in (1, 2)


@pytest.mark.parametrize("time_s", [math.inf, math.nan, 1e12, None, "5"])
def test_a_time_that_nobody_can_wait_for_is_refused_and_harms_nothing(inline: Any, time_s: Any) -> None:
    _, client, source, trainer = inline
    for call in (trainer.send_weights, trainer.publish, trainer.remove_adapter, trainer.join):
        given = {trainer.remove_adapter: ["math"], trainer.join: [client]}.get(call, [])
        with pytest.raises(InvalidInput, match="give a number of seconds"):
            call(*given, deadline_s=time_s)
    with pytest.raises(InvalidInput, match="give a number of seconds"):
        client.engine.join(timeout_s=time_s)
    source.seed = 2
    ticket = trainer.publish(deadline_s=20)
    with pytest.raises(InvalidInput, match="give a number of seconds"):
        ticket.result(time_s)
    assert ticket.result(20).version == 1


@pytest.mark.parametrize("time_s", [math.inf, math.nan, 1e12, -1.0])
def test_an_info_with_a_time_that_nobody_can_wait_for_is_refused(inline: Any, time_s: float) -> None:
    receiver, client, source, trainer = inline
    told = {**trainer.introduction(0), "timeout_s": time_s}
    with pytest.raises(InvalidInput, match="give a number of seconds"):
        client.engine.init_transfer_engine(told)
    with pytest.raises(InvalidInput, match="give a number of seconds"):
        registry.trainer("tcp").trainer_init({"timeout_s": time_s}, client=client, source=source)
    silent = registry.engine("tcp")(Receiver(InPlace(Net())), on_fault="record")
    silent.init_transfer_engine(told)
    assert silent.outcome.code == InvalidInput.code
    silent.shutdown()
    with serve(Control(client.engine, receiver), token=TOKEN) as server, pytest.raises(InvalidInput):
        WeightSyncClient(server.url, TOKEN).init_weight_transfer_engine({**told, "timeout_s": 1e30})
    trainer._meet(Deadline(20))
    assert trainer.send_weights(deadline_s=20).version == 1


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is not let go of stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Refusing(Swap):
    """Refuses every version, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__(Net())
        self.given: list[weakref.ref[torch.Tensor]] = []

    def prepare(self, staged: dict[str, torch.Tensor]) -> Any:
        self.given += [weakref.ref(tensor) for tensor in staged.values()]
        raise RuntimeError("no memory on the device")


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@pytest.mark.parametrize("way", ["raise", "record", "http"])
@pytest.mark.usefixtures("uncollected")
def test_what_an_update_staged_that_failed_is_let_go_of_without_a_collection(kind: str, way: str) -> None:
    target = Refusing()
    engine = registry.engine(kind)(Receiver(target), on_fault="record" if way == "record" else "raise")
    server = serve(Control(engine, engine.receiver), token=TOKEN) if way == "http" else None
    client = Inline(engine) if server is None else WeightSyncClient(server.url, TOKEN)
    info = {"timeout_s": 20.0, "silent": int(way == "record")}
    trainer = registry.trainer(kind).trainer_init(info, client=client, source=Source())
    for _ in range(3):
        with suppress(InternalError):
            trainer.send_weights(deadline_s=20)
    assert len(target.given) == 3 * len(Net().state_dict())
    until(lambda: not any(one() is not None for one in target.given), "nothing to be left of them")
    trainer.shutdown()
    if server is not None:
        server.close()
    engine.shutdown()


@pytest.mark.usefixtures("uncollected")
def test_a_version_whose_update_failed_is_let_go_of_before_its_ticket() -> None:
    engine = registry.engine("tcp")(Receiver(InPlace(Net())))
    client = Inline(engine)
    trainer = registry.trainer("tcp").trainer_init({"anchor_every": 2}, client=client, source=Source())
    client.gate.clear()
    ticket = trainer.publish(deadline_s=20)
    packed = weakref.ref(trainer.store.contents()[0][0])
    assert client.at.wait(20)
    client.engine = None
    client.gate.set()
    assert ticket.wait(20)
    until(lambda: packed() is None, "nothing to be left of it")
    with pytest.raises(AttributeError):
        ticket.result(0)
    trainer.shutdown()
    engine.shutdown()


def test_a_join_after_an_interrupted_one_installs_the_newest(inline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose answer nobody took would be one answer behind."""
    _, _, source, trainer = inline
    trainer.send_weights(deadline_s=20)
    late = registry.engine("tcp")(Receiver(InPlace(Net())))
    late.init_transfer_engine(trainer.introduction(0))
    ask = protocol.Peer.ask

    def interrupted(self: Any, message: Any, *given: Any) -> Any:
        if not isinstance(message, protocol.GetManifest):
            return ask(self, message, *given)
        monkeypatch.setattr(protocol.Peer, "ask", ask)
        self.stream.send(message, 20)
        raise KeyboardInterrupt

    monkeypatch.setattr(protocol.Peer, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        late.join(timeout_s=20)
    for seed in (2, 3):
        source.seed = seed
        assert trainer.send_weights(deadline_s=20).version == late.join(timeout_s=20).version == seed
    late.shutdown()


def test_silent_replicas_that_are_met_at_once_report_to_one_server() -> None:
    for _ in range(20):
        reports, found = Reports("127.0.0.1"), []
        threads = [threading.Thread(target=lambda: found.append(reports.info(1)["report_to"])) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
        reports.close()


def test_memory_is_found_and_lent_in_one_step() -> None:
    """What is lent has a descriptor of its own, and is not written before it comes back."""
    store, memory, manifest = SharedMemoryStore(1), Memory(1 << 20), full(drawn(Net(), 1), 1).manifest
    store.add(manifest, memory)
    store.decide(manifest)
    fd, give_back = store.lend(key_of(manifest))
    assert fd != memory.fd
    os.close(fd)
    store.put_back(store.withdraw(manifest))
    other = store.take(1 << 20)
    assert other is not memory
    give_back()
    assert store.take(1 << 20) is memory
    memory.close()
    other.close()
    store.close()


def test_a_run_whose_clock_was_behind_is_taken_once_it_is_not() -> None:
    receiver = receiver_of(Net())
    receiver.introduce("old", begun=1000.0)
    with pytest.raises(WrongEpoch, match="took over, by the clocks 10 s younger"):
        receiver.introduce("new", begun=990.0)
    receiver.introduce("new", begun=1010.0)
    assert receiver.run_id == "new"


# pauses


def fails(call: Any, *given: Any) -> None:
    with pytest.raises((TransferQueueError, ZeroDivisionError)):
        call(*given)


def test_a_pause_that_is_not_reached_leaves_the_one_before_with_its_owner_and_its_lease() -> None:
    gate = Gate()
    pauses = Pauses(gate, 0.05)
    with gate.request("runs"):
        pauses.pause("keep", True, "run-1", 30.0)
        fails(pauses.pause, "wait", True, "run-1", 30.0)
        assert (pauses.is_paused(), pauses.owner()) == (True, "run-1")
        pauses.take_over("run-2")
        assert not pauses.is_paused()
        pauses.pause("keep", True, "run-2", 0.3)
        fails(pauses.pause, "wait", True, "run-2", 30.0)
        until(lambda: not pauses.is_paused(), "the end of the lease")
    pauses.resume()


def test_a_pause_that_fails_after_the_one_that_was_held_has_ended_leaves_nobody_frozen() -> None:
    gate = Gate()
    pauses = Pauses(gate, 1.0)
    with gate.request("runs") as request:
        pauses.pause("keep", True, "", None)
        waiting = threading.Thread(target=fails, args=(pauses.pause, "wait", True, "run", 30.0))
        waiting.start()
        until(lambda: gate._mode == "wait", "the second pause")
        pauses.resume("")
        waiting.join()
        with request.step(1.0):
            assert (pauses.is_paused(), pauses.owner()) == (False, "")


def test_a_pause_that_waits_makes_no_freeze_wait() -> None:
    gate = Gate()
    pauses = Pauses(gate, 20.0)
    with gate.request("runs") as request:
        waiting = threading.Thread(target=fails, args=(pauses.pause, "wait", True, "", None))
        waiting.start()
        until(lambda: gate._mode == "wait", "the first pause")
        pauses.pause("keep", True, "run", 30.0)
        waiting.join()
        pauses.resume("run")
        with request.step(1.0), gate.request("new"):
            assert not pauses.is_paused()


def test_two_pauses_that_are_not_reached_leave_requests_alone() -> None:
    gate, results = Gate(), []

    def pause() -> None:
        with pytest.raises(TransferQueueError):
            gate.pause("wait", 60)
        results.append("ended")

    with gate.request("runs") as request, request.step():
        waiting = threading.Thread(target=pause)
        waiting.start()
        until(lambda: gate._mode == "wait", "the first pause")
        fails(gate.pause, "keep", 0.05)
        waiting.join()
    with gate.request("new"):
        assert results == ["ended"]


def test_a_pause_whose_cache_cannot_be_cleared_is_none() -> None:
    gate = Gate(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    fails(gate.pause, "abort", 1)
    with gate.request("new"):
        assert not gate.is_paused()
    gate._clear_cache = None
    gate.pause("abort", 1)
    with pytest.raises(GenerationPaused), gate.request("late"):
        pass
    gate.resume()
