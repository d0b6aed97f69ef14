"""What every storage engine does, and how one is opened by its name."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from transfer_queue.memory.bytes import Bytes
from transfer_queue.storage.plugins import plugin

GROUP = "transfer_queue.storage_engines"
BUILT_IN = {
    "Files": "transfer_queue.storage.engines.files:Files",
    "MooncakeStore": "transfer_queue.storage.engines.mooncake:MooncakeStore",
    "RayStore": "transfer_queue.storage.engines.ray_store:RayStore",
    "Yuanrong": "transfer_queue.storage.engines.yuanrong:Yuanrong",
}


class BlocksMissing(Exception):
    """The engine has nothing under these keys."""

    def __init__(self, keys: Collection[str]) -> None:
        super().__init__(f"nothing under {sorted(keys)[:4]}")
        self.keys = frozenset(keys)


class ReadSpan(NamedTuple):
    """The bytes from `offset` of what lies under `key`, and where they are wanted: uint8, as many as they are long."""

    key: str
    offset: int
    into: Bytes


class Room(abc.ABC):
    """Memory (uint8) for one object that is being written; nobody sees it before `seal`."""

    memory: Bytes

    @abc.abstractmethod
    def seal(self) -> None:
        """From now on it can be read, by everybody and whole. Raises `StoreFull` where only now no place is found."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Give it up, unsealed."""


class StagedRoom(Room):
    """Memory of this process, of an engine that gives none of its own to be filled. `store` copies it there; `drop`
    removes what a `store` that failed may have left (None: nothing that could be read)."""

    def __init__(self, memory: Bytes, store: Callable[[Bytes], None], drop: Callable[[], None] | None = None) -> None:
        self.memory = memory
        self._store, self._drop = store, drop
        self._is_tried = False

    def seal(self) -> None:
        self._is_tried = True
        self._store(self.memory)

    def abandon(self) -> None:
        self.memory = self.memory[:0].copy()
        if self._is_tried and self._drop is not None:
            with contextlib.suppress(OSError):
                self._drop()


class StorageEngine(abc.ABC):
    """One process's access to an engine. Calls block and may come from several threads; none needs a timeout, for
    whoever calls keeps the time (`deadline`).

    A key is written once and never again. What is stored must stay until it is dropped: an engine that may evict is
    told not to. `StoreFull` says that there is no room now, `BlocksMissing` of a read that something is gone; anything
    else that is raised counts as "the engine does not answer", with its text. The properties are asked once, when it
    was opened.

    `name` is what `backend.storage_backend` says. `max_nbytes` bounds one object (None: nothing does). `can_fork`: it
    can be opened in a process that was forked from one that had it open. `survives`: what is sealed is still there when
    the server that opened it was killed ("process"; a standby opens it anew, with `for_clients`), or when its host lost
    power as well, where the settings say `durable: true` ("machine").
    """

    name: ClassVar[str]
    max_nbytes: ClassVar[int | None] = None
    can_fork: ClassVar[bool] = True
    survives: ClassVar[Literal["none", "process", "machine"]] = "none"

    @abc.abstractmethod
    def __init__(self, settings: Mapping[str, Any], serves: bool) -> None:
        """`settings`: the section `backend.NAME`. `serves`: this process is the server, which may start what the engine
        needs and lends it memory; a client only uses it. Raises `ConfigError`, and ImportError where its library is
        not installed."""

    @property
    def where(self) -> str:
        """Where it is, for people."""
        return ""

    @property
    def place(self) -> str:
        """What names this place and no other, as long as what is stored there is there ("": nothing does). With a
        server's engine: made where there is none."""
        return ""

    @property
    def for_clients(self) -> Mapping[str, Any]:
        """With a server's engine: the settings by which clients reach the same."""
        return {}

    @abc.abstractmethod
    def reserve(self, key: str, nbytes: int) -> Room: ...

    @abc.abstractmethod
    def read(self, spans: Sequence[ReadSpan]) -> None:
        """Fill every span. The memory is contiguous; spans of one key do not overlap and ascend."""

    @abc.abstractmethod
    def missing(self, keys: Sequence[str]) -> set[str]:
        """Those of the keys under which nothing can be read any more. Raises where nobody knows: what is missing is
        given up for good."""

    @abc.abstractmethod
    def drop(self, keys: Sequence[str]) -> None:
        """Delete; keys under which nothing lies are ignored."""

    def close(self) -> None:  # noqa: B027  most have nothing to let go of
        """Let go of it; a server's engine also ends what it started."""


def engine_class(name: str) -> type[StorageEngine]:
    """The engine of that name: one of ours, or an entry point of the group `transfer_queue.storage_engines`. Raises
    `ConfigError`."""
    return plugin(name, StorageEngine, BUILT_IN, GROUP, "backend.storage_backend", ("SimpleStorage",))  # type: ignore[type-abstract]
