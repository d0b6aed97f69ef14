"""PPO with one controller, the way of verl: a driver that moves only metadata, and workers that exchange the data.

    python single_controller.py [--steps 3] [--prompts 16] [--workers 2] [--ray]

The driver decides which rows there are and who fills in what. It sends KVBatchMeta, keys and tags, and gets KVBatchMeta
back; tokens, log-probs, values and weights go from worker to worker through transfer_queue. The policy is a matrix: row
i holds the logits of the token that follows token i. It learns to count.

    task      reads                      writes
    rollout   weights                    prompt, response, rollout_log_probs
    reward    prompt, response           reward                                  at the same time as log_prob
    log_prob  prompt, response, weights  old_log_probs, ref_log_probs
    train     all of them                values, advantage; weights              actor and critic
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import transfer_queue as tq

TASKS = ("rollout", "reward", "log_prob", "train")
VOCABULARY, PROMPT_LEN = 16, 4
Kind = Callable[..., Any]
Call = Callable[[str, Any], Callable[[], Any]]
"""Begin a method of a worker with one argument; what comes back waits for its result."""


# The policy


def before(data: TensorDict) -> Tensor:
    """The token before each token of the padded responses."""
    return torch.cat([data["prompt"][:, -1:], data["response"][:, :-1]], 1)


def log_probs(table: Tensor, data: TensorDict) -> Tensor:
    return table.log_softmax(-1)[before(data), data["response"]]


def ragged(padded: Tensor, mask: Tensor) -> Tensor:
    """A column of rows of different length, to be put."""
    return torch.nested.as_nested_tensor([row[own] for row, own in zip(padded, mask, strict=True)], layout=torch.jagged)


# The workers


class Worker:
    """What every worker does: fill in fields of the rows it is told."""

    def __init__(self, seed: int, max_len: int) -> None:
        torch.set_num_threads(1)
        tq.init()
        self.generator = torch.Generator().manual_seed(seed)
        self.max_len = max_len

    def read(self, meta: tq.KVBatchMeta, *fields: str) -> TensorDict:
        """Plain tensors, filled up with zeros; `response_mask` says where the tokens are."""
        pad = tq.Padding(mask=True)
        return tq.kv_batch_get(meta.keys, str(meta.partition_id), list(fields), strict=True, pad=pad)

    def weights(self, name: str) -> Tensor:
        table: Tensor = tq.kv_batch_get(name, "weights", dense=True)["table"][0]
        return table

    def fill(self, task: str, meta: tq.KVBatchMeta, **columns: Tensor) -> tq.KVBatchMeta:
        visits = [{task: tag.get(task, 0) + 1} for tag in meta.tags]
        filled = tq.kv_batch_put(meta.keys, str(meta.partition_id), TensorDict(columns, batch_size=len(meta)), visits)
        # What else the rows have by now depends on who was faster; the parts of one task have to be alike.
        filled.fields = sorted({*(meta.fields or ()), *columns})
        return filled


class Rollout(Worker):
    def rollout(self, meta: tq.KVBatchMeta) -> tq.KVBatchMeta:
        table, size = self.weights("actor"), len(meta)
        prompt = torch.randint(VOCABULARY, (size, PROMPT_LEN), generator=self.generator)
        response, last = [], prompt[:, -1]
        for _ in range(self.max_len):
            last = torch.multinomial(table[last].softmax(-1), 1, generator=self.generator).squeeze(1)
            response.append(last)
        mask = torch.arange(self.max_len) < torch.randint(1, self.max_len + 1, (size, 1), generator=self.generator)
        data = TensorDict({"prompt": prompt, "response": torch.stack(response, 1)}, batch_size=size)
        columns = {"response": data["response"], "rollout_log_probs": log_probs(table, data)}
        columns = {name: ragged(column, mask) for name, column in columns.items()}
        return self.fill("rollout", meta, prompt=prompt, **columns)


class Reward(Worker):
    def reward(self, meta: tq.KVBatchMeta) -> tq.KVBatchMeta:
        """The share of tokens that are one more than the token before."""
        data = self.read(meta, "prompt", "response")
        right = (data["response"] == (before(data) + 1) % VOCABULARY) & data["response_mask"]
        return self.fill("reward", meta, reward=right.sum(1) / data["response_mask"].sum(1))


class LogProb(Worker):
    def log_prob(self, meta: tq.KVBatchMeta) -> tq.KVBatchMeta:
        data = self.read(meta, "prompt", "response")
        old, ref = (log_probs(self.weights(name), data) for name in ("actor", "reference"))
        mask = data["response_mask"]
        return self.fill("log_prob", meta, old_log_probs=ragged(old, mask), ref_log_probs=ragged(ref, mask))


class Train(Worker):
    def __init__(self, seed: int, max_len: int) -> None:
        super().__init__(seed, max_len)
        self.actor = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
        self.critic = torch.zeros(VOCABULARY, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.actor, self.critic], lr=0.3)

    def publish(self, names: Sequence[str]) -> None:
        tq.kv_batch_put(list(names), "weights", {"table": self.actor.detach().repeat(len(names), 1, 1)})

    def train(self, meta: tq.KVBatchMeta) -> tq.KVBatchMeta:
        data = self.read(meta, "prompt", "response", "reward", "old_log_probs", "ref_log_probs")
        values, mask = self.critic[data["prompt"][:, -1]], data["response_mask"]
        advantage = data["reward"] - values.detach()
        new = log_probs(self.actor, data)
        ratio, gap = (new - data["old_log_probs"]).exp(), data["ref_log_probs"] - new
        surrogate = torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
        divergence = gap.exp() - gap - 1  # from the sampled token (Schulman, "Approximating KL divergence", k3)
        policy_loss = ((0.01 * divergence - surrogate) * mask).sum() / mask.sum()
        self.optimizer.zero_grad()
        torch.autograd.backward(policy_loss + (values - data["reward"]).square().mean())
        self.optimizer.step()
        self.publish(["actor"])
        return self.fill("train", meta, values=values.detach(), advantage=advantage)


# Where they run


def child(kind: Kind, *arguments: Any) -> Call:
    """A worker in a child process; one call at a time. Its death is an EOFError in whoever waits."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tensordict", "transfer_queue"])  # imported once, not by every child
    ours, theirs = context.Pipe()
    context.Process(target=serve, args=(theirs, kind, arguments), daemon=True).start()
    theirs.close()

    def start(method: str, argument: Any) -> Callable[[], Any]:
        ours.send((method, argument))
        return ours.recv

    return start


def serve(pipe: Connection, kind: Kind, arguments: Sequence[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this process
    worker = kind(*arguments)
    while True:
        try:
            method, argument = pipe.recv()
        except EOFError:
            return  # the driver has ended
        pipe.send(getattr(worker, method)(argument))


def actor(kind: Kind, *arguments: Any) -> Call:
    """A worker as a Ray actor that reserves nothing."""
    import ray

    handle = ray.remote(num_cpus=0)(kind).remote(*arguments)

    def start(method: str, argument: Any) -> Callable[[], Any]:
        result = getattr(handle, method).remote(argument)
        return lambda: ray.get(result)

    return start


# The driver, who knows every row and no tensor


class Driver:
    def __init__(self, hire: Callable[..., Call], workers: int, max_len: int) -> None:
        kinds: dict[str, Kind] = {"rollout": Rollout, "reward": Reward, "log_prob": LogProb, "train": Train}
        sizes = {task: 1 if task == "train" else workers for task in kinds}
        self.workers = {
            task: [hire(kind, seed, max_len) for seed in range(sizes[task])] for task, kind in kinds.items()
        }
        self.seconds: dict[str, float] = {}
        self.workers["train"][0]("publish", ["actor", "reference"])()

    def start(self, task: str, meta: tq.KVBatchMeta) -> Callable[[], tq.KVBatchMeta]:
        """Give each worker of the task its share; the result waits for the rows of all."""
        begin, workers = time.monotonic(), self.workers[task]
        waits = [call(task, part) for call, part in zip(workers, meta.chunk(len(workers)), strict=True)]

        def rows() -> tq.KVBatchMeta:
            filled = tq.KVBatchMeta.concat([wait() for wait in waits])  # refuses a key that comes from two workers
            self.seconds[task] = time.monotonic() - begin
            assert filled.keys == meta.keys, f"{task} returned other rows than it was given"
            return filled

        return rows

    def step(self, number: int, prompts: int, samples: int) -> None:
        partition = f"train_{number}"
        keys = [f"{prompt}_{sample}" for prompt in range(prompts) for sample in range(samples)]
        rows = self.start("rollout", tq.KVBatchMeta(keys, [{} for _ in keys], partition))()
        for wait in [self.start("reward", rows), self.start("log_prob", rows)]:
            wait()
        self.start("train", rows)()
        if tq.kv_list(partition)[partition] != {key: dict.fromkeys(TASKS, 1) for key in keys}:
            raise AssertionError(f"step {number}: not every row went through every task exactly once")
        reward = tq.kv_batch_get(keys, partition, "reward")["reward"].mean()  # for the table only
        tq.get_client().clear_partition(partition)
        print(
            f"{number:4} {len(keys):6}"
            + "".join(f"{1000 * self.seconds[task]:9.1f}" for task in TASKS)
            + f"{reward:8.3f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 3), ("prompts", 16), ("samples", 4), ("max-len", 32), ("workers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--ray", action="store_true", help="workers are Ray actors, of the cluster at RAY_ADDRESS or a new one"
    )
    given = parser.parse_args()
    if given.ray:
        import ray

        ray.init(log_to_driver=False)
    tq.init()
    try:
        driver = Driver(actor if given.ray else child, given.workers, given.max_len)
        print("step   rows" + "".join(f"{task:>9}" for task in TASKS) + " (ms) reward")
        for number in range(given.steps):
            driver.step(number, given.prompts, given.samples)
        rows = given.steps * given.prompts * given.samples
        print(f"{given.steps} steps, {rows} rows: every row went through {', '.join(TASKS)} exactly once")
    finally:
        for process in active_children():  # before the service, of whose end they would have something to say
            process.kill()
        tq.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
