"""Calls of an engine that end in time, with an error that names it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from transfer_queue.storage.engines.engine import BlocksMissing, ReadSpan, Room, StorageEngine, engine_class
from transfer_queue.storage.in_time import in_time

T = TypeVar("T")


class GuardedEngine:
    """An engine, each of whose calls ends within its `timeout_s`. Raises `ServiceUnavailable` for one that is late and
    for whatever the engine raises besides `StoreFull` and, of a read, `BlocksMissing`; `ConfigError` when it cannot be
    opened. `place` and `for_clients`: a server's engine has said so as it was opened."""

    def __init__(self, name: str, settings: Mapping[str, Any], serves: bool, timeout_s: float) -> None:
        self.name = name
        self.where = self.place = ""
        self.for_clients: Mapping[str, Any] = settings

        def opened() -> StorageEngine:
            with contextlib.ExitStack() as given_up:
                engine = kind(settings, serves)
                given_up.callback(engine.close)
                self.where = f" at {engine.where}" if engine.where else ""
                if serves:
                    self.place, self.for_clients = engine.place, dict(engine.for_clients)
                    json.dumps(self.for_clients)  # as clients are told them
                given_up.pop_all()
            return engine

        kind = self._within(timeout_s, lambda: engine_class(name))
        self.max_nbytes = kind.max_nbytes
        self.engine = self._within(timeout_s, opened, lambda engine: engine.close())

    def reserve(self, key: str, nbytes: int, timeout_s: float) -> Room:
        def reserved() -> Room:
            room = self.engine.reserve(key, nbytes)
            if not _is_room(room, nbytes):  # whoever fills it would write into what is not the engine's
                raise TypeError(f"{room!r:.200} is no room with contiguous memory for {nbytes} bytes")
            return room

        return self._within(timeout_s, reserved, lambda room: room.abandon())

    def seal(self, room: Room, key: str, timeout_s: float) -> None:
        """Sealed too late, nobody needs it any more: it is dropped then."""
        self._within(timeout_s, room.seal, lambda _: self.engine.drop([key]))

    def abandon(self, room: Room, timeout_s: float) -> None:
        self._within(timeout_s, room.abandon)

    def read(self, spans: Sequence[ReadSpan], timeout_s: float) -> None:
        self._within(timeout_s, lambda: self.engine.read(spans), passes=(BlocksMissing,))

    def missing(self, keys: Sequence[str], timeout_s: float) -> set[str]:
        return self._within(timeout_s, lambda: set(keys).intersection(self.engine.missing(keys)))

    def drop(self, keys: Sequence[str], timeout_s: float) -> None:
        self._within(timeout_s, lambda: self.engine.drop(keys))

    def close(self, timeout_s: float) -> None:
        self._within(timeout_s, self.engine.close)

    def _within(
        self, timeout_s: float, work: Callable[[], T], undo: Callable[[T], None] = lambda found: None,
        passes: tuple[type[Exception], ...] = (),
    ) -> T:  # fmt: skip
        return in_time(f"{self.name}{self.where}", timeout_s, work, undo, passes)


def _is_room(room: Any, nbytes: int) -> bool:
    memory = getattr(room, "memory", None)
    return (
        isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 1 and len(memory) >= nbytes
        and memory.flags.c_contiguous and memory.flags.writeable
    )  # fmt: skip
