"""4 GB of rows through a store with 1 GB of memory and a disk, beside the disk alone and files of `torch.save`.

    python -m bench.spill [--rounds 3] [--directory DIR] [--nbytes 4000000000] [--memory 1000000000]

In turn: the same columns are written to one file (the disk alone, synced), saved as a file each, and put. Then all are
read: cold, after the system was made to forget the files' pages; and twice hot. Each column is summed, so that every
byte is looked at; `sum` is what that costs alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench.durability import CLIENT
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.session import Session
from transfer_queue.launch import local
from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire.address import parse_address

ROWS, COLUMN_NBYTES = 64, 100_000_000
Rates = dict[str, list[float]]


def columns(nbytes: int) -> Iterator[torch.Tensor]:
    """Different ones, each in the same memory."""
    column = torch.rand(ROWS, COLUMN_NBYTES // ROWS // 4)
    for number in range(nbytes // COLUMN_NBYTES):
        column[:, 0] = number
        yield column


def looked_at(column: torch.Tensor, number: int) -> None:
    assert float(column[0, 0]) == number
    column.sum()


def forget(fd: int) -> None:
    """The system has no page of a file in memory afterwards, unless somebody maps it."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Disk:
    """One file, written and read in large pieces: what the disk gives."""

    def __init__(self, directory: str) -> None:
        self.fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        self._buffer = torch.empty(ROWS, COLUMN_NBYTES // ROWS // 4)

    def put(self, number: int, column: torch.Tensor) -> None:
        _all(lambda view, at: os.pwrite(self.fd, view, number * COLUMN_NBYTES + at), column)

    def put_all(self) -> None:
        os.fdatasync(self.fd)

    def forget(self) -> None:
        forget(self.fd)

    def get(self, number: int) -> torch.Tensor:
        _all(lambda view, at: os.preadv(self.fd, [view], number * COLUMN_NBYTES + at), self._buffer)
        return self._buffer

    def close(self) -> None:
        os.close(self.fd)


def _all(move: Callable[[memoryview, int], int], column: torch.Tensor) -> None:
    view, at = memoryview(column.view(torch.uint8).view(-1).numpy()), 0  # type: ignore[arg-type]
    while at < len(view):
        at += move(view[at:], at)


class Files:
    """What one would write otherwise: a file for each batch."""

    def __init__(self, directory: str) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=directory)

    def _path(self, number: int) -> Path:
        return Path(self._folder.name) / f"{number}.pt"

    def put(self, number: int, column: torch.Tensor) -> None:
        torch.save({"x": column}, self._path(number))

    def put_all(self) -> None:
        pass

    def forget(self) -> None:
        for path in Path(self._folder.name).iterdir():
            with path.open("rb") as file:
                forget(file.fileno())

    def get(self, number: int) -> torch.Tensor:
        column: torch.Tensor = torch.load(self._path(number), weights_only=True)["x"]
        return column

    def close(self) -> None:
        self._folder.cleanup()


class Store:
    """A service whose memory is too small."""

    def __init__(self, directory: str, memory: int) -> None:
        config = ServerConfig(
            run_dir="", owner_pid=os.getpid(), budget_nbytes=memory, client=CLIENT, durability="process",
            sampler={"class": "SequentialSampler"}, spill_dir=directory,
        )  # fmt: skip
        self._server = local.start(config)
        self._client = TransferQueueClient.of(Session(parse_address(self._server.address)))

    def put(self, number: int, column: torch.Tensor) -> None:
        self._client.put({"x": column}, partition_id=f"p{number}")

    def put_all(self) -> None:
        stats = self._client.stats()
        print(f"  in memory {stats['arena_nbytes_used']:,}, on the disk {stats['spill_nbytes_used']:,} bytes")

    def forget(self) -> None:
        pid = self._client.stats()["pid"]
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            if "memfd" not in os.readlink(path) and "(deleted)" in os.readlink(path):
                with open(path, "rb") as file:
                    forget(file.fileno())

    def get(self, number: int) -> torch.Tensor:
        meta = self._client.get_meta(["x"], ROWS, f"p{number}", mode="force_fetch")
        column: torch.Tensor = self._client.get_data(meta, dense=True)["x"]
        return column

    def close(self) -> None:
        self._client.close()
        self._server.stop()


def measured(system: Disk | Files | Store, nbytes: int, rates: Rates) -> None:
    count = nbytes // COLUMN_NBYTES

    def timed(name: str, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        rates.setdefault(name, []).append(count * COLUMN_NBYTES / (time.perf_counter() - began))

    def put() -> None:
        for number, column in enumerate(columns(nbytes)):
            system.put(number, column)
        system.put_all()

    def get() -> None:
        for number in range(count):
            looked_at(system.get(number), number)

    timed("put", put)
    system.forget()
    for name in ("get, cold", "get, again", "get, hot"):
        timed(name, get)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--nbytes", type=int, default=4_000_000_000)
    parser.add_argument("--memory", type=int, default=1_000_000_000)
    options = parser.parse_args()
    kinds: dict[str, Callable[[], Disk | Files | Store]] = {
        "disk": lambda: Disk(options.directory),
        "torch.save": lambda: Files(options.directory),
        "put": lambda: Store(options.directory, options.memory),
    }
    found: dict[str, Rates] = {kind: {} for kind in kinds}
    for turn in range(options.rounds):
        order = list(kinds)[turn % len(kinds) :] + list(kinds)[: turn % len(kinds)]
        for kind in order:
            system = kinds[kind]()
            measured(system, options.nbytes, found[kind])
            system.close()
    for name in found["put"]:
        medians = {kind: statistics.median(rates[name]) for kind, rates in found.items()}
        listed = ", ".join(f"{kind} {rate / 1e6:,.0f} MB/s" for kind, rate in medians.items())
        print(f"{name}: {listed}; put / disk {medians['put'] / medians['disk']:.2f}")


if __name__ == "__main__":
    main()
