"""Programs of data sets and loaders that read what is there, over one partition after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from frameworks.differential.drawing import Drawing, Sampler


@dataclass
class Reading:
    """A stream, and how many rows it can still get without waiting: nothing is drawn that would wait."""

    name: str
    task: str
    partition: str
    batch: int
    micro: int
    workers: int | None
    ends: bool
    open: bool = True


class OfStreams(Drawing):
    """Several partitions of rows of the same fields; streams of one or two ranks for several tasks."""

    samplers: ClassVar[tuple[Sampler, ...]] = (
        ("SequentialSampler", {}), ("RankAwareSampler", {}), ("GRPOGroupNSampler", {"n_samples_per_prompt": 2}),
    )  # fmt: skip

    def __init__(self, rng: Any, sampler: str) -> None:
        super().__init__(rng, sampler)
        self.rows = {"A": 0, "B": 0}
        self.used: dict[tuple[str, str], int] = {}
        self.streams: list[Reading] = []
        self.tasks = 0

    def step(self) -> None:
        if not any(self.rows.values()):
            self.fill()
        elif not self.streams:
            self.open()
        else:
            self._pick(
                {
                    self.fill: 3,
                    self.open: 4,
                    self.take: 10,
                    self.again: 2,
                    self.go_on: 2,
                    self.look_at: 2,
                    self.used_up: 2,
                }
            )()

    def _kind(self) -> dict[str, Any]:
        return {"kind": self.rng.choice(("dense", "ragged", "texts", "dicts")), "dtype": "int64", "dims": 1}

    def _column(self, field: str) -> dict[str, Any]:
        return self._seeded_kind(dict(self.fields[field]))

    def fill(self) -> None:
        """Rows with all fields."""
        partition, count = self.rng.choice("AB"), self.rng.choice((2, 4, 4, 6, 8))
        columns = {field: self._column(field) for field in self.fields}
        data = {"$": "columns", "rows": count, "more": 0, "fields": columns}
        self.rows[partition] += count
        self.calls.append({"on": "client", "call": "put", "with": {"data": data, "partition_id": self._in(partition)}})

    def open(self) -> None:
        """A data set, alone or in a loader, of a task of its own, or of another rank of one that there is."""
        filled = [name for name in "AB" if self.rows[name]]
        batch = self.rng.choice((1, 2, 2, 3, 4)) if self.sampler != "GRPOGroupNSampler" else self.rng.choice((2, 4))
        workers = self.rng.choice((None, None, 0, 0, 2))
        self.tasks += 1
        made = Reading(
            f"s{len(self.calls)}", f"task{self.tasks}", self.rng.choice(filled), batch,
            self.rng.randrange(1, batch + 1), workers, self._chance(0.4),
        )  # fmt: skip
        self.streams.append(made)
        given = {"batch_size": batch, "micro_batch_size": made.micro, "data_fields": sorted(self.fields)}
        given |= {"partition_id": self._in(made.partition), "task_name": made.task, "dp_rank": self.rng.randrange(2)}
        given |= {"should_check_consumption_status": made.ends, "workers": workers}
        self.calls.append({"on": "tq", "call": "stream", "keep": made.name, "with": given})

    def _open_one(self) -> Reading | None:
        left = [stream for stream in self.streams if stream.open]
        return self.rng.choice(left) if left else None

    def take(self) -> None:
        """Some micro-batches of those that are there; a stream that ends with its partition also to its end."""
        stream = self._open_one()
        if stream is None:
            return self.open()
        whole = self.rows[stream.partition] // stream.batch
        each = -(-stream.batch // stream.micro)
        done = self.used.get((stream.name, stream.partition), 0)
        there = whole * each - done
        exact = whole * stream.batch == self.rows[stream.partition]
        if stream.workers:  # all at once: what workers fetch ahead is no part of the comparison
            stream.open = False
            count = there + (1 if stream.ends and exact else 0)
            return self._of(stream, "take of workers", count=count) if count else None
        count = self.rng.randrange(1, there + 1) if there else 0
        if stream.ends and exact and self._chance(0.6):
            count = there + 1
            stream.open = False
        self.used[stream.name, stream.partition] = done + count
        return self._of(stream, "take", count=count) if count else None

    def again(self) -> None:
        """From the first batch in the buffer."""
        stream = self._open_one()
        if stream is None or stream.workers:
            return self.open()
        self.used[stream.name, stream.partition] = 0
        self._of(stream, "begin again")
        count = 1 if self.rows[stream.partition] >= stream.batch else 0
        self.used[stream.name, stream.partition] = count
        return self._of(stream, "take", count=count, anew=True) if count else None

    def go_on(self) -> None:
        """With another partition, or the same one."""
        stream = self._open_one()
        if stream is None or stream.workers:
            return self.open()
        stream.partition = self.rng.choice("AB")
        self._of(stream, "go on with", partition_id=self._in(stream.partition))
        stream.open = False
        return None

    def look_at(self) -> None:
        stream = self.rng.choice(self.streams)
        if not stream.workers:
            self._of(stream, "buffered")

    def used_up(self) -> None:
        stream = self.rng.choice(self.streams)
        name = self.rng.choice(("get_consumption_status", "check_consumption_status"))
        given = {"task_name": stream.task, "partition_id": self._in(stream.partition)}
        self.calls.append({"on": "client", "call": name, "with": given})

    def _of(self, stream: Reading, call: str, **given: Any) -> None:  # type: ignore[override]
        self.calls.append({"on": stream.name, "call": call, "with": given})
