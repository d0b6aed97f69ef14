"""What a trace costs the operations it records: single rows, with and without a trace, in turn in one process.

    python -m bench.tracing [--rounds 100] [--calls 20]

Each round does every operation `calls` times without a trace, as often with one, and as often without one again, in an
order that changes from round to round: what the two without differ by is what the machine did meanwhile. `writer` is
the processor time that the thread which writes takes for each operation, beside it.
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


def in_turn(prepared: Prepared, rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds of each call: without a trace, with one, and without one again."""
    found: dict[str, list[float]] = {"off": [], "on": [], "again": []}
    arms = list(found)
    for number in range(rounds + 1):
        tq.get_client().clear_partition(PARTITION)
        acts = prepared(3 * calls)
        for place, arm in enumerate(arms[number % 3 :] + arms[: number % 3]):
            switch.is_on = arm == "on"
            took = timed(acts[place * calls : (place + 1) * calls])
            found[arm] += took if number else []  # the first round warms up
    return found


def writer_us(prepared: Prepared, calls: int, folder: str) -> float:
    """Of processor time for each call, in other threads than the caller's."""
    tq.get_client().clear_partition(PARTITION)
    acts = prepared(calls)
    before = time.process_time() - time.thread_time()
    with tq.trace.start(folder):
        timed(acts)
    return 1e6 * (time.process_time() - time.thread_time() - before) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    tq.init()
    gc.disable()
    print(f"{'operation':<22}{'off us':>9}{'on us':>9}{'on':>9}{'again':>9}{'p95 off':>9}{'p95 on':>9}{'writer':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name, prepared in CASES.items():
            with tq.trace.start(folder):
                found = in_turn(prepared, options.rounds, options.calls)
            print(line(name, found, writer_us(prepared, 1000, folder)), flush=True)
    tq.close()


def line(name: str, found: dict[str, list[float]], writer: float) -> str:
    off, on, again = (statistics.median(one) for one in found.values())
    p95 = [statistics.quantiles(found[arm], n=20)[-1] for arm in ("off", "on")]
    changes = "".join(f"{100 * (one / off - 1):+7.1f} %" for one in (on, again))
    return f"{name:<22}{off:9.1f}{on:9.1f}{changes}{p95[0]:9.1f}{p95[1]:9.1f}{writer:9.1f}"


if __name__ == "__main__":
    main()
