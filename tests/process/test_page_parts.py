"""The parts of the page: which of them a viewer gets, and when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pages import RunningPage, page_of

import transfer_queue as tq
from transfer_queue.page.printable import ident
from transfer_queue.weights import Spans, VersionInfo

HOSTILE = "<script>alert(1)</script>\"'&"


@pytest.fixture
def page(client: tq.TransferQueueClient) -> Iterator[RunningPage]:
    with page_of(str(client.address)) as found:
        yield found


def test_a_viewer_gets_only_the_parts_that_changed(page: RunningPage, client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(1)})
    with page.look("p") as viewer:
        viewer.next("look")
        assert {"status", "sessions", "about", "partition", "leases"} <= viewer.changed
        viewer.until("look", lambda _: not viewer.changed)  # nothing has changed, and it hears so
        tq.kv_put("b", "p", {"x": torch.ones(1)})
        viewer.until("look", lambda seen: seen["about"].startswith("2 rows"))
        assert {"about", "tiles"} <= viewer.changed
        assert not {"status", "sessions", "partition", "leases"} & viewer.changed


def test_the_curves_began_before_one_looked(page: RunningPage, client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(1)})
    with page.look("p") as first:
        first.next("look")
        tq.kv_put("b", "p", {"x": torch.ones(1)})
        first.until("look", lambda seen: float(seen["tile-written"]) > 0)
        with page.look("p") as second:
            line = second.next("look").of_id("tiles").of_class("written")[0].of_tag("polyline")[0]
    assert len(line.attributes["points"].split()) > 1


def test_without_a_partition_in_the_address_the_first_is_shown(
    page: RunningPage, client: tq.TransferQueueClient
) -> None:
    with page.look() as viewer:
        assert viewer.next("look")["about"] == "There is no partition yet."
        tq.kv_put("a", "first", {"x": torch.ones(1)})
        tq.kv_put("a", "second", {"y": torch.ones(1)})
        assert viewer.until("map", lambda found: found)["id"] == ident("first")
        seen = viewer.until("look", lambda seen: "second" in seen["partition"])
    chosen = [one.text for one in seen.of_id("partition").of_tag("option") if "selected" in one.attributes]
    assert chosen == ["first"]


def test_what_was_asked_for_in_vain_is_text(page: RunningPage, client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(1)})
    for named in ({"key": HOSTILE}, {"wanted": HOSTILE}):
        status, found = page.row("p", **named)
        assert (status, "<script>alert(1)" in found["row-body"], found.of_tag("script")) == (404, True, [])
    assert f'connect="events?partition={""}"' in page.ask(f"/?partition={HOSTILE[:8]}")[2].decode()


def test_a_row_says_which_weights_made_which_of_its_tokens(page: RunningPage) -> None:
    spans = Spans()
    spans.add(VersionInfo(3, "run-1"), 16)
    spans.add(VersionInfo(4, "run-1"), 24)
    tq.kv_put("a", "p", {"x": torch.ones(1)}, tag=spans.tag())
    assert page.row("p", key="a")[1].rows("row-weights") == [["0 to 15", "3", "run-1"], ["16 to 39", "4", "run-1"]]
    spans.add(VersionInfo(1, "run-2"), 1)
    tq.kv_put("b", "p", {"x": torch.ones(1)}, tag=spans.tag())
    assert page.row("p", key="b")[1].rows("row-weights")[-1] == ["40", "1", "run-2"]
    for strange in (HOSTILE, [[1, 2]], [[1, 2, "3"]], {"a": 1}):
        tq.kv_put("c", "p", {"x": torch.ones(1)}, tag={"weight_versions": strange})
        status, found = page.row("p", key="c")
        assert (status, found["row-title"]) == (200, "Row #2 · c")
        assert "Weights that made it" not in found["row-body"]
