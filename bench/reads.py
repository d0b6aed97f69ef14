"""Reads of rows as asynchronous rollouts write them, one version of the package beside another.

    python -m bench.reads [--beside TREE] [--rounds 5] [--only alone,strings,...]

`TREE` is another checkout. Each round runs every case in a process of its own for each tree, in turn. Printed are
medians over all reads, p95, and how long the garbage collector ran within a read on average.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_READS = 12
Case = Callable[[Any], Callable[[], Any]]


def words(number: int, count: int) -> str:
    return " ".join(f"w{number}-{word}" for word in range(count))


def alone(tq: Any) -> Callable[[], Any]:
    """1024 rows of 10 fields put one by one, read in random order."""
    import torch

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(200, 4000, (1024,), generator=generator).tolist()
    for number, length in enumerate(lengths):
        row: dict[str, Any] = {f"t{field}": torch.arange(length, dtype=torch.int64) for field in range(3)}
        row |= {f"f{field}": torch.arange(length, dtype=torch.float32) for field in range(3)}
        row |= {
            "prompt": words(number, 50),
            "answer": words(number, 5),
            "score": torch.tensor([1.0]),
            "info": {"id": number},
        }
        tq.kv_put(key=f"k{number}", partition_id="alone", fields=row)
    keys = [f"k{number}" for number in torch.randperm(1024, generator=generator).tolist()]
    return lambda: tq.kv_batch_get(keys=keys, partition_id="alone")


def ragged(tq: Any, step: int = 1) -> Callable[[], Any]:
    """1024 ragged rows of 8 fields in one put, read in random order."""
    import torch
    from tensordict import TensorDict

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(200, 5000, (1024,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    steps = torch.arange(int(offsets[-1]))
    fields = {
        f"f{field}": torch.nested.nested_tensor_from_jagged(steps.float() if field % 2 else steps, offsets)
        for field in range(8)
    }
    keys = [f"k{number}" for number in range(1024)]
    tq.kv_batch_put(keys=keys, partition_id="ragged", fields=TensorDict(fields, [1024]))
    wanted = [keys[number] for number in torch.randperm(1024, generator=generator).tolist()[::step]]
    return lambda: tq.kv_batch_get(keys=wanted, partition_id="ragged")


def quarter(tq: Any) -> Callable[[], Any]:
    """256 of them in random order."""
    return ragged(tq, 4)


def strings(tq: Any, step: int = 1) -> Callable[[], Any]:
    """10,000 rows of 2 short strings."""
    from tensordict import NonTensorStack, TensorDict

    keys = [f"k{number}" for number in range(10_000)]
    fields = {name: NonTensorStack(*[f"{name} {number}" for number in range(10_000)]) for name in "ab"}
    tq.kv_batch_put(keys=keys, partition_id="strings", fields=TensorDict(fields, [10_000]))
    wanted = keys[::step]
    return lambda: tq.kv_batch_get(keys=wanted, partition_id="strings")


def second(tq: Any) -> Callable[[], Any]:
    """Every second of them."""
    return strings(tq, 2)


def traces(tq: Any) -> Callable[[], Any]:
    """1024 tool traces of 12 turns, which are dicts."""
    from tensordict import NonTensorStack, TensorDict

    def turn(row: int, number: int) -> dict[str, Any]:
        call = {"id": f"call_{row}_{number}", "function": {"name": "search", "arguments": "x" * 60}}
        return {"role": "assistant", "content": f"c{row}-{number} " * 20, "tool_calls": [call]}

    rows = [[turn(row, number) for number in range(12)] for row in range(1024)]
    keys = [f"k{number}" for number in range(1024)]
    tq.kv_batch_put(keys=keys, partition_id="traces", fields=TensorDict({"s": NonTensorStack(*rows)}, [1024]))
    return lambda: tq.kv_batch_get(keys=keys, partition_id="traces")


CASES: dict[str, Case] = {case.__name__: case for case in (alone, ragged, quarter, strings, second, traces)}


@contextmanager
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


def measure(name: str) -> None:
    """Prints seconds of the first read, of the others, and of the collector within those."""
    import transfer_queue as tq

    tq.init()
    read = CASES[name](tq)
    taken: list[float] = []
    for _ in range(NUM_READS + 1):
        with collections() as collected:
            started = time.perf_counter()
            found = read()
            taken.append(time.perf_counter() - started)
        del found
        if len(taken) == 1:
            total = 0.0
        total += sum(collected)
    tq.close()
    print(json.dumps({"first": taken[0], "reads": taken[1:], "collected": total / len(taken)}))


def measured(tree: Path, name: str) -> dict[str, Any]:
    sources = tree / "src" if (tree / "src").exists() else tree
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(sources), str(ROOT)))}
    code = f"from bench.reads import measure; measure({name!r})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CASES))
    options = parser.parse_args()
    trees = {"here": ROOT, **({"beside": options.beside.resolve()} if options.beside else {})}
    for name in options.only.split(","):
        found: dict[str, list[dict[str, Any]]] = {tree: [] for tree in trees}
        for _ in range(options.rounds):
            for tree, path in trees.items():
                found[tree].append(measured(path, name))
        for tree, rounds in found.items():
            reads = sorted(1e3 * seconds for one in rounds for seconds in one["reads"])
            first = 1e3 * statistics.median(one["first"] for one in rounds)
            collected = 1e3 * statistics.mean(one["collected"] for one in rounds)
            print(
                f"{name:8} {tree:7} median {statistics.median(reads):7.2f} ms  p95 {reads[int(len(reads) * 0.95)]:7.2f}"
                f" ms  first {first:7.2f} ms  collector {collected:6.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
