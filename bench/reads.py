"""Reads of rows as asynchronous rollouts write them, beside another version of the package and beside its peers.

    python -m bench.reads [--beside TREE] [--peers ray,0.1.11,hand] [--rounds 5] [--only alone,strings,...]

`TREE` is another checkout. Peers: `ray`, its object store; `0.1.11`, the released TransferQueue; `hand`, which makes
the same TensorDict of rows that it holds itself. Each round runs every case in a process of its own for each of them,
in turn. Printed are medians over all reads, p95, the first read, and how long the garbage collector ran within a read
on average.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench import digest
from bench.contenders import Contender, arguments, contenders, in_turn
from bench.environments import ROOT
from bench.read_cases import CASES, LOOKED_AT
from bench.read_systems import SYSTEMS, by_hand
from bench.systems import column_sums

NUM_READS = 12
LIMIT_S = 120


@contextlib.contextmanager
def collections() -> Iterator[list[float]]:
    """Seconds of every run of the garbage collector within."""
    seconds: list[float] = []
    began = 0.0

    def note(phase: str, _info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            seconds.append(time.perf_counter() - began)

    gc.callbacks.append(note)
    yield seconds
    gc.callbacks.remove(note)


def measure(system: str, case: str) -> None:
    """Prints seconds of the first read, of the others, and of the collector within those."""
    importlib.import_module("tensordict")  # no part of anybody's first read
    read = SYSTEMS[system](case)
    taken: list[float] = []
    total = 0.0
    for _ in range(NUM_READS + 1):
        with collections() as collected:
            started = time.perf_counter()
            found = read()
            if case in LOOKED_AT:
                look_at(found["experts"])
            taken.append(time.perf_counter() - started)
        del found
        total += sum(collected) if len(taken) > 1 else 0.0
    verify(read(), case)
    print(json.dumps({"first": taken[0], "reads": taken[1:], "collected": total / NUM_READS}), flush=True)
    if system == "queue":
        sys.modules["transfer_queue"].close()


def verify(found: Any, case: str) -> None:
    """Raises WrongBytes where a row is not what was put, or not in its place."""
    expected = by_hand(case)()
    sums = [{name: column_sums(one[name]) for name in one.keys()} for one in (found, expected)]  # noqa: SIM118
    digest.check(*sums)


def look_at(column: Any) -> int:
    """Read every byte of the arrays."""
    return sum(int(array.reshape(-1).view("int64").sum()) for array in column.tolist())


def main() -> None:
    options = arguments(__doc__, CASES, 5)
    systems = {"here": Contender("queue", tree=ROOT)}
    if options.beside:
        systems["beside"] = Contender("queue", tree=options.beside.resolve())
    systems |= contenders(options.peers, print)
    for case in options.only.split(","):
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for name, measured in in_turn(systems, "bench.reads", case, LIMIT_S, options.rounds):
            found[name] += [measured] if measured is not None else []
        for name, rounds in found.items():
            if not rounds:
                print(f"{case:8} {name:7} not done within {LIMIT_S} s")
                continue
            reads = sorted(1e3 * seconds for one in rounds for seconds in one["reads"])
            first = 1e3 * statistics.median(one["first"] for one in rounds)
            collected = 1e3 * statistics.mean(one["collected"] for one in rounds)
            print(
                f"{case:8} {name:7} median {statistics.median(reads):7.2f} ms  p95 {reads[int(len(reads) * 0.95)]:7.2f}"
                f" ms  first {first:7.2f} ms  collector {collected:6.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
