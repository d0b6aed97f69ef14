"""Programs that a server starts for its storage engine, and that end with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

from transfer_queue.errors import ServiceUnavailable

# The program ends when its standard input does, and with that when the server is killed. PR_SET_PDEATHSIG would end it
# with the thread that started it.
LEASH = 'exec 3<&0; "$@" </dev/null 3<&- & child=$!; (cat <&3 >/dev/null; kill $child 2>/dev/null) & wait $child'
TAIL = 2000  # characters of its log, in an error
STOP_S = 10.0
LOOK_S = 0.05


class Started:
    """A program that runs once `is_up`. Raises `ServiceUnavailable`, with what it said, when that takes too long."""

    def __init__(self, command: Sequence[str], is_up: Callable[[], bool], within_s: float) -> None:
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  it lasts as long as the program
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", LEASH, "sh", *command], stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + within_s
        while not is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                why = f"ended with {self._process.returncode}" if self._process.returncode else "is not up"
                said = self._said()
                self.stop()
                raise ServiceUnavailable(f"{os.path.basename(command[0])} {why}: {said}")
            time.sleep(LOOK_S)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-TAIL:].decode(errors="replace").strip()


def is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def free_port(host: str) -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
