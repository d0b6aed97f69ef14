"""Hosts with journals that lose their power, one or all of them: rows of storage units come back too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from hosts import LARGE, Host, firsts, rows
from test_standby import away, kill, server_of, standby_of

from transfer_queue.errors import (
    DataLost,
    InvalidInput,
    JournalInUse,
    ServiceRestarted,
    ServiceUnavailable,
)

Start = Callable[..., Host]


class Machines:
    """The controller's machine and another one, both with a journal on a disk, at addresses that they keep."""

    def __init__(self, start: Start, directory: Path, **settings: Any) -> None:
        self._start = start
        self._settings = settings
        self.directory = directory
        self.head = self.boot_head()
        self._port = int(self.head.tcp.rpartition(":")[2])
        self.unit = self.boot_unit()

    _port = 0

    def boot_head(self, **more: Any) -> Host:
        self.head = self._boot("head", port=self._port, **more)
        return self.head

    def boot_unit(self, **more: Any) -> Host:
        self.unit = self._boot("unit", join=self.head.tcp, **{**self._settings, **more})
        return self.unit

    def _boot(self, name: str, **more: Any) -> Host:
        return self._start(**{"durability": "machine", "journal_dir": str(self.directory / name), **more})

    def cut(self, *hosts: Host) -> None:
        """Server, standby and whatever else there is of them are killed at once."""
        for host in hosts:
            os.killpg(host.server._process.pid, signal.SIGKILL)
        for host in hosts:
            host.server.wait()

    def all_there(self) -> None:
        until(lambda: self.head.client.stats()["units"], "the unit")
        until(lambda: not away(self.head.client), "the unit's return")


@pytest.fixture
def machines(start_host: Start, tmp_path: Path) -> Machines:
    return Machines(start_host, tmp_path)


def put(host: Host, value: float, width: int = LARGE, count: int = 2, partition: str = "p") -> Any:
    return host.client.put(rows(value, count, width), partition_id=partition)


def read(host: Host, meta: Any) -> list[float]:
    """What comes back after at most one word that the service, or the unit, began anew."""
    try:
        return firsts(host.client.get_data(meta))
    except ServiceRestarted:
        return firsts(host.client.get_data(meta))


@pytest.mark.parametrize("width", [4, LARGE], ids=["in the log", "in a file"])
def test_a_unit_that_lost_its_power_comes_back_with_its_rows(machines: Machines, width: int) -> None:
    first, second = put(machines.unit, 1, width), put(machines.unit, 2, width)
    machines.head.client.clear_samples(first)
    machines.cut(machines.unit)
    unit = machines.boot_unit()
    machines.all_there()
    assert firsts(machines.head.client.get_data(second)) == [2, 2]
    assert firsts(unit.client.get_data(second)) == [2, 2]
    third = put(unit, 3, width)
    machines.cut(unit)
    unit = machines.boot_unit()
    machines.all_there()
    assert [firsts(machines.head.client.get_data(meta)) for meta in (second, third)] == [[2, 2], [3, 3]]
    machines.head.client.clear_partition("p")
    until(lambda: unit.used() == 0, "room at the unit")


@pytest.mark.parametrize("width", [4, LARGE], ids=["in the log", "in a file"])
def test_a_controller_that_lost_its_power_finds_the_rows_of_its_units(machines: Machines, width: int) -> None:
    first, second = put(machines.unit, 1, width), put(machines.unit, 2, width)
    machines.head.client.clear_samples(first)
    machines.cut(machines.head)
    head = machines.boot_head()
    machines.all_there()
    assert firsts(head.client.get_data(second)) == [2, 2]
    assert read(machines.unit, second) == [2, 2]
    third = put(machines.unit, 3, width)
    assert firsts(head.client.get_data(third)) == [3, 3]
    head.client.clear_partition("p")
    until(lambda: machines.unit.used() == 0, "room at the unit")


def test_a_controller_that_lost_its_power_finds_the_rows_of_units_without_a_journal(machines: Machines) -> None:
    unit = machines._start(join=machines.head.tcp, durability="process")
    meta = put(unit, 1)
    seen = unit.client.get_data(meta, dense=True)["x"]
    before = unit.used()
    machines.head.client.clear_samples(put(unit, 2))
    until(lambda: unit.used() == before, "room of what was cleared")
    machines.cut(machines.head)
    head = machines.boot_head()
    machines.all_there()
    assert firsts(head.client.get_data(meta)) == [1, 1]
    assert read(unit, meta) == [1, 1]
    head.client.clear_partition("p")
    put(unit, 3)
    assert (seen == 1).all()
    del seen
    head.client.clear_partition("p")
    until(lambda: unit.used() == 0, "room at the unit")


@pytest.mark.parametrize("width", [4, LARGE], ids=["in the log", "in a file"])
def test_all_machines_lose_their_power_at_once(machines: Machines, width: int) -> None:
    kept = []
    for value in range(1, 4):
        kept.append(put(machines.unit, value, width))
        kept.append(put(machines.head, 10 * value, width))
        machines.cut(machines.head, machines.unit)
        machines.boot_head()
        machines.boot_unit()
        machines.all_there()
        found = [firsts(machines.head.client.get_data(meta))[0] for meta in kept]
        assert found == [firsts(machines.unit.client.get_data(meta))[0] for meta in kept]
        assert found == [one for number in range(1, value + 1) for one in (number, 10 * number)]


def test_a_client_of_a_unit_that_began_anew_is_told_once_and_keeps_its_views(machines: Machines) -> None:
    meta = put(machines.unit, 1, count=6)
    client = machines.unit.client
    seen = client.get_data(meta, dense=True)["x"]
    machines.cut(machines.unit)
    with pytest.raises(ServiceUnavailable):
        client.get_data(meta)
    run_dir = os.path.dirname(machines.unit.server.address.removeprefix("unix:"))
    machines.boot_unit(run_dir=run_dir)
    with pytest.raises(ServiceRestarted):
        client.get_data(meta)
    assert firsts(client.get_data(meta)) == [1] * 6
    machines.head.client.clear_partition("p")
    put(machines.unit, 0, count=6)
    assert (seen == 1).all()


def test_used_rows_stay_used_and_rows_on_lease_are_offered_again(machines: Machines) -> None:
    put(machines.unit, 1, count=6)
    taken = machines.unit.client.get_meta(["x"], 2, "p", task_name="t")
    machines.head.client.get_meta(["x"], 2, "p", task_name="t", lease_s=60)
    machines.cut(machines.head, machines.unit)
    head, _ = machines.boot_head(), machines.boot_unit()
    machines.all_there()
    rest = head.client.get_meta(["x"], 4, "p", task_name="t")
    assert not set(rest.global_indexes) & set(taken.global_indexes)
    assert firsts(head.client.get_data(rest)) == [1] * 4


def test_the_standby_takes_over_and_then_the_unit_loses_its_power(machines: Machines) -> None:
    first = put(machines.unit, 1)
    standby_of(machines.unit.client)
    kill(server_of(machines.unit.client))
    second, small = put(machines.unit, 2), put(machines.unit, 3, width=4)
    machines.cut(machines.unit)
    machines.boot_unit()
    machines.all_there()
    found = [firsts(machines.head.client.get_data(meta)) for meta in (first, second, small)]
    assert found == [[1, 1], [2, 2], [3, 3]]


def test_rows_that_were_moved_to_a_disk_come_back(start_host: Start, tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    nbytes = 2 * LARGE * 4
    more = {"budget_nbytes": 4 * nbytes, "spill_dir": str(tmp_path / "spill"), "spill_nbytes": 20 * nbytes}
    machines = Machines(start_host, tmp_path, **more)
    kept = [put(machines.unit, value) for value in range(8)]
    until(lambda: machines.unit.client.stats()["spill_nbytes_used"] > 0, "rows on the disk")
    for _ in range(2):
        machines.cut(machines.unit)
        unit = machines.boot_unit()
        machines.all_there()
        assert [firsts(machines.head.client.get_data(meta))[0] for meta in kept] == list(range(8))
        kept.append(put(unit, len(kept)))
        assert firsts(machines.head.client.get_data(kept.pop()))
    machines.head.client.clear_partition("p")
    until(lambda: unit.used() == 0, "room at the unit")
    assert unit.client.stats()["spill_nbytes_used"] == 0
    until(lambda: unit.client.stats()["journal_blocks_nbytes"] == 0, "room in the journal")


def test_blocks_that_became_sparse_come_back(machines: Machines) -> None:
    meta = put(machines.unit, 5, count=8)
    before = machines.unit.used()
    machines.head.client.clear_samples(meta[:7])
    until(lambda: machines.unit.used() < before, "the block made smaller")
    machines.cut(machines.unit)
    machines.boot_unit()
    machines.all_there()
    assert firsts(machines.head.client.get_data(meta[7:])) == [5]


def test_a_unit_that_does_not_come_back_in_time_is_given_up(start_host: Start, tmp_path: Path) -> None:
    machines = Machines(start_host, tmp_path, away_s=0.3)
    meta = put(machines.unit, 1)
    machines.cut(machines.unit)
    until(lambda: not machines.head.client.stats()["units"], "the unit given up")
    with pytest.raises(DataLost):
        machines.head.client.get_data(meta)
    machines.cut(machines.head)
    head = machines.boot_head()
    with pytest.raises(DataLost):
        head.client.get_data(meta)
    unit = machines.boot_unit()
    assert unit.used() == 0
    assert firsts(head.client.get_data(put(unit, 2))) == [2, 2]


def test_another_unit_at_the_address_does_not_take_the_place_of_one_with_a_journal(machines: Machines) -> None:
    meta = put(machines.unit, 1)
    port = int(machines.unit.tcp.rpartition(":")[2])
    machines.cut(machines.unit)
    other = machines._start(join=machines.head.tcp, port=port, durability="process")
    assert len(machines.head.client.stats()["units"]) == 2
    assert firsts(machines.head.client.get_data(put(other, 2))) == [2, 2]
    machines.boot_unit()
    machines.all_there()
    assert firsts(machines.head.client.get_data(meta)) == [1, 1]


def test_journals_of_another_service_or_of_another_kind_are_refused(
    machines: Machines, start_host: Start, tmp_path: Path
) -> None:
    meta = put(machines.unit, 1)
    with pytest.raises(JournalInUse):
        machines.boot_unit()
    machines.cut(machines.unit)
    stranger = start_host()
    with pytest.raises(InvalidInput, match="another service"):
        start_host(join=stranger.tcp, durability="machine", journal_dir=str(tmp_path / "unit"))
    with pytest.raises(InvalidInput, match="of a unit"):
        start_host(durability="machine", journal_dir=str(tmp_path / "unit"))
    machines.cut(machines.head)
    with pytest.raises(InvalidInput, match="of a service"):
        start_host(join=stranger.tcp, durability="machine", journal_dir=str(tmp_path / "head"))
    machines.boot_head()
    machines.boot_unit()
    machines.all_there()
    assert firsts(machines.head.client.get_data(meta)) == [1, 1]
