"""How long after its last sibling a whole group is in its trainer's hands, and what the steps before cost.

    python -m bench.groups [--rounds 200]

Three ways, in turn in each round, for the same group of 8 siblings of one row: `select`, which waits in the service; a
loop over `kv_list` that looks every 5 ms, as NeMo-RL's samplers do; and one that looks every 2 s, as verl's
ReplayBuffer does (fewer rounds). Two processes: a worker, and a trainer that waits. The time is from before the last
sibling's `finish` or `kv_put` to when the trainer has the group; both read CLOCK_MONOTONIC. The polled way puts rows
by key and counts those of the group; it has no attempts, leases or policy. Then, alone: microseconds for each step.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import random
import statistics
import time
from typing import Any

import torch

import transfer_queue as tq

SIZE = 8
SLOW_ROUNDS = 5


def trainer(address: str, asked: Any, told: Any) -> None:
    """Waits for one group each time it is asked; says when it had it."""
    tq.init({"address": address})
    pool = tq.group_pool("selected")
    for way, number in iter(asked.get, None):
        told.put("ready")
        if way == "select":
            pool.ack(pool.select(1, timeout_s=60), clear=True)
            told.put(time.monotonic())
            continue
        pause_s = {"5 ms": 0.005, "2 s": 2.0}[way]
        while sum(key.startswith(f"{number}_") for key in tq.kv_list("polled").get("polled", {})) < SIZE:
            time.sleep(pause_s)
        told.put(time.monotonic())
        tq.kv_clear([f"{number}_{slot}" for slot in range(SIZE)], "polled")
    tq.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    tq.init()
    pool = tq.group_pool("selected", tq.GroupPolicy())
    context = mp.get_context("spawn")
    asked, told = context.Queue(), context.Queue()
    process = context.Process(target=trainer, args=(str(tq.address()), asked, told))
    process.start()
    found: dict[str, list[float]] = {"select": [], "5 ms": [], "2 s": []}
    for number in range(rounds + 5):
        for way, times in found.items():
            if way == "2 s" and number >= SLOW_ROUNDS + 5:
                continue
            asked.put((way, number))
            told.get()
            took = _one(pool, way, number, told)
            if number >= 5:
                times.append(1e3 * took)
    asked.put(None)
    process.join()
    for way, times in found.items():
        times.sort()
        p95 = times[int(0.95 * (len(times) - 1))]
        print(f"{way:8} median {statistics.median(times):8.2f} ms   p95 {p95:8.2f} ms   ({len(times)} rounds)")
    _steps(tq.group_pool("steps", tq.GroupPolicy()))
    tq.close()


def _one(pool: Any, way: str, number: int, told: Any) -> float:
    """Seconds from the last sibling to when the trainer has its group."""
    row = {"x": torch.ones(1, 64)}
    if way == "select":
        pool.open(f"g{number}", SIZE)
        for attempt in pool.claim(SIZE):
            time.sleep(random.uniform(0.002, 0.008))  # a loop that looks must not be in step with it
            began = time.monotonic()
            pool.finish(attempt, row, reward=1.0)
    else:
        for slot in range(SIZE):
            time.sleep(random.uniform(0.002, 0.008))
            began = time.monotonic()
            tq.kv_put(f"{number}_{slot}", "polled", {"x": row["x"][0]})
    return float(told.get()) - began


def _steps(pool: Any, groups: int = 500) -> None:
    """What each step costs while nobody waits."""
    meta = [tq.get_client().put({"x": torch.ones(1, 64)}, partition_id="steps") for _ in range(groups)]
    times: dict[str, list[float]] = {"open": [], "claim": [], "finish": [], "select": [], "ack": []}

    def timed(name: str, call: Any) -> Any:
        began = time.perf_counter()
        result = call()
        times[name].append(1e6 * (time.perf_counter() - began))
        return result

    for number in range(groups):
        timed("open", lambda number=number: pool.open(f"g{number}", 1))
        (attempt,) = timed("claim", pool.claim)
        timed("finish", lambda attempt=attempt, number=number: pool.finish(attempt, meta[number]))
    for _ in range(groups // 4):
        batch = timed("select", lambda: pool.select(4))
        timed("ack", lambda batch=batch: pool.ack(batch))
    cells = "   ".join(f"{name} {statistics.median(values):.0f}" for name, values in times.items())
    print(f"steps, us, median of {groups}: {cells}   (select and ack: 4 groups of up to {groups} sealed ones)")


if __name__ == "__main__":
    main()
