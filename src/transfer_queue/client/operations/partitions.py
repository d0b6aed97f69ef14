"""A partition as one object: what `get_partition_snapshot` of TransferQueue's controller gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from transfer_queue.arguments import flag, texts
from transfer_queue.client.describing import field_specs
from transfer_queue.client.effects import Call, Operation, Trying
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.read import read
from transfer_queue.codec.columns import rows_of
from transfer_queue.errors import DataLost, NotReady, StorageKeyNotFoundError
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of


@dataclass
class FieldSnapshot:
    """One field: `global_indexes` are the rows that have it.

    A field with rows of different shapes (`is_nested`) has no `shape` but `per_sample_shapes`, by global index. A field
    of objects (`is_non_tensor`) has neither, and no `dtype`.
    """

    global_indexes: set[int]
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    is_nested: bool
    is_non_tensor: bool
    per_sample_shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class PartitionSnapshot:
    """A partition as it was at one instant. Nobody changes it, and changing it changes nothing in the service.

    `production_status` is int8 (largest global index + 1, fields), 1 where a cell is written, with the columns of
    `field_name_mapping`; `consumption_status` has such a vector for each task, 1 where it took the row. Rows outside
    the partition are 0. `global_indexes` are its rows, `pre_allocated_global_indexes` those that no producer claimed
    yet; `custom_meta` has the tags of every row that has some, `keys_mapping` the row of every key.
    """

    partition_id: str
    production_status: torch.Tensor
    consumption_status: dict[str, torch.Tensor]
    global_indexes: set[int]
    pre_allocated_global_indexes: set[int]
    field_name_mapping: dict[str, int]
    field_metadata: dict[str, FieldSnapshot]
    custom_meta: dict[int, dict[str, Any]]
    keys_mapping: dict[str, int]
    revert_keys_mapping: dict[int, str]

    @property
    def total_samples_num(self) -> int:
        """The number of rows."""
        return len(self.global_indexes)

    @property
    def total_fields_num(self) -> int:
        """The number of fields."""
        return len(self.field_name_mapping)


def partition_snapshot(session: Session, partition_id: str) -> Operation[PartitionSnapshot | None]:
    """A copy of what is known of a partition; None for an unknown one.

    All of one instant but the shapes in fields whose rows differ: the service has them with the data, so those fields
    are read, and rows that were cleared in between have none.
    """
    found = (yield Call(m.DescribePartition(session.next_rid(), partition_id)))[0]
    if not found.known:
        return None
    indexes = numbers_of(found.rows)
    names = [one.name for one in found.fields]
    ready = np.frombuffer(found.ready, np.int8).reshape(len(indexes), len(names))
    reserved = set(numbers_of(found.reserved).tolist())
    rows = indexes.tolist()
    specs = field_specs(found.fields)
    fields = {}
    for column, name in enumerate(names):
        having = indexes[ready[:, column] != 0]
        fields[name] = FieldSnapshot(global_indexes=set(having.tolist()), **specs[name])
        if fields[name].is_nested:
            fields[name].per_sample_shapes = yield from _shapes(session, partition_id, name, having)
    tags = found.tags or [{}] * len(rows)
    keys = {key: row for key, row in zip(found.keys, rows, strict=True) if key is not None}
    return PartitionSnapshot(
        partition_id=partition_id,
        production_status=_spread(indexes, ready),
        consumption_status={
            task: _spread(indexes, np.frombuffer(status, np.int8)) for task, status in found.consumed.items()
        },
        global_indexes=set(rows) - reserved,
        pre_allocated_global_indexes=reserved,
        field_name_mapping={name: column for column, name in enumerate(names)},
        field_metadata=fields,
        custom_meta={row: dict(tag) for row, tag in zip(rows, tags, strict=True) if tag},
        keys_mapping=keys,
        revert_keys_mapping={row: key for key, row in keys.items()},
    )


def _spread(indexes: Any, status: Any) -> torch.Tensor:
    """`status` of the rows `indexes`, at their places in a tensor that has one for every index up to the largest."""
    size = int(indexes[-1]) + 1 if len(indexes) else 0
    found = np.zeros((size, *status.shape[1:]), np.int8)
    found[indexes] = status
    return torch.from_numpy(found)


def _shapes(session: Session, partition: str, name: str, indexes: Any) -> Operation[dict[int, tuple[int, ...]]]:
    try:
        request = m.Get(session.next_rid(), partition, None, indexes.tobytes(), [name], True)
        column = (yield Trying(read(session, [request])))[name]
    except (StorageKeyNotFoundError, NotReady, DataLost):
        return {}  # cleared since, or lost with their host
    return {index: tuple(row.shape) for index, row in zip(indexes.tolist(), rows_of(column), strict=True)}


def open_partition(
    session: Session,
    partition_id: str,
    series: str,
    max_open: int,
    consumers: Sequence[str] = (),
    clear: bool = False,
    timeout_s: float | None = None,
) -> Operation[None]:
    """Open the next partition of a series, once at most `max_open` others of it are not cleared.

    Waits in the service, in order of arrival, at most `timeout_s` (default: the configured one). The partition belongs
    to the series until it is cleared. `consumers` are the names that `finish_partition` is called with; `clear`: the
    last of them to finish clears it. With `max_open=0` producer and consumers take turns. Opening it twice in the same
    way changes nothing. Raises `DeadlineExceeded`, `InvalidInput`.
    """
    wait_s = session.timeout_s if timeout_s is None else timeout_s
    names, clear = texts(consumers, "consumers"), flag(clear, "clear")
    message = m.OpenPartition(session.next_rid(), partition_id, series, max_open, names, clear, wait_s)
    yield Call(message, wait_s=wait_s)


def finish_partition(session: Session, partition_id: str, consumer: str) -> Operation[None]:
    """`consumer` needs no more of a partition that was opened in a series. Saying it twice changes nothing.

    Raises `UnknownRows` where it was cleared, `InvalidInput` for a consumer that it was not opened for.
    """
    yield Call(m.FinishPartition(session.next_rid(), partition_id, consumer))


def series_status(session: Session, series: str) -> Operation[dict[str, Any]]:
    """`open`: the partitions of a series that are not cleared, each with its `consumers`, those that are `left`, and
    whether it `clears` itself. `waiting`: those that producers wait to open."""
    return (yield Call(m.DescribeSeries(session.next_rid(), series)))[0].values
