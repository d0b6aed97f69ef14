"""The client against our servers, against answers of vLLM's, and against peers that never answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from weights_inline import INIT_INFO, TOKEN, TinyServer, address, faults, infos, numbered

from transfer_queue.errors import (
    Aborted,
    AccessDenied,
    CommitFailed,
    ConfigError,
    DeadlineExceeded,
    DigestMismatch,
    Incomplete,
    InternalError,
    InvalidInput,
    NotOpen,
    NotSupported,
    ProtocolError,
    ServiceUnavailable,
    TransferQueueError,
    UnknownTensor,
    UpdateInProgress,
)
from transfer_queue.weights.http import HttpServer, WeightSyncClient, serve
from transfer_queue.weights.http.peer import HttpPeer
from transfer_queue.weights.transport.deadline import TimedCall


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
    assert [status.updating for status in client.statuses().values()] == [False, False]
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
    call: Callable[[WeightSyncClient], object], error: type[TransferQueueError]
) -> None:
    tiny = TinyServer()
    install(tiny, 5)
    with serve(tiny.control, token=TOKEN) as server:
        client = WeightSyncClient(server.url, TOKEN, timeout_s=20)
        with pytest.raises(error):
            call(client)
        assert client.status().updating is False


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


WORKER = (
    '{"error": {"message": "Worker failed with error \'no such tensor\'", "type": "InternalServerError", "code": 500}}'
)


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (canned(500, WORKER), InternalError, "no such tensor"),
        (canned(400, '{"error": {"message": "Field required", "code": 400}}'), InvalidInput, "Field"),
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
        (canned(200, "[" * 100_000), ProtocolError, "no JSON"),
        (b"nonsense\r\n\r\n", ServiceUnavailable, "BadStatusLine"),
        (b"", ServiceUnavailable, "weight_info"),
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
        with pytest.raises(DeadlineExceeded, match="no answer within"):
            call.result(10)
        assert 0.25 < time.monotonic() - start < 5


@pytest.mark.parametrize(
    "urls",
    [
        "", "127.0.0.1:80", "ftp://x", [], ["http://a", "http://a"], "http://a:PORT", "http://a:65536", "http://[::1",
        "http://a b:80", f"http://{'a' * 64}:80", "http://a..b", "http://a/é",
    ],
)  # fmt: skip
def test_urls_that_cannot_be(urls: str | list[str]) -> None:
    with pytest.raises(ConfigError):
        WeightSyncClient(urls)


def test_addresses_of_ipv6_are_urls_of_servers() -> None:
    assert [one.host for one in WeightSyncClient(["http://[fe80::abcd]", "http://[::1]:80"])._peers] == [
        "fe80::abcd", "::1",
    ]  # fmt: skip


@pytest.mark.parametrize("token", ["é", "a\r\nX: y", " a", "a\x00"])
def test_tokens_that_cannot_be(token: str) -> None:
    for use in (lambda: WeightSyncClient("http://a", token), lambda: serve(TinyServer().control, token=token)):
        with pytest.raises(ConfigError, match="printable"):
            use()


class LateUpdate:
    """A client of two servers that was called off an update: that call goes on in a thread of its own, and fails at
    both servers once `end` is called."""

    def __init__(self, fault: TransferQueueError, monkeypatch: pytest.MonkeyPatch) -> None:
        self._fault, self._going, self._asked = fault, threading.Event(), threading.Semaphore(0)
        monkeypatch.setattr(HttpPeer, "call", lambda _peer, *given: self._answer(*given))
        self.client = WeightSyncClient(["http://a", "http://b"])
        self.client.allow(60)
        self._call = TimedCall(self.client.update_weights, {})
        assert all(self._asked.acquire(timeout=10) for _ in range(2))

    def _answer(self, _method: str, path: str, *_rest: Any) -> dict[str, Any]:
        if path == "/update_weights":
            self._asked.release()
            assert self._going.wait(10)
            raise self._fault
        if path == "/init_weight_transfer_engine":
            self.end()
        return {}

    def end(self) -> None:
        self._going.set()
        assert self._call.ended(10)


def test_what_a_call_of_an_update_before_ends_with_is_no_fault_of_the_call_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = LateUpdate(Aborted("the trainer gave it up"), monkeypatch)
    late.client.init_weight_transfer_engine({})
    assert late.client.failures == {}


def test_a_call_of_an_update_before_that_is_lost_leaves_nobody_out_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateUpdate(ServiceUnavailable("the connection broke"), monkeypatch)
    late.client.allow(60)
    late.end()
    assert late.client.missed() == {}
