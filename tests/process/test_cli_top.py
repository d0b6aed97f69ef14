"""`tq top` on a terminal, before a service that works, stands still, ends and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import Terminal, served, tq
from conftest import freeze, until

import transfer_queue

HOSTILE = "\x1b[31mevil\x1b]0;title\x07\u202e"


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def filled(run_dir: str) -> Iterator[int]:
    """The pid of a service with a row and a declared partition."""
    with served(run_dir) as server:
        transfer_queue.init({"address": run_dir})
        fill()
        yield server.pid
        transfer_queue.close()
        os.environ.pop("TQ_ADDRESS", None)


def fill() -> None:
    client = transfer_queue.get_client()
    transfer_queue.kv_put("a", "train", {"x": torch.ones(3)})
    client.set_partition("train", 100)
    client.get_meta(["x"], 1, "train", task_name="actor", lease_s=600)
    transfer_queue.kv_put(HOSTILE, HOSTILE, {HOSTILE: HOSTILE})


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (40, 120), (8, 30)])
def test_a_frame_fits_the_terminal(run_dir: str, rows: int, columns: int) -> None:
    with Terminal("top", "--interval", "0.2", "--address", run_dir, rows=rows, columns=columns) as terminal:
        until(lambda: terminal.shows("q or Ctrl-C ends") and terminal.shows("pid "), "a frame")
        frame = terminal.frame()
        assert len(frame) <= rows
        assert max(map(len, frame)) <= columns
        assert rows < 24 or any(line.startswith("train ") and "1/100" in line for line in frame)
        terminal.type("q")
        assert terminal.end() == 0
        assert terminal.settings == terminal.before


@pytest.mark.usefixtures("filled")
def test_names_do_not_act_on_the_terminal(run_dir: str) -> None:
    with Terminal("top", "--interval", "0.2", "--address", run_dir) as terminal:
        until(lambda: terminal.shows("evil"), "the name")
        assert "\x1b[31mevil" not in terminal.text
        assert "\x1b]0;" not in terminal.text
        assert "\u202e" not in terminal.text


@pytest.mark.usefixtures("filled")
def test_rates_are_shown(run_dir: str) -> None:
    with Terminal("top", "--interval", "0.3", "--address", run_dir, rows=40, columns=120) as terminal:
        until(lambda: terminal.shows("train"), "a frame")
        number = iter(range(1 << 20))

        def is_busy() -> bool:
            transfer_queue.kv_put(f"k{next(number)}", "train", {"x": torch.ones(3)})
            terminal.read(0.0)
            lines = [line.split() for line in terminal.frame() if line.startswith("train ")]
            return bool(lines) and float(lines[-1][2].replace(",", "")) > 0

        until(is_busy, "a rate")


@pytest.mark.usefixtures("filled")
def test_a_new_size_of_the_terminal_counts(run_dir: str) -> None:
    with Terminal("top", "--interval", "0.2", "--address", run_dir) as terminal:
        until(lambda: terminal.shows("pid "), "a frame")
        terminal.resize(12, 50)
        until(lambda: terminal.shows("pid ") and 0 < len(terminal.frame()) <= 12, "a smaller frame")
        assert max(map(len, terminal.frame())) <= 50


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_it_leaves_the_terminal_as_it_was(filled: int, run_dir: str, how: str) -> None:
    with Terminal("top", "--interval", "0.2", "--address", run_dir) as terminal:
        until(lambda: terminal.shows(f"pid {filled}"), "a frame")
        if how == "ctrl-c":
            terminal.type("\x03")
        else:
            terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == (0 if how == "ctrl-c" else 143)
        assert terminal.settings == terminal.before
        assert terminal.text.rstrip().endswith("\x1b[?1049l")  # the screen of before


def test_a_frozen_service_is_said_to_be_and_comes_back(filled: int, run_dir: str) -> None:
    with Terminal("top", "--interval", "0.2", "--address", run_dir, columns=120) as terminal:
        until(lambda: terminal.shows(f"pid {filled}"), "a frame")
        freeze(filled)
        until(lambda: terminal.shows("looking again: no answer: the service is stopped"), "its silence")
        assert terminal.shows("1/100")  # what was seen last
        os.kill(filled, signal.SIGCONT)
        until(lambda: not terminal.shows("looking again"), "its return")
        until(lambda: terminal.shows("1/100"), "its return")
        terminal.type("q")
        assert terminal.end() == 0


def test_q_ends_it_also_before_a_frozen_service(filled: int, run_dir: str) -> None:
    with Terminal("top", "--interval", "0.2", "--address", run_dir, columns=120) as terminal:
        until(lambda: terminal.shows(f"pid {filled}"), "a frame")
        freeze(filled)
        until(lambda: terminal.shows("no answer"), "its silence")
        terminal.type("q")
        assert terminal.end(10) == 0


def test_a_service_that_was_killed_and_started_anew_is_shown_again(run_dir: str) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(served(run_dir))
        terminal = stack.enter_context(Terminal("top", "--interval", "0.2", "--address", run_dir, columns=120))
        until(lambda: terminal.shows(f"pid {first.pid}"), "a frame")
        standby = json.loads(tq("status", "--json", "--address", run_dir).stdout)["standby"]
        for pid in filter(None, (standby, first.pid)):
            os.kill(pid, signal.SIGKILL)
        until(lambda: terminal.shows("looking again: no server at"), "its end")
        first.wait()
        second = stack.enter_context(served(run_dir))
        until(lambda: terminal.shows(f"pid {second.pid}"), "the next one")
        assert terminal.shows("started anew at")
        terminal.type("q")
        assert terminal.end() == 0


def test_80_columns_have_room_for_a_long_address_and_for_the_remedy(run_dir: str) -> None:
    long = run_dir + "-" * (88 - len(run_dir))  # a socket has 107
    with Terminal("top", "--interval", "0.2", "--address", f"unix:{long}/tq.sock") as terminal:

        def words() -> str:
            terminal.read()
            return " ".join(line.strip() for line in terminal.frame())

        with served(long) as server:
            until(lambda: f"pid {server.pid}" in words(), "a frame")
            assert f"unix:{long}/tq.sock" in words().replace(" ", "")
        until(lambda: "start it with `tq serve`, or name another one with --address" in words(), "what to do")
        assert max(map(len, terminal.frame())) <= 80
        terminal.type("q")
        assert terminal.end() == 0


def test_a_standby_that_takes_over_is_followed(filled: int, run_dir: str) -> None:
    with Terminal("top", "--interval", "0.2", "--address", run_dir, columns=120) as terminal:
        until(lambda: terminal.shows(f"pid {filled}"), "a frame")
        standby = json.loads(tq("status", "--json", "--address", run_dir).stdout)["standby"]
        os.kill(filled, signal.SIGKILL)
        until(lambda: terminal.shows(f"pid {standby}") and terminal.shows("1/100"), "the standby")
        os.kill(standby, signal.SIGTERM)


@pytest.mark.usefixtures("filled")
def test_without_a_terminal_it_says_what_to_do(run_dir: str) -> None:
    failed = tq("top", "--address", run_dir)
    assert failed.returncode == 1
    assert "--once" in failed.stderr


def test_lines_of_json_tell_of_a_service_that_is_not_there(tmp_path: Path) -> None:
    failed = tq("top", "--once", "--json", "--address", str(tmp_path / "none"))
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "no server at" in failed.stderr


def test_one_frame_of_a_service_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    failed = tq("top", "--once", "--address", str(tmp_path / "none"))
    assert failed.returncode == 1
    assert "start it with `tq serve`, or name another one with --address" in failed.stderr
