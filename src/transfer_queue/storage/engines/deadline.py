"""Calls of an engine that end in time, with an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from transfer_queue.storage.engines.engine import BlocksMissing, ReadSpan, Room, engine_class
from transfer_queue.storage.in_time import in_time

T = TypeVar("T")


class GuardedEngine:
    """An engine, each of whose calls ends within its `timeout_s`. Raises `ServiceUnavailable` for one that is late and
    for whatever the engine raises besides `StoreFull` and `BlocksMissing`; `ConfigError` when it cannot be opened."""

    def __init__(self, name: str, settings: Mapping[str, Any], serves: bool, timeout_s: float) -> None:
        self.name = name
        self.where = ""
        kind = self._within(timeout_s, lambda: engine_class(name))
        self.max_nbytes = kind.max_nbytes
        self.engine = self._within(timeout_s, lambda: kind(settings, serves), lambda engine: engine.close())
        self.where = f" at {self.engine.where}" if self.engine.where else ""

    def reserve(self, key: str, nbytes: int, timeout_s: float) -> Room:
        return self._within(timeout_s, lambda: self.engine.reserve(key, nbytes), lambda room: room.abandon())

    def seal(self, room: Room, key: str, timeout_s: float) -> None:
        """Sealed too late, nobody needs it any more: it is dropped then."""
        self._within(timeout_s, room.seal, lambda _: self.engine.drop([key]))

    def abandon(self, room: Room, timeout_s: float) -> None:
        self._within(timeout_s, room.abandon)

    def read(self, spans: Sequence[ReadSpan], timeout_s: float) -> None:
        self._within(timeout_s, lambda: self.engine.read(spans))

    def missing(self, keys: Sequence[str], timeout_s: float) -> set[str]:
        return self._within(timeout_s, lambda: self.engine.missing(keys))

    def drop(self, keys: Sequence[str], timeout_s: float) -> None:
        self._within(timeout_s, lambda: self.engine.drop(keys))

    def close(self, timeout_s: float) -> None:
        self._within(timeout_s, self.engine.close)

    def _within(self, timeout_s: float, work: Callable[[], T], undo: Callable[[T], None] = lambda found: None) -> T:
        return in_time(f"{self.name}{self.where}", timeout_s, work, undo, (BlocksMissing,))
