"""What a trace costs the operations it records: single rows, in processes that record one and in others that do not.

    python -m bench.tracing [--rounds 100] [--calls 20] [--trios 4]

Three processes of one service at a time: one with a trace from its beginning, as with TQ_TRACE, and two without. Each
round every one of them does every operation `calls` times, in an order that changes from round to round; what the two
without differ by is what the machine did meanwhile, and where their memory happens to lie. `trios` follow each other.
`writer` is the processor time that the threads which write take for each operation, beside it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

import transfer_queue as tq

PARTITION = f"bench {os.getpid()}"
ARMS = ("off", "on", "again")
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


def work(line: Connection, folder: str) -> None:
    """Do what is asked for: so many calls of an operation. Answers with their times, and the processor time of others
    than this thread for each, both in microseconds."""
    if folder:
        tq.trace.start(folder)
    tq.init()
    gc.disable()
    while (asked := line.recv()) is not None:
        name, calls = asked
        tq.get_client().clear_partition(PARTITION)
        acts = CASES[name](calls)
        before = time.process_time() - time.thread_time()
        took = timed(acts)
        line.send((took, 1e6 * (time.process_time() - time.thread_time() - before) / calls))
    tq.close()


class Trio:
    """Three processes, one of which records a trace."""

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines: dict[str, Connection] = {}
        self._processes = []
        for arm in ARMS:
            self._lines[arm], theirs = context.Pipe()
            given = theirs, folder if arm == "on" else ""
            self._processes.append(context.Process(target=work, args=given, daemon=True))
            self._processes[-1].start()
            theirs.close()  # so that the end of one is an error, and no wait for its answer

    def times(self, arm: str, name: str, calls: int) -> tuple[list[float], float]:
        self._lines[arm].send((name, calls))
        found: tuple[list[float], float] = self._lines[arm].recv()
        return found

    def close(self) -> None:
        for line, process in zip(self._lines.values(), self._processes, strict=True):
            line.send(None)
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--trios", type=int, default=4)
    options = parser.parse_args()
    tq.init()
    found: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in ARMS} for name in CASES}
    writer: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.trios):
            trio = Trio(folder)
            for number in range(options.rounds + 1):
                for name in CASES:
                    for arm in ARMS[number % 3 :] + ARMS[: number % 3]:
                        took, other = trio.times(arm, name, options.calls)
                        found[name][arm] += took if number else []  # the first round warms up
                        writer[name] += [other] if arm == "on" else []
            trio.close()
    print(f"{'operation':<22}{'off us':>9}{'on us':>9}{'on':>9}{'again':>9}{'p95 off':>9}{'p95 on':>9}{'writer':>9}")
    for name in CASES:
        print(line(name, found[name], statistics.mean(writer[name])))
    tq.close()


def line(name: str, found: dict[str, list[float]], writer: float) -> str:
    off, on, again = (statistics.median(one) for one in found.values())
    p95 = [statistics.quantiles(found[arm], n=20)[-1] for arm in ("off", "on")]
    changes = "".join(f"{100 * (one / off - 1):+7.1f} %" for one in (on, again))
    return f"{name:<22}{off:9.1f}{on:9.1f}{changes}{p95[0]:9.1f}{p95[1]:9.1f}{writer:9.1f}"


if __name__ == "__main__":
    main()
