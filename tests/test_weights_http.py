"""Our server is a real child process with a model and requests in flight; then what a hostile or clumsy peer meets, and
the client against ours, against answers of vLLM's, and against peers that never answer."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Child, until
from weights import receiver_of
from weights_http_conformance import CASES, Said, Subject
from weights_inline import INIT_INFO, TOKEN, Inline, TinyServer, filled, infos, model, numbered

from transfer_queue.errors import (
    AccessDenied,
    CommitFailed,
    ConfigError,
    DeadlineExceeded,
    DigestMismatch,
    Incomplete,
    InternalError,
    InvalidInput,
    NotInitialized,
    NotOpen,
    NotSupported,
    ProtocolError,
    ServiceUnavailable,
    TransferQueueError,
    UnknownTensor,
    UpdateInProgress,
)
from transfer_queue.weights import Control
from transfer_queue.weights.http import HttpServer, WeightSyncClient, bodies, serve, serving

SERVER = "import sys; sys.path.insert(0, 'tests'); import weights_inline; weights_inline.main()"


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

    def num_running() -> int:
        return len(subject.good("GET", "/health")["running"])

    subject = Subject(
        url, TOKEN, INIT_INFO, lambda number: infos(numbered(number)), faults, generate, num_running
    )  # fmt: skip
    return subject


def faults(number: int) -> dict[str, list[dict[str, Any]]]:
    good = infos(numbered(number))
    weights = filled(number)
    renamed = {("ghost" if name == "0.bias" else name): tensor for name, tensor in weights.items()}
    damaged = bytearray(base64.b64decode(good[0]["buckets"]["0"]))
    damaged[5] ^= 1
    return {
        "unknown tensor": infos(numbered(number, renamed)),
        "other shape": infos(numbered(number, {**weights, "0.bias": weights["0.weight"]})),
        "old version": infos(numbered(0)),
        "half of it": good[:1],
        "damaged": [{**good[0], "buckets": {"0": base64.b64encode(damaged).decode()}}, *good[1:]],
        "no manifest": [{"buckets": {}}],
        "odd types": [{"manifest": 3, "buckets": []}],
    }


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
    """Everything a server says to these bytes."""
    with socket.create_connection(address(url), 10) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while part := link.recv(65536):
                found += part
        except ConnectionResetError:
            pass
        return found


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


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


def ended(link: socket.socket) -> bytes:
    found = b""
    try:
        while part := link.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


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
        assert client.status()[server.url]["initialised"] is False


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


def test_a_call_has_a_deadline_and_the_server_goes_on() -> None:
    go_on = threading.Event()

    class Slow(Inline):
        def start_weight_update(self) -> None:
            assert go_on.wait(30)

    receiver = receiver_of(model())
    with serve(Control(Slow(receiver), receiver), token=TOKEN, call_timeout_s=0.5) as server:
        client = WeightSyncClient(server.url, TOKEN)
        client.init_weight_transfer_engine(INIT_INFO)
        with pytest.raises(DeadlineExceeded, match="no result within 0.5 s"):
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


# the client


@pytest.fixture
def two() -> Iterator[tuple[list[TinyServer], list[HttpServer]]]:
    tinies = [TinyServer(), TinyServer()]
    servers = [serve(tiny.control, token=TOKEN) for tiny in tinies]
    yield tinies, servers
    for server in servers:
        server.close()


def test_a_client_drives_several_servers(two: tuple[list[TinyServer], list[HttpServer]]) -> None:
    tinies, servers = two
    client = WeightSyncClient([server.url for server in servers], TOKEN, timeout_s=20)
    client.init_weight_transfer_engine(INIT_INFO)
    client.start_weight_update()
    for part in infos(numbered(1)):
        client.update_weights([part])  # by rank: each server is a rank 0
    client.finish_weight_update("one")
    assert client.get_weight_version() == "one"
    assert client.get_world_size() == 2
    first, second = client.compute_weight_checksums().values()
    assert first == second
    assert all(found.match for found in client.compare_weights(first).values())
    client.pause_generation("keep")
    assert client.is_paused()
    client.resume_generation()
    assert not client.is_paused()
    assert client.abort_requests() == client.abort_requests(["nobody"]) == 0
    client.update_weight_version("uno")
    assert set(client.get_weight_versions().values()) == {"uno"}
    tinies[0].control.update_weight_version("other")
    with pytest.raises(InvalidInput, match="different versions"):
        client.get_weight_version()
    client.shutdown_weight_transfer_engine()


def test_an_update_that_fails_on_one_server_is_aborted_on_all(
    two: tuple[list[TinyServer], list[HttpServer]],
) -> None:
    tinies, servers = two
    client = WeightSyncClient([server.url for server in servers], TOKEN, timeout_s=20)
    client.init_weight_transfer_engine(INIT_INFO)
    install(tinies[1], 5)
    client.start_weight_update()
    with pytest.raises(TransferQueueError, match="1 of 2 servers"):  # the second has a newer version
        client.update_weights(infos(numbered(4))[0])
    assert set(client.failures) == {servers[1].url}
    assert [status["updating"] for status in client.status().values()] == [False, False]
    tinies[0].control.start_weight_update()
    with pytest.raises(UpdateInProgress):  # somebody else's update goes on
        client.start_weight_update()
    assert [tiny.control.status().updating for tiny in tinies] == [True, False]


def install(tiny: TinyServer, number: int) -> None:
    tiny.control.init_weight_transfer_engine(INIT_INFO)
    tiny.control.start_weight_update()
    for part in infos(numbered(number)):
        tiny.control.update_weights(part)
    tiny.control.finish_weight_update()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda client: client.finish_weight_update(), NotOpen),
        (lambda client: client.pause_generation("never"), InvalidInput),
        (lambda client: updated(client, "damaged"), DigestMismatch),
        (lambda client: updated(client, "unknown tensor"), UnknownTensor),
        (lambda client: updated(client, "half of it"), Incomplete),
        (lambda client: client.update_weights({"x": {1, 2}}), InvalidInput),
        (lambda client: client.start_weight_update() or client.update_weights([]), InvalidInput),
    ],
)
def test_errors_come_back_as_what_they_are(
    subject: Subject, call: Callable[[WeightSyncClient], object], error: type[TransferQueueError]
) -> None:
    client = WeightSyncClient(subject.url, TOKEN, timeout_s=20)
    with pytest.raises(error):
        call(client)
    assert client.status()[subject.url]["updating"] is False


def updated(client: WeightSyncClient, fault: str) -> None:
    client.start_weight_update()
    for part in faults(1000)[fault]:
        client.update_weights(part)
    client.finish_weight_update()


class Canned:
    """A peer that says the same to everybody, in pieces of `step` bytes, and then hangs up unless it `stays`."""

    def __init__(self, answer: bytes, step: int = 65536, stays: bool = False) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        self._answer, self._step, self._stays = answer, step, stays
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            link, _ = self._listener.accept()
            with link:
                if self.stopped.is_set():
                    return
                try:
                    link.recv(65536)
                    for start in range(0, len(self._answer), self._step):
                        link.sendall(self._answer[start : start + self._step])
                        self.stopped.wait(0.02 if self._step == 1 else 0)
                    if self._stays:
                        link.recv(1)
                except OSError:
                    continue  # the client gave up

    def __enter__(self) -> Canned:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        socket.create_connection(address(self.url), 5).close()
        self._thread.join()
        self._listener.close()


def canned(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


WORKER = '{"error": {"message": "Worker failed with error \'no such tensor\'", "type": "InternalServerError", "code": 500}}'


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (canned(500, WORKER), InternalError, "no such tensor"),
        (canned(400, '{"error": {"message": "Field required", "param": "body.init_info", "code": 400}}'), InvalidInput, ""),
        (canned(500, '{"error": "Failed to pause generation: x"}'), InternalError, "Failed to pause"),
        (canned(422, '{"detail": [{"loc": ["query", "mode"]}]}'), InvalidInput, "mode"),
        (canned(404, '{"detail": "Not Found"}'), NotSupported, "Not Found"),
        (canned(401, '{"error": "Unauthorized"}'), AccessDenied, "Unauthorized"),
        (canned(503, "Service Unavailable"), ServiceUnavailable, "Unavailable"),
        (canned(504, "<html>"), DeadlineExceeded, "html"),
        (canned(307, ""), InternalError, "307"),
        (canned(500, '{"error": {"message": "m", "reason": "commit_failed"}}'), CommitFailed, "m"),
        (canned(500, '{"error": {"message": "m", "reason": ["x"]}}'), InternalError, "m"),
        (canned(200, "[1]"), ProtocolError, "no JSON object"),
        (canned(200, "{}"), ProtocolError, "weight_version"),
        (canned(200, "[" * 100_000), ProtocolError, ""),
        (b"nonsense\r\n\r\n", ServiceUnavailable, ""),
        (b"", ServiceUnavailable, ""),
    ],
)  # fmt: skip
def test_answers_of_other_servers(answer: bytes, error: type[TransferQueueError], match: str) -> None:
    with Canned(answer) as peer, pytest.raises(error, match=match):
        WeightSyncClient(peer.url, timeout_s=10).get_weight_version()


def test_routes_that_an_older_vllm_lacks_are_no_fault_where_they_may_be_left_out() -> None:
    with Canned(canned(404, '{"detail": "Not Found"}')) as peer:
        client = WeightSyncClient(peer.url, timeout_s=10)
        client.shutdown_weight_transfer_engine()
        client.abort_weight_update()
        with pytest.raises(NotSupported):
            client.update_weight_version("x")


@pytest.mark.parametrize("peer", [(b"", 65536), (canned(200, " " * 1000), 1)], ids=["silent", "dripping"])
def test_a_peer_that_does_not_answer_costs_no_more_than_the_deadline(peer: tuple[bytes, int]) -> None:
    with Canned(peer[0], peer[1], stays=True) as slow, ThreadPoolExecutor(1) as threads:
        start = time.monotonic()
        call = threads.submit(WeightSyncClient(slow.url, timeout_s=0.3).get_weight_version)
        with pytest.raises(DeadlineExceeded, match="within 0.3 s"):
            call.result(10)
        assert 0.25 < time.monotonic() - start < 5


@pytest.mark.parametrize("urls", ["", "127.0.0.1:80", "ftp://x", [], ["http://a", "http://a"]])
def test_urls_that_cannot_be(urls: str | list[str]) -> None:
    with pytest.raises(ConfigError):
        WeightSyncClient(urls)


@pytest.mark.parametrize("token", ["é", "a\r\nX: y", " a", "a\x00"])
def test_tokens_that_cannot_be(token: str) -> None:
    for use in (lambda: WeightSyncClient("http://a", token), lambda: serve(TinyServer().control, token=token)):
        with pytest.raises(ConfigError, match="printable"):
            use()


def test_the_example_of_the_docs_runs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "weights.md").read_text(encoding="utf-8")
    code = text.split("## Over HTTP")[1].split("```python")[1].split("```")[0]
    exec(compile(code, "docs/weights.md", "exec"), {})


def test_every_error_has_a_status() -> None:
    for kind in _leaves(TransferQueueError):
        assert 400 <= bodies.status_of(kind("x")) < 600


def _leaves(kind: type[TransferQueueError]) -> list[type[TransferQueueError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in _leaves(child))]
