"""A look at a real service: from any host, while its server is replaced, by many threads, on an event loop."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import fleets
import numpy as np
import pytest
import torch
from conftest import Child, until
from hosts import Host, rows
from test_standby import DURABLE, replaced

import transfer_queue as tq
from transfer_queue.cli.frames import frame
from transfer_queue.cli.looking import names_of
from transfer_queue.cli.observing import Sight, rates_between
from transfer_queue.errors import InvalidInput, UnknownRows
from transfer_queue.page.rates import RateWindow
from transfer_queue.page.shown import counts_of
from transfer_queue.weights.fleet import Fleet, ReplicaStatus


def filled(client: tq.TransferQueueClient) -> tq.BatchMeta:
    """64 rows of which 32 have a reward, eight on a lease."""
    client.put({"x": torch.ones(64, 2)}, partition_id="p")
    meta = client.get_meta(["x"], 64, "p", mode="force_fetch")
    client.put({"reward": torch.ones(32)}, metadata=meta.select_samples(list(range(32))))
    return client.get_meta(["x"], 8, "p", task_name="actor", lease_s=60.0)


def test_an_overview_has_everything_at_one_instant(client: tq.TransferQueueClient) -> None:
    lent = filled(client)
    found = client.overview()
    (partition,) = found.partitions
    assert dict(zip([one.name for one in partition.fields], partition.written, strict=True)) == {"x": 64, "reward": 32}
    (task,) = partition.tasks
    assert (task.name, task.leased, task.views[0].ready) == ("actor", 8, 56)
    assert task.views[0].oldest_s is not None
    assert [one.number for one in found.leases] == [lent.lease]
    assert found.server["rows"] == 64
    me = next(one for one in found.sessions if one.session in found.leases[0].holders)
    assert me.local
    assert me.pid
    assert len(client.overview(most=0).leases) == 0


def test_rates_count_what_is_cleared_as_soon_as_it_is_used(client: tq.TransferQueueClient) -> None:
    client.put({"x": torch.ones(4, 2)}, partition_id="p")
    rates, before = RateWindow(), client.overview()
    rates.add(0.0, counts_of(before))
    meta = client.put({"x": torch.ones(2, 2)}, partition_id="p")
    client.put({"reward": torch.ones(1)}, metadata=meta.select_samples([1]))
    client.clear_samples(client.get_meta(["x"], 3, "p", task_name="actor"))
    for _ in range(2):
        client.clear_samples(client.get_meta(["x"], 1, "p", task_name="actor"))
    client.put({"reward": torch.ones(1)}, metadata=meta.select_samples([1]))  # anew
    client.clear_samples(client.get_meta(["x"], 1, "p", task_name="actor"))
    client.put({"x": torch.ones(1, 2)}, partition_id="p")
    after = client.overview()
    rates.add(2.0, counts_of(after))
    found = rates_between(before, after, 2.0)
    assert found.written == {("p", "x"): 1.5, ("p", "reward"): 0.5}
    assert found.consumed == {("p", "actor"): 3.0}
    life = after.partitions[0].life
    assert [rates.per_s(key) for key in (("written", "p", life, "x"), ("used", "p", life, "actor"))] == [1.5, 3.0]


def test_rates_count_all_of_a_partition_that_began_anew_between_two_looks(client: tq.TransferQueueClient) -> None:
    rates = RateWindow()
    looks = []
    for at, count in ((0.0, 4), (2.0, 6)):
        client.clear_partition("p")
        client.put({"x": torch.ones(count, 2)}, partition_id="p")
        client.get_meta(["x"], count, "p", task_name="actor")
        looks.append(client.overview())
        rates.add(at, counts_of(looks[-1]))
    found = rates_between(*looks, 2.0)
    assert (found.written, found.consumed) == ({("p", "x"): 3.0}, {("p", "actor"): 3.0})
    life = looks[-1].partitions[0].life
    assert [rates.per_s(key) for key in (("written", "p", life, "x"), ("used", "p", life, "actor"))] == [3.0, 3.0]


def test_a_map_shows_which_rows_have_what(client: tq.TransferQueueClient) -> None:
    filled(client)
    found = client.partition_map("p", max_runs=16)
    assert found is not None
    assert (found.size, found.rows_each, found.num_runs, found.fields, found.tasks) == (
        64,
        4,
        16,
        ["x", "reward"],
        ["actor"],
    )
    assert found.written.tolist() == [[255] * 16, [255] * 8 + [0] * 8]
    assert found.leased.tolist() == [[255, 255] + [0] * 14]
    assert not found.consumed.any()
    assert np.array_equal(found.first_rows, np.arange(0, 64, 4))
    assert client.partition_map("nobody") is None
    with pytest.raises(InvalidInput):
        client.partition_map("p", 0)


def test_a_row_is_found_by_key_and_by_number(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(2)}, {"weight_version": 3})
    found = client.inspect_row("p", key="a")
    assert (found.key, found.tags, [one.name for one in found.written]) == ("a", {"weight_version": 3}, ["x"])
    assert [one.what for one in found.events] == ["written"]
    assert client.inspect_row("p", row=found.row).key == "a"
    tq.kv_clear("a", "p")
    with pytest.raises(UnknownRows):
        client.inspect_row("p", row=found.row)


def test_all_of_it_awaits(client: tq.TransferQueueClient) -> None:
    async def look() -> tuple[Any, ...]:
        return await asyncio.gather(
            client.async_overview(), client.async_partition_map("p"), client.async_inspect_row("p", row=lent[0])
        )

    lent = filled(client).global_indexes
    found, partition_map, row = asyncio.run(look())
    assert found.partitions[0].rows == partition_map.size == 64
    assert row.tasks[0].state == "leased"


def test_another_host_sees_the_controllers_service(start_host: Callable[..., Host]) -> None:
    head = start_host()
    other = start_host(join=head.tcp)
    other.client.put({"x": torch.ones(4, 2)}, partition_id="p")
    there, here = other.client.overview(), head.client.overview()
    assert [one.rows for one in there.partitions] == [4]
    assert there.server["pid"] == here.server["pid"] == head.client.stats()["pid"]
    assert len(there.server["units"]) == 1
    assert {(one.local, one.host) for one in here.sessions} == {(True, ""), (False, "127.0.0.1")}
    held = other.client.get_meta(["x"], 1, "p", task_name="actor", lease_s=60.0)
    (lease,) = head.client.overview().leases
    assert names_of(head.client.overview())(lease.holders[0]).endswith(" on 127.0.0.1")
    other.client.ack(held)
    found = other.client.partition_map("p")
    assert found is not None
    assert found.written.tolist() == [[255] * 4]


def test_what_is_seen_goes_on_when_the_server_is_replaced(service: Any) -> None:
    client = service(**DURABLE)
    lent = filled(client)
    before = client.overview()
    replaced(client)
    found = client.overview()
    assert found.partitions[0].written == before.partitions[0].written
    assert [(one.number, one.rows) for one in found.leases] == [(lent.lease, 8)]
    assert client.inspect_row("p", row=lent.global_indexes[0]).tasks[0].state == "leased"


def test_what_a_killed_client_had_on_lease_is_known_also_when_the_rows_are_gone(
    service: Any, child: Callable[[str], Child]
) -> None:
    client = service(**DURABLE)
    client.put({"x": torch.ones(64, 2)}, partition_id="p")
    client.put({"x": torch.ones(4, 2)}, partition_id="q")
    worker = child(
        """
        import transfer_queue as tq
        tq.init()
        client = tq.get_client()
        client.ack(client.take("p", ["x"], 2, "used", lease_s=600)[0])
        part = client.take("p", ["x"], 8, "actor", lease_s=600)[0]
        client.ack(part.select_samples([0, 1, 2]))
        for count in (3, 1):
            client.take("q", ["x"], count, "critic", lease_s=600)
        print("taken", flush=True)
        input()
        """
    )
    assert worker.line() == "taken"
    assert client.overview().departures == []
    worker.kill()
    until(lambda: bool(client.overview().departures), "the end of the session")
    (departure,) = client.overview().departures
    assert departure.pid == worker.pid
    given_back = [(one.partition, one.task, one.leases, one.rows) for one in departure.given_back]
    assert given_back == [("p", "actor", 1, 5), ("q", "critic", 2, 4)]
    assert 0 <= departure.ago_s < 60
    client.clear_partition("p")
    replaced(client)  # its standby knows of the end as well
    (later,) = client.overview().departures
    assert (later.session, later.pid) == (departure.session, departure.pid)
    assert [one.rows for one in later.given_back] == [5, 4]


def test_a_fleet_reports_its_replicas_until_it_is_closed(client: tq.TransferQueueClient) -> None:
    def seen() -> dict[str, tuple[bool, int | None]]:
        return {one.name: (one.ready, one.version) for fleet in client.overview().fleets for one in fleet.replicas}

    site = fleets.Site(2, queue=client)
    try:
        site.send(1)
        until(lambda: seen() == {"a": (True, 1), "b": (True, 1)}, "the report of a version")
        site.servers["b"].stop()
        until(lambda: seen()["b"] == (False, 1), "the report of a fence")
        (fleet,) = client.overview().fleets
        assert fleet.session == client.session.ident
        assert "nobody listens" in next(one.reason for one in fleet.replicas if one.name == "b")
    finally:
        site.close()
    until(lambda: not seen(), "the end of the report")


@pytest.mark.parametrize("queue", [5, tq, "unix:/run/tq.sock"])
def test_what_is_no_client_is_refused_as_the_queue_of_a_fleet(queue: Any) -> None:
    with pytest.raises(InvalidInput, match="has no report_replicas"):
        Fleet(queue=queue)


def test_the_replicas_of_a_trainer_that_was_killed_are_not_shown_any_more(
    client: tq.TransferQueueClient, child: Callable[[str], Child]
) -> None:
    trainer = child(
        """
        import transfer_queue as tq
        from transfer_queue.weights.fleet import ReplicaStatus
        tq.init()
        tq.get_client().report_replicas([ReplicaStatus("a", True, 7, "7", "", 0.0, None)])
        print("said", flush=True)
        input()
        """
    )
    assert trainer.line() == "said"
    assert [one.version for fleet in client.overview().fleets for one in fleet.replicas] == [7]
    trainer.kill()
    until(lambda: client.overview().fleets == [], "the end of its session")


def test_replicas_are_known_still_when_the_server_is_replaced(service: Any) -> None:
    client = service(**DURABLE)
    client.report_replicas([ReplicaStatus("a", True, 7, "7", "", 0.0, None)])
    replaced(client)
    assert [one.version for fleet in client.overview().fleets for one in fleet.replicas] == [7]


def test_another_hosts_trainer_reports_too(start_host: Callable[..., Host]) -> None:
    head = start_host()
    other = start_host(join=head.tcp)
    other.client.report_replicas([ReplicaStatus("a", True, 7, "7", "", 0.0, None)])
    assert [one.version for fleet in head.client.overview().fleets for one in fleet.replicas] == [7]


def test_a_put_that_waits_for_room_on_another_host_is_listed(start_host: Callable[..., Host]) -> None:
    head = start_host()
    host = start_host(join=head.tcp, budget_nbytes=16 << 20)
    until(lambda: head.client.stats()["units"]["1"].get("arena_nbytes_budget") == 16 << 20, "the report of the unit")
    host.kv_put(["a"], "p", rows(1.0, 1, 3 << 20))
    until(lambda: head.client.stats()["units"]["1"]["arena_nbytes_used"] >= 12 << 20, "the report of the put")
    waiting = threading.Thread(target=host.kv_put, args=(["b"], "p", rows(2.0, 1, 3 << 20)))
    waiting.start()
    until(lambda: head.client.overview().num_waits == 1, "the put that waits")
    found = head.client.overview()
    (wait,) = found.waits
    assert (wait.call, wait.session in {one.session for one in found.sessions}) == ("put", True)
    assert re.match(r"unit 1 at 127\.0\.0\.1:\d+: \d+ bytes do not fit: ", wait.lacks)
    assert found.server["waiting_requests"] == 1
    top = [line.plain for line in frame(Sight("here", found, None, "", 0.0, ""), 100, 24)]
    assert any(re.match(r"unit 1 \[#+\.+\] 1\d\.\d MiB of 16\.0 MiB at 127\.0\.0\.1:\d+", line) for line in top), top
    head.client.clear_partition("p")
    waiting.join(10)
    until(lambda: head.client.overview().num_waits == 0, "the end of the wait")
