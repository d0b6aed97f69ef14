"""`tq doctor` and the agents that serve it, on this host alone: who is let in, whose turn it is, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import until
from doctors import CODE, TOKEN, DoctorHost, Led, elsewhere, environment, lead, program
from zygote import CHILDREN, Forked

from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.doctor import messages as d
from transfer_queue.doctor.agent import DoctorAgent
from transfer_queue.doctor.hosts import LocalHost, RemoteHost
from transfer_queue.doctor.member import FIELD, PARTITION, keys_of
from transfer_queue.errors import ServiceUnavailable
from transfer_queue.server import host_registry
from transfer_queue.storage.host_facts import rdma_devices
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, parse_address

SETTINGS = json.dumps({"backend": {}, "server": {"host": "", "port": 0}}).encode()
SIMPLE = ("--backend", "SimpleStorage")


@pytest.fixture
def serve() -> Iterator[Callable[..., DoctorHost]]:
    """Starts agents; they end with the test."""
    started: list[DoctorHost] = []

    def one(*arguments: str, **where: str) -> DoctorHost:
        started.append(DoctorHost(*(arguments or SIMPLE), **where))
        return started[-1]

    yield one
    for agent in started:
        agent.close()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This user's servers are those of this test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def agent_here() -> Iterator[DoctorAgent]:
    """In this process."""
    found = DoctorAgent(Address(host="127.0.0.1", token=TOKEN), "SimpleStorage", SETTINGS)
    yield found
    found.close()


@contextlib.contextmanager
def leading(*others: str, wait_s: str = "0") -> Iterator[Forked]:
    """A trial that is under way, killed in the end where it still is; its processes are its children."""
    parts = (part for one in others for part in ("--with", one))
    process = CHILDREN.start(program(*SIMPLE, "--wait-s", wait_s, *parts, code=CODE), environment())
    with process.stdin, process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def trouble(done: Led) -> dict[str, str]:
    """The only one of a trial that ended with it."""
    assert (done.code, done.said["works"], done.errors) == (1, False, "")
    (found,) = done.said["troubles"]
    return dict(found)


def members(agent: DoctorHost) -> list[psutil.Process]:
    """All processes of a trial on an agent's host, which has started them itself (`CODE`)."""
    return psutil.Process(agent.process.pid).children(recursive=True)


def test_one_host_alone_reads_its_own_rows_without_a_token() -> None:
    done = lead(*SIMPLE, token="")
    assert (done.code, done.said["works"], done.pairs) == (0, True, {("this host", "this host"): True})


def test_hosts_that_are_one_are_told_so(serve: Callable[..., DoctorHost]) -> None:
    agent = serve()
    done = lead(*SIMPLE, others=[agent.place])
    assert (done.code, len(done.pairs)) == (0, 2)
    assert done.said["remarks"] == [f"this host and {agent.place} are one host: between them nothing crossed a network"]


def test_a_wrong_token_is_refused_and_no_token_is_printed(serve: Callable[..., DoctorHost]) -> None:
    agent = serve()
    done = lead(*SIMPLE, others=[agent.place], token="another-token-of-ours")
    found = trouble(done)
    assert found["code"] == "access_denied"
    assert f"give {agent.place} the same TQ_TOKEN" in found["remedy"]
    assert TOKEN not in done.text
    assert "another-token-of-ours" not in done.text


@pytest.mark.parametrize("option", [("--serve", "127.0.0.1:0"), ("--with", "127.0.0.1:1")])
def test_between_hosts_a_token_is_needed(option: tuple[str, str]) -> None:
    done = lead(*SIMPLE, *option, token="")
    assert (done.code, done.text) == (1, "")
    assert "TQ_TOKEN_FILE" in done.errors


def test_another_backend_is_no_silent_mixture(serve: Callable[..., DoctorHost]) -> None:
    agent = serve("--backend", "Files")
    found = trouble(lead(*SIMPLE, others=[agent.place]))
    assert found["code"] == "config"
    assert "a trial of Files, not of 'SimpleStorage'" in found["text"]


def test_where_nobody_listens_the_remedy_says_what_to_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    found = trouble(lead(*SIMPLE, others=[place]))
    assert found["code"] == "unavailable"
    assert f"tq doctor --backend SimpleStorage --serve {place}" in found["remedy"]


def test_a_trial_waits_for_a_host_that_listens_later(serve: Callable[..., DoctorHost]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    with leading(place, wait_s="60") as process:
        until(lambda: bool(psutil.Process(process.pid).children()), "the trial's first process")
        serve(*SIMPLE, place=place)
        assert json.loads(process.stdout.read())["works"]


def test_an_agent_that_serves_one_trial_ends_with_it(serve: Callable[..., DoctorHost]) -> None:
    agent = serve(*SIMPLE, "--wait-s", "60")
    assert lead(*SIMPLE, others=[agent.place]).code == 0
    assert agent.process.wait(40) == 0


def test_an_agent_to_which_nobody_comes_ends_in_time(serve: Callable[..., DoctorHost]) -> None:
    assert serve(*SIMPLE, "--wait-s", "0.1").process.wait(40) == 1


def test_an_agent_that_is_frozen_holds_nobody_up(serve: Callable[..., DoctorHost]) -> None:
    agent = serve()
    agent.freeze()
    found = trouble(lead(*SIMPLE, "--timeout-s", "2", others=[agent.place]))
    assert (found["where"], found["code"]) == (agent.place, "deadline")


def test_an_agent_serves_one_trial_at_a_time(serve: Callable[..., DoctorHost]) -> None:
    agent = serve(*SIMPLE, code=CODE)
    with leading(agent.place):
        until(lambda: bool(members(agent)), "a trial that is under way")
        found = trouble(lead(*SIMPLE, others=[agent.place]))
    assert found["code"] == "unavailable"
    assert "another trial is under way" in found["text"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_trial_whose_leader_ends_leaves_nothing(serve: Callable[..., DoctorHost], how: signal.Signals) -> None:
    agent = serve(*SIMPLE, code=CODE)
    with leading(agent.place) as leader:
        until(lambda: len(members(agent)) > 1, "the unit of the trial")
        own = psutil.Process(leader.pid).children(recursive=True)
        leader.send_signal(how)
        leader.wait(40)
        until(lambda: not any(one.is_running() for one in own), "the end of the leader's processes")
    until(lambda: not members(agent), "the end of the agent's processes")
    assert lead(*SIMPLE, others=[agent.place]).code == 0


def test_an_agent_that_is_ended_takes_its_trial_along(serve: Callable[..., DoctorHost]) -> None:
    agent = serve(*SIMPLE, code=CODE)
    with leading(agent.place) as leader:
        until(lambda: len(members(agent)) > 1, "the unit of the trial")
        left = members(agent)
        assert agent.close() == 0
        assert not any(one.is_running() for one in left)
        said = json.loads(leader.stdout.read())
        assert (said["works"], leader.wait(40)) == (False, 1)
    assert {one["code"] for one in said["troubles"]} <= {"unavailable", "deadline", "data_lost"}


def test_bytes_that_are_no_handshake_harm_nobody(serve: Callable[..., DoctorHost]) -> None:
    agent = serve()
    host, _, port = agent.place.rpartition(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 64):
        with socket.create_connection((host, int(port)), 10) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
    assert lead(*SIMPLE, others=[agent.place]).code == 0


@pytest.mark.parametrize(
    "begin",
    [
        d.BeginTrial("SimpleStorage", b"short", 5.0), d.BeginTrial("SimpleStorage", bytes(16), 1e6),
        d.BeginTrial("../x", bytes(16), 5.0),
    ],
)  # fmt: skip
def test_a_trial_that_is_none_is_refused(agent_here: DoctorAgent, begin: d.BeginTrial) -> None:
    host = RemoteHost(agent_here.address._replace(token=TOKEN), 0.0)
    try:
        assert isinstance(host.begin(begin), m.Failed)
    finally:
        host.close()


@pytest.mark.parametrize("order", [d.LeadTrial("0.0.0.0"), d.JoinTrial("unix:/x"), d.ReadTrial(0), d.WriteTrial(-1)])
def test_an_agent_neither_leads_nor_does_anything_before_it_has_joined(
    agent_here: DoctorAgent, order: m.Message
) -> None:
    host = RemoteHost(agent_here.address._replace(token=TOKEN), 0.0)
    try:
        assert isinstance(host.begin(d.BeginTrial("SimpleStorage", bytes(16), 5.0)), d.HostFacts)
        try:
            assert isinstance(host.ask(order, 5.0), m.Failed)
        except ServiceUnavailable:
            assert isinstance(order, d.LeadTrial), "it is shown out"
    finally:
        host.close()


def test_a_port_that_is_taken_is_said_by_the_agent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = lead(*SIMPLE, "--serve", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (done.code, done.text) == (1, "")
    assert "port 0 for any" in done.errors


def test_a_port_of_the_job_that_is_taken_is_said_of_the_host(serve: Callable[..., DoctorHost], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = tmp_path / "tq.yaml"
        config.write_text(json.dumps({"server": {"port": taken.getsockname()[1]}}))
        agent = serve(*SIMPLE, "--config", str(config))
        found = trouble(lead(*SIMPLE, others=[agent.place]))
    assert found["where"].startswith(f"{agent.place} joins ")
    assert "in use" in found["text"]


def test_a_configuration_of_all_hosts_may_listen_everywhere(serve: Callable[..., DoctorHost], tmp_path: Path) -> None:
    config = tmp_path / "tq.yaml"
    config.write_text(json.dumps({"server": {"host": "0.0.0.0"}}))
    agent = serve(*SIMPLE, "--config", str(config))
    done = lead(*SIMPLE, "--config", str(config), others=[agent.place])
    assert (done.code, done.said["works"]) == (0, True)
    assert [host["address"].rpartition(":")[0] for host in done.said["hosts"]] == ["0.0.0.0"] * 2


def test_one_line_of_text_for_each_trouble(serve: Callable[..., DoctorHost]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    words = [word for word in elsewhere(program(*SIMPLE, "--with", place), "", "") if word != "--json"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("tq: SimpleStorage does not work between these hosts\n")
    assert f"Start `tq doctor --backend SimpleStorage --serve {place}` there" in done.stderr
    assert "this host" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--serve", "127.0.0.1:0"), ("--with", "127.0.0.1:1"), (*SIMPLE, "--with", "nowhere"),
        (*SIMPLE, "--with", "a:70000"), (*SIMPLE, "--with", "a:1", "--serve", "b:1"), (*SIMPLE, "--timeout-s", "0"),
    ],
)  # fmt: skip
def test_bad_usage_is_told_apart(arguments: tuple[str, ...]) -> None:
    done = lead(*arguments)
    assert (done.code, done.text) == (2, "")


def test_the_installation_as_json() -> None:
    done = lead()
    assert (done.code, done.said["works"], done.said["trouble"]) == (0, True, "")


@pytest.mark.usefixtures("registry")
def test_bytes_that_are_not_those_that_were_written_are_noticed() -> None:
    host = LocalHost("", SETTINGS)
    try:
        begun = host.begin(d.BeginTrial("SimpleStorage", os.urandom(16), 20.0))
        assert isinstance(begun, d.HostFacts)
        assert isinstance(host.ask(d.LeadTrial(""), 20.0), d.HostOpened)
        assert isinstance(host.ask(d.WriteTrial(0), 20.0), d.BytesMoved)
        mine = {child.pid for child in psutil.Process().children()}  # other tests have servers, too
        (entry,) = [one for one in host_registry.running() if one.owner is not None and one.owner.pid in mine]
        session = Session(parse_address(entry.address))
        rows = run(session, kv.kv_batch_get(session, keys_of(0), PARTITION, copy=True, dense=True))
        rows[FIELD][3, 1000] ^= 1
        run(session, kv.kv_batch_put(session, keys_of(0), PARTITION, {FIELD: rows[FIELD]}))
        session.close()
        found = host.ask(d.ReadTrial(0), 20.0)
    finally:
        host.close()
    assert isinstance(found, m.Failed)
    assert (found.code, "other bytes than host 0 wrote" in found.text) == ("data_lost", True)


def test_each_port_of_an_rdma_device_has_its_state(tmp_path: Path) -> None:
    for device, port, state in [("mlx5_0", "1", "4: ACTIVE"), ("mlx5_1", "1", "1: DOWN"), ("mlx5_1", "2", "4: ACTIVE")]:
        (tmp_path / device / "ports" / port).mkdir(parents=True)
        (tmp_path / device / "ports" / port / "state").write_text(f"{state}\n")
    (tmp_path / "bare").mkdir()
    assert rdma_devices(str(tmp_path)) == ["bare", "mlx5_0:1 ACTIVE", "mlx5_1:1 DOWN", "mlx5_1:2 ACTIVE"]
    assert rdma_devices(str(tmp_path / "none")) == []
