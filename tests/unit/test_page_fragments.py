"""The HTML of the page without a service: what is sent again, curves, and what a service of another version lacks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fragments import parsed

from transfer_queue.page import fragments, shown
from transfer_queue.page.rates import RateWindow
from transfer_queue.page.watching import LOOKS, ServiceWatch
from transfer_queue.wire.messages.overview import PartitionOverview, ServiceOverview


def overview(**server: Any) -> ServiceOverview:
    return ServiceOverview(0, [], [], 0, [], 0, {}, {}, None, 0, "", [], server)


def partition() -> PartitionOverview:
    return PartitionOverview("p", 1, None, {}, [], [], [], 0)


def test_a_service_that_tells_less_is_shown_all_the_same() -> None:
    pool = {"open": 1, "sources": {"math": {"opened": 2}}}
    told = ServiceOverview(0, [], [], 0, [], 0, {"g": pool}, {}, None, 0, "", [], {"pid": 7})
    values = shown.service(told, RateWindow(), 1)
    parts = {**fragments.of_service(values), **fragments.of_partition(values, None, shown.lanes([], [], None), (), ())}
    page = parsed(b"".join(parts.values()).decode())
    assert (page["facts"], page["tile-rows"], page["tile-memory"]) == ("pid 7 · – clients", "–", "–")
    assert page.rows("groups") == [["math", "2", "–", "–", "–"]]
    assert page["about"] == "There is no partition yet."


def test_the_memory_of_other_hosts_is_a_sum_of_those_that_are_there() -> None:
    there = {"arena_nbytes_used": 1 << 20, "arena_nbytes_budget": 4 << 20, "address": "a:1", "away": False}
    units = {"1": there, "2": {**there, "address": "b:1"}, "3": {"address": "c:1", "away": True}}
    values = shown.service(overview(units=units), RateWindow(), 1)
    page = parsed(fragments.of_partition(values, None, shown.lanes([], [], None), (), ())["tiles"].decode())
    assert "Memory of 3 more hosts2.0 MiB of 8.0 MiB, 1 away" in page["tiles"]


def test_the_extension_is_there_before_htmx_begins() -> None:
    """HTMX begins when the document is loaded, or at once where it is so: while that is read, all scripts are run."""
    scripts = re.findall("<script[^>]*>", fragments.index("").decode())
    assert scripts == [f'<script src="static/{name}">' for name in ("htmx.min.js", "hx-sse.min.js", "page.js")]


def test_a_memory_that_is_nearly_full_is_a_warning() -> None:
    def waits(used: int) -> str:
        values = shown.service(overview(arena_nbytes_used=used, arena_nbytes_budget=100), RateWindow(), 1)
        return parsed(fragments.of_service(values)["waits"].decode())["waits"]

    assert waits(90) == "Nobody waits."
    assert waits(91) == "Memory is 91 % full: puts wait until rows are cleared."


def test_a_curve_of_equal_rates_stays_the_same_when_it_goes_on() -> None:
    assert fragments.curve([0.0]) == fragments.curve([0.0] * 200) == "0,18 240,18"
    assert fragments.curve([0.0, 0.0, 0.0, 4.0, 2.0]) == "0,18 12,18 18,2 24,10"
    assert fragments.curve([]) == ""


def test_curves_remember_so_many_looks() -> None:
    watch = ServiceWatch(lambda: pytest.fail("nobody looks"), lambda: None)
    for _ in range(LOOKS + 10):
        watch._remember({"id": partition()})
    assert [len(one) for one in watch._curves["id"]] == [LOOKS, LOOKS]
    watch._remember({})
    assert watch._curves == {}
    watch.close()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.04, "0.0 s"), (9.94, "9.9 s"), (12.3, "12 s"), (119.4, "119 s"), (121.0, "2 min 1 s"),
        (7200.0, "2 h 0 min"), (9000.0, "2 h 30 min"),
    ],
)  # fmt: skip
def test_seconds_are_short(value: float | None, text: str) -> None:
    assert fragments.FILTERS["seconds"](value) == text


def test_bytes_have_a_unit() -> None:
    assert [fragments.FILTERS["nbytes"](one) for one in (0, 1023, 1024, 1 << 19, 3 << 49)] == [
        "0 B", "1023 B", "1.0 KiB", "512 KiB", "1536 TiB",
    ]  # fmt: skip
