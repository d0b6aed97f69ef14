"""A vision-language step at real shapes, and where its time goes.

    python vl_pipeline.py [--prompts 8] [--group 4] [--steps 3]

A rollout process makes groups of answers to prompts with an image of 640 x 480: 1564 patches of 1176 float32, 7.4 MB,
as the processor of Qwen2.5-VL gives. Responses have lognormal lengths. Two data-parallel ranks fetch their rows through
the bridge, run a small model over patches and tokens, and clear the step together. Each image is stored once, however
many answers have it. The rows of a rank are balanced by their tokens.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import transfer_queue as tq
from transfer_queue.bridge import Numbers, Objects, Ragged, RolloutBridge, RolloutSchema, Schedule

PATCHES, PIXELS, VOCABULARY, RANKS = 1564, 1176, 1000, 2
PATIENCE_S = 600  # how long one process waits for what another one makes; one that ends is noticed at once
SCHEMA = RolloutSchema({
    "tokens": Ragged(dtype="int64", stored="int32"),
    "loss_masks": Ragged(dtype="float32", stored="uint8"),
    "rewards": Numbers(),
    "images": Objects(),
})  # fmt: skip


def rollout(step: int, prompts: int, group: int) -> dict[str, list[Any]]:
    """A batch as rollout code makes it. The answers to a prompt have the image each as an object of its own."""
    rng = np.random.default_rng(step)
    generator = torch.Generator().manual_seed(step)
    batch: dict[str, list[Any]] = {name: [] for name in SCHEMA}
    for _ in range(prompts):
        image = torch.rand(PATCHES, PIXELS, generator=generator)
        for _ in range(group):
            length = int(np.clip(rng.lognormal(5.5, 0.6), 16, 2048))
            batch["tokens"].append(rng.integers(0, VOCABULARY, length).tolist())
            batch["loss_masks"].append([1] * length)
            batch["rewards"].append(float(rng.random()))
            batch["images"].append({"pixel_values": image.clone(), "image_grid_thw": torch.tensor([[1, 34, 46]])})
    return batch


def balanced(lengths: list[int]) -> list[list[int]]:
    """The longest rows first, each to the rank with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(RANKS)]
    tokens = [0] * RANKS
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        rank = tokens.index(min(tokens))
        parts[rank].append(row)
        tokens[rank] += lengths[row]
    return parts


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.words = nn.Linear(PIXELS, 32), nn.Embedding(VOCABULARY, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens) + self.vision(image).mean(0)).squeeze(1)


@contextmanager
def watched(*processes: BaseProcess) -> Iterator[None]:
    """Processes that run beside the block; it ends when they have. One that fails ends it whatever the block waits
    for: nobody would send that any more. No process is left."""
    failed: list[str] = []
    left, main_thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
        while running:
            for sentinel in connection.wait(list(running)):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode and not left.is_set():
                    failed.append(f"{process.name} ended with exit code {process.exitcode}")
                    signal.pthread_kill(main_thread, signal.SIGINT)  # as Ctrl-C does
                    return

    for process in processes:
        process.start()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        watcher.join()
    except KeyboardInterrupt:
        raise SystemExit(failed[0] if failed else 130) from None
    finally:
        left.set()
        for process in processes:
            process.kill()


def train(rank: int, steps: int, told: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this process
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tq.init()
    bridge, model = RolloutBridge(tq.get_client(), SCHEMA), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        began = time.monotonic()
        batch = bridge.fetch(f"step_{step}", "actor", rank, RANKS, timeout_s=PATIENCE_S)
        fetched = time.monotonic()
        loss = torch.zeros(())
        for tokens, mask, image, reward in zip(*(batch[name] for name in ("tokens", "loss_masks", "images")),
                                               batch["rewards"], strict=True):  # fmt: skip
            loss = loss - (model(image["pixel_values"], tokens) * mask).mean() * reward
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tq.finish_partition(f"step_{step}", f"rank_{rank}")
        told.put((step, rank, len(batch), fetched - began, time.monotonic() - fetched))
        del batch, image
    tq.close()


def drive(prompts: int, group: int, steps: int, told: Any) -> None:
    """What the driver does while the ranks train."""
    client = tq.get_client()
    bridge = RolloutBridge(client, SCHEMA, dedupe=True)
    consumers = [f"rank_{rank}" for rank in range(RANKS)]
    for step in range(steps):
        began = time.monotonic()
        batch = rollout(step, prompts, group)
        made = time.monotonic()
        ready = bridge.prepare(batch, schedule=Schedule(partitions=balanced([len(row) for row in batch["tokens"]])))
        tq.open_partition(f"step_{step}", "steps", max_open=0, consumers=consumers, clear=True, timeout_s=PATIENCE_S)
        opened = time.monotonic()
        bridge.put(f"step_{step}", ready)
        stored = time.monotonic()
        nbytes = client.stats()["arena_nbytes_used"]
        whole = sum(image["pixel_values"].nbytes for image in batch["images"])
        print(f"step {step}: made in {made - began:.2f} s, waited for the step before {opened - made:.2f} s, put in "
              f"{1e3 * (stored - opened):.0f} ms: {whole / 1e6:.0f} MB of images in {nbytes / 1e6:.0f} MB")  # fmt: skip
        for _ in range(RANKS):
            _, rank, rows, fetch_s, train_s = told.get()
            print(f"  rank {rank}: {rows} rows, waited and fetched {fetch_s:.3f} s, trained {train_s:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    context = get_context("spawn")
    told = context.Queue()
    ranks = [
        context.Process(target=train, args=(rank, args.steps, told), name=f"rank {rank}", daemon=True)
        for rank in range(RANKS)
    ]
    tq.init()
    try:
        with watched(*ranks):
            drive(args.prompts, args.group, args.steps, told)
        print(f"{args.steps} steps; left in the service: {tq.get_client().get_partition_list()}")
    finally:
        tq.close()


if __name__ == "__main__":
    main()
