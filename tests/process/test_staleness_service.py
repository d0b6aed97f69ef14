"""Staleness as clients see it: spans, announcing, admission that waits, streams, settings, metrics, repeated calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import streams
import torch
from conftest import until
from tensordict import TensorDict
from test_leases_service import lending, send, take
from test_metrics import Scrape

import transfer_queue as tq
from transfer_queue.errors import ConfigError, DeadlineExceeded, InvalidInput, StaleVersion
from transfer_queue.server.service import Service
from transfer_queue.weights import Spans, VersionInfo
from transfer_queue.wire import messages as m

__all__ = ["lending"]


def put(partition: str, version: int, count: int = 2, start: int = 0) -> None:
    x = torch.arange(start, start + count)
    fields = TensorDict({"x": x, "wide": x[:, None].repeat(1, 20_000)}, batch_size=count)
    spans = Spans()
    spans.add(VersionInfo(version, "run"), tokens=3)
    spans.add(VersionInfo(version + 1, "run"))
    keys = [f"{version}/{start + n}" for n in range(count)]
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields, tags=[spans.tag()] * count)


# ---- spans ----


def test_spans_become_tags() -> None:
    spans = Spans()
    assert spans.tag() == {}
    for version in (7, 7, 8):
        spans.add(VersionInfo(version, "run"))
    assert spans.tag() == {"weight_epoch": "run", "weight_version": 7, "weight_versions": [[7, 0, 2], [8, 2, 3]]}
    assert spans.tag(tokens=1)["weight_versions"] == [[7, 0, 1]]
    assert spans.tag(tokens=0)["weight_versions"] == [[7, 0, 0]]
    spans.add(VersionInfo(2, "next"), tokens=2)
    assert spans.tag()["weight_version"] == 7
    assert spans.tag()["weight_epochs"] == ["run", "run", "next"]
    with pytest.raises(InvalidInput, match="no version yet"):
        spans.add(VersionInfo())


def test_spans_of_a_server_are_taken() -> None:
    told = [SimpleNamespace(version="41", start=0, end=5), SimpleNamespace(version="42", start=5, end=6)]
    assert Spans(told, "run").tag() == {
        "weight_epoch": "run", "weight_version": 41, "weight_versions": [[41, 0, 5], [42, 5, 6]]
    }  # fmt: skip
    with pytest.raises(InvalidInput, match="'default' is not a number"):
        Spans([SimpleNamespace(version="default", start=0, end=5)])
    with pytest.raises(InvalidInput, match="after 0 tokens"):
        Spans([SimpleNamespace(version=1, start=2, end=5)])


# ---- the service ----


def test_rows_that_are_too_old_are_left_out_and_stay_listed(client: tq.TransferQueueClient) -> None:
    assert tq.set_weight_version(1, "run") == 1
    put("p", 1)
    assert asyncio.run(tq.async_set_weight_version(2, "run")) == 2
    put("p", 2, start=2)
    meta = client.get_meta(["x"], 2, "p", task_name="t", sampling_config={"max_staleness": 0})
    assert client.get_data(meta)["x"].tolist() == [2, 3]
    assert client.check_consumption_status("t", "p")
    assert {tag["weight_version"] for tag in tq.kv_list("p")["p"].values()} == {1, 2}
    assert client.stats()["stale_rows"] == 2
    assert (client.stats()["weight_version"], client.stats()["weight_epoch"]) == (2, "run")
    with pytest.raises(StaleVersion):
        client.set_weight_version(1, "run")


def test_a_dataset_ends_without_the_rows_that_are_too_old(client: tq.TransferQueueClient) -> None:
    client.set_partition("p", size=6)
    tq.set_weight_version(1, "run")
    put("p", 1, 3)
    tq.set_weight_version(2, "run")
    put("p", 2, 3, start=3)
    found = streams.numbers(streams.dataset(batch=2, micro=1, max_staleness=0))
    assert found == [[3], [4], [5]]


def test_admission_waits_for_a_version_in_the_service(client: tq.TransferQueueClient) -> None:
    terms: dict[str, Any] = {"max_staleness": 0, "rows_per_version": 4}
    tq.set_weight_version(0)
    tq.admit("t", 4, **terms)
    with pytest.raises(DeadlineExceeded):
        tq.admit("t", 1, timeout_s=0, **terms)
    woken: list[float] = []

    def produce() -> None:
        client.admit("t", 4, timeout_s=30, **terms)
        woken.append(time.monotonic())

    thread = threading.Thread(target=produce)
    thread.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "the producer to wait")
    told = time.monotonic()
    tq.set_weight_version(1)
    thread.join(30)
    assert woken[0] - told < 1

    async def leave_and_return() -> None:
        waiting = asyncio.create_task(client.async_admit("t", 4, timeout_s=30, **terms))
        while client.stats()["waiting_requests"] == 0:
            await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.wait([waiting])
        await client.async_give_back("t", 4)
        await client.async_admit("t", 4, timeout_s=5, **terms)

    asyncio.run(leave_and_return())


def test_a_policy_of_the_service(service: Callable[..., tq.TransferQueueClient]) -> None:
    staleness = {"max_age": 0, "rows_per_version": 2}
    client = service(controller={"staleness": staleness}, metrics={"enabled": True})
    tq.set_weight_version(1, "run")
    put("p", 1)
    tq.admit("t", 2)
    with pytest.raises(DeadlineExceeded):
        tq.admit("t", 1, timeout_s=0)
    tq.set_weight_version(2, "run")
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["x"], 1, "p", task_name="t", timeout_s=0)
    assert len(client.get_meta(["x"], 2, "p", task_name="eval", sampling_config={"max_staleness": None})) == 2
    scrape = Scrape(tq.get_metrics_endpoint() or "")
    assert scrape.value("tq_stale_rows_total", task_name="t") == 2
    assert scrape.value("tq_partition_stale_rows", partition_id="p", task_name="t") == 2
    assert scrape.value("tq_weight_announcements_total") == 2


@pytest.mark.parametrize("wrong", [{"max_age": -1}, {"untagged": "maybe"}, {"rows_per_version": 0}])
def test_settings_out_of_range_are_refused(service: Callable[..., Any], wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        service(controller={"staleness": wrong})


def test_repeated_requests_count_once(lending: Service) -> None:
    session = lending.sessions.attach(b"trainer", local=True)
    first = send(lending, session, m.Announce(1, "run", 5))
    assert send(lending, session, m.Announce(2, "run", 6)).count == 2
    assert send(lending, session, m.Announce(1, "run", 5)) is first  # not stale: it is the same call
    for rid in (3, 3, 4):
        assert send(lending, session, m.Admit(rid, "t", 2, 0, 4, 0.0)).count == 2
    assert send(lending, session, m.Admit(5, "t", 1, 0, 4, 0.0)).code == DeadlineExceeded.code
    lending.notify(m.Cancel(4), session)  # nobody got that answer
    assert send(lending, session, m.Admit(6, "t", 2, 0, 4, 0.0)).count == 2
    assert send(lending, session, take(7)).lease
