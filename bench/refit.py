"""An update of two workers by `integrations.refit`, as verl's engine "tq" makes it, beside a plain broadcast by gloo.

    python -m bench.refit [--mb 320] [--rounds 7]

A trainer's rank and two workers, three processes on this host; bf16 tensors of 2 MiB, a quarter of the bytes in tensors
of 64 MiB. Both ways, in turn in each round, end when both workers have every tensor in weights of their own. `tq` is a
whole update of verl's: prepare, meet, pack with digests, fetch, verify, the decision, load, finalize. gloo broadcasts
each tensor into the weights themselves: nothing is packed or verified, and where a worker dies a mixture is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.fresh_memory import touch_memory
from transfer_queue.integrations.refit import TIMEOUT_S, RefitReport, Sender, Taker

NUM_WORKERS = 2
LARGE_NBYTES, SMALL_NBYTES = 64 << 20, 2 << 20
Weights = dict[str, torch.Tensor]


def weights(nbytes: int, fill: float) -> Weights:
    """A quarter of the bytes in large tensors."""
    sizes = [LARGE_NBYTES] * (nbytes // 4 // LARGE_NBYTES)
    sizes += [SMALL_NBYTES] * ((nbytes - sum(sizes)) // SMALL_NBYTES)
    return {f"layer.{at}": torch.full((size // 2,), fill, dtype=torch.bfloat16) for at, size in enumerate(sizes)}


def told(rank: int, sender: Sender | None) -> list[str]:
    place = [[sender.address, sender.token] if sender is not None else []]
    dist.broadcast_object_list(place, src=0)
    return place[0]


def by_tq(rank: int, mine: Weights) -> RefitReport | None:
    if rank == 0:
        sender = Sender()
        told(rank, sender)
        report = asyncio.run(sender.send(iter(mine.items()), 0, NUM_WORKERS, TIMEOUT_S))
        dist.barrier()
        sender.close()
        return report
    taker = Taker(*told(rank, None), rank, TIMEOUT_S)

    async def load() -> None:
        async for batch in taker.take(None, TIMEOUT_S):
            for name, tensor in batch:
                mine[name].copy_(tensor)

    asyncio.run(load())
    dist.barrier()
    taker.close()
    return None


def by_gloo(rank: int, mine: Weights) -> None:
    for tensor in mine.values():
        dist.broadcast(tensor, src=0)
    dist.barrier()


def run(rank: int, store: str, nbytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_WORKERS + 1)
    mine = weights(nbytes, 0.0)
    ways: dict[str, Callable[[int, Weights], RefitReport | None]] = {"tq": by_tq, "gloo": by_gloo}
    times: dict[str, list[float]] = {name: [] for name in ways}
    parts: list[RefitReport] = []
    for number in range(rounds + 2):
        for name, way in ways.items():
            fill = float(2 * number + (name == "gloo") + 1)
            if rank == 0:
                for tensor in mine.values():
                    tensor.fill_(fill)
            dist.barrier()
            began = time.perf_counter()
            report = way(rank, mine)
            if number >= 2:  # the first have memory to touch
                times[name].append(1e3 * (time.perf_counter() - began))
                parts += [report] if report is not None else []
            assert all((tensor == fill).all() for tensor in mine.values())
    dist.destroy_process_group()
    if rank == 0:
        show(times, parts)


def show(times: dict[str, list[float]], parts: list[RefitReport]) -> None:
    print(f"{parts[0].nbytes / 1e6:.0f} MB to {NUM_WORKERS} workers, {len(parts)} rounds, {os.cpu_count()} cores")
    for name, found in times.items():
        print(f"{name:5} median {statistics.median(found):6.0f} ms   {min(found):.0f} to {max(found):.0f} ms")
    pack, take = (1e3 * statistics.median(values) for values in zip(*((one[1], one[2]) for one in parts), strict=True))
    print(f"of tq: packed after {pack:.0f} ms, verified by all {take:.0f} ms later")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    touch_memory()
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        mp.spawn(run, (f"{folder}/store", asked.mb * 1_000_000, asked.rounds), NUM_WORKERS + 1)


if __name__ == "__main__":
    main()
