"""Calls of an engine that end in time, with an error that names it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from transfer_queue.errors import ServiceUnavailable, TransferQueueError
from transfer_queue.storage.engines.engine import BlocksMissing, Room, Span, engine_class

T = TypeVar("T")


class GuardedEngine:
    """An engine, each of whose calls ends within its `timeout_s`.

    A library may block for minutes when its server is frozen, and no thread can be stopped: a call that is late goes on
    in a thread of its own, which holds the memory that it writes into, and what comes of it counts no more. Raises
    `ServiceUnavailable` for that and for whatever the engine raises besides `StoreFull` and `BlocksMissing`;
    `ConfigError` when it cannot be opened.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], serves: bool, timeout_s: float) -> None:
        self.name = name
        self._where = ""
        kind = self._within(timeout_s, lambda: engine_class(name))
        self.max_nbytes = kind.max_nbytes
        self.engine = self._within(timeout_s, lambda: kind(settings, serves))
        self._where = f" at {self.engine.where}" if self.engine.where else ""

    def reserve(self, key: str, nbytes: int, timeout_s: float) -> Room:
        return self._within(timeout_s, lambda: self.engine.reserve(key, nbytes), lambda room: room.abandon())

    def seal(self, room: Room, timeout_s: float) -> None:
        self._within(timeout_s, room.seal)

    def abandon(self, room: Room, timeout_s: float) -> None:
        self._within(timeout_s, room.abandon)

    def read(self, spans: Sequence[Span], timeout_s: float) -> None:
        self._within(timeout_s, lambda: self.engine.read(spans))

    def missing(self, keys: Sequence[str], timeout_s: float) -> set[str]:
        return self._within(timeout_s, lambda: self.engine.missing(keys))

    def drop(self, keys: Sequence[str], timeout_s: float) -> None:
        self._within(timeout_s, lambda: self.engine.drop(keys))

    def close(self, timeout_s: float) -> None:
        self._within(timeout_s, self.engine.close)

    def _within(self, timeout_s: float, work: Callable[[], T], undo: Callable[[T], None] = lambda found: None) -> T:
        """What `work` returns; what comes too late is undone."""
        call = _Call(work, undo)
        threading.Thread(target=call.run, name="tq-engine", daemon=True).start()
        if not call.wait(timeout_s):
            raise ServiceUnavailable(f"{self.name}{self._where} did not answer within {timeout_s:g} s")
        if call.error is None:
            return call.found
        if isinstance(call.error, (TransferQueueError, BlocksMissing)):
            raise call.error
        if isinstance(call.error, ImportError):
            raise ServiceUnavailable(f"{self.name} is not installed on this host: {call.error}") from call.error
        raise ServiceUnavailable(f"{self.name}{self._where}: {call.error}") from call.error


class _Call:
    def __init__(self, work: Callable[[], Any], undo: Callable[[Any], None]) -> None:
        self.found: Any = None
        self.error: Exception | None = None
        self._work, self._undo = work, undo
        self._lock = threading.Lock()
        self._is_late = False
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            found, error = self._work(), None
        except Exception as raised:  # noqa: BLE001  an engine may be anybody's; whoever waits gets it
            found, error = None, raised
        with self._lock:
            self.found, self.error = found, error
            self._ended.set()
            is_late = self._is_late
        if is_late and error is None:
            self._undo(found)

    def wait(self, timeout_s: float) -> bool:
        if self._ended.wait(timeout_s):
            return True
        with self._lock:
            self._is_late = not self._ended.is_set()
            return not self._is_late
