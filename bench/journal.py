"""What a journal on a disk costs (`server.journal_dir`), and how long it takes to be back.

    python -m bench.journal [--rounds 5] [--directory DIR] [--units]

Two services at the same time, one with a standby alone and one with a journal as well; every call is made to the one
and then to the other, in turn with who is first. `file` is what the disk does alone: one file, written at once and
synced (`os.fdatasync`), and removed. The directory should be on the disk to be measured. `--units` measures storage
units that joined a service of this machine without a journal.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.durability import GIB, LARGE, MANY, ONE, Head, Place, put_large, put_many, put_one, take_over
from bench.saturation import drive
from transfer_queue.client.client import TransferQueueClient

CASES: list[tuple[str, Callable[[Place], None], int]] = [
    ("put one row, 3 fields, 1 KB", put_one, 1000),
    ("clear, put 1024 rows, 1 MB", put_many, 100),
    ("clear, put 302 MB", put_large, 15),
]
AT_SATURATION = [(1, 1), (64, 1), (64, 8)]
GROWING = 1_000_000  # rows that are put, and cleared
AT_ONCE = 1000


class Journaled(Place):
    """A service, or a unit that joins `head`, with a journal in a directory of its own; and a client of it."""

    def __init__(self, directory: str, budget_nbytes: int = 4 * GIB, head: Head | None = None) -> None:
        super().__init__("machine", budget_nbytes, directory, head)
        self.directory = Path(directory)

    def nbytes(self, kind: str) -> int:
        """Bytes on the disk of this kind of files."""
        return sum(path.stat().st_blocks * 512 for path in self.directory.glob(f"{kind}-*"))

    def read(self, field: str) -> int:
        """How many partitions there are, after a row of each was read."""
        names = self.client.get_partition_list()
        for name in names:
            self.client.get_data(self.client.get_meta([field], 1, name, task_name=secrets.token_hex(4)))
        return len(names)

    def lose_power(self) -> None:
        """Kill everything that the machine runs of it."""
        os.killpg(self.server._process.pid, signal.SIGKILL)
        self.server.wait()
        self.client.close()
        self.server.stop()


def write_file(directory: str, data: memoryview) -> float:
    """Seconds that the disk takes for one file of these bytes."""
    path = os.path.join(directory, "file")
    begun = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
    os.fdatasync(fd)
    os.close(fd)
    spent = time.perf_counter() - begun
    os.unlink(path)
    return spent


def head_of(are_units: bool) -> Head | None:
    return Head() if are_units else None


def calls(rounds: int, directory: str, are_units: bool) -> None:
    places = [
        Place("process", head=head_of(are_units)),
        Journaled(os.path.join(directory, "calls"), head=head_of(are_units)),
    ]
    payload = memoryview(torch.cat([one.reshape(-1) for one in LARGE.values()]).numpy()).cast("B")
    for name, call, count in CASES:
        seconds: list[list[float]] = [[], [], []]
        for place in places:
            for _ in range(min(5, count)):
                call(place)
        for number in range(max(rounds, count)):
            for which in (0, 1) if number % 2 else (1, 0):
                start = time.perf_counter()
                call(places[which])
                seconds[which].append(time.perf_counter() - start)
            if call is put_large:
                seconds[2].append(write_file(directory, payload))
        without, with_it = (statistics.median(found) * 1e6 for found in seconds[:2])
        late = [statistics.quantiles(found, n=20)[-1] * 1e6 for found in seconds[:2]]
        text = f"{name:28} process {without:9,.0f} us (p95 {late[0]:9,.0f})  machine {with_it:9,.0f} us"
        text += f" (p95 {late[1]:9,.0f})  {with_it / without:5.2f}x"
        if seconds[2]:
            file_s = statistics.median(seconds[2])
            text += (
                f"  file {file_s * 1e6:9,.0f} us, {len(payload) / file_s / 1e6:,.0f} MB/s: {file_s / with_it * 1e6:.2f}"
            )
        print(text, flush=True)
    for place in places:
        place.close()


def saturation(rounds: int, directory: str, are_units: bool) -> None:
    for connections, depth in AT_SATURATION:
        found: dict[str, list[tuple[float, float]]] = {"process": [], "machine": []}
        for number in range(rounds):
            for kind in list(found) if number % 2 else list(found)[::-1]:
                own = os.path.join(directory, f"saturation-{connections}-{depth}-{number}")
                head = head_of(are_units)
                place = Place("process", head=head) if kind == "process" else Journaled(own, head=head)
                rate = drive([place.path], [place.pid], connections, depth, 2.0, True)
                found[kind].append((rate.puts, rate.servers_us))
                place.close()
                shutil.rmtree(own, ignore_errors=True)
        text = f"saturation, {connections:2} x {depth}:"
        for kind, rates in found.items():
            puts, busy = (statistics.median(one) for one in zip(*rates, strict=True))
            text += f"  {kind} {puts:7,.0f} puts/s, server {busy:5.1f} us"
        print(text, flush=True)


def back(directory: str, what: str, fill: Callable[[TransferQueueClient], None], are_units: bool) -> None:
    """Until a service, or a unit, that lost its power answers again, and has what it had."""
    place = Journaled(directory, 8 * GIB, head_of(are_units))
    fill(place.client)
    field = "f0" if "large" in what else "ids"
    partitions = place.read(field)
    place.lose_power()
    begun = time.perf_counter()
    place = Journaled(directory, 8 * GIB, place.head)
    assert place.read(field) == partitions
    spent_s = time.perf_counter() - begun
    nbytes = place.nbytes("blocks") + place.nbytes("snapshot")
    print(f"back with {what}, {nbytes / 1e6:7,.0f} MB: {spent_s:5.2f} s", flush=True)
    place.close()


def put_alone(count: int) -> Callable[[TransferQueueClient], None]:
    def fill(client: TransferQueueClient) -> None:
        for _ in range(count):
            client.put(ONE, partition_id="one")

    return fill


def put_together(count: int) -> Callable[[TransferQueueClient], None]:
    def fill(client: TransferQueueClient) -> None:
        for _ in range(count // 1024):
            client.put(MANY, partition_id="many")

    return fill


def put_columns(count: int) -> Callable[[TransferQueueClient], None]:
    def fill(client: TransferQueueClient) -> None:
        for number in range(count):
            client.put(LARGE, partition_id=f"large{number}")

    return fill


def growth(directory: str) -> None:
    """What is on the disk while rows are put and cleared, and what is alive of it in the end."""
    place, most = Journaled(directory), 0
    for _ in range(GROWING // AT_ONCE):
        meta = place.client.put({"ids": torch.zeros(AT_ONCE, 16)}, partition_id="p")
        place.client.get_meta(["ids"], AT_ONCE, "p", task_name="t")
        place.client.clear_samples(meta)
        most = max(most, sum(map(place.nbytes, ("log", "snapshot", "blocks"))))
    left = {kind: place.nbytes(kind) / 1e6 for kind in ("log", "snapshot", "blocks")}
    told = ", ".join(f"{kind} {nbytes:.1f} MB" for kind, nbytes in left.items())
    print(
        f"{GROWING:,} rows put, used and cleared, {AT_ONCE} at once: at most {most / 1e6:.1f} MB, then {told}",
        flush=True,
    )
    place.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on the disk to be measured; else where temporary files are")
    parser.add_argument("--units", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        calls(options.rounds, directory, options.units)
        saturation(options.rounds, directory, options.units)
        back(os.path.join(directory, "alone"), "100,000 rows put one by one", put_alone(100_000), options.units)
        back(
            os.path.join(directory, "together"), "999,424 rows put 1024 at once", put_together(1_000_000), options.units
        )
        back(os.path.join(directory, "columns"), "10 large puts of 302 MB", put_columns(10), options.units)
        if options.units:
            return
        growth(os.path.join(directory, "growth"))
        for count in (10_000, 200_000, 1_000_000):
            take_over(count, True, Journaled(os.path.join(directory, f"killed-{count}"), 16 * GIB))


if __name__ == "__main__":
    main()
