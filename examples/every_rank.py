"""Every rank calls `tq.init()` with no argument, and all share one service.

    torchrun --nproc-per-node 2 every_rank.py
    sbatch every_rank.sbatch

Each rank writes some rows, and sees those of all.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

import transfer_queue as tq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10, help="of each rank")
    rows = parser.parse_args().rows
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    ranks = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))

    tq.init()  # whoever comes first starts the service, the others find it
    client = tq.get_client()
    client.put({"writer": torch.full((rows,), rank)}, partition_id="train_0")
    # A task of its own for each rank, so that each gets all rows. Ranks that share one task divide them.
    _, batch = client.take("train_0", ["writer"], rows * ranks, f"rank {rank}", timeout_s=100)
    writers = sorted(set(batch["writer"].tolist()))
    said = f"rank {rank} of {ranks}: {len(batch)} rows, of ranks {writers}, from {tq.address()}\n"
    sys.stdout.write(said)  # at once: `print` writes the end of the line on its own, and lines of two ranks could mix
    tq.close()  # this rank lets go; the service ends with the job


if __name__ == "__main__":
    main()
