"""A worker's one door to the other processes: every call into the queue, timed and counted.

Rows are taken on lease, and acknowledged when their use cannot be undone: those of a worker that is killed go to the
one that takes its place. What a worker measured goes through the queue too: totals as tags of a row in `status`, single
spans of time as rows of `spans`. Times are those of time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

import transfer_queue as tq
from demo.aside import Aside
from demo.columns import payload_nbytes
from demo.settings import Moment, Settings
from demo.tables import TRAINED, Tags
from transfer_queue.errors import DeadlineExceeded, LeaseExpired, StorageKeyNotFoundError

_REPORT_EVERY_S = 0.25
_GLANCE_S = 0.5  # how often somebody who waits looks around
_SPANS_AT_ONCE = 64  # only the picture at the end needs them


class Doing(IntEnum):
    """What a worker spends time on."""

    WORK = 0
    WAIT = 1
    """For rows that are not ready yet, for weights that are new enough."""
    SAMPLES = 2
    """Moving fields of rows in or out, and telling how it goes."""
    WEIGHTS = 3
    """Packing them, saving them, reading them; until others have taken them; while generation is frozen for new
    ones."""


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


class _Found(NamedTuple):
    """What a read came to; between these times there was nothing to take."""

    rows: Rows | None
    idle_from: float
    idle_until: float


@dataclass
class _Totals:
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(Doing))
    rows: int = 0
    nbytes: int = 0


class Port:
    """Not for use by several threads."""

    def __init__(self, worker: str, settings: Settings, *, waits: bool = True) -> None:
        """Attaches to the service that the parent started. Unless it `waits` for them, what is written is so in order,
        but a little later: until `catch_up`."""
        tq.init()
        self._aside = None if waits else Aside()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._client = tq.get_client()
        self._worker = worker
        self._task = worker.split()[0]
        self._patience_s = settings.patience_s
        self._is_ordered = settings.reproducible
        self._kill = next((kill for kill in settings.kills if kill.worker == worker), None)
        self._totals = _Totals()
        self._spans: list[tuple[float, float, int, int]] = []
        self._reports = 0
        self._reported_s = 0.0
        self._worked: dict[str, float] = {}
        known = tq.kv_list("status").get("status", {})
        self.life = sum(tag["worker"] == worker for tag in known.values())
        """How many processes of this name there were before."""
        self._born_s = time.monotonic()
        self._report(waiting=False, also={})

    def take(
        self,
        partition: str,
        fields: list[str],
        num_rows: int,
        *,
        max_staleness: int | None = None,
        meanwhile: Callable[[], bool | None] = bool,
    ) -> Rows | None:
        """Wait until `num_rows` rows have all `fields`, and read them. No other taker of this task gets them, unless
        this process ends before it has acknowledged them.

        Rows more than `max_staleness` versions old are left out. `meanwhile` is called now and then while there is
        nothing to take: None is returned when it says that nothing will come.

        The task is the worker's name without its number: rollout workers share their rows. Raises `DeadlineExceeded`.
        """
        self._report_if_due(waiting=True)
        read = partial(self._read, partition, fields, num_rows, max_staleness)
        return self._rows(lambda: read, read, meanwhile)

    def takes(
        self,
        partition: str,
        fields: list[str],
        num_rows: int,
        times: int,
        *,
        max_staleness: int | None = None,
        meanwhile: Callable[[], bool | None] = bool,
    ) -> Iterator[Rows | None]:
        """What `take` takes, so many times, each while the caller works on the one before; the first from now on."""
        read = partial(self._read, partition, fields, num_rows, max_staleness)

        def begin() -> Callable[[], _Found]:
            return self._reader.submit(read).result

        def deliver(under_way: Callable[[], _Found]) -> Iterator[Rows | None]:
            for left in reversed(range(times)):
                rows = self._rows(begin, under_way, meanwhile)
                if left:
                    under_way = begin()
                yield rows

        return deliver(begin())

    def _rows(
        self, begin: Callable[[], Callable[[], _Found]], under_way: Callable[[], _Found], meanwhile: Callable[[], Any]
    ) -> Rows | None:
        """What `under_way` gives, or one that is begun after it."""
        deadline = time.monotonic() + self._patience_s
        while True:
            start = time.monotonic()
            found = under_way()
            self._account_read(start, found)
            if found.rows is not None:
                self._totals.nbytes += payload_nbytes(found.rows.data)
                return found.rows
            if meanwhile():
                return None
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no rows to take in {self._patience_s} s")
            self._report_if_due(waiting=True)
            under_way = begin()

    def _read(self, partition: str, fields: list[str], num_rows: int, max_staleness: int | None) -> _Found:
        """At first what is there is taken. To wait for the rest, and to have it then, counts as waiting."""
        idle_from = 0.0
        for timeout_s in (0.0, _GLANCE_S):
            with suppress(DeadlineExceeded, StorageKeyNotFoundError):
                meta, data = self._client.take(
                    partition,
                    fields,
                    num_rows,
                    self._task,
                    lease_s=self._patience_s,
                    timeout_s=timeout_s,
                    sampling_config={"max_staleness": max_staleness},
                )
                if self._is_ordered:  # they come in the order in which they were put, which is nobody's choice
                    meta.reorder(_order(meta))
                    data = self._client.get_data(meta)
                return _Found(Rows(data=data, meta=meta), idle_from, time.monotonic() if idle_from else 0.0)
            idle_from = idle_from or time.monotonic()
        return _Found(None, idle_from, time.monotonic())

    def _account_read(self, start: float, found: _Found) -> None:
        """From `start` until now was for this; it may have begun before."""
        end = time.monotonic()
        first, last = (min(max(start, at), end) for at in (found.idle_from, found.idle_until))
        parts = ((Doing.SAMPLES, start, first), (Doing.WAIT, first, last), (Doing.SAMPLES, last, end))
        for doing, since, until in parts:
            if until > since:
                self.account(doing, since, until)

    def acknowledge(self, rows: Rows) -> None:
        """What they were taken for is done: nobody of this task gets them again."""
        with self.spending(Doing.SAMPLES):
            self._client.ack(rows.meta)

    def conclude(self, step: int, taken: Sequence[Rows]) -> None:
        """As `acknowledge`, of all rows of a training step, at once: `tq replay` has them by its number."""
        self._write(Doing.SAMPLES, self._client.checkpoint, step, [self._task], [rows.meta for rows in taken])

    def answer(self, rows: Rows, **columns: Tensor) -> None:
        """Write further fields to rows that were taken, and acknowledge them. Rows that the trainer has cleared were
        answered by a process before this one, which could not acknowledge them any more."""
        data = TensorDict(columns, batch_size=len(rows))
        with self.spending(Doing.SAMPLES), suppress(StorageKeyNotFoundError, LeaseExpired):
            self._client.put(data, metadata=rows.meta)
            self.pass_by("filled")
            self._client.ack(rows.meta)
        self._totals.nbytes += payload_nbytes(data)

    def _write(self, doing: Doing | None, function: Callable[..., Any], *args: Any, **named: Any) -> None:
        """Make a call that writes, or have it made; `doing` None: its caller accounts the time."""
        start = time.monotonic()
        if self._aside is None:
            function(*args, **named)
        else:
            self._aside.call(function, *args, **named)
        if doing is not None:
            self.account(doing, start, time.monotonic())

    def catch_up(self) -> None:
        """Return when all that was written is in the queue."""
        if self._aside is not None:
            with self.spending(Doing.SAMPLES):
                self._aside.catch_up()

    def tell(self, partition: str, key: str, **tag: Any) -> None:
        """Add a row without fields, or change its tags."""
        tq.kv_put(key=key, partition_id=partition, tag=tag)

    def add(self, partition: str, keys: list[str], tags: Sequence[Tags], **columns: Tensor) -> None:
        """Write new rows, fields and tags in one step; rows with these keys are overwritten."""
        data = TensorDict(columns, batch_size=len(keys))
        self._write(_kind(partition), tq.kv_batch_put, keys=keys, partition_id=partition, fields=data, tags=tags)
        self._totals.nbytes += payload_nbytes(data)

    def read(self, partition: str, key: str, column: str) -> Tensor:
        """One field of the row with this key, which must be there. Shape: that of the row."""
        with self.spending(_kind(partition)):
            data = tq.kv_batch_get(keys=[key], partition_id=partition, select_fields=[column])
        self._totals.nbytes += payload_nbytes(data)
        value: Tensor = data[column].unbind()[0]
        return value

    def tags(self, partition: str) -> Mapping[str, Tags]:
        """The tags of all rows of a partition, by key."""
        return tq.kv_list(partition).get(partition, {})

    def known(self, partition: str, keys: list[str]) -> set[str]:
        """Which of these rows are there."""
        with self.spending(Doing.SAMPLES):
            found = self._client.kv_retrieve_meta(keys, partition)
            if not found.size:
                return set()
            return {key for key in self._client.kv_retrieve_keys(found.global_indexes, partition) if key is not None}

    def open_partition(self, partition: str, **notes: Any) -> None:
        """Make it, and add to what is noted of it."""
        self._write(Doing.SAMPLES, self._client.set_partition, partition, metadata=notes)

    def notes(self, partition: str) -> Mapping[str, Any] | None:
        """What is noted of a partition; None when there is none."""
        with self.spending(Doing.SAMPLES):
            found = self._client.get_partition(partition)
        return None if found is None else found["metadata"]

    def num_used(self, partition: str) -> int:
        """How many rows of a partition this task has acknowledged."""
        _, used = self._client.get_consumption_status(self._task, partition)
        return 0 if used is None else int(used.sum())

    def drop(self, rows: Rows) -> None:
        """Clear rows that nobody needs any more."""
        with self.spending(Doing.SAMPLES):
            self._client.clear_samples(rows.meta)

    def drop_partition(self, partition: str) -> None:
        """Clear a whole partition."""
        self._write(Doing.SAMPLES, self._client.clear_partition, partition)

    def trained(self) -> int:
        """How many optimiser steps are done."""
        return max((tag.get(TRAINED, 0) for tag in self.tags("status").values()), default=0)

    def pass_by(self, moment: Moment, step: int | None = None) -> None:
        """End here, by kill -9, if that is what was ordered."""
        kill = self._kill
        if kill is None or kill.moment != moment:
            return
        if kill.step <= (self.trained() if step is None else step):
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def spending(self, doing: Doing) -> Iterator[None]:
        """Account the time of the block."""
        start = time.monotonic()
        yield
        self.account(doing, start, time.monotonic())

    def account(self, doing: Doing, start: float, end: float, *, instead_of: Doing | None = None) -> None:
        """That time went into this; `instead_of` what it was counted as before."""
        self._totals.seconds[doing] += end - start
        if instead_of is not None:
            self._totals.seconds[instead_of] -= end - start
        self._spans.append((start, end, int(doing), 0))

    def finish(self, num_rows: int) -> None:
        """Count samples that this worker has done its part on."""
        now = time.monotonic()
        self._totals.rows += num_rows
        self._spans.append((now, now, int(Doing.WORK), num_rows))
        if not self._worked:
            self._worked["worked_at"] = now
            self.report()

    def report(self, **also: int | float | str) -> None:
        """Publish the totals and what is in `also`; the spans when there are many."""
        self._report(waiting=False, also=also)

    def report_last(self, **also: int | float | str) -> None:
        """As `report`, and all spans: this worker is done."""
        self._report(waiting=False, also=also, last=True)

    def _report_if_due(self, waiting: bool) -> None:
        if time.monotonic() - self._reported_s >= _REPORT_EVERY_S:
            self._report(waiting, {})

    def _report(self, waiting: bool, also: Tags, last: bool = False) -> None:
        start = self._reported_s = time.monotonic()
        totals = self._totals
        times = {f"{doing.name.lower()}_s": totals.seconds[doing] for doing in Doing}
        who = {"worker": self._worker, "life": self.life, "born_at": self._born_s, **self._worked}
        tag = {"at": start, "waiting": waiting, "rows": totals.rows, "nbytes": totals.nbytes, **who, **times, **also}
        self._write(None, tq.kv_put, key=f"{self._worker}/{self.life}", partition_id="status", tag=tag)
        if len(self._spans) >= (1 if last else _SPANS_AT_ONCE):
            self._write(
                None,
                tq.kv_batch_put,
                keys=[f"{self._worker}/{self.life}/{self._reports}"],
                partition_id="spans",
                fields=TensorDict({"spans": torch.tensor([self._spans], dtype=torch.float64)}, batch_size=1),
                tags=[{"worker": self._worker}],
            )
            self._reports += 1
            self._spans = []
        self.account(Doing.SAMPLES, start, time.monotonic())  # for the next report; the last one is not counted


def _order(meta: tq.BatchMeta) -> list[int]:
    """The places of the rows by group; rows of a group are put together, so their indexes ascend."""
    groups = [tags["group_id"] for tags in meta.custom_meta]
    return sorted(range(meta.size), key=lambda place: (groups[place], meta.global_indexes[place]))


def _kind(partition: str) -> Doing:
    return Doing.WEIGHTS if partition == "weights" else Doing.SAMPLES
