"""KVBatchMeta: the rows of a batch, named by the user's keys."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from transfer_queue.arguments import mapping, mappings, text, texts
from transfer_queue.errors import InvalidInput, UnknownRows
from transfer_queue.metadata.columns import int_array
from transfer_queue.metadata.merge import check_kind, chunk_bounds, common_service, copy_dict, merge_extra_info

T = TypeVar("T")


@dataclass(repr=False)
class KVBatchMeta:
    """Keys with one tag dict each, their partition and the fields they have in common.

    Every meta has its own tags: those given to the constructor are copied, those taken from another meta when somebody
    first looks at them. None for `partition_id`, `fields` or `extra_info` means unknown, all, none.

    `service_id` names the life of the service that wrote the rows, b"" when it is not known. It is not a field of the
    dataclass, and not part of the value that `==` compares.

    Raises:
        InvalidInput: not one tag per key, repeated keys or fields, or something is not of its type.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys, tags = texts(self.keys, "keys"), mappings(self.tags, "tags")
        if len(self.keys) != len(tags):
            raise InvalidInput(f"keys and tags must have same length, not {len(self.keys)} and {len(tags)}")
        if len(set(self.keys)) != len(self.keys):
            raise InvalidInput("Got duplicated keys.")
        if self.partition_id is not None:
            text(self.partition_id, "partition_id")
        self.fields = None if self.fields is None else texts(self.fields, "fields")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise InvalidInput("Got duplicated fields.")
        if self.extra_info is not None:
            mapping(self.extra_info, "extra_info")
        self.tags = [copy_dict(tag) for tag in tags]
        self.extra_info = copy.deepcopy(self.extra_info)
        self._shared_tags: list[dict[str, Any]] | None = None
        self._size = len(self.keys)
        self.service_id = b""

    @classmethod
    def _build(
        cls,
        keys: list[str],
        tags: list[dict[str, Any]] | None,
        partition_id: str | None,
        fields: list[str] | None,
        extra_info: dict[str, Any] | None = None,
        service_id: bytes = b"",
    ) -> KVBatchMeta:
        """A meta without checks and per-row work; None for `tags` means all empty, for `extra_info` `{}`.

        `keys`, `fields` and `extra_info` become the meta's own; `tags` may be shared with other metas but must not
        change any more.
        """
        meta = cls.__new__(cls)
        meta.keys, meta.partition_id, meta.fields = keys, partition_id, fields
        meta.extra_info = {} if extra_info is None else extra_info
        meta._shared_tags = tags
        meta._size = len(keys)
        meta.service_id = service_id
        return meta

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> list[dict[str, Any]]:
            """`tags` on first access, when they are copied or made; nobody shares them from then on."""
            if name != "tags" or "_shared_tags" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            shared = self._shared_tags
            self.tags = [{} for _ in self.keys] if shared is None else [copy_dict(tag) for tag in shared]
            self._shared_tags = None
            return self.tags

    @property
    def size(self) -> int:
        """The number of keys when the meta was made."""
        return self._size

    def __len__(self) -> int:
        return len(self.keys)

    def _tags_of(self, where: slice | list[int]) -> list[dict[str, Any]] | None:
        """Tags of these rows that nobody can change any more; None when all are empty."""
        if "tags" in self.__dict__:
            return [copy_dict(tag) for tag in _take(self.tags, where)]
        return None if self._shared_tags is None else _take(self._shared_tags, where)

    def _part(self, where: slice | list[int]) -> KVBatchMeta:
        fields = None if self.fields is None else list(self.fields)
        part = KVBatchMeta._build(_take(self.keys, where), self._tags_of(where), self.partition_id, fields)
        part.service_id = self.service_id
        part.extra_info = copy.deepcopy(self.extra_info)
        return part

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        """The rows with these keys, in this order.

        Raises:
            InvalidInput: a key is repeated, or one text stands in place of a list of keys.
            UnknownRows: a key is not in this batch.
        """
        keys_to_select = texts(keys_to_select, "keys_to_select")
        if len(set(keys_to_select)) != len(keys_to_select):
            raise InvalidInput("keys_to_select: Contain duplicate keys.")
        positions = {key: position for position, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in positions]
        if unknown:
            raise UnknownRows(f"Keys {unknown} not found in current batch.")
        return self._part([positions[key] for key in keys_to_select])

    def reorder(self, indexes: Sequence[int]) -> None:
        """Puts the rows into this order, in place; negative positions count from the end.

        Raises:
            InvalidInput: not as many positions as rows, or one row twice.
            IndexError: a position is out of range.
        """
        wanted = int_array(indexes, "indexes").tolist()
        if len(wanted) != self.size:
            raise InvalidInput(f"reorder: a list of {len(wanted)} indexes does not match the {self.size} rows")
        order = [range(self.size)[index] for index in wanted]
        if len(set(order)) != len(order):
            raise InvalidInput("reorder: Contain duplicate indexes.")
        self.keys, self.tags = _take(self.keys, order), _take(self.tags, order)

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Split into consecutive metas, the first `size % chunks` one row longer; more chunks than rows: empty ones."""
        return [self._part(slice(start, stop)) for start, stop in chunk_bounds(self.size, chunks)]

    @classmethod
    def concat(cls, data: Iterable[KVBatchMeta | None]) -> KVBatchMeta:
        """All rows of `data`, in order; empty metas are skipped. The result's `extra_info` is None when there is none.

        Raises:
            InvalidInput: fields, partitions or extra_info differ, a key is in two of them, or something is no
                KVBatchMeta.
        """
        metas = check_kind(data, KVBatchMeta)
        if not metas:
            return cls()
        first = metas[0]
        for meta in metas:
            if meta.fields is not None and set(meta.fields) != set(first.fields or ()):
                raise InvalidInput(f"concat: Field names do not match: {meta.fields} and {first.fields}")
            if meta.partition_id != first.partition_id:
                raise InvalidInput(f"concat: Partition do not match: {meta.partition_id!r} and {first.partition_id!r}")
        keys = [key for meta in metas for key in meta.keys]
        if len(set(keys)) != len(keys):
            raise InvalidInput("concat: Got duplicated keys.")
        info = merge_extra_info((meta.extra_info for meta in metas), "concat")
        joined = cls._build(keys, _join_tags(metas), first.partition_id, first.fields and list(first.fields))
        joined.extra_info = copy.deepcopy(info) or None
        joined.service_id = common_service((meta.service_id for meta in metas), "concat")
        return joined

    def __repr__(self) -> str:
        shown = self.keys if len(self.keys) <= 8 else [*self.keys[:2], "...", self.keys[-1]]
        return (
            f"KVBatchMeta(size={self.size}, keys={shown}, partition_id={self.partition_id!r}, "
            f"field_names={self.fields}, extra_info={self.extra_info})"
        )


def _take(rows: list[T], where: slice | list[int]) -> list[T]:
    return rows[where] if isinstance(where, slice) else list(map(rows.__getitem__, where))


def _join_tags(metas: Sequence[KVBatchMeta]) -> list[dict[str, Any]] | None:
    parts = [(meta.size, meta._tags_of(slice(None))) for meta in metas]
    if all(tags is None for _, tags in parts):
        return None
    return [tag for size, tags in parts for tag in (tags if tags is not None else [{}] * size)]
