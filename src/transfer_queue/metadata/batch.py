"""BatchMeta: the rows of a batch, without their data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer_queue.arguments import mapping, texts
from transfer_queue.errors import InvalidInput
from transfer_queue.metadata.columns import (
    DictColumn,
    IntArray,
    Row,
    Where,
    check_length,
    int_array,
    packed_ids,
    take,
    unpacked_ids,
)
from transfer_queue.metadata.contents import REPEATED, BatchContents, same_or_list
from transfer_queue.metadata.fields import Schema, check_joinable, concat_schema, take_schema
from transfer_queue.metadata.merge import check_kind, chunk_bounds, common_service, merge_extra_info, same_value
from transfer_queue.metadata.views import SampleViews

_ALL = slice(None)


class BatchMeta(BatchContents):
    """Rows of a batch: their indexes, partitions, field schema, readiness and tags (`custom_meta`).

    Whatever an attribute returns is this meta's own: changes made to it count, and reach no other meta. The attributes
    are made on first access; slicing, chunking, joining and pickling a meta nobody looked into does no per-row work.
    The number of rows never changes; an operation on a meta whose lists were resized raises InvalidInput.

    `lease` is the number of the lease that the rows are held on, 0 for none. Parts and copies share it; joined metas
    have it when it is the only one among them. `service_id` names the life of the service that the rows and the lease
    are of (b"": not known); another life refuses them. `redelivered` says by global index of rows that came back to
    their task how often and why. None of the three is part of the value that `==` compares.

    `extra_info["repeated"]` counts rows of this meta that are there once more; parts and joined metas count theirs.
    """

    __slots__ = ()

    def __init__(
        self,
        global_indexes: Iterable[int] = (),
        partition_ids: Iterable[str] = (),
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: npt.ArrayLike | None = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """One entry per row everywhere; without `production_status` no row is ready.

        Raises:
            InvalidInput: lengths differ, or something is not of the type that is named here.
        """
        ids = int_array(global_indexes, "global_indexes").copy()
        parts = texts(partition_ids, "partition_ids")
        info = {} if extra_info is None else dict(mapping(extra_info, "extra_info"))
        check_length(parts, len(ids), "partition_ids")
        self._fill(ids, same_or_list(parts), {}, 0, info, None, None)
        if field_schema is not None:
            self.field_schema = field_schema
        if production_status is not None:
            self.production_status = production_status
        self._tags = DictColumn.given(self._size, custom_meta, "custom_meta")
        self._backend = DictColumn.given(self._size, _custom_backend_meta, "_custom_backend_meta")

    @property
    def samples(self) -> SampleViews:
        """Read-only views of the rows."""
        return SampleViews(self)

    @classmethod
    def _build(
        cls,
        indexes: IntArray,
        partition: str,
        schema: Schema,
        ready: bool | npt.NDArray[np.int8],
        tags: list[Row] | None,
        service_id: bytes = b"",
    ) -> BatchMeta:
        """A meta of one partition, unchecked and without per-row work. All arguments become the meta's own."""
        status = ready if isinstance(ready, np.ndarray) else int(ready)
        tag_column = DictColumn(len(indexes), tags)
        meta = cls.__new__(cls)._fill(indexes, partition, schema, status, {}, tag_column, None)
        meta.service_id = service_id
        return meta

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        """A meta without rows."""
        return cls(extra_info=extra_info)

    # ---- parts of a batch ----

    def _take(self, where: Where) -> BatchMeta:
        size = len(range(self._size)[where]) if isinstance(where, slice) else len(where)
        parts = self._parts
        part = type(self).__new__(type(self))
        part._fill(
            self._indexes_at(where),
            parts if isinstance(parts, str) else same_or_list(take(self._partition_list(), where)),
            take_schema(self._frozen_schema(), where),
            self._status if isinstance(self._status, int) else self._status[where].copy(),
            dict(self.extra_info),
            self._tags.take(where, size),
            self._backend.take(where, size),
        )
        part.lease, part.service_id = self.lease, self.service_id
        repeated = self._repeated_rows()
        if repeated is not None:
            part._set_repeated_rows(repeated[where])
        if self.redelivered:
            kept = part.indexes.tolist()
            part.redelivered = {row: self.redelivered[row] for row in kept if row in self.redelivered}
        return part

    def select_samples(self, sample_indices: Iterable[int]) -> BatchMeta:
        """The rows at these positions, in this order; repeats are allowed.

        Raises:
            InvalidInput: a position is negative or too large.
        """
        positions = int_array(sample_indices, "sample_indices")
        if positions.size and (positions.min() < 0 or positions.max() >= self._size):
            raise InvalidInput(f"sample_indices must be in [0, {self._size})")
        return self._take(positions)

    def __getitem__(self, item: int | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self._take(item)
        if not isinstance(item, (int, np.integer)):
            raise TypeError(f"a BatchMeta is indexed by an int or a slice, not {type(item).__name__}")
        position = item + self._size if item < 0 else item
        if not 0 <= position < self._size:
            raise IndexError(f"row {item} of {self._size}")
        return self._take(slice(position, position + 1))

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """All rows with only these fields; unknown names are ignored and readiness stays as it is."""
        field_names = texts(field_names, "field_names")
        chosen = self.copy()
        chosen._schema = {name: chosen._schema[name] for name in field_names if name in chosen._schema}
        if not self._backend.blank:
            kept = [{k: v for k, v in row.items() if k[:1] == "_" or k in field_names} for row in self._backend.read()]
            chosen._backend = DictColumn.given(self._size, kept, "_custom_backend_meta")
        return chosen

    def copy(self) -> BatchMeta:
        """An independent copy."""
        copied = self._take(_ALL)
        copied.extra_info = copy.deepcopy(self.extra_info)
        return copied

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Split into consecutive metas, the first `size % chunks` one row longer; more chunks than rows: empty ones."""
        return [self._take(slice(start, stop)) for start, stop in chunk_bounds(self._size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One meta per partition, in the order in which the partitions first appear."""
        positions: dict[str, list[int]] = {}
        if isinstance(self._parts, str):
            return [self._take(_ALL)] if self._size else []
        for position, partition in enumerate(self._partition_list()):
            positions.setdefault(partition, []).append(position)
        return [self._take(np.array(found)) for found in positions.values()]

    def reorder(self, indices: Iterable[int]) -> None:
        """Puts the rows into this order, in place.

        Raises:
            InvalidInput: not every position exactly once.
        """
        order = int_array(indices, "indices")
        check_length(order, self._size, "indices")
        if not np.array_equal(np.sort(order), np.arange(self._size)):
            raise InvalidInput(f"indices must have each of [0, {self._size}) once, without duplicates")
        moved = self._take(order)
        for slot in BatchContents.__slots__:
            if slot != "extra_info":
                setattr(self, slot, getattr(moved, slot))

    # ---- joining ----

    def union(self, other: BatchMeta | None) -> BatchMeta:
        """The same rows with the fields of both; `other` wins where both have one, a row is ready if it is in both.

        An empty or missing side gives a copy of the other one.

        Raises:
            InvalidInput: the rows or their partitions differ, or `other` is no BatchMeta.
        """
        if other is not None and not isinstance(other, BatchMeta):
            raise InvalidInput(f"union: expected a BatchMeta, got {type(other).__qualname__}")
        if not other:
            return self.copy()
        if not self:
            return other.copy()
        if not np.array_equal(self.indexes, other.indexes):
            raise InvalidInput("union: global_indexes do not match")
        if self._partition_list() != other._partition_list():
            raise InvalidInput("union: partition_ids do not match")
        joined = self.copy()
        joined._schema = {**joined._schema, **other._frozen_schema()}
        joined.production_status = np.bitwise_and(self._status, other._status) * np.ones(self._size, np.int8)
        joined.extra_info = {**self.extra_info, **other.extra_info}
        joined.lease = _common_lease((self, other))
        joined.redelivered = {**self.redelivered, **other.redelivered}
        joined.service_id = common_service((self.service_id, other.service_id), "union")
        joined._tags = DictColumn.union(self._tags, other._tags)
        joined._backend = DictColumn.union(self._backend, other._backend)
        return joined

    @classmethod
    def concat(cls, data: Sequence[BatchMeta | None], validate: bool = True) -> BatchMeta:
        """All rows of `data`, in order; empty metas are skipped, repeated rows are kept.

        `validate=False` skips the comparison of fields, and the first meta's fields count.

        Raises:
            InvalidInput: the field names differ, extra_info gives one key two values, or something is no BatchMeta.
            SchemaConflict: the dtypes differ.
        """
        metas = check_kind(data, BatchMeta)
        if not metas:
            return cls.empty()
        schemas = [meta._frozen_schema() for meta in metas]
        if validate:
            check_joinable(schemas)
        joined = cls.__new__(cls)._fill(
            np.concatenate([meta.indexes for meta in metas]),
            _join_parts(metas),
            concat_schema(schemas, [meta.size for meta in metas]),
            _join_status(metas),
            merge_extra_info(map(_own_extra_info, metas), "concat"),
            DictColumn.concat([meta._tags for meta in metas]),
            DictColumn.concat([meta._backend for meta in metas]),
        )
        repeated = [meta._repeated_rows() for meta in metas]
        if any(rows is not None for rows in repeated):
            parts = zip(metas, repeated, strict=True)
            joined._set_repeated_rows(
                np.concatenate([np.zeros(meta.size, np.bool_) if rows is None else rows for meta, rows in parts])
            )
        joined.lease = _common_lease(metas)
        joined.redelivered = {row: one for meta in metas for row, one in meta.redelivered.items()}
        joined.service_id = common_service((meta.service_id for meta in metas), "concat")
        return joined

    # ---- value ----

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchMeta):
            return NotImplemented
        return (
            np.array_equal(self.indexes, other.indexes)
            and self._partition_list() == other._partition_list()
            and np.array_equal(self.production_status, other.production_status)
            and same_value(self._schema, other._schema)
            and same_value(self.extra_info, other.extra_info)
            and self._tags.same(other._tags)
            and self._backend.same(other._backend)
        )

    def __hash__(self) -> int:
        return hash((BatchMeta, self._size))  # the only part of the value that cannot change

    def __getstate__(self) -> tuple[Any, ...]:
        status = self._status if isinstance(self._status, int) else self._status.tobytes()
        parts = self._parts if isinstance(self._parts, str) else same_or_list(self._partition_list())
        columns = (self._tags.state(), self._backend.state())
        return (
            packed_ids(self.indexes),
            parts,
            self._frozen_schema(),
            status,
            self.extra_info,
            *columns,
            self.lease,
            self.service_id,
            dict(self.redelivered),
            self._repeated,
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        packed, parts, schema, status, extra_info, tags, backend, lease, service_id, redelivered, repeated = state
        ids = unpacked_ids(packed)
        if isinstance(status, bytes):
            status = np.frombuffer(status, np.int8).copy()
        size = len(ids)
        self._fill(ids, parts, schema, status, extra_info, DictColumn(size, *tags), DictColumn(size, *backend))
        self.lease, self.service_id, self.redelivered, self._repeated = lease, service_id, redelivered, repeated

    def __repr__(self) -> str:
        ids = self.indexes
        shown = ids.tolist() if self._size <= 8 else f"[{ids[0]}, {ids[1]}, ..., {ids[-1]}]"
        parts = sorted(set(self._partition_list()))
        return (
            f"BatchMeta(size={self._size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"partitions={parts}, global_indexes={shown}, extra_info={sorted(self.extra_info, key=str)})"
        )


def _common_lease(metas: Sequence[BatchMeta]) -> int:
    """The lease of those that have one, 0 when they have several."""
    leases = {meta.lease for meta in metas} - {0}
    return leases.pop() if len(leases) == 1 else 0


def _own_extra_info(meta: BatchMeta) -> Mapping[str, Any]:
    """What `extra_info` says of the batch, and not of rows in it."""
    if meta._repeated_rows() is None:
        return meta.extra_info
    return {key: value for key, value in meta.extra_info.items() if key != REPEATED}


def _join_parts(metas: Sequence[BatchMeta]) -> str | list[str]:
    first = metas[0]._parts
    if isinstance(first, str) and all(meta._parts == first for meta in metas):
        return first
    return same_or_list(list(chain.from_iterable(meta._partition_list() for meta in metas)))


def _join_status(metas: Sequence[BatchMeta]) -> int | npt.NDArray[np.int8]:
    first = metas[0]._status
    if isinstance(first, int) and all(isinstance(meta._status, int) and meta._status == first for meta in metas):
        return first
    return np.concatenate([np.full(meta.size, meta._status, np.int8) for meta in metas])
