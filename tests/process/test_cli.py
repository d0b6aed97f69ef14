"""The command `tq`, as a person runs it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from commands import ENVIRONMENT, tq
from zygote import CHILDREN


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The run directory of a standalone service, ended by SIGTERM."""
    run_dir = str(tmp_path / "run")
    with commands.served(run_dir) as server:
        yield run_dir
    assert server.returncode == 0
    assert not os.path.exists(run_dir)


def test_a_standalone_service_keeps_rows_between_processes(served: str) -> None:
    code = "import torch, transfer_queue as tq; tq.init(); tq.kv_put('a', 'p', {'x': torch.ones(3)}); tq.close()"
    CHILDREN.run(["-c", code], {**ENVIRONMENT, "TQ_ADDRESS": served}).check_returncode()
    shown = json.loads(tq("status", "--address", served, "--json").stdout)
    assert shown["rows"] == 1
    assert shown["partition"]["p"]["rows"] == 1
    assert "arena_nbytes_budget" in tq("status", "--address", served).stdout


def test_a_relative_run_dir_is_an_absolute_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with commands.served("run"):
        monkeypatch.chdir("/")
        code = "import torch, transfer_queue as tq; tq.init(); tq.kv_put('a', 'p', {'x': torch.ones(1 << 18)})"
        CHILDREN.run(["-c", code], {**ENVIRONMENT, "TQ_ADDRESS": str(tmp_path / "run")}).check_returncode()


def test_errors_are_one_line_without_a_traceback() -> None:
    missing = tq("status", "--address", "unix:/nowhere/tq.sock")
    assert missing.returncode == 1
    assert missing.stderr.startswith("tq: no server at unix:/nowhere/tq.sock")
    open_port = tq("serve", "--host", "127.0.0.1")
    assert open_port.returncode == 1
    assert "token" in open_port.stderr
    assert "Traceback" not in missing.stderr + open_port.stderr


def test_options_of_serve_count_beside_the_settings_of_its_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef")
    file = tmp_path / "settings.yaml"
    server = {"host": "127.0.0.1", "port": 1, "token_file": str(token)}

    def port_of(settings: dict[str, object], *options: str) -> int:
        file.write_text(json.dumps({"server": settings}))
        with commands.served(str(tmp_path / "run"), "--config", str(file), *options):
            shown = json.loads(tq("status", "--address", str(tmp_path / "run"), "--json").stdout)
        return int(str(shown["tcp"]).rpartition(":")[2])

    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    assert port_of(server, "--port", str(free)) == free
    assert port_of({**server, "port": free}, "--host", "127.0.0.1") == free
    assert port_of({"host": "127.0.0.1"}, "--token-file", str(token)) > 0


@pytest.mark.parametrize("text", ["server:\n\thost: a\n", "server: [1", "server: {host: '${'}", "server: 1\nserver: 2"])
def test_a_file_that_is_no_yaml_of_settings_is_named_without_a_traceback(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    refused = tq("serve", "--config", str(file))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"tq: --config: {file} is no YAML of settings: ")
    assert len(refused.stderr.splitlines()) == 1


def test_a_port_of_serve_that_nobody_listens_at_is_refused(tmp_path: Path) -> None:
    refused = tq("serve", "--run-dir", str(tmp_path / "run"), "--port", "7000")
    assert refused.returncode == 2
    assert "Invalid value for --port: nothing listens to the network without --host" in refused.stderr


def test_dead_letters_are_shown_and_queued_again(served: str) -> None:
    code = (
        "import torch, transfer_queue as tq; tq.init(); client = tq.get_client()\n"
        "tq.kv_batch_put(['a', 'b'], 'p', {'x': torch.ones(2, 3)}, tags=[{'n': 1}, {'n': 2}])\n"
        "meta = client.get_meta(['x'], 1, 'p', task_name='t', lease_s=60, sampling_config={'max_deliver': 1})\n"
        "client.nack(meta, reason='nan'); tq.close()"
    )
    CHILDREN.run(["-c", code], {**ENVIRONMENT, "TQ_ADDRESS": served}).check_returncode()
    shown = json.loads(tq("dead-letters", "p", "t", "--address", served, "--json").stdout)
    assert [(one["attempts"], one["reason"], one["tags"]) for one in shown] == [(1, "nan", {"n": 1})]
    assert "1 queued again" in tq("dead-letters", "p", "t", "--requeue", "--address", served).stdout
    assert json.loads(tq("dead-letters", "p", "t", "--address", served, "--json").stdout) == []
    unknown = tq("dead-letters", "q", "t", "--address", served)
    assert (unknown.returncode, unknown.stderr.startswith("tq: partition 'q' does not exist")) == (1, True)


def test_a_row_that_is_printed_can_be_typed(served: str) -> None:
    code = (
        "import torch, transfer_queue as tq; tq.init(); client = tq.get_client()\n"
        "client.put({'x': torch.ones(1000)}, partition_id='before'); tq.kv_put('a', 'p', {'x': torch.ones(3)})\n"
        "meta = client.get_meta(['x'], 1, 'p', task_name='t', lease_s=60, sampling_config={'max_deliver': 1})\n"
        "client.nack(meta); tq.close()"
    )
    CHILDREN.run(["-c", code], {**ENVIRONMENT, "TQ_ADDRESS": served}).check_returncode()
    row = tq("dead-letters", "p", "t", "--address", served).stdout.splitlines()[1].split()[0]
    assert row == "1000"
    seen = tq("inspect", "p", "--row", row, "--no-values", "--json", "--address", served)
    assert json.loads(seen.stdout)["key"] == "a"
