"""Client processes that do random operations on a service and write down what they did, for `histories`.

Run as a module it is a nursery: it works for a moment, then forks a worker for every line
`NAME NUMBER SEED UNTIL STALE` on its standard input, whose process id it prints. A worker appends two lines of JSON to
a file of its own, FOLDER/NAME.jsonl: before an operation and after it. What has no second line has an unknown outcome.

A put fills a whole row with one number made of the put's own and the key, so that a torn read is seen; it is written
down as a read of -1, which nobody puts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from histories import Clear, Get, Put, Record
from histories_rows import Ack, End, Fetch, Insert, Release

import transfer_queue as tq
from transfer_queue.errors import (
    CallerError,
    DeadlineExceeded,
    LeaseExpired,
    ServiceError,
    TransferQueueError,
    UnknownRows,
)
from transfer_queue.metadata import BatchMeta

KEYS = ("a", "b", "c", "d")
PLAIN, LEASED = ("plain-0", "plain-1"), ("leased-0", "leased-1")
TASKS = (*PLAIN, *LEASED)
WIDTHS = (8, 12_000, 40_000)  # numbers of a row: along with the request, small and large blocks of an arena
TORN = -1
KINDS: dict[str, type[Record]] = {
    kind.__name__: kind for kind in (Put, Get, Clear, Insert, Fetch, Ack, Release, End)
}  # fmt: skip


class Recorder:
    """Writes the records of one process; each line reaches the file before the operation goes on."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        self._file = os.open(folder / f"{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._number = 0

    def begin(self, kind: type[Record], *each: dict[str, Any]) -> int:
        """Operations that start now, as one call of the service: their fields."""
        self._number += 1
        self._write({"n": self._number, "kind": kind.__name__, "each": each, "started": time.monotonic()})
        return self._number

    def end(self, number: int, outcome: str, *found: dict[str, Any]) -> None:
        """How they ended; `found` adds to their fields."""
        self._write({"n": number, "ended": time.monotonic(), "outcome": outcome, "found": found})

    def crash(self, text: str) -> None:
        self._write({"crash": text})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_records(folder: Path) -> list[Record]:
    """All records of a folder. Raises `AssertionError` with the traceback of a worker that crashed."""
    return [record for path in sorted(folder.glob("*.jsonl")) for record in _records_of(path)]


def _records_of(path: Path) -> Iterator[Record]:
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.endswith(b"}")]
    crashed = [line["crash"] for line in lines if "crash" in line]
    assert not crashed, f"{path.stem}: {crashed[0]}"
    ends = {line["n"]: line for line in lines if "ended" in line}
    for line in lines:
        if "started" not in line:
            continue
        over = ends.get(line["n"], {"outcome": "unknown"})
        when = {"process": path.stem, "started": line["started"], "outcome": over["outcome"]}
        if over["outcome"] != "unknown":
            when["ended"] = over["ended"]
        found = over.get("found") or [{}] * len(line["each"])
        for given, more in zip(line["each"], found, strict=True):
            fields = {**given, **more}
            if "rows" in fields:
                fields["rows"] = tuple(fields["rows"])
            yield KINDS[line["kind"]](**when, **fields)


def number_in(row: torch.Tensor) -> int:
    """The number that fills a row, or `TORN`."""
    low, high = row.min().item(), row.max().item()
    return int(low) if low == high else TORN


class Worker:
    def __init__(self, recorder: Recorder, number: int, seed: int) -> None:
        self.recorder = recorder
        self.rng = random.Random(seed)
        self.client = tq.get_client()
        self.errors: list[TransferQueueError] = []  # without those of fetches that found too few rows
        self._last = number * 1_000_000
        self._held: list[tuple[str, BatchMeta]] = []

    def step(self) -> None:
        """One operation of any kind."""
        steps: list[tuple[Callable[[], None], int]] = [
            (self.put, 6), (self.get, 8), (self.list, 2), (self.clear, 2), (self.insert, 2), (self.take, 4),
            (self.lend, 4), (self.settle, 5),
        ]  # fmt: skip
        choices, weights = zip(*steps, strict=True)
        self.rng.choices(choices, weights)[0]()

    def _fresh(self) -> int:
        self._last += 1
        return self._last

    def _attempt(self, number: int, call: Callable[[], object]) -> None:
        """Do one operation and write down how it ended, with what it found where it returns a list of that."""
        try:
            found = call()
        except (CallerError, LeaseExpired) as error:
            self.errors.append(error)
            self.recorder.end(number, "refused")
        except DeadlineExceeded as error:
            unheard = "no answer" in str(error) or "does not read" in str(error)
            self.recorder.end(number, "unknown" if unheard else "refused")
            if unheard:
                self.errors.append(error)
        except ServiceError as error:
            self.errors.append(error)
            self.recorder.end(number, "unknown")
        else:
            self.recorder.end(number, "ok", *(found if isinstance(found, list) else ()))

    # keys

    def put(self) -> None:
        keys, value = self.rng.sample(KEYS, self.rng.choice((1, 1, 2))), self._fresh()
        rows = [self._filled(value * len(KEYS) + KEYS.index(key), value) for key in keys]
        number = self.recorder.begin(Put, *({"key": key, "value": value} for key in keys))

        def call() -> None:
            if len(keys) == 1:
                tq.kv_put(keys[0], "kv", {"x": rows[0], "v": torch.tensor(value)}, tag={"value": value})
            else:
                tags = [{"value": value}] * len(keys)
                tq.kv_batch_put(keys, "kv", {"x": rows, "v": torch.full((len(keys),), value)}, tags=tags)

        self._attempt(number, call)

    def _filled(self, number: int, value: int) -> torch.Tensor:
        return torch.full((WIDTHS[value % len(WIDTHS)],), number, dtype=torch.float64)

    def get(self) -> None:
        keys = self.rng.sample(KEYS, self.rng.choice((1, 1, 2)))
        number = self.recorder.begin(Get, *({"key": key} for key in keys))
        self._attempt(number, lambda: [{"value": value} for value in self.read(keys)])

    def read(self, keys: list[str]) -> list[int | None]:
        """The values of keys, None where one is absent, `TORN` where rows do not hold one value of their key."""
        try:
            data = tq.kv_batch_get(keys, "kv", copy=self.rng.random() < 0.3)
        except UnknownRows:
            return [None for _ in keys]
        values: dict[str, int] = {}
        for row, told in zip(data["x"].unbind(), data["v"].tolist(), strict=True):
            value, key = divmod(number_in(row), len(KEYS))
            whole = value == told and row.numel() == WIDTHS[value % len(WIDTHS)] and KEYS[key] in keys
            if not whole or KEYS[key] in values:
                return [TORN for _ in keys]
            values[KEYS[key]] = value
        return [values.get(key) for key in keys]

    def list(self) -> None:
        number = self.recorder.begin(Get, *({"key": key} for key in KEYS))

        def call() -> list[dict[str, Any]]:
            tags = tq.kv_list("kv").get("kv", {})
            return [{"value": tags[key]["value"] if key in tags else None} for key in KEYS]

        self._attempt(number, call)

    def clear(self) -> None:
        key = self.rng.choice(KEYS)
        number = self.recorder.begin(Clear, {"key": key})
        self._attempt(number, lambda: tq.kv_clear(key, "kv"))

    # rows

    def insert(self) -> None:
        values = [self._fresh() for _ in range(self.rng.randint(1, 4))]
        width = self.rng.choice((4, 4, 4, 20_000))
        rows = [torch.full((width,), value, dtype=torch.float64) for value in values]
        number = self.recorder.begin(Insert, {"rows": [str(value) for value in values]})
        tags = [{"row": str(value)} for value in values]
        names = [str(value) for value in values]
        self._attempt(number, lambda: tq.kv_batch_put(names, "rows", {"x": rows}, tags=tags))

    def take(self) -> None:
        self._fetch(self.rng.choice(PLAIN), None)

    def lend(self) -> None:
        if len(self._held) < 4:
            self._fetch(self.rng.choice(LEASED), self.rng.choice((0.1, 0.4, 30.0)))

    def _fetch(self, task: str, lease_s: float | None) -> None:
        size, wait_s = self.rng.randint(1, 4), self.rng.choice((0.0, 0.02, 0.2))
        number = self.recorder.begin(Fetch, {"task": task, "size": size, "lease_s": lease_s or 0.0})
        got: list[BatchMeta] = []

        def call() -> list[dict[str, Any]]:
            got.append(self.client.get_meta(["x"], size, "rows", "fetch", task, None, wait_s, lease_s))
            return [{"rows": [tag["row"] for tag in got[0].custom_meta], "lease": got[0].lease}]

        self._attempt(number, call)
        if got and got[0].lease:
            self._held.append((task, got[0]))
        if got and self.rng.random() < 0.5:
            self._look(got[0])

    def _look(self, meta: BatchMeta) -> None:
        """Rows that were handed out hold what their writer put; else that is a read of what nobody put."""
        rows = [tag["row"] for tag in meta.custom_meta]
        number = self.recorder.begin(Get, *({"key": f"data of row {row}"} for row in rows))

        def call() -> list[dict[str, Any]]:
            right = [str(number_in(row)) for row in self.client.get_data(meta)["x"].unbind()] == rows
            return [{"value": None if right else TORN} for _ in rows]

        self._attempt(number, call)

    def settle(self) -> None:
        """Acknowledge or give back some or all rows of one of the leases."""
        if not self._held:
            return
        task, meta = self._held.pop(self.rng.randrange(len(self._held)))
        if len(meta) > 1 and self.rng.random() < 0.4:
            self._held.append((task, meta[1:]))
            meta = meta[:1]
        kind, call = (Ack, self.client.ack) if self.rng.random() < 0.75 else (Release, self.client.release)
        rows = [tag["row"] for tag in meta.custom_meta]
        number = self.recorder.begin(kind, {"task": task, "lease": meta.lease, "rows": rows})
        self._attempt(number, lambda: call(meta))


class StaleWorker(Worker):
    """Reads now and then from a cache that nobody keeps up to date: what the checker has to find."""

    def __init__(self, recorder: Recorder, number: int, seed: int) -> None:
        super().__init__(recorder, number, seed)
        self._cache: dict[str, int | None] = {}

    def read(self, keys: list[str]) -> list[int | None]:
        if self.rng.random() < 0.3 and all(key in self._cache for key in keys):
            return [self._cache[key] for key in keys]
        values = super().read(keys)
        self._cache = {**dict(zip(keys, values, strict=True)), **self._cache}
        return values


def drain(recorder: Recorder) -> None:
    """Read every key, and fetch every row that is still offered to a task."""
    number = recorder.begin(Get, *({"key": key} for key in KEYS))
    worker = Worker(recorder, 0, 0)
    found = worker.read(list(KEYS))
    recorder.end(number, "ok", *({"value": value} for value in found))
    for task in TASKS:
        for size in (64, 8, 1):
            while True:
                number = recorder.begin(Fetch, {"task": task, "size": size})
                try:
                    meta = worker.client.get_meta(["x"], size, "rows", task_name=task, timeout_s=0)
                except DeadlineExceeded:
                    recorder.end(number, "refused")
                    break
                recorder.end(number, "ok", {"rows": [tag["row"] for tag in meta.custom_meta]})


def run(folder: Path, name: str, number: int, seed: int, until: float, stale: bool) -> None:
    recorder = Recorder(folder, name)
    try:
        torch.set_num_threads(1)
        tq.init()
        worker = (StaleWorker if stale else Worker)(recorder, number, seed)
        while time.monotonic() < until:
            worker.step()
        end = recorder.begin(End, {})
        tq.close()
        recorder.end(end, "ok")
    except BaseException:
        recorder.crash(traceback.format_exc())
        raise


def main(folder: Path, first: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ended is gone; the test holds a descriptor of each
    # This also loads what is imported on first use.
    run(folder, f"nursery-{first}", first, first, time.monotonic() + 0.3, stale=False)
    print("ready", flush=True)
    for line in sys.stdin:
        name, number, seed, until, stale = line.split()
        pid = os.fork()
        if not pid:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                run(folder, name, int(number), int(seed), float(until), bool(int(stale)))
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
