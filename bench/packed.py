"""302 MB packed into buffers and taken out again, beside memcpy and TransferQueue 0.1.11.

    python -m bench.packed [--rounds 9] [--no-peer]

Values: the `batch` (one dict of 9 tensors), its 1024 `rows` (dicts of 9 tensors), its 9216 `cells` (tensors). Each
round makes every call once, in turn; the buffers are there and were written before. `memcpy` copies the same bytes, by
one thread or two. `share` is the speed of memcpy that a call reaches: with one worker that of one thread, with more
that of two. 0.1.11 decodes views only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.contenders import LOG
from bench.environments import peer_python
from bench.fleet import Fleet

CALLS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("memcpy, 1 thread", "ours", "memcpy", {"threads": 1}),
    ("memcpy, 2 threads", "ours", "memcpy", {"threads": 2}),
    *((f"encode, workers: {n}", "ours", "encode", {"workers": n}) for n in (1, 2, 4)),
    *((f"0.1.11: encode, workers: {n}", "tq", "encode", {"workers": n}) for n in (1, 2, 4)),
    *((f"decode to copies, workers: {n}", "ours", "decode", {"copy": True, "num_workers": n}) for n in (1, 2, 4)),
    ("decode to views", "ours", "decode", {"copy": False}),
    ("0.1.11: decode to views", "tq", "decode", {}),
]
LIMIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-peer", action="store_true", help="without TransferQueue 0.1.11")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        fleet = Fleet(lambda: peer_python(None, LOG), Path(logs))
        try:
            systems = ["ours"] if args.no_peer else ["ours", "tq"]
            agents = {system: fleet.agent(system, system) for system in systems}
            for shape in ("batch", "rows", "cells"):
                _measure(shape, agents, args.rounds)
            for agent in agents.values():
                agent.end()
        finally:
            fleet.close()


def _measure(shape: str, agents: dict[str, Any], rounds: int) -> None:
    for agent in agents.values():
        prepared = agent.call("packing.prepare", LIMIT_S, shape=shape)
    calls = [call for call in CALLS if call[1] in agents]
    seconds: dict[str, list[float]] = {name: [] for name, *_ in calls}
    for _ in range(rounds + 1):
        for name, system, op, how in calls:
            found = agents[system].call(f"packing.{op}", LIMIT_S, **how)
            assert found.get("same", True), f"{name}: other values"
            seconds[name].append(found["seconds"])
    print(f"\n{shape}: {prepared['values']} values, {prepared['nbytes'] / 1e6:.0f} MB\n")
    print("| call | median, ms | p95, ms | share of memcpy |\n|---|---|---|---|")
    for name, times in seconds.items():
        alone = name.endswith((" 1", "1 thread"))
        bound = statistics.median(seconds["memcpy, 1 thread" if alone else "memcpy, 2 threads"][1:])
        median, late = statistics.median(times[1:]), sorted(times[1:])[int(0.95 * rounds)]
        share = "" if name.endswith("views") else f"{bound / median:.2f}"
        print(f"| {name} | {median * 1e3:.1f} | {late * 1e3:.1f} | {share} |")


if __name__ == "__main__":
    main()
