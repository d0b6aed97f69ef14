"""What every server with vLLM's weight-transfer routes has to do: one suite for ours and for vLLM.

`CASES` are functions of a `Subject`; each leaves the server running, without an open update. Where vLLM answers 500 to
a caller's mistake and ours says what it was (`typed`), the cases ask for that of ours only.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from conftest import until

Update = list[dict[str, Any]]


class Said(NamedTuple):
    """An answer to a request for text: HTTP status, why it ended, and the versions that the steps were made with."""

    status: int
    reason: str
    versions: list[int]


class Subject:
    """The server under test. `make(n)` gives the parts of an update to version n, each higher than the one before;
    `bad(n)` updates that must be refused, by name; `generate(num_steps, request_id)` blocks until
    the answer; `num_running` requests are within, `num_steps` were made since the server began, and `num_begun`
    requests have had their first: None where those within are those that take steps."""

    def __init__(
        self, url: str, token: str, init_info: dict[str, Any], make: Callable[[int], Update],
        bad: Callable[[int], dict[str, Update]], generate: Callable[[int, str], Said], num_running: Callable[[], int],
        num_steps: Callable[[], int], *, typed: bool = True, may_reset: bool = True,
        world_size: tuple[int, int] = (6, 2),
        steps: int = 600, long: int = 100_000, holds: bool = False, known_as: Callable[[str], str] = str,
        num_begun: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self.url, self.token, self.init_info = url, token, init_info
        self.make, self.bad, self.generate = make, bad, generate
        self.num_running, self.num_steps = num_running, num_steps
        self.typed, self.may_reset, self.world_size = typed, may_reset, world_size
        self.steps, self.long = steps, long  # of a request that a pause can meet, and of one that somebody has to end
        self.holds = holds  # new requests while paused (vLLM 0.32 does) instead of refusing them with 503
        self.known_as = known_as  # what the server calls a request
        self.num_begun = num_begun
        self.numbers = itertools.count(1)
        self.version = 0

    def ask(self, method: str, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, Any]:
        """Status and JSON."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        parts = urlsplit(self.url)
        link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        try:
            link.request(method, path, data, headers)
            answer = link.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            link.close()

    def good(self, method: str, path: str, body: Any = None) -> Any:
        status, found = self.ask(method, path, body)
        assert status == 200, (path, status, found)
        return found

    def refused(
        self, method: str, path: str, reason: str, body: Any = None, status: int = 409, *, by_engine: bool = False
    ) -> None:
        """The call is refused as it should be, and the server lives. What an engine refuses `by_engine` may be answered
        with 200 and do nothing: inside vLLM's workers nothing raises."""
        found_status, found = self.ask(method, path, body)
        if self.typed:
            error = found["error"]
            assert (found_status, error["code"], error["reason"]) == (status, status, reason), found
            assert error["message"]
        else:
            assert 400 <= found_status <= 500 or (by_engine and found_status == 200)
        assert self.good_health()

    def turns_away(self) -> None:
        """While paused."""
        if not self.holds:
            assert self.generate(1, "").status == 503

    def good_health(self) -> bool:
        parts = urlsplit(self.url)
        link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        try:
            link.request("GET", "/health")
            return link.getresponse().status == 200
        finally:
            link.close()

    def label(self) -> str:
        return str(self.good("GET", "/weight_info")["weight_version"])

    def checksums(self) -> dict[str, str]:
        return dict(self.good("POST", "/weight_checker", {"action": "checksum"})["checksums"])

    def install(self, label: str | None = None) -> int:
        """A good update to the next version."""
        number = next(self.numbers)
        self.good("POST", "/start_weight_update")
        for part in self.make(number):
            self.good("POST", "/update_weights", {"update_info": part})
        self.good("POST", "/finish_weight_update", {"weight_version": label} if label else None)
        self.version = number
        return number


class Load:
    """Requests in flight: each `count` of them has `num_steps` steps."""

    def __init__(self, subject: Subject, num_steps: int, count: int = 3) -> None:
        subject.good("POST", "/pause?mode=keep")  # so that all begin together
        self._threads = ThreadPoolExecutor(count)
        names = [f"load-{next(_names)}" for _ in range(count)]
        num_begun = subject.num_begun
        before = num_begun() if num_begun else 0
        self.calls = [self._threads.submit(subject.generate, num_steps, name) for name in names]
        self.names = names
        until(lambda: subject.num_running() >= count, "that all requests run")
        subject.good("POST", "/resume")
        if num_begun:  # a pause can meet some in a queue, where vLLM lets them wait for the end of it
            until(lambda: num_begun() >= before + count, "that all requests have begun")

    def ends(self) -> list[Said]:
        found = [call.result(60) for call in self.calls]
        self._threads.shutdown()
        return found


_names = itertools.count()


def an_update_has_vllms_answers(subject: Subject) -> None:
    number = next(subject.numbers)
    init = subject.good("POST", "/init_weight_transfer_engine", {"init_info": subject.init_info})
    assert init == {"message": "Weight transfer initialized"}
    assert subject.good("POST", "/start_weight_update") == {"message": "Weight update started"}
    for part in subject.make(number):
        assert subject.good("POST", "/update_weights", {"update_info": part}) == {"message": "Weights updated"}
    assert subject.good("POST", "/finish_weight_update") == {"message": "Weight update finished"}
    assert set(subject.generate(2, "").versions) == {number}


def the_label_changes_only_with_a_commit(subject: Subject) -> None:
    subject.install("before")
    number = next(subject.numbers)
    subject.good("POST", "/start_weight_update")
    for part in subject.make(number):
        subject.good("POST", "/update_weights", {"update_info": part})
        assert subject.label() == "before"
    subject.good("POST", "/finish_weight_update", {"weight_version": "after"})
    assert subject.label() == "after"
    body = {"new_version": "renamed"}
    assert subject.good("POST", "/update_weight_version", body) == {"success": True, "new_version": "renamed"}
    assert subject.label() == "renamed"


def steps_out_of_order_are_refused(subject: Subject) -> None:
    part = subject.make(next(subject.numbers))[0]
    subject.refused("POST", "/update_weights", "not_open", {"update_info": part})
    subject.refused("POST", "/finish_weight_update", "not_open")
    subject.good("POST", "/start_weight_update")
    subject.refused("POST", "/start_weight_update", "update_in_progress")
    subject.refused("POST", "/shutdown_weight_transfer_engine", "update_in_progress")
    subject.refused("POST", "/finish_weight_update", "not_open", by_engine=True)
    subject.install("in order")
    assert subject.label() == "in order"


def a_failed_update_leaves_the_old_weights(subject: Subject) -> None:
    subject.install("good")
    before = subject.checksums()
    for name, parts in subject.bad(next(subject.numbers)).items():
        subject.good("POST", "/start_weight_update")
        statuses = [subject.ask("POST", "/update_weights", {"update_info": part})[0] for part in parts]
        status, _ = subject.ask("POST", "/finish_weight_update")
        if subject.typed:
            assert max(*statuses, status) in (400, 409, 422), name
        assert subject.good("POST", "/weight_checker", {"action": "compare", "baseline": before})["match"], name
        assert subject.label() == "good"
        assert set(subject.generate(1, "").versions) == {subject.version}
        assert subject.good_health()
    subject.install("next")
    assert subject.label() == "next"


def malformed_requests_are_400(subject: Subject) -> None:
    for path, raw, param in (
        ("/init_weight_transfer_engine", b"{}", "body.init_info"),
        ("/init_weight_transfer_engine", b'{"init_info": 3}', "body.init_info"),
        ("/update_weights", b"{}", "body.update_info"),
        ("/update_weight_version", b'{"new_version": []}', "body.new_version"),
        ("/weight_checker", b'{"action": "steal"}', "body.action"),
        ("/init_weight_transfer_engine", b"[1]", None),
        ("/init_weight_transfer_engine", b"{", None),
        ("/update_weights", b"\xff\xfe", None),
        ("/abort_requests", b"not json", None),
        ("/abort_requests", b"[]", None),
    ):
        status, found = subject.ask("POST", path, raw=raw)
        assert status == 400, (path, raw, found)
        assert found["error"]["code"] == 400
        assert found["error"]["type"] == "Bad Request"
        if param is not None:
            assert str(found["error"]["param"]).startswith(param)
    assert subject.ask("POST", "/pause?mode=sometimes")[0] == 400
    assert subject.ask("GET", "/get_world_size?include_dp=perhaps")[0] == 400
    assert subject.good("GET", "/is_paused") == {"is_paused": False}


def keep_freezes_requests_and_they_go_on_with_new_weights(subject: Subject) -> None:
    old = subject.install()
    begin = subject.num_steps()
    load = Load(subject, subject.steps)
    until(lambda: subject.num_steps() > begin + 5, "steps with the old weights")
    assert subject.good("POST", "/pause?mode=keep") == {"status": "paused"}
    assert subject.good("GET", "/is_paused") == {"is_paused": True}
    frozen = subject.num_steps()
    with ThreadPoolExecutor(1) as threads:
        queued = threads.submit(subject.generate, 2, "")
        new = subject.install()
        assert not queued.done()
        assert subject.num_steps() == frozen
        assert subject.good("POST", "/resume") == {"status": "resumed"}
        assert queued.result(30) == Said(200, "length", [new, new])
    found = load.ends()
    assert any(old in said.versions for said in found)
    for said in found:
        assert (said.status, said.reason, len(said.versions)) == (200, "length", subject.steps)
        assert said.versions == sorted(said.versions)
        assert set(said.versions) <= {old, new}
        assert said.versions[-1] == new
    assert subject.good("GET", "/is_paused") == {"is_paused": False}


def abort_ends_requests_and_refuses_new_ones(subject: Subject) -> None:
    old = subject.install()
    load = Load(subject, subject.long)
    subject.good("POST", "/pause?mode=abort")
    assert {(said.reason, *set(said.versions)) for said in load.ends()} <= {("abort", old), ("abort",)}
    subject.turns_away()
    new = subject.install()
    subject.turns_away()
    subject.good("POST", "/resume")
    assert subject.generate(1, "") == Said(200, "length", [new])


def wait_lets_requests_end(subject: Subject) -> None:
    old = subject.install()
    load = Load(subject, subject.steps)
    subject.good("POST", "/pause?mode=wait")
    if subject.typed:
        assert subject.num_running() == 0
    until(lambda: subject.num_running() == 0, "that the answers are out")  # vLLM counts those on their way
    assert [(said.reason, said.versions) for said in load.ends()] == [("length", [old] * subject.steps)] * 3
    subject.turns_away()
    subject.good("POST", "/resume")
    assert subject.generate(1, "").status == 200


def requests_are_aborted_without_a_pause(subject: Subject) -> None:
    load = Load(subject, subject.long)
    one = subject.good("POST", "/abort_requests", {"request_ids": [subject.known_as(load.names[0])]})
    assert one == {"status": "aborted", "aborted": 1}
    assert load.calls[0].result(30).reason == "abort"
    assert not load.calls[1].done()
    assert subject.good("POST", "/abort_requests", {}) == {"status": "aborted", "aborted": 2}
    assert {said.reason for said in load.ends()} == {"abort"}
    assert subject.generate(1, "").status == 200


def checksums_tell_weights_apart(subject: Subject) -> None:
    subject.install()
    first = subject.checksums()
    assert all(len(digest) == 64 for digest in first.values())
    same = {"action": "compare", "baseline": first}
    assert subject.good("POST", "/weight_checker", same) == {"match": True, "mismatches": []}
    subject.install()
    other = subject.good("POST", "/weight_checker", same)
    assert not other["match"]
    # vLLM's checker lists tensors that no version changes, too.
    assert set(other["mismatches"]) == set(first) if subject.typed else set(other["mismatches"]) < set(first)
    assert subject.ask("POST", "/weight_checker", {"action": "compare"})[0] == 400
    if subject.may_reset:
        now = subject.checksums()
        assert subject.good("POST", "/weight_checker", {"action": "reset"}) == {"status": "reset"}
        noise = subject.good("POST", "/weight_checker", {"action": "compare", "baseline": now})
        assert noise["mismatches"] == sorted(now) if subject.typed else noise["mismatches"]
        number = subject.install()
        assert set(subject.generate(1, "").versions) == {number}


def the_world_has_a_size(subject: Subject) -> None:
    everything, one = subject.world_size
    assert subject.good("GET", "/get_world_size") == {"world_size": everything}
    assert subject.good("GET", "/get_world_size?include_dp=false") == {"world_size": one}


def a_draft_is_refused_where_there_is_none(subject: Subject) -> None:
    subject.refused("POST", "/start_draft_weight_update", "not_supported")


def after_a_shutdown_it_has_to_be_initialised(subject: Subject) -> None:
    assert subject.good("POST", "/shutdown_weight_transfer_engine") == {"message": "Weight transfer shut down"}
    if subject.typed:
        subject.refused("POST", "/start_weight_update", "not_initialized")
    wrong = {"init_info": {"way": "none that exists"}}
    subject.refused("POST", "/init_weight_transfer_engine", "invalid_input", wrong, 400, by_engine=True)
    subject.good("POST", "/init_weight_transfer_engine", {"init_info": subject.init_info})
    subject.install()


def one_of_many_starts_wins(subject: Subject) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: subject.ask("POST", "/start_weight_update")[0], range(16)))
    assert found.count(200) == 1
    if subject.typed:
        assert set(found) == {200, 409}
    subject.ask("POST", "/finish_weight_update")
    subject.install()


def every_step_sees_one_version(subject: Subject) -> None:
    first = subject.install()
    stop = threading.Event()

    def talk(_: int) -> list[Said]:
        found = []
        while not stop.is_set():
            found.append(subject.generate(20, ""))
        return found

    with ThreadPoolExecutor(3) as threads:
        talks = [threads.submit(talk, index) for index in range(3)]
        for _ in range(8):
            subject.install()
        stop.set()
        said = [one for talk in talks for one in talk.result(60)]
    assert all((one.reason, len(one.versions)) == ("length", 20) for one in said)
    assert all(one.versions == sorted(one.versions) for one in said)
    seen = {version for one in said for version in one.versions}
    assert len(seen) > 1
    assert first <= min(seen)
    assert max(seen) <= subject.version


CASES: list[Callable[[Subject], None]] = [
    an_update_has_vllms_answers,
    the_label_changes_only_with_a_commit,
    steps_out_of_order_are_refused,
    a_failed_update_leaves_the_old_weights,
    malformed_requests_are_400,
    keep_freezes_requests_and_they_go_on_with_new_weights,
    abort_ends_requests_and_refuses_new_ones,
    wait_lets_requests_end,
    requests_are_aborted_without_a_pause,
    checksums_tell_weights_apart,
    the_world_has_a_size,
    a_draft_is_refused_where_there_is_none,
    after_a_shutdown_it_has_to_be_initialised,
    one_of_many_starts_wins,
    every_step_sees_one_version,
]
