"""Read-only views of single rows of a BatchMeta, made on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from transfer_queue.metadata.contents import BatchContents


class SampleView:
    """One row. It reads from its batch, so it shows later changes; its mappings raise TypeError on assignment."""

    __slots__ = ("_batch", "_position")

    def __init__(self, batch: BatchContents, position: int) -> None:
        self._batch = batch
        self._position = position

    @property
    def global_index(self) -> int:
        """The row's index, unique in the system while the row exists."""
        return int(self._batch._ids[self._position])

    @property
    def partition_id(self) -> str:
        """The partition the row is in."""
        parts = self._batch._parts
        return parts if isinstance(parts, str) else parts[self._position]

    @property
    def production_status(self) -> int:
        """1 when the row's fields are written, else 0."""
        return int(self._batch.production_status[self._position])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        """The row's tags."""
        return MappingProxyType(self._batch.custom_meta[self._position])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """The row's schema: as the batch's, with this row's own `shape` and without `per_sample_shapes`."""
        return MappingProxyType({name: self._field(spec) for name, spec in self._batch.field_schema.items()})

    def _field(self, spec: dict[str, Any]) -> Mapping[str, Any]:
        shapes = spec.get("per_sample_shapes")
        if shapes is None:
            return MappingProxyType(dict(spec))
        own = {key: value for key, value in spec.items() if key != "per_sample_shapes"}
        return MappingProxyType({**own, "shape": shapes[self._position]})

    def __repr__(self) -> str:
        return (
            f"SampleView(global_index={self.global_index}, partition_id={self.partition_id!r}, "
            f"production_status={self.production_status}, fields={self._batch.field_names})"
        )


class SampleViews:
    """The rows of a batch: `len()`, indexing with ints, iteration."""

    __slots__ = ("_batch",)

    def __init__(self, batch: BatchContents) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    def __getitem__(self, position: int) -> SampleView:
        return SampleView(self._batch, range(self._batch.size)[position])

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, position) for position in range(len(self)))
