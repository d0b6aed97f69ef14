"""Single rows from one process to another, beside what else hands rows over.

    python -m bench.singles [--beside TREE] [--peers redis,reverb,pipe] [--rounds 3] [--only take-1,crowd,...]

`here`: `get_meta`, `get_data` and one row of the result. `take`: the same by `take`. `TREE` is another checkout. Peers:
`redis`, a stream on a unix socket; `reverb`, Reverb 0.14 with a queue as its table; `pipe`, `multiprocessing.Queue`.
Each round runs every case in processes of its own for each of them, in turn.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple

from bench.contenders import Contender, arguments, contenders, in_turn
from bench.environments import ROOT
from bench.single_systems import SYSTEMS, End, System

LIMIT_S = 120
PACE_S = 0.01


class Case(NamedTuple):
    """`num_producers` processes put `num_rows` rows of `row_nbytes` in all, as many `num_consumers` take them. With
    `pace_s` a row is put after so long, else all are there (`filled`) or come as fast as they can."""

    row_nbytes: int
    num_rows: int
    num_producers: int = 1
    num_consumers: int = 1
    filled: bool = True
    pace_s: float = 0.0


CASES = {
    "take-1": Case(1 << 10, 2000),
    "take-100": Case(100 << 10, 1000),
    "take-1000": Case(1 << 20, 200),
    "crowd": Case(1 << 10, 16_000, num_consumers=8),
    "flow": Case(100 << 10, 4000, num_producers=4, num_consumers=4, filled=False),
    "paced-1": Case(1 << 10, 300, filled=False, pace_s=PACE_S),
    "paced-100": Case(100 << 10, 300, filled=False, pace_s=PACE_S),
}


def produce(join: Callable[[Any, int], End], address: Any, case: Case, barrier: Any, results: Any) -> None:
    """Puts its share of the rows. Each row begins with when its put began."""
    import numpy as np

    share = case.num_rows // case.num_producers
    end = join(address, share)
    barrier.wait()
    for number in range(share):
        if case.pace_s:
            time.sleep(case.pace_s)
        row = np.full(case.row_nbytes // 8, number + 1.0)
        row[0] = time.monotonic()
        end.put(row)
    results.put(None)
    end.close()


def consume(join: Callable[[Any, int], End], address: Any, case: Case, barrier: Any, results: Any) -> None:
    """Takes its share of the rows, and tells (began, seconds of each take or on its way, ended)."""
    share = case.num_rows // case.num_consumers
    end = join(address, share)
    seconds: list[float] = []
    barrier.wait()
    began = time.monotonic()
    for _ in range(share):
        asked = time.monotonic()
        row = end.take()
        put_at = float(row[0])
        seconds.append(time.monotonic() - (put_at if case.pace_s else asked))
        if not case.filled:
            end.remove()
    ended = time.monotonic()
    verify(row, case)
    results.put((began, seconds, ended))
    end.close()


def verify(row: Any, case: Case) -> None:
    """AssertionError where the row that was taken last is not as a producer made it."""
    import numpy as np

    values = np.asarray(row)[1:]
    assert len(values) == case.row_nbytes // 8 - 1, f"{len(values)} numbers"
    assert values[0] in range(1, case.num_rows + 1), f"number {values[0]}"
    assert (values == values[0]).all(), f"parts of several rows: {values}"


def measure(name: str, case_name: str) -> None:
    """Prints the seconds of every row, and how many a second all took together."""
    system, case = SYSTEMS[name], CASES[case_name]
    context = multiprocessing.get_context("spawn")
    with system.serve(context, 2 * case.num_rows) as address:
        taken = _run(context, system, address, case)
    seconds = [one for _, of_one, _ in taken for one in of_one]
    began, ended = min(began for began, _, _ in taken), max(ended for _, _, ended in taken)
    print(json.dumps({"seconds": seconds, "rate": len(seconds) / (ended - began)}), flush=True)


def _run(context: SpawnContext, system: System, address: Any, case: Case) -> list[Any]:
    results: Any = context.Queue()
    waits = [case.num_producers, case.num_consumers] if case.filled else [case.num_producers + case.num_consumers]
    barriers = [context.Barrier(count) for count in waits]
    arguments = (system.join, address, case)
    workers = []
    for work, count, barrier in (
        (produce, case.num_producers, barriers[0]),
        (consume, case.num_consumers, barriers[-1]),
    ):
        started = [context.Process(target=work, args=(*arguments, barrier, results)) for _ in range(count)]
        workers += started
        for worker in started:
            worker.start()
        if case.filled and work is produce:
            for _ in started:
                results.get(timeout=LIMIT_S)
    missing = case.num_consumers + (0 if case.filled else case.num_producers)
    found = [results.get(timeout=LIMIT_S) for _ in range(missing)]
    for worker in workers:
        worker.join()
    return [one for one in found if one is not None]


def main() -> None:
    options = arguments(__doc__, CASES, 3)
    systems = {"here": Contender("queue", tree=ROOT), "take": Contender("take", tree=ROOT)}
    if options.beside:
        tree = options.beside.resolve()
        systems |= {"beside": Contender("queue", tree=tree), "beside take": Contender("take", tree=tree)}
    systems |= contenders(options.peers, print)
    for case in options.only.split(","):
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for name, measured in in_turn(systems, "bench.singles", case, LIMIT_S, options.rounds):
            found[name] += [measured] if measured is not None else []
        for name, rounds in found.items():
            if not rounds:
                print(f"{case:9} {name:11} not done within {LIMIT_S} s, or failed")
                continue
            seconds = sorted(1e6 * one for run in rounds for one in run["seconds"])
            rate = statistics.median(run["rate"] for run in rounds)
            print(
                f"{case:9} {name:11} median {statistics.median(seconds):8.0f} us  p95 "
                f"{seconds[int(len(seconds) * 0.95)]:8.0f} us  {rate:8.0f} rows/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
