"""The command `tq`, as a person runs it: into a pipe, and on a terminal of some size."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator

from paths import SOURCES
from zygote import CHILDREN, Forked

CODE = "from transfer_queue.cli import main; main()"
# Whoever imports readline has LINES and COLUMNS of its own terminal in its environment.
ENVIRONMENT = {
    name: value for name, value in os.environ.items()
    if not name.startswith("TQ_") and name not in ("LINES", "COLUMNS")
} | {"PYTHONPATH": SOURCES}  # fmt: skip
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")
HOME = "\x1b[H"  # a frame of `tq top` begins with it


def tq(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return CHILDREN.run(["-c", CODE, *arguments], {**ENVIRONMENT, **environment})


@contextlib.contextmanager
def served(run_dir: str, *options: str) -> Iterator[Forked]:
    """A standalone service, ended by SIGTERM."""
    server = CHILDREN.start(["-c", CODE, "serve", "--run-dir", run_dir, *options], ENVIRONMENT)
    with server.stdin, server.stdout:
        assert json.loads(server.stdout.readline())["unix"] == f"{os.path.abspath(run_dir)}/tq.sock"
        try:
            yield server
        finally:
            server.send_signal(signal.SIGCONT)
            server.send_signal(signal.SIGTERM)
            server.wait(20)


class Terminal:
    """A command on a terminal of `rows` and `columns`. `text` is all that it wrote."""

    def __init__(self, *arguments: str, rows: int = 24, columns: int = 80, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(slave)
        self.text = ""
        self.process = CHILDREN.start_on(
            slave, ["-c", CODE, *arguments], {"TERM": "xterm-256color", **ENVIRONMENT, **environment}
        )
        self._slave = slave  # kept: what was written is not lost with the process

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read(self, timeout_s: float = 0.1) -> None:
        """What comes within this time."""
        while select.select([self._master], [], [], timeout_s)[0]:
            self.text += os.read(self._master, 1 << 16).decode()
            timeout_s = 0.0

    def shows(self, text: str) -> bool:
        """Whether the last whole frame has it. Reads on."""
        self.read()
        return text in "\n".join(self.frame())

    def frame(self) -> list[str]:
        """The lines of the last whole frame, without styles."""
        frames = self.text.split(HOME)
        return ESCAPES.sub("", frames[-2]).splitlines() if len(frames) > 2 else []

    def end(self, timeout_s: float = 30) -> int:
        """Wait for the end; the exit status."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text[-2000:]
            self.read(0.02)
        self.read()
        return self.process.returncode

    @property
    def settings(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)
