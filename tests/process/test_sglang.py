"""SGLang servers without SGLang: its routes in a server of the test, its tensor-parallel workers as processes with a
gloo group, our trainers. SGLang's own unpickler is met where SGLang, or its unpacked wheel, is on the path."""

from __future__ import annotations

import ast
import base64
import importlib.util
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from conftest import Child
from safetensors.torch import save_file
from sglang_servers import COLUMNS, SGLangShaped, Workers, weights

from transfer_queue.errors import (
    ConfigError,
    Incomplete,
    InvalidInput,
    NotSupported,
    ProtocolError,
    TransferQueueError,
    UnknownTensor,
)
from transfer_queue.integrations.sglang.client import SGLangClient
from transfer_queue.integrations.sglang.payload import WorkerCall, from_tensor, to_tensor, to_text
from transfer_queue.weights import StateDictSource
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.trainer import TrainerEngine

Serve = Callable[..., SGLangShaped]
SAFE = ("_safe_load_torch_storage", "SafeUnpickler")  # what SGLang reads a post with
SHORT = ["in_place", "begin", "start", "end", "continue", "in_place", "begin", "update", "end", "continue"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[SGLangShaped] = []

    def start(workers: Workers | None = None, **info: Any) -> SGLangShaped:
        made.append(SGLangShaped(workers, **info))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def workers(child: Callable[[str], Child], tmp_path: Path) -> Iterator[Workers]:
    save_file(weights(1.0), tmp_path / "model.safetensors")
    made = Workers(child, tmp_path, 2)
    yield made
    for one in made.children:  # a group ends when all of its ranks do
        one.process.stdin.close()
    for one in made.children:
        one.finish()


@pytest.fixture
def trainers() -> Iterator[Callable[..., TrainerEngine]]:
    made: list[TrainerEngine] = []

    def start(
        client: SGLangClient, given: dict[str, torch.Tensor], transport: str = "tcp", **info: Any
    ) -> TrainerEngine:
        trainer = registry.trainer(transport).trainer_init(info, client=client, source=StateDictSource(given))
        made.append(trainer)
        return trainer

    yield start
    for one in made:
        one.shutdown()


Trainers = Callable[..., TrainerEngine]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_version_is_staged_while_the_old_one_serves_and_committed_by_all_workers(
    serve: Serve, workers: Workers, trainers: Trainers, transport: Literal["tcp", "shm"]
) -> None:
    server = serve(workers)
    trainer = trainers(SGLangClient(server.url, transport=transport), weights(2.0), transport)
    assert trainer.send_weights(deadline_s=30).version == 1
    assert (server.before_finish, workers.values(), server.label) == ({1.0}, {2.0}, "1")


def test_only_the_commit_takes_requests_off_the_weights_and_forgets_what_they_cached(
    serve: Serve, workers: Workers, trainers: Trainers
) -> None:
    server = serve(workers)
    trainer = trainers(SGLangClient(server.url), weights(2.0))
    server.log.clear()
    trainer.send_weights(deadline_s=30)
    assert server.log == [*SHORT, "retract", "begin", "finish", "end", "flush", "continue"]


def test_differences_go_onto_what_the_workers_keep(serve: Serve, workers: Workers, trainers: Trainers) -> None:
    given = weights(2.0)
    trainer = trainers(SGLangClient(serve(workers).url), given, anchor_every=8)
    trainer.send_weights(deadline_s=30)
    for tensor in given.values():
        tensor.fill_(3.0)
    assert trainer.send_weights(deadline_s=30).kind == "delta"
    assert workers.values() == {3.0}


def test_where_one_worker_cannot_load_the_first_version_all_load_the_checkpoint_again(
    serve: Serve, workers: Workers, trainers: Trainers
) -> None:
    server = serve(workers)
    trainer = trainers(SGLangClient(server.url), weights(2.0))
    workers.say(["fail", "weights"])
    with pytest.raises(TransferQueueError, match="was loaded again"):
        trainer.send_weights(deadline_s=30)
    assert (workers.values(), server.label) == ({1.0}, "default")


def test_where_one_worker_cannot_load_a_later_version_all_load_the_one_before_again(
    serve: Serve, workers: Workers, trainers: Trainers
) -> None:
    server, given = serve(workers), weights(2.0)
    trainer = trainers(SGLangClient(server.url), given)
    trainer.send_weights(deadline_s=30)
    for tensor in given.values():
        tensor.fill_(3.0)
    workers.say(["weights", "fail"])
    with pytest.raises(TransferQueueError, match="was loaded again"):
        trainer.send_weights(deadline_s=30)
    assert (workers.values(), server.label) == ({2.0}, "1")
    trainer.send_weights(deadline_s=30)
    assert workers.values() == {3.0}


def test_a_worker_that_does_not_hear_whether_the_others_loaded_a_version_is_dirty(
    serve: Serve, workers: Workers, trainers: Trainers
) -> None:
    server, given = serve(workers), weights(2.0)
    trainer = trainers(SGLangClient(server.url), given)
    trainer.send_weights(deadline_s=30)
    workers.say(["hurry 0.1", "hold"])
    server.is_held = True
    with pytest.raises(TransferQueueError, match="did not say"):
        trainer.send_weights(deadline_s=30)
    assert workers.installed() == [(1, True), (2, False)]
    workers.say(["timeout 30"] * 2)
    workers.say(["fail", "weights"])
    with pytest.raises(TransferQueueError, match="loading failed"):
        trainer.send_weights(deadline_s=30)
    assert workers.installed() == [(1, True), (2, False)]
    for tensor in given.values():
        tensor.fill_(3.0)
    version = trainer.send_weights(deadline_s=30).version
    assert (workers.installed(), workers.values()) == ([(version, False)] * 2, {3.0})


def test_a_worker_that_is_late_does_not_commit_what_the_others_gave_up(
    serve: Serve, workers: Workers, trainers: Trainers
) -> None:
    server, given = serve(workers), weights(2.0)
    trainer = trainers(SGLangClient(server.url), given)
    workers.say(["timeout 0.1", "weights"])
    server.is_late = True
    with pytest.raises(TransferQueueError, match=r"not every worker|was loaded again"):
        trainer.send_weights(deadline_s=30)
    assert (workers.installed(), workers.values()) == ([(None, False)] * 2, {1.0})
    workers.say(["timeout 30"] * 2)
    version = trainer.send_weights(deadline_s=30).version
    assert (workers.installed(), workers.values()) == ([(version, False)] * 2, {2.0})


def test_a_load_that_fails_goes_back_to_what_came_by_another_transport(
    serve: Serve, workers: Workers, trainers: Trainers
) -> None:
    server = serve(workers)
    trainers(SGLangClient(server.url), weights(2.0)).send_weights(deadline_s=30)
    other = trainers(SGLangClient(server.url, transport="shm"), weights(3.0), "shm")
    workers.say(["weights", "fail"])
    with pytest.raises(TransferQueueError, match="was loaded again"):
        other.send_weights(deadline_s=30)
    assert workers.values() == {2.0}


@pytest.mark.parametrize(
    ("change", "error"),
    [({"surplus": torch.ones(1)}, UnknownTensor), ({"norm.weight": None}, Incomplete)],
)
def test_what_the_checkpoint_had_not_or_has_besides_is_refused_before_anything_is_touched(
    serve: Serve, workers: Workers, trainers: Trainers, change: dict[str, Any], error: type[TransferQueueError]
) -> None:
    given = {name: one for name, one in {**weights(2.0), **change}.items() if one is not None}
    trainer = trainers(SGLangClient(serve(workers).url), given)
    with pytest.raises(error):
        trainer.send_weights(deadline_s=30)
    assert workers.values() == {1.0}


def test_a_trainer_that_left_an_update_open_is_followed_by_another(
    serve: Serve, workers: Workers, trainers: Trainers
) -> None:
    server = serve(workers)
    first = SGLangClient(server.url)
    trainers(first, weights(2.0))
    first.start_weight_update()
    server.is_open = True  # it died in the middle of a call
    trainers(SGLangClient(server.url), weights(3.0)).send_weights(deadline_s=30)
    assert workers.values() == {3.0}


def test_nonsense_leaves_a_worker_and_its_weights_as_they_are(workers: Workers) -> None:
    early = to_text(WorkerCall("finish", "tcp"))
    workers.say([f"load {early}"] * 2)
    for info in ({}, {"address": 1}, {"timeout_s": "x"}):
        workers.say([f"load {to_text(WorkerCall('init', 'tcp', info))}"] * 2)
    workers.say(["nonsense"] * 2)
    assert workers.values() == {1.0}


@pytest.mark.parametrize(
    "info",
    [{"custom_weight_loader": []}, {"custom_weight_loader": None}, {"weight_cache_mode": "server"}, {"pp_size": 2}],
)
def test_a_server_that_a_call_would_end_gets_none(serve: Serve, info: dict[str, Any]) -> None:
    server = serve(**info)
    with pytest.raises(NotSupported):
        SGLangClient(server.url).init_weight_transfer_engine({})
    assert server.log == []


def test_a_server_that_does_not_say_how_many_workers_it_has_gets_no_call(serve: Serve) -> None:
    server = serve(tp_size=None)
    with pytest.raises(ProtocolError):
        SGLangClient(server.url).silent_workers()


@pytest.mark.parametrize("path", ["/begin_weight_update", "/update_weights_from_tensor"])
def test_a_call_that_is_refused_leaves_the_server_running(serve: Serve, path: str) -> None:
    server = serve()
    server.refused = path
    with pytest.raises(InvalidInput):
        SGLangClient(server.url).start_weight_update()
    assert (server.is_open, server.log[-1]) == (False, "continue")


def test_a_server_that_its_caller_has_paused_stays_paused(serve: Serve) -> None:
    server = serve()
    client = SGLangClient(server.url)
    client.pause_generation("in_place")
    client.finish_weight_update("7")
    assert server.log == ["in_place", "begin", "finish", "end"]
    client.resume_generation()
    assert server.log[-1] == "continue"


def test_in_place_keeps_the_cache(serve: Serve) -> None:
    server = serve()
    SGLangClient(server.url, pause="in_place").finish_weight_update()
    assert server.log == ["in_place", "begin", "finish", "end", "continue"]


def test_a_cache_that_is_not_forgotten_is_only_a_warning(serve: Serve) -> None:
    server = serve()
    server.refused = "/flush_cache"
    SGLangClient(server.url).finish_weight_update("7")
    assert (server.label, server.log[-1]) == ("7", "continue")


def test_several_servers_are_one_client(serve: Serve) -> None:
    servers = [serve(), serve(tp_size=3)]
    servers[1].num = 3
    client = SGLangClient([one.url for one in servers])
    assert client.silent_workers() == 4
    client.finish_weight_update("7")
    assert client.get_weight_version() == "7"
    servers[0].label = "8"
    assert client.get_weight_version() == "unknown"


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1"], ["nowhere"]])
def test_urls_have_to_be_those_of_servers(urls: list[str]) -> None:
    with pytest.raises(ConfigError):
        SGLangClient(urls)


def test_a_tensor_that_is_no_call_is_refused() -> None:
    call = WorkerCall("update", "tcp", {"version": 3})
    assert from_tensor(to_tensor(call)) == call
    for other in (torch.ones(3), torch.zeros(0, dtype=torch.uint8), to_tensor(call)[1:]):
        with pytest.raises(InvalidInput):
            from_tensor(other)


def test_sglangs_own_unpickler_takes_a_call() -> None:
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("sglang is not on the path")
    text = (Path(found.submodule_search_locations[0]) / "srt" / "utils" / "common.py").read_text()
    # The two alone: the module itself asks for packages and a device that need not be here.
    wanted = [one for one in ast.parse(text).body if getattr(one, "name", "") in SAFE]
    assert len(wanted) == len(SAFE)
    space: dict[str, Any] = {"io": io, "pickle": pickle, "torch": torch}
    exec(compile(ast.Module(wanted, []), "sglang", "exec"), space)
    call = WorkerCall("update", "tcp", {"version": 3, "name": "é" * COLUMNS})
    ((name, tensor),) = space["SafeUnpickler"](io.BytesIO(base64.b64decode(to_text(call)))).load()
    assert (name, tensor.dtype, from_tensor(tensor)) == ("transfer_queue", torch.uint8, call)
