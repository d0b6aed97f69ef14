"""What it costs to look: an overview and a map as partitions grow.

    python -m bench.overview [--rows 100000,1000000] [--rounds 100]

Rows of four fields in blocks of 10,000, a task that has 100 of them on a lease. Milliseconds from the call to the
answer, one client, one service.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import transfer_queue as tq

BLOCK = 10_000
FIELDS = ("tokens", "log_probs", "reward", "advantage")


def timed(rounds: int, call: Callable[[], Any]) -> list[float]:
    """Seconds, sorted."""
    found = []
    for _ in range(rounds + 3):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return sorted(found[3:])


def line(what: str, seconds: list[float], unit: float, name: str) -> None:
    p95 = seconds[int(0.95 * (len(seconds) - 1))]
    print(f"{what:44} median {unit * statistics.median(seconds):8.2f} {name}   p95 {unit * p95:8.2f}", flush=True)


def fill(rows: int) -> None:
    """Put so many rows into the partition "train", to the next 10,000."""
    fields = {name: torch.ones(BLOCK, 1) for name in FIELDS}
    for _ in range(0, rows, BLOCK):
        tq.get_client().put(fields, partition_id="train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="100000,1000000")
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    tq.init()
    client, there = tq.get_client(), 0
    for rows in map(int, given.rows.split(",")):
        fill(rows - there)
        there = max(there, rows)
        client.get_meta(["tokens"], 100, "train", task_name="actor", lease_s=600)
        line(f"overview, {rows:,} rows", timed(given.rounds, client.overview), 1e3, "ms")
        line(f"map in 1,024 runs, {rows:,} rows", timed(given.rounds, lambda: client.partition_map("train")), 1e3, "ms")
    tq.close()


if __name__ == "__main__":
    main()
