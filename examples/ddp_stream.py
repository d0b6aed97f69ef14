"""Data-parallel training on a partition that others are still filling: one file, no Ray, to be copied and changed.

    python examples/ddp_stream.py [--ranks 2] [--rows 100] [--workers 0]

The parent starts the service and the ranks of a gloo group, then writes rows bit by bit, as rollout workers would. The
ranks train one linear model with DistributedDataParallel. Every rank gets the same number of micro-batches, so none is
left waiting in the all-reduce, though rank 1 begins late and the rows do not divide evenly. With torchrun leave out
`main` and let every process call `train`; its `init_process_group` says which rank it is.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import transfer_queue as tq

PARTITION, BATCH, MICRO_BATCH = "train_0", 8, 4


def rollout(rows: int) -> None:
    """Write a few rows at a time, as an inference engine would."""
    generator = torch.Generator().manual_seed(0)
    for x in torch.randn(rows, 4, generator=generator).split(3):
        tq.get_client().put({"x": x, "y": x.sum(dim=1, keepdim=True)}, partition_id=PARTITION)


def train(rank: int, ranks: int, port: int, workers: int, results: Any) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    if rank == 1:
        time.sleep(0.5)  # late, as ranks are
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts, losses = [], []
    # rank and number of ranks come from torch.distributed; without it (Ray) say dp_rank= and dp_size=
    with tq.stream(
        PARTITION, ["x", "y"], task="actor", batch_size=BATCH, micro_batch_size=MICRO_BATCH, num_workers=workers
    ) as stream:
        for batch in stream:
            x, y = (torch.stack(batch[name].unbind()) for name in ("x", "y"))  # rows of vectors are a nested tensor
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # all ranks meet here
            optimizer.step()
            counts.append(len(batch) - stream.meta.extra_info.get("repeated", 0))
            losses.append(loss.item())
    results.put((rank, counts, losses[0], losses[-1]))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 2, "rows": 100, "workers": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    tq.init()
    try:
        tq.get_client().set_partition(PARTITION, size=given.rows)  # so that the streams know their end
        results = context.SimpleQueue()
        terms = [(rank, given.ranks, port, given.workers, results) for rank in range(given.ranks)]
        processes = [context.Process(target=train, args=one) for one in terms]
        for process in processes:
            process.start()
        rollout(given.rows)
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            return 1
        for rank, counts, first, last in sorted(results.get() for _ in range(given.ranks)):
            print(f"rank {rank}: {sum(counts)} rows in {len(counts)} micro-batches, loss {first:.3f} -> {last:.3f}")
    finally:
        tq.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
