"""What the number of tensors costs, whatever their size: the pause of `Swap`, and packing.

    python -m bench.tensors [--beside FOLDER] [--rounds 5]

Each measurement is a process of its own; with `--beside`, another working tree of this package takes every other turn.
Prints medians and 95th percentiles over the rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.fresh_memory import touch_memory

SWAPPED = (300, 5_000, 40_000)
PACKED = (1_000, 10_000, 138_000)
PER_BUCKET = 50
COMMITS = 5
ROOT = Path(__file__).parent.parent


def swap(num: int) -> float:
    """The median pause of a commit to `num` linear layers, each with one weight."""
    import torch

    from transfer_queue.weights import Swap

    module = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(num))
    target, names = Swap(module), list(module.state_dict())
    pauses = []
    for number in range(COMMITS + 1):
        prepared = target.prepare({name: torch.full((4, 4), float(number)) for name in names})
        pauses.append(target.commit(prepared, number, 60.0).pause_s)
    return statistics.median(pauses[1:])


def pack(num: int) -> float:
    """Seconds to pack `num` tensors of 256 bytes, `PER_BUCKET` in each bucket, and to seal the manifest."""
    import torch

    from transfer_queue.weights import StateDictSource, plan, seal
    from transfer_queue.weights.version.packing import pack_into

    values = torch.zeros(num, 64)
    source = StateDictSource({f"layers.{index}.weight": values[index] for index in range(num)})
    places = [torch.empty(256 * PER_BUCKET, dtype=torch.uint8) for _ in range(-(-num // PER_BUCKET))]
    start = time.perf_counter()
    where = plan(source.specs(), 256 * PER_BUCKET)
    digests = pack_into(source, where, [place[:size] for place, size in zip(places, where.buckets, strict=True)])
    seal(where, digests, version=1, epoch="e")
    return time.perf_counter() - start


def measured(tree: Path, what: str, num: int) -> float:
    """In a process that imports the package from `tree`."""
    code = f"import runpy; print(runpy.run_path({__file__!r})[{what!r}]({num}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree)))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("swap", "pack"))
    options = parser.parse_args()
    touch_memory()
    trees = {"here": ROOT, **({"beside": options.beside.resolve()} if options.beside else {})}
    cases = [("swap", num) for num in SWAPPED] + [("pack", num) for num in PACKED]
    cases = [case for case in cases if options.only in (None, case[0])]
    found: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for what, num in cases:
            for name in list(trees)[:: 1 if number % 2 else -1]:
                seconds = measured(trees[name], what, num)
                found.setdefault(f"{what} {num} {name}", []).append(seconds * 1e3)
    for key in sorted(found):
        values = sorted(found[key])
        last = values[min(len(values) - 1, round(0.95 * len(values)))]
        print(json.dumps({"case": key, "median_ms": round(statistics.median(values), 2), "p95_ms": round(last, 2)}))
    print(json.dumps({"load": os.getloadavg(), "processors": os.cpu_count()}))


if __name__ == "__main__":
    main()
