"""Rows between hosts over a transport: one of a third party always, Mooncake's where TQ_ENGINES names its store."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blocks import same
from conftest import freeze, until
from hosts import CLIENT, LARGE, TOKEN, Host
from tensordict import TensorDict

from transfer_queue import checkpoint
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.errors import ConfigError, DeadlineExceeded, ServiceUnavailable
from transfer_queue.memory.bytes import Bytes
from transfer_queue.server.registered_arenas import RegisteredArenas, opened_transport
from transfer_queue.storage.blocks import Block, Unit
from transfer_queue.storage.transports import NotReached, RemoteSpan
from transfer_queue.storage.transports.guarded import GuardedTransport
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address

CHOSEN = ["Plain", *(["Mooncake"] if "MooncakeStore" in os.environ.get("TQ_ENGINES", "") else [])]
HELPERS = Path(__file__).parent.parent / "helpers"
ROWS = 16


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The third party's package, in this process and in all that it starts."""
    site = tmp_path_factory.mktemp("site")
    info = site / "plain_transport-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-transport\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[transfer_queue.storage_transports]\nPlain = plain_transport:PlainTransport\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(HELPERS), os.environ.get("PYTHONPATH", "")]))
        for name in CHOSEN:  # what a library opens once and keeps is no leak of a test
            GuardedTransport(name, {}, "127.0.0.1", 20.0).close(20.0)
        yield


@pytest.fixture(params=CHOSEN)
def told(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"name": request.param, "settings": {}}


@pytest.fixture
def hosts(told: dict[str, Any], start_host: Callable[..., Host]) -> tuple[Host, Host]:
    """The controller's host, and one more."""
    head = start_host(transport=told)
    return head, start_host(join=head.tcp)


@pytest.fixture
def far(hosts: tuple[Host, Host]) -> Iterator[TransferQueueClient]:
    """A client whose host has no unit."""
    found = TransferQueueClient.of(Session(parse_address(hosts[0].tcp, TOKEN)))
    yield found
    found.close()


def large(value: float = 0.0) -> torch.Tensor:
    return torch.arange(ROWS * LARGE, dtype=torch.float32).view(ROWS, LARGE) + value


def offered(host: Host) -> int:
    count: int = host.client.stats()["transport_blocks_offered"]
    return count


def stacked(found: TensorDict, field: str = "x") -> torch.Tensor:
    return torch.stack(list(found[field].unbind()))


@pytest.mark.parametrize(
    "wanted", [range(ROWS), [3, 4, 5, 6], [0, 5, 6, 11], [15], [2, 1]], ids=["all", "a run", "scattered", "one", "back"]
)
def test_a_reader_of_another_host_takes_the_rows_that_it_wants(hosts: tuple[Host, Host], wanted: Sequence[int]) -> None:
    head, unit = hosts
    unit.client.put({"x": large(), "y": large(1)}, partition_id="p")
    meta = head.client.get_meta(["x"], ROWS, "p", task_name="t").select_samples(list(wanted))
    assert torch.equal(stacked(head.client.get_data(meta)), large()[list(wanted)])
    assert offered(unit) == 1
    assert unit.used() < 2 * ROWS * LARGE * 4 + (1 << 20), "a cut was left"


def test_a_small_column_of_a_large_block_rides_along(hosts: tuple[Host, Host]) -> None:
    head, unit = hosts
    unit.client.put({"x": large(), "reward": torch.arange(ROWS)}, partition_id="p")
    meta = head.client.get_meta(["reward"], ROWS, "p", task_name="t")
    assert torch.equal(stacked(head.client.get_data(meta), "reward"), torch.arange(ROWS))
    assert offered(unit) == 0


def test_every_kind_of_value_comes_from_another_host(hosts: tuple[Host, Host], far: TransferQueueClient) -> None:
    head, unit = hosts
    fields = {
        "dense": large(),
        "ragged": torch.nested.as_nested_tensor([torch.arange(LARGE + n) for n in range(ROWS)], layout=torch.jagged),
        "objects": [{"image": np.full((500, 600), n, np.uint8), "text": f"row {n}"} for n in range(ROWS)],
    }
    unit.kv_put([f"k{n}" for n in range(ROWS)], "p", fields)
    for wanted in (range(ROWS), [4, 5, 6], [0, 9, 3]):
        keys = [f"k{n}" for n in wanted]
        for session in (head.client.session, far.session):
            reader = run(session, kv.kv_batch_get(session, keys, "p", list(fields)))
            for position, row in enumerate(wanted):
                for name, values in fields.items():
                    assert same(reader[name][position], values[row]), (name, row)


def test_a_writer_whose_host_has_no_unit_lends_its_bytes(hosts: tuple[Host, Host], far: TransferQueueClient) -> None:
    head, unit = hosts
    meta = far.put({"x": large()}, partition_id="p")
    assert head.client.stats()["transport_blocks_pulled"] == 1
    for reader in (head.client, unit.client, far):
        assert torch.equal(stacked(reader.get_data(meta)), large())


def test_metrics_count_what_travels(told: dict[str, Any], start_host: Callable[..., Host]) -> None:
    head = start_host(transport=told, metrics_port=0)
    far = TransferQueueClient.of(Session(parse_address(head.tcp, TOKEN)))
    far.get_data(far.put({"x": large()}, partition_id="p"))
    with urllib.request.urlopen(f"http://{head.client.session.config['metrics_endpoint']}/metrics") as answer:
        shown = answer.read().decode().splitlines()
    assert "tq_transport_blocks_pulled_total 1.0" in shown
    assert "tq_transport_blocks_offered_total 1.0" in shown
    far.close()


def test_tensors_allocated_on_a_host_without_a_unit_are_published(far: TransferQueueClient) -> None:
    room = far.allocate({"x": ((ROWS, LARGE), torch.float32)})
    room["x"].copy_(large(3))
    meta = room.commit("p")
    assert torch.equal(stacked(far.get_data(meta)), large(3))


def test_event_loops_and_threads_read_and_write(hosts: tuple[Host, Host], far: TransferQueueClient) -> None:
    _, unit = hosts
    metas = [unit.client.put({"x": large(n)}, partition_id=f"p{n}") for n in range(3)]

    async def all_of_them() -> list[TensorDict]:
        return await asyncio.gather(*(far.async_get_data(meta) for meta in metas))

    failed: list[int] = []

    def read(number: int) -> None:
        for _ in range(3):
            if not torch.equal(stacked(far.get_data(metas[number])), large(number)):
                failed.append(number)
            far.put({"x": large(number)}, partition_id=f"q{number}")

    threads = [threading.Thread(target=read, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for number, found in enumerate(asyncio.run(all_of_them())):
        assert torch.equal(stacked(found), large(number))
    for thread in threads:
        thread.join()
    assert not failed


def test_a_forked_child_reads(hosts: tuple[Host, Host], far: TransferQueueClient) -> None:
    meta = hosts[1].client.put({"x": large()}, partition_id="p")
    far.get_data(meta)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if far.get_data(meta)["x"][5][7].item() == 5 * LARGE + 7 else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.equal(stacked(far.get_data(meta)), large())


def test_a_forked_child_ends_in_good_order(told: dict[str, Any]) -> None:
    """What its parent had open, with threads that the child has not, is taken apart at no time."""
    code = """
import os, sys
import numpy as np
from transfer_queue.storage.transports import GuardedTransport, RemoteSpan
ours, theirs = (GuardedTransport(sys.argv[1], {}, "127.0.0.1", 20.0) for _ in range(2))
memory, into = np.arange(1 << 20, dtype=np.uint8), np.empty(1 << 20, np.uint8)
with theirs.lent(memory, 5.0) as address:
    ours.read(theirs.endpoint, [RemoteSpan(address, into)], [into], 5.0)
    pid = os.fork()
    if not pid:
        del ours, theirs
        if os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code, told["name"]], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3"], done.stderr


def test_a_unit_that_is_killed_and_has_a_standby_is_read_from_it(
    told: dict[str, Any], start_host: Callable[..., Host]
) -> None:
    head = start_host(transport=told)
    unit = start_host(join=head.tcp, durability="process")
    until(lambda: bool(unit.client.stats()["standby"]), "a standby", 10)
    meta = unit.client.put({"x": large()}, partition_id="p")
    assert torch.equal(stacked(head.client.get_data(meta)), large())
    for _ in range(2):
        until(lambda: bool(unit.client.stats()["standby"]), "a standby", 10)
        os.kill(unit.client.stats()["pid"], signal.SIGKILL)
        assert torch.equal(stacked(head.client.get_data(meta)), large())
    assert offered(unit) == 1, "the last reader came some other way"
    more = head.client.get_data(unit.client.put({"x": large(2)}, partition_id="q"))
    assert torch.equal(stacked(more), large(2))


def test_a_unit_that_is_gone_is_an_error_in_time(hosts: tuple[Host, Host], far: TransferQueueClient) -> None:
    _, unit = hosts
    meta = unit.client.put({"x": large()}, partition_id="p")
    far.get_data(meta)
    os.kill(unit.client.stats()["pid"], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ServiceUnavailable):
        far.get_data(meta)
    assert time.monotonic() - began < 2 * CLIENT["timeout_s"]


def test_memory_that_is_lent_no_more_is_looked_for_again(
    hosts: tuple[Host, Host], far: TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader was stopped for so long that its pins ended: what it has read may be other rows."""
    meta = hosts[1].client.put({"x": large()}, partition_id="p")
    access, read, calls = far.session.transport, far.session.transport.read, 0

    def late(wanted: Any, timeout_s: float) -> list[Bytes]:
        nonlocal calls
        calls += 1
        images = read(wanted, timeout_s)
        if calls == 1:
            images[0][:] = 0
            blocks = [one.block for _, one in wanted]
            rid = far.session.next_rid() - 1
            for number in range(rid + 1):
                far.session.notify(m.Unpin(number, blocks), str(far_unit))
        return images

    far_unit = hosts[1].tcp
    monkeypatch.setattr(access, "read", late)
    assert torch.equal(stacked(far.get_data(meta)), large())
    assert calls == 2


def test_a_unit_that_does_not_answer_is_an_error_in_time(told: dict[str, Any], start_host: Callable[..., Host]) -> None:
    head = start_host(transport=told, client={**CLIENT, "timeout_s": 2.0})
    unit = start_host(join=head.tcp)
    meta = unit.client.put({"x": large()}, partition_id="p")
    head.client.get_data(meta)
    pid = unit.client.stats()["pid"]
    freeze(pid)
    try:
        began = time.monotonic()
        with pytest.raises((ServiceUnavailable, DeadlineExceeded)):
            head.client.get_data(meta)
        assert time.monotonic() - began < 10
    finally:
        os.kill(pid, signal.SIGCONT)
    assert torch.equal(stacked(head.client.get_data(meta)), large())


def test_a_checkpoint_has_the_rows_of_other_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    head, unit = hosts
    unit.kv_put([f"k{n}" for n in range(ROWS)], "p", {"x": large()})
    checkpoint.save(head.client.session, tmp_path / "saved")
    unit.client.clear_partition("p")
    checkpoint.load(head.client.session, tmp_path / "saved")
    found = unit.kv_get([f"k{n}" for n in range(ROWS)], "p")
    assert torch.equal(stacked(found), large())


class SlowTransport:
    """Reads that end when they are told to."""

    pins_memory = False

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.reads = self.ended = 0

    def filling(self, unit: Unit) -> tuple[RegisteredArenas, Block]:
        """Arenas that it reads into, and a block that somebody fills."""
        guarded: Any = type("Guarded", (), {"transport": self, "register": self.register, "name": "Slow"})
        block = unit.allocate(m.Allocate(1, 1 << 20, False, 0.0), "t", b"writer", 0.0)
        assert block is not None
        return RegisteredArenas(guarded, {}, "", unit), unit.unpublished(block.block, b"writer")

    def register(self, memory: Bytes, timeout_s: float) -> None: ...

    def read(self, endpoint: str, spans: Sequence[RemoteSpan]) -> None:
        self.reads += 1
        self.go_on.wait(20)
        spans[0].into[:] = 7
        self.ended += 1


def test_a_block_that_is_filled_too_late_is_nobody_elses_meanwhile() -> None:
    """A read cannot be stopped: its block is held until it has ended, although its writer gave it up."""
    unit, slow = Unit(1 << 22), SlowTransport()

    async def work() -> None:
        arenas, found = slow.filling(unit)
        with pytest.raises(ServiceUnavailable, match=r"within 0\.05 s"):
            await arenas.pull(m.Pull(2, found.number, m.Registered("there", 1), 0.05), found)
        unit.forget(b"writer")
        assert unit.used_nbytes == 1 << 20, "the block is free while somebody writes into it"
        slow.go_on.set()
        while unit.used_nbytes:
            await asyncio.sleep(0)
        unit.check_invariants()

    asyncio.run(work())
    unit.close()


def test_a_block_is_filled_for_whoever_asks_again_once_the_first_read_has_ended() -> None:
    """The answer to the second request lets the writer publish the block and use its own memory for other things."""
    unit, slow = Unit(1 << 22), SlowTransport()

    async def work() -> None:
        arenas, found = slow.filling(unit)
        first = asyncio.create_task(arenas.pull(m.Pull(2, found.number, m.Registered("there", 1), 20.0), found))
        while not slow.reads:
            await asyncio.sleep(0)
        first.cancel()  # its connection was cut
        with pytest.raises(ServiceUnavailable, match=r"within 0\.05 s"):
            await arenas.pull(m.Pull(3, found.number, m.Registered("there", 1), 0.05), found)
        assert slow.reads == 1, "two write into one block"
        again = asyncio.create_task(arenas.pull(m.Pull(4, found.number, m.Registered("there", 1), 20.0), found))
        slow.go_on.set()
        await again
        assert slow.reads == slow.ended == 2
        unit.forget(b"writer")
        assert unit.used_nbytes == 0
        unit.check_invariants()

    asyncio.run(work())
    unit.close()


def test_what_lends_nothing_is_not_reached(told: dict[str, Any]) -> None:
    ours = GuardedTransport(told["name"], {}, "127.0.0.1", 20.0)
    theirs = GuardedTransport(told["name"], {}, "127.0.0.1", 20.0)
    memory, into = np.arange(1 << 20, dtype=np.uint8), np.empty(1 << 20, np.uint8)
    with theirs.lent(memory, 5.0) as address:
        ours.read(theirs.endpoint, [RemoteSpan(address, into)], [into], 5.0)
    assert np.array_equal(memory, into)
    for nobody in (theirs.endpoint, "127.0.0.1:9"):
        with pytest.raises(NotReached):
            ours.read(nobody, [RemoteSpan(address, into)], [into], 5.0)
    ours.close(5.0)
    theirs.close(5.0)


def test_a_transport_that_is_not_installed_is_an_error_at_the_start(start_host: Callable[..., Host]) -> None:
    with pytest.raises((ServiceUnavailable, ConfigError), match="Nobody"):
        start_host(transport={"name": "Nobody", "settings": {}})


def test_a_unit_that_cannot_read_the_controllers_memory_is_refused(told: dict[str, Any]) -> None:
    async def work() -> None:
        units = [Unit(1 << 22), Unit(1 << 22)]
        head = await opened_transport(
            {**told, "settings": {"local_hostname": "127.0.0.1"}}, "127.0.0.1", units[0], True
        )
        good = head.told()
        assert good["settings"]["local_hostname"] == "", "another host would call itself by the controller's name"
        for page, why in (
            ({**good["page"], "address": good["page"]["address"] + (1 << 40)}, "this host cannot read memory"),
            ({**good["page"], "digest": "0"}, "gives other bytes than the controller's host lends"),
        ):
            with pytest.raises(ServiceUnavailable, match=why):
                await opened_transport({**good, "page": page}, "127.0.0.1", units[1], True)
        for arenas in (head, await opened_transport(good, "127.0.0.1", units[1], True)):
            await arenas.close()
        for unit in units:
            unit.close()

    asyncio.run(work())


def test_a_unit_uses_what_the_controller_says(told: dict[str, Any], start_host: Callable[..., Host]) -> None:
    head = start_host()
    unit = start_host(join=head.tcp, transport=told)
    assert "transport" not in unit.client.session.config


def test_simple_storage_takes_its_place_where_that_is_allowed(
    start_host: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    head = start_host(transport={"name": "Nobody", "settings": {}}, backend_required=False)
    unit = start_host(join=head.tcp)
    assert "SimpleStorage takes the place" in caplog.text
    assert "'Nobody'" in caplog.text
    meta = unit.client.put({"x": large()}, partition_id="p")
    assert torch.equal(stacked(head.client.get_data(meta)), large())
    assert "transport" not in unit.client.stats()


def test_an_engine_that_does_not_open_is_replaced_where_that_is_allowed(
    start_host: Callable[..., Host], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    settings = {"engine": "Files", "engine_settings": {"url": f"file://{tmp_path}/file"}}
    with pytest.raises(ConfigError, match="Files"):
        start_host(**settings)
    head = start_host(**settings, backend_required=False)
    assert "SimpleStorage takes the place" in caplog.text
    meta = head.client.put({"x": large()}, partition_id="p")
    assert torch.equal(stacked(head.client.get_data(meta)), large())
