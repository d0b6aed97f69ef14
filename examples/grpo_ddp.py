"""GRPO with DistributedDataParallel: a rollout process fills a partition, and ranks train on it meanwhile.

    torchrun --nproc-per-node 2 grpo_ddp.py [--steps 20] [--prompts 24] [--samples 4] [--workers 0]

The policy is a matrix: row i holds the logits of the token that follows token i. It learns to count. Every step is a
partition: the rollout process takes the newest weights from the queue, answers every prompt `--samples` times, and
writes group after group. Every rank gets the same number of micro-batches, so that none is left waiting in the
all-reduce, however late another one begins and though the rows do not divide evenly.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import transfer_queue as tq

VOCABULARY, MAX_LEN, BATCH, MICRO_BATCH = 16, 16, 12, 4
PATIENCE_S = 600  # how long the rollout process waits for the next weights
FIELDS = ["prompt", "response", "log_probs", "reward", "advantage"]


def rollout(steps: int, prompts: int, samples: int) -> None:
    """Write one partition for each version of the weights."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this process
    torch.set_num_threads(1)
    tq.init()  # the service of the rank that started this process
    client, generator = tq.get_client(), torch.Generator().manual_seed(0)
    for step in range(steps):
        taken, weights = client.take("weights", ["table"], 1, "rollout", timeout_s=PATIENCE_S)
        table = tq.to_dense(weights)["table"][0]
        client.clear_samples(taken)  # nobody else reads them
        client.set_partition(f"train_{step}", size=prompts * samples)  # so that the streams know its end
        for prompt in torch.randint(VOCABULARY, (prompts,), generator=generator):
            client.put(group(table, prompt.expand(samples), generator), partition_id=f"train_{step}")


def group(table: Tensor, prompt: Tensor, generator: torch.Generator) -> dict[str, Tensor | list[Tensor]]:
    """Answers of different length to one prompt, and how each compares with the others."""
    tokens, log_probs, last = [], [], prompt
    for _ in range(MAX_LEN):
        chances = table[last].log_softmax(-1)
        last = torch.multinomial(chances.exp(), 1, generator=generator).squeeze(1)
        tokens.append(last)
        log_probs.append(chances.gather(1, last[:, None]).squeeze(1))
    lengths = torch.randint(1, MAX_LEN + 1, (len(prompt),), generator=generator).tolist()
    response = [row[:length] for row, length in zip(torch.stack(tokens, 1), lengths, strict=True)]
    right = [row == (torch.cat([prompt[:1], row[:-1]]) + 1) % VOCABULARY for row in response]
    reward = torch.stack([row.float().mean() for row in right])
    return {
        "prompt": prompt,
        "response": response,
        "log_probs": [row[:length] for row, length in zip(torch.stack(log_probs, 1), lengths, strict=True)],
        "reward": reward,
        "advantage": (reward - reward.mean()) / (reward.std() + 1e-4),
    }


def roll_out(*arguments: int) -> None:
    """Run the rollout process. When it fails, end this rank, and by it the job: they would wait for rows forever."""
    process = get_context("spawn").Process(target=rollout, args=arguments, daemon=True)
    process.start()
    process.join()
    if process.exitcode:
        os.kill(os.getpid(), signal.SIGTERM)


def train(steps: int, rows: int, workers: int) -> None:
    """What every rank does."""
    client, rank, ranks = tq.get_client(), dist.get_rank(), dist.get_world_size()
    policy = DistributedDataParallel(nn.Embedding(VOCABULARY, VOCABULARY, _weight=torch.zeros(VOCABULARY, VOCABULARY)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.2)
    counts, pad = [0, 0], tq.Padding(mask=True)  # `response_mask` says which tokens are the row's own
    for step in range(steps):
        if rank == 0:
            client.put({"table": policy.module.weight.detach()[None]}, partition_id="weights")
        reward = torch.zeros(1)
        terms = {"task": "actor", "batch_size": BATCH, "micro_batch_size": MICRO_BATCH, "num_workers": workers}
        # The rank and their number come from torch.distributed; without it (on Ray) say dp_rank= and dp_size=.
        with tq.stream(f"train_{step}", FIELDS, pad=pad, **terms) as stream:
            for batch in stream:
                own = len(batch) - stream.meta.extra_info.get(
                    "repeated", 0
                )  # the rest is there to fill up a last batch
                counts = [counts[0] + own, counts[1] + 1]
                reward += batch["reward"][:own].sum()
                loss = losses(policy, batch)[:own].sum() * ranks / rows  # all-reduce takes the mean over ranks
                torch.autograd.backward(loss)  # all ranks meet here
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(reward)  # and here: nobody needs the rows any more
        if rank == 0:
            client.clear_partition(f"train_{step}")
            if step % 5 == 4:
                sys.stdout.write(f"step {step + 1}: reward {reward.item() / rows:.0%}\n")
    # In one piece: `print` writes the end of the line on its own, and lines of two ranks could mix.
    sys.stdout.write(f"rank {rank}: {counts[0]} rows in {counts[1]} micro-batches\n")


def losses(policy: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The clipped surrogate of each row, a mean over its tokens."""
    response, mask, advantage = batch["response"], batch["response_mask"], batch["advantage"][:, None]
    before = torch.cat([batch["prompt"][:, None], response[:, :-1]], 1)
    new = policy(before).log_softmax(-1).gather(2, response[:, :, None]).squeeze(2)
    ratio = (new - batch["log_probs"]).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(surrogate * mask).sum(1) / mask.sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"steps": 20, "prompts": 24, "samples": 4, "workers": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tq.init()  # the same service in all ranks; the first one that comes starts it
    watcher = threading.Thread(target=roll_out, args=(given.steps, given.prompts, given.samples), daemon=True)
    if os.environ["RANK"] == "0":
        watcher.start()
    try:
        train(given.steps, given.prompts * given.samples, given.workers)
        if os.environ["RANK"] == "0":
            watcher.join()
        dist.destroy_process_group()
    finally:
        tq.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
