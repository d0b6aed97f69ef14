"""Which versions a server keeps: the newest ones of the weights, and of each adapter."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from transfer_queue.errors import InvalidInput
from transfer_queue.weights.transport.info import key_of
from transfer_queue.weights.transport.pending import label_of
from transfer_queue.weights.transport.serving import gone
from transfer_queue.weights.version.manifest import Manifest

T = TypeVar("T")
READING_S = 60.0  # longer than a receiver waits for a bucket before it asks elsewhere


def newest_key(label: str) -> str:
    """What to ask for to get the newest version: of the weights (""), or of an adapter."""
    return f"@{label}" if label else ""


@dataclass(frozen=True)
class _Kept(Generic[T]):
    """`body`: the manifest's. `holders`: the addresses of those that have the buckets, by rank, of several ranks."""

    body: bytes
    content: T
    holders: list[str]


class LastAsked:
    """When somebody last asked for what is held under a key."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def note(self, key: str) -> None:
        """Forgets what was long ago."""
        if key not in self._at:
            self._at = {one: at for one, at in self._at.items() if time.monotonic() - at < READING_S}
        self._at[key] = time.monotonic()

    def forget(self, key: str) -> None:
        self._at.pop(key, None)

    def lately(self, key: str) -> bool:
        """Whether that was so short ago that more may be asked for."""
        return time.monotonic() - self._at.get(key, -math.inf) < READING_S


class VersionStore(Generic[T]):
    """What a trainer gives to receivers, by the keys of manifests. Thread-safe.

    Those that come late are given the newest that was decided: not one that some receiver has refused.
    """

    def __init__(self, keep: int) -> None:
        if keep < 1:
            raise InvalidInput(f"{keep} versions to keep")
        self._keep = keep
        self._lock = threading.Lock()
        self._held: dict[str, dict[str, _Kept[T]]] = {}  # by `newest_key`, then by key, oldest first
        self._newest: dict[str, str] = {}  # by `newest_key`
        self._asked = LastAsked()

    def add(self, manifest: Manifest, content: T, holders: Sequence[str] = ()) -> None:
        """`holders`: the addresses of those that have its buckets, by rank, where that are several. Also anew, once an
        update with it has ended: who asks from then on is a late one."""
        with self._lock:
            self._asked.forget(key_of(manifest))
            held = self._held.setdefault(newest_key(label_of(manifest)), {})
            held[key_of(manifest)] = _Kept(manifest.encode(), content, list(holders))

    def decide(self, manifest: Manifest) -> list[T]:
        """This is the newest of its label from now on. Returns what is not to be fetched any more."""
        name = newest_key(label_of(manifest))
        with self._lock:
            self._newest[name] = key_of(manifest)
            held = self._held[name]
            names = list(held)  # later ones may be packed already
            past = names[: max(0, names.index(key_of(manifest)) + 1 - self._keep)]
            return [held.pop(key).content for key in past]

    def withdraw(self, manifest: Manifest) -> list[T]:
        """Nobody is to have it. Returns its content, if it was there."""
        with self._lock:
            found = self._held[newest_key(label_of(manifest))].pop(key_of(manifest), None)
        return [] if found is None else [found.content]

    def take_back(self, manifest: Manifest) -> bool:
        """Let go of it, for its content is to be written. False, and nothing is changed, when somebody reads it: has
        asked for something of it within `READING_S`."""
        key = key_of(manifest)
        with self._lock:
            if self._asked.lately(key):
                return False
            self._held.get(newest_key(label_of(manifest)), {}).pop(key, None)
            return True

    def manifest(self, key: str) -> bytes:
        return self._find(key).body

    def holders(self, key: str) -> list[str]:
        return self._find(key).holders

    def content(self, key: str) -> T:
        return self._find(key, reads=True).content

    def contents(self) -> list[T]:
        with self._lock:
            return [one.content for held in self._held.values() for one in held.values()]

    def clear(self) -> list[T]:
        """Keep nothing. Returns what was there."""
        found = self.contents()
        with self._lock:
            self._held.clear()
        return found

    def _find(self, key: str, *, reads: bool = False) -> _Kept[T]:
        """By its key, or by a `newest_key`."""
        with self._lock:
            return self._found(key, reads=reads)

    def _found(self, key: str, *, reads: bool) -> _Kept[T]:
        """As `_find`, under the lock."""
        wanted = self._newest.get(key, key)
        for held in self._held.values():
            if wanted in held:
                if reads:
                    self._asked.note(wanted)
                return held[wanted]
        raise gone(key)
