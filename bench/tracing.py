"""What a trace costs the operations it records: single rows, with and without `TQ_TRACE`, in turn in one process.

    python -m bench.tracing [--rounds 40] [--calls 250]

Each round does every operation `calls` times without a trace and as often with one, in an order that changes from round
to round. Beside the medians stand the means, which have the work of the thread that writes, and the 95th percentiles.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import transfer_queue as tq
from transfer_queue.trace import switch

PARTITION = "bench"
Act = Callable[[], object]
Prepared = Callable[[int], list[Act]]


def puts(calls: int) -> list[Act]:
    client, row = tq.get_client(), {"x": torch.zeros(1, 256)}
    return [lambda: client.put(row, partition_id=PARTITION)] * calls


def kv_puts(calls: int) -> list[Act]:
    row = {"x": torch.zeros(256)}
    return [lambda key=f"k{n}": tq.kv_put(key, PARTITION, row) for n in range(calls)]  # type: ignore[misc]


def filled(calls: int) -> None:
    tq.get_client().put({"x": torch.zeros(calls, 256)}, partition_id=PARTITION)


def takes(calls: int) -> list[Act]:
    filled(calls)
    client = tq.get_client()
    return [lambda: client.take(PARTITION, ["x"], 1, "take")] * calls


def gets(calls: int) -> list[Act]:
    """`get_meta` and `get_data`."""
    filled(calls)
    client = tq.get_client()
    return [lambda: client.get_data(client.get_meta(["x"], 1, PARTITION, task_name="get"))] * calls


def kv_gets(calls: int) -> list[Act]:
    tq.kv_batch_put([f"k{n}" for n in range(calls)], PARTITION, {"x": torch.zeros(calls, 256)})
    return [lambda key=f"k{n}": tq.kv_batch_get([key], PARTITION) for n in range(calls)]  # type: ignore[misc]


CASES: dict[str, Prepared] = {
    "put": puts, "kv_put": kv_puts, "get_meta + get_data": gets, "take": takes, "kv_batch_get": kv_gets,
}  # fmt: skip


def timed(acts: list[Act]) -> list[float]:
    """Microseconds of each."""
    found = []
    for act in acts:
        began = time.perf_counter()
        act()
        found.append(1e6 * (time.perf_counter() - began))
    return found


def measured(prepared: Prepared, calls: int, folder: str | None) -> list[float]:
    tq.get_client().clear_partition(PARTITION)
    acts = prepared(calls)
    gc.collect()
    if folder is None:
        return timed(acts)
    with tq.trace.start(folder):
        assert switch.recorder is not None
        return timed(acts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=250)
    options = parser.parse_args()
    tq.init()
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'operation':<22}{'off us':>9}{'on us':>9}{'median':>9}{'mean':>9}{'p95 off':>9}{'p95 on':>9}")
        for name, prepared in CASES.items():
            off: list[float] = []
            on: list[float] = []
            for number in range(options.rounds + 1):
                both = [(off, None), (on, folder)]
                for into, where in both if number % 2 else both[::-1]:
                    found = measured(prepared, options.calls, where)
                    into += found if number else []  # the first round warms up
            print(line(name, off, on), flush=True)
    tq.close()


def line(name: str, off: list[float], on: list[float]) -> str:
    median, mean = (f"{100 * (kind(on) / kind(off) - 1):+.1f} %" for kind in (statistics.median, statistics.fmean))
    p95 = [statistics.quantiles(one, n=20)[-1] for one in (off, on)]
    medians = f"{statistics.median(off):9.1f}{statistics.median(on):9.1f}"
    return f"{name:<22}{medians}{median:>9}{mean:>9}{p95[0]:9.1f}{p95[1]:9.1f}"


if __name__ == "__main__":
    main()
