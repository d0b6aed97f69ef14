"""The page in a real browser: what it draws, by keyboard too, and that nobody's text becomes markup."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import freeze, until
from pages import RunningPage, page_of, served

import transfer_queue as tq
from tools import browser
from transfer_queue.page.printable import ident
from transfer_queue.weights.fleet import ReplicaStatus

pytestmark = pytest.mark.skipif(browser.found() is None, reason="no chromium is installed here")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>'\"&"
SCRIPTS = "document.querySelectorAll('script:not([src^=\"static/\"])').length"


@pytest.fixture
def tab() -> Iterator[browser.Tab]:
    path = browser.found()
    assert path is not None
    with browser.browser(path) as found:
        yield found


@pytest.fixture
def page(client: tq.TransferQueueClient) -> Iterator[RunningPage]:
    with page_of(str(client.address)) as found:
        yield found


def text(tab: browser.Tab, selector: str) -> str:
    """What a person reads there."""
    return str(tab.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''"))


def shows(tab: browser.Tab, selector: str, part: str) -> None:
    """Wait until it is there."""
    until(lambda: part in text(tab, selector), f"{part!r} in {selector}", 20)


def is_wider(tab: browser.Tab) -> bool:
    """Whether the page has to be scrolled sideways."""
    return bool(tab.evaluate("document.documentElement.scrollWidth > innerWidth"))


def test_the_map_fills_while_somebody_looks(page: RunningPage, tab: browser.Tab) -> None:
    tq.kv_batch_put([str(number) for number in range(8)], "p", {"prompt": torch.ones(8, 1)})
    tab.open(page.url)
    shows(tab, "#status", "live")
    shows(tab, "#lanes", "prompt\n8")
    paint = "document.querySelector('#cells').getContext('2d').getImageData(20, 18 + 36 * {}, 1, 1).data.join()"
    tq.kv_batch_put(["0", "1", "2", "3"], "p", {"reward": torch.ones(4)})
    shows(tab, "#lanes", "reward\n4")
    until(lambda: tab.evaluate(paint.format(1)) == tab.evaluate(paint.format(0)), "reward as written as prompt", 20)
    assert [one for one in tab.remarks if "getImageData" not in one] == []


def test_the_keyboard_moves_on_the_map_opens_a_row_and_closes_it(page: RunningPage, tab: browser.Tab) -> None:
    tq.kv_batch_put([f"key-{number}" for number in range(8)], "p", {"prompt": ["hello"] * 8})
    tab.open(page.url)
    shows(tab, "#lanes", "prompt")
    tab.evaluate("document.querySelector('#theme').focus()")
    for _ in range(10):
        tab.press("Tab")
        if tab.evaluate("document.activeElement.id") == "cells":
            break
    assert tab.evaluate("document.activeElement.id") == "cells"
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    assert tab.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "row #2: prompt written"
    tab.press("Enter")
    shows(tab, "#row-title", "Row #2 · key-2")
    shows(tab, "#row-body", "hello")
    assert f"pid {os.getpid()} wrote prompt" in text(tab, "#row-body")
    tab.press("Escape")
    assert tab.evaluate("document.querySelector('#row').open") is False
    assert tab.evaluate("document.activeElement.id") == "cells"


def test_a_row_is_found_by_its_key_and_a_cleared_one_says_so(page: RunningPage, tab: browser.Tab) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"picture": torch.zeros(2, 3, 40, 40, dtype=torch.uint8)})
    tab.open(page.url)
    shows(tab, "#lanes", "picture")
    find = "document.querySelector('#wanted').value = {!r}; document.querySelector('#find').requestSubmit()"
    tab.evaluate(find.format("b"))
    shows(tab, "#row-title", "Row #1 · b")
    until(lambda: tab.evaluate("document.querySelector('#row-body img')?.naturalWidth") == 40, "the picture", 20)
    tq.kv_clear(["a"], "p")
    tab.evaluate(find.format("#0"))
    shows(tab, "#row-body", "it was cleared")
    pool = tq.group_pool("p", tq.GroupPolicy())
    pool.open("g", 1)
    (attempt,) = pool.claim()
    made = pool.finish(attempt, {"x": torch.zeros(1, 3)})
    pool.ack(pool.select(1))
    tab.evaluate(find.format(f"#{made.global_indexes[0]}"))
    made_it = f"made it: slot 0 of group 'g', attempt {attempt.attempt}"
    for told in (made_it, "took group 'g'", "acknowledged group 'g'"):
        shows(tab, "#row-body", told)


def test_hostile_names_and_texts_are_text(page: RunningPage, tab: browser.Tab) -> None:
    tq.kv_put(HOSTILE, HOSTILE, {HOSTILE: HOSTILE, "n" * 10_000: "x" * 10_000}, tag={HOSTILE: HOSTILE})
    tq.get_client().get_meta([HOSTILE], 1, HOSTILE, task_name=HOSTILE, lease_s=60)
    tab.open(page.url)
    shows(tab, "#leases", "<script>")
    shows(tab, "#lanes", "<img src=x")
    tab.evaluate("openRow(0)")
    shows(tab, "#row-body", "onerror=")
    assert tab.evaluate("document.title") == "transfer_queue"
    assert tab.evaluate(SCRIPTS) == 0
    assert not is_wider(tab)
    assert tab.remarks == []


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_desk_and_a_phone_light_and_dark(
    page: RunningPage, tab: browser.Tab, width: int, height: int, dark: bool
) -> None:
    tq.kv_batch_put(["a", "b"], "a-partition-of-a-long-name/" * 4, {"a_field_of_a_long_name" * 3: torch.ones(2)})
    tab.open(page.url, width, height, dark)
    shows(tab, "#lanes", "a_field")
    assert not is_wider(tab)
    ground = "getComputedStyle(document.body).backgroundColor"
    first = tab.evaluate(ground)
    assert (sum(int(one) for one in first[4:-1].split(", ")) < 200) is dark
    tab.evaluate("document.querySelector('#theme').click()")
    assert tab.evaluate(ground) != first


def test_everything_a_person_uses_has_a_name(page: RunningPage, tab: browser.Tab) -> None:
    tab.open(page.url)
    shows(tab, "#status", "live")
    unnamed = tab.evaluate(
        "[...document.querySelectorAll('button, input, select, [tabindex], section, dialog')].filter(one => !("
        "one.innerText.trim() || one.ariaLabel || one.labels?.length || one.getAttribute('aria-labelledby')))"
        ".map(one => one.id)"
    )
    assert unnamed == []


def test_it_is_painted_at_once(page: RunningPage, tab: browser.Tab) -> None:
    tab.open(page.url)
    shows(tab, "#status", "live")
    paint_ms = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1")
    assert 0 < paint_ms < 5000  # 0.1 s where nobody else uses the machine


def test_a_service_that_stands_still_or_is_gone_is_told_and_comes_back(tab: browser.Tab, tmp_path: Path) -> None:
    run_dir, alone = str(tmp_path / "run"), tmp_path / "alone.yaml"
    alone.write_text("server: {durability: none}\n")
    with served(run_dir, "--config", str(alone)) as (server, _), page_of(f"unix:{run_dir}/tq.sock") as page:
        tab.open(page.url)
        shows(tab, "#status", "live")
        freeze(server.pid)
        try:
            shows(tab, "#trouble", "has not answered for")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        shows(tab, "#status", "live")
        server.kill()
        server.wait()
        shows(tab, "#status", "no service")
        with served(run_dir, "--config", str(alone)) as (again, _):
            shows(tab, "#status", "live")
            shows(tab, "#facts", f"pid {again.pid}")


def test_a_page_that_ends_is_told(client: tq.TransferQueueClient, tab: browser.Tab) -> None:
    with page_of(str(client.address)) as page:
        tab.open(page.url)
        shows(tab, "#status", "live")
    shows(tab, "#status", "no page")


def test_the_login_lets_in_who_has_the_token(client: tq.TransferQueueClient, tab: browser.Tab, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef-page")
    file.chmod(0o600)
    log_in = "document.querySelector('#token').value = {!r}; document.querySelector('form').requestSubmit()"
    with page_of(str(client.address), "--token-file", str(file)) as page:
        tab.open(page.url)
        shows(tab, "form", "Token")
        tab.evaluate(log_in.format("a wrong one"))
        loaded = "location.hash === '#wrong' && document.readyState === 'complete'"
        until(lambda: tab.evaluate(loaded) is True, "the form once more")  # the answer is a page of its own
        shows(tab, "#wrong", "not the token")
        tab.evaluate(log_in.format("0123456789abcdef-page"))
        shows(tab, "#status", "live")
        assert "0123456789abcdef" not in tab.evaluate("location.href + document.cookie + document.body.innerHTML")


def test_a_page_that_is_started_anew_asks_for_its_token(
    client: tq.TransferQueueClient, tab: browser.Tab, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef-page")
    file.chmod(0o600)
    with page_of(str(client.address), "--token-file", str(file)) as page:
        tab.open(f"{page.url}?token=0123456789abcdef-page")
        shows(tab, "#status", "live")
        port = page.host.rpartition(":")[2]
    with page_of(str(client.address), "--token-file", str(file), "--port", port):
        shows(tab, "form", "Token")


def test_the_weights_of_each_replica_are_shown_where_there_are_some(
    page: RunningPage, tab: browser.Tab, client: tq.TransferQueueClient
) -> None:
    tab.open(page.url)
    shows(tab, "#status", "live")
    assert tab.evaluate("document.querySelector('#replicas-panel').hidden")
    client.report_replicas([
        ReplicaStatus("a", True, 7, "7", "", 1.0, 0.1), ReplicaStatus("b", False, 6, "6", HOSTILE, 1.0, None),
    ])  # fmt: skip
    shows(tab, "#replicas", HOSTILE)
    assert "ready" in text(tab, "#replicas tbody tr:last-child")
    assert tab.evaluate("document.title") == "transfer_queue"


CHOOSE = """(() => {
    const list = document.querySelector('#partition')
    list.focus()
    list.value = [...list.options].find(one => one.text === %r).value
    list.dispatchEvent(new Event('change', {bubbles: true}))
})()"""
CHOSEN = "document.querySelector('#partition').selectedOptions[0]?.text"


def put_two_partitions() -> None:
    tq.kv_batch_put(["a", "b"], "first", {"x": torch.ones(2)})
    tq.kv_batch_put(["a", "b", "c"], "second", {"y": torch.ones(3)})


def test_a_partition_that_was_chosen_is_in_the_address(page: RunningPage, tab: browser.Tab) -> None:
    put_two_partitions()
    tab.open(page.url)
    shows(tab, "#about", "2 rows")
    assert tab.evaluate(CHOSEN) == "first"
    tab.evaluate("window.isSamePage = true")
    tab.evaluate(CHOOSE % "second")
    shows(tab, "#about", "3 rows")
    shows(tab, "#lanes", "y\n3")
    assert tab.evaluate("window.isSamePage") is True
    assert tab.evaluate("location.search") == f"?partition={ident('second')}"
    tab.call("Page.reload")
    until(lambda: tab.evaluate("window.isSamePage") is None, "another page", 20)
    shows(tab, "#about", "3 rows")
    assert tab.evaluate(CHOSEN) == "second"
    tab.evaluate("history.back()")
    shows(tab, "#about", "2 rows")
    assert tab.evaluate(CHOSEN) == "first"


def test_the_first_partition_is_shown_in_place_of_one_that_is_gone(page: RunningPage, tab: browser.Tab) -> None:
    put_two_partitions()
    tab.open(f"{page.url}?partition={ident('second')}")
    shows(tab, "#lanes", "y\n3")
    tq.get_client().clear_partition("second")
    shows(tab, "#lanes", "x\n2")
    assert tab.evaluate(CHOSEN) == "first"


def test_whoever_chooses_a_partition_is_not_disturbed(page: RunningPage, tab: browser.Tab) -> None:
    put_two_partitions()
    tab.open(page.url)
    shows(tab, "#about", "2 rows")
    tab.evaluate("document.querySelector('#partition').focus()")
    tq.kv_put("a", "third", {"x": torch.ones(1)})
    shows(tab, "#tiles", "in 3 partitions")
    options = "document.querySelector('#partition').options.length"
    assert (tab.evaluate(options), tab.evaluate("document.activeElement.id")) == (2, "partition")
    tab.evaluate("document.querySelector('#wanted').focus()")
    until(lambda: tab.evaluate(options) == 3, "the list with the third", 20)


def test_what_changes_leaves_focus_and_scroll_where_they_are(page: RunningPage, tab: browser.Tab) -> None:
    tq.kv_batch_put([str(number) for number in range(8)], "p", {"x": ["y"] * 8})
    tab.open(page.url, 1280, 400)
    shows(tab, "#lanes", "x\n8")
    tab.evaluate("document.querySelector('#wanted').focus(); document.querySelector('#wanted').value = 'half a'")
    tab.evaluate("scrollTo(0, 60)")
    tq.kv_put("more", "p", {"x": "y"})
    shows(tab, "#lanes", "x\n9")
    now = tab.evaluate("[document.activeElement.id, document.activeElement.value, scrollY]")
    assert now == ["wanted", "half a", 60]


def test_the_row_after_keeps_the_focus_on_its_button(page: RunningPage, tab: browser.Tab) -> None:
    tq.kv_batch_put(["a", "b", "c"], "p", {"x": ["of a", "of b", "of c"]})
    tab.open(page.url)
    shows(tab, "#lanes", "x\n3")
    tab.evaluate("openRow(0)")
    shows(tab, "#row-body", "of a")
    assert tab.evaluate("document.activeElement.id") == "row-close"
    assert tab.evaluate("document.querySelector('#row-before').disabled") is True
    tab.evaluate("document.querySelector('#row-after').focus()")
    for key in "bc":
        tab.press("Enter")
        shows(tab, "#row-body", f"of {key}")
        assert tab.evaluate("document.activeElement.id") == "row-after"
    tab.press("Enter")
    shows(tab, "#row-body", "row with index 3 is not in partition 'p'")
    assert text(tab, "#row-title") == "Row #3"


def test_a_page_that_ended_says_so_of_a_row_and_is_back_when_another_one_is(
    client: tq.TransferQueueClient, tab: browser.Tab
) -> None:
    tq.kv_put("a", "p", {"x": "y"})
    with page_of(str(client.address)) as page:
        tab.open(page.url)
        shows(tab, "#lanes", "x\n1")
        port = page.host.rpartition(":")[2]
    shows(tab, "#status", "no page")
    tab.evaluate("openRow(0)")
    shows(tab, "#row-body", "The page's own process does not answer.")
    tab.press("Escape")
    with page_of(str(client.address), "--port", port):
        shows(tab, "#status", "live")
        tab.evaluate("openRow(0)")
        shows(tab, "#row-body", "wrote x")


def test_a_page_that_stands_still_is_told_and_goes_on(page: RunningPage, tab: browser.Tab) -> None:
    tab.open(page.url)
    shows(tab, "#status", "live")
    freeze(page.process.pid)
    try:
        shows(tab, "#status", "no page")
    finally:
        os.kill(page.process.pid, signal.SIGCONT)
    shows(tab, "#status", "live")


def test_a_tab_that_is_hidden_is_no_viewer(page: RunningPage, tab: browser.Tab, client: tq.TransferQueueClient) -> None:
    tab.open(page.url)
    shows(tab, "#status", "live")
    hide = (
        "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    tab.evaluate(hide.format("true"))
    until(lambda: client.stats()["clients"] == 1, "the page's end as a client", 20)
    tq.kv_put("a", "p", {"x": "y"})
    tab.evaluate(hide.format("false"))
    shows(tab, "#lanes", "x\n1")
    assert text(tab, "#status") == "live"
