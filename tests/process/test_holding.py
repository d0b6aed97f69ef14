"""What a session has lasts as long as somebody uses it: broken calls, takeovers and forks do not end it early."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import freeze, until
from test_standby import DURABLE, kill, replaced, server_of, standby_of

import transfer_queue as tq
from transfer_queue.client import forks, locks
from transfer_queue.client.arenas import MappedArenas
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run
from transfer_queue.client.effects import Call, Operation
from transfer_queue.client.holding import Hold
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.dataloader.lease_owner import LeaseOwner
from transfer_queue.errors import DeadlineExceeded, InvalidInput, ServiceUnavailable
from transfer_queue.memory import memfd, private_map
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.arena_fds import NUMBER, SIZE

NBYTES = 1 << 20


@pytest.fixture
def other(client: TransferQueueClient) -> Iterator[TransferQueueClient]:
    """A second client of the service, of this process."""
    found = TransferQueueClient.of(Session(client.address))
    yield found
    found.close()


class Filling:
    """An operation in a thread that was given a block and takes its time to fill it."""

    def __init__(self, client: TransferQueueClient) -> None:
        self._has_block, self._go_on = threading.Event(), threading.Event()
        self._client = client
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        assert self._has_block.wait(30)

    def _work(self) -> None:
        with contextlib.suppress(ServiceUnavailable):
            run(self._client.session, self._operation())

    def _operation(self) -> Operation[None]:
        session = self._client.session
        yield Call(m.Allocate(session.next_rid(), NBYTES, False, 1.0))
        self._has_block.set()
        self._go_on.wait(30)
        yield Call(m.ListPartitions(session.next_rid()))

    def end(self) -> None:
        self._go_on.set()
        self._thread.join()


def used(client: TransferQueueClient) -> int:
    nbytes: int = client.stats()["arena_nbytes_used"]
    return nbytes


def test_a_bad_call_of_another_thread_does_not_free_what_is_being_filled(
    client: TransferQueueClient, other: TransferQueueClient
) -> None:
    filling = Filling(other)
    with pytest.raises(InvalidInput):
        other.kv_list(5)  # type: ignore[arg-type]  # the server closes the connection over it
    assert used(client) >= NBYTES
    filling.end()


def test_close_waits_with_the_memory_of_operations_that_are_under_way(client: TransferQueueClient) -> None:
    other = TransferQueueClient.of(Session(client.address))
    filling = Filling(other)
    other.close()
    assert used(client) >= NBYTES, "somebody else may have it while it is being written"
    filling.end()
    until(lambda: used(client) == 0, "the end of the session")


def test_whoever_waits_in_a_call_hears_that_the_client_was_closed(client: TransferQueueClient) -> None:
    other = TransferQueueClient.of(Session(client.address))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            other.get_meta(["x"], 1, "p", task_name="t", timeout_s=60)
        except ServiceUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "the wait")
    other.close()
    thread.join()
    assert "this client was closed" in str(errors[0])


def test_a_view_keeps_its_bytes_when_only_event_loops_call_after_a_takeover(service: Callable[..., Any]) -> None:
    client = service(**DURABLE)
    meta = client.put({"x": torch.full((4, NBYTES), 1, dtype=torch.uint8)}, partition_id="p")
    view = client.get_data(meta)["x"]
    standby_of(client)
    os.kill(server_of(client), signal.SIGKILL)

    async def clear() -> None:
        await client.async_clear_partition("p")

    async def put() -> None:
        for value in range(100, 104):
            await client.async_put({"x": torch.full((4, NBYTES), value, dtype=torch.uint8)}, partition_id="q")

    asyncio.run(clear())
    asyncio.run(put())
    assert view.values().unique().tolist() == [1]
    del view


def test_a_lock_stays_its_holders_when_a_call_is_broken_off_after_a_takeover(
    service: Callable[..., Any], child: Callable[[str], Any]
) -> None:
    client = service(**DURABLE)
    with tq.kv_global_lock("k", "p") as lock:
        replaced(client)
        asyncio.run(client.async_get_partition_list())
        idle = client.session._idle[""]
        while idle:  # as after calls that were interrupted
            idle.pop().close()
        another = child("""
            import transfer_queue as tq
            tq.init()
            try:
                with tq.kv_global_lock("k", "p", timeout=0.5):
                    print("taken")
            except tq.errors.DeadlineExceeded:
                print("not taken")
            tq.close()
        """)
        assert another.finish() == "not taken"
        lock.check()


def test_rows_of_a_fetch_that_was_cancelled_while_the_server_died_are_offered_again(
    service: Callable[..., Any],
) -> None:
    client = service(**DURABLE)
    other = TransferQueueClient.of(Session(client.address))
    standby_of(other)
    pid = server_of(other)

    async def cancelled() -> None:
        fetch = asyncio.create_task(client.async_get_meta(["x"], 2, "p", task_name="t", timeout_s=60))
        await asyncio.to_thread(until, lambda: other.stats()["waiting_requests"] == 1, "the wait")
        other.put({"x": torch.arange(2)}, partition_id="p")
        freeze(pid)
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        os.kill(pid, signal.SIGKILL)
        assert len(await client.async_get_meta(["x"], 2, "p", task_name="t", timeout_s=30)) == 2

    asyncio.run(cancelled())
    other.close()


def test_a_stream_renews_its_leases_after_a_takeover(service: Callable[..., Any]) -> None:
    client = service(**DURABLE)
    client.put({"x": torch.arange(8)}, partition_id="p")
    client.set_partition("p", size=8)
    with tq.stream("p", ["x"], task="t", batch_size=4, lease_s=1.5) as batches:
        each = iter(batches)
        seen = [next(each)["x"].tolist()]
        replaced(client)
        deadline = client.overview().leases[0].left_s
        until(lambda: client.overview().leases[0].left_s > deadline, "a renewal")
        seen += [batch["x"].tolist() for batch in each]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("kind", ["loop", "workers", "async", "collected"])
def test_a_stream_that_is_left_after_a_takeover_gives_its_rows_back(service: Callable[..., Any], kind: str) -> None:
    client = service(**DURABLE)
    client.put({"x": torch.arange(8)}, partition_id="p")
    terms = {"task": "t", "batch_size": 4, "lease_s": 600.0}

    async def loop() -> None:
        async with tq.async_stream("p", ["x"], **terms) as batches:
            async for _ in batches:
                await asyncio.to_thread(replaced, client)
                break

    if kind == "async":
        asyncio.run(loop())
    elif kind == "collected":
        dataset = tq.StreamingDataset(None, 4, 4, ["x"], "p", "t", lease_s=600.0)
        each = iter(dataset)
        next(each)
        replaced(client)
        del dataset, each
        gc.collect()
    else:
        more = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "workers" else {}
        with tq.stream("p", ["x"], **terms, **more) as batches:
            each = iter(batches)
            next(each)
            replaced(client)
    assert len(client.get_meta(["x"], 8, "p", task_name="t", timeout_s=20)) == 8


def test_a_child_of_a_process_that_was_in_a_call_does_not_hold_its_rows(
    client: TransferQueueClient, child: Callable[[str], Any]
) -> None:
    client.put({"x": torch.arange(2)}, partition_id="p")
    parent = child("""
        import os, threading, time
        import transfer_queue as tq
        tq.init()
        client = tq.get_client()
        meta = client.get_meta(["x"], 2, "p", task_name="t", lease_s=300)
        call = lambda: client.get_meta(["never"], 1, "p", task_name="u", timeout_s=100)
        threading.Thread(target=call, daemon=True).start()
        while not client.stats()["waiting_requests"]:
            time.sleep(0.01)
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        print(pid, flush=True)
        time.sleep(60)
    """)
    helper = int(parent.line())
    parent.kill()
    assert len(client.get_meta(["x"], 2, "p", task_name="t", timeout_s=30)) == 2
    os.kill(helper, signal.SIGKILL)


@pytest.mark.parametrize("lease_s", [None, 30.0])
def test_a_call_with_a_lease_keeps_its_deadline_and_the_event_loop_running(
    client: TransferQueueClient, lease_s: float | None
) -> None:
    pid = server_of(client)
    freeze(pid)
    beats: list[float] = []

    async def heart() -> None:
        while True:
            beats.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)

    async def fetch() -> float:
        beating, started = asyncio.create_task(heart()), asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await client.async_get_meta(["x"], 1, "p", task_name="t", timeout_s=0.2, lease_s=lease_s)
        beating.cancel()
        return asyncio.get_running_loop().time() - started

    try:
        took_s = asyncio.run(fetch())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert took_s < 6, "its own time, and what is added for the answer"
    assert len(beats) > 10


def test_a_client_that_was_closed_after_its_service_ended_stays_closed(service: Callable[..., Any]) -> None:
    service(server={"durability": "none"})
    mine = tq.get_client()
    mine.session.end("another life answers")
    mine.close()
    with pytest.raises(ServiceUnavailable, match="this client was closed"):
        mine.get_partition_list()


def test_a_leased_fetch_of_a_closed_client_attaches_nobody(client: TransferQueueClient) -> None:
    other = TransferQueueClient.of(Session(client.address))
    other.close()
    until(lambda: len(client.overview().sessions) == 1, "the end of the session")
    with pytest.raises(ServiceUnavailable, match="this client was closed"):
        other.get_meta(["x"], 1, "p", task_name="t", lease_s=5, timeout_s=1)
    assert len(client.overview().sessions) == 1


def test_a_forked_child_closes_no_file_of_its_own_with_an_inherited_event_loop(client: TransferQueueClient) -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client.async_get_partition_list())
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            files = [open(os.devnull, "w") for _ in range(8)]  # noqa: SIM115  their numbers are what counts
            loop.close()
            gc.collect()
            for file in files:
                os.fstat(file.fileno())
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_child_that_is_forked_while_the_server_stands_still_keeps_what_it_inherited(
    client: TransferQueueClient, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    monkeypatch.setattr(forks, "ADOPT_S", 0.2, raising=False)
    if kernel == "old":  # it knows no MADV_POPULATE_WRITE
        monkeypatch.setattr(private_map, "MADV_POPULATE_WRITE", 9999)
    meta = client.put({"x": torch.full((4, NBYTES + 9), 7, dtype=torch.uint8)}, partition_id="p")
    views = [client.get_data(meta)["x"].values() for _ in range(2)]  # the second one has a mapping of its own
    views[0][NBYTES] = 8
    go_on = os.pipe()
    pid = server_of(client)
    freeze(pid)
    try:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.read(go_on[0], 1)
                views[0][NBYTES] -= 1
                status = int(any((view.numpy() != 7).any() for view in views))
            finally:
                os._exit(status)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert views[0][NBYTES] == 8
    views.clear()
    gc.collect()
    client.clear_partition("p")
    until(lambda: not client.stats()["pinned_nbytes"], "the end of the views")
    for _ in range(3):
        client.put({"x": torch.full((4, NBYTES + 9), 9, dtype=torch.uint8)}, partition_id="q")
    os.write(go_on[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    for end in go_on:
        os.close(end)


def test_a_child_that_is_forked_while_another_thread_attaches_anew_can_attach(
    client: TransferQueueClient, other: TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, entered, go_on = other.session, threading.Event(), threading.Event()
    large = np.zeros((1, 2 * NBYTES), np.uint8)  # torch's own threads do not survive a fork

    def successor() -> Session:
        entered.set()
        assert go_on.wait(30)
        return Session.successor(session)

    monkeypatch.setattr(session, "successor", successor)
    session.end("another life answers")
    thread = threading.Thread(target=other.get_partition_list)
    with session.mover._lock:  # as a thread of the parent may have it
        thread.start()
        assert entered.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            status = 1
            try:
                go_on.set()
                other.get_partition_list()
                asyncio.run(other.async_put({"x": large}, partition_id="p"))  # a thread copies it
                status = 0
            finally:
                os._exit(status)
    go_on.set()
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def test_a_child_that_is_forked_after_an_event_loop_has_ended_lets_go_of_what_it_reads(
    client: TransferQueueClient,
) -> None:
    meta = client.put({"x": torch.arange(4 * NBYTES, dtype=torch.uint8).reshape(4, NBYTES)}, partition_id="p")
    view = client.get_data(meta)["x"]  # so that this process has a thread that releases pins
    asyncio.run(client.async_get_partition_list())
    ready, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            mine = client.get_data(meta)["x"]
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)
            del mine
            gc.collect()
            until(lambda: client.session.views.num_open == 0, "the end of the view", 10)
            status = 0
        finally:
            os._exit(status)
    os.read(ready[0], 1)
    os.write(go_on[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    for end in (*ready, *go_on):
        os.close(end)
    del view


def test_close_does_not_wait_for_a_call_on_an_event_loop_that_nobody_runs(client: TransferQueueClient) -> None:
    other = TransferQueueClient.of(Session(client.address))
    loop = asyncio.new_event_loop()
    task = loop.create_task(other.async_get_meta(["x"], 1, "p", task_name="t", timeout_s=60, lease_s=60))
    loop.run_until_complete(asyncio.sleep(0.2))
    other.close()
    until(lambda: len(client.overview().sessions) == 1, "the end of the session", 10)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def test_whoever_attaches_to_a_server_that_is_killed_amid_it_attaches_to_its_standby(
    client: TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(2)})
    greet, pids = handshake.carry_out, [client.session.server_pid]

    def killed_first(steps: Any, exchange: Any) -> Any:
        if pids:
            os.kill(pids.pop(), signal.SIGKILL)
        return greet(steps, exchange)

    monkeypatch.setattr(handshake, "carry_out", killed_first)
    with contextlib.closing(Session(client.session.address)) as session:
        assert not pids
        assert run(session, kv.kv_list(session, "p")) == {"p": {"a": {}}}


def test_who_begins_to_hold_leases_as_the_server_is_killed_holds_them_at_its_standby(
    service: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client: TransferQueueClient = service(**DURABLE)
    standby_of(client)
    greet, pids = handshake.carry_out, [server_of(client)]

    def killed_first(steps: Any, exchange: Any) -> Any:
        if pids:
            kill(pids.pop())
        return greet(steps, exchange)

    monkeypatch.setattr(handshake, "carry_out", killed_first)
    owner = LeaseOwner(client)
    assert not pids
    assert owner.ident in {one.session for one in client.overview().sessions}
    owner.close()


def test_who_was_let_in_by_a_server_that_is_killed_then_is_known_to_its_standby(service: Callable[..., Any]) -> None:
    client: TransferQueueClient = service(**DURABLE)
    standby_of(client)
    pid = server_of(client)
    owner = LeaseOwner(client)
    kill(pid)  # before anything else was asked of it
    assert owner.ident in {one.session for one in client.overview().sessions}
    owner.close()


class Line:
    """Stands for a connection."""

    def __init__(self, pid: int) -> None:
        self.welcome = m.Welcome(pid, "", b"", b"", b"")
        self.is_lost = self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_two_threads_that_hold_a_session_anew_keep_the_server_that_lives_whichever_is_slower() -> None:
    first, second, third = Line(1), Line(2), Line(3)
    made: list[Line] = [first]
    hold = Hold(lambda _: made.pop(), lambda: None)  # type: ignore[arg-type, return-value]
    hold.is_needed = True
    hold.ensure(1.0)
    first.is_lost = True

    def connect(_: float) -> Any:
        """Meanwhile another thread has one to a server which was killed just now; that is not seen yet."""
        hold._connect = lambda _: second  # type: ignore[assignment, return-value]
        hold.ensure(1.0)
        return third

    hold._connect = connect
    hold.ensure(1.0)
    assert not third.is_closed
    second.is_lost = True
    assert hold.is_missing
    hold.close()
    assert all(line.is_closed for line in (first, second, third))


def test_a_descriptor_that_a_server_was_killed_with_is_asked_for_again(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door, memfd_of(1 << 20) as arena:
        door.settimeout(5.0)
        door.bind(str(tmp_path / "door"))
        door.listen()

        def let_in() -> None:
            for gives in (False, True):
                visitor, _ = door.accept()
                with visitor:
                    visitor.recv(NUMBER.size)
                    if gives:
                        socket.send_fds(visitor, [SIZE.pack(1 << 20)], [arena])

        with ThreadPoolExecutor(1) as keeper:
            served = keeper.submit(let_in)
            arenas = MappedArenas(str(tmp_path / "door"), 5.0)
            assert len(arenas[0].shared) == 1 << 20
            served.result()
            arenas.close()


@contextlib.contextmanager
def memfd_of(nbytes: int) -> Iterator[int]:
    arena = memfd.create(None, "arena")
    os.ftruncate(arena, nbytes)
    try:
        yield arena
    finally:
        os.close(arena)


@pytest.mark.parametrize("kind", ["lock", "lease", "async"])
def test_what_was_given_as_the_service_stood_still_stays_when_a_call_is_broken_off(
    client: TransferQueueClient, other: TransferQueueClient, kind: str
) -> None:
    """The connection that no call uses could not be opened, and nothing asked for another one."""
    client.put({"x": torch.arange(2)}, partition_id="p")
    pid, frozen = client.stats()["pid"], threading.Event()

    async def lend() -> None:
        await other.async_get_partition_list()  # the loop has its connection before the service stands still
        freeze(pid)
        frozen.set()
        await other.async_get_meta(["x"], 2, "p", task_name="t", lease_s=60)

    def given() -> None:
        if kind == "async":
            asyncio.run(lend())
            return
        freeze(pid)
        frozen.set()
        if kind == "lock":
            run(other.session, locks.taking(other.session, "p", ["k"], None, 60.0))
        else:
            other.get_meta(["x"], 2, "p", task_name="t", lease_s=60)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(given)
        assert frozen.wait(20)
        assert wait([ended], 1.5).not_done, "which is longer than the session waits for that connection"
        os.kill(pid, signal.SIGCONT)
        ended.result(20)
    other.session.config["timeout_s"] = 0.2
    freeze(pid)
    with pytest.raises(DeadlineExceeded):
        other.stats()
    os.kill(pid, signal.SIGCONT)
    assert client.stats()["pid"] == pid, "by the next call it has read that the connection is gone"
    if kind == "lock":
        assert client.stats()["locks"] == 1
    else:
        with pytest.raises(DeadlineExceeded):
            client.get_meta(["x"], 2, "p", task_name="t", lease_s=60, timeout_s=0)
