"""The examples when one of their processes ends, and when somebody presses Ctrl-C: they end soon, and say why."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeAlias

import pytest
import torch
from paths import ROOT, SOURCES
from zygote import CHILDREN, Forked

import transfer_queue as tq

pytestmark = pytest.mark.timeout(120)
# Their processes are forked here: what is tested is who notices an end, and an import of torch takes seconds.
FORKING = """
import multiprocessing, os, signal, sys, time
sys.path.insert(0, {folder!r})
import {name} as example
example.get_context = lambda method: multiprocessing.get_context("fork")
multiprocessing.context.BaseContext.set_forkserver_preload = lambda *given: None
def saying(function):
    return lambda *given: print("running", flush=True) or function(*given)
"""
Start: TypeAlias = Callable[[str, str], tuple[Forked, IO[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Runs an example in a session of its own, in which some code is run first; gives its errors, too."""
    started: list[Forked] = []
    with contextlib.ExitStack() as files:

        def start(name: str, code: str) -> tuple[Forked, IO[str]]:
            errors = files.enter_context(tempfile.TemporaryFile("w+"))
            whole = FORKING.format(folder=str(ROOT / "examples"), name=name) + code
            environment = {**os.environ, "PYTHONPATH": SOURCES}
            process = CHILDREN.start(["-c", whole], environment, stderr=errors.fileno(), own_session=True)
            started.append(process)
            return process, errors

        yield start
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(10)
            one.stdin.close()
            one.stdout.close()


def ended(process: Forked, errors: IO[str]) -> tuple[int, str]:
    """The exit code, and what it said in complaint. It may take a third of what the waits for a server take."""
    code = process.wait(20)
    errors.seek(0)
    return code, errors.read()


@pytest.mark.parametrize(("name", "code", "last"), [
    ("vl_pipeline", """
example.train = lambda rank, *given: os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(600)
sys.argv[1:] = ["--prompts", "1", "--group", "2"]
""", "rank 1 ended with exit code -9"),
    ("weights_over_http", "example.server = lambda *given: os._exit(3)\n", "the server ended with exit code 3"),
    ("multimodal", "example.photo = lambda number: 1 // (5 - number)\n", "rollout ended with exit code 1"),
    ("async_lengths", """
example.engine = lambda slots, token_s, ready: os._exit(2)
sys.argv[1:] = ["--engines", "1"]
""", "engine 0 ended with exit code 2"),
])  # fmt: skip
def test_an_example_whose_other_process_ends_says_which(start: Start, name: str, code: str, last: str) -> None:
    status, said = ended(*start(name, code + "example.main()\n"))
    assert status == 1
    assert said.splitlines()[-1] == last


def test_a_server_that_ends_while_its_rows_are_waited_for_ends_the_trainer(start: Start) -> None:
    code = "example.Sampler.sample = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\nexample.main()\n"
    assert ended(*start("weights_over_http", code)) == (1, "the server ended with exit code -9\n")


RUN = "try:\n    example.main()\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"  # as at the end of each file


@pytest.mark.parametrize(("name", "code"), [
    ("async_lengths", """
example.train = saying(example.train)
sys.argv[1:] = ["--steps", "4000", "--engines", "1", "--groups", "4", "--slots", "4"]
"""),
    ("weights_in_flight", 'example.train = saying(example.train)\nsys.argv[1:] = ["--steps", "4000"]\n'),
    ("weights_over_http", 'example.train = saying(example.train)\nsys.argv[1:] = ["--steps", "4000"]\n'),
    ("single_controller", """
example.tq.kv_list = saying(example.tq.kv_list)
sys.argv[1:] = ["--steps", "4000", "--prompts", "2", "--max-len", "4"]
"""),
    ("disaggregated_streaming", """
example.actor = lambda *given: print("running", flush=True) or time.sleep(600)
sys.argv[1:] = ["--rows", "8", "--rollouts", "1", "--dp", "1", "--tp", "1"]
"""),
])  # fmt: skip
def test_an_interrupted_example_ends_soon_and_without_a_word(start: Start, name: str, code: str) -> None:
    process, errors = start(name, code + RUN)
    while b"running" not in (line := process.stdout.readline()):
        assert line, "it ended before"
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process, errors) == (130, "")


def test_weights_that_were_taken_do_not_stay(client: tq.TransferQueueClient, child: Callable[[str], Any]) -> None:
    for _ in range(2):
        client.put({"table": torch.zeros(1, 16, 16)}, partition_id="weights")
    code = f"import sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\nimport grpo_ddp\ngrpo_ddp.rollout(2, 1, 2)\n"
    child(code).finish()
    assert client.get_partition("weights")["rows"] == 0
