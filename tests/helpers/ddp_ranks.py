"""Ranks of a gloo group that stream and all-reduce once per micro-batch, one process each, told what to do by a test.

    python ddp_ranks.py RANK SIZE PORT

Each scenario is one line of JSON on standard input: what the stream is, and how this rank behaves. Once its stream has
ended a rank prints what it got: the rows of every micro-batch, and the sums over all ranks. A rank that gets fewer
micro-batches than the others leaves them waiting in an all-reduce.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import transfer_queue as tq


def stream(given: dict[str, Any], rank: int) -> Any:
    named = {"dp_rank": rank, "dp_size": given["named"]} if given.get("named") else {}
    dataset = tq.StreamingDataset(
        None, given["batch"], given["micro"], ["x"], given["partition"], "t", should_check_consumption_status=True,
        prefetch=given.get("prefetch"), **named,
    )  # fmt: skip
    if "state" in given:
        dataset.load_state_dict(given["state"][rank])
    workers = given["workers"]
    context = {"multiprocessing_context": "fork"} if workers else {}
    return tq.StreamingDataLoader(dataset, num_workers=workers, **context)


def run(given: dict[str, Any], rank: int) -> dict[str, Any]:
    """The rows of each micro-batch of this rank. `slow`: this rank takes long over each; `late`: it begins when
    it is told to. `dies`: this rank is killed in this micro-batch; the others wait in their first until they are told
    to go on, and nobody waits for each other."""
    rows, sums = [], []
    if given.get("late") == rank:
        sys.stdin.readline()
    loader = stream(given, rank)
    for number, (data, meta) in enumerate(loader):
        if given.get("slow") == rank:
            time.sleep(0.02)  # work
        rows.append(data["x"].tolist())
        dying, at = given.get("dies") or (-1, -1)
        if (rank, number) == (dying, at):
            os.kill(os.getpid(), signal.SIGKILL)
        if dying >= 0:
            if rank != dying and number == 0:
                print("begun", flush=True)
                sys.stdin.readline()
            continue
        total = torch.tensor([len(meta) - meta.extra_info.get("repeated", 0)])
        dist.all_reduce(total)
        sums.append(int(total))
    return {"rows": rows, "sums": sums}


def main() -> None:
    rank, size, port = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    print("ready", flush=True)
    while line := sys.stdin.readline().strip():
        print(json.dumps(run(json.loads(line), rank)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
