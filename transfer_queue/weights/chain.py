"""The versions that a publisher keeps, and which of them take a receiver from what it has to the newest."""

from __future__ import annotations

import itertools

from transfer_queue.errors import InvalidInput, StaleBase, StaleVersion
from transfer_queue.weights.manifest import Manifest


class Chain:
    """Full versions (anchors) and the deltas between them, of one epoch. Not thread-safe.

    Every `anchor_every`-th version is to be a full one, so that a path is short and the older ones can be dropped.
    """

    def __init__(self, anchor_every: int = 10) -> None:
        if anchor_every < 1:
            raise InvalidInput(f"an anchor every {anchor_every} versions")
        self._anchor_every = anchor_every
        self._kept: list[Manifest] = []

    @property
    def newest(self) -> Manifest | None:
        return self._kept[-1] if self._kept else None

    @property
    def wants_full(self) -> bool:
        """Whether the next version is to be an anchor."""
        deltas = itertools.takewhile(lambda manifest: manifest.kind == "delta", reversed(self._kept))
        return not self._kept or len(list(deltas)) + 1 >= self._anchor_every

    def add(self, manifest: Manifest) -> list[Manifest]:
        """Append the next version; returns those that no path needs any more: all before the last anchor but one."""
        if manifest.kind == "adapter":
            raise InvalidInput("an adapter is not a version of the weights")
        last = self.newest
        if last is not None and (manifest.version <= last.version or manifest.epoch != last.epoch):
            raise StaleVersion(f"version {manifest.version} of {manifest.epoch} after {last.version} of {last.epoch}")
        if manifest.kind == "delta" and (last is None or manifest.base_root != last.root):
            raise StaleBase(f"version {manifest.version} is a delta on {manifest.base}, which is not the one before")
        self._kept.append(manifest)
        anchors = [index for index, kept in enumerate(self._kept) if kept.kind == "full"]
        first = anchors[-2] if len(anchors) > 1 else 0
        dropped, self._kept = self._kept[:first], self._kept[first:]
        return dropped

    def path(self, installed_root: str | None = None) -> list[Manifest]:
        """The versions to install, in order, with the fewest bytes to move; none when the newest is installed.

        A receiver without weights, or with ones not of this chain, begins at an anchor.
        """
        if not self._kept:
            return []
        paths = [self._kept[max(index for index, kept in enumerate(self._kept) if kept.kind == "full") :]]
        for index, kept in enumerate(self._kept):
            if kept.root == installed_root:
                paths.append(self._kept[index + 1 :])
        return min(paths, key=lambda path: (sum(manifest.nbytes for manifest in path), len(path)))
