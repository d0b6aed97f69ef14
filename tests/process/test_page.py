"""The page of a service, as a browser asks for it: over HTTP, of a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import Child, freeze, until
from fragments import values
from pages import RunningPage, page_of, served
from paths import SOURCES
from PIL import Image
from zygote import CHILDREN

import transfer_queue as tq
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.page import access, beside
from transfer_queue.page.access import Access
from transfer_queue.page.printable import ident
from transfer_queue.weights.fleet import ReplicaStatus

TOKEN = "0123456789abcdef-page"
HOSTILE = "<script>alert(1)</script>\"'&\n\x1b[31m\u202e"


@pytest.fixture
def page(client: tq.TransferQueueClient) -> Iterator[RunningPage]:
    """The page of the test's service."""
    with page_of(str(client.address)) as found:
        yield found


@pytest.fixture
def guarded(client: tq.TransferQueueClient, tmp_path: Path) -> Iterator[RunningPage]:
    """As `page`, with a token."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with page_of(str(client.address), "--token-file", str(file)) as found:
        yield found


# ---- what it shows ----


def test_the_page_and_its_files_come_from_it_alone(page: RunningPage) -> None:
    status, headers, body = page.ask("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    for name in ("page.js", "htmx.min.js", "hx-sse.min.js", "page.css", "icon.svg"):
        status, _, more = page.ask(f"/static/{name}")
        assert status == 200
        body += more
    assert b"innerHTML" not in page.ask("/static/page.js")[2]
    assert [part for part in body.split(b"http")[1:] if not part.startswith(b"://www.w3.org/2000/svg")] == []


def test_a_viewer_sees_the_partition_fill(page: RunningPage, client: tq.TransferQueueClient) -> None:
    client.set_partition("p", size=4, metadata={"step": 3})
    tq.kv_batch_put(["a", "b"], "p", {"prompt": torch.ones(2, 3)})
    with page.look("p") as viewer:
        assert viewer.next("map")["runs"] == 2
        seen = viewer.next("look")
        assert (seen["status"], seen["trouble"], seen["tile-rows"]) == ("live", "", "2")
        assert "in 1 partition" in seen["tiles"]
        assert seen["about"] == "2 rows of 4 declared · 1 field · step 3"
        (lane,) = seen.of_id("lanes").of_class("field")
        assert (lane.text, lane.attributes["title"]) == ("prompt2", "prompt: float32 [3]")
        put_at = time.monotonic()
        tq.kv_batch_put(["c", "d"], "p", {"prompt": torch.ones(2, 3)})
        found = viewer.until("map", lambda found: found["size"] == 4)
        viewer.until("look", lambda seen: seen["about"].startswith("4 rows"))
        behind_s = time.monotonic() - put_at
        assert found["first_rows"] == [0, 1, 2, 3]
        assert behind_s < 5  # 0.5 s on a machine that has nothing else to do


def test_a_waiting_task_says_what_it_lacks(
    page: RunningPage, client: tq.TransferQueueClient, child: Callable[[str], Child]
) -> None:
    tq.kv_batch_put([str(number) for number in range(16)], "p", {"prompt": torch.ones(16, 1)})
    tq.kv_batch_put(["0", "1", "2", "3"], "p", {"reward": torch.ones(4)})
    with pytest.raises(DeadlineExceeded):  # what a task asked for before is not what it waits for
        client.get_meta(["critic_value"], 1, "p", task_name="actor", timeout_s=0)
    waiter = child(
        "import transfer_queue as tq; tq.init(); print('in', flush=True)\n"
        "tq.get_client().get_meta(['prompt', 'reward'], 8, 'p', task_name='actor', timeout_s=60)"
    )
    assert waiter.line() == "in"
    with page.look("p") as viewer:
        seen = viewer.until("look", lambda seen: seen["waits"] != "Nobody waits.")
    (wait,) = seen.of_id("waits").of_tag("li")
    short, lacks, who = (one.text for one in wait.of_tag("div"))
    assert short.startswith("actor waits for 4 × reward for ")
    assert who.startswith(f"pid {waiter.pid}, ")
    assert "'reward' written on 4" in lacks
    (task,) = seen.of_id("tasks").of_class("task-lane")
    assert (task.of_tag("h3")[0].text, "4 ready" in task.text) == ("actor", True)
    assert "actor waits for 4 × reward" in task.text


def test_leases_and_sessions_are_told_by_their_processes(page: RunningPage, client: tq.TransferQueueClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.ones(2)})
    client.get_meta(["x"], 2, "p", task_name="t", lease_s=60)
    with page.look("p") as viewer:
        seen = viewer.next("look")
    (lease,) = seen.rows("leases")
    assert lease[:3] == [f"pid {os.getpid()}", "t", "2"]
    assert 50 < float(lease[3].removesuffix(" s")) <= 60
    assert {one[1] for one in seen.rows("sessions")} == {f"pid {os.getpid()}", "this page"}


def test_groups_and_series_are_shown(page: RunningPage, client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("g", tq.GroupPolicy.windowed(1))
    pool.open("one", 2, source="math")
    tq.open_partition("step-1", "steps", consumers=["actor"], max_open=2)
    with page.look() as viewer:
        seen = viewer.next("look")
    assert seen["groups"].startswith("g 1 open · ")
    assert [one[:2] for one in seen.rows("groups")] == [["math", "1"]]
    assert seen["series"] == "steps step-1 (not yet done: actor)"
    assert not any("hidden" in seen.of_id(panel).attributes for panel in ("groups-panel", "series-panel"))


def test_rates_come_from_what_changed(page: RunningPage, client: tq.TransferQueueClient) -> None:
    tq.kv_put("first", "p", {"x": torch.ones(1)})
    with page.look("p") as viewer:
        viewer.next("look")
        tq.kv_batch_put([str(number) for number in range(100)], "p", {"x": torch.ones(100, 1)})
        seen = viewer.until("look", lambda seen: seen["about"].startswith("101 rows"))
    assert float(seen["tile-written"]) > 0
    assert "/s" in seen["lanes"]


# ---- one row ----


def test_the_journey_of_a_row(page: RunningPage, client: tq.TransferQueueClient) -> None:
    tq.set_weight_version(4)
    tq.kv_put("a", "p", {"prompt": "2 + 2 ="}, tag={"weight_version": 4, "source": "math"})
    tq.kv_put("a", "p", {"reward": torch.ones(())})
    client.checkpoint(0, ["actor"])
    client.nack(client.get_meta(["prompt", "reward"], 1, "p", task_name="actor", lease_s=60), reason="nan")
    client.ack(client.get_meta(["prompt", "reward"], 1, "p", task_name="actor", lease_s=60))
    client.checkpoint(1, ["actor"])
    status, found = page.row("p", key="a")
    assert (status, found["row-title"]) == (200, "Row #0 · a")
    assert "made with the newest weights" in found["row-body"]
    assert ["source", "math"] in found.rows("row-tags")
    me = f"pid {os.getpid()}"
    assert [one.text.rpartition(" ago")[0].rsplit(" ", 2)[0] for one in found.of_id("row-events").of_tag("li")] == [
        f"{me} wrote prompt", f"{me} wrote reward", f"{me} took it for actor", f"{me} gave back it for actor: nan",
        f"{me} took it for actor", f"{me} acknowledged it for actor",
    ]  # fmt: skip
    (task,) = found.rows("row-tasks")
    assert (task[0], task[1], task[3]) == ("actor", "consumed", "step 1, batch 1")
    assert page.row("p", row=0)[1]["row-title"] == page.row("p", wanted="#0")[1]["row-title"] == "Row #0 · a"
    assert page.row("p", wanted="a")[1]["row-title"] == "Row #0 · a"


def test_previews_are_short_and_nothing_in_them_is_run(page: RunningPage, client: tq.TransferQueueClient) -> None:
    given: dict[str, Any] = {
        "text": "x" * 100_000, "numbers": torch.arange(1000), "bytes": bytes(range(256)) * 100,
        "object": {"a": [1, (2, None)], "deep": [[[[[["gone"]]]]]]}, "many": list(range(100_000)),
    }  # fmt: skip
    tq.kv_put("a", "p", given)
    status, found = page.row("p", key="a")
    shown = values(found)
    assert status == 200
    assert all(len(one.text) < 2200 for one in shown.values())
    assert shown["text"].type == "text, 100,000 characters"
    assert shown["numbers"].text.startswith("0, 1, 2, 3")
    assert "mean 499.5" in shown["numbers"].about
    assert shown["bytes"].type == "25,600 bytes"
    assert shown["bytes"].text.startswith("00 01 02 03")
    assert shown["object"].text.startswith("{'a': [1, (2, None)], 'deep': [[[")
    assert shown["many"].text.startswith("0, 1, 2")


def test_of_a_long_tensor_nothing_is_said_but_how_it_begins(page: RunningPage, client: tq.TransferQueueClient) -> None:
    long = torch.zeros(3_000_000)
    long[-1] = 9
    tq.kv_put("a", "p", {"long": long, "wide": torch.zeros(200, 1_000_000, dtype=torch.uint8)})
    tq.kv_batch_put(["b", "c"], "q", {"ragged": torch.nested.nested_tensor([long, long[:2]], layout=torch.jagged)})
    shown = {**values(page.row("p", key="a")[1]), **values(page.row("q", key="b")[1])}
    assert shown["long"].type == shown["ragged"].type == "float32 [1048576], its beginning"
    assert shown["long"].about == ""
    assert shown["long"].text.endswith("0, …")
    assert shown["wide"].type == "uint8 [67×1000000], its beginning"
    assert values(page.row("q", key="c")[1])["ragged"].type == "float32 [2]"


def test_an_image_is_a_small_png(page: RunningPage, client: tq.TransferQueueClient) -> None:
    tall = torch.zeros(3, 600, 300, dtype=torch.uint8)
    tq.kv_put("a", "p", {"picture": Image.new("RGB", (900, 300), (9, 99, 199)), "tensor": tall, "text": "no"})
    shown = values(page.row("p", key="a")[1])
    for name, size in (("picture", (256, 85)), ("tensor", (100, 200))):
        assert shown[name].address == f"image?partition={ident('p')}&row=0&field={ident(name)}"
        status, headers, body = page.ask("/" + shown[name].address)
        assert (status, headers["content-type"], body[:8]) == (200, "image/png", b"\x89PNG\r\n\x1a\n")
        assert struct.unpack(">II", body[16:24]) == size
    assert page.ask(f"/image?partition={ident('p')}&row=0&field={ident('text')}")[0] == 404


def test_a_row_that_was_cleared_before_the_click_says_so(page: RunningPage, client: tq.TransferQueueClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.ones(2)})
    with page.look("p") as viewer:
        viewer.next("map")
        tq.kv_clear(["a"], "p")
        status, found = page.row("p", row=0)
        assert (status, "was cleared" in found["row-body"], found["row-title"]) == (404, True, "Row #0")
    assert page.row("p", key="nobody")[0] == 404
    assert page.row("gone", key="a")[0] == 404
    assert page.row("p")[0] == page.row("p", key="a", row=1)[0] == 400


def test_a_value_that_cannot_be_read_does_not_hide_the_others(
    service: Callable[..., tq.TransferQueueClient],
) -> None:
    os.environ["TQ_ALLOW_PICKLE"] = "1"
    try:
        client = service()
    finally:
        del os.environ["TQ_ALLOW_PICKLE"]
    tq.kv_put("a", "p", {"pickled": threading.Thread, "plain": "good"})
    with page_of(str(client.address)) as page:
        shown = values(page.row("p", key="a")[1])
    assert shown["plain"].text == "good"
    assert shown["pickled"].kind == "none"


def test_odd_numbers_and_dtypes_do_not_hide_the_others(page: RunningPage, client: tq.TransferQueueClient) -> None:
    given: dict[str, Any] = {
        "big_endian": np.arange(3, dtype=">i4"), "long_double": np.array([1.5], np.longdouble), "plain": "good",
        "bits": torch.ones(3, dtype=torch.uint8).view(torch.bits8),
    }  # fmt: skip
    tq.kv_put("a", "p", given)
    status, found = page.row("p", key="a")
    shown = {name: one.text for name, one in values(found).items()}
    assert (status, shown["plain"], shown["big_endian"]) == (200, "good", "0, 1, 2")
    assert shown["bits"].startswith("cannot be shown: ")
    assert "float128" in shown["long_double"]


# ---- hostile names and visitors ----


def test_hostile_names_and_texts_stay_texts_and_short(page: RunningPage, client: tq.TransferQueueClient) -> None:
    long = "n" * 10_000
    tq.kv_put(HOSTILE, HOSTILE, {HOSTILE: HOSTILE, long: long}, tag={HOSTILE: HOSTILE})
    with page.look(HOSTILE) as viewer:
        seen = viewer.next("look")
    status, found = page.row(HOSTILE, key=HOSTILE)
    assert status == 200
    for shown in (seen, found):
        assert len(shown.text) < 8000
        assert not {"\x1b", "\u202e"} & set(shown.text)
        assert not {"script", "x"} & {one.tag for one in shown.all()}
    assert seen["partition"].startswith("<script>alert(1)</script>\"'&\\n\\x1b[31m\\u202e")
    assert found["row-title"].startswith("Row #0 · <script>alert(1)")
    first, second = values(found)
    assert first.startswith("<script>")
    assert len(second) < 200


def test_every_answer_has_the_headers_that_keep_scripts_out(page: RunningPage) -> None:
    for path in ("/", "/static/page.js", "/row", "/nowhere", "/login"):
        headers = page.ask(path)[1]
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert (headers["cache-control"], headers["connection"]) == ("no-store", "close")
    with page.look() as viewer:
        assert viewer.next("look")["status"] == "live"


def test_a_foreign_host_name_or_origin_is_refused(page: RunningPage) -> None:
    assert page.ask("/", Host="evil.example")[0] == 403
    assert page.ask("/events", Host="evil.example:80")[0] == 403
    assert page.ask("/", Origin="http://evil.example")[0] == page.ask("/", Origin="null")[0] == 403
    assert page.ask("/", Host="localhost:1")[0] == 200
    assert page.ask("/", Origin=f"http://{page.host}")[0] == 200


def test_nothing_can_be_changed_through_it(page: RunningPage) -> None:
    for path in ("/", "/row", "/events", "/image"):
        for method in ("POST", "PUT", "DELETE"):
            assert page.ask(path, method)[0] == 405
    assert page.ask("/static/../serving.py")[0] == page.ask("/static/%2e%2e/serving.py")[0] == 404


def test_with_a_token_every_request_needs_it(guarded: RunningPage) -> None:
    assert guarded.ask("/")[:2][0] == 303
    assert guarded.ask("/")[1]["location"] == "login"
    for path in ("/events", "/row", "/image", "/static/page.js", "/?token=wrong-wrong-wrong"):
        assert guarded.ask(path)[0] in (401, 303)
    assert guarded.ask("/events")[0] == 401
    assert guarded.ask("/login")[0] == guarded.ask("/static/page.css")[0] == 200
    status, headers, _ = guarded.ask("/login", "POST", b"token=guess-guess-guess")
    assert (status, headers["location"], "set-cookie" in headers) == (303, "login#wrong", False)
    assert guarded.ask("/login", "POST", b"token=" + b"x" * 100_000)[1]["location"] == "login#wrong"
    for answer in (guarded.ask("/login", "POST", b"token=" + TOKEN.encode()), guarded.ask(f"/?token={TOKEN}")):
        status, headers, _ = answer
        assert (status, headers["location"]) == (303, ".")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert TOKEN not in cookie
        assert guarded.ask("/", Cookie=cookie.partition(";")[0])[0] == 200
        with guarded.look(Cookie=cookie.partition(";")[0]) as viewer:
            assert TOKEN not in viewer.next("look").text


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/events", "x/login?"), ("/events", "x/login#"), ("/row", "127.0.0.1:80/static/page.css?"),
        ("/lo\tgin", "x"), ("/static/page.c\nss", "x"),  # a parser of URLs leaves these characters out
    ],
)  # fmt: skip
def test_the_path_that_is_asked_for_decides_whether_a_token_is_needed(path: str, host: str) -> None:
    reached, sent = [], []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": path, "query_string": b"", "scheme": "http",
        "server": ("127.0.0.1", 80), "headers": [(b"host", host.encode())],
    }  # fmt: skip
    asyncio.run(Access(application, TOKEN, False, 80)(scope, None, send))  # type: ignore[arg-type]
    assert (reached, sent[0]["status"]) == ([], 401)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_form_that_does_not_come_keeps_no_connection(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    monkeypatch.setattr(access, "FORM_S", 0.01)
    sent: list[Any] = []

    async def receive() -> Any:
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def logged_in() -> None:
        scope = {"type": "http", "method": "POST", "path": "/login", "query_string": b"", "headers": [(b"host", b"x")]}
        await asyncio.wait_for(Access(send, TOKEN, False, 80)(scope, receive, send), 10)  # type: ignore[arg-type]

    asyncio.run(logged_in())
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


def test_without_a_token_it_listens_on_loopback_only(client: tq.TransferQueueClient) -> None:
    with pytest.raises(tq.errors.ConfigError, match="--token-file"):
        beside.listen("0.0.0.0", 0, "")
    with pytest.raises(tq.errors.ConfigError, match="70000 is no port"):
        beside.listen("127.0.0.1", 70_000, "")


def test_where_it_is_is_said_as_json(client: tq.TransferQueueClient) -> None:
    with page_of(str(client.address), "--json") as page:
        assert page.ask("/")[0] == 200


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tq.errors.NotSupported, match=r"pip install 'transfer-queue\[http\]'"):
        beside.check_installed()


def test_no_service_is_an_error_at_once() -> None:
    told = CHILDREN.run(
        ["-c", "from transfer_queue.cli import main; main()", "page", "--address", "unix:/nowhere/tq.sock"],
        {**os.environ, "PYTHONPATH": SOURCES},
    )
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr.startswith("tq: no server at unix:/nowhere/tq.sock")


# ---- trouble ----


def test_a_service_that_is_killed_and_started_again_comes_back(tmp_path: Path) -> None:
    run_dir, alone = str(tmp_path / "run"), _without_standby(tmp_path)
    with contextlib.ExitStack() as kept:
        with served(run_dir, *alone) as (server, _):
            page = kept.enter_context(page_of(f"unix:{run_dir}/tq.sock"))
            viewer = kept.enter_context(page.look())
            assert f"pid {server.pid} " in viewer.next("look")["facts"]
            server.kill()
            server.wait()
            assert viewer.until("look", lambda seen: seen["trouble"])["status"] == "no service"
        with served(run_dir, *alone) as (server, _):
            seen = viewer.until("look", lambda seen: not seen["trouble"])
            assert f"pid {server.pid} " in seen["facts"]


def _without_standby(folder: Path) -> tuple[str, str]:
    config = folder / "alone.yaml"
    config.write_text("server: {durability: none}\n")
    return "--config", str(config)


def test_a_frozen_service_is_told_and_goes_on(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    with served(run_dir) as (server, _), page_of(f"unix:{run_dir}/tq.sock") as page, page.look() as viewer:
        viewer.next("look")
        freeze(server.pid)
        try:
            seen = viewer.until("look", lambda seen: seen["trouble"])
            assert (seen["status"], "has not answered for" in seen["trouble"]) == ("no answer", True)
            assert page.ask("/")[0] == 200
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert viewer.until("look", lambda seen: not seen["trouble"])["status"] == "live"


def test_a_page_ends_while_a_frozen_service_is_asked_for_a_row(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    with served(run_dir) as (server, _), page_of(f"unix:{run_dir}/tq.sock") as page, page.look() as viewer:
        viewer.next("look")
        freeze(server.pid)
        try:
            visitor = page.connect()
            visitor.request("GET", f"/row?partition={ident('p')}&key=a")
            viewer.until("look", lambda seen: seen["status"] == "no answer")
            told_at = time.monotonic()
            page.process.send_signal(signal.SIGTERM)
            assert visitor.getresponse().status in (503, 504)
            visitor.close()
            assert page.process.wait() == 0
            assert time.monotonic() - told_at < 20  # 6 s; a read gives up after 30 s
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_fifty_viewers_cost_the_service_as_one(page: RunningPage, client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(1)})
    with contextlib.ExitStack() as viewers:
        streams = [viewers.enter_context(page.look("p")) for _ in range(50)]
        for stream in streams:
            stream.next("look")
        before, began = client.stats()["requests"], time.monotonic()
        for _ in range(3):
            for stream in streams:
                assert stream.next("look")["about"].startswith("1 rows")
        asked, passed_s = client.stats()["requests"] - before, time.monotonic() - began
    # three looks and their maps, however many may see them: an overview and two requests for a map each half second
    assert asked <= 3 * (passed_s / 0.5 + 2)


def test_it_detaches_when_nobody_looks_any_more(page: RunningPage, client: tq.TransferQueueClient) -> None:
    until(lambda: client.stats()["clients"] == 1, "the end of the look whether a service is there")
    with page.look() as viewer:
        viewer.next("look")
        assert client.stats()["clients"] == 2
    until(lambda: client.stats()["clients"] == 1, "the page's end as a client")


def test_a_slow_viewer_gets_the_latest_and_the_page_stays_small(
    page: RunningPage, client: tq.TransferQueueClient
) -> None:
    for number in range(150):
        tq.kv_put("a", f"{number}-{'p' * 300}", {"x": torch.ones(1)})
    process = psutil.Process(page.process.pid)
    with page.look() as fast, page.look() as slow:
        fast.next("look")
        slow.next("look")
        before = process.memory_info().rss
        for number in range(12):  # the list of partitions is sent each time: more bytes than a page of memory
            tq.kv_put("a", f"more-{number}", {"x": torch.ones(1)})
            fast.until("look", lambda seen, number=number: f"more-{number}" in seen["partition"])
        assert process.memory_info().rss - before < 32 << 20
        slow.until("look", lambda seen: "more-11" in seen["partition"])


def test_a_million_rows(page: RunningPage, client: tq.TransferQueueClient) -> None:
    for _ in range(10):
        client.put({"x": torch.zeros(100_000, dtype=torch.int8)}, partition_id="p")
    client.get_meta(["x"], 1000, "p", task_name="t")
    with page.look("p") as viewer:
        found = viewer.next("map")
        assert (found["size"], found["runs"], found["each"]) == (1_000_000, 512, 1954)
        server = psutil.Process(client.stats()["pid"])
        before = sum(server.cpu_times()[:2])
        for _ in range(10):
            assert viewer.next("look")["tile-rows"] == "1,000,000"
        assert sum(server.cpu_times()[:2]) - before < 0.5  # of 5 s
    assert values(page.row("p", row=999_999)[1])["x"].text == "0"


# ---- beside a server ----


def test_serve_starts_a_page_that_ends_with_it(tmp_path: Path) -> None:
    with served(str(tmp_path / "run"), "--page", "0") as (server, _):
        assert server.stderr is not None
        line = server.stderr.readline()
        assert line.startswith("page: http://127.0.0.1:")
        pid = _page_of(server.pid).pid
        page = RunningPage(line.split()[1], None)
        with page.look() as viewer:
            assert f"pid {server.pid} " in viewer.until("look", lambda seen: not seen["trouble"])["facts"]
        server.terminate()
        assert server.wait(20) == 0
        assert not psutil.pid_exists(pid)


def test_a_page_ends_also_when_its_server_is_killed(tmp_path: Path) -> None:
    with served(str(tmp_path / "run"), "--page", "0", *_without_standby(tmp_path)) as (server, _):
        page = _page_of(server.pid)
        server.kill()
        server.wait()
        until(lambda: not page.is_running() or page.status() == psutil.STATUS_ZOMBIE, "the end of the page")


def test_a_page_goes_on_with_the_standby_of_its_server(tmp_path: Path) -> None:
    with served(str(tmp_path / "run"), "--page", "0") as (server, _):
        assert server.stderr is not None
        page = RunningPage(server.stderr.readline().split()[1], None)
        process = _page_of(server.pid)
        with page.look() as viewer:
            with_standby = viewer.until("look", lambda seen: not seen["trouble"] and "standby pid" in seen["facts"])
            standby = int(with_standby["facts"].partition("standby pid ")[2].split()[0])
            server.kill()
            server.wait()
            seen = viewer.until("look", lambda seen: not seen["trouble"] and "1 takeover" in seen["facts"])
            assert f"pid {standby} " in seen["facts"].partition("standby")[0]
            os.kill(standby, signal.SIGTERM)
        until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the end of the page")


def _page_of(server: int) -> psutil.Process:
    (found,) = [one for one in psutil.Process(server).children() if "transfer_queue.page" in one.cmdline()]
    return found


def test_a_page_is_no_part_of_the_trace_of_its_job(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_TRACE", str(tmp_path / "trace"))
    with page_of(str(client.address)) as page, page.look() as viewer:
        assert viewer.next("look")["status"] == "live"
    assert not os.path.exists(tmp_path / "trace")


def test_the_server_of_a_page_imports_neither_starlette_nor_torch(fresh_child: Callable[[str], Child]) -> None:
    code = (
        "import sys, transfer_queue.cli, transfer_queue.server.process\n"
        "from transfer_queue.page import beside; beside.check_installed()\n"
        "print(sorted({'jinja2', 'starlette', 'uvicorn', 'torch'} & sys.modules.keys()))"
    )
    assert fresh_child(code).finish() == "[]"


def test_replicas_are_shown_with_the_weights_they_serve(page: RunningPage, client: tq.TransferQueueClient) -> None:
    client.report_replicas([
        ReplicaStatus("a", True, 7, "7", "", 1.0, 0.1), ReplicaStatus("b", False, 6, "6", "it is gone", 1.0, None),
    ])  # fmt: skip
    with page.look() as viewer:
        seen = viewer.until("look", lambda seen: len(seen.rows("replicas")) == 2)
    assert [one[:3] for one in seen.rows("replicas")] == [["b", "6", "it is gone"], ["a", "7", "ready"]]
    lines = seen.of_id("replicas").of_tag("tbody")[0].of_tag("tr")
    assert {one.attributes["title"] for one in lines} == {f"told by pid {os.getpid()}"}
