"""Our server is a real child process with a model and requests in flight: conformance, and what a hostile or clumsy
peer meets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from conftest import Child, until
from paths import ROOT
from weights import receiver_of
from weights_http_conformance import CASES, Said, Subject
from weights_inline import INIT_INFO, TOKEN, Inline, TinyServer, address, faults, infos, model, numbered

from transfer_queue.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NotInitialized,
    NotSupported,
    ServiceUnavailable,
    TooManyConnections,
    TransferQueueError,
    UpdateInProgress,
    WrongEpoch,
)
from transfer_queue.weights import Control, Gate, ModuleSource
from transfer_queue.weights.http import WeightSyncClient, bodies, serve, serving
from transfer_queue.weights.http import server as routes
from transfer_queue.weights.transport import registry

SERVER = "import sys; sys.path.insert(0, 'tests/helpers'); import weights_inline; weights_inline.main()"


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    child = Child(SERVER)
    found = our_subject(json.loads(child.line()))
    found.good("POST", "/init_weight_transfer_engine", {"init_info": INIT_INFO})
    yield found
    assert found.good("GET", "/tqw/status")["updating"] is False
    assert child.finish() == ""


def our_subject(url: str) -> Subject:
    def generate(num_steps: int, request_id: str) -> Said:
        status, found = subject.ask("POST", "/generate", {"num_steps": num_steps, "request_id": request_id})
        if status != 200:
            return Said(status, found["error"]["reason"], [])
        assert all(told == low == high for told, low, high in found["said"]), "a mixture of versions"
        return Said(status, found["finish_reason"], [int(told) for told, _, _ in found["said"]])

    def health(what: str) -> Any:
        return subject.good("GET", "/health")[what]

    subject = Subject(
        url, TOKEN, INIT_INFO, lambda number: infos(numbered(number)), faults, generate,
        lambda: len(health("running")), lambda: health("num_steps"),
    )  # fmt: skip
    return subject


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(subject: Subject, case: Callable[[Subject], None]) -> None:
    case(subject)
    assert subject.good_health()
    assert subject.good("GET", "/is_paused") == {"is_paused": False}


# peers that are hostile or clumsy


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_without_the_token_nothing_is_answered(subject: Subject, token: str) -> None:
    for path in ("/weight_info", "/tqw/status", "/no_such_route"):
        stranger = WeightSyncClient(subject.url, token)
        with pytest.raises(AccessDenied, match="token"):
            stranger._get(path, lambda answer: answer)
    found = raw(subject.url, b"POST /resume HTTP/1.1\r\nHost: x\r\nAuthorization: Basic abc\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 401")
    assert b"www-authenticate: Bearer" in found


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
        b"GET /weight_info HTTP/9.9\r\n\r\n",
        b"POST /update_weights HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["zeros", "tls", "version", "length", "long"],
)
def test_garbage_gets_an_error_or_nothing(subject: Subject, data: bytes) -> None:
    found = raw(subject.url, data)
    assert found == b"" or b" 4" in found.split(b"\r\n")[0]
    assert subject.good_health()


def test_deep_and_odd_json_is_refused(subject: Subject) -> None:
    deep = b'{"init_info":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001
    for body in (deep, b'{"init_info": {"a": NaN}}', b"", b"null", b'"\\ud800"'):
        status, found = subject.ask("POST", "/init_weight_transfer_engine", raw=body)
        assert (status, found["error"]["reason"]) == (400, "invalid_input")
    assert subject.ask("GET", "/pause")[0] == 405
    status, found = subject.ask("POST", "/collective_rpc")
    assert (status, found["error"]["reason"]) == (404, "not_supported")


def raw(url: str, data: bytes) -> bytes:
    """Everything a server says to these bytes, until it hangs up."""
    with socket.create_connection(address(url), 10) as link:
        with suppress(ConnectionError):  # it hung up before it had all
            link.sendall(data)
        return ended(link)


def ended(link: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionError):
        while part := link.recv(65536):
            found += part
    return found


def test_slow_and_large_requests_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HEAD_TIMEOUT_S", 0.2)
    tiny = TinyServer()
    with serve(tiny.control, token=TOKEN, body_timeout_s=0.2, max_body_nbytes=1000) as server:
        links = [socket.create_connection(address(server.url), 10) for _ in range(8)]
        for link in links[:4]:
            link.sendall(b"POST /update_weights HTTP/1.1\r\nHo")
        head = f"POST /update_weights HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
        for link in links[4:]:
            link.sendall(head + b"Content-Length: 500\r\n\r\n{")
        patient = WeightSyncClient(server.url, TOKEN, timeout_s=10)
        assert patient.get_weight_version() == "default"
        for link in links[:4]:
            with link:
                assert ended(link) == b""
        for link in links[4:]:
            with link:
                assert ended(link).startswith(b"HTTP/1.1 408")
        with pytest.raises(InvalidInput, match="at most 1000 bytes"):
            patient.init_weight_transfer_engine({"way": "x" * 1000})
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"3e8\r\n" + b"x" * 1000 + b"\r\n") * 2
        assert raw(server.url, chunked).startswith(b"HTTP/1.1 413")


# servers that lack something


def test_an_unconfigured_server_refuses_and_lives() -> None:
    receiver = receiver_of(model())
    with serve(Control(None, receiver), token="") as server:
        client = WeightSyncClient(server.url)
        for call in (
            lambda: client.init_weight_transfer_engine(INIT_INFO),
            client.start_weight_update,
            lambda: client.update_weights({}),
            client.finish_weight_update,
            client.shutdown_weight_transfer_engine,
        ):
            with pytest.raises(NotInitialized, match="no weight transfer engine is configured"):
                call()
        for call in (client.pause_generation, client.resume_generation, client.is_paused, client.abort_requests):
            with pytest.raises(NotSupported):
                call()
        with pytest.raises(NotSupported, match="allow_reset"):
            client.reset_weights()
        assert client.get_weight_version() == "default"
        assert client.get_world_size() == 1
        assert client.status().initialised is False


def test_a_defect_is_told_without_its_details(caplog: pytest.LogCaptureFixture) -> None:
    class Defect(Inline):
        def start_weight_update(self) -> None:
            raise RuntimeError("a secret")

        def shutdown(self) -> None:
            raise SystemExit(3)

    receiver = receiver_of(model())
    with serve(Control(Defect(receiver), receiver), token=TOKEN) as server:
        client = WeightSyncClient(server.url, TOKEN)
        client.init_weight_transfer_engine(INIT_INFO)
        with pytest.raises(InternalError, match="RuntimeError: the server's log") as caught:
            client.start_weight_update()
        assert "secret" not in str(caught.value)
        assert "a secret" in caplog.text
        with pytest.raises(InternalError, match="SystemExit"):
            client.shutdown_weight_transfer_engine()
        assert client.get_weight_version() == "default"


def test_a_refusal_that_is_to_be_expected_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    gate, receiver = Gate(), receiver_of(model())
    control = Control(Inline(receiver), receiver, generation=gate, pause_timeout_s=0.05)
    with serve(control, token=TOKEN) as server, gate.request("running"), pytest.raises(DeadlineExceeded):
        WeightSyncClient(server.url, TOKEN).pause_generation("wait")
    refused = [one for one in caplog.records if "/pause" in one.getMessage()]
    assert [(one.levelname, one.exc_info) for one in refused] == [("WARNING", None)]


def test_a_call_that_was_late_itself_says_what_it_waited_for() -> None:
    gate, receiver = Gate(), receiver_of(model())
    control = Control(Inline(receiver), receiver, generation=gate, pause_timeout_s=0.05)
    asked = pytest.raises(DeadlineExceeded, match="1 requests ran on")
    with serve(control, token=TOKEN) as server, gate.request("running"), asked:
        WeightSyncClient(server.url, TOKEN).pause_generation("wait")


def test_a_call_has_a_deadline_and_the_server_goes_on() -> None:
    go_on = threading.Event()

    class Slow(Inline):
        def start_weight_update(self) -> None:
            assert go_on.wait(30)

    receiver = receiver_of(model())
    with serve(Control(Slow(receiver), receiver), token=TOKEN, call_timeout_s=0.5) as server:
        client = WeightSyncClient(server.url, TOKEN)
        client.init_weight_transfer_engine(INIT_INFO)
        with pytest.raises(DeadlineExceeded, match="no result within"):
            client.start_weight_update()
        with pytest.raises(UpdateInProgress):
            client.start_weight_update()
        assert client.get_weight_version() == "default"
        go_on.set()

        def starts() -> bool:
            try:
                client.start_weight_update()
            except UpdateInProgress:
                return False
            return True

        until(starts, "the end of the first start, which its client gave up")


def test_connections_that_say_nothing_keep_nobody_out_and_the_oldest_has_to_leave() -> None:
    with serve(TinyServer().control, token=TOKEN) as server:
        strangers = [socket.create_connection(address(server.url), 20.0) for _ in range(serving.MAX_STRANGERS)]
        assert WeightSyncClient(server.url, TOKEN).get_weight_version() == "default"
        with suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""
        assert WeightSyncClient(server.url, TOKEN).get_weight_version() == "default"
        for one in strangers:
            one.close()


def test_an_init_that_is_malformed_leaves_the_update_that_is_open() -> None:
    receiver = receiver_of(model())
    engine = registry.engine("tcp")(receiver)
    with serve(Control(engine, receiver), token=TOKEN) as server:
        client = WeightSyncClient(server.url, TOKEN)
        trainer = registry.trainer("tcp").trainer_init({}, client=client, source=ModuleSource(model()))
        client.start_weight_update()
        before = client.status()
        with pytest.raises(InvalidInput, match="streams"):
            WeightSyncClient(server.url, TOKEN).init_weight_transfer_engine({"streams": "two", "run_id": "another"})
        after = client.status()
        assert (after.update and after.update.update_id) == (before.update and before.update.update_id) is not None
        assert (after.run_id, after.initialised) == (trainer.run_id, True)
        client.abort_weight_update()
        assert trainer.send_weights(deadline_s=20).version == 1
        trainer.shutdown()
    engine.shutdown()


def test_a_trainer_that_was_taken_over_gives_no_label_and_shuts_nothing_down() -> None:
    receiver = receiver_of(model())
    engine = registry.engine("tcp")(receiver)
    with serve(Control(engine, receiver), token=TOKEN) as server:
        before, after = WeightSyncClient(server.url, TOKEN), WeightSyncClient(server.url, TOKEN)
        trainers = [
            registry.trainer("tcp").trainer_init({"run_id": run}, client=client, source=ModuleSource(model()))
            for run, client in (("before", before), ("after", after))
        ]
        trainers[1].send_weights(deadline_s=20)
        for call in (lambda: before.update_weight_version("of before"), before.shutdown_weight_transfer_engine):
            with pytest.raises(WrongEpoch, match="'after' took over"):
                call()
        assert (after.get_weight_version(), after.status().initialised) == ("1", True)
        after.update_weight_version("mine")
        WeightSyncClient(server.url, TOKEN).update_weight_version("an operator's")
        assert after.get_weight_version() == "an operator's"
        for trainer in trainers:
            trainer.shutdown()
    engine.shutdown()


def test_a_list_of_no_requests_aborts_none_and_no_list_all_of_them() -> None:
    gate, receiver = Gate(), receiver_of(model())
    control = Control(Inline(receiver), receiver, generation=gate)
    with serve(control, token=TOKEN) as server, gate.request("a"), gate.request("b"):
        client = WeightSyncClient(server.url, TOKEN)
        assert (client.abort_requests([]), control.abort_requests([])) == (0, 0)
        assert client.abort_requests(["a", "gone"]) == 1
        assert client.abort_requests() == 1


def test_too_many_calls_at_once_are_told_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_CALLS", 1)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Inline):
        def start_weight_update(self) -> None:
            begun.set()
            assert go_on.wait(30)

    receiver = receiver_of(model())
    with serve(Control(Slow(receiver), receiver), token=TOKEN) as server:
        client = WeightSyncClient(server.url, TOKEN)
        client.init_weight_transfer_engine(INIT_INFO)
        with ThreadPoolExecutor(1) as other:
            started = other.submit(client.start_weight_update)
            assert begun.wait(30)
            with pytest.raises(TooManyConnections, match="1 calls run here"):
                client.get_weight_version()
            with pytest.raises(AccessDenied):
                WeightSyncClient(server.url, "wrong").get_weight_version()
            go_on.set()
            started.result(30)
        assert client.get_weight_version() == "default"


def test_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_TOKEN", raising=False)
    control = TinyServer().control
    with pytest.raises(ConfigError, match="needs a token"):
        serve(control, "0.0.0.0", token="")
    with serve(control) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert len(server.token) >= 32
        assert WeightSyncClient(server.url, server.token).get_weight_version() == "default"
        with pytest.raises(ConfigError, match="cannot listen"):
            serve(control, port=address(server.url)[1])
    with pytest.raises(ServiceUnavailable):
        WeightSyncClient(server.url, server.token).get_weight_version()
    server.close()
    monkeypatch.setenv("TQ_TOKEN", "of the environment")
    with serve(control) as server:
        assert server.token == "of the environment"


def test_the_example_of_the_docs_runs() -> None:
    text = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")
    code = text.split("## Over HTTP")[1].split("```py\n")[1].split("```")[0]
    exec(compile(code, "docs/weights.md", "exec"), {})


def test_every_error_has_a_status() -> None:
    for kind in _leaves(TransferQueueError):
        assert 400 <= bodies.status_of(kind("x")) < 600


def _leaves(kind: type[TransferQueueError]) -> list[type[TransferQueueError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in _leaves(child))]


HIDDEN = """
import sys
sys.modules[{module!r}] = None  # as if it were not installed
from transfer_queue.weights.http import WeightSyncClient
try:
    from transfer_queue.weights.http import {name}
except ImportError as error:
    print(error.name, "transfer-queue[http]" in str(error))
"""


@pytest.mark.parametrize(
    ("module", "name"), [("uvicorn", "serve"), ("starlette", "serve"), ("starlette", "control_app")]
)
def test_without_its_extra_serving_says_what_to_install_and_the_client_works(
    fresh_child: Any, module: str, name: str
) -> None:
    assert fresh_child(HIDDEN.format(module=module, name=name)).finish().endswith(" True")
