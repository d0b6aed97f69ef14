"""The process that takes part in a trial for a host, seen from the one that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile

from transfer_queue.doctor import messages as d
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable
from transfer_queue.wire import messages as m

COMMAND = ("-m", "transfer_queue.doctor.member")
END_S = 15.0
LAST_NBYTES = 2000
LAST_LINES = 3


class MemberProcess:
    """A process of its own: what a library prints, crashes or keeps for good stays in it. For one thread, but for
    `interrupt`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *COMMAND],
                stdin=theirs.fileno(),
                stdout=self._said,
                stderr=self._said,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the one who started it, who ends it in good order
            )
        self._stream = d.stream_over(ours, d.decode_answer, "the process of the trial")

    def ask(self, order: m.Message, timeout_s: float) -> m.Message:
        """The answer, which may be a `Failed`. Raises `DeadlineExceeded`, or `ServiceUnavailable` with the last words
        of a process that ended."""
        try:
            self._stream.send(order, timeout_s)
            return self._stream.receive(timeout_s, what=type(order).__name__)[0]
        except DeadlineExceeded:
            raise
        except ServiceUnavailable as error:
            raise ServiceUnavailable(f"{error}; it said: {self._last_words()}") from error

    def _last_words(self) -> str:
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - LAST_NBYTES))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-LAST_LINES:]) or "nothing"

    def interrupt(self) -> None:
        """End the call of another thread."""
        self._stream.shut()

    def close(self) -> None:
        """End it, and what it started. Takes at most some seconds."""
        self._stream.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # its server ends when it does
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()
