"""A service and every server have an identity: who outlives one meets the next as another, and mixes nothing up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fleets
import pytest
import torch
from conftest import freeze, until
from hosts import CLIENT, LARGE, TOKEN, Host, firsts, rows
from streams import dataset, numbers

import transfer_queue as tq
from transfer_queue.client.connection import Connection
from transfer_queue.client.session import Session
from transfer_queue.errors import (
    ConfigError,
    DataLost,
    DeadlineExceeded,
    InvalidInput,
    LeaseExpired,
    ServiceError,
    ServiceRestarted,
    ServiceUnavailable,
    StaleAttempt,
    error_from_code,
)
from transfer_queue.launch import local
from transfer_queue.server import home
from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address
from transfer_queue.wire.handshake import Life

Service = Callable[..., tq.TransferQueueClient]


class Lives:
    """A service at one run directory that is ended and started again while clients stay."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.start()

    def start(self) -> None:
        config = ServerConfig(
            run_dir=str(self.run_dir), owner_pid=os.getpid(), budget_nbytes=1 << 28,
            sampler={"class": "SequentialSampler"}, client=CLIENT,
        )  # fmt: skip
        self.server = local.start(config)
        self.pid = self.server.pid

    def end(self, how: str) -> None:
        if how == "kill":
            os.kill(self.pid, signal.SIGKILL)
            self.server.wait()
        self.server.stop()

    def again(self, how: str = "kill") -> None:
        self.end(how)
        self.start()


@pytest.fixture
def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lives]:
    """A running service, and this process attached to it."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    found = Lives(tmp_path / "service")
    tq.init({"run_dir": str(found.run_dir)})
    yield found
    tq.close()
    gc.collect()
    found.end("close")


def wide(value: float, count: int = 2) -> dict[str, torch.Tensor]:
    return {"x": torch.full((count, 100_000), value)}


def meets_the_next_life(call: Callable[[], Any]) -> None:
    with pytest.raises(ServiceRestarted, match=r"at \S+: (another service is|the server) here .*rows.*journal"):
        call()


@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_put_after_a_restart_is_stored_and_read_back(lives: Lives, how: str) -> None:
    client = tq.get_client()
    client.put(wide(1.0), partition_id="p")
    lives.again(how)
    meets_the_next_life(lambda: client.put(wide(2.0), partition_id="p"))
    meta = client.put(wide(3.0), partition_id="p")
    assert [float(row[-1]) for row in client.get_data(meta)["x"].unbind()] == [3.0, 3.0]
    assert client.stats()["pid"] == lives.pid


def test_old_metadata_reaches_no_rows_of_the_new_service(lives: Lives) -> None:
    client = tq.get_client()
    old = client.put({"x": torch.zeros(2)}, partition_id="p")
    lives.again()
    meets_the_next_life(client.get_partition_list)
    new = client.put({"x": torch.ones(2)}, partition_id="p")
    assert new.global_indexes == old.global_indexes, "the numbers begin again: only the identity tells them apart"
    for use in (
        lambda: client.get_data(old),
        lambda: client.put({"y": torch.zeros(2)}, metadata=old),
        lambda: client.clear_samples(old),
        lambda: client.set_custom_meta(old),
        lambda: client.get_data(pickle.loads(pickle.dumps(old))),  # noqa: S301  our own bytes
        lambda: client.get_data(old[:1]),
        lambda: client.get_data(old.chunk(2)[1]),
    ):
        with pytest.raises(DataLost, match=r"rows \[.*\] were lost with the service"):
            use()
    assert client.get_data(new)["x"].tolist() == [1.0, 1.0]


def test_metadata_of_two_lives_is_not_joined(lives: Lives) -> None:
    client = tq.get_client()
    old, old_kv = client.put({"x": torch.zeros(2)}, partition_id="p"), tq.kv_put("a", "k", {"x": torch.zeros(1)})
    lives.again()
    meets_the_next_life(client.get_partition_list)
    new, new_kv = client.put({"x": torch.ones(2)}, partition_id="p"), tq.kv_put("b", "k", {"x": torch.zeros(1)})
    with pytest.raises(InvalidInput, match="different lives"):
        tq.BatchMeta.concat([old, new])
    with pytest.raises(InvalidInput, match="different lives"):
        tq.KVBatchMeta.concat([old_kv, new_kv])


def test_old_key_metadata_is_refused_and_the_keys_themselves_work(lives: Lives) -> None:
    old = tq.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2)})
    lives.again()
    meets_the_next_life(tq.kv_list)
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.ones(2)})
    with pytest.raises(DataLost, match=r"rows \['a', 'b'\] were lost"):
        tq.kv_batch_get_by_meta(old)
    assert tq.kv_batch_get(old.keys, "p")["x"].tolist() == [1.0, 1.0]


def test_an_old_lease_ends_nobody_elses(lives: Lives) -> None:
    client = tq.get_client()
    client.put({"x": torch.zeros(1)}, partition_id="p")
    old = client.get_meta(["x"], 1, "p", task_name="t", lease_s=60)
    lives.again()
    meets_the_next_life(client.get_partition_list)
    client.put({"x": torch.zeros(1)}, partition_id="p")
    new = client.get_meta(["x"], 1, "p", task_name="t", lease_s=60)
    assert new.lease == old.lease
    for use in (lambda: client.ack(old), lambda: client.renew(old, 9.0), lambda: client.release(old)):
        with pytest.raises(LeaseExpired):
            use()
    assert client.get_consumption_status("t", "p")[1].tolist() == [0]
    assert client.ack(new) == 0


def test_listings_of_the_old_service_are_forgotten(lives: Lives) -> None:
    tq.kv_put("dead", "p", tag={"n": 1})
    assert tq.kv_list() == {"p": {"dead": {"n": 1}}}
    lives.again()
    meets_the_next_life(tq.kv_list)
    tq.kv_put("alive", "p", tag={"n": 2})
    assert tq.kv_list() == {"p": {"alive": {"n": 2}}}


def test_views_keep_their_bytes(lives: Lives) -> None:
    client = tq.get_client()
    view = client.get_data(client.put(wide(1.0), partition_id="p"))["x"].values()
    lives.again()
    meets_the_next_life(client.get_partition_list)
    for value in range(2, 6):
        client.put(wide(float(value)), partition_id="p")
    assert bool((view == 1.0).all())
    view.fill_(9.0)
    del view
    data = client.get_data(client.get_meta(["x"], 2, "p", task_name="t"))
    assert bool((data["x"].values() == 2.0).all())


def test_the_last_view_of_the_old_service_unpins_nothing_of_the_new_one(lives: Lives) -> None:
    client = tq.get_client()
    view = client.get_data(client.put(wide(1.0), partition_id="p"))["x"]
    lives.again()
    meets_the_next_life(client.get_partition_list)
    meta = client.put(wide(2.0), partition_id="p")
    held = client.get_data(meta)["x"].values()
    pinned = client.stats()["pinned_nbytes"]
    del view
    client.clear_samples(meta)
    client.put(wide(3.0), partition_id="p")
    assert client.stats()["pinned_nbytes"] == pinned
    assert bool((held == 2.0).all())


def test_an_allocation_of_the_old_service_is_not_published_in_the_new_one(lives: Lives) -> None:
    client = tq.get_client()
    room = client.allocate({"x": ((2, 100_000), torch.float32)})
    lives.again()
    meets_the_next_life(client.get_partition_list)
    client.put(wide(2.0), partition_id="p")
    room["x"].fill_(7.0)
    with pytest.raises(ServiceRestarted):
        room.commit("p")
    assert client.get_partition("p") == {"size": None, "metadata": {}, "rows": 2}


def test_every_call_in_flight_raises_once_and_the_next_one_works(lives: Lives) -> None:
    client = tq.get_client()
    failed: list[BaseException] = []
    worked: list[Any] = []
    ended, started = threading.Event(), threading.Event()

    def work(number: int) -> None:
        try:
            client.get_meta(["x"], 1, "p", task_name="t", timeout_s=60)
        except ServiceUnavailable as error:
            failed.append(error)
            if len(failed) == 5:
                ended.set()
        started.wait(30)
        while True:
            try:
                worked.append(client.put({"x": torch.zeros(1)}, partition_id=f"p{number}"))
                return
            except ServiceRestarted as error:  # it had not met the new one yet
                failed.append(error)

    async def work_async() -> None:
        await asyncio.to_thread(work, 9)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    threads.append(threading.Thread(target=lambda: asyncio.run(work_async())))
    for thread in threads:
        thread.start()
    until(lambda: client.stats()["waiting_requests"] == 5, "five parked requests")
    lives.end("kill")
    assert ended.wait(30)
    lives.start()
    started.set()
    for thread in threads:
        thread.join(30)
    assert len(worked) == 5
    assert len(failed) <= 10, "at most two each: one when the server went, one on meeting the next"
    assert len(client.get_partition_list()) == 5


def test_an_asynchronous_client_meets_the_next_life(lives: Lives) -> None:
    async def work() -> list[float]:
        client = tq.get_client()
        await client.async_put(wide(1.0), partition_id="p")
        await asyncio.to_thread(lives.again)
        with pytest.raises(ServiceRestarted):
            await client.async_put(wide(2.0), partition_id="p")
        meta = await client.async_put(wide(3.0), partition_id="p")
        return [float(row[0]) for row in (await client.async_get_data(meta))["x"].unbind()]

    assert asyncio.run(work()) == [3.0, 3.0]


def test_the_server_itself_refuses_what_names_another_life(lives: Lives) -> None:
    session = tq.get_client().session
    tq.kv_put("a", "p", {"x": torch.zeros(1)})
    for life in (Life(b"another life...."), Life(b"", b"another unit....")):
        with pytest.raises(ServiceRestarted):
            Connection(session.address, b"a session", 5.0, life=life)
    call = session.connect()
    for request, error in (
        (m.Get(1, "p", ["a"], None, None, False, b"another life...."), DataLost),
        (m.Clear(2, "p", ["a"], None, b"another life...."), DataLost),
        (m.Ack(3, 1, None, b"another life...."), LeaseExpired),
    ):
        reply, _ = call.call(request, None, 5.0)
        assert isinstance(error_from_code(reply.code, reply.text), error)
    call.close()
    assert tq.kv_list() == {"p": {"a": {}}}


# loaders


def wide_rows(count: int) -> dict[str, torch.Tensor]:
    x = torch.arange(count)
    return {"x": x, "wide": x[:, None].repeat(1, 20_000)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_outlives_its_service_goes_on_with_the_next(lives: Lives, num_workers: int) -> None:
    client = tq.get_client()
    client.put(wide_rows(8), partition_id="p")
    loader = tq.StreamingDataLoader(dataset(should_check_consumption_status=True), num_workers=num_workers)
    stream = iter(loader)
    kept, _ = next(stream)
    lives.again()
    with pytest.raises(ServiceError):
        list(stream)
    del stream
    with contextlib.suppress(ServiceRestarted):  # where only the workers have met it so far
        client.get_partition_list()
    client.put(wide_rows(4), partition_id="p")
    loader.step("p")
    assert numbers(loader) == [[0, 1], [2, 3]]
    assert kept["x"].tolist() == [0, 1]
    assert int(kept["wide"].unbind()[1][-1]) == 1


def test_a_stream_that_begins_after_its_service_ended_is_told_once(lives: Lives) -> None:
    client = tq.get_client()
    lives.again()
    stream = tq.stream("p", ["x"], task="t", batch_size=2)
    with pytest.raises(ServiceRestarted):
        next(iter(stream))
    client.put(wide_rows(2), partition_id="p")
    assert [data["x"].tolist() for data in stream] == [[0, 1]]


def told(client: tq.TransferQueueClient) -> None:
    with contextlib.suppress(ServiceRestarted):  # unless a loop was told first
        client.get_partition_list()


@pytest.mark.parametrize("way", ["loop", "workers", "state"])
def test_rows_with_the_numbers_of_used_ones_of_before_are_delivered(lives: Lives, way: str) -> None:
    client = tq.get_client()
    client.set_partition("p", size=8)
    client.put(wide_rows(8), partition_id="p")
    stream = dataset(should_check_consumption_status=True)
    loader = tq.StreamingDataLoader(stream, num_workers=int(way == "workers"))
    loop = iter(loader)
    next(loop), next(loop)
    state = loader.state_dict()
    lives.again()
    with pytest.raises(ServiceError):
        list(loop)
    del loop
    loader.close()
    if way != "workers":  # a loop in this process may count what it could not acknowledge
        loader.load_state_dict(state)
    if way == "state":
        loader = tq.StreamingDataLoader(dataset(should_check_consumption_status=True))
        loader.load_state_dict(state)
    told(client)
    client.set_partition("p", size=8)
    client.put(wide_rows(8), partition_id="p")
    assert numbers(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_stream_that_goes_on_with_an_empty_service_waits_for_its_rows(lives: Lives) -> None:
    client = tq.get_client()
    client.set_partition("p", size=8)
    client.put(wide_rows(8), partition_id="p")
    stream = tq.stream("p", ["x"], task="t", batch_size=4)
    loop = iter(stream)
    next(loop), next(loop)
    lives.again()
    with pytest.raises(ServiceError):
        list(loop)
    told(client)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: [data["x"].tolist() for data in stream])
        until(lambda: found.done() or client.overview().waits, "the loop to wait")
        client.set_partition("p", size=4)
        client.put(wide_rows(4), partition_id="p")
        assert found.result(20) == [[0, 1, 2, 3]]


# groups


def test_an_attempt_of_a_service_that_ended_takes_nobodys_place(lives: Lives) -> None:
    client = tq.get_client()

    def claimed() -> tuple[tq.GroupPool, list[tq.SlotAttempt]]:
        pool = tq.group_pool("p", tq.GroupPolicy.windowed(1))
        pool.open("g", 2)
        return pool, pool.claim(max_slots=1)

    _, [first] = claimed()
    lives.again()
    told(client)
    pool, [second] = claimed()
    late = [first, first._replace(slot=1)]  # the second's slot nobody has begun
    pool.fail(late)
    found = pool.finish_batch([one.result() for one in [second, *late]], {"x": torch.tensor([1, 2, 3])})
    assert [(one.attempt, type(one.error)) for one in found.refused] == [(one, StaleAttempt) for one in late]
    assert client.get_data(found.metadata)["x"].flatten().tolist() == [1]


def test_a_ticket_of_a_service_that_ended_opens_no_group(lives: Lives) -> None:
    policy = tq.GroupPolicy.in_order(1, 4)
    [ticket] = tq.group_pool("p", policy).tickets(1)
    lives.again()
    told(tq.get_client())
    pool = tq.group_pool("p", policy)
    pool.tickets(1)
    with pytest.raises(InvalidInput, match="nobody was given it"):
        pool.open("g", 1, ticket=ticket)


# init


def test_init_attaches_to_the_service_that_took_the_place_of_the_dead_one(lives: Lives) -> None:
    before = lives.pid
    lives.again()
    tq.init({"run_dir": str(lives.run_dir)})
    assert tq.get_client().stats()["pid"] == lives.pid != before


def test_a_client_whose_service_ended_twice_says_what_to_do(lives: Lives) -> None:
    client = tq.get_client()
    lives.again()
    meets_the_next_life(client.get_partition_list)
    lives.end("kill")
    for _ in range(2):
        with pytest.raises(ServiceUnavailable, match=r"pid \d+.*gone.*transfer_queue.init"):
            client.get_partition_list()
    lives.start()
    assert client.get_partition_list() == []


def test_rows_of_a_loaded_checkpoint_keep_their_names(lives: Lives, tmp_path: Path) -> None:
    client = tq.get_client()
    saved = client.put({"x": torch.tensor([1.0, 2.0])}, partition_id="p")
    tq.save_checkpoint(tmp_path / "checkpoint")
    later = client.put({"x": torch.tensor([3.0])}, partition_id="p")
    lives.again()
    meets_the_next_life(client.get_partition_list)
    own = client.put({"x": torch.tensor([9.0, 9.0])}, partition_id="p")
    assert own.global_indexes == saved.global_indexes
    tq.load_checkpoint(tmp_path / "checkpoint")
    assert client.get_data(saved)["x"].tolist() == [1.0, 2.0]
    new = client.put({"x": torch.tensor([4.0])}, partition_id="p")
    for gone in (own, later):
        with pytest.raises(DataLost):
            client.get_data(gone)
    tq.load_checkpoint(tmp_path / "checkpoint")
    assert client.get_data(saved)["x"].tolist() == [1.0, 2.0]
    with pytest.raises(DataLost):
        client.get_data(new)


def test_init_starts_a_service_where_its_own_died(service: Service) -> None:
    before = service(server={"durability": "none"}).stats()["pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{before}/fd/0").exists(), "the end of the server")
    with pytest.raises(ServiceUnavailable, match=rf"pid {before}.*gone.*rows.*lost.*transfer_queue.init"):
        tq.kv_list()
    tq.init()
    assert tq.get_client().stats()["pid"] != before
    assert tq.kv_list() == {}


def test_init_leaves_a_service_alone_whose_socket_was_removed(
    service: Service, child: Callable[[str], Any], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    pid = service(run_dir=str(directory)).stats()["pid"]
    tq.kv_put("a", "p", {"x": torch.zeros(4)})
    shutil.rmtree(directory)
    told = rf"{directory}/tq.sock was removed while its server runs.*save"
    with ThreadPoolExecutor() as threads, pytest.raises(ServiceUnavailable, match=told):
        threads.submit(tq.init).result()
    assert list(tq.kv_list("p")["p"]) == ["a"]
    assert tq.get_client().stats()["pid"] == pid
    beside = child(
        "import transfer_queue as tq\n"
        "try:\n"
        f"    tq.init({{'run_dir': {str(directory)!r}}})\n"
        "except tq.errors.ServiceUnavailable as error:\n"
        "    print(error)\n"
    )
    assert f"{directory}/tq.sock was removed while its server runs" in beside.finish()


def test_no_server_starts_beside_one_whose_socket_was_removed(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service(run_dir=str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(home, "VACATE_S", 0.05)
    with pytest.raises(ConfigError, match=r"does not leave.*tq.sock was removed, and it still runs"):
        asyncio.run(home.move_in(str(tmp_path / "run")))


def test_init_attaches_a_process_anew_that_closed_its_client(service: Service) -> None:
    pid = service().stats()["pid"]
    tq.kv_put("a", "p", {"x": torch.zeros(4)})
    tq.get_client().close()
    tq.init()
    assert list(tq.kv_list("p")["p"]) == ["a"]
    assert tq.get_client().stats()["pid"] == pid


def test_init_does_not_take_a_frozen_service_for_a_dead_one(service: Service) -> None:
    client = service(client={"timeout_s": 0.5})
    pid = client.stats()["pid"]
    freeze(pid)
    try:
        tq.init()
        assert tq.get_client() is client
        with pytest.raises(DeadlineExceeded):
            tq.kv_list()
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: _answers(client), "an answer after SIGCONT")


def _answers(client: tq.TransferQueueClient) -> bool:
    try:
        return bool(client.stats())
    except DeadlineExceeded:
        return False


# other hosts


def test_a_client_that_stays_on_a_restarted_unit_reads_no_stale_bytes(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    run_dir = unit.server.address.removeprefix("unix:").rpartition("/")[0]
    lost = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    port = int(unit.tcp.rpartition(":")[2])
    os.kill(unit.server.pid, signal.SIGKILL)
    unit.server.wait()
    again = start_host(join=head.tcp, port=port, run_dir=run_dir)
    meets_the_next_life(lambda: unit.client.put(rows(2, 2, LARGE), partition_id="p"))
    kept = unit.client.put(rows(3, 2, LARGE), partition_id="p")
    assert firsts(unit.client.get_data(kept)) == [3, 3]
    assert firsts(head.client.get_data(kept)) == [3, 3]
    with pytest.raises(DataLost):
        unit.client.get_data(lost)
    assert again.used() > 0


def test_a_unit_whose_controller_was_started_anew_mixes_no_lives(start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    old = unit.client.put(rows(1, 2, LARGE), partition_id="p")
    view = unit.client.get_data(old)["x"].values()
    os.kill(head.server.pid, signal.SIGKILL)
    head.server.wait()
    second = start_host(port=int(head.tcp.rpartition(":")[2]))
    until(lambda: bool(second.client.stats()["units"]), "the unit's return")
    meets_the_next_life(lambda: unit.client.put(rows(2, 2, LARGE), partition_id="p"))
    new = unit.client.put(rows(3, 2, LARGE), partition_id="p")
    assert new.global_indexes == old.global_indexes
    with pytest.raises(DataLost, match="lost with the service"):
        unit.client.get_data(old)
    assert firsts(unit.client.get_data(new)) == [3, 3]
    for value in range(4, 12):
        unit.client.put(rows(value, 2, LARGE), metadata=new)
    assert bool((view == 1.0).all()), "the unit lives on: its pins do"
    del view
    unit.client.clear_samples(new)
    until(lambda: unit.used() == 0, "the release of what the old life pinned")


def test_a_client_over_tcp_meets_the_next_life(start_host: Callable[..., Host]) -> None:
    head = start_host()
    far = tq.TransferQueueClient.of(Session(parse_address(head.tcp, TOKEN)))
    try:
        old = far.put(rows(1, 2), partition_id="p")
        os.kill(head.server.pid, signal.SIGKILL)
        head.server.wait()
        start_host(port=int(head.tcp.rpartition(":")[2]))
        meets_the_next_life(far.get_partition_list)
        assert firsts(far.get_data(far.put(rows(2, 2), partition_id="p"))) == [2, 2]
        with pytest.raises(DataLost):
            far.get_data(old)
    finally:
        far.close()


def test_a_fleet_that_outlives_the_service_reports_its_replicas_to_the_next_one(lives: Lives) -> None:
    client = tq.get_client()
    site = fleets.Site(1, queue=client)

    def seen() -> list[tuple[str, int | None]]:
        return [(one.name, one.version) for fleet in client.overview().fleets for one in fleet.replicas]

    try:
        site.send(1)
        until(lambda: seen() == [("a", 1)], "the report of a version")
        lives.again()
        with contextlib.suppress(ServiceRestarted):  # unless the fleet's thread was told first
            client.overview()
        until(lambda: seen() == [("a", 1)], "the report to the next service")
    finally:
        site.close()
