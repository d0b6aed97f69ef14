"""A query over a live partition, and its export as Parquet.

    python -m bench.tables [--rounds 7] [--directory DIR] [--nbytes 1000000000]

Query: 100,000 rows of 10 scalar columns, put by key in 100 puts, in `transfer_queue.sql` of a process that has asked
before. `DuckDB` is the same query on the same columns in its process's own memory. Export: rows of float32 tensors, and
of int64 lists of different lengths. `file` is what the disk does alone: one file of as many bytes, written at once and
synced, in turn with the export. The directory should be on the disk to be measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import torch

import transfer_queue as tq
from bench.journal import write_file

ROWS, PUTS = 1000, 100
QUERIES = [
    ("group by", "select g, avg(c0), count(*) from {} group by g"),
    ("group by, all columns", "select g, " + ", ".join(f"avg(c{n})" for n in range(8)) + ", max(h) from {} group by g"),
    ("group by a tag", "select tag_step, avg(c0) from {} group by tag_step"),
    ("count", "select count(*) from {}"),
]
LENGTH = 8192  # numbers of a row that is exported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--nbytes", type=int, default=1_000_000_000)
    args = parser.parse_args()
    tq.init()
    try:
        query(args.rounds)
        with tempfile.TemporaryDirectory(dir=args.directory) as place:
            export("float32 tensors", _dense, args.nbytes, Path(place), args.rounds)
            export("int64 lists", _ragged, args.nbytes, Path(place), args.rounds)
    finally:
        tq.close()


def query(rounds: int) -> None:
    for put in range(PUTS):
        columns = {f"c{n}": torch.rand(ROWS) for n in range(8)}
        columns |= {"g": torch.randint(0, 10, (ROWS,)), "h": torch.arange(ROWS) + put * ROWS}
        keys = [f"{put}-{row}" for row in range(ROWS)]
        tq.kv_batch_put(keys, "plain", columns)
        tq.kv_batch_put(keys, "tagged", columns, tags=[{"step": put, "source": "math"}] * ROWS)
    held = tq.table("tagged").to_arrow()
    print(f"{ROWS * PUTS:,} rows, 10 scalar columns in {PUTS} puts; median (worst) of {rounds} rounds")
    with duckdb.connect() as connection:
        connection.register("held", held)
        for name, text in QUERIES:
            ways: dict[str, Callable[[], Any]] = {
                "tagged": lambda text=text: tq.sql(text.format("tagged")),
                "DuckDB": lambda text=text: connection.sql(text.format("held")).to_arrow_table(),
            }
            if "tag_" not in text:
                ways["plain"] = lambda text=text: tq.sql(text.format("plain"))
            seconds = _timed(ways, rounds)
            print(f"  {name}: " + ", ".join(f"{way} {_told(one)}" for way, one in seconds.items()))


def _timed(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round but the first."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, call in ways.items():
            begun = time.perf_counter()
            call()
            if number:
                seconds[way].append(time.perf_counter() - begun)
    return seconds


def _told(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms ({1e3 * max(seconds):.1f})"


def _dense(rows: int) -> Any:
    return torch.rand(rows, LENGTH)


def _ragged(rows: int) -> Any:
    half = [LENGTH // 4 - (row % 2) * LENGTH // 8 for row in range(rows)]
    return [torch.randint(0, 150_000, (length + LENGTH // 4,)) for length in half]


def export(name: str, make: Callable[[int], Any], nbytes: int, place: Path, rounds: int) -> None:
    """An export beside a plain file of as many bytes."""
    partition, put = f"export {name}", 256
    done = 0
    while done < nbytes:
        column = make(put)
        tq.kv_batch_put([f"{done}-{row}" for row in range(put)], partition, {"x": column})
        done += sum(row.nbytes for row in column)
    del column
    path = place / "rows.parquet"
    seconds: dict[str, list[float]] = {"export": [], "file": []}
    written, noise = 0, np.random.default_rng(0)
    for number in range(rounds + 1):
        begun = time.perf_counter()
        written = tq.export_table(partition, path)["bytes"]
        spent = time.perf_counter() - begun
        path.unlink()
        alone = write_file(str(place), memoryview(noise.bytes(written)))
        if number:
            seconds["export"].append(spent)
            seconds["file"].append(alone)
    ours, file = (statistics.median(seconds[way]) for way in ("export", "file"))
    print(
        f"export, {name}: {done / 1e9:.2f} GB in rows, {written / 1e9:.2f} GB in the file, "
        f"{written / ours / 1e6:.0f} MB/s; file alone {written / file / 1e6:.0f} MB/s; share {file / ours:.2f}"
    )
    tq.get_client().clear_partition(partition)


if __name__ == "__main__":
    main()
