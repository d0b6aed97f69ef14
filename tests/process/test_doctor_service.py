"""`tq doctor --address`: whether this host reaches each server of a service that runs, and what lies there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import freeze, until
from hosts import CLIENT, TOKEN, Host
from typer.testing import CliRunner

import transfer_queue as tq
from transfer_queue.cli import app
from transfer_queue.client.operations import kv
from transfer_queue.doctor.member import NUM_ROWS, ROW_NBYTES


@pytest.fixture
def hosts(start_host: Callable[..., Host]) -> tuple[Host, Host]:
    head = start_host(client=CLIENT)
    return head, start_host(join=head.tcp)


def said(*arguments: str, token: str = TOKEN) -> tuple[int, Any]:
    """The exit status, and what is printed as JSON."""
    shown = CliRunner().invoke(app, ["doctor", *arguments, "--json"], env={"TQ_TOKEN": token})
    return shown.exit_code, json.loads(shown.stdout) if shown.stdout else shown.exception


def test_every_server_is_written_to_and_read_and_nothing_is_left(hosts: tuple[Host, Host]) -> None:
    head, unit = hosts
    code, found = said("--address", head.tcp, "--backend", "SimpleStorage")
    assert code == 0, found
    assert [(one["host"], f"tcp:{one['address']}") for one in found["hosts"]] == [
        ("the controller", head.tcp), ("unit 1", unit.tcp),
    ]  # fmt: skip
    assert [(one["writer"], one["nbytes"]) for one in found["reads"]] == [
        ("the controller", NUM_ROWS * ROW_NBYTES), ("unit 1", NUM_ROWS * ROW_NBYTES),
    ]  # fmt: skip
    assert found["works"]
    until(lambda: head.client.stats()["rows"] == 0, "the rows deleted")
    until(lambda: not any(host.used() for host in hosts), "the blocks given up")


def test_the_rows_of_a_unit_lie_there(hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, int]] = []
    before = kv.kv_batch_get

    def looking(*arguments: Any, **more: Any) -> Any:
        used.append((hosts[0].used(), hosts[1].used()))
        return before(*arguments, **more)

    monkeypatch.setattr(kv, "kv_batch_get", looking)
    assert said("--address", hosts[0].tcp)[0] == 0
    of_head, of_unit = used
    assert of_head[0] >= NUM_ROWS * ROW_NBYTES
    assert of_unit[1] >= NUM_ROWS * ROW_NBYTES


def test_a_host_asks_by_its_own_unit(hosts: tuple[Host, Host]) -> None:
    code, found = said("--address", hosts[1].server.address, token="")
    assert code == 0, found
    assert len(found["reads"]) == 2


def test_a_service_of_one_host_has_one_server(service: Callable[..., tq.TransferQueueClient]) -> None:
    client = service()
    code, found = said("--address", str(client.session.address), token="")
    assert code == 0, found
    assert [(one["host"], one["address"]) for one in found["hosts"]] == [("the controller", "")]


def test_a_unit_that_is_frozen_or_gone_is_named_and_the_others_are_tried(hosts: tuple[Host, Host]) -> None:
    head, unit = hosts
    freeze(unit.server.pid)
    try:
        code, found = said("--address", head.tcp, "--timeout-s", "2")
        assert code == 1
        [trouble] = found["troubles"]
        assert (trouble["where"], trouble["code"]) == (f"unit 1 at {unit.server.tcp}", "deadline")
    finally:
        os.kill(unit.server.pid, signal.SIGCONT)
    os.kill(unit.server.pid, signal.SIGKILL)
    until(lambda: head.client.stats()["units"]["1"]["away"], "that the unit is missed")
    code, found = said("--address", head.tcp, "--timeout-s", "5")
    [trouble] = found["troubles"]
    assert "has lost it" in trouble["text"]
    assert [one["writer"] for one in found["reads"]] == ["the controller"]


def test_another_backend_than_is_named_is_said(hosts: tuple[Host, Host]) -> None:
    code, found = said("--address", hosts[0].tcp, "--backend", "Files")
    assert code == 1
    assert "in SimpleStorage, not in Files" in found["troubles"][0]["text"]


def test_a_service_that_is_not_there_is_said_with_what_to_do(tmp_path: Path) -> None:
    code, error = said("--address", str(tmp_path / "none"), token="")
    assert code == 1
    assert "start it with `tq serve`, or name another one with --address" in str(error)


def test_a_service_that_stands_still_is_said_with_what_to_do(service: Callable[..., tq.TransferQueueClient]) -> None:
    client = service()
    pid = client.stats()["pid"]
    freeze(pid)
    try:
        code, error = said("--address", str(client.session.address), "--timeout-s", "0.5", token="")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert code == 1
    assert "it is stopped (SIGCONT wakes it) or busy" in str(error)


def test_a_service_and_a_trial_are_not_tried_at_once() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--address", "/nowhere", "--backend", "Files", "--serve", "127.0.0.1:0"])
    assert shown.exit_code == 2
