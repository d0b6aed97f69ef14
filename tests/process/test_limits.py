"""What a server does where something runs out: descriptors, places in the queue, memory, and the patience of peers.

Figures are printed (`-s`, also where a test is expected to fail).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from conftest import Child, freeze, until
from hosts import TOKEN, Host

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.connection import Connection
from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable, TransferQueueError
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, parse_address
from transfer_queue.wire.framing import PREFIX

KIB, MIB = 1 << 10, 1 << 20
STRANGERS = 500
LEFT_KIB = 8  # pages of the allocator, which the next ones use, and cycles yet to be collected; not the buffers
AT_ONCE_S, CUT_OFF_S = 1.0, 12.0


@pytest.fixture
def host(start_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    return start_host()


@pytest.fixture
def attach() -> Iterator[Callable[..., Session]]:
    """Opens sessions; those that are still open are closed after the test."""
    opened: list[Session] = []

    def open_one(address: Address, connect_timeout_s: float = 10.0) -> Session:
        opened.append(Session(address, connect_timeout_s))
        return opened[-1]

    yield open_one
    for session in opened:
        session.close()


@pytest.fixture
def dial() -> Iterator[Callable[[Address], socket.socket]]:
    """Connects without a hello; closed after the test."""
    opened: list[socket.socket] = []

    def connect(address: Address) -> socket.socket:
        until(lambda: placed(address, opened), "a place in the queue", 10)
        return opened[-1]

    yield connect
    for sock in opened:
        sock.close()


def placed(address: Address, opened: list[socket.socket]) -> bool:
    """False where the queue of a unix socket is full: this is about memory."""
    try:
        opened.append(address.connect(10.0))
    except BlockingIOError:
        return False
    return True


def address_of(host: Host, where: str) -> Address:
    return parse_address(host.tcp if where == "tcp" else host.server.address, TOKEN)


def rss(host: Host) -> int:
    return int(psutil.Process(host.server.pid).memory_info().rss)


def num_fds(host: Host) -> int:
    return int(psutil.Process(host.server.pid).num_fds())


def put_and_get(session: Session, key: str, value: float) -> bool:
    """Whether a megabyte comes back as it was put."""
    run(session, kv.kv_put(session, key, "p", {"x": torch.full((MIB // 4,), value)}))
    return bool((run(session, kv.kv_batch_get(session, key, "p"))["x"].values() == value).all())


# descriptors


class Crowd(NamedTuple):
    """A server of 256 descriptors, and 300 clients that came: who got in, and what the others were told and when."""

    address: Address
    inside: list[Session]
    told: list[tuple[TransferQueueError, float]]


@pytest.fixture
def crowd(
    start_host: Callable[..., Host], attach: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Crowd:
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -n 256\nexec {shlex.quote(sys.executable)} "$@"\n')
    limited.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(limited))
    found = Crowd(start_host().client.session.address, [], [])
    while len(found.inside) + len(found.told) < 300 and sum(seconds > AT_ONCE_S for _, seconds in found.told) < 2:
        started = time.monotonic()
        try:
            found.inside.append(attach(found.address, 3.0))
        except TransferQueueError as error:
            found.told.append((error, time.monotonic() - started))
    return found


def test_a_full_house_tells_newcomers_so_at_once(crowd: Crowd) -> None:
    inside, told = crowd.inside, crowd.told
    print(f"{len(inside)} got in, {Counter(f'{type(error).__name__} {seconds:.1f} s' for error, seconds in told)}")
    assert 100 <= len(inside) < 256
    assert len(told) == 300 - len(inside)
    assert all(isinstance(error, ServiceUnavailable) for error, _ in told)
    assert max(seconds for _, seconds in told) < AT_ONCE_S


def test_a_full_house_serves_who_is_inside(crowd: Crowd) -> None:
    inside = crowd.inside
    failed: Counter[str] = Counter()
    for number in (0, 1, len(inside) // 2, len(inside) - 1):
        try:
            assert put_and_get(inside[number], f"k{number}", float(number))
        except TransferQueueError as error:
            failed[f"{type(error).__name__}: {error}"] += 1
    assert not failed


def test_a_full_house_takes_newcomers_once_others_leave(crowd: Crowd, attach: Callable[..., Session]) -> None:
    address, inside, _ = crowd
    for session in inside[50:]:
        session.close()

    def enters() -> bool:
        try:
            return put_and_get(attach(address, 3.0), "new", 5.0)
        except ServiceUnavailable:
            return False

    until(enters, "room for newcomers", 20)
    assert all(put_and_get(attach(address, 3.0), f"new{number}", 6.0) for number in range(50))


def test_clients_connect_to_a_server_that_stands_still_for_a_second(host: Host, attach: Callable[..., Session]) -> None:
    outcomes: list[str] = []

    def connect() -> None:
        try:
            attach(host.client.session.address)
            outcomes.append("connected")
        except TransferQueueError as error:
            outcomes.append(f"{type(error).__name__}: {error}"[-40:])

    threads = [threading.Thread(target=connect) for _ in range(250)]
    freeze(host.server.pid)
    try:
        for thread in threads:
            thread.start()
        threading.Event().wait(1.0)
    finally:
        os.kill(host.server.pid, signal.SIGCONT)
    for thread in threads:
        thread.join()
    print(Counter(outcomes))
    assert Counter(outcomes) == {"connected": 250}


# memory


def growth(host: Host, come: Callable[[], object], leave: Callable[[], object]) -> tuple[float, float]:
    """(while `STRANGERS` connections are there, after they left): KiB for each of them in the server."""
    before, files = rss(host), num_fds(host)
    come()
    until(lambda: num_fds(host) >= files + STRANGERS, "all connections", 10)
    during = rss(host) - before
    leave()
    until(lambda: num_fds(host) <= files + 2, "the end of all connections", 10)
    return during / STRANGERS / KIB, (rss(host) - before) / STRANGERS / KIB


def warmed(host: Host) -> None:
    """What the server allocates on first use is there."""
    address = address_of(host, "tcp")
    for _ in range(20):
        Session(address).close()
    until(lambda: host.client.stats()["clients"] == 1, "the end of the others")


@pytest.mark.parametrize("where", ["unix", "tcp"])
def test_strangers_cost_little_memory_and_leave_none(
    host: Host, dial: Callable[[Address], socket.socket], where: str
) -> None:
    warmed(host)
    socks: list[socket.socket] = []
    during, after = growth(
        host,
        lambda: socks.extend(dial(address_of(host, where)) for _ in range(STRANGERS)),
        lambda: [sock.close() for sock in socks],
    )
    print(f"without a hello, {where}: {during:.1f} KiB each, {after:.1f} KiB after they left")
    assert during <= 8
    assert after <= LEFT_KIB


@pytest.mark.parametrize("where", ["unix", "tcp"])
def test_idle_sessions_cost_little_memory_and_leave_none(
    host: Host, attach: Callable[..., Session], where: str
) -> None:
    warmed(host)
    sessions: list[Session] = []
    during, after = growth(
        host,
        lambda: sessions.extend(attach(address_of(host, where)) for _ in range(STRANGERS)),
        lambda: [session.close() for session in sessions],
    )
    print(f"attached, {where}: {during:.1f} KiB each, {after:.1f} KiB after they left")
    assert during <= 32
    assert after <= LEFT_KIB


def test_a_header_that_is_announced_and_not_sent_holds_no_memory(host: Host, attach: Callable[..., Session]) -> None:
    warmed(host)
    before = rss(host)
    liar = attach(address_of(host, "unix"))._borrow(5.0)
    with contextlib.suppress(ConnectionError):  # it may be shown out
        liar._frames.socket.sendall(PREFIX.pack(255 * MIB, 0) + bytes(MIB))
    assert host.client.stats()["rows"] == 0
    grown = (rss(host) - before) / MIB
    liar.close()
    print(f"255 MiB announced, 1 MiB sent: {grown:.1f} MiB more")
    assert grown < 8


# peers that ask and never read


def keys_and_inline_data(host: Host) -> None:
    for start in range(0, 20_000, 2_000):
        keys = [f"key-{number}" for number in range(start, start + 2_000)]
        host.kv_put(keys, "p", tags=[{"number": key, "text": "a" * 40} for key in keys])
    host.kv_put(["inline"], "q", {"x": torch.zeros(1, 60_000, dtype=torch.uint8)})


def ask_in_vain(connection: Connection) -> None:
    """Send requests with large answers until the server takes no more of them."""
    with contextlib.suppress(DeadlineExceeded, ServiceUnavailable):
        for rid in range(1, 400, 2):
            connection.post(m.ListKeys(rid, "p", {}), None, 0.2)
            connection.post(m.Get(rid + 1, "q", ["inline"], None, None, False), None, 0.2)


def longest_call(client: TransferQueueClient, seconds: float, work: Callable[[], object] = lambda: None) -> float:
    """The longest of many small calls while `work` runs on another thread, and for at least that many seconds."""
    thread, end, longest = threading.Thread(target=work), time.monotonic() + seconds, 0.0
    thread.start()
    while time.monotonic() < end or thread.is_alive():
        started = time.monotonic()
        client.get_partition("q")
        longest = max(longest, time.monotonic() - started)
    thread.join()
    return longest


@pytest.fixture
def deaf(host: Host) -> Iterator[Callable[[], None]]:
    """Lets 20 clients ask for large answers that they never read."""
    keys_and_inline_data(host)
    connections: list[Connection] = []

    def ask() -> None:
        for number in range(20):
            address = address_of(host, "unix" if number % 2 else "tcp")
            connections.append(Connection(address, b"a deaf client %2d" % number, 5.0))
        threads = [threading.Thread(target=ask_in_vain, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    yield ask
    for connection in connections:
        connection.close()


def test_peers_that_never_read_delay_nobody(host: Host, deaf: Callable[[], None]) -> None:
    quiet = longest_call(host.client, 1.5)
    longest = longest_call(host.client, 1.5, deaf)
    print(f"longest call {longest * 1e3:.1f} ms, {quiet * 1e3:.1f} ms before")
    assert longest < 0.1 + 3 * quiet, "one long request, not all twenty; docs/benchmarks.md has the figure"


def test_peers_that_never_read_are_cut_off_and_leave_no_memory(host: Host, deaf: Callable[[], None]) -> None:
    host.client.kv_list("p")
    before, files = rss(host), num_fds(host)
    deaf()
    during = (rss(host) - before) / MIB
    print(f"{during:.0f} MiB for 20 peers that never read")
    assert during < 64
    until(lambda: num_fds(host) <= files + 2, "the end of who never reads", CUT_OFF_S)
    until(lambda: (rss(host) - before) / MIB < 16, "the return of their memory", 5)


@pytest.mark.parametrize(("limit", "remedy"), [("AS", "ulimit -v"), ("FSIZE", "ulimit -f"), ("NOFILE", "ulimit -Hn")])
def test_a_limit_under_which_no_server_can_work_is_named_when_one_is_started(
    child: Callable[[str], Child], limit: str, remedy: str
) -> None:
    values = {"AS": 8 << 30, "FSIZE": 1 << 20, "NOFILE": 70}
    starter = child(f"""
        import os, resource
        os.environ.pop("TQ_ADDRESS", None)
        import transfer_queue as tq
        resource.setrlimit(resource.RLIMIT_{limit}, ({values[limit]}, {values[limit]}))
        try:
            tq.init()
        except tq.errors.ConfigError as error:
            assert {remedy!r} in str(error), error
            print("told")
    """)
    assert starter.finish() == "told"
