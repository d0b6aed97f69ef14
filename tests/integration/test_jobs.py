"""Processes that belong together find each other without an address; those that do not, do not."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import until
from hosts import CLIENT
from paths import SOURCES
from typer.testing import CliRunner

import transfer_queue as tq
from transfer_queue.cli import app
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.session import Session
from transfer_queue.errors import AccessDenied, ConfigError, InvalidInput, NotInitialized
from transfer_queue.launch import hosts, local
from transfer_queue.launch.job import first_node, named, this_job
from transfer_queue.launch.shared import JobLauncher
from transfer_queue.server import host_registry, processes
from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire.address import parse_address

Service = Callable[..., tq.TransferQueueClient]
Spawn = Callable[[str], Any]
TOKEN = "a-token-nobody-guesses"
MARKS = ("TQ_", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
SLURM = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
FAR = {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost,other", "SLURM_NODEID": "0"}
RANKS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "WORLD_SIZE": "4", "RANK": "0"}
# What `init` does of finding and starting, in a process that need not wait for torch.
LIGHT = """
from transfer_queue.launch import choose, job, local
from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire.address import parse_address

def attach():
    launcher = choose("")
    while not (found := launcher.find()):
        config = ServerConfig(
            run_dir="", budget_nbytes=1 << 26, sampler={"class": "SequentialSampler"},
            client={"timeout_s": 10.0, "pool_nbytes": 0, "copy_threads": None, "polling_mode": False, "settings": {}},
        )
        service = launcher.launch(config)
        if service is not None:
            return service, str(service.addresses[0]), True
    return None, str(found[0]), False

def say():
    service, address, started = attach()
    print(f"{address} {started}\\n", end="", flush=True)  # in one step: ranks share what they write to
    return service
"""
RANK = f"""{LIGHT}
service = say()
input()
if service is not None:
    service.stop()
"""


@pytest.fixture
def child(fresh_child: Spawn) -> Spawn:
    """Who started whom is what these tests are about."""
    return fresh_child


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No job around the tests themselves, and directories that others know nothing of."""
    for name in [name for name in os.environ if name.startswith(MARKS)]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="tq-test-", dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


@pytest.fixture
def put_env(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*groups: dict[str, str], **more: str) -> None:
        for name, value in {k: v for group in (*groups, more) for k, v in group.items()}.items():
            monkeypatch.setenv(name, value)

    return put


def here(runtime_dir: Path) -> list[host_registry.ServerEntry]:
    """The servers that the test started."""
    return [entry for entry in host_registry.running() if entry.address.startswith(f"unix:{runtime_dir}/")]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # type: ignore[no-any-return]
    except psutil.NoSuchProcess:
        return True


# One program


def start(**settings: Any) -> local.LocalServer:
    """A server for clients of this process."""
    config = ServerConfig(
        run_dir="", budget_nbytes=1 << 26, sampler={"class": "SequentialSampler"}, client=CLIENT,
        **{"owner_pid": os.getpid(), **settings},
    )  # fmt: skip
    return local.start(config)


def test_init_says_once_whether_it_started_or_attached(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "transfer_queue"):
        pid = service().stats()["pid"]
        tq.init()
    assert [record.getMessage() for record in caplog.records if record.name == "transfer_queue"] == [
        f"started the service at {tq.address()}, process {pid}"
    ]
    address = tq.address()
    tq.close()
    caplog.clear()
    own = start()
    with caplog.at_level(logging.INFO, "transfer_queue"):
        tq.init({"address": own.address})
    assert [record.getMessage() for record in caplog.records if record.name == "transfer_queue"] == [
        f"attached to the service at {own.address}, process {own.pid}"
    ]
    assert own.address != address
    tq.close()
    own.stop()


def test_the_address_is_what_others_attach_by(service: Service) -> None:
    with pytest.raises(NotInitialized):
        tq.address()
    service()
    assert tq.address() == os.environ["TQ_ADDRESS"]


def test_a_child_that_was_started_before_init_finds_the_service(child: Spawn, service: Service) -> None:
    early = child(f"{LIGHT}\ninput(); say()")
    middle = child("import subprocess, sys; subprocess.run([sys.executable, '-c', eval(input())], check=True)")
    service()
    early.say()
    middle.say(repr(f"{LIGHT}\nsay()"))  # its own child has no TQ_ADDRESS either
    assert early.finish() == middle.finish() == f"{tq.address()} False"


def test_a_child_that_was_started_later_without_the_address_has_a_service_of_its_own(
    child: Spawn, service: Service
) -> None:
    service()
    other = child(RANK)  # `choose` is asked after TQ_ADDRESS, which therefore counts for nothing here
    address, started = other.line().split()
    assert address != tq.address()
    assert started == "True"
    other.say()
    other.finish()


def test_unrelated_programs_do_not_find_each_other(child: Spawn) -> None:
    programs = [child(RANK), child(RANK)]
    assert len({program.line() for program in programs}) == 2
    for program in programs:
        program.say()
        program.finish()


CHILDREN = f"""
import multiprocessing, os, sys
{LIGHT}
def work(inbox, outbox):
    for _ in iter(inbox.get, None):
        outbox.put(attach()[1:])

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    outbox = context.Queue()
    inboxes = [context.Queue(), context.Queue()]
    children = [context.Process(target=work, args=(inbox, outbox)) for inbox in inboxes]
    for each in children:
        each.start()
    service = None
    if sys.argv[2] == "parent":
        service, *said = attach()
        print(*said)
    for inbox in inboxes:  # one after the other: the first one starts the service where the parent did not
        inbox.put(1)
        print(*outbox.get(timeout=60))
    for inbox in inboxes:
        inbox.put(None)
    for each in children:
        each.join()
    if service is None:
        print(*attach()[1:])
    else:
        service.stop()
"""


@pytest.mark.parametrize(
    ("method", "first"), [("fork", "parent"), ("fork", "child"), ("forkserver", "child"), ("spawn", "child")]
)
def test_a_program_and_its_children_share_a_service_whoever_is_first(
    method: str, first: str, tmp_path: Path, runtime_dir: Path
) -> None:
    (tmp_path / "train.py").write_text(CHILDREN)
    command = [sys.executable, "train.py", method, first]
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert len({address for address, _ in said}) == 1, said
    assert [started for _, started in said] == ["True", "False", "False"]
    until(lambda: not list(runtime_dir.iterdir()), "the end of the service and its directory with the program")


# Ranks on one host


def test_ranks_that_start_together_share_one_service_that_outlives_its_starter(
    child: Spawn, put_env: Callable[..., None], runtime_dir: Path
) -> None:
    put_env(RANKS)
    ranks = [child(RANK.replace("service =", "job.LINGER_S = 3.0; service =")) for _ in range(4)]
    said = [rank.line().split() for rank in ranks]
    assert len({address for address, _ in said}) == 1
    assert sorted(started for _, started in said) == ["False", "False", "False", "True"]
    assert tq.init({}) == {}  # one more rank, which attaches
    assert tq.address() == said[0][0]
    for rank in ranks:
        rank.say()
        rank.finish()
    pid = tq.get_client().stats()["pid"]
    tq.close()
    until(lambda: gone(pid), "the end of a service that nobody uses")
    until(lambda: not list(runtime_dir.iterdir()), "the end of its directory")


HALF = """
from transfer_queue.launch import local

def killed(*_, **__):
    print("half", flush=True)
    input()

local.{what} = killed
attach()
"""


@pytest.mark.parametrize(("what", "started"), [("_first_line", "False"), ("start", "True")])
def test_a_starter_that_is_killed_in_the_middle_leaves_one_service(
    child: Spawn, put_env: Callable[..., None], runtime_dir: Path, what: str, started: str
) -> None:
    put_env(RANKS)
    half = child(LIGHT + HALF.format(what=what))
    assert half.line() == "half"
    next_one = child(RANK)
    half.kill()
    assert next_one.line().split()[1] == started  # the server whose starter was killed serves the others
    (only,) = here(runtime_dir)
    next_one.say()
    next_one.finish()
    os.kill(only.server.pid, signal.SIGTERM)
    until(lambda: gone(only.server.pid), "the end of the server")


def test_the_remains_of_a_dead_job_attract_nobody(
    child: Spawn, put_env: Callable[..., None], runtime_dir: Path
) -> None:
    put_env(RANKS)
    remains = Path(host_registry.private_dir(), this_job().key)
    remains.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(remains / "tq.sock"))
    rank = child(RANK)
    assert rank.line().endswith(" True")
    rank.say()
    rank.finish()
    os.kill(here(runtime_dir)[0].server.pid, signal.SIGTERM)
    until(lambda: not list(runtime_dir.iterdir()), "the end of the server")


def test_a_server_whose_owners_number_is_another_process_ends() -> None:
    own = processes.identity_of(os.getpid())
    assert own is not None
    server = start(owner_start=own.start - 1)
    assert server.wait(10)
    server.stop()


def test_a_program_leads_itself_and_a_rank_does_not(put_env: Callable[..., None]) -> None:
    assert this_job().is_ours
    put_env(RANKS)
    assert not this_job().is_ours


def test_jobs_that_differ_have_other_names(put_env: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {this_job().key}
    put_env(RANKS)
    keys.add(this_job().key)
    for name, value in (("MASTER_PORT", "29513"), ("MASTER_ADDR", "127.0.0.2")):
        put_env({name: value})
        keys.add(this_job().key)
    put_env(SLURM)
    assert this_job().title == "Slurm step 12.0"
    keys.add(this_job().key)
    put_env(SLURM_STEP_ID="1")
    keys.add(this_job().key)
    put_env(TORCHELASTIC_RUN_ID="none")
    assert this_job().title == "torchrun none"
    keys.add(this_job().key)
    assert len(keys) == 7
    put_env(RANK="1", SLURM_PROCID="1")
    assert this_job().key in keys


@pytest.mark.parametrize("told", [{}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_equal_process_numbers_of_two_containers_are_two_jobs(
    put_env: Callable[..., None], monkeypatch: pytest.MonkeyPatch, told: dict[str, str]
) -> None:
    put_env(told)
    job = this_job()
    monkeypatch.setattr(processes, "view", lambda: "of-another-namespace")
    other = this_job()
    assert job.leader == other.leader is not None
    assert job.key != other.key


@pytest.mark.parametrize("alone", [{"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_ID": ""}])
def test_one_task_and_a_batch_script_are_programs(alone: dict[str, str], put_env: Callable[..., None]) -> None:
    put_env(SLURM, alone)
    assert this_job().is_ours


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"), ("gpu[07-09,12],login1", "gpu07"), ("a1,b[2-3]", "a1"), ("r[3,5]n-ib", "r3n-ib"),
        ("node-1.cluster", "node-1.cluster"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


# torchrun and Slurm


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RESTARTED = """
import os, pathlib, sys, torch, transfer_queue as tq
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
conf = tq.init()
client = tq.get_client()

def meet(name):
    client.put({"x": torch.zeros(1)}, partition_id=name)
    client.get_meta(["x"], 2, name, task_name=rank, timeout_s=60)

client.put({"x": torch.tensor([float(rank)])}, partition_id="p")
meet(f"written {attempt}")
rows = client.get_meta(["x"], 2, "p", task_name="t", lease_s=60, timeout_s=20) if rank == attempt == "0" else None
said = f"{client.stats()['pid']} {conf is not None} {client.get_partition('p')['rows']}"
pathlib.Path(sys.argv[1], f"{attempt}-{rank}").write_text(said)
meet(f"said {attempt}")
if attempt == "0":
    os._exit(1)  # both at once, the starter of the service too
if rank == "1":
    again = client.get_meta(["x"], 4, "p", task_name="t", timeout_s=20)
    pathlib.Path(sys.argv[1], "again").write_text(str(again.size))
"""


def test_a_service_of_torchrun_outlives_a_restart_of_its_workers(tmp_path: Path, runtime_dir: Path) -> None:
    (tmp_path / "train.py").write_text(RESTARTED)
    command = [*TORCHRUN, "--max-restarts", "1", "train.py", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [(tmp_path / name).read_text().split() for name in ("0-0", "0-1", "1-0", "1-1")]
    pid = said[0][0]
    assert {found for found, _, _ in said} == {pid}
    assert [started for _, started, _ in said].count("True") == 1
    assert [rows for *_, rows in said] == ["2", "2", "4", "4"]
    assert (tmp_path / "again").read_text() == "4"  # those that the killed worker had taken as well
    until(lambda: gone(int(pid)), "the end of the service with the agent")
    until(lambda: not list(runtime_dir.iterdir()), "the end of its directory")


LAUNCHER = """
import json, os, subprocess, sys
code = sys.stdin.readline()
ranks = []
for line in iter(sys.stdin.readline, "\\n"):
    environment = {**os.environ, **json.loads(line)}
    ranks.append(subprocess.Popen([sys.executable, "-c", json.loads(code)], env=environment, stdin=subprocess.PIPE))
input()
for rank in ranks:
    rank.communicate(b"\\n")
"""


def launched(child: Spawn, code: str, *ranks: dict[str, str]) -> Any:
    """A process that starts ranks as `slurmstepd` and torchrun's agent do."""
    launcher = child(LAUNCHER)
    launcher.say(json.dumps(textwrap.dedent(code)))
    for environment in ranks:
        launcher.say(json.dumps(environment))
    launcher.say()
    return launcher


def test_tasks_of_a_slurm_step_share_a_service_until_the_step_ends(child: Spawn, runtime_dir: Path) -> None:
    steps = [
        launched(child, RANK, {**SLURM, "SLURM_STEP_ID": step}, {**SLURM, "SLURM_STEP_ID": step, "SLURM_PROCID": "1"})
        for step in "01"
    ]
    said = [{step.line().split()[0] for _ in range(2)} for step in steps]
    assert [len(pids) for pids in said] == [1, 1]
    assert said[0] != said[1]
    assert {entry.job for entry in here(runtime_dir)} == {"Slurm step 12.0", "Slurm step 12.1"}
    for step in steps:
        step.say()
        step.finish()
    until(lambda: not here(runtime_dir), "the end of the services with their steps")


# Several hosts


def test_a_job_on_several_hosts_without_a_way_is_refused_everywhere(
    put_env: Callable[..., None], runtime_dir: Path
) -> None:
    for node in "01":
        put_env(FAR, SLURM_NODEID=node)
        with pytest.raises(ConfigError, match=r"Slurm step 12\.0 runs on several hosts.*TQ_TOKEN.*tq serve"):
            tq.init()
    put_env(dict.fromkeys(("TORCHELASTIC_RUN_ID", "GROUP_RANK", "LOCAL_WORLD_SIZE"), "1"), WORLD_SIZE="2")
    with pytest.raises(ConfigError, match="torchrun 1 runs on several hosts"):
        tq.init()
    assert not here(runtime_dir)
    assert not list(runtime_dir.iterdir())


@pytest.mark.parametrize("unit_token", ["", "a-token-of-units-alone"])
def test_hosts_of_a_slurm_step_meet_by_a_token_they_all_have(
    child: Spawn, put_env: Callable[..., None], runtime_dir: Path, unit_token: str
) -> None:
    put_env(TQ_TOKEN=TOKEN, **({"TQ_UNIT_TOKEN": unit_token} if unit_token else {}))
    far = {**FAR, "SLURM_JOB_ID": str(os.getpid())}  # the port follows from it
    (runtime_dir / "b").mkdir()
    second = launched(child, RANK, {**far, "SLURM_NODEID": "1", "XDG_RUNTIME_DIR": str(runtime_dir / "b")})
    first = launched(child, RANK, far)  # later: the other one waits for it
    addresses = [step.line().split()[0] for step in (first, second)]
    assert [address.partition(":")[0] for address in addresses] == ["unix", "unix" if unit_token else "tcp"]
    clients = [TransferQueueClient.of(Session(parse_address(address))) for address in addresses]
    clients[0].put({"x": torch.ones(2)}, partition_id="p")
    found = clients[1].get_meta(["x"], 2, "p", task_name="t", timeout_s=20)
    assert clients[1].get_data(found)["x"].sum() == 2
    for client in clients:
        client.close()
    del found
    gc.collect()
    for step in (second, first):
        step.say()
        step.finish()
    until(lambda: not here(runtime_dir), "the end of the services")


def test_torchs_store_carries_no_token_that_all_processes_have(put_env: Callable[..., None]) -> None:
    from torch.distributed import HashStore

    put_env(FAR)
    span = this_job().span
    assert span is not None
    place = hosts.ServicePlace("tcp:10.0.0.1:7", TOKEN, "units")
    store = HashStore()
    board = hosts.StoreBoard(store, span)
    assert board.read(0) is None
    board.publish(hosts.ServicePlace("tcp:10.0.0.2:7", TOKEN))
    board.publish(place)  # of the service that took its place
    assert board.read(1) == place
    put_env(TQ_TOKEN=TOKEN)
    board = hosts.StoreBoard(store := HashStore(), span)
    board.publish(place)
    assert TOKEN.encode() not in store.get("transfer_queue/0")
    assert board.read(1) == place


# Other users, and the register


def test_a_directory_that_others_may_write_to_is_not_trusted(
    service: Service, put_env: Callable[..., None], caplog: pytest.LogCaptureFixture, runtime_dir: Path
) -> None:
    own = Path(host_registry.private_dir())
    own.chmod(0o777)
    service()  # a program needs nobody else
    assert "cannot find its service" in caplog.text
    assert not tq.address().startswith(f"unix:{own}/")  # another directory may begin alike
    assert not here(runtime_dir)
    tq.close()
    put_env(RANKS)
    with pytest.raises(AccessDenied, match=rf"{own} is open to other users.*XDG_RUNTIME_DIR"):
        tq.init()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_a_directory_of_another_user_is_not_trusted(put_env: Callable[..., None], runtime_dir: Path) -> None:
    put_env(RANKS)
    own = Path(host_registry.private_dir())
    key = own / this_job().key
    key.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(key / "tq.sock"))
        theirs.listen()
        for path in (own, key):
            os.chown(path, 65534, 65534)
        assert JobLauncher(this_job()).find() == []
        with pytest.raises(AccessDenied, match="belongs to another user"):
            tq.init()


def test_sockets_do_not_lie_where_a_logout_removes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime_dir: Path
) -> None:
    assert host_registry.base() == str(runtime_dir)
    monkeypatch.setattr(host_registry, "_of_login", lambda: str(runtime_dir))
    assert host_registry.base() == "/tmp"
    assert str(runtime_dir) in host_registry.places()  # where servers of another release may have entered themselves
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/tmp")
    assert host_registry.base() == str(runtime_dir)


def test_the_register_forgets_servers_that_were_killed(service: Service, runtime_dir: Path) -> None:
    pid = service(server={"durability": "none"}).stats()["pid"]
    assert [entry.server.pid for entry in here(runtime_dir)] == [pid]
    assert len(list(Path(host_registry.private_dir()).glob("*.server"))) == 1
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid), "the end of the server")
    assert here(runtime_dir) == []
    assert not list(Path(host_registry.private_dir()).glob("*.server"))


def test_a_services_files_are_for_this_user_only(service: Service) -> None:
    before = os.umask(0)
    try:
        service()
    finally:
        os.umask(before)
    own = Path(host_registry.private_dir())
    assert own.stat().st_mode & 0o777 == 0o700
    for path in own.iterdir():
        assert path.stat().st_mode & 0o077 == 0


def test_status_finds_the_only_service_of_this_user(
    service: Service, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_registry, "places", lambda: [str(runtime_dir)])
    with pytest.raises(NotInitialized, match="no service of this user"):
        CliRunner().invoke(app, ["status"], catch_exceptions=False)
    service()
    del os.environ["TQ_ADDRESS"]
    shown = CliRunner().invoke(app, ["status", "--json"], catch_exceptions=False)
    assert json.loads(shown.output)["pid"] == tq.get_client().stats()["pid"]
    second = start()
    with pytest.raises(InvalidInput) as raised:
        CliRunner().invoke(app, ["status"], catch_exceptions=False)
    second.stop()
    title, _, *lines = str(raised.value).splitlines()
    assert title == "2 services of this user run here, name one with --address:"
    assert [line.split()[0] for line in lines] == [tq.address(), second.address]
    assert [line.split()[1] for line in lines] == [str(tq.get_client().stats()["pid"]), str(second.pid)]
    assert all("python" in line for line in lines), "the owner's command"
    os.environ["TQ_ADDRESS"] = tq.address()


def test_names_differ_wherever_a_part_begins() -> None:
    assert named("a", "bc") != named("ab", "c")
