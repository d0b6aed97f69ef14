"""`server.durability: process`: the server is killed, and whoever is attached goes on with all that was answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import freeze, until
from histories import check_keys
from histories_rows import check_rows
from history_workers import TASKS, Recorder, drain, read_records
from hosts import LARGE, Host, firsts, rows
from test_histories_processes import SECONDS, SEED, Nursery
from zygote import CHILDREN

import transfer_queue as tq
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.snapshots import PinnedSnapshot
from transfer_queue.errors import ConfigError, ServiceUnavailable, StoreFull
from transfer_queue.wire import messages as m

Service = Callable[..., tq.TransferQueueClient]
DURABLE = {"server": {"durability": "process"}}


def server_of(client: tq.TransferQueueClient) -> int:
    pid: int = client.stats()["pid"]
    return pid


def standby_of(client: tq.TransferQueueClient) -> int:
    """The standby of the server, once there is one."""
    until(lambda: client.stats()["standby"] != 0, "the standby")
    pid: int = client.stats()["standby"]
    return pid


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """kill -9, or another signal that ends it, and wait until it is gone."""
    watch, poll = os.pidfd_open(pid), select.poll()  # select(2) takes no descriptor from 1024 on
    poll.register(watch, select.POLLIN)
    os.kill(pid, number)
    poll.poll()
    os.close(watch)


@pytest.fixture
def client(service: Service) -> tq.TransferQueueClient:
    """A client of a fresh service with a standby."""
    return service(**DURABLE)


def replaced(client: tq.TransferQueueClient) -> None:
    """Kill the server; its standby is there afterwards."""
    before, takeovers, standby = server_of(client), client.stats()["takeovers"], standby_of(client)
    kill(before)
    assert server_of(client) == standby
    assert client.stats()["takeovers"] == takeovers + 1


def test_rows_keys_tags_and_partitions_are_there(client: tq.TransferQueueClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", fields={"x": torch.arange(6).reshape(2, 3)}, tags=[{"n": 1}, {"n": 2}])
    client.set_partition("p", metadata={"step": 7})
    meta = client.put(rows(3.0, 2, LARGE), partition_id="large")
    replaced(client)
    assert values(tq.kv_batch_get(["b", "a"], "p")["x"]) == [[3, 4, 5], [0, 1, 2]]
    assert tq.kv_list("p") == {"p": {"a": {"n": 1}, "b": {"n": 2}}}
    found = client.get_partition("p")
    assert found is not None
    assert found["metadata"] == {"step": 7}
    assert firsts(client.get_data(meta)) == [3.0, 3.0]


def test_what_was_consumed_stays_consumed_and_numbers_go_on(client: tq.TransferQueueClient) -> None:
    before = client.put({"x": torch.arange(8)}, partition_id="p")
    taken = client.get_meta(["x"], 3, "p", task_name="t")
    replaced(client)
    rest = client.get_meta(["x"], 5, "p", task_name="t")
    assert sorted([*taken.global_indexes, *rest.global_indexes]) == list(before.global_indexes)
    after = client.put({"x": torch.arange(2)}, partition_id="p")
    assert min(after.global_indexes) > max(before.global_indexes)


def test_an_error_names_the_server_that_was_there_last(client: tq.TransferQueueClient) -> None:
    replaced(client)
    last = server_of(client)
    kill(standby_of(client))
    kill(last)
    with pytest.raises(ServiceUnavailable, match=rf"the server \(pid {last}\) at"):
        tq.kv_list("p")


def test_it_is_killed_more_often_than_calls_can_be_nested(client: tq.TransferQueueClient) -> None:
    """A standby that began where the server stood when it was forked would reach the limit after 77."""
    tq.kv_put("a", "p", {"x": torch.arange(3)})
    for _ in range(90):
        kill(client.stats()["pid"] if client.stats()["standby"] else standby_of(client) and server_of(client))
    assert values(tq.kv_batch_get(["a"], "p")["x"]) == [[0, 1, 2]]


def test_a_put_that_waits_for_room_says_what_was_missing_also_after_a_takeover(service: Service) -> None:
    client = service(
        backend={"SimpleStorage": {"budget_nbytes": 2 << 20}},
        client={"timeout_s": 2.6},
        server={"durability": "process"},
    )
    client.put({"x": torch.zeros(1, 1 << 20, dtype=torch.uint8)}, partition_id="p")
    killer = threading.Timer(2.2, replaced, [client])
    killer.start()
    with pytest.raises(StoreFull, match="bytes are in use"):
        client.put({"x": torch.zeros(1, 2 << 20, dtype=torch.uint8)}, partition_id="p")
    killer.join()


def test_leases_go_on(client: tq.TransferQueueClient) -> None:
    client.put({"x": torch.arange(4)}, partition_id="p")
    kept, given_back = (client.get_meta(["x"], 2, "p", task_name="t", lease_s=60) for _ in range(2))
    replaced(client)
    client.ack(kept)
    client.release(given_back)
    again = client.get_meta(["x"], 2, "p", task_name="t", lease_s=60)
    assert list(again.global_indexes) == list(given_back.global_indexes)


def test_versions_of_the_weights_and_admissions_go_on(client: tq.TransferQueueClient) -> None:
    tq.set_weight_version(3, "run")
    tq.admit("t", 2, 0, 2)
    replaced(client)
    with pytest.raises(TimeoutError):
        tq.admit("t", 1, 0, 2, timeout_s=0)
    tq.set_weight_version(4, "run")
    tq.admit("t", 2, 0, 2, timeout_s=0)


def test_a_call_that_waits_is_answered_by_the_standby(client: tq.TransferQueueClient) -> None:
    client.put({"x": torch.arange(1)}, partition_id="p")
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(client.get_meta(["x"], 3, "p", task_name="t", timeout_s=30)))
    waiter.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "the wait")
    replaced(client)
    until(lambda: client.stats()["waiting_requests"] == 1, "the wait at the standby")
    client.put({"x": torch.arange(2)}, partition_id="p")
    waiter.join()
    assert len(found[0].global_indexes) == 3


def test_a_call_that_waits_outlives_several_servers(client: tq.TransferQueueClient) -> None:
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(client.get_meta(["x"], 1, "p", task_name="t", timeout_s=30)))
    waiter.start()
    for _ in range(3):
        until(lambda: client.stats()["waiting_requests"] == 1, "the wait")
        replaced(client)
    client.put({"x": torch.arange(1)}, partition_id="p")
    waiter.join()
    assert len(found[0].global_indexes) == 1


def values(column: Any) -> list[Any]:
    return [row.tolist() for row in column.unbind()]


def test_a_view_keeps_its_bytes_while_others_write(client: tq.TransferQueueClient) -> None:
    meta = client.put(rows(1.0, 4, LARGE), partition_id="p")
    view = client.get_data(meta)
    replaced(client)
    client.clear_samples(meta)
    for number in range(4):
        client.put(rows(5.0 + number, 4, LARGE), partition_id=f"q{number}")
    assert firsts(view) == [1.0] * 4


def test_memory_that_is_being_filled_is_still_ours(client: tq.TransferQueueClient) -> None:
    batch = client.allocate({"x": ((4, LARGE), torch.float32)})
    batch["x"][:2] = 1.0
    replaced(client)
    batch["x"][2:] = 2.0
    other = client.put(rows(9.0, 4, LARGE), partition_id="other")
    meta = batch.commit("p")
    assert firsts(client.get_data(meta)) == [1.0, 1.0, 2.0, 2.0]
    assert firsts(client.get_data(other)) == [9.0] * 4


def test_pins_of_a_reader_that_makes_no_call_last_as_long_as_its_process(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = client.put(rows(1.0, 4, LARGE), partition_id="p")
    code = """
import sys, transfer_queue as tq
tq.init()
client = tq.get_client()
meta = client.get_meta(["x"], 4, "p", task_name="reader")
view = client.get_data(meta)["x"]
print("looking", flush=True)
sys.stdin.readline()
print(view[0].sum().item(), view[3].sum().item(), flush=True)
"""
    reader = CHILDREN.start(["-c", code], {**os.environ})
    assert reader.stdout.readline() == b"looking\n"
    replaced(client)
    client.clear_samples(meta)
    used = client.stats()["arena_nbytes_used"]
    assert used >= 4 * LARGE * 4
    client.put(rows(7.0, 4, LARGE), partition_id="q")
    reader.stdin.write(b"\n")
    reader.stdin.flush()
    assert reader.stdout.readline().split() == [str(float(LARGE)).encode()] * 2
    reader.stdin.close()
    reader.wait()
    reader.stdout.close()
    client.clear_partition("q")
    until(lambda: client.stats()["arena_nbytes_used"] == 0, "the end of the reader's pins")


def test_a_client_that_was_killed_together_with_the_server_leaves_its_rows_to_others(
    client: tq.TransferQueueClient,
) -> None:
    client.put({"x": torch.arange(4)}, partition_id="p")
    code = """
import signal, transfer_queue as tq
tq.init()
tq.get_client().get_meta(["x"], 4, "p", task_name="t", lease_s=600)
print("taken", flush=True)
signal.pause()
"""
    other = CHILDREN.start(["-c", code], {**os.environ})
    assert other.stdout.readline() == b"taken\n"
    server = server_of(client)
    standby_of(client)
    freeze(server)  # it sees nothing of the client's end
    other.send_signal(signal.SIGKILL)
    other.wait()
    kill(server)
    assert client.get_meta(["x"], 4, "p", task_name="t", timeout_s=10).size == 4
    other.stdin.close()
    other.stdout.close()


def test_asyncio_calls_go_on(client: tq.TransferQueueClient) -> None:
    asyncio.run(_asyncio_calls(client))


async def _asyncio_calls(client: tq.TransferQueueClient) -> None:
    over = asyncio.Event()

    async def work(number: int) -> int:
        count = 0
        while not over.is_set():
            await tq.async_kv_put(f"{number}-{count}", "p", fields={"x": torch.tensor([count])})
            count += 1
        return count

    workers = [asyncio.create_task(work(number)) for number in range(4)]
    for _ in range(2):
        await asyncio.sleep(0.2)
        await asyncio.to_thread(replaced, client)
    over.set()
    counts = await asyncio.gather(*workers)
    assert sum(counts) == len(tq.kv_list("p")["p"])
    keys = [f"0-{number}" for number in range(counts[0])]
    found = await tq.async_kv_batch_get(keys, "p")
    assert values(found["x"]) == [[number] for number in range(counts[0])]


def test_nothing_that_was_answered_is_lost_however_often_the_server_is_killed(client: tq.TransferQueueClient) -> None:
    over = threading.Event()
    written: dict[str, int] = {}
    taken: list[int] = []

    def write(number: int) -> None:
        count = 0
        while not over.is_set():
            key, width = f"{number}-{count}", 10 if count % 5 else 20_000
            tq.kv_put(key, "p", fields={"x": torch.full((width,), count)}, tag={"width": width})
            written[key] = count
            count += 1

    def read() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                meta = client.get_meta(["x"], 1, "p", task_name="reader", timeout_s=0.05)
                taken.extend(meta.global_indexes)

    with ThreadPoolExecutor(3) as pool:
        work = [pool.submit(write, 0), pool.submit(write, 1), pool.submit(read)]
        for _ in range(5):
            before = len(written)
            until(lambda before=before: len(written) > before + 50 or any(map(Future.done, work)), "puts")  # type: ignore[misc]
            replaced(client)
        over.set()
        for one in work:
            one.result()
    assert len(taken) == len(set(taken)), "a row was handed out twice"
    assert set(tq.kv_list("p")["p"]) == set(written)
    keys = sorted(written)
    found = tq.kv_batch_get(keys, "p")["x"].unbind()
    assert [row.unique().tolist() for row in found] == [[written[key]] for key in keys]


def test_a_standby_that_is_killed_is_replaced(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", fields={"x": torch.ones(2)})
    first = standby_of(client)
    kill(first)
    until(lambda: standby_of(client) != first, "another standby")
    tq.kv_put("b", "p", fields={"x": torch.zeros(2)})
    replaced(client)
    assert set(tq.kv_list("p")["p"]) == {"a", "b"}


def test_connections_of_servers_that_were_killed_hold_no_descriptors(client: tq.TransferQueueClient) -> None:
    """A server with many clients would have none left for them after a few takeovers."""
    sessions = [Session(client.address) for _ in range(50)]
    others = [tq.TransferQueueClient.of(session) for session in sessions]

    def descriptors() -> int:
        standby_of(client)
        assert all(other.stats()["pid"] == server_of(client) for other in others)
        return len(os.listdir(f"/proc/{server_of(client)}/fd"))

    before = descriptors()
    assert before > 50
    for _ in range(3):
        replaced(client)
    assert descriptors() < before + 30
    for other in others:
        other.close()


def test_an_event_loop_that_is_gone_holds_few_descriptors(client: tq.TransferQueueClient) -> None:
    """Three: what it would write to when a signal comes, and what it would give up when there are no others left."""

    def descriptors() -> int:
        replaced(client)
        standby_of(client)
        return len(os.listdir(f"/proc/{server_of(client)}/fd"))

    first = descriptors()
    assert [descriptors() for _ in range(4)][-1] <= first + 4 * 3 + 2


def test_without_server_and_standby_the_service_is_gone(client: tq.TransferQueueClient) -> None:
    server = server_of(client)
    kill(standby_of(client))
    kill(server)
    with pytest.raises(ServiceUnavailable, match="is gone"):
        client.stats()


def test_a_long_journal_is_replaced_by_a_new_standby(client: tq.TransferQueueClient) -> None:
    first = standby_of(client)
    for number in range(0, 60_000, 6000):
        keys = [f"k{one}" for one in range(number, number + 6000)]
        tq.kv_batch_put(keys, "p", fields={"x": torch.zeros(6000, 2)}, tags=[{"text": "x" * 1200}] * 6000)
    until(lambda: standby_of(client) != first, "another standby")
    tq.kv_put("last", "p", fields={"x": torch.ones(2)})
    replaced(client)
    assert len(tq.kv_list("p")["p"]) == 60_001
    assert values(tq.kv_batch_get(["last"], "p")["x"]) == [[1.0, 1.0]]


def test_rows_that_become_columns_meanwhile_are_the_same(client: tq.TransferQueueClient) -> None:
    for number in range(300):
        tq.kv_put(f"k{number}", "p", fields={"x": torch.full((3,), number)})
    until(lambda: server_blocks(client) < 300, "the columns")
    replaced(client)
    keys = [f"k{number}" for number in range(300)]
    assert values(tq.kv_batch_get(keys, "p")["x"]) == [[number] * 3 for number in range(300)]
    for number in range(300, 600):
        tq.kv_put(f"k{number}", "p", fields={"x": torch.full((3,), number)})
    before = server_blocks(client)
    until(lambda: server_blocks(client) < before, "the columns at the standby")
    assert len(tq.kv_batch_get([f"k{number}" for number in range(600)], "p")["x"]) == 600


def server_blocks(client: tq.TransferQueueClient) -> int:
    blocks: int = client.stats()["blocks"]
    return blocks


@pytest.mark.parametrize("times", [1, 3])
def test_a_checkpoint_is_saved_while_the_server_is_replaced(
    client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    for number in range(4):
        tq.kv_put(f"k{number}", "p", fields={"x": torch.full((100_000,), number)})
    blocks = PinnedSnapshot.blocks

    def disturbed(found: PinnedSnapshot) -> Iterator[Any]:
        for number, block in enumerate(blocks(found)):
            if 0 < number <= times:
                replaced(client)
                tq.kv_clear([f"k{number}"], "p")
                tq.kv_put(f"other{number}", "p", fields={"x": torch.full((100_000,), -1)})
            yield block

    monkeypatch.setattr(PinnedSnapshot, "blocks", disturbed)
    tq.save_checkpoint(str(tmp_path / "saved"))
    tq.load_checkpoint(str(tmp_path / "saved"))
    keys = [f"k{number}" for number in range(4)]
    assert set(tq.kv_list("p")["p"]) == set(keys)
    assert [row.unique().tolist() for row in tq.kv_batch_get(keys, "p")["x"]] == [[0], [1], [2], [3]]


def test_a_loaded_checkpoint_is_there_again(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tq.kv_put("a", "p", fields={"x": torch.ones(2)})
    tq.save_checkpoint(str(tmp_path / "saved"))
    tq.kv_put("b", "p", fields={"x": torch.zeros(2)})
    first = standby_of(client)
    tq.load_checkpoint(str(tmp_path / "saved"))
    until(lambda: standby_of(client) != first, "a standby that has what was loaded")
    tq.kv_put("c", "p", fields={"x": torch.zeros(2)})
    replaced(client)
    assert set(tq.kv_list("p")["p"]) == {"a", "c"}


def test_metrics_are_at_the_same_address(service: Service) -> None:
    client = service(**DURABLE, metrics={"enabled": True})
    tq.kv_put("a", "p", fields={"x": torch.ones(2)})
    address = tq.get_metrics_endpoint()
    replaced(client)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        assert b"tq_" in page.read()


def test_a_closed_service_leaves_nothing_behind_after_it_was_replaced(service: Service) -> None:
    client = service(**DURABLE)
    replaced(client)
    server = server_of(client)
    standby, folder = standby_of(client), Path(str(client.session.address).removeprefix("unix:")).parent
    assert folder.is_dir()
    tq.close()
    until(lambda: not _runs(server) and not _runs(standby), "the end of both")
    assert not folder.exists()


def test_a_service_whose_standby_is_frozen_ends_in_good_order(start_host: Callable[..., Host]) -> None:
    host = start_host(host="", durability="process")
    standby = standby_of(host.client)
    freeze(standby)
    host.close()
    assert host.server._process.returncode == 0, "it was killed"
    until(lambda: not _runs(standby), "the end of the standby")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_service_ends_with_its_owner_also_after_it_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, signal, sys, transfer_queue as tq
tq.init({"server": {"durability": "process"}})
client = tq.get_client()
os.kill(client.stats()["pid"], signal.SIGKILL)
print(client.stats()["pid"], client.stats()["standby"], flush=True)
sys.stdin.readline()
"""
    environment = {name: value for name, value in os.environ.items() if name != "TQ_ADDRESS"}
    owner = CHILDREN.start(["-c", code], environment)
    server, standby = map(int, owner.stdout.readline().split())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    until(lambda: not _runs(server) and not _runs(standby), "the end of both")
    owner.stdin.close()
    owner.stdout.close()


def test_clients_and_units_of_other_hosts_go_on() -> None:
    head = Host(durability="process")
    other = Host(join=head.tcp)
    try:
        ours = head.client.put(rows(1.0, 2, LARGE), partition_id="p")
        theirs = other.client.put(rows(2.0, 2, LARGE), partition_id="p")
        replaced(head.client)
        until(lambda: not away(head.client), "the unit's return")
        assert firsts(other.client.get_data(ours)) == [1.0, 1.0]
        assert firsts(head.client.get_data(theirs)) == [2.0, 2.0]
        later = other.client.put(rows(3.0, 2, LARGE), partition_id="p")
        assert firsts(head.client.get_data(later)) == [3.0, 3.0]
        replaced(head.client)
        until(lambda: not away(head.client), "the unit's return")
        assert firsts(head.client.get_data(theirs)) == [2.0, 2.0]
        other.client.clear_samples(theirs)
        other.client.clear_samples(later)
        until(lambda: other.used() == 0, "room at the other host")
    finally:
        other.close()
        head.close()


def away(client: tq.TransferQueueClient) -> bool:
    return any(unit["away"] for unit in client.stats()["units"].values())


def test_another_word_for_durability_is_refused(service: Service) -> None:
    with pytest.raises(ConfigError, match=r"server\.durability: expected none or process or machine, got 'disk'"):
        service(server={"durability": "disk"})


@pytest.mark.timeout(150)
@pytest.mark.timeout(SECONDS * 3 + 110)
def test_histories_of_clients_are_possible_ones_while_the_server_is_killed(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    nursery = Nursery(tmp_path)
    try:
        rng, over = random.Random(SEED), time.monotonic() + SECONDS + 1
        for _ in range(4):
            nursery.start(over)
        kills = 0
        while time.monotonic() < over - 1:
            threading.Event().wait(rng.uniform(0.1, 0.6))
            if kills <= 3 or rng.random() < 0.5:  # on a busy machine a takeover takes a second
                replaced(client)
                kills += 1
            else:
                name = rng.choice(sorted(nursery.living))
                nursery.kill(name)
                nursery.start(over)
        nursery.wait()
        until(lambda: client.stats()["clients"] == 1, "the end of the workers' sessions")
        drain(Recorder(tmp_path, "drain"))
        history = [*read_records(tmp_path), *nursery.ends]
        assert kills > 3
        assert [str(found) for found in (*check_keys(history), *check_rows(history, TASKS))] == []
    finally:
        nursery.close()


def test_what_is_said_to_a_server_that_was_just_killed_fills_no_log(
    client: tq.TransferQueueClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def say() -> None:
        await client.async_get_partition_list()
        standby_of(client)
        kill(server_of(client))
        for _ in range(20):
            client.session.notify_on_loop(m.Received([1]))
        await client.async_get_partition_list()

    asyncio.run(say())
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_who_is_told_to_end_as_it_takes_over_ends(client: tq.TransferQueueClient) -> None:
    pid, standby = server_of(client), standby_of(client)
    freeze(standby)
    kill(pid)
    watch, poll = os.pidfd_open(standby), select.poll()
    poll.register(watch, select.POLLIN)
    os.kill(standby, signal.SIGTERM)
    os.kill(standby, signal.SIGCONT)
    assert poll.poll(5000)
    os.close(watch)


def test_a_session_outlives_a_lost_connection_while_it_has_another(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that finds its connection lost once closed the one that another thread had opened since: the session
    ended, and with it the block that was being filled."""
    session = client.session
    call = session.call

    def lose_one(effect: Any) -> Any:
        if isinstance(effect.request, m.Commit):
            lost = session.connect()
            session._give_back(lost)
            lost.shut()
        return call(effect)

    monkeypatch.setattr(session, "call", lose_one)
    meta = client.put({"x": torch.ones(1, 100_000)}, partition_id="p")
    assert len(meta) == 1
