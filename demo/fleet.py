"""Child processes: forked from one that has imported torch, watched, and ended by whoever started them.

Nothing but start-up arguments, the environment and exit codes passes between parent and children here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

_GRACE_S = 5.0
_IMPORTED = ["torch", "tensordict", "transfer_queue.interface", "transfer_queue.weights"]  # takes seconds

Target = Callable[..., None]


class WorkerFailed(Exception):
    """A child process ended with an error; the message holds its name, exit code and last output."""


class Fleet:
    """A context: on leaving it, in whatever way, no child that it started is left."""

    def __init__(self, log_dir: Path) -> None:
        """What the children print goes to `<log_dir>/<name>.log`, so that the terminal belongs to the parent."""
        self._log_dir = log_dir
        self._running: dict[str, BaseProcess] = {}

    def start(self, name: str, target: Target, *args: object) -> None:
        """Run `target(*args)`, an importable function, in a process of its own."""
        log = self._log_path(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")  # also there when the child fails before it can open it
        context = multiprocessing.get_context("forkserver")  # that server has no threads and ends with this process
        context.set_forkserver_preload(_IMPORTED)
        given = (log, dict(os.environ), target, args)  # the fork server knows only the environment of its own start
        process = context.Process(name=name, target=_child, args=given, daemon=True)
        process.start()
        self._running[name] = process

    def wait(self, timeout_s: float) -> bool:
        """Block until a child ends, at most `timeout_s`. True when none is left.

        Raises `WorkerFailed` for the first child that ended with an error.
        """
        sentinels = {process.sentinel: name for name, process in self._running.items()}
        for sentinel in connection.wait(list(sentinels), timeout_s):
            name = sentinels[sentinel]  # type: ignore[index]  # sentinels are ints here
            process = self._running.pop(name)
            process.join()
            if process.exitcode != 0:
                raise WorkerFailed(f"worker {name!r} ended with {_reason(process.exitcode)}\n{self._last_output(name)}")
        return not self._running

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._running.clear()

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"{name.replace(' ', '-')}.log"

    def _last_output(self, name: str) -> str:
        text = self._log_path(name).read_text(errors="replace").strip()
        return "\n".join(text.splitlines()[-40:]) or "(it printed nothing)"


def _reason(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"


def _child(log: Path, environment: dict[str, str], target: Target, args: tuple[Any, ...]) -> None:
    """What runs in a child: no claim on the terminal, Ctrl-C left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    target(*args)
