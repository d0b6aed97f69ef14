"""Planning of a version that several ranks give: who gives what, cut along what two TP workers take.

    python -m bench.plans [--tensors 138000] [--ranks 8] [--rounds 3]

No bytes are moved. The tensors are those of a mixture of experts (matrices of 2048 x 768 in bf16), each sharded by rows
over all ranks, as FSDP2 does. Printed: listing at one rank, making one table of wants from its report, the plan of all
ranks at rank 0, the manifest from their digests; at a receiver, reading that, finding its buckets (wanted) and what
they have (parts). For half the tensors and for all, as all are linear.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from bench.fresh_memory import touch_memory
from transfer_queue.weights.version.boxes import Box
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.weights.version.pieces import wanted_buckets
from transfer_queue.weights.version.plans import Wants, plan_pieces
from transfer_queue.weights.version.sealing import ShardDigests, seal_pieces
from transfer_queue.weights.version.shard_table import ShardTable
from transfer_queue.weights.version.sharded import TensorShard

ROWS, COLUMNS = 2048, 768
DIGEST = "0" * 32


def table(num: int, rank: int, ranks: int) -> list[TensorShard]:
    each = ROWS // ranks
    box = Box((rank * each, 0), (each, COLUMNS))
    return [TensorShard(f"layers.{at}.weight", torch.bfloat16, (ROWS, COLUMNS), box) for at in range(num)]


def wants(num: int, rank: int) -> Wants:
    """Even tensors by rows, odd ones by columns."""
    halves = [Box((rank * ROWS // 2, 0), (ROWS // 2, COLUMNS)), Box((0, rank * COLUMNS // 2), (ROWS, COLUMNS // 2))]
    return {f"layers.{at}.weight": (halves[at % 2],) for at in range(num)}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def measure(num: int, ranks: int) -> dict[str, float]:
    listed_s, _ = timed(lambda: (listed := ShardTable.of(table(num, 0, ranks))).key and msgspec.json.encode(listed))
    tables = [ShardTable.of(table(num, rank, ranks)) for rank in range(ranks)]
    report_s, found = timed(lambda: [wants(num, rank) for rank in range(2)])
    plan_s, plans = timed(lambda: plan_pieces(tables, found))
    digests = [ShardDigests.of([DIGEST] * num, [[DIGEST] * int(one.counts.sum())]) for one in plans]
    sealed: Callable[[], Any] = lambda: seal_pieces(tables, plans, digests, version=1, epoch="e", aliases={})  # noqa: E731
    seal_s, manifest = timed(sealed)
    encode_s, body = timed(manifest.encode)
    decode_s, read = timed(lambda: Manifest.decode(body))
    wanted_s, mine = timed(lambda: wanted_buckets(read, found[0]))
    parts_s, _ = timed(lambda: [read.in_bucket(at) for at in mine])
    told = {"list": listed_s, "wants": report_s, "plan": plan_s, "seal": seal_s, "encode": encode_s}
    told |= {"decode": decode_s, "wanted": wanted_s, "parts": parts_s}
    return {**told, "pieces": int(read.parts.counts.sum()), "MB": len(body) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=138_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    touch_memory()
    for num in (asked.tensors // 2, asked.tensors):
        rounds = [measure(num, asked.ranks) for _ in range(asked.rounds)]
        middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        times = "  ".join(f"{name} {middle[name]:.2f} s" for name in middle if name not in ("pieces", "MB"))
        print(
            f"{num} tensors, {asked.ranks} ranks: {times}; {middle['pieces']:.0f} pieces, {middle['MB']:.0f} MB of JSON"
        )


if __name__ == "__main__":
    main()
