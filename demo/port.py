"""A worker's one door to the other processes: every call into the queue, timed and counted.

What it measured goes through the queue too: totals as tags of the worker's row in `status`, single spans of time as
rows of `spans`. Times are those of time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import transfer_queue as tq
from demo.columns import payload_nbytes
from demo.settings import Settings
from demo.tables import Tags

_REPORT_EVERY_S = 0.25


class Doing(IntEnum):
    """What a worker spends time on."""

    WORK = 0
    WAIT = 1
    """Asking for rows that are not ready yet."""
    QUEUE = 2
    """Moving data in or out."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows that were taken: their fields, and what it needs to write further ones."""

    data: TensorDict
    meta: tq.BatchMeta

    def __len__(self) -> int:
        return self.meta.size

    def tag(self, name: str) -> list[Any]:
        """One tag of every row, in order."""
        return [tags[name] for tags in self.meta.custom_meta]


@dataclass
class _Totals:
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(Doing))
    rows: int = 0
    nbytes: int = 0


class Port:
    """Not for use by several threads."""

    def __init__(self, worker: str, settings: Settings) -> None:
        """Attaches to the service that the parent started."""
        tq.init()
        self._client = tq.get_client()
        self._worker = worker
        self._patience_s = settings.patience_s
        self._totals = _Totals()
        self._spans: list[tuple[float, float, int, int]] = []
        self._reports = 0
        self._reported_s = 0.0

    def take(self, partition: str, fields: list[str], num_rows: int, max_staleness: int | None = None) -> Rows:
        """Wait until `num_rows` rows have all `fields`, and read them. No other taker of this name gets them.

        Rows more than `max_staleness` versions old are left out.

        The name is the worker's without its number: rollout workers share their rows. Raises `DeadlineExceeded`.
        """
        self._report_if_due(waiting=True)
        with self.spending(Doing.WAIT):
            meta = self._client.get_meta(
                data_fields=fields,
                batch_size=num_rows,
                partition_id=partition,
                task_name=self._worker.split()[0],
                sampling_config={"max_staleness": max_staleness},
                timeout_s=self._patience_s,
            )
        with self.spending(Doing.QUEUE):
            data = self._client.get_data(meta)
        self._totals.nbytes += payload_nbytes(data)
        return Rows(data=data, meta=meta)

    def admit(self, taker: str, num_rows: int, max_staleness: int, rows_per_version: int) -> None:
        """Wait until that many more rows can be started for `taker`. Raises `DeadlineExceeded`."""
        self._report_if_due(waiting=True)
        with self.spending(Doing.WAIT):
            self._client.admit(taker, num_rows, max_staleness, rows_per_version, timeout_s=self._patience_s)

    def give_back(self, taker: str, num_rows: int) -> None:
        """Rows that were admitted will not come."""
        self._client.give_back(taker, num_rows)

    def tell(self, partition: str, key: str, **tag: str) -> None:
        """Add a row without fields."""
        tq.kv_put(key=key, partition_id=partition, tag=tag)

    def fill(self, rows: Rows, **columns: Tensor) -> None:
        """Write further fields to rows that were taken."""
        data = TensorDict(columns, batch_size=len(rows))
        with self.spending(Doing.QUEUE):
            self._client.put(data, metadata=rows.meta)
        self._totals.nbytes += payload_nbytes(data)

    def add(self, partition: str, keys: list[str], tags: Sequence[Tags], **columns: Tensor) -> None:
        """Write new rows, fields and tags in one step."""
        data = TensorDict(columns, batch_size=len(keys))
        with self.spending(Doing.QUEUE):
            tq.kv_batch_put(keys=keys, partition_id=partition, fields=data, tags=tags)
        self._totals.nbytes += payload_nbytes(data)

    def read(self, partition: str, key: str, column: str) -> Tensor:
        """One field of the row with this key, which must be there. Shape: that of the row."""
        with self.spending(Doing.QUEUE):
            data = tq.kv_batch_get(keys=[key], partition_id=partition, select_fields=[column])
        self._totals.nbytes += payload_nbytes(data)
        value: Tensor = data[column].unbind()[0]
        return value

    def tags(self, partition: str) -> Mapping[str, Tags]:
        """The tags of all rows of a partition, by key."""
        with self.spending(Doing.QUEUE):
            return tq.kv_list(partition).get(partition, {})

    def drop(self, rows: Rows) -> None:
        """Clear rows that nobody needs any more."""
        with self.spending(Doing.QUEUE):
            self._client.clear_samples(rows.meta)

    def drop_partition(self, partition: str) -> None:
        """Clear a whole partition."""
        with self.spending(Doing.QUEUE):
            self._client.clear_partition(partition)

    @contextmanager
    def spending(self, doing: Doing) -> Iterator[None]:
        """Account the time of the block."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        self._totals.seconds[doing] += end - start
        self._spans.append((start, end, int(doing), 0))

    def finish(self, num_rows: int) -> None:
        """Count samples that this worker has done its part on."""
        now = time.monotonic()
        self._totals.rows += num_rows
        self._spans.append((now, now, int(Doing.WORK), num_rows))

    def report(self, **also: int | float | str) -> None:
        """Publish the totals, what is in `also`, and the spans since the last report."""
        self._report(waiting=False, also=also)

    def _report_if_due(self, waiting: bool) -> None:
        if time.monotonic() - self._reported_s >= _REPORT_EVERY_S:
            self._report(waiting, {})

    def _report(self, waiting: bool, also: Tags) -> None:
        start = self._reported_s = time.monotonic()
        totals = self._totals
        names = {f"{doing.name.lower()}_s": totals.seconds[doing] for doing in Doing}
        tag = {"at": start, "waiting": waiting, "rows": totals.rows, "nbytes": totals.nbytes, **names, **also}
        tq.kv_put(key=self._worker, partition_id="status", tag=tag)
        if self._spans:
            tq.kv_batch_put(
                keys=[f"{self._worker}/{self._reports}"],
                partition_id="spans",
                fields=TensorDict({"spans": torch.tensor([self._spans], dtype=torch.float64)}, batch_size=1),
                tags=[{"worker": self._worker}],
            )
            self._reports += 1
        end = time.monotonic()
        totals.seconds[Doing.QUEUE] += end - start
        self._spans = [(start, end, int(Doing.QUEUE), 0)]  # for the next report; the last one of all is not counted
