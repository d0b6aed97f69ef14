"""One agent process and the line-JSON conversation with it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

AGENT = Path(__file__).resolve().parent / "agent.py"
STOP_DEADLINE_S = 20.0


class AgentError(RuntimeError):
    """An operation failed inside an agent; the agent is alive and can go on."""


class AgentGone(AgentError):
    """An agent ended, or did not answer by the deadline and was killed."""


class Agent:
    """A child process running agent.py, in a session of its own so that it can be ended with what it left behind.

    `prefix` is a command that becomes the one after it, such as `ip netns exec NAME`.
    """

    def __init__(
        self,
        name: str,
        system: str,
        python: Path,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._buffer = b""
        self._ended = False
        self._next_id = 0
        self._sink = log.open("wb")
        self._process = subprocess.Popen(
            [*prefix, python, AGENT, system],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._sink,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs. Looks without reaping, so that its group id can't be taken before `kill`."""
        return not self._ended and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def send(self, op: str, **args: Any) -> int:
        """Start an operation and return its id; the agent works through operations one after another."""
        self._next_id += 1
        line = json.dumps({"id": self._next_id, "op": op, "args": args})
        try:
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise AgentGone(f"{self.name} has ended") from error
        return self._next_id

    def receive(self, op_id: int, deadline_s: float = 60.0) -> dict[str, Any]:
        """Return the result of the operation `op_id`.

        Raises AgentError with the agent's own error, AgentGone when it ended or did not answer (it is then killed:
        its state is unknown).
        """
        end = time.monotonic() + deadline_s
        while not self._ended:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                answer = json.loads(line)
                if answer["id"] != op_id:
                    continue
                if not answer["ok"]:
                    raise AgentError(f"{self.name}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            if not self._selector.select(max(0.0, end - time.monotonic())):
                self.kill()
                raise AgentGone(f"{self.name}: no answer in {deadline_s:g} s")
            chunk = self._stdout.read(1 << 16)
            if chunk == b"":
                raise AgentGone(f"{self.name} ended without an answer; its log says why")
            self._buffer += chunk or b""
        raise AgentGone(f"{self.name} was ended before")

    def call(self, op: str, deadline_s: float = 60.0, **args: Any) -> dict[str, Any]:
        """`send` and `receive` in one."""
        return self.receive(self.send(op, **args), deadline_s)

    def end(self) -> None:
        """Let the agent close its system and exit; kill it if it doesn't. Safe to call twice."""
        if self.alive:
            with contextlib.suppress(AgentError):
                self.call("stop", STOP_DEADLINE_S)
            with contextlib.suppress(BrokenPipeError):
                self._stdin.close()
            end = time.monotonic() + STOP_DEADLINE_S
            while self.alive and time.monotonic() < end:
                time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """End the agent's process group (its own children included) at once and free what the driver holds for it."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        for stream in (self._stdin, self._stdout, self._sink):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
