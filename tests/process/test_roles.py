"""Two tokens: one opens the service to clients, the other lets a server join it as a storage unit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from hosts import LARGE, TOKEN, UNIT_TOKEN, Host, firsts, rows
from test_standby import kill

import transfer_queue as tq
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.connection import Connection
from transfer_queue.client.session import Session
from transfer_queue.errors import AccessDenied, ConfigError
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, parse_address
from transfer_queue.wire.aio import AsyncConnection

StartHost = Callable[..., Host]
OF_UNITS = [
    m.Join(1, bytes(16), "127.0.0.1:9", b""),
    m.Moved(1, 1, 2, b""),
    m.Gathered(1, 1, b"", b""),
    m.ResolveCommits(1, b""),
]


@pytest.fixture
def head(start_host: StartHost) -> Host:
    return start_host()


async def _ask(address: Address, role: int, request: m.Request) -> Any:
    connection = AsyncConnection(address, m.decode_server)
    await connection.open(os.urandom(16), 5.0, role=role)
    try:
        return (await connection.call(request, None, 5.0))[0]
    finally:
        connection.close()


def ask(address: Address, role: int, request: m.Request) -> Any:
    """The answer to a request of a peer that came in this role."""
    return asyncio.run(_ask(address, role, request))


@pytest.mark.parametrize("request_of_unit", OF_UNITS, ids=lambda one: type(one).__name__)
def test_a_client_speaks_for_no_unit(request_of_unit: m.Request, head: Host) -> None:
    for address in (parse_address(head.tcp, TOKEN), parse_address(head.server.address)):
        connection = Connection(address, bytes(16), 5.0)
        reply, _ = connection.call(request_of_unit, None, 5.0)
        connection.close()
        assert (type(reply), reply.code) == (m.Failed, AccessDenied.code)
        assert "unit token" in reply.text
    assert head.client.stats()["units"] == {}


def test_a_client_s_token_does_not_open_the_role_of_a_unit(head: Host, start_host: StartHost) -> None:
    with pytest.raises(AccessDenied, match="unit token"):
        ask(parse_address(head.tcp, TOKEN), handshake.UNIT, OF_UNITS[0])
    with pytest.raises(AccessDenied):
        start_host(join=head.tcp, unit_token="guessed-by-a-client")
    assert head.client.stats()["units"] == {}


def test_the_proof_of_a_unit_takes_the_unit_token(head: Host) -> None:
    """As a client would try it that skips the server's own proof."""
    for role, token in ((handshake.UNIT, TOKEN), (handshake.CLIENT, UNIT_TOKEN)):
        for claimed in handshake.ROLES:
            assert not _opens(parse_address(head.tcp), role, token, claimed)
    assert _opens(parse_address(head.tcp), handshake.UNIT, UNIT_TOKEN, handshake.UNIT)


def _opens(address: Address, role: int, token: str, claimed: int) -> bool:
    """Whether a hello in `role` is answered with a welcome to a proof with `token` and the label of `claimed`."""
    from transfer_queue.wire.framing import FrameReader, frame

    reader = FrameReader(m.decode_server, lambda message, nbytes: memoryview(bytearray(nbytes)))
    with address.connect(5.0) as sock:

        def next_message() -> m.Message | None:
            while True:
                nbytes = sock.recv_into(reader.buffer())
                if not nbytes:
                    return None
                for message, _ in reader.advance(nbytes):
                    return message

        nonce = handshake.nonce()
        sock.sendall(frame(m.encode(m.Hello(m.PROTOCOL_VERSION, os.urandom(16), nonce, role=role))))
        challenge = next_message()
        assert isinstance(challenge, m.Challenge)
        sock.sendall(frame(m.encode(m.Proof(handshake.client_mac(token, nonce, challenge.nonce, claimed)))))
        return isinstance(next_message(), m.Welcome)


def test_a_unit_is_no_client(head: Host) -> None:
    reply = ask(parse_address(head.tcp, UNIT_TOKEN), handshake.UNIT, m.Stats(1))
    assert (type(reply), reply.code) == (m.Failed, AccessDenied.code)
    with pytest.raises(AccessDenied):
        Connection(parse_address(head.tcp, UNIT_TOKEN), bytes(16), 5.0)


def test_there_are_no_other_roles_and_no_units_on_the_unix_socket(head: Host) -> None:
    here = parse_address(head.server.address)
    with pytest.raises(AccessDenied, match="units join over TCP"):
        ask(here, handshake.UNIT, OF_UNITS[0])
    for role in (2, -1):
        with pytest.raises(AccessDenied, match=f"no role {role}"):
            ask(here, role, OF_UNITS[0])


def test_a_server_without_a_unit_token_takes_no_units(start_host: StartHost) -> None:
    head = start_host(unit_token="")
    with pytest.raises(AccessDenied, match=r"takes no units: start it with server\.unit_token_file"):
        start_host(join=head.tcp)


def test_the_two_tokens_must_differ(start_host: StartHost) -> None:
    with pytest.raises(ConfigError, match="every client could join"):
        start_host(unit_token=TOKEN)


def test_clients_of_both_hosts_work_and_learn_no_unit_token(head: Host, start_host: StartHost) -> None:
    unit = start_host(join=head.tcp)
    unit.kv_put(["a"], "p", rows(3, 1, 300_000))
    assert head.kv_get(["a"], "p")["x"][0][0].item() == 3
    for host in (head, unit):
        told = json.dumps(host.client.session.config)
        assert UNIT_TOKEN not in told
        assert TOKEN in told  # they read from the other host with it


def test_joining_needs_both_tokens(service: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_TOKEN_FILE", "TQ_UNIT_TOKEN", "TQ_UNIT_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TQ_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match=r"server\.unit_token_file.*TQ_UNIT_TOKEN"):
        service(server={"join": "tcp:127.0.0.1:1"})


@pytest.fixture
def unit_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A service and a unit that joined it, started by the command as its help says; this process is a client of the
    service, whose directory is `head`. That of the unit is `unit`."""
    files = []
    for name, token in (("token", TOKEN), ("unit", UNIT_TOKEN)):
        path = tmp_path / f"{name}.secret"
        path.touch(0o600)
        path.write_text(token)
        files += [f"--{'unit-' * (name == 'unit')}token-file", str(path)]
    for name in ("TQ_ADDRESS", "TQ_TOKEN", "TQ_UNIT_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def serve(name: str, *options: str) -> subprocess.Popen[str]:
        code = "from transfer_queue.cli import main; main()"
        command = [sys.executable, "-c", code, "serve", "--run-dir", str(tmp_path / name), *options, *files]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def ready(server: subprocess.Popen[str]) -> Any:
        assert server.stdout is not None
        return json.loads(server.stdout.readline())

    with contextlib.ExitStack() as ending:
        head = ending.enter_context(serve("head", "--host", "127.0.0.1"))
        ending.callback(head.terminate)
        unit = ending.enter_context(serve("unit", "--join", f"tcp:{ready(head)['tcp']}"))
        ending.callback(unit.terminate)
        pid = ready(unit)["pid"]
        ending.callback(tq.close)
        tq.init({"run_dir": str(tmp_path / "head")})
        yield pid


def test_the_command_joins_with_two_files(unit_pid: int) -> None:
    assert list(tq.get_client().stats()["units"]) == ["1"]


def test_a_unit_of_the_command_that_is_killed_goes_on(unit_pid: int, tmp_path: Path) -> None:
    client = TransferQueueClient.of(Session(parse_address(f"unix:{tmp_path}/unit/tq.sock")))
    meta = client.put(rows(1, 2, LARGE), partition_id="p")
    seen = client.get_data(meta)
    until(lambda: client.stats()["standby"] != 0, "the standby")
    kill(unit_pid)
    assert firsts(tq.get_client().get_data(meta)) == firsts(client.get_data(meta)) == firsts(seen) == [1, 1]
    successor = client.stats()["pid"]
    assert successor != unit_pid
    client.close()
    kill(successor, signal.SIGTERM)
    assert not (tmp_path / "unit").exists()
