"""Which versions a server keeps: the newest ones of the weights, and of each adapter."""

from __future__ import annotations

from typing import Generic, TypeVar

from transfer_queue.errors import InvalidInput
from transfer_queue.weights.engines.serving import gone
from transfer_queue.weights.engines.trainer import key_of
from transfer_queue.weights.manifest import Manifest

T = TypeVar("T")


def newest_key(label: str) -> str:
    """What to ask for to get the newest version: of the weights (""), or of an adapter."""
    return f"@{label}" if label else ""


class Kept(Generic[T]):
    """Things by the keys of their manifests. Not thread-safe."""

    def __init__(self, keep: int) -> None:
        if keep < 1:
            raise InvalidInput(f"{keep} versions to keep")
        self._keep = keep
        self._held: dict[str, dict[str, tuple[bytes, T]]] = {}  # by `newest_key`, then by key, oldest first

    def add(self, manifest: Manifest, thing: T) -> list[T]:
        """Keep it; returns those that are not kept any more."""
        label = manifest.label if manifest.kind == "adapter" else ""
        held = self._held.setdefault(newest_key(label), {})
        held[key_of(manifest)] = (manifest.encode(), thing)
        return [held.pop(key)[1] for key in list(held)[: -self._keep]]

    def find(self, key: str) -> tuple[bytes, T]:
        """The manifest and the thing with this key, or the newest one (`newest_key`); `VersionGone`."""
        if key in self._held:
            key, held = next(reversed(self._held[key])), self._held[key]
        else:
            held = next((held for held in self._held.values() if key in held), {})
        if key not in held:
            raise gone(key)
        return held[key]

    def things(self) -> list[T]:
        return [thing for held in self._held.values() for _, thing in held.values()]

    def clear(self) -> None:
        self._held.clear()
