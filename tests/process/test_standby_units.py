"""The server of another host is killed: its standby goes on as the same unit, with all that lay there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import freeze, until
from histories import check_keys
from histories_rows import check_rows
from history_workers import TASKS, Recorder, drain, read_records
from hosts import LARGE, Host, firsts, rows
from test_histories_processes import SECONDS, SEED, Nursery
from test_standby import away, kill, replaced, server_of, standby_of

import transfer_queue as tq
from transfer_queue.errors import DataLost

StartHost = Callable[..., Host]
Spawn = Callable[[str], Any]


class Cluster(NamedTuple):
    """The controller's host and another one, both with a standby."""

    head: Host
    unit: Host


@pytest.fixture
def cluster(start_host: StartHost) -> Cluster:
    head = start_host(durability="process")
    return Cluster(head, start_host(join=head.tcp, durability="process"))


def killed(unit: Host) -> None:
    """Kill the server of a unit, and return at once."""
    standby_of(unit.client)
    kill(server_of(unit.client))


@contextlib.contextmanager
def still(pid: int) -> Iterator[None]:
    """A process stands still meanwhile."""
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def frozen(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """The controller's server stands still; the function has it go on."""
    pid = server_of(cluster.head.client)
    with still(pid):
        yield lambda: os.kill(pid, signal.SIGCONT)


def test_rows_of_a_killed_unit_are_there_for_all_hosts(cluster: Cluster) -> None:
    head, unit = cluster
    meta = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    unit.kv_put(["small"], "q", rows(2, 1))
    replaced(unit.client)
    assert firsts(unit.client.get_data(meta)) == [1, 1]
    assert firsts(head.client.get_data(meta)) == [1, 1]
    assert firsts(head.kv_get(["small"], "q")) == [2]
    later = unit.client.put(rows(3, 2, LARGE), partition_id="p")
    replaced(unit.client)
    assert firsts(head.client.get_data(later)) == [3, 3]
    for cleared in (meta, later):
        head.client.clear_samples(cleared)
    head.client.clear_partition("q")
    until(lambda: unit.used() == 0, "room at the unit")


def test_a_reader_of_another_host_waits_for_the_standby_and_gets_no_error(cluster: Cluster) -> None:
    head, unit = cluster
    meta = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    for _ in range(3):
        killed(unit)
        assert firsts(head.client.get_data(meta)) == [1, 1]


def test_views_consumption_and_leases_of_a_unit_s_clients_go_on(cluster: Cluster) -> None:
    head, unit = cluster
    meta = unit.client.put({"x": torch.ones(6, LARGE)}, partition_id="p")
    seen = unit.client.get_data(meta, dense=True)["x"]
    taken = unit.client.get_meta(["x"], 2, "p", task_name="t")
    lent = unit.client.get_meta(["x"], 2, "p", task_name="t", lease_s=60)
    replaced(unit.client)
    rest = unit.client.get_meta(["x"], 2, "p", task_name="t")
    assert sorted([*taken.global_indexes, *lent.global_indexes, *rest.global_indexes]) == sorted(meta.global_indexes)
    unit.client.ack(lent)
    assert head.client.check_consumption_status("t", "p")
    head.client.clear_samples(meta)
    unit.client.put({"x": torch.zeros(6, LARGE)}, partition_id="other")
    assert (seen == 1).all()


@pytest.mark.parametrize("width", [4, LARGE], ids=["with the message", "in a block"])
def test_a_put_that_was_passed_on_when_the_unit_was_killed_is_carried_out_once(
    cluster: Cluster, frozen: Callable[[], None], width: int
) -> None:
    head, unit = cluster
    put = threading.Thread(target=lambda: unit.kv_put(["a", "b"], "p", rows(1, 2, width)))
    standby_of(unit.client)
    pid = server_of(unit.client)
    put.start()
    until(lambda: unit.client.stats()["waiting_requests"] == 1, "the commit on its way")
    kill(pid)
    frozen()
    put.join()
    until(lambda: not away(head.client), "the unit's return")
    assert firsts(head.kv_get(["a", "b"], "p")) == [1, 1]
    assert firsts(unit.kv_get(["a", "b"], "p")) == [1, 1]
    assert len(head.client.get_meta(["x"], 2, "p", task_name="t")) == 2
    head.client.clear_partition("p")
    until(lambda: unit.used() == 0, "room at the unit")


def test_a_put_whose_client_ends_as_well_is_whole_or_leaves_nothing(
    cluster: Cluster, frozen: Callable[[], None], child: Spawn
) -> None:
    head, unit = cluster
    standby_of(unit.client)
    pid = server_of(unit.client)
    writer = child(f"""
        import os, torch
        os.environ["TQ_ADDRESS"] = {unit.server.address!r}
        import transfer_queue as tq
        tq.kv_put("a", "p", {{"x": torch.ones({LARGE})}})
    """)
    until(lambda: unit.client.stats()["waiting_requests"] == 1, "the commit on its way")
    kill(pid)
    os.kill(writer.pid, signal.SIGKILL)
    frozen()

    def settled() -> bool:
        if unit.used() == 0:
            return "a" not in head.client.kv_list("p").get("p", {})
        return "a" in head.client.kv_list("p").get("p", {}) and firsts(head.kv_get(["a"], "p")) == [1]

    until(settled, "the outcome")
    head.client.clear_partition("p")
    until(lambda: unit.used() == 0, "room at the unit")


def test_what_was_cleared_while_the_unit_was_away_is_freed(cluster: Cluster) -> None:
    head, unit = cluster
    meta = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    kept = unit.client.put(rows(2, 2, LARGE), partition_id="q")
    of_both = unit.used()
    with still(standby_of(unit.client)):
        kill(server_of(unit.client))
        head.client.clear_samples(meta)
    until(lambda: unit.used() == of_both // 2, "room at the unit")
    assert firsts(head.client.get_data(kept)) == [2, 2]


def test_a_put_that_was_cleared_before_its_unit_was_back_leaves_nothing(cluster: Cluster) -> None:
    head, unit = cluster
    unit.client.clear_samples(unit.client.put(rows(1, 1), partition_id="p"))  # connects it to the controller
    standby, pid, controller = standby_of(unit.client), server_of(unit.client), server_of(head.client)
    put = threading.Thread(target=lambda: unit.client.put(rows(1, 2, LARGE), partition_id="p"))
    with still(standby):
        with still(controller):
            put.start()
            until(lambda: unit.client.stats()["waiting_requests"] == 1, "the commit on its way")
            kill(pid)
        until(lambda: head.client.stats()["rows"] == 2, "the commit")
        head.client.clear_partition("p")
    put.join()
    until(lambda: not away(head.client), "the unit's return")
    until(lambda: unit.used() == 0, "room at the unit")


def test_a_reader_of_another_host_that_was_not_heard_holds_nothing(cluster: Cluster) -> None:
    head, unit = cluster
    meta = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    for _ in range(3):
        reader = threading.Thread(target=lambda: firsts(head.client.get_data(meta)))
        standby_of(unit.client)
        pid = server_of(unit.client)
        reader.start()
        kill(pid)
        reader.join()
    assert firsts(head.client.get_data(meta)) == [1, 1]
    head.client.clear_samples(meta)
    until(lambda: unit.used() == 0, "room at the unit")


def test_both_servers_may_be_killed_at_once(cluster: Cluster) -> None:
    head, unit = cluster
    meta = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    ours = head.client.put(rows(2, 2, LARGE), partition_id="p")
    for host in cluster:
        standby_of(host.client)
    for host in cluster:
        kill(server_of(host.client))
    assert firsts(head.client.get_data(meta)) == [1, 1]
    assert firsts(unit.client.get_data(ours)) == [2, 2]
    until(lambda: not away(head.client), "the unit's return")
    assert len(unit.client.get_meta(["x"], 4, "p", task_name="t")) == 4


def test_a_unit_without_its_standby_is_lost_as_before(cluster: Cluster) -> None:
    head, unit = cluster
    meta = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    standby, pid = standby_of(unit.client), server_of(unit.client)
    freeze(pid)
    for one in (standby, pid):
        kill(one)
    address = unit.server.tcp
    again = Host(join=head.tcp, port=int(address.rpartition(":")[2]), durability="process")
    try:
        with pytest.raises(DataLost, match="gone"):
            head.client.get_data(meta)
    finally:
        again.close()


def test_a_unit_that_is_killed_again_and_again_loses_no_put(cluster: Cluster) -> None:
    head, unit = cluster
    over = time.monotonic() + 4
    put: list[Any] = []

    def write() -> None:
        while time.monotonic() < over:
            number = len(put)
            put.append(unit.client.put(rows(number, 1, (4, 5000, 20_000)[number % 3]), partition_id="p"))

    writer = threading.Thread(target=write)
    writer.start()
    kills = 0
    while time.monotonic() < over - 0.5:
        threading.Event().wait(0.1)
        replaced(unit.client)
        kills += 1
    writer.join()
    assert kills > 3
    for number, meta in enumerate(put):
        for host in cluster:
            assert firsts(host.client.get_data(meta)) == [number]
    head.client.clear_partition("p")
    until(lambda: unit.used() == 0, "room at the unit")


@pytest.fixture
def attached(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    """This process is a client of the controller's host."""
    monkeypatch.setenv("TQ_ADDRESS", cluster.head.server.address)
    tq.init()
    yield tq.get_client()
    tq.close()


@pytest.mark.timeout(SECONDS * 3 + 110)
def test_histories_are_possible_ones_while_servers_and_clients_of_two_hosts_are_killed(
    cluster: Cluster, attached: tq.TransferQueueClient, tmp_path: Path
) -> None:
    nurseries = [Nursery(tmp_path, 100 * place, host.server.address) for place, host in enumerate(cluster)]
    try:
        rng, over = random.Random(SEED), time.monotonic() + SECONDS + 1
        for nursery in (*nurseries, *nurseries):
            nursery.start(over)
        kills = [0, 0]
        while time.monotonic() < over - 1:
            threading.Event().wait(rng.uniform(0.1, 0.5))
            place = rng.choice((0, 1, 1))
            if rng.random() < 0.6:
                replaced(cluster[place].client)
                kills[place] += 1
            else:
                name = rng.choice(sorted(nurseries[place].living))
                nurseries[place].kill(name)
                nurseries[place].start(over)
        for nursery in nurseries:
            nursery.wait()
        assert min(kills) > 0
        assert sum(kills) > 3
        until(lambda: not away(attached) and attached.stats()["clients"] == 4, "the end of the workers' sessions")
        drain(Recorder(tmp_path, "drain"))
        history = [*read_records(tmp_path), *nurseries[0].ends, *nurseries[1].ends]
        assert [str(found) for found in (*check_keys(history), *check_rows(history, TASKS))] == []
        attached.clear_partition("kv")
        attached.clear_partition("rows")
        until(lambda: cluster.head.used() + cluster.unit.used() == 0, "room at both hosts")
    finally:
        for nursery in nurseries:
            nursery.close()
