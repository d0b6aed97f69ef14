"""What every storage engine keeps, with the real engine: `Files` always, others where TQ_ENGINES names them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import rows_of, same
from conftest import Child, until
from hosts import CLIENT, LARGE, Host
from storage_engines import CHOSEN, KINDS, Intruder, Running, at_port
from tensordict import TensorDict
from typer.testing import CliRunner

import transfer_queue as tq
from transfer_queue.cli import app
from transfer_queue.errors import ConfigError, DataLost, ServiceUnavailable, StoreFull
from transfer_queue.storage.engines import engine_class
from transfer_queue.storage.engines.deadline import GuardedEngine
from transfer_queue.storage.engines.sealed import GRAIN, sealed_nbytes

P, ROWS, WIDTH = "p", 64, 40_000
KEYS = [f"k{number}" for number in range(ROWS)]


@pytest.fixture(scope="module", autouse=True)
def opened_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What an engine's library opens once and keeps is no leak of a test."""
    for name in CHOSEN:
        running = KINDS[name](tmp_path_factory.mktemp("once"))  # type: ignore[call-arg]
        GuardedEngine(running.name, running.settings(), False, 20.0).close(20.0)
        running.close()
    yield
    for name in CHOSEN:
        KINDS[name].end()


if {"RayStore", "ObjectStore"} & set(CHOSEN):
    pytestmark = pytest.mark.keeps_sockets  # Ray has one to every process that it has spoken with; s3fs keeps some


@pytest.fixture(params=CHOSEN)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    running = KINDS[request.param](tmp_path)  # type: ignore[call-arg]
    yield running
    running.close()


@pytest.fixture
def client(engine: Running, service: Callable[..., tq.TransferQueueClient]) -> tq.TransferQueueClient:
    return service(**engine.conf(client={"timeout_s": 8.0}))


@pytest.fixture
def intruder(client: tq.TransferQueueClient) -> Iterator[Intruder]:
    found = Intruder(client.session.config["engine"], client.session.service_id)
    yield found
    found.close()


def numbers(value: float = 0.0, rows: int = ROWS) -> torch.Tensor:
    return torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) + value


def put(value: float = 0.0) -> None:
    tq.kv_batch_put(keys=KEYS, partition_id=P, fields=TensorDict({"x": numbers(value)}, batch_size=[ROWS]))


def got(keys: list[str] = KEYS, field: str = "x") -> torch.Tensor:
    found = tq.kv_batch_get(keys=keys, partition_id=P, select_fields=[field])[field]
    return torch.stack(list(found.unbind()))


def test_large_rows_lie_in_the_engine_and_come_back(client: tq.TransferQueueClient, intruder: Intruder) -> None:
    put()
    assert torch.equal(got(), numbers())
    assert intruder.has(1)
    stats = client.stats()
    assert stats["engine_nbytes_used"] >= ROWS * WIDTH * 4
    assert stats["arena_nbytes_used"] < ROWS * WIDTH


def test_every_kind_of_value_comes_back(client: tq.TransferQueueClient) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {
        "x": numbers(),
        "ragged": torch.nested.as_nested_tensor([torch.randn(3 + n, 5, generator=generator) for n in range(ROWS)],
                                                layout=torch.jagged),
        "varied": [torch.randn(1 + n % 3, 2 + n % 5, generator=generator) for n in range(ROWS)],
        "half": torch.randn(ROWS, 7, generator=generator).bfloat16(),
        "text": [f"row {n}" * (n % 4) for n in range(ROWS)],
        "object": [{"n": n, "image": torch.randn(3, 40, 40, generator=generator), "none": None} for n in range(ROWS)],
        "inner": TensorDict({"a": torch.randn(ROWS, 9, generator=generator)}, batch_size=[ROWS]),
    }  # fmt: skip
    client.put(values, partition_id=P)
    meta = client.get_meta(list(values), ROWS, P, task_name="t")
    picks = [list(range(ROWS)), [5], [40, 3, 17, 18, 19, 63], list(range(10, 20))]
    for pick in picks:
        found = client.get_data(meta.select_samples(pick))
        for name, value in values.items():
            wanted = rows_of(value)
            for row, number in zip(rows_of(found[name]), pick, strict=True):
                assert same(row, wanted[number]), (name, number)


def test_a_few_rows_read_their_bytes_and_few_others(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put({"x": numbers(), "y": numbers(1.0)}, partition_id=P)
    read: list[int] = []
    before = GuardedEngine.read

    def counting(self: GuardedEngine, spans: Any, timeout_s: float) -> None:
        read.extend(len(span.into) for span in spans)
        before(self, spans, timeout_s)

    monkeypatch.setattr(GuardedEngine, "read", counting)
    meta = client.get_meta(["x"], ROWS, P, task_name="t")
    found = client.get_data(meta.select_samples([7, 50]))["x"]
    assert torch.equal(torch.stack(list(found.unbind())), numbers()[[7, 50]])
    assert sum(read) <= 2 * 2 * GRAIN + 8 * (2 * ROWS * WIDTH * 4 // GRAIN + 3)


def test_a_field_that_is_written_again_has_its_new_values(client: tq.TransferQueueClient, intruder: Intruder) -> None:
    put()
    tq.kv_batch_put(keys=KEYS[10:20], partition_id=P, fields={"x": numbers(0.5, 10)})
    wanted = numbers()
    wanted[10:20] = numbers(0.5, 10)
    assert torch.equal(got(), wanted)
    put(2.0)
    assert torch.equal(got(), numbers(2.0))
    until(lambda: not intruder.has(1) and not intruder.has(2), "the old blocks deleted")


def test_what_is_cleared_is_deleted_there(client: tq.TransferQueueClient, intruder: Intruder) -> None:
    put()
    tq.kv_clear(KEYS, P)
    until(lambda: not intruder.has(1), "the block deleted")
    assert client.stats()["engine_nbytes_used"] == 0


def test_what_was_read_stays_when_it_is_cleared(client: tq.TransferQueueClient) -> None:
    put()
    found = tq.kv_batch_get(keys=KEYS, partition_id=P)["x"]
    tq.kv_clear(KEYS, P)
    put(3.0)
    assert torch.equal(torch.stack(list(found.unbind())), numbers())


def test_many_threads_and_processes_read_and_write(client: tq.TransferQueueClient) -> None:
    code = """
        import torch, transfer_queue as tq
        tq.init()
        number = int(input())
        for turn in range(4):
            values = torch.full((8, 20000), float(10 * number + turn))
            keys = [f"{number} {row}" for row in range(8)]
            tq.kv_batch_put(keys=keys, partition_id="many", fields={"x": values})
            found = tq.kv_batch_get(keys=keys, partition_id="many")["x"]
            assert all(torch.equal(row, values[0]) for row in found.unbind())
        print("done", flush=True)
        tq.close()
    """
    children = [Child(code) for _ in range(2)]
    for number, child in enumerate(children):
        child.say(str(number))

    def work(number: int) -> None:
        for turn in range(4):
            values = torch.full((8, 20_000), float(100 * number + turn))
            client.put({"x": values}, partition_id=f"thread {number}")
            meta = client.get_meta(["x"], 8, f"thread {number}", task_name="t")
            assert all(torch.equal(row, values[0]) for row in client.get_data(meta)["x"].unbind())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for child in children:
        assert child.line() == "done"
        child.finish()
    for number in range(2):
        found = tq.kv_batch_get(keys=[f"{number} {row}" for row in range(8)], partition_id="many")["x"]
        assert found[0][0].item() == 10 * number + 3


def test_event_loops_read_and_write(client: tq.TransferQueueClient) -> None:
    async def work() -> None:
        await asyncio.gather(*(client.async_put({"x": numbers(n, 8)}, partition_id=f"{n}") for n in range(4)))
        metas = [await client.async_get_meta(["x"], 8, f"{n}", task_name="t") for n in range(4)]
        for n, found in enumerate(await asyncio.gather(*(client.async_get_data(meta) for meta in metas))):
            assert torch.equal(torch.stack(list(found["x"].unbind())), numbers(n, 8))

    asyncio.run(work())


def test_a_forked_child_reads_and_writes_or_is_told_why_not(client: tq.TransferQueueClient, engine: Running) -> None:
    put()
    assert torch.equal(got(), numbers())
    fields = {"x": numbers(1.0)}  # torch's threads are not in the child: nothing large is computed there
    pid = os.fork()
    if not pid:
        code = 1
        try:
            if engine_class(engine.name).can_fork:
                found = tq.kv_batch_get(keys=KEYS[:1], partition_id=P)["x"]
                tq.kv_batch_put(keys=KEYS, partition_id=P, fields=fields)
                code = 0 if found[0][5].item() == 5.0 else 2
            else:
                with pytest.raises(ServiceUnavailable, match="was forked"):
                    tq.kv_batch_get(keys=KEYS[:1], partition_id=P)
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.equal(got(), numbers(float(engine_class(engine.name).can_fork)))


def test_tensors_that_are_allocated_first_are_published(client: tq.TransferQueueClient) -> None:
    allocation = client.allocate({"x": ((ROWS, WIDTH), torch.float32)})
    allocation["x"][:] = numbers()
    allocation.commit(partition_id=P, keys=KEYS)
    assert torch.equal(got(), numbers())


def test_a_checkpoint_has_the_rows(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    put()
    tq.save_checkpoint(tmp_path / "saved")
    put(5.0)
    tq.load_checkpoint(tmp_path / "saved")
    assert torch.equal(got(), numbers())
    tq.close()
    tq.init()
    tq.load_checkpoint(tmp_path / "saved")
    assert torch.equal(got(), numbers()), "in the memory of a service without the engine"


def test_rows_that_the_engine_lost_are_data_lost_and_others_are_not(
    client: tq.TransferQueueClient, intruder: Intruder
) -> None:
    put()
    client.put({"x": numbers(4.0)}, partition_id="q")
    meta = client.get_meta(["x"], ROWS, "q", task_name="t")
    intruder.drop(1)
    with pytest.raises(DataLost, match="partition 'p'"):
        got()
    with pytest.raises(DataLost):
        got(KEYS[:1])
    assert torch.equal(torch.stack(list(client.get_data(meta)["x"].unbind())), numbers(4.0))
    put(6.0)
    assert torch.equal(got(), numbers(6.0))


@pytest.mark.parametrize("what", ["a bit", "the end", "another block", "nothing"])
def test_other_bytes_than_were_written_are_never_returned(
    client: tq.TransferQueueClient, intruder: Intruder, what: str
) -> None:
    put()
    client.put({"x": numbers(4.0)}, partition_id="q")
    nbytes = sealed_nbytes(ROWS * WIDTH * 4)
    content = intruder.content(1, nbytes)
    if what == "a bit":
        content[nbytes // 2] ^= 1
    elif what == "the end":
        content = content[: nbytes // 2]
    elif what == "another block":
        content = intruder.content(2, nbytes)
    else:
        content[:] = 0
    intruder.replace(1, content)
    with pytest.raises((DataLost, ServiceUnavailable), match=r"MooncakeStore|Files|RayStore|Yuanrong"):
        got()
    with pytest.raises((DataLost, ServiceUnavailable)):
        got([KEYS[-1], KEYS[ROWS // 2], KEYS[ROWS // 2 + 1]])


def test_wrong_bytes_elsewhere_in_the_block_do_not_matter(client: tq.TransferQueueClient, intruder: Intruder) -> None:
    put()
    content = intruder.content(1, sealed_nbytes(ROWS * WIDTH * 4))
    content[ROWS * WIDTH * 4 - 1] ^= 1
    intruder.replace(1, content)
    assert torch.equal(got(KEYS[:2]), numbers()[:2])
    with pytest.raises(DataLost, match=r"rows \['k63'\]"):
        got(KEYS[-1:])


def test_a_client_that_is_killed_amid_a_put_leaves_nothing(client: tq.TransferQueueClient, intruder: Intruder) -> None:
    child = Child("""
        import time, torch, transfer_queue as tq
        from transfer_queue.storage.engines import sealed
        tq.init()
        def stop(*_):
            print("in the middle", flush=True)
            time.sleep(100)
        sealed.seal = stop
        tq.get_client().put({"x": torch.zeros(8, 40000)}, partition_id="p")
    """)
    assert child.line() == "in the middle"
    child.close()
    until(lambda: client.stats()["engine_nbytes_used"] == 0, "the block given up")
    assert not intruder.has(1)
    put()
    assert torch.equal(got(), numbers())


def test_an_engine_that_began_anew_loses_its_rows_and_takes_new_ones(
    client: tq.TransferQueueClient, engine: Running
) -> None:
    put()
    client.put({"x": numbers(4.0)}, partition_id="q")
    engine.restart()
    with pytest.raises(DataLost):
        within(lambda: got())
    assert client.stats()["engine_nbytes_used"] == 0, "all that was in it is given up at once"
    within(lambda: put(7.0))
    assert torch.equal(got(), numbers(7.0))


def within(work: Callable[[], Any], timeout_s: float = 40.0) -> Any:
    """The engine may need a moment: `ServiceUnavailable` until it is back."""
    found: list[Any] = []

    def is_there() -> bool:
        try:
            found.append(work())
        except (ServiceUnavailable, StoreFull):
            return False
        return True

    until(is_there, "the engine back", timeout_s)
    return found[0]


def test_a_frozen_engine_is_an_error_in_time_and_no_loss(
    client: tq.TransferQueueClient, engine: Running, intruder: Intruder
) -> None:
    if not engine.can_freeze:
        pytest.skip("there is no process to freeze")
    put()
    engine.freeze()
    try:
        with pytest.raises(ServiceUnavailable, match=engine.name):
            client.put({"x": numbers(1.0)}, partition_id="q")
    finally:
        engine.thaw()
    assert torch.equal(within(got), numbers())


def test_a_put_into_a_full_engine_waits_and_is_refused_in_time(
    engine: Running, service: Callable[..., tq.TransferQueueClient]
) -> None:
    if engine.name in ("Files", "RayStore"):
        pytest.skip("it is as large as the disk")
    client = service(**engine.conf(client={"timeout_s": 3.0}))
    large = torch.zeros(40, 1 << 20)  # 160 MiB

    def fill() -> None:
        for number in range(8):
            client.put({"x": large}, partition_id=f"{number}")

    with pytest.raises(StoreFull, match=engine.name):
        fill()
    client.clear_partition("0")
    client.put({"x": large + 1}, partition_id="q")
    found = client.get_data(client.get_meta(["x"], 40, "q", task_name="t"))["x"]
    assert torch.equal(found[0], large[0] + 1)


def test_rows_of_units_of_other_hosts_lie_there_too(engine: Running, start_host: Callable[..., Host]) -> None:
    head = start_host(engine=engine.name, engine_settings=engine.settings(), client=CLIENT)
    unit = start_host(join=head.tcp)
    large = torch.arange(3 * LARGE, dtype=torch.float32).view(3, LARGE)
    for n, host in enumerate((head, unit)):
        host.client.put({"x": large + n}, partition_id=f"p{n}")
    for n in range(2):
        meta = head.client.get_meta(["x"], 3, f"p{n}", task_name="t")
        for host in (head, unit):
            found = host.client.get_data(meta.select_samples([2, 0]))["x"]
            assert torch.equal(torch.stack(list(found.unbind())), large[[2, 0]] + n)
    assert head.client.stats()["engine_nbytes_used"] >= 2 * 3 * LARGE * 4
    assert unit.used() < LARGE
    unit.client.clear_partition("p0")
    unit.client.clear_partition("p1")
    until(lambda: head.client.stats()["engine_nbytes_used"] == 0, f"{head.client.stats()} the blocks deleted", 5)


def test_nothing_is_left_there_when_the_service_ends(
    engine: Running, service: Callable[..., tq.TransferQueueClient]
) -> None:
    client = service(**engine.conf())
    put()
    intruder = Intruder(client.session.config["engine"], client.session.service_id)
    assert intruder.has(1)
    del client
    tq.close()
    gc.collect()
    if engine.name == "RayStore":
        with pytest.raises(ServiceUnavailable, match="keeper"):
            intruder.has(1)
    else:
        assert not intruder.has(1)
    intruder.close()


@pytest.mark.parametrize("more", [{"durability": "process"}, {"journal_dir": "journal"}])
def test_a_durability_is_given_or_refused(
    engine: Running, service: Callable[..., tq.TransferQueueClient], more: dict[str, Any], tmp_path: Path
) -> None:
    if "journal_dir" in more:
        more = {"journal_dir": str(tmp_path / "journal")}
    if engine_class(engine.name).survives == "machine":
        service(**engine.conf(server=more))
        put()
        assert torch.equal(got(), numbers())
        return
    with pytest.raises(ConfigError, match=f"durability: rows that lie in {engine.name}"):
        service(**engine.conf(server=more))


def test_the_doctor_writes_reads_and_deletes(engine: Running, tmp_path: Path) -> None:
    config = tmp_path / "tq.yaml"
    config.write_text(json.dumps(engine.conf()))
    shown = CliRunner().invoke(
        app, ["doctor", "--backend", engine.name, "--config", str(config)], catch_exceptions=False
    )
    said = [line.removeprefix(f"{engine.name}: ") for line in shown.output.splitlines()]
    assert [line.split()[0].rstrip(":") for line in said[-6:]] == [
        "RDMA", "memory", "opened", "written", "read", "deleted",
    ]  # fmt: skip
    assert shown.exit_code == 0


@pytest.mark.parametrize("url", ["file://{}/file", "nosuch://bucket/tq", "gs://bucket/tq"])
def test_the_doctor_names_what_is_wrong(tmp_path: Path, url: str) -> None:
    """A file that is in the way; a scheme that nobody knows; one whose package is not installed."""
    config = tmp_path / "tq.yaml"
    (tmp_path / "file").write_text("in the way")
    config.write_text(json.dumps({"backend": {"Files": {"url": url.format(tmp_path)}}}))
    with pytest.raises(ConfigError, match=r"backend\.Files\.url"):
        CliRunner().invoke(app, ["doctor", "--backend", "Files", "--config", str(config)], catch_exceptions=False)


def test_an_engine_that_there_is_not_is_refused(service: Callable[..., tq.TransferQueueClient]) -> None:
    with pytest.raises(ConfigError, match="'Cloud' is not available; there are Files, MooncakeStore, RayStore, Sim"):
        service(backend={"storage_backend": "Cloud"})


@pytest.mark.parametrize("name", [name for name in ("MooncakeStore", "Yuanrong") if name in CHOSEN])
def test_a_port_at_which_something_else_listens_is_named_with_the_way_out(
    name: str, service: Callable[..., tq.TransferQueueClient]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    other.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(ServiceUnavailable, match=rf"(?s){name}.*{port}.*port.* 0 "):
            service(**at_port(name, port))
        other.shutdown(socket.SHUT_RDWR)
    service(**at_port(name, 0))
    put()
    assert torch.equal(got(), numbers())
