"""Streams of micro-batches: data sets and loaders, read so far and no further, and never for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import transfer_queue as tq

TAKING_S = 6.0  # what is there comes in far less; TransferQueue looks once a second, and for ever
NOTHING = "nothing in time"


class Stream:
    """A data set, or a loader of it, and the loop over it."""

    def __init__(self, dataset: Any, loader: Any) -> None:
        self.dataset = dataset
        self.loader = loader
        self._loop: Iterator[Any] | None = None

    def __repr__(self) -> str:
        return "" if self.loader is None else "of a loader"

    def take(self, count: int, anew: bool = False) -> list[Any]:
        """The next micro-batches, fewer at the end of the stream; `anew` begins another loop."""
        if self._loop is None or anew:
            self._loop = iter(self.loader or self.dataset)
        return in_time(lambda: self._taken(count))

    def _taken(self, count: int) -> list[Any]:
        assert self._loop is not None
        found: list[Any] = []
        while len(found) < count:
            try:
                found.append(next(self._loop))
            except StopIteration:
                return [*found, "the end"]
        return found

    def taken_by_workers(self, count: int) -> list[Any]:
        """`take`, in the order of the rows: workers of TransferQueue are each as fast as they are."""
        found = self.take(count)
        batches = [one for one in found if one != "the end"]
        return [*sorted(batches, key=lambda one: list(one[1].global_indexes)), *found[len(batches) :]]

    def reset(self) -> None:
        (self.loader or self.dataset).reset()

    def step(self, partition_id: str) -> None:
        (self.loader or self.dataset).step(partition_id)

    def buffered(self) -> int:
        return len(self.loader.get_buffer() if self.loader else self.dataset.buffer)

    def close(self) -> None:
        self._loop = None
        for one in (self.loader, self.dataset):
            with suppress(Exception):  # TransferQueue's have none
                one.close()


def stream(config: Any, workers: int | None, **given: Any) -> Stream:
    """A data set; with `workers` in a loader."""
    dataset = tq.StreamingDataset(config, **given)
    return Stream(dataset, None if workers is None else tq.StreamingDataLoader(dataset, num_workers=workers))


def in_time(function: Callable[[], list[Any]]) -> list[Any]:
    """What it returns or raises; a thread that goes on is left behind."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, function()))
        except Exception as raised:  # noqa: BLE001  what is raised is what is compared
            outcome.append((False, raised))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TAKING_S)
    if not outcome:
        return [NOTHING]
    ok, result = outcome[0]
    if ok:
        return list(result)
    raise result


STREAM_CALLS: dict[str, Callable[..., Any]] = {
    "take": lambda stream, **given: stream.take(**given),
    "take of workers": lambda stream, count: stream.taken_by_workers(count),
    "begin again": lambda stream: stream.reset(),
    "go on with": lambda stream, partition_id: stream.step(partition_id),
    "buffered": lambda stream: stream.buffered(),
}
