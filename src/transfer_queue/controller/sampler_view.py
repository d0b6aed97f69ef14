"""What a sampler is told of the partition that it picks rows of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from transfer_queue.controller.table import Table


class SamplerView:
    """What a sampler may see of a partition: read only."""

    def __init__(self, table: Table) -> None:
        self._table = table

    @property
    def partition_id(self) -> str:
        return self._table.name

    @property
    def metadata(self) -> Mapping[str, Any]:
        return dict(self._table.metadata)

    @property
    def any_tags(self) -> bool:
        return self._table.any_tags

    def tags(self, index: int) -> Mapping[str, Any]:
        """The tags of the row with this global index; empty when it has none or is gone."""
        slot = int(self._table.slots_of(np.array([index]))[0])
        return {} if slot < 0 else self._table.tags[slot] or {}

    def get_custom_meta(self, global_indices: list[int]) -> dict[int, Any]:
        """index -> tags of those of these rows that have tags."""
        slots = self._table.slots_of(np.array(global_indices, np.int64)).tolist()
        tags = [self._table.tags[slot] if slot >= 0 else None for slot in slots]
        return {index: row for index, row in zip(global_indices, tags, strict=True) if row}

    def key(self, index: int) -> str | None:
        slot = int(self._table.slots_of(np.array([index]))[0])
        return None if slot < 0 else self._table.names[slot]
