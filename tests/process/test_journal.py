"""`server.journal_dir`: everything that the machine runs ends at once, and the next service has the rows."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import until
from hosts import LARGE, Host, firsts, rows
from test_cli import ENVIRONMENT
from test_standby import kill, server_of, standby_of
from zygote import CHILDREN

from transfer_queue import checkpoint
from transfer_queue.client.describing import batch_meta
from transfer_queue.client.effects import Call
from transfer_queue.errors import (
    DeadlineExceeded,
    InvalidInput,
    LeaseExpired,
    ServiceRestarted,
    ServiceUnavailable,
    TransferQueueError,
)
from transfer_queue.wire import messages as m

Start = Callable[..., Host]
MIB = 1 << 20
SEED, TURNS = int(os.environ.get("TQ_JOURNAL_SEED", "7")), int(os.environ.get("TQ_JOURNAL_TURNS", "6"))


def lose_power(host: Host) -> None:
    """Server, standby and whatever else there is of them are killed at once."""
    os.killpg(host.server._process.pid, signal.SIGKILL)
    host.server.wait()


class Machine:
    """A host with a journal, that loses its power."""

    def __init__(self, start: Start, directory: Path) -> None:
        self._start = start
        self.directory = directory
        self.host: Host = self.boot()

    def boot(self, **more: Any) -> Host:
        self.host = self._start(**{"host": "", "durability": "machine", "journal_dir": str(self.directory), **more})
        return self.host

    def lose_power(self) -> None:
        lose_power(self.host)

    def reboot(self, **more: Any) -> Host:
        self.lose_power()
        return self.boot(**more)

    def files(self, kind: str) -> list[Path]:
        return sorted(self.directory.glob(f"{kind}-????????"))


@pytest.fixture
def machine(start_host: Start, tmp_path: Path) -> Machine:
    return Machine(start_host, tmp_path / "journal")


def put(client: Any, value: float, count: int = 2, partition: str = "p", width: int = 4) -> Any:
    return client.put(rows(value, count, width), partition_id=partition)


def fetch(client: Any, count: int, task: str = "t", partition: str = "p", **more: Any) -> Any:
    return client.get_meta(["x"], count, partition, task_name=task, **more)


# what comes back


def test_rows_keys_tags_and_partitions_come_back(machine: Machine) -> None:
    machine.host.kv_put(["a", "b"], "p", {"x": torch.arange(6).reshape(2, 3)}, [{"n": 1}, {"n": 2}])
    machine.host.client.set_partition("p", size=5, metadata={"step": 7})
    large = put(machine.host.client, 3.0, partition="large", width=LARGE)
    host = machine.reboot()
    assert [row.tolist() for row in host.kv_get(["b", "a"], "p")["x"]] == [[3, 4, 5], [0, 1, 2]]
    assert host.client.kv_list("p") == {"p": {"a": {"n": 1}, "b": {"n": 2}}}
    found = host.client.get_partition("p")
    assert (found["size"], found["metadata"]) == (5, {"step": 7})
    assert firsts(host.client.get_data(large)) == [3.0, 3.0], "metadata of before names the same rows"


def test_what_was_used_stays_used_and_numbers_go_on(machine: Machine) -> None:
    before = put(machine.host.client, 1.0, 8)
    taken = fetch(machine.host.client, 3)
    client = machine.reboot().client
    rest = fetch(client, 5)
    assert sorted([*taken.global_indexes, *rest.global_indexes]) == list(before.global_indexes)
    assert min(put(client, 2.0).global_indexes) > max(before.global_indexes)


def test_what_was_on_lease_is_offered_and_what_was_acknowledged_is_not(machine: Machine) -> None:
    put(machine.host.client, 1.0, 4)
    acknowledged, held = (fetch(machine.host.client, 2, lease_s=60) for _ in range(2))
    machine.host.client.ack(acknowledged)
    client = machine.reboot().client
    assert list(fetch(client, 2).global_indexes) == list(held.global_indexes)
    with pytest.raises(LeaseExpired):
        client.ack(held)


def journey(host: Host, row: int, partition: str = "p") -> list[tuple[str, str]]:
    """(what happened to a row, of which task), oldest first."""
    found = host.client.inspect_row(partition, row=row)
    assert all(0 <= one.ago_s < 60 for one in found.events)
    return [(one.what, one.task) for one in found.events]


def test_what_happened_to_a_row_is_told_after_the_machine_and_a_takeover(machine: Machine) -> None:
    row = put(machine.host.client, 1.0, 1).global_indexes[0]
    put(machine.host.client, 2.0, 3, partition="others")
    first = fetch(machine.host.client, 1, lease_s=60)
    history = machine.directory / "history"
    until(lambda: history.exists() and b"taken" in history.read_bytes(), "what is written down of it")
    so_far = [("written", ""), ("taken", "t")]
    assert journey(machine.host, row) == so_far
    host = machine.reboot()
    assert journey(host, row) == so_far
    assert fetch(host.client, 1).global_indexes == first.global_indexes
    so_far.append(("taken", "t"))
    until(lambda: history.read_bytes().count(b"taken") == 2, "what is written down of that")
    standby_of(host.client)
    kill(server_of(host.client))
    assert journey(host, row) == so_far
    fetch(host.client, 1, "u")
    so_far.append(("taken", "u"))
    until(lambda: history.read_bytes().count(b"taken") == 3, "what is written down by who took over")
    machine.lose_power()
    with history.open("ab") as file:
        file.write(b"\0\0\1\0torn")
    assert journey(machine.boot(), row) == so_far


def test_cleared_and_overwritten_rows_are_as_they_were(machine: Machine) -> None:
    host = machine.host
    host.kv_put(["a", "b", "c"], "p", {"x": torch.arange(3)[:, None]})
    host.kv_put(["b"], "p", {"x": torch.tensor([[9]])})
    host.client.clear_samples(host.client.kv_retrieve_meta(["a"], "p"))
    put(host.client, 1.0, partition="gone", width=LARGE)
    host.client.clear_partition("gone")
    host = machine.reboot()
    assert list(host.client.kv_list("p")["p"]) == ["b", "c"]
    assert [row.tolist() for row in host.kv_get(["b", "c"], "p")["x"]] == [[9], [2]]
    assert host.client.get_partition_list() == ["p"]


def test_steps_come_back_and_a_loop_goes_on_where_it_was_saved(machine: Machine) -> None:
    client = machine.host.client
    put(client, 1.0, 8)
    client.checkpoint(0, ["t"])
    first = fetch(client, 2).global_indexes
    client.checkpoint(1, ["t"])
    second = fetch(client, 2).global_indexes
    client = machine.reboot().client
    assert client.list_steps("t") == [0, 1]
    assert client.resume(0, ["t"]) == (2, 4, 0, {})
    assert [fetch(client, 2).global_indexes for _ in range(2)] == [first, second]


def test_dead_letters_and_versions_of_the_weights_come_back(machine: Machine) -> None:
    client = machine.host.client
    put(client, 1.0, 2)
    meta = fetch(client, 2, lease_s=60, sampling_config={"max_deliver": 1})
    client.nack(meta, reason="too long")
    client.set_weight_version(3, "run")
    client.admit("t", 2, 0, 2)
    client = machine.reboot().client
    assert [one.reason for one in client.list_dead_letters("p", "t").redelivered.values()] == ["too long", "too long"]
    with pytest.raises(TimeoutError):
        client.admit("t", 1, 0, 2, timeout_s=0)


def test_a_refused_row_is_held_back_and_its_deliveries_are_limited_as_before(machine: Machine) -> None:
    client = machine.host.client
    before = list(put(client, 1.0, 3).global_indexes)
    for delay_s in (600.0, 0.05):
        meta = fetch(client, 1, lease_s=60, sampling_config={"max_deliver": 2})
        client.nack(meta, delay_s=delay_s, reason="too long")
    for _ in range(2):  # from the facts, and from the snapshot that the first one begins with
        client = machine.reboot().client
        meta = fetch(client, 2, lease_s=60)
        assert sorted(meta.global_indexes) == before[1:]
        with pytest.raises(DeadlineExceeded):
            fetch(client, 1, timeout_s=0)
    client.nack(meta)
    assert list(client.list_dead_letters("p", "t").global_indexes) == before[1:2]


def claim(client: Any) -> Any:
    """Rows of a partition that nobody else may fill, as `RolloutBridge.put` does."""
    session = client.session
    request = m.Insert(session.next_rid(), "p", 2, ["x", "n"], 1.0, alone=True)
    return batch_meta(session.service_id, session.call(Call(request, wait_s=1.0))[0], "p", ["x", "n"])


def test_a_claim_ends_with_the_power_and_what_was_claimed_afterwards_comes_back(machine: Machine) -> None:
    claim(machine.host.client)
    client = machine.reboot().client
    meta = claim(client)
    client.put(rows(3.0, 2), metadata=meta)
    client = machine.reboot().client
    assert firsts(client.get_data(meta)) == [3.0, 3.0]
    assert client.get_partition("p")["rows"] == 2


def test_a_claim_is_in_no_checkpoint(machine: Machine, tmp_path: Path) -> None:
    client = machine.host.client
    claim(client)
    with pytest.raises(InvalidInput, match="a step is put once"):
        claim(client)
    checkpoint.save(client.session, tmp_path / "saved")
    checkpoint.load(client.session, tmp_path / "saved")
    meta = claim(client)
    assert client.get_partition("p")["rows"] == len(meta) == 2


def test_a_loaded_checkpoint_takes_the_place_of_everything(machine: Machine, tmp_path: Path) -> None:
    client = machine.host.client
    meta = put(client, 1.0, width=LARGE)
    checkpoint.save(client.session, tmp_path / "saved")
    put(client, 2.0, partition="q", width=LARGE)
    checkpoint.load(client.session, tmp_path / "saved")
    after = put(client, 3.0, partition="r", width=LARGE)
    client = machine.reboot().client
    assert sorted(client.get_partition_list()) == ["p", "r"]
    assert firsts(client.get_data(meta)) == [1.0, 1.0]
    assert firsts(client.get_data(after)) == [3.0, 3.0]


def test_it_comes_back_again_and_again(machine: Machine) -> None:
    for number in range(4):
        put(machine.host.client, float(number), partition=f"p{number}", width=LARGE)
        machine.reboot()
    for number in range(4):
        assert (
            firsts(machine.host.client.get_data(fetch(machine.host.client, 2, partition=f"p{number}"))) == [number] * 2
        )
    assert [len(machine.files(kind)) for kind in ("log", "snapshot")] == [1, 1], "what was replaced is gone"


def test_a_service_that_was_stopped_comes_back(machine: Machine) -> None:
    meta = put(machine.host.client, 1.0)
    machine.host.server.stop()
    assert firsts(machine.boot().client.get_data(meta)) == [1.0, 1.0]


def test_blocks_that_were_moved_come_back(machine: Machine) -> None:
    client = machine.host.client
    meta = put(client, 1.0, 16, width=LARGE)
    used = machine.host.used()
    client.clear_samples(meta[2:])
    until(lambda: machine.host.used() < used / 4, "compaction")
    alone = [put(client, float(number), 1, "alone") for number in range(200)]
    until(lambda: client.stats()["blocks"] < 20, "gathering")
    client = machine.reboot().client
    assert firsts(client.get_data(meta[:2])) == [1.0, 1.0]
    assert [firsts(client.get_data(one)) for one in alone] == [[float(number)] for number in range(200)]


def test_rows_of_a_spill_disk_come_back(start_host: Start, tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    more = {"spill_dir": str(tmp_path / "spill"), "spill_nbytes": 1 << 30, "budget_nbytes": 64 * MIB}
    machine = Machine(lambda **settings: start_host(**{**settings, **more}), tmp_path / "journal")
    metas = [put(machine.host.client, float(number), 8, f"p{number}", 1 << 18) for number in range(12)]
    until(lambda: machine.host.client.stats()["spill_nbytes_used"] > 0, "spilling")
    client = machine.reboot().client
    for number, meta in enumerate(metas):
        assert firsts(client.get_data(meta)) == [float(number)] * 8


def test_a_journal_is_as_long_as_what_is_alive(machine: Machine) -> None:
    client = machine.host.client
    for _ in range(1200):
        meta = client.put({"x": torch.zeros(1, 15_000)}, partition_id="p")
        client.clear_samples(meta)
    until(lambda: len(machine.files("log")) == 1, "the snapshot")
    assert machine.files("log")[0].stat().st_size < 40 * MIB
    assert machine.reboot().client.stats()["rows"] < 3


def test_rows_that_waited_for_room_come_back(start_host: Start, tmp_path: Path) -> None:
    machine = Machine(lambda **more: start_host(max_rows=8, **more), tmp_path / "journal")
    client = machine.host.client
    first = put(client, 1.0, 7)
    waiting = threading.Thread(target=put, args=(client, 2.0, 4))
    waiting.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "the put that waits")
    client.clear_samples(first[:5])
    waiting.join()
    client = machine.reboot().client
    assert sorted(firsts(client.get_data(fetch(client, 6)))) == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_a_sampler_that_remembers_the_same_again_remembers_it(start_host: Start, tmp_path: Path) -> None:
    """A loop that repeats a step after it loaded a checkpoint."""
    settings = {"sampler": {"class": "RankAwareSampler"}}
    machine = Machine(lambda **more: start_host(**{**settings, **more}), tmp_path / "journal")
    client = machine.host.client
    put(client, 1.0, 4)
    checkpoint.save(client.session, tmp_path / "saved")
    asks = {"sampling_config": {"dp_rank": 0, "batch_index": 0}}
    taken = fetch(client, 2, **asks).global_indexes
    checkpoint.load(client.session, tmp_path / "saved")
    assert fetch(client, 2, **asks).global_indexes == taken
    client = machine.reboot().client
    assert fetch(client, 2, **asks).global_indexes == taken


def test_what_fits_in_memory_and_disk_in_pieces_comes_back(start_host: Start, tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    more = {"spill_dir": str(tmp_path / "spill"), "spill_nbytes": 66 * MIB, "budget_nbytes": 66 * MIB}
    machine = Machine(lambda **settings: start_host(**{**settings, **more}), tmp_path / "journal")
    sizes = {f"p{number}": number for number in (23, 30, 14, 37)}
    for name, size in sizes.items():
        put(machine.host.client, float(size), 1, name, size << 18)
    client = machine.reboot().client
    for name, size in sizes.items():
        assert firsts(client.get_data(fetch(client, 1, partition=name))) == [float(size)]


def test_logs_that_were_begun_on_a_full_disk_are_no_loss(machine: Machine) -> None:
    meta = put(machine.host.client, 1.0)
    machine.lose_power()
    last = int(machine.files("log")[-1].name[-8:])
    for number in (last + 1, last + 2):
        (machine.directory / f"log-{number:08d}").touch()
    assert firsts(machine.boot().client.get_data(meta)) == [1.0, 1.0]


def test_a_stop_waits_for_blocks_that_are_being_written(machine: Machine) -> None:
    client = machine.host.client
    writer = threading.Thread(target=_put_until_the_end, args=(client,))
    writer.start()
    until(lambda: client.stats()["rows"] > 0, "the first put")
    machine.host.server.stop()
    writer.join()
    client = machine.boot().client
    assert all(one == 1.0 for name in client.get_partition_list() for one in firsts(client.get_data(
        fetch(client, 2, partition=name))))  # fmt: skip


def _put_until_the_end(client: Any) -> None:
    with contextlib.suppress(TransferQueueError):
        for number in range(1000):
            put(client, 1.0, partition=f"p{number}", width=20 * LARGE)


# those who stay


def test_who_stays_is_told_once_and_goes_on(machine: Machine) -> None:
    stays = machine.host.client
    meta = put(stays, 1.0)
    machine.lose_power()
    run_dir = os.path.dirname(machine.host.server.address.removeprefix("unix:"))
    machine.boot(run_dir=run_dir)
    with pytest.raises((ServiceRestarted, ServiceUnavailable)):
        stays.get_data(meta)
    assert firsts(stays.get_data(meta)) == [1.0, 1.0]
    put(stays, 2.0)


def test_the_server_alone_is_killed_and_then_everything(machine: Machine) -> None:
    client = machine.host.client
    metas = []
    for number in range(3):
        metas.append(put(client, float(number), width=LARGE))
        standby_of(client)
        kill(client.stats()["pid"])
        metas.append(put(client, number + 0.5, width=LARGE))
    client.clear_samples(metas.pop(1))
    client = machine.reboot().client
    assert [firsts(client.get_data(meta))[0] for meta in metas] == [0.0, 1.0, 1.5, 2.0, 2.5]


def test_nothing_that_was_answered_is_lost_whenever_the_power_goes(machine: Machine) -> None:
    """Writers and consumers work until it does; what they were told is so afterwards."""
    chance = random.Random(SEED)
    there: dict[str, float] = {}
    unknown: set[str] = set()
    used: set[int] = set()
    for turn in range(TURNS):
        host, stop = machine.host, threading.Event()
        workers = [
            threading.Thread(target=write, args=(host, f"{turn}-{number}", there, unknown, stop)) for number in range(3)
        ]
        taken: list[int] = []
        workers.append(threading.Thread(target=use, args=(host, taken, stop)))
        for worker in workers:
            worker.start()
        time.sleep(0.2 + 0.4 * chance.random())  # the moment is the point
        if turn % 2:
            kill(host.client.stats()["pid"])
            time.sleep(0.1 * chance.random())
        machine.lose_power()
        stop.set()
        for worker in workers:
            worker.join()
        assert used.isdisjoint(taken), "no row is used twice"
        used |= set(taken)
        host = machine.boot()
        keys = host.client.kv_list("w")["w"] if there else {}
        assert there.keys() <= keys.keys() <= there.keys() | unknown
        for key, value in there.items():
            assert last(host, key) == value, key
        unknown -= keys.keys()
        there.update({key: last(host, key) for key in keys if key not in there})
    assert there
    assert used


def last(host: Host, key: str) -> float:
    value: float = host.kv_get([key], "w")["x"][0][-1].item()
    return value


def write(host: Host, name: str, there: dict[str, float], unknown: set[str], stop: threading.Event) -> None:
    chance = random.Random(name)
    number = 0
    while not stop.is_set():
        number += 1
        key, value = f"{name}-{number}", chance.random()
        try:
            unknown.add(key)
            width = chance.choice([4, 100_000])
            host.kv_put([key], "w", {"x": torch.full((1, width), value, dtype=torch.float64)})
            there[key] = value
            unknown.discard(key)
        except TransferQueueError:
            return


def use(host: Host, taken: list[int], stop: threading.Event) -> None:
    with contextlib.suppress(TransferQueueError):
        while not stop.is_set():
            meta = host.client.get_meta(["x"], 2, "w", task_name="t", lease_s=30)
            host.client.ack(meta)
            taken += meta.global_indexes


# from outside


def test_init_with_a_journal_brings_back_what_was_there(service: Any, tmp_path: Path) -> None:
    import transfer_queue as tq

    conf = {"server": {"journal_dir": str(tmp_path / "journal")}}
    service(**conf)
    tq.kv_put("a", "p", {"x": torch.arange(3)})
    tq.close()
    tq.init(conf)
    assert [row.tolist() for row in tq.kv_batch_get("a", "p")["x"]] == [[0, 1, 2]]


def test_tq_serve_with_a_journal(tmp_path: Path) -> None:
    """What the guide says: serve, kill all of it, serve again."""
    where = ["--run-dir", str(tmp_path / "run"), "--journal", str(tmp_path / "journal")]
    environment = {**ENVIRONMENT, "TQ_ADDRESS": str(tmp_path / "run")}
    code = "import transfer_queue as tq, torch; tq.init(); "
    code += "print(list(tq.kv_list())); tq.kv_put('a', 'p', {'x': torch.arange(3)})"
    printed = []
    for _ in range(2):
        command = [sys.executable, "-c", "from transfer_queue.cli import main; main()", "serve", *where]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=ENVIRONMENT)
        assert server.stdout is not None
        with server.stdout:
            assert json.loads(server.stdout.readline())["unix"]
        printed.append(CHILDREN.run(["-c", code], environment).stdout)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert [str(one).strip() for one in printed] == ["[]", "['p']"]


def test_journals_of_earlier_releases_are_read(start_host: Start, tmp_path: Path) -> None:
    """`tests/data` has one of each format, with all kinds of facts that small rows make; none is ever changed."""
    shutil.copytree(Path(__file__).parents[1] / "data" / "journal-format-1", tmp_path / "journal")
    host = start_host(host="", durability="machine", journal_dir=str(tmp_path / "journal"))
    client = host.client
    assert client.kv_list("p") == {"p": {"a": {"n": 1}, "b": {"n": 2}, "d": {"n": 4}}}
    assert [row.tolist() for row in host.kv_get(["a", "d"], "p")["x"]] == [[0, 1], [8, 9]]
    assert list(host.kv_get(["a", "d"], "p")["s"]) == ["one", "four"]
    found = client.get_partition("p")
    assert (found["size"], found["metadata"]) == (9, {"step": 7})
    assert client.list_steps("t") == [0, 1]
    assert [one.reason for one in client.list_dead_letters("p", "t").redelivered.values()] == ["too long"]
    assert client.stats()["weight_version"] == 3
    assert client.resume(0, ["t"]).rows == 1
    assert len(fetch(client, 2).global_indexes) == 2
