"""What this process records now. Off, a question costs one look at a name of this module."""

from __future__ import annotations

import atexit
import logging
import os
from types import TracebackType
from typing import NamedTuple

from transfer_queue.errors import ConfigError, InvalidInput
from transfer_queue.trace.recorder import MAX_NBYTES, SpanRecorder
from transfer_queue.trace.telemetry import Telemetry

log = logging.getLogger("transfer_queue")

is_on = False
recorder: SpanRecorder | None = None
telemetry: Telemetry | None = None


class Told(NamedTuple):
    """The environment variables TQ_TRACE and TQ_OTEL."""

    path: str
    otel: str


_told = Told("", "")  # as they were when this process looked last
_before: Told | None = None  # as they were before `start` wrote them


class Recording:
    """What `start` returns: used with `with`, it ends with that."""

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        stop()


def start(
    path: str | os.PathLike[str] | None = None,
    *,
    otel: bool = False,
    name: str = "",
    max_nbytes: int = MAX_NBYTES,
) -> Recording:
    """Record what this process does from now on, and those do that it starts, until `stop` or the end of a `with`.

    `path`: a folder, where each process writes a file of its own; for a name that ends with `.json` or `.jsonl`, and
    for that of a file, it is that name with `.d`. `name`: what this process is called there. `max_nbytes`: of the files
    of one process, of which the newest spans stay. `otel`: also as spans of OpenTelemetry. What was recorded before
    ends. A folder that cannot be written is one warning in the log, and no error. Raises `InvalidInput`, `ConfigError`
    where `otel` is asked for and opentelemetry-api is not installed.
    """
    global _before
    if path is None and not otel:
        raise InvalidInput("start(path) or start(otel=True): there is nothing to record to")
    if path == "" or not isinstance(path, (str, os.PathLike, type(None))):
        raise InvalidInput(f"path {path!r}: expected the path of a folder")
    if type(max_nbytes) is not int or max_nbytes < 1 << 12:
        raise InvalidInput(f"max_nbytes {max_nbytes!r}: expected a whole number from 4096")
    told = Told("" if path is None else os.path.abspath(path), "1" if otel else "")
    opened = Telemetry.found() if otel else None
    if otel and opened is None:
        raise ConfigError("otel=True: opentelemetry-api is not installed; pip install 'transfer-queue[otel]'")
    stop()
    _before = Told(os.environ.get("TQ_TRACE", ""), os.environ.get("TQ_OTEL", ""))
    _announce(told)
    _begin(told, opened, name, max_nbytes)
    return Recording()


def stop() -> None:
    """Write what is left, and record no more. Waits for the disk, 5 s at most. Nothing was begun: nothing happens."""
    global is_on, recorder, telemetry, _before
    ended, recorder, telemetry, is_on = recorder, None, None, False
    if _before is not None:
        before, _before = _before, None
        _announce(before)
    if ended is not None:
        ended.close()


def start_as_told() -> None:
    """Do what TQ_TRACE and TQ_OTEL say, where this process did not do that already."""
    told = Told(os.environ.get("TQ_TRACE", ""), os.environ.get("TQ_OTEL", ""))
    if told == _told:
        return
    found = Telemetry.found() if told.otel == "1" else None
    if told.otel == "1" and found is None:
        log.warning("TQ_OTEL=1 has no effect: opentelemetry-api is not installed; pip install 'transfer-queue[otel]'")
    stop()
    _begin(told, found, "", MAX_NBYTES)


def folder_of(path: str) -> str:
    """The folder of the files of a trace that is called `path`."""
    if path.endswith((".json", ".jsonl")) or os.path.isfile(path):
        return f"{path}.d"
    return path


def _begin(told: Told, opened: Telemetry | None, name: str, max_nbytes: int) -> None:
    global is_on, recorder, telemetry, _told
    _told = told
    if told.path:
        recorder = SpanRecorder(folder_of(os.path.abspath(told.path)), name, max_nbytes, _forget)
    telemetry = opened
    is_on = recorder is not None or telemetry is not None


def _announce(told: Told) -> None:
    """Let the processes that this one starts do the same."""
    global _told
    for variable, value in (("TQ_TRACE", told.path), ("TQ_OTEL", told.otel)):
        os.environ.pop(variable, None)
        if value:
            os.environ[variable] = value
    _told = told


def _forget(failed: SpanRecorder) -> None:
    """It cannot write: the job goes on without."""
    global is_on, recorder
    if recorder is failed:
        recorder = None
        is_on = telemetry is not None


def _after_fork_in_child() -> None:
    """A forked process writes a file of its own."""
    global recorder
    if recorder is None:
        return
    recorder.leave()
    recorder = SpanRecorder(recorder.folder, "", recorder.max_nbytes, _forget)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(stop)
