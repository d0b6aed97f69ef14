"""What is refused as a token, wherever one is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from zygote import CHILDREN

import transfer_queue as tq
from transfer_queue.errors import ConfigError
from transfer_queue.weights import Control, ModuleSource, Receiver, Swap
from transfer_queue.weights.http import serve
from transfer_queue.weights.transport import registry
from transfer_queue.wire.address import parse_address

GOOD = "0123456789abcdef"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_ADDRESS", "TQ_TOKEN", "TQ_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def token_file(directory: Path, token: str = GOOD, mode: int = 0o600) -> str:
    path = directory / "token"
    path.write_text(token + "\n")
    path.chmod(mode)
    return str(path)


def serving(path: str) -> None:
    """Start a service with this token file. Raises what `init` raises."""
    try:
        tq.init({"server": {"host": "127.0.0.1", "token_file": path}})
    finally:
        tq.close()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_can_read_is_no_token(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = token_file(tmp_path, mode=mode)
    with pytest.raises(ConfigError, match=rf"^server\.token_file: .*mode {mode:o}.*chmod 600 {path}"):
        serving(path)
    monkeypatch.setenv("TQ_TOKEN_FILE", path)
    with pytest.raises(ConfigError, match=rf"^TQ_TOKEN_FILE: .*chmod 600 {path}"):
        tq.init({"address": "tcp:127.0.0.1:1"})


def test_a_short_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = token_file(tmp_path, GOOD[1:])
    with pytest.raises(ConfigError, match=rf"^server\.token_file: {path}: a token of 15 characters"):
        serving(path)
    monkeypatch.setenv("TQ_TOKEN_FILE", path)
    with pytest.raises(ConfigError, match=r"^TQ_TOKEN_FILE: .* of 15 characters"):
        tq.init({"address": "tcp:127.0.0.1:1"})
    monkeypatch.setenv("TQ_TOKEN", "secret")
    with pytest.raises(ConfigError, match=r"^TQ_TOKEN: a token of 6 characters") as caught:
        tq.init({"address": "tcp:127.0.0.1:1"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_short_token_serves_no_weights_to_other_hosts(host: str) -> None:
    receiver = Receiver(Swap(torch.nn.Linear(1, 1)))
    control = Control(registry.engine("tcp")(receiver), receiver)
    with pytest.raises(ConfigError, match=r"^token: a token of 15 characters can be guessed"):
        serve(control, host, token=GOOD[1:])
    info = {"host": host, "token": GOOD[1:]}
    with pytest.raises(ConfigError, match=r"^token: a token of 15 characters can be guessed"):
        registry.trainer("tcp").trainer_init(info, client=control, source=ModuleSource(torch.nn.Linear(1, 1)))


@pytest.mark.parametrize("content", [None, b"\xff" * 32])
def test_a_file_that_cannot_be_read_is_named(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.touch(0o600)
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^server\.token_file: .*{path}"):
        serving(str(path))
    monkeypatch.setenv("TQ_TOKEN_FILE", str(path))
    with pytest.raises(ConfigError, match=rf"^TQ_TOKEN_FILE: .*{path}"):
        parse_address("tcp:127.0.0.1:1")


def test_the_command_says_what_is_wrong_with_a_token(tmp_path: Path) -> None:
    path = token_file(tmp_path, mode=0o644)
    for command in (["serve", "--host", "127.0.0.1", "--token-file", path], ["status", "--address", "tcp:[::1]:1"]):
        cli = "from transfer_queue.cli import main; main()"
        found = CHILDREN.run(["-c", cli, *command], {**os.environ, "TQ_TOKEN_FILE": path})
        assert (found.returncode, found.stdout) == (1, "")
        assert f"chmod 600 {path}" in found.stderr
        assert "Traceback" not in found.stderr


def test_a_good_file_opens_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving(token_file(tmp_path))
    monkeypatch.setenv("TQ_TOKEN_FILE", token_file(tmp_path, mode=0o400))
    assert parse_address("tcp:127.0.0.1:1").token == GOOD


@pytest.mark.parametrize("text", ["tcp:host:²", "tcp:host:", "tcp:host:99999", "tcp:host:" + "1" * 5000, "tcp:7"])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected tcp:HOST:PORT"):
        parse_address(text, "x" * 16)


def test_a_host_and_a_port_alone_are_told_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="reached by TCP is tcp:trainer-0:4000"):
        parse_address("trainer-0:4000")
    (tmp_path / "trainer-0:4000").touch()
    assert parse_address("trainer-0:4000").path == str(tmp_path / "trainer-0:4000")
