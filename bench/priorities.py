"""Replay by priority: what a change of priorities, a draw with its rows, and an insert cost as the table grows.

    python -m bench.priorities [--sizes 1000,10000,100000] [--rounds 200] [--no-reverb]

Ours: `set_priorities` of 32 groups, `select` of 32 (weighted, used again and again) with `get_data` of their rows and
`ack`, and one group opened and finished with its row. Reverb 0.14 (`Prioritized`, in an environment of its own, skipped
with a word where it does not install): `mutate_priorities` of 32 items, `sample` of 32, `insert`. A row is one array of
1 KB. One client and one server, in turn for each size; microseconds, median and 95 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 32
ROW = np.ones(128)
WAYS = ("set", "draw", "insert")


def timed(rounds: int, ways: dict[str, Callable[[int], Any]]) -> dict[str, list[float]]:
    """Microseconds of each way, in turn in each round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 10):
        for name, call in ways.items():
            began = time.perf_counter()
            call(number)
            if number >= 10:
                times[name].append(1e6 * (time.perf_counter() - began))
    return times


def ours(sizes: list[int], rounds: int) -> None:
    """Prints a line for each size."""
    import torch

    import transfer_queue as tq

    tq.init()
    row = {"x": torch.from_numpy(ROW)[None]}
    for size in sizes:
        pool = tq.group_pool(f"replay_{size}", tq.GroupPolicy.prioritized(2 * size))
        client = tq.get_client()

        def insert(number: int, pool: Any = pool) -> None:
            name = f"n{number}"
            pool.open(name, 1)
            pool.finish(pool.claim(group_id=name)[0], row)

        def draw(_: int, pool: Any = pool, client: Any = client) -> None:
            batch = pool.select(BATCH)
            client.get_data(batch.metadata)["x"]
            pool.ack(batch)

        def change(_: int, pool: Any = pool, size: int = size) -> None:
            pool.set_priorities({f"n{random.randrange(size)}": random.random() + 0.1 for _ in range(BATCH)})

        for number in range(size):
            insert(number)
        times = timed(rounds, {"set": change, "draw": draw, "insert": lambda number, size=size: insert(size + number)})
        show("ours", size, times)
        client.clear_partition(f"replay_{size}")
    tq.close()


def reverb(sizes: list[int], rounds: int) -> None:
    """The same in Reverb, in an interpreter that has it."""
    import reverb

    for size in sizes:
        table = reverb.Table(
            "t", reverb.selectors.Prioritized(1.0), reverb.selectors.Fifo(), 2 * size,
            reverb.rate_limiters.MinSize(1),
        )  # fmt: skip
        server = reverb.Server([table], port=None)
        client = reverb.Client(f"localhost:{server.port}")
        for _ in range(size):
            client.insert([ROW], {"t": 1.0})
        keys = sorted({sample[0].info.key for _ in range(20) for sample in client.sample("t", BATCH)})

        def change(_: int, client: Any = client, keys: list[int] = keys) -> None:
            client.mutate_priorities("t", updates={random.choice(keys): random.random() + 0.1 for _ in range(BATCH)})

        times = timed(rounds, {
            "set": change, "draw": lambda _, client=client: [one[0].data for one in client.sample("t", BATCH)],
            "insert": lambda _, client=client: client.insert([ROW], {"t": 1.0}),
        })  # fmt: skip
        show("reverb", size, times)
        server.stop()


def show(who: str, size: int, times: dict[str, list[float]]) -> None:
    cells = []
    for name in WAYS:
        values = sorted(times[name])
        cells.append(f"{name} {statistics.median(values):7.0f} {values[int(0.95 * (len(values) - 1))]:7.0f}")
    print(f"{who:7} {size:7} groups, us: " + "   ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,100000")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--no-reverb", action="store_true")
    parser.add_argument("--only-reverb", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    if given.only_reverb:
        reverb(sizes, given.rounds)
        return
    python = None if given.no_reverb else _reverb_python()
    for size in sizes:
        ours([size], given.rounds)
        if python is not None:
            options = ["--sizes", str(size), "--rounds", str(given.rounds), "--only-reverb"]
            subprocess.run([python, "-m", "bench.priorities", *options], check=True, stderr=subprocess.DEVNULL)


def _reverb_python() -> Path | None:
    from bench.environments import EnvironmentUnavailable, reverb_python

    try:
        return reverb_python(Path(".venv-peers.log"))
    except EnvironmentUnavailable as why:
        print(f"without Reverb: {why}", file=sys.stderr)
        return None


if __name__ == "__main__":
    main()
