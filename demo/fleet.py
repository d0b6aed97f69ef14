"""Child processes: forked from a server that has imported what they need, watched, and ended by whoever started them.

Nothing but start-up arguments and exit codes passes between parent and children here.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

_GRACE_S = 5.0
_LAST_LINES = 40
_ASKING_TO_END = (signal.SIGINT, signal.SIGTERM)

Target = Callable[..., None]


def import_ahead(modules: Sequence[str]) -> None:
    """Start the server that children are forked from, and have it import these meanwhile. Does not wait for it."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    with _unasked():
        forkserver.ensure_running()


class WorkerFailed(Exception):
    """A child process ended with an error; the message holds its name, exit code and last output."""


class Death(NamedTuple):
    """A child that a signal ended."""

    name: str
    pid: int
    reason: str
    """The signal's name."""
    last_output: str


class Fleet:
    """A context: on leaving it, in whatever way, no child that it started is left."""

    def __init__(self, log_dir: Path, *, on_death: Callable[[Death], None] | None = None) -> None:
        """What the children print goes to `<log_dir>/<name>.log`, so that the terminal belongs to the parent.

        `on_death` is told of a child that was killed by a signal, and may start another of its name; without it, and
        for a child that raised, `wait` raises.
        """
        self._log_dir = log_dir
        self._on_death = on_death
        self._running: dict[str, BaseProcess] = {}
        self._known: set[str] = set()
        self._context = multiprocessing.get_context("forkserver")

    def start(self, name: str, target: Target, *args: object) -> None:
        """Run `target(*args)`, an importable function, in a process of its own. A child before it keeps its log."""
        log = self._log_path(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        if name not in self._known:
            self._known.add(name)
            log.write_text("")  # also there when the child fails before it can open it
        process = self._context.Process(
            name=name, target=_child, args=(log, dict(os.environ), target, args), daemon=True
        )
        with _unasked():
            process.start()
            self._running[name] = process

    def pids(self) -> dict[str, int]:
        """Of the children that run."""
        return {name: process.pid for name, process in self._running.items() if process.pid is not None}

    def wait(self, timeout_s: float) -> bool:
        """Block until a child ends, at most `timeout_s`. True when none is left.

        Raises `WorkerFailed` for the first child that ended with an error, and what `on_death` raises.
        """
        sentinels = {process.sentinel: name for name, process in self._running.items()}
        for sentinel in connection.wait(list(sentinels), timeout_s):
            name = sentinels[sentinel]  # type: ignore[index]  # sentinels are ints here
            process = self._running.pop(name)
            process.join()
            if process.exitcode != 0:
                self._bury(name, process)
        return not self._running

    def _bury(self, name: str, process: BaseProcess) -> None:
        assert process.pid is not None
        death = Death(name, process.pid, _reason(process.exitcode), self._last_output(name))
        if self._on_death is None or process.exitcode is None or process.exitcode > 0:
            raise WorkerFailed(f"worker {name!r} ended with {death.reason}\n{death.last_output}")
        self._on_death(death)

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
        return "\n".join(text.splitlines()[-_LAST_LINES:]) or "(it printed nothing)"


def _reason(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"


@contextmanager
def _unasked() -> Iterator[None]:
    """No interrupt within: it comes right after. A child, and the server that forks them, is born deaf to them."""
    resource_tracker.ensure_running()  # it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(log: Path, environment: dict[str, str], target: Target, args: tuple[Any, ...]) -> None:
    """What runs in a child: no claim on the terminal, Ctrl-C left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING_TO_END)
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environment)  # the server that forks has that of its own start: before the service had an address
    _hush()
    target(*args)


def _hush() -> None:
    """Last words are about what ended the worker: what libraries say of their own future is left out."""
    warnings.filterwarnings("ignore", module=r"(torch|tensordict)\b")
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
