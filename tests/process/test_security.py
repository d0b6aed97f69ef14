"""Strangers and mistakes on the sockets: nothing gets in, nobody else notices."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import pytest
import torch
from conftest import until

import transfer_queue as tq
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.connection import Connection
from transfer_queue.client.session import Session
from transfer_queue.errors import AccessDenied, ServiceUnavailable, TransferQueueError, UnsupportedValue
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, parse_address
from transfer_queue.wire.arena_fds import NUMBER
from transfer_queue.wire.framing import PREFIX, frame
from transfer_queue.wire.messages.base import Seconds

TOKEN = "a-token-nobody-guesses"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransferQueueClient]:
    """One service for this module, on a unix socket and on TCP."""
    os.environ.pop("TQ_ADDRESS", None)
    file = tmp_path_factory.mktemp("token") / "token"
    file.touch(0o600)
    file.write_text(TOKEN + "\n")
    tq.init({"server": {"host": "127.0.0.1", "token_file": str(file)}, "client": {"timeout_s": 10.0}})
    pid = tq.get_client().stats()["pid"]
    yield tq.get_client()
    tq.close()
    until(lambda: not psutil.pid_exists(pid), "the end of the server", 5)


@pytest.fixture
def tcp(shared: TransferQueueClient) -> Address:
    ports = [c for c in psutil.Process(server(shared).pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in ports] == ["127.0.0.1"]
    return Address(host="127.0.0.1", port=ports[0].laddr.port, token=TOKEN)


def server(client: TransferQueueClient) -> psutil.Process:
    return psutil.Process(client.stats()["pid"])


def unix_path() -> str:
    return os.environ["TQ_ADDRESS"].removeprefix("unix:")


def dial(where: str, tcp: Address) -> socket.socket:
    if where == "tcp":
        return socket.create_connection((tcp.host, tcp.port), timeout=15)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(15)
    sock.connect(unix_path() if where == "unix" else str(Path(unix_path()).parent / "door.sock"))
    return sock


def ends(sock: socket.socket) -> bool:
    """Whether the peer closes; what it says before does not count."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


GARBAGE: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4,
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(range(256)) * 2,
    "ssh": b"SSH-2.0-OpenSSH_9.0\r\n" * 3,
    "zmtp": bytes.fromhex("ff00000000000000017f03004e554c4c") + bytes(300),
    "random": secrets.token_bytes(4096),
    "header of 2^31": PREFIX.pack(1 << 31, 0) + bytes(100),
    "header of 2^32-1": PREFIX.pack((1 << 32) - 1, 0) + bytes(100),
    "payload of 2^63": PREFIX.pack(20, 1 << 63) + m.encode(m.Hello(1, bytes(16), bytes(16))) + bytes(100),
    "deep nesting": frame(b"\x91" * 4000),
    "a map of a million": frame(b"\xdf" + struct.pack(">I", 1_000_000) + bytes(200)),
    "an array of 2^32": frame(b"\xdd" + b"\xff" * 4 + bytes(200)),
    "pickle": frame(pickle.dumps({"a": 1})),
    "wrong types": frame(msgspec.msgpack.encode(["Hello", "one", 2, 3])),
    "an unknown message": frame(msgspec.msgpack.encode(["Format", 1])),
    "invalid utf-8": frame(b"\x92\xa5Hell\xff\x01"),
}


@pytest.mark.parametrize("where", ["unix", "tcp"])
def test_garbage_is_shown_out_and_disturbs_nobody(shared: TransferQueueClient, tcp: Address, where: str) -> None:
    tq.kv_put("healthy", "p", {"x": torch.arange(3)})
    process = server(shared)
    before = process.memory_info().rss
    for name, data in GARBAGE.items():
        with dial(where, tcp) as sock:
            try:
                sock.sendall(data)
            except ConnectionError:
                continue
            assert ends(sock), name
        assert tq.kv_batch_get("healthy", "p")["x"].values().tolist() == [0, 1, 2]
    assert process.memory_info().rss < before + (32 << 20)


def test_silent_and_half_open_peers_are_shown_out(shared: TransferQueueClient, tcp: Address) -> None:
    socks = [dial(where, tcp) for where in ("unix", "tcp", "door") for _ in range(2)]
    started = time.monotonic()
    for sock in socks[::2]:
        sock.sendall(b"\x00")
    socks[2].shutdown(socket.SHUT_WR)
    latencies = []
    while time.monotonic() - started < 0.5:
        at = time.monotonic()
        tq.kv_list("nothing")
        latencies.append(time.monotonic() - at)
    assert sorted(latencies)[len(latencies) // 2] < 0.1
    for sock in socks:
        assert ends(sock)
        sock.close()
    assert time.monotonic() - started < 10


def every_message() -> list[m.Message]:
    """One well-formed message of each type a client may send."""
    samples: dict[Any, Any] = {
        int: 1, float: 0.0, Seconds: 1.0, bool: False, bytes: b"12345678", str: "p", bytes | None: None,
        list[str] | None: ["a"],
        list[m.Tags] | None: None, str | None: None, int | None: None, list[str]: ["x"], m.Tags: {}, list[m.Tags]: [{}],
        dict[str, Any]: {}, list[int]: [1], list[float]: [1.0],
        m.Registered: m.Registered("a", 1), tq.GroupPolicy: tq.GroupPolicy(),
        list[m.FinishedSlot]: [m.FinishedSlot("g", 0, 0, 1.0, None, None, 5, {})], list[m.FinishedSlot] | None: None,
        float | None: 1.0, Literal["infra", "data"]: "data",
    }  # fmt: skip
    found = []
    for cls in m.ClientMessage.__args__:  # type: ignore[attr-defined]
        fields = msgspec.structs.fields(cls)
        found.append(cls(**{f.name: samples.get(f.type, [] if "list" in str(f.type) else {}) for f in fields}))
    return found


@pytest.mark.parametrize("where", ["unix", "tcp"])
def test_every_message_before_the_handshake_closes_the_connection(
    shared: TransferQueueClient, tcp: Address, where: str
) -> None:
    tq.kv_put("healthy", "p", {"x": torch.arange(3)})
    requests = shared.stats()["requests"]
    for message in every_message():
        if isinstance(message, m.Hello):
            continue
        assert m.decode_client(m.encode(message)) == message
        with dial(where, tcp) as sock:
            sock.sendall(frame(m.encode(message)))
            assert ends(sock), message
        with dial(where, tcp) as sock:  # nor between hello and proof
            if not isinstance(message, m.Proof):
                sock.sendall(frame(m.encode(m.Hello(m.PROTOCOL_VERSION, bytes(16), bytes(16)))))
                sock.sendall(frame(m.encode(message)))
                assert ends(sock), message
    assert shared.stats()["requests"] == requests + 1
    assert "healthy" in tq.kv_list("p")["p"]


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + " "])
def test_a_wrong_token_is_refused(tcp: Address, token: str) -> None:
    with pytest.raises(AccessDenied):
        Session(tcp._replace(token=token))


def test_a_proof_with_a_wrong_token_opens_nothing(tcp: Address) -> None:
    for mac in (b"", bytes(32), secrets.token_bytes(32)):
        with dial("tcp", tcp) as sock:
            sock.sendall(frame(m.encode(m.Hello(m.PROTOCOL_VERSION, bytes(16), bytes(16)))))
            challenge = sock.recv(4096)
            sock.sendall(frame(m.encode(m.Proof(mac or challenge[-32:]))))
            assert ends(sock)


def test_another_protocol_version_is_told_so(shared: TransferQueueClient, tcp: Address) -> None:
    with dial("unix", tcp) as sock:
        sock.sendall(frame(m.encode(m.Hello(99, bytes(16), bytes(16)))))
        answer = b""
        while part := sock.recv(4096):
            answer += part
    assert b"protocol version 99" in answer


@pytest.fixture
def remote(tcp: Address) -> Iterator[TransferQueueClient]:
    client = TransferQueueClient.of(Session(tcp))
    yield client
    client.close()


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 65_536, 1 << 20, (1 << 20) + 1, 20_000_000])
def test_values_over_tcp_are_equal(shared: TransferQueueClient, remote: TransferQueueClient, nbytes: int) -> None:
    data = torch.randint(0, 255, (2, nbytes), dtype=torch.uint8)
    meta = remote.put({"x": data, "o": ["a", {"t": data[0]}]}, partition_id="remote")
    for client in (remote, shared):
        td = client.get_data(meta)
        assert [torch.equal(row, data[i]) for i, row in enumerate(td["x"].unbind())] == [True, True]
        assert next(iter(td["o"])) == "a"
        assert torch.equal(list(td["o"])[1]["t"], data[0])
        assert torch.equal(client.get_data(meta[1])["x"].unbind()[0], data[1])
    shared.clear_partition("remote")


def test_a_remote_client_waits_for_rows_and_writes_allocations(
    shared: TransferQueueClient, remote: TransferQueueClient
) -> None:
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(remote.get_meta(["x"], 2, "wait", task_name="t", timeout_s=20)))
    waiter.start()
    room = remote.allocate({"x": ((2, 300_000), torch.float32)})
    room["x"].fill_(3.0)
    room.commit("wait", keys=["a", "b"])
    waiter.join(20)
    assert bool((remote.get_data(got[0])["x"].values() == 3.0).all())
    assert bool((tq.kv_batch_get(["a", "b"], "wait")["x"].values() == 3.0).all())
    shared.clear_partition("wait")


def test_a_remote_peer_cannot_stop_the_server(shared: TransferQueueClient, tcp: Address) -> None:
    connection = Connection(tcp, secrets.token_bytes(16), 5)
    reply, _ = connection.call(m.Stop(1), None, 5)
    connection.close()
    assert isinstance(reply, m.Failed)
    assert shared.stats()["pid"]


def test_the_token_shows_nowhere(shared: TransferQueueClient, tcp: Address) -> None:
    process = server(shared)
    assert TOKEN not in " ".join(process.cmdline())
    assert TOKEN not in " ".join(process.environ().values())
    assert TOKEN not in repr(tcp) + str(tcp) + repr(parse_address("tcp:h:1", TOKEN))


def test_sockets_are_for_this_user_only(shared: TransferQueueClient) -> None:
    directory = Path(unix_path()).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_the_door_gives_descriptors_of_existing_arenas_only(shared: TransferQueueClient, tcp: Address) -> None:
    tq.kv_put("a", "door", {"x": torch.zeros(1 << 18)})
    given = []
    for asked in (NUMBER.pack(0), NUMBER.pack(999), NUMBER.pack((1 << 32) - 1), b"\x00", b"\x00" * 3):
        with dial("door", tcp) as sock:
            sock.sendall(asked)
            _, descriptors, _, _ = socket.recv_fds(sock, 16, 4)
            given.append(len(descriptors))
            for descriptor in descriptors:
                os.close(descriptor)
    assert given == [1, 0, 0, 0, 0]
    shared.clear_partition("door")


def test_blocks_of_another_session_are_out_of_reach(shared: TransferQueueClient, tcp: Address) -> None:
    tq.kv_put("a", "mine", {"x": torch.zeros(1 << 18)})
    held = tq.kv_batch_get("a", "mine")
    room = shared.allocate({"x": ((1 << 18,), torch.uint8)})
    room["x"].fill_(7)
    stranger = Session(tcp)

    def answer(message: m.Request, payload: bytes = b"") -> Any:
        connection = stranger._borrow(5)
        try:
            return connection.call(message, memoryview(payload) if payload else None, 5)[0]
        finally:
            connection.close()

    for block in range(1, 60):
        assert isinstance(answer(m.Read(block, block, 0, 10)), m.Failed)
        commit = m.Commit(1000 + block, "theirs", 1, None, None, [], block, b"", None, 0.0)
        assert isinstance(answer(commit), m.Failed)
        with pytest.raises(ServiceUnavailable):
            answer(m.Write(2000 + block, block, 0), b"overwritten")
        stranger.notify(m.Discard(block))
        stranger.notify(m.Unpin(0, [block, block]))
    stranger.close()
    assert "theirs" not in tq.kv_list()
    assert bool((room["x"] == 7).all())
    meta = room.commit("mine2")
    assert len(meta) == 1 << 18
    assert not held["x"].values().any()
    for name in ("mine", "mine2"):
        shared.clear_partition(name)


def test_a_write_that_is_cut_off_reaches_no_recycled_memory(shared: TransferQueueClient, tcp: Address) -> None:
    writer, helper = (Connection(tcp, b"one session 1234", 5) for _ in range(2))
    block = writer.call(m.Allocate(1, 1 << 20, False, 1.0), None, 5)[0].block
    header = m.encode(m.Write(2, block, 0))
    writer._frames.socket.sendall(frame(header, 1 << 20) + b"\xee" * 1000)
    until(lambda: bool(shared.stats()), "the server's attention")
    helper.notify(m.Discard(block))
    helper.call(m.Stats(3), None, 5)
    mine = torch.zeros(1 << 20, dtype=torch.uint8)
    tq.kv_put("a", "mine", {"x": mine})
    writer._frames.socket.sendall(b"\xee" * ((1 << 20) - 1000))
    writer._frames.receive(5)
    writer.close()
    helper.close()
    assert torch.equal(tq.kv_batch_get("a", "mine")["x"].values(), mine)
    shared.clear_partition("mine")


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_pickles_are_neither_taken_nor_run(shared: TransferQueueClient, tmp_path: Path) -> None:
    marker = str(tmp_path / "marker")
    with pytest.raises(UnsupportedValue, match="allow_pickle"):
        tq.kv_put("a", "bomb", {"x": Bomb(marker)})
    with pytest.raises(UnsupportedValue):
        tq.kv_put("a", "bomb", tag={"x": Bomb(marker)})
    payload = pickle.dumps(Bomb(marker))
    tq.kv_put("a", "bomb", {"x": payload, "n": torch.tensor(1)}, tag={"p": payload})
    assert tq.kv_batch_get("a", "bomb")["x"] == [payload]
    session = shared.session
    for code in range(128):
        forged = msgspec.msgpack.Ext(code, payload)
        request = m.SetPartition(session.next_rid(), "bomb", None, {"x": forged})
        connection = session._borrow(5)
        try:
            connection.call(request, None, 5)
        except (TransferQueueError, msgspec.MsgspecError):
            connection.close()
        else:
            session._give_back(connection)
    with pytest.raises((TransferQueueError, msgspec.MsgspecError)):
        shared.get_partition("bomb")
    assert not os.path.exists(marker)
    shared.clear_partition("bomb")
