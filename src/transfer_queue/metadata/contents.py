"""What a BatchMeta holds: arrays and shared dicts inside, the lists of the public surface on access."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from transfer_queue.arguments import items, mapping, texts
from transfer_queue.errors import InvalidInput
from transfer_queue.metadata.columns import DictColumn, IntArray, Row, Where, check_length, int_array, take
from transfer_queue.metadata.fields import Schema, check_schema, copy_schema, row_shapes, schema_of

if TYPE_CHECKING:
    from tensordict import TensorDict

Self = TypeVar("Self", bound="BatchContents")


class Redelivered(NamedTuple):
    """A task had a row on a lease `attempts` times before, and did not use it; the last time for this `reason`."""

    attempts: int
    reason: str


REPEATED = "repeated"  # in `extra_info`: how many rows are there once more, at the end of a batch that was fetched
NEVER: Mapping[int, Redelivered] = MappingProxyType({})


class BatchContents:
    """The attributes of a BatchMeta and the changes that can be made to them in place.

    Whatever an attribute returns is this meta's own: changes made to it count, and reach no other meta.
    """

    __slots__ = (
        "_backend", "_carried", "_ids", "_parts", "_repeated", "_schema", "_schema_shown", "_size", "_status", "_tags",
        "extra_info", "lease", "redelivered", "service_id",
    )  # fmt: skip

    extra_info: dict[str, Any]
    lease: int  # the lease the rows are held on, 0 for none; parts share it
    redelivered: Mapping[int, Redelivered]  # by global index, of rows that came back before
    _carried: object  # what the client that fetched the rows knows of them; no copy or part has it
    _repeated: npt.NDArray[np.bool_] | None  # which rows `REPEATED` counts; None: the last ones
    service_id: bytes  # the life of the service that named the rows, b"" when it is not known
    _ids: IntArray | list[int]  # a read-only array until it was shown as a list
    _parts: str | list[str]  # one partition for all rows until it was shown as a list
    _status: int | npt.NDArray[np.int8]  # one value for all rows until it was shown as an array

    def _fill(
        self: Self,
        ids: IntArray,
        parts: str | list[str],
        schema: Schema,
        status: int | npt.NDArray[np.int8],
        extra_info: dict[str, Any],
        tags: DictColumn | None,
        backend: DictColumn | None,
    ) -> Self:
        if ids.flags.writeable:  # through a view: the caller's own array stays writable
            ids = ids.view()
            ids.flags.writeable = False
        self._size = len(ids)
        self._ids, self._parts = ids, parts
        self._schema, self._schema_shown = schema, False
        self._status = status
        self.extra_info = extra_info
        self.lease = 0
        self.redelivered = NEVER
        self.service_id = b""
        self._carried = None
        self._repeated = None
        self._tags = tags or DictColumn(self._size)
        self._backend = backend or DictColumn(self._size)
        return self

    # ---- rows ----

    @property
    def size(self) -> int:
        """The number of rows."""
        return self._size

    def __len__(self) -> int:
        return self._size

    @property
    def indexes(self) -> IntArray:
        """The rows' global indexes, shape (size,), read-only."""
        return self._indexes_at(slice(None))

    def _indexes_at(self, where: Where) -> IntArray:
        if not isinstance(self._ids, list):
            return self._ids[where]
        check_length(self._ids, self._size, "global_indexes")
        return int_array(take(self._ids, where), "global_indexes")

    @property
    def global_indexes(self) -> list[int]:
        """The rows' global indexes."""
        if not isinstance(self._ids, list):
            shown: list[int] = self._ids.tolist()
            self._ids = shown
        return self._ids

    @global_indexes.setter
    def global_indexes(self, values: Iterable[int]) -> None:
        ids = int_array(values, "global_indexes")
        check_length(ids, self._size, "global_indexes")
        self._ids = ids.tolist()

    @property
    def sole_partition(self) -> str:
        """The partition that all rows are in.

        Raises:
            InvalidInput: the rows span several partitions, or there is no row to tell it from.
        """
        parts = self._parts if isinstance(self._parts, str) else same_or_list(self._partition_list())
        if not isinstance(parts, str):
            raise InvalidInput(f"the rows are not in one partition but in {sorted(set(parts))}")
        return parts

    @property
    def partition_ids(self) -> list[str]:
        """The partition of each row."""
        if isinstance(self._parts, str):
            self._parts = [self._parts] * self._size
        return self._parts

    @partition_ids.setter
    def partition_ids(self, values: Iterable[str]) -> None:
        parts = texts(values, "partition_ids")
        check_length(parts, self._size, "partition_ids")
        self._parts = parts

    def _partition_list(self) -> list[str]:
        if isinstance(self._parts, str):
            return [self._parts] * self._size
        check_length(self._parts, self._size, "partition_ids")
        return self._parts

    # ---- fields and readiness ----

    @property
    def field_schema(self) -> Schema:
        """`{field: {dtype, shape, is_nested, is_non_tensor[, per_sample_shapes]}}`."""
        if not self._schema_shown:
            self._schema, self._schema_shown = copy_schema(self._schema), True
        return self._schema

    @field_schema.setter
    def field_schema(self, schema: Mapping[str, Mapping[str, Any]]) -> None:
        check_schema(schema, self._size)
        self._schema, self._schema_shown = copy_schema(schema), True

    def _frozen_schema(self) -> Schema:
        return copy_schema(self._schema) if self._schema_shown else self._schema

    @property
    def field_names(self) -> list[str]:
        """The fields, sorted."""
        return sorted(self._schema)

    @property
    def production_status(self) -> npt.NDArray[np.int8]:
        """1 per row whose fields are written, else 0; shape (size,)."""
        if isinstance(self._status, int):
            self._status = np.full(self._size, self._status, np.int8)
        return self._status

    @production_status.setter
    def production_status(self, values: npt.ArrayLike) -> None:
        status = _status_array(values)
        check_length(status, self._size, "production_status")
        self._status = status

    @property
    def is_ready(self) -> bool:
        """Whether there are rows and all of them are ready."""
        return self._size > 0 and bool(np.all(np.equal(self._status, 1)))

    def get_dtypes(self, field_name: str) -> list[Any]:
        """The field's dtype once per row. KeyError for an unknown field."""
        return [self._spec(field_name).get("dtype")] * self._size

    def get_shapes(self, field_name: str) -> list[Any]:
        """The shape of the field in each row. KeyError for an unknown field."""
        return row_shapes(self._spec(field_name), self._size)

    def _spec(self, field_name: str) -> Row:
        try:
            return self._schema[field_name]
        except KeyError:
            raise KeyError(f"no field {field_name!r} in this batch, only {self.field_names}") from None

    def add_fields(self: Self, tensor_dict: TensorDict, set_all_ready: bool = True) -> Self:
        """Adds the schema of `tensor_dict`, in place, and returns self. A batch of no rows changes nothing.

        Raises:
            InvalidInput: another number of rows.
        """
        if not tensor_dict.batch_size:
            raise InvalidInput("add_fields: the TensorDict has no batch dimension")
        count = tensor_dict.batch_size[0]
        if not count:
            return self
        if count != self._size:
            raise InvalidInput(f"add_fields: batch size {count} for {self._size} rows")
        added = schema_of(tensor_dict, count)
        if self._schema_shown:
            self._schema.update(added)
        else:
            self._schema = {**self._schema, **added}
        if set_all_ready:
            self._set_ready()
        return self

    def _set_ready(self) -> None:
        if isinstance(self._status, int):
            self._status = 1
        else:
            self._status[:] = 1

    # ---- extra info and tags ----

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """One value of `extra_info`."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Sets one value of `extra_info`."""
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """A deep copy of `extra_info`."""
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        """Sets several values of `extra_info`."""
        self.extra_info.update(mapping(info_dict, "info_dict"))

    def remove_extra_info(self, key: str) -> Any:
        """Removes a key; its value, or None."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Removes all of `extra_info`."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether `extra_info` has the key."""
        return key in self.extra_info

    def _repeated_rows(self) -> npt.NDArray[np.bool_] | None:
        """Which rows `extra_info` counts as repeated; None where it counts none."""
        count = self.extra_info.get(REPEATED)
        if type(count) is not int or count <= 0:
            return None
        if self._repeated is not None and np.count_nonzero(self._repeated) == count:
            return self._repeated
        return np.arange(self._size) >= self._size - count

    def _set_repeated_rows(self, repeated: npt.NDArray[np.bool_]) -> None:
        count = int(np.count_nonzero(repeated))
        self.extra_info.pop(REPEATED, None)
        if count:
            self.extra_info[REPEATED] = count
        self._repeated = None if repeated[self._size - count :].all() else repeated

    @property
    def custom_meta(self) -> list[Row]:
        """The tags of each row."""
        return self._tags.show()

    @custom_meta.setter
    def custom_meta(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._tags = DictColumn.given(self._size, rows, "custom_meta", replace=True)

    @property
    def _custom_backend_meta(self) -> list[Row]:
        return self._backend.show()

    @_custom_backend_meta.setter
    def _custom_backend_meta(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._backend = DictColumn.given(self._size, rows, "_custom_backend_meta", replace=True)

    def get_all_custom_meta(self) -> list[Row]:
        """Deep copies of the tags of each row."""
        return self._tags.copies()

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any] | None] | None) -> None:
        """Merges one dict into the tags of each row; None does nothing. InvalidInput on another length."""
        if custom_meta is None:
            return
        changes = items(custom_meta, "custom_meta")
        check_length(changes, self._size, "custom_meta")
        self._tags.update(changes)

    def clear_custom_meta(self) -> None:
        """Removes the tags of all rows."""
        self.custom_meta = [{}] * self._size

    def _tag_edits(self) -> dict[int, tuple[bool, Row]]:
        """The tags that this meta's holder changed: position -> (replaces the whole dict, what to set).

        A put sends these and not `custom_meta`, which may be older than what others wrote since.
        """
        return self._tags.edits()

    def _forget_tag_edits(self) -> None:
        """The edits are stored: a later put does not send them again."""
        self._tags.forget_edits()


def _status_array(values: Any) -> npt.NDArray[np.int8]:
    """A copy of `values` as int8. InvalidInput where they are no numbers that it has, one per row."""
    try:
        given = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of different lengths; torch's of other devices
        raise InvalidInput(f"production_status: {error}") from None
    if given.ndim != 1:
        raise InvalidInput(f"production_status must have one entry per row, got shape {given.shape}")
    if given.size and (given.dtype.kind not in "biuf" or not ((given >= -128) & (given <= 127)).all()):
        raise InvalidInput(f"production_status is 1 or 0 for each row, got {values!r:.200}")
    return given.astype(np.int8)


def same_or_list(parts: list[str]) -> str | list[str]:
    """The one partition that all rows are in, or the list when they differ or there are none."""
    return parts[0] if parts and isinstance(parts[0], str) and parts.count(parts[0]) == len(parts) else parts
