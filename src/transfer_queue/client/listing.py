"""Listing keys and tags at the cost of what changed.

A session remembers the last listing of every partition and asks the server for what changed since. What a caller gets
is a dict of its own: the outer dict is copied at memory speed, a tag dict when somebody first looks at it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from typing import Any

from transfer_queue.metadata.merge import copy_dict
from transfer_queue.wire.messages import Changes, Listing, Tags


class TagsByKey(dict[str, Tags]):
    """`{key: tag}`. An ordinary dict to its owner; tags that nobody looked at are still shared with the session."""

    __slots__ = ("_shared",)

    def __init__(self, shared: dict[str, Tags]) -> None:
        super().__init__(shared)
        self._shared: set[str] | None = None  # keys whose tag is not ours yet; None: all of the original ones

    def _own(self, key: str, tag: Tags) -> Tags:
        """`tag`, after making it ours."""
        if self._shared is None:
            self._shared = set(self)
        if key in self._shared:
            self._shared.discard(key)
            tag = copy_dict(tag)
            super().__setitem__(key, tag)
        return tag

    def _own_all(self) -> None:
        shared, self._shared = self._shared, set()
        if shared is None:
            super().update({key: copy_dict(tag) for key, tag in super().items()})
        elif shared:
            super().update({key: copy_dict(super(TagsByKey, self).__getitem__(key)) for key in shared})

    def __getitem__(self, key: str) -> Tags:
        return self._own(key, super().__getitem__(key))

    def __setitem__(self, key: str, tag: Tags) -> None:
        if self._shared is None:
            self._shared = set(self)
        self._shared.discard(key)
        super().__setitem__(key, tag)

    def get(self, key: str, default: Any = None) -> Any:
        tag = super().get(key)
        return default if tag is None else self._own(key, tag)

    def items(self) -> Any:
        self._own_all()
        return super().items()

    def values(self) -> Any:
        self._own_all()
        return super().values()

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self._own(key, super().__getitem__(key))
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Tags]:
        self._own_all()
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> dict[str, Tags]:
        self._own_all()
        return dict(super().items())

    def __reduce__(self) -> Any:
        self._own_all()
        return dict, (list(super().items()),)

    def __iter__(self) -> Iterator[str]:  # an override makes dict(self) ask `keys` and `__getitem__`, and so own tags
        return super().__iter__()


class Known:
    """The last listing of one partition."""

    def __init__(self) -> None:
        self.table = self.version = -1
        self.tags: dict[str, Tags] = {}


class Listings:
    """What a session knows of the keys of all partitions."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._lock = threading.Lock()

    def versions(self, partition: str | None) -> dict[str, tuple[int, int]]:
        """(table, version) known of one partition, or of all."""
        with self._lock:
            names = self._names(partition)
            return {name: (self._known[name].table, self._known[name].version) for name in names}

    def update(self, reply: Listing, partition: str | None) -> dict[str, dict[str, Tags]] | None:
        """Take up what changed; the listing as of now. None where another thread has learnt meanwhile that a partition
        is not the one that this is about: ask again."""
        with self._lock:
            if not all(changes.full or self._is_of(name, changes) for name, changes in reply.partitions.items()):
                return None
            for name in self._names(partition) - reply.partitions.keys():
                del self._known[name]
            return {name: TagsByKey(self._updated(name, changes)) for name, changes in reply.partitions.items()}

    def _is_of(self, name: str, changes: Changes) -> bool:
        known = self._known.get(name)
        return known is not None and known.table == changes.table

    def _names(self, partition: str | None) -> Set[str]:
        return self._known.keys() if partition is None else self._known.keys() & {partition}

    def _updated(self, name: str, changes: Changes) -> dict[str, Tags]:
        known = self._known.setdefault(name, Known())
        if known.table == changes.table and known.version > changes.version:
            return known.tags  # another thread took up a later listing
        if not (changes.full or changes.keys or changes.removed):
            known.version = changes.version
            return known.tags
        new = (
            {key: {} for key in changes.keys}
            if changes.tags is None
            else dict(zip(changes.keys, changes.tags, strict=True))
        )
        if changes.full:
            known.tags = new
        else:
            for key in changes.removed:
                known.tags.pop(key, None)
            known.tags.update(new)
        known.table, known.version = changes.table, changes.version
        return known.tags
