"""The two interpreters, each with a package and a service of its own, which play programs one after the other."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frameworks.differential.drawing import Call, Program

ANSWER_DEADLINE_S = 120.0  # of one program, the start of the service included


class NoAnswer(RuntimeError):
    """An interpreter ended, or a program did not end in time."""


class Peer:
    """An interpreter that plays programs in the folder `cwd`, and writes its log to `log`."""

    def __init__(self, command: Sequence[str | Path], cwd: Path, environment: Mapping[str, str], log: Path) -> None:
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._played = 0
        self._seed = 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, program: Program, calls: list[Call]) -> None:
        """Begin to play these calls; `answer` waits for their outcomes."""
        assert self._process.stdin is not None
        self._played += 1
        self._seed = program.seed
        try:
            print(json.dumps([self._played, program.sampler, calls]), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise NoAnswer(self._why()) from None

    def answer(self) -> list[Any]:
        """The outcome of each call."""
        assert self._process.stdout is not None
        timer = threading.Timer(ANSWER_DEADLINE_S, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise NoAnswer(self._why())
        outcomes: list[Any] = json.loads(line)
        return outcomes

    def close(self) -> None:
        """End the interpreter and its service."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _why(self) -> str:
        return f"seed {self._seed}: no answer in {ANSWER_DEADLINE_S:g} s, or its interpreter ended: {self._log.name}"
