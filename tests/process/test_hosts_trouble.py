"""Units and controllers that are killed, frozen or replaced: what is lost is told, nothing hangs, the rest goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from conftest import freeze, until
from hosts import CLIENT, LARGE, Host, firsts, rows

from transfer_queue.errors import DataLost, DeadlineExceeded, ServiceRestarted, ServiceUnavailable, TransferQueueError


def test_a_killed_unit_takes_its_rows_and_that_is_told(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    address = unit.server.tcp
    meta = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    kept = head.client.put(rows(2, 2, LARGE), partition_id="p")
    os.kill(unit.server.pid, signal.SIGKILL)
    until(lambda: head.client.stats()["units"]["1"]["away"], "the loss of the unit")
    with pytest.raises(ServiceUnavailable, match="away"):
        head.client.get_data(meta)
    again = start_host(join=head.tcp, port=int(address.rpartition(":")[2]))
    with pytest.raises(DataLost, match="gone"):
        head.client.get_data(meta)
    assert head.client.get_meta(["x"], 2, "p", task_name="t").global_indexes == kept.global_indexes
    again.client.put(rows(5, 2, LARGE), metadata=meta)
    assert firsts(head.client.get_data(meta)) == [5, 5]
    with pytest.raises(TransferQueueError):
        unit.client.get_data(meta)


def test_rows_of_a_unit_that_is_away_are_handed_to_nobody(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    unit.client.put(rows(1, 2, LARGE), partition_id="p")
    kept = head.client.put(rows(2, 2, LARGE), partition_id="p")
    os.kill(unit.server.pid, signal.SIGKILL)
    until(lambda: head.client.stats()["units"]["1"]["away"], "the loss of the unit")
    taken, data = head.client.take("p", ["x"], 2, "t")
    assert (taken.global_indexes, firsts(data)) == (kept.global_indexes, [2, 2])
    with pytest.raises(DeadlineExceeded, match=r"2 on storage units that are away \(\[1\]\)"):
        head.client.get_meta(["x"], 2, "p", task_name="t", timeout_s=0.1)
    assert not head.client.check_consumption_status("t", "p")
    assert head.client.check_production_status(["x"], "p")


def test_a_dead_controller_is_reported_at_once(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    unit.kv_put(["a"], "p", rows(1, 1))
    os.kill(head.server.pid, signal.SIGKILL)
    with pytest.raises(ServiceUnavailable):
        unit.kv_get(["a"], "p")
    with pytest.raises(ServiceUnavailable):
        unit.kv_put(["b"], "p", rows(1, 1, LARGE))


def test_a_unit_joins_the_next_controller_at_the_address_and_starts_empty(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    unit.kv_put(["a"], "p", rows(1, 1, LARGE))
    os.kill(head.server.pid, signal.SIGKILL)
    head.server._process.wait()
    second = start_host(port=int(head.tcp.rpartition(":")[2]))
    until(lambda: bool(second.client.stats()["units"]), "the unit's return")
    with pytest.raises(ServiceRestarted):
        unit.used()
    until(lambda: unit.used() == 0, "the end of the old rows")
    unit.kv_put(["a"], "p", rows(2, 1, LARGE))
    assert firsts(second.kv_get(["a"], "p")) == [2]


def test_a_stopped_unit_delays_only_its_own_readers_and_until_their_deadline(start_host: Callable[..., Host]) -> None:
    head = start_host(client={**CLIENT, "timeout_s": 1.0})
    unit = start_host(join=head.tcp)
    unit.kv_put(["far"], "p", rows(1, 1, LARGE))
    head.kv_put(["near"], "p", rows(2, 1, LARGE))
    freeze(unit.server.pid)
    try:
        with pytest.raises(TransferQueueError):
            head.kv_get(["far"], "p")
        assert firsts(head.kv_get(["near"], "p")) == [2]
    finally:
        os.kill(unit.server.pid, signal.SIGCONT)
    assert firsts(head.kv_get(["far"], "p")) == [1]


def test_a_commit_whose_answer_never_came_is_either_whole_or_leaves_nothing(start_host: Callable[..., Host]) -> None:
    head = start_host(client={**CLIENT, "timeout_s": 0.5})
    unit = start_host(join=head.tcp)
    unit.kv_put(["a"], "p", rows(1, 1))
    used = unit.used()
    freeze(head.server.pid)
    try:
        with pytest.raises(DeadlineExceeded):
            unit.kv_put(["b"], "p", rows(2, 1, LARGE))
    finally:
        os.kill(head.server.pid, signal.SIGCONT)
    until(lambda: head.client.stats()["waiting_requests"] == 0, "the head's answers")

    def settled() -> bool:
        if unit.used() == used:
            return "b" not in head.client.kv_list("p")["p"]
        return firsts(head.kv_get(["b"], "p")) == [2]

    until(settled, "the outcome")
    head.client.clear_partition("p")
    until(lambda: unit.used() == 0, "the end of all rows")
