"""The examples, as a person runs them, with little data."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from zygote import CHILDREN

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TQ_")}
    return CHILDREN.run(["-m", f"examples.{name}", *arguments], environment, str(ROOT))


def test_single_controller() -> None:
    done = run("single_controller", "--steps", "2", "--prompts", "3", "--workers", "2")
    assert done.returncode == 0, done.stderr
    head, *steps, last = done.stdout.splitlines()
    assert head.split()[:2] == ["step", "rows"]
    assert [line.split()[:2] for line in steps] == [["0", "12"], ["1", "12"]]
    assert last == "2 steps, 24 rows: every row went through rollout, reward, log_prob, train exactly once"


def test_disaggregated_streaming() -> None:
    done = run("disaggregated_streaming", "--rows", "32", "--rollouts", "1", "--batch", "4", "--micro-batch", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "32 rows: 2 dp ranks disjoint and complete, 2 tp peers each identical"


def test_ddp_stream_in_a_copy_elsewhere(tmp_path: Path) -> None:
    copy = shutil.copy(ROOT / "examples" / "ddp_stream.py", tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TQ_")}
    command = [sys.executable, str(copy), "--rows", "21"]
    given = {"cwd": tmp_path, "env": {**environment, "PYTHONPATH": str(ROOT)}, "timeout": 100, "check": False}
    done = subprocess.run(command, capture_output=True, text=True, **given)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert [line.split(", ")[0] for line in done.stdout.splitlines()] == [
        "rank 0: 11 rows in 3 micro-batches", "rank 1: 10 rows in 3 micro-batches",
    ]  # fmt: skip


def test_weights_synchronous() -> None:
    done = run("weights_synchronous", "--steps", "3")
    assert done.returncode == 0, done.stderr
    _, *versions, last = done.stdout.splitlines()
    assert [line.split()[:2] for line in versions] == [["1", "{1}"], ["2", "{2}"], ["3", "{3}"]]
    assert last == "3 versions, 192 rows, 0 of them too old"


def test_weights_in_flight() -> None:
    done = run("weights_in_flight", "--steps", "30", "--max-staleness", "2")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(r"30 versions, 1920 rows: (\d+) made by several versions, the oldest (\d) behind", last)
    assert found, last
    assert int(found[1]) > 0
    assert int(found[2]) <= 2


def test_weights_over_http() -> None:
    done = run("weights_over_http", "--steps", "3")
    assert done.returncode == 0, done.stderr
    head, *_, last = done.stdout.splitlines()
    assert head.endswith("version 'default'; refused: access_denied, not_open, not_initialized")
    assert last == "3 versions over HTTP, the server has version 3 of this trainer's epoch"


def test_sizes_that_do_not_divide_are_named() -> None:
    done = run("disaggregated_streaming", "--rows", "33")
    assert done.returncode == 1
    assert done.stderr.strip() == "--rows must be a multiple of --batch x --rollouts, 16"


def test_a_worker_that_fails_ends_the_example_with_its_error() -> None:
    done = run("single_controller", "--max-len", "0")
    assert done.returncode != 0
    assert "worker 'Rollout 0' ended" in done.stderr
    assert "in respond" in done.stderr
