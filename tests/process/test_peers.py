"""What a process checks before it attaches, and before it serves: no other user's socket, directory or lock."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq
from transfer_queue.client.arenas import MappedArenas
from transfer_queue.client.session import Session
from transfer_queue.errors import AccessDenied, ConfigError, ServiceUnavailable
from transfer_queue.launch import local
from transfer_queue.server import engine_blocks, registered_arenas
from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import parse_address
from transfer_queue.wire.aio import AsyncConnection

Service = Callable[..., tq.TransferQueueClient]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
FOREIGN = """
import os, socket
here = socket.socket(socket.AF_UNIX)
os.setuid({uid})
here.bind({path!r})
here.listen(8)
print("listening", flush=True)
input()
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)


@pytest.fixture
def open_door(service: Service, tmp_path: Path) -> Path:
    """The directory of a service, which its group may write to meanwhile."""
    directory = tmp_path / "run"
    service(run_dir=str(directory))
    directory.chmod(0o770)
    return directory


async def open_async(path: str) -> None:
    await AsyncConnection(parse_address(path), m.decode_server).open(bytes(16), 5.0)


def test_a_client_refuses_a_directory_that_others_may_write_to(open_door: Path) -> None:
    with pytest.raises(AccessDenied, match=rf"mode 770.*chmod go-w {open_door}"):
        Session(parse_address(str(open_door)))
    with pytest.raises(AccessDenied, match=rf"chmod go-w {open_door}"):
        asyncio.run(open_async(str(open_door)))
    with pytest.raises(AccessDenied, match=rf"chmod go-w {open_door}"):
        MappedArenas(str(open_door / "door.sock"), 5.0)[0]
    open_door.chmod(0o700)
    Session(parse_address(str(open_door))).close()


def test_init_does_not_start_beside_a_service_it_may_not_trust(open_door: Path, child: Callable[[str], Any]) -> None:
    code = f"""
        import transfer_queue as tq
        from transfer_queue.errors import AccessDenied
        try:
            tq.init({{"run_dir": {str(open_door)!r}}})
        except AccessDenied as error:
            print(error)
        """
    code = "import os; del os.environ['TQ_ADDRESS']\n" + "\n".join(line[8:] for line in code.splitlines())
    assert f"chmod go-w {open_door}" in child(code).finish()


def test_a_directory_with_the_sticky_bit_will_do(open_door: Path) -> None:
    open_door.chmod(0o1777)
    Session(parse_address(str(open_door))).close()


def test_a_server_refuses_a_directory_that_others_may_write_to(service: Service, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"^run_dir: .*chmod go-w {shared}"):
        service(run_dir=str(shared))
    assert list(shared.iterdir()) == []


@needs_root
def test_a_server_refuses_a_directory_of_another_user(service: Service, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=rf"{theirs} belongs to another user \(uid {NOBODY}\)"):
        service(run_dir=str(theirs))


@needs_root
def test_a_client_refuses_a_server_of_another_user(child: Callable[[str], Any]) -> None:
    path = f"/tmp/tq-test-{os.getpid()}.sock"  # where anybody may put one
    other = child(FOREIGN.format(uid=NOBODY, path=path))
    assert other.line() == "listening"
    try:
        with pytest.raises(AccessDenied, match=rf"runs as another user \(uid {NOBODY}\)"):
            Session(parse_address(path))
        with pytest.raises(AccessDenied, match=rf"runs as another user \(uid {NOBODY}\)"):
            asyncio.run(open_async(path))
    finally:
        os.unlink(path)


def test_the_lock_follows_no_link(service: Service, tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("precious")
    lock = tmp_path / "run.lock"
    lock.symlink_to(treasure)
    with pytest.raises(ConfigError, match=rf"{lock}: it is a symbolic link"):
        service(run_dir=str(tmp_path / "run"))
    assert treasure.read_text() == "precious"
    lock.unlink()
    lock.symlink_to(tmp_path / "not there")
    with pytest.raises(ConfigError, match=str(lock)):
        service(run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "not there").exists()


def test_the_lock_changes_no_file_that_is_there(service: Service, tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text("notes")
    service(run_dir=str(tmp_path / "run"))
    assert lock.read_text() == "notes"


def test_a_new_lock_is_for_this_user_only(service: Service, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        service(run_dir=str(tmp_path / "run"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_lock_that_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    with pytest.raises(ConfigError, match=str(path)), local.lock(str(tmp_path / "run")):
        pass


@needs_root
def test_who_waits_for_a_start_gives_it_the_time_that_its_starter_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "STOP_TIMEOUT_S", 0.0)
    waits = local.lock(str(tmp_path / "run"), start_s=0.05)
    with local.lock(str(tmp_path / "run"), start_s=local.RECOVERY_TIMEOUT_S), ThreadPoolExecutor() as threads:
        waiting = threads.submit(waits.__enter__)
        with pytest.raises(FuturesTimeout):
            waiting.result(0.3)
        os.utime(tmp_path / "run.lock", (0, 0))  # the time is up
        with pytest.raises(ServiceUnavailable, match="for too long"):
            waiting.result(10)


@pytest.mark.parametrize(
    ("settings", "least_s"),
    [
        ({}, 30.0),
        ({"journal_dir": "/j"}, 600.0),
        ({"engine": "Files"}, 30.0 + engine_blocks.OPEN_S),
        ({"transport": {"name": "M"}}, 30.0 + registered_arenas.OPEN_S + registered_arenas.REGISTER_S),
    ],
)
def test_a_starter_waits_for_what_its_server_may_wait_for(settings: dict[str, Any], least_s: float) -> None:
    assert local.start_timeout_s(ServerConfig(run_dir="", **settings)) >= least_s


def test_the_lock_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.touch(0o666)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=rf"{path}: it is not a file of this user"), local.lock(str(tmp_path / "run")):
        pass


def test_a_socket_nobody_serves_is_still_only_unavailable(tmp_path: Path) -> None:
    path = str(tmp_path / "dead.sock")
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(path)
    with pytest.raises(ServiceUnavailable):
        Session(parse_address(path))
