"""Programs of data sets and loaders that read what is there, over one partition after the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from frameworks.differential.drawing import Drawing, Sampler


@dataclass
class Reading:
    """A stream, and how far it has come in its partition. Micro-batches are counted, so that none is waited for."""

    name: str
    task: str
    rank: int
    partition: str
    batch: int
    micro: int
    workers: int | None
    ends: bool
    given: int = 0  # micro-batches since its start, or since it began again
    begun: int = 0  # batches, which it keeps
    open: bool = True

    def take(self, count: int) -> int:
        """Count more micro-batches; how many batches are begun for that."""
        self.given += count
        before, self.begun = self.begun, max(self.begun, -(-self.given // self.each))
        return self.begun - before

    @property
    def each(self) -> int:
        """Micro-batches of a batch."""
        return -(-self.batch // self.micro)


class OfStreams(Drawing):
    """Several partitions of rows of the same fields; streams of one or two ranks for several tasks."""

    samplers: ClassVar[tuple[Sampler, ...]] = (
        ("SequentialSampler", {}), ("RankAwareSampler", {}), ("GRPOGroupNSampler", {"n_samples_per_prompt": 2}),
    )  # fmt: skip

    def __init__(self, rng: Any, sampler: str) -> None:
        super().__init__(rng, sampler)
        self.rows = {"A": 0, "B": 0}
        self.begun: Counter[tuple[str, str]] = Counter()  # batches of a partition that a task has begun
        self.streams: list[Reading] = []

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
        alone = [one for one in self.streams if not one.workers and not one.ends and one.open]
        if alone and self._chance(0.35):
            first = self.rng.choice(alone)
            if sum(one.task == first.task for one in self.streams) == 1:
                made = replace(first, rank=1 - first.rank, given=0, begun=0, name=f"s{len(self.calls)}", workers=None)
                return self._opened(made)
        filled = [name for name in "AB" if self.rows[name]]
        batch = self.rng.choice((1, 2, 2, 3, 4)) if self.sampler != "GRPOGroupNSampler" else self.rng.choice((2, 4))
        made = Reading(
            f"s{len(self.calls)}", f"task{len(self.streams)}", self.rng.randrange(2), self.rng.choice(filled), batch,
            self.rng.randrange(1, batch + 1), self.rng.choice((None, None, 0, 0, 2)), self._chance(0.4),
        )  # fmt: skip
        return self._opened(made)

    def _opened(self, made: Reading) -> None:
        self.streams.append(made)
        given = {"batch_size": made.batch, "micro_batch_size": made.micro, "data_fields": sorted(self.fields)}
        given |= {"partition_id": self._in(made.partition), "task_name": made.task, "dp_rank": made.rank}
        given |= {"should_check_consumption_status": made.ends, "workers": made.workers}
        self.calls.append({"on": "tq", "call": "stream", "keep": made.name, "with": given})

    def _open_one(self) -> Reading | None:
        left = [stream for stream in self.streams if stream.open]
        return self.rng.choice(left) if left else None

    def _left(self, stream: Reading) -> int:
        """The micro-batches that a stream gets without waiting: those it keeps, and those that nobody has begun."""
        others = self.begun[stream.task, stream.partition] - stream.begun
        return (self.rows[stream.partition] // stream.batch - others) * stream.each - stream.given

    def take(self) -> None:
        """Some micro-batches of those that are there; a stream that ends with its partition also to its end."""
        stream = self._open_one()
        if stream is None:
            return self.open()
        left = self._left(stream)
        to_end = stream.ends and self.rows[stream.partition] % stream.batch == 0
        if stream.workers:  # all at once: what workers fetch ahead is no part of the comparison
            stream.open = False
            count = left + to_end
            return self._on(stream, "take of workers", count=count) if count else None
        count = self.rng.randrange(1, left + 1) if left else 0
        if to_end and self._chance(0.6):
            count = left + 1
            stream.open = False
        return self._take(stream, count) if count else None

    def _take(self, stream: Reading, count: int, **given: Any) -> None:
        self.begun[stream.task, stream.partition] += stream.take(count)
        self._on(stream, "take", count=count, **given)

    def again(self) -> None:
        """From the first batch that it keeps."""
        stream = self._open_one()
        if stream is None or stream.workers:
            return self.open()
        stream.given = 0
        self._on(stream, "begin again")
        return self._take(stream, 1, anew=True) if self._left(stream) else None

    def go_on(self) -> None:
        """With a partition that its task has not read."""
        stream = self._open_one()
        other = "AB"[stream.partition == "A"] if stream is not None else ""
        if stream is None or stream.workers or self.begun[stream.task, other]:
            return self.open()
        stream.partition, stream.given, stream.begun = other, 0, 0
        return self._on(stream, "go on with", partition_id=self._in(other))

    def look_at(self) -> None:
        stream = self.rng.choice(self.streams)
        if not stream.workers:
            self._on(stream, "buffered")

    def used_up(self) -> None:
        stream = self.rng.choice(self.streams)
        name = self.rng.choice(("get_consumption_status", "check_consumption_status"))
        given = {"task_name": stream.task, "partition_id": self._in(stream.partition)}
        self.calls.append({"on": "client", "call": name, "with": given})

    def _on(self, stream: Reading, call: str, **given: Any) -> None:
        self.calls.append({"on": stream.name, "call": call, "with": given})
