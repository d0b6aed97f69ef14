"""`tq doctor` on several hosts: agents that serve, and the one that leads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from forked_members import WHERE
from paths import SOURCES_AND_HELPERS
from zygote import CHILDREN, Forked

CODE = "from transfer_queue_doctor import main; main()"
FORKED = f"import forked_members; forked_members.use(); {CODE}"
TOKEN = "a-token-nobody-guesses"
END_S = 40.0


def environment(token: str = TOKEN) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    return {**own, "PYTHONPATH": SOURCES_AND_HELPERS, "TQ_TOKEN": token, WHERE: CHILDREN.socket}


def program(*arguments: str, code: str = FORKED) -> list[str]:
    """`tq doctor ARGUMENTS --json`, for `python`. `code`: with `CODE` it starts the processes of its trials itself."""
    return ["-c", code, "doctor", *arguments, "--json"]


def elsewhere(of_python: list[str], space: str, first: str) -> list[str]:
    """The command that runs it in a network namespace. `first`: what a shell does there before; its mounts are its
    own."""
    inside = ["ip", "netns", "exec", space] if space else []
    python = [sys.executable, *of_python]
    return [*inside, "sh", "-c", f'{first} && exec "$@"', "sh", *python] if first else [*inside, *python]


class Led:
    """A trial that has ended. `said`: its report; `errors`: what stood on standard error."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.text, self.errors = done.returncode, done.stdout, done.stderr
        self.said: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}

    @property
    def pairs(self) -> dict[tuple[str, str], bool]:
        """Who read (second) of whom (first), and whether that went well."""
        return {(one["writer"], one["reader"]): one["seconds"] is not None for one in self.said["reads"]}

    @property
    def troubles(self) -> list[tuple[str, str]]:
        """Where, and the code of the error."""
        return [(one["where"], one["code"]) for one in self.said["troubles"]]


def lead(*arguments: str, others: Sequence[str] = (), token: str = TOKEN, space: str = "", first: str = "") -> Led:
    """Run a trial to its end."""
    whole = program(*arguments, *(part for one in others for part in ("--with", one)))
    if not (space or first):
        return Led(CHILDREN.run(whole, environment(token)))
    there, has = elsewhere(whole, space, first), environment(token)
    return Led(subprocess.run(there, env=has, capture_output=True, text=True, timeout=110, check=False))


class DoctorHost:
    """An agent that serves, until `close`. `place`: where, as `--with` takes it."""

    def __init__(
        self, *arguments: str, place: str = "127.0.0.1:0", token: str = TOKEN, space: str = "", first: str = "",
        code: str = FORKED,
    ) -> None:  # fmt: skip
        whole = program("--serve", place, *arguments, code=code)
        self.process: Forked | subprocess.Popen[bytes]
        if space or first:
            there = elsewhere(whole, space, first)
            self.process = subprocess.Popen(there, env=environment(token), stdout=subprocess.PIPE)
        else:
            self.process = CHILDREN.start(whole, environment(token))
            self.process.stdin.close()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.place = json.loads(line)["address"].removeprefix("tcp:") if line else ""

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def close(self) -> int:
        """End it in good order; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            with contextlib.suppress(OSError):
                assert self.process.stdout is not None
                self.process.stdout.close()
        return code
