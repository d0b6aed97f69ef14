"""A look at a running service: all of it, a map of a partition, one row. Nothing is changed by looking."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer_queue.arguments import items
from transfer_queue.client.effects import Call, Operation
from transfer_queue.client.session import Session
from transfer_queue.errors import InvalidInput
from transfer_queue.wire import messages as m

MAX_RUNS = 1 << 16


@dataclass(frozen=True)
class PartitionMap:
    """Which cells of a partition are there, in `num_runs` runs of `rows_each` live rows (the last one may be shorter).

    `written` is (fields, runs), `consumed` and `leased` are (tasks, runs): shares from 0 to 255, 0 for none and
    255 for all. `first_rows` (runs): the global index of each run's first row. `size`: live rows.
    """

    partition_id: str
    size: int
    rows_each: int
    fields: list[str]
    tasks: list[str]
    written: NDArray[np.uint8]
    consumed: NDArray[np.uint8]
    leased: NDArray[np.uint8]
    first_rows: NDArray[np.int64]

    @property
    def num_runs(self) -> int:
        return len(self.first_rows)


def report_replicas(session: Session, replicas: Iterable[m.ReplicaStatus]) -> Operation[None]:
    """See `TransferQueueClient.report_replicas`."""
    yield Call(m.ReportReplicas(session.next_rid(), items(replicas, "replicas")))


def overview(session: Session, most: int) -> Operation[m.ServiceOverview]:
    """See `TransferQueueClient.overview`."""
    return (yield Call(m.DescribeService(session.next_rid(), most)))[0]


def partition_map(session: Session, partition_id: str, max_runs: int) -> Operation[PartitionMap | None]:
    """See `TransferQueueClient.partition_map`."""
    if type(max_runs) is not int or not 1 <= max_runs <= MAX_RUNS:
        raise InvalidInput(f"max_runs {max_runs!r}: expected from 1 to {MAX_RUNS}")
    info = (yield Call(m.GetPartition(session.next_rid(), partition_id)))[0]
    if not info.known:
        return None
    each = max(1, -(-info.rows // max_runs))
    slices, start = list[m.CellMap](), 0
    while not slices or slices[-1].next:
        slices.append((yield Call(m.MapCells(session.next_rid(), partition_id, start, each)))[0])
        start = slices[-1].next
    first, size = slices[0], slices[-1].size
    if not first.known:
        return None
    return PartitionMap(
        partition_id, size, each, first.fields, first.tasks,
        _joined(first.fields, [dict(zip(one.fields, one.written, strict=True)) for one in slices]),
        _joined(first.tasks, [dict(zip(one.tasks, one.consumed, strict=True)) for one in slices]),
        _joined(first.tasks, [dict(zip(one.tasks, one.leased, strict=True)) for one in slices]),
        np.concatenate([np.frombuffer(one.first_rows, np.int64) for one in slices]),
    )  # fmt: skip


def _joined(names: list[str], slices: list[dict[str, bytes]]) -> NDArray[np.uint8]:
    """Lines that came in slices as one array of (names, runs). A partition that was made anew meanwhile may lack a
    name: it has nothing there."""
    lengths = [max(map(len, one.values()), default=0) for one in slices]
    lines = [b"".join(one.get(name, bytes(size)) for one, size in zip(slices, lengths, strict=True)) for name in names]
    return np.stack([np.frombuffer(line, np.uint8) for line in lines]) if lines else np.zeros((0, 0), np.uint8)


def inspect_row(session: Session, partition_id: str, key: str | None, row: int | None) -> Operation[m.RowInspected]:
    """See `TransferQueueClient.inspect_row`."""
    return (yield Call(m.InspectRow(session.next_rid(), partition_id, key, row)))[0]
