"""PPO with one controller, the way of verl: a driver that moves only metadata, and workers that exchange the data.

    python -m examples.single_controller [--steps 3] [--prompts 16] [--workers 2] [--ray]

The driver decides which rows there are and who fills in what. It sends KVBatchMeta, keys and tags, and gets KVBatchMeta
back; tokens, log-probs, values and weights go from worker to worker through transfer_queue.

    task      reads                      writes
    rollout   weights                    prompt, response, rollout_log_probs
    reward    prompt, response           reward                                  at the same time as log_prob
    log_prob  prompt, response, weights  old_log_probs, ref_log_probs
    train     all of them                values, advantage; weights              actor and critic
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import transfer_queue as tq
from demo.columns import padded, payload_nbytes, row_lengths
from demo.grpo import clipped_loss
from examples import bigram
from examples.workers import Hire, Wait, Workers, hiring

TASKS = ("rollout", "reward", "log_prob", "train")
Done = tuple[tq.KVBatchMeta, int]
"""The rows with their new fields, and the bytes that were read and written for it."""


class Worker:
    """What every worker does: fill in fields of the rows it is told."""

    def __init__(self, seed: int, max_len: int) -> None:
        tq.init()
        self.generator = torch.Generator().manual_seed(seed)
        self.max_len = max_len
        self.nbytes = 0

    def read(self, meta: tq.KVBatchMeta, *fields: str) -> TensorDict:
        data = tq.kv_batch_get(meta.keys, str(meta.partition_id), list(fields), strict=True)
        self.nbytes += payload_nbytes(data)
        return data

    def weights(self, name: str) -> Tensor:
        table: Tensor = self.read(tq.KVBatchMeta([name], [{}], "weights"), "table")["table"].values()
        return table

    def fill(self, task: str, meta: tq.KVBatchMeta, **columns: Tensor) -> Done:
        data = TensorDict(columns, batch_size=len(meta))
        visits = [{task: tag.get(task, 0) + 1} for tag in meta.tags]
        filled = tq.kv_batch_put(meta.keys, str(meta.partition_id), data, visits)
        # What else the rows have by now depends on who was faster; the parts of one task have to be alike.
        filled.fields = sorted({*(meta.fields or ()), *columns})
        nbytes, self.nbytes = self.nbytes + payload_nbytes(data), 0
        return filled, nbytes


class Rollout(Worker):
    def rollout(self, meta: tq.KVBatchMeta) -> Done:
        table = self.weights("actor")
        prompt = bigram.prompts(len(meta), self.generator)
        response = bigram.respond(table, prompt, self.max_len, self.generator)
        packed = torch.nested.as_nested_tensor(prompt, layout=torch.jagged)
        log_probs = bigram.like(response, bigram.log_probs(table, packed, response))
        return self.fill("rollout", meta, prompt=prompt, response=response, rollout_log_probs=log_probs)


class Reward(Worker):
    def reward(self, meta: tq.KVBatchMeta) -> Done:
        data = self.read(meta, "prompt", "response")
        return self.fill("reward", meta, reward=bigram.rewards(data["prompt"], data["response"]))


class LogProb(Worker):
    def log_prob(self, meta: tq.KVBatchMeta) -> Done:
        data = self.read(meta, "prompt", "response")
        old, ref = (
            bigram.like(data["response"], bigram.log_probs(self.weights(name), data["prompt"], data["response"]))
            for name in ("actor", "reference")
        )
        return self.fill("log_prob", meta, old_log_probs=old, ref_log_probs=ref)


class Train(Worker):
    def __init__(self, seed: int, max_len: int) -> None:
        super().__init__(seed, max_len)
        self.actor = torch.zeros(bigram.VOCABULARY, bigram.VOCABULARY, requires_grad=True)
        self.critic = torch.zeros(bigram.VOCABULARY, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.actor, self.critic], lr=0.3)

    def publish(self, names: Sequence[str]) -> None:
        table = self.actor.detach().repeat(len(names), 1, 1)
        tq.kv_batch_put(list(names), "weights", {"table": table})

    def train(self, meta: tq.KVBatchMeta) -> Done:
        data = self.read(meta, "prompt", "response", "reward", "old_log_probs", "ref_log_probs")
        prompt, response = data["prompt"], data["response"]
        values = self.critic[prompt.values().view(-1, bigram.PROMPT_LEN)[:, -1]]
        advantage = data["reward"] - values.detach()
        new = padded(bigram.like(response, bigram.log_probs(self.actor, prompt, response)), self.max_len)
        old, ref = padded(data["old_log_probs"], self.max_len), padded(data["ref_log_probs"], self.max_len)
        mask = (torch.arange(self.max_len) < row_lengths(response)[:, None]).float()
        gap = ref - new
        estimate = gap.exp() - gap - 1  # of the divergence, from the sampled token (Schulman, "Approximating KL", k3)
        terms = clipped_loss(new, old, estimate, advantage, mask, clip=0.2, kl_weight=0.01)
        loss = terms.loss / mask.sum() + (values - data["reward"]).square().mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.publish(["actor"])
        return self.fill("train", meta, values=values.detach(), advantage=advantage)


@dataclass
class Driver:
    """Knows every row and no tensor."""

    groups: dict[str, Workers]
    sizes: dict[str, int]
    partition: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def start(self, task: str, meta: tq.KVBatchMeta) -> Wait:
        """Give each worker of the task its share; the result waits for the rows of all."""
        begin = time.monotonic()
        wait = self.groups[task].start(task, meta.chunk(self.sizes[task]))

        def rows() -> list[Any]:
            done: list[Done] = wait()
            self.seconds[task] = time.monotonic() - begin
            self.nbytes[task] = sum(nbytes for _, nbytes in done)
            filled = tq.KVBatchMeta.concat([part for part, _ in done])  # refuses a key that comes from two workers
            if filled.keys != meta.keys:
                raise AssertionError(f"{task} returned other rows than it was given")
            return [filled]

        return rows

    def step(self, number: int, prompts: int, samples: int) -> None:
        self.partition = f"train_{number}"
        keys = [f"{prompt}_{sample}" for prompt in range(prompts) for sample in range(samples)]
        (rows,) = self.start("rollout", tq.KVBatchMeta(keys, [{} for _ in keys], self.partition))()
        for wait in [self.start("reward", rows), self.start("log_prob", rows)]:
            wait()
        self.start("train", rows)()
        tags = tq.kv_list(self.partition)[self.partition]
        if tags != {key: dict.fromkeys(TASKS, 1) for key in keys}:
            raise AssertionError(f"step {number}: not every row went through every task exactly once")
        reward = tq.kv_batch_get(keys, self.partition, "reward")["reward"].mean()  # for the table only
        tq.get_client().clear_partition(self.partition)
        times = "".join(f"{1000 * self.seconds[task]:9.1f}" for task in TASKS)
        print(f"{number:4} {len(keys):6} {sum(self.nbytes.values()) / 1e3:9.1f}{times} {reward:8.3f}")


def hire_all(hire: Hire, workers: int, max_len: int) -> Driver:
    kinds = {"rollout": Rollout, "reward": Reward, "log_prob": LogProb, "train": Train}
    sizes = {task: 1 if task == "train" else workers for task in kinds}
    seeds = {task: [(number, max_len) for number in range(sizes[task])] for task in kinds}
    return Driver({task: hire(kind, seeds[task]) for task, kind in kinds.items()}, sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 3), ("prompts", 16), ("samples", 4), ("max-len", 32), ("workers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ray", action="store_true", help="workers are Ray actors")
    given = parser.parse_args()
    with hiring(given.ray) as hire:
        tq.init()
        try:
            driver = hire_all(hire, given.workers, given.max_len)
            driver.groups["train"].start("publish", [("actor", "reference")])()
            print("step   rows  kilobytes" + "".join(f"{task:>9}" for task in TASKS) + " (ms) reward")
            for number in range(given.steps):
                driver.step(number, given.prompts, given.samples)
            rows = given.steps * given.prompts * given.samples
            print(f"{given.steps} steps, {rows} rows: every row went through {', '.join(TASKS)} exactly once")
        finally:
            tq.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
