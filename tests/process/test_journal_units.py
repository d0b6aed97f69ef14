"""Hosts with journals that lose their power, one or all of them: rows of storage units come back too."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import until
from hosts import CLIENT, LARGE, Host, firsts, rows
from test_cli import ENVIRONMENT
from test_journal import SEED, TURNS, last, use, write
from test_standby import away, kill, server_of, standby_of
from zygote import CHILDREN

from transfer_queue import checkpoint
from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.client.transfer.snapshots import snapshot
from transfer_queue.errors import (
    DataLost,
    DeadlineExceeded,
    InvalidInput,
    JournalInUse,
    ServiceRestarted,
    ServiceUnavailable,
)

Start = Callable[..., Host]
MANY = 100


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

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Host:
        return (self.head, self.unit)[number]

    def _boot(self, name: str, **more: Any) -> Host:
        return self._start(**{"durability": "machine", "journal_dir": str(self.directory / name), **more})

    def cut(self, *hosts: Host) -> None:
        """Server, standby and whatever else there is of them are killed at once."""
        groups = {host.server._process.pid for host in hosts}
        ending = [one for one in psutil.process_iter() if group_of(one) in groups]
        for group in groups:
            os.killpg(group, signal.SIGKILL)
        for host in hosts:
            host.server.wait()
        until(lambda: not any(map(is_there, ending)), "the end of all of them, which hold the port")

    def all_there(self) -> None:
        until(lambda: self.head.client.stats()["units"], "the unit")
        until(lambda: not away(self.head.client), "the unit's return")


def group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return 0


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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


def test_a_save_hears_that_a_unit_lost_its_power_meanwhile_and_the_next_one_works(
    machines: Machines, tmp_path: Path
) -> None:
    put(machines.unit, 1)
    session = machines.head.client.session

    with snapshot(session) as found:
        machines.cut(machines.unit)
        machines.boot_unit(port=int(machines.unit.tcp.rpartition(":")[2]))
        machines.all_there()
        with pytest.raises(ServiceUnavailable, match="not held any more"):
            deque(chain.from_iterable(chunks for _, chunks in found.blocks()))
    checkpoint.save(session, tmp_path / "saved")


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


def test_a_reader_does_not_wait_long_for_a_unit_that_does_not_find_the_controller(machines: Machines) -> None:
    machines.unit.kv_put(["a"], "p", rows(1.0, 1, LARGE))
    machines.cut(machines.head)
    machines._port = 0  # another than the one that the unit looks at
    head = machines.boot_head(client={**CLIENT, "timeout_s": 60.0})
    with ThreadPoolExecutor(1) as threads, pytest.raises(ServiceUnavailable, match=r"has not joined|is away"):
        threads.submit(head.kv_get, ["a"], "p").result(timeout=30)


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
    with pytest.raises(ServiceRestarted, match="its rows are lost, but those of a journal"):
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


def test_who_waits_for_rows_of_a_unit_that_is_away_gets_them_when_it_is_back(machines: Machines) -> None:
    meta, head = put(machines.unit, 1, LARGE), machines.head.client
    machines.cut(machines.unit)
    until(lambda: away(head), "the loss of the unit")
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(head.take, "p", ["x"], len(meta), "t", timeout_s=30.0)
        until(lambda: head.stats()["waiting_requests"] == 1, "the reader")
        machines.boot_unit()
        found, data = taken.result(30)
    assert (found.global_indexes, set(firsts(data))) == (meta.global_indexes, {1})
    machines.cut(machines.unit)  # a controller that begins anew hands out no rows of a unit that is not there yet
    machines.cut(machines.head)
    later = machines.boot_head().client
    with pytest.raises(DeadlineExceeded, match="became ready"):
        later.get_meta(["x"], 1, "p", task_name="other", timeout_s=0.5)
    machines.boot_unit()
    assert (
        later.get_meta(["x"], len(meta), "p", task_name="other", timeout_s=30.0).global_indexes == meta.global_indexes
    )


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


def is_lost(host: Host, meta: Any) -> bool:
    try:
        host.client.get_data(meta)
    except DataLost:
        return True
    except ServiceUnavailable:
        pass
    return False


def test_a_unit_that_does_not_come_back_in_time_is_given_up(start_host: Start, tmp_path: Path) -> None:
    machines = Machines(start_host, tmp_path, away_s=0.3)
    meta = put(machines.unit, 1)
    machines.cut(machines.unit)
    until(lambda: not machines.head.client.stats()["units"], "the unit given up")
    with pytest.raises(DataLost):
        machines.head.client.get_data(meta)
    machines.cut(machines.head)  # perhaps before it was on the disk that the unit was given up: then it is once more
    head = machines.boot_head()
    until(lambda: is_lost(head, meta), "the unit given up")
    unit = machines.boot_unit()
    assert unit.used() == 0
    assert firsts(head.client.get_data(put(unit, 2))) == [2, 2]


def test_a_unit_that_was_given_up_does_not_mistake_rows_of_another_for_its_own(
    start_host: Start, tmp_path: Path
) -> None:
    machines = Machines(start_host, tmp_path, away_s=0.3)
    lost = put(machines.unit, 1, width=4)
    machines.cut(machines.unit)
    until(lambda: not machines.head.client.stats()["units"], "the unit given up")
    for _ in range(2):  # the first may come before it was on the disk that the unit was given up: then it is once more
        machines.cut(machines.head)
        machines.boot_head()
        until(lambda: is_lost(machines.head, lost), "the unit given up")
    other = machines._start(
        join=machines.head.tcp, durability="machine", journal_dir=str(tmp_path / "other"), away_s=60.0
    )
    meta = put(other, 2, width=4)
    unit = machines.boot_unit()
    machines.all_there()
    assert [firsts(host.client.get_data(meta)) for host in (machines.head, other, unit)] == [[2, 2]] * 3
    assert unit.used() == 0


def test_numbers_of_blocks_are_not_used_again(machines: Machines) -> None:
    put(machines.unit, 1, width=4)
    machines.cut(machines.unit)
    machines.head.client.clear_partition("p")
    for _ in range(2):
        machines.boot_unit()
        machines.all_there()
        machines.cut(machines.unit)
    unit = machines.boot_unit()
    machines.all_there()
    assert firsts(machines.head.client.get_data(put(unit, 3, width=4))) == [3, 3]


def restored(directory: Path, copy: Path) -> None:
    """A journal is what it was when it was copied."""
    shutil.rmtree(directory)
    shutil.copytree(copy, directory)


def test_an_older_copy_of_a_units_journal_lacks_rows_which_are_lost_and_no_others(
    machines: Machines, tmp_path: Path
) -> None:
    first = put(machines.unit, 1, width=4)
    machines.cut(machines.unit)
    shutil.copytree(tmp_path / "unit", tmp_path / "copy")
    machines.boot_unit()
    machines.all_there()
    since = put(machines.unit, 2, width=4, partition="q")
    machines.cut(machines.unit)
    restored(tmp_path / "unit", tmp_path / "copy")
    unit = machines.boot_unit()
    machines.all_there()
    assert read(machines.head, first) == [1, 1]
    assert is_lost(machines.head, since)
    with pytest.raises(DeadlineExceeded):
        machines.head.client.get_meta(["x"], 1, "q", task_name="t", timeout_s=0)
    for value in (3, 4):
        assert read(machines.head, put(unit, value, width=4)) == [value, value]


def test_an_older_copy_of_the_services_journal_has_rows_that_units_cleared_since_and_they_are_lost(
    machines: Machines, tmp_path: Path
) -> None:
    kept, cleared = put(machines.unit, 1, width=4), put(machines.unit, 2, width=4, partition="q")
    machines.cut(machines.head, machines.unit)
    shutil.copytree(tmp_path / "head", tmp_path / "copy")
    machines.boot_head()
    unit = machines.boot_unit()
    machines.all_there()
    before = unit.used()
    machines.head.client.clear_partition("q")
    until(lambda: unit.used() < before and not unit.client.stats()["journal_lag_s"], "the end of the block")
    machines.cut(machines.head, machines.unit)
    restored(tmp_path / "head", tmp_path / "copy")
    head = machines.boot_head()
    machines.boot_unit()
    machines.all_there()
    assert read(head, kept) == [1, 1]
    assert is_lost(head, cleared)


def test_a_unit_joins_also_when_a_foreign_checkpoint_was_loaded_meanwhile(
    machines: Machines, start_host: Start, tmp_path: Path
) -> None:
    foreign = start_host()
    put(foreign, 9)
    checkpoint.save(foreign.client.session, tmp_path / "saved")
    put(machines.unit, 1)
    machines.cut(machines.head, machines.unit)
    head = machines.boot_head()
    checkpoint.load(head.client.session, tmp_path / "saved")
    unit = machines.boot_unit()
    machines.all_there()
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


def test_nothing_that_was_answered_is_lost_whichever_machine_loses_its_power(machines: Machines) -> None:
    """Writers and consumers of both machines work until it does; what they were told is so afterwards."""
    chance = random.Random(SEED)
    there: dict[str, float] = {}
    unknown: set[str] = set()
    used: set[int] = set()
    for turn in range(TURNS):
        stop, taken = threading.Event(), list[int]()
        workers = [
            threading.Thread(target=write, args=(host, f"{turn}-{name}-{number}", there, unknown, stop))
            for name, host in (("h", machines.head), ("u", machines.unit)) for number in range(2)
        ]  # fmt: skip
        workers.append(threading.Thread(target=use, args=(machines.unit, taken, stop)))
        for worker in workers:
            worker.start()
        time.sleep(0.2 + 0.4 * chance.random())  # the moment is the point
        if chance.random() < 0.4:
            kill(server_of(chance.choice(machines).client))
            time.sleep(0.1 * chance.random())
        ends = chance.choice([[machines.head], [machines.unit], [machines.head, machines.unit]])
        machines.cut(*ends)
        stop.set()
        for host in ends:
            machines.boot_head() if host is machines.head else machines.boot_unit()
        for worker in workers:
            worker.join()
        machines.all_there()
        for host in machines:
            with contextlib.suppress(ServiceRestarted):  # who stayed is told once
                host.client.get_partition_list()
        assert used.isdisjoint(taken), "no row is used twice"
        used |= set(taken)
        keys = machines.head.client.kv_list("w").get("w", {})
        assert there.keys() <= keys.keys() <= there.keys() | unknown
        for key in keys:
            found = {last(host, key) for host in machines}
            assert found == {there.setdefault(key, max(found))}, key
        unknown -= keys.keys()
        for key in sorted(keys, key=lambda _: chance.random())[MANY:]:
            run(machines.head.client.session, kv.kv_clear(machines.head.client.session, key, "w"))
            del there[key]
    assert there
    assert used


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


def test_the_command_serves_and_joins_with_journals(tmp_path: Path) -> None:
    """What the guide says: two machines, each with a journal; both lose their power, and the same commands again."""
    tokens = []
    for name in ("token", "unit-token"):
        path = tmp_path / name
        path.write_text(f"{name}-nobody-guesses")
        path.chmod(0o600)
        tokens += [f"--{name}-file", str(path)]
    environment = {**ENVIRONMENT, "TQ_ADDRESS": str(tmp_path / "unit-run")}
    code = "import transfer_queue as tq, torch; tq.init(); "
    code += "print([tq.kv_batch_get([key], 'p')['x'].sum().item() for key in tq.kv_list().get('p', ())]); "
    code += "tq.kv_put(str(len(tq.kv_list())), 'p', {'x': torch.ones(100_000)})"
    printed, port = [], "0"
    for _ in range(2):
        with contextlib.ExitStack() as power:
            head = ["--journal", str(tmp_path / "head"), "--host", "127.0.0.1", "--port", port]
            port = _serve(power, tmp_path / "head-run", *head, *tokens)["tcp"].rpartition(":")[2]
            unit = ["--journal", str(tmp_path / "unit"), "--join", f"tcp:127.0.0.1:{port}"]
            _serve(power, tmp_path / "unit-run", *unit, *tokens)
            printed.append(str(CHILDREN.run(["-c", code], environment).stdout).strip())
    assert printed == ["[]", "[100000.0]"]


def _serve(power: contextlib.ExitStack, run_dir: Path, *options: str) -> dict[str, str]:
    """Run the command until the end of `power`, and what it has printed."""
    code = "from transfer_queue.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--run-dir", str(run_dir), *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=ENVIRONMENT)
    power.callback(server.wait)
    power.callback(os.killpg, server.pid, signal.SIGKILL)
    assert server.stdout is not None
    with server.stdout:
        ready: dict[str, str] = json.loads(server.stdout.readline())
    return ready
