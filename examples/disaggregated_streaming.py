"""RL without a controller: nobody is told what to do, every worker takes rows as soon as their fields are there.

    python -m examples.disaggregated_streaming [--rows 96] [--dp 2] [--tp 2] [--rollouts 2] [--rewards 1] [--ray]

    worker    takes rows that have          writes, field by field
    rollout                                 number, prompt; then response; then rollout_log_probs
    reward    prompt, response              reward
    actor     rollout_log_probs, reward     (trains; dp x tp processes)

The processes of the actor iterate over a StreamingDataLoader. Its dp ranks share the rows of the partition between
them, and the tp peers of one dp rank get the same micro-batches, because RankAwareSampler remembers them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from examples import bigram
from examples.workers import Hire, hiring

PARTITION = "train_0"


@dataclass(frozen=True, kw_only=True)
class Settings:
    rows: int
    dp: int
    tp: int
    rollouts: int
    rewards: int
    batch: int
    micro_batch: int
    max_len: int
    generate_s: float
    """How long a rollout worker takes for a batch, as its GPU would."""

    def __post_init__(self) -> None:
        if self.rows % (self.batch * self.rollouts):
            raise SystemExit(f"--rows must be a multiple of --batch x --rollouts, {self.batch * self.rollouts}")


@dataclass
class Log:
    """What a worker did, for the driver to check."""

    numbers: list[list[int]] = field(default_factory=list)
    """The rows of each micro-batch."""
    sums: list[float] = field(default_factory=list)
    """One of each micro-batch: over all its values."""
    times: list[float] = field(default_factory=list)
    """When each was done, as time.time()."""

    def add(self, numbers: torch.Tensor, total: torch.Tensor) -> None:
        self.numbers.append(numbers.tolist())
        self.sums.append(total.item())
        self.times.append(time.time())

    def rows(self) -> list[int]:
        return [number for micro_batch in self.numbers for number in micro_batch]


class Worker:
    def __init__(self, rank: int, settings: Settings) -> None:
        tq.init()
        self.client = tq.get_client()
        self.rank = rank
        self.settings = settings
        self.table = torch.eye(bigram.VOCABULARY).roll(1, 1) * 3  # a policy that counts, most of the time

    def ready(self, _: None) -> bool:
        """True once the process is up."""
        return True

    def stream(self, task: str, fields: list[str], dp_rank: int) -> Iterator[tuple[TensorDict, tq.BatchMeta]]:
        dataset = tq.StreamingDataset(
            None,  # the service of this process
            batch_size=self.settings.batch,
            micro_batch_size=self.settings.micro_batch,
            data_fields=fields,
            partition_id=PARTITION,
            task_name=task,
            dp_rank=dp_rank,
            should_check_consumption_status=True,
        )
        return iter(tq.StreamingDataLoader(dataset))


class Rollout(Worker):
    def run(self, _: None) -> Log:
        """Write this worker's share of the rows, one batch after the other."""
        log, settings = Log(), self.settings
        share = settings.rows // settings.rollouts
        generator = torch.Generator().manual_seed(self.rank)
        for first in range(self.rank * share, (self.rank + 1) * share, settings.batch):
            numbers = torch.arange(first, first + settings.batch)
            prompt = torch.nested.as_nested_tensor(bigram.prompts(settings.batch, generator), layout=torch.jagged)
            rows = self.client.put({"number": numbers, "prompt": prompt}, partition_id=PARTITION)
            last = prompt.values().view(settings.batch, -1)
            response = bigram.respond(self.table, last, settings.max_len, generator)
            time.sleep(settings.generate_s)
            self.client.put({"response": response}, metadata=rows)
            packed = bigram.log_probs(self.table, prompt, response)
            self.client.put({"rollout_log_probs": bigram.like(response, packed)}, metadata=rows)
            log.add(numbers, packed.sum())
        return log


class Reward(Worker):
    def run(self, _: None) -> Log:
        """Score rows as they come, together with the other reward workers."""
        log = Log()
        for data, meta in self.stream("reward", ["number", "prompt", "response"], self.rank):
            reward = bigram.rewards(data["prompt"], data["response"])
            self.client.put({"reward": reward}, metadata=meta)
            log.add(data["number"], reward.sum())
        return log


class Actor(Worker):
    def run(self, _: None) -> Log:
        """Add up the gradient of every micro-batch of this dp rank."""
        log = Log()
        table = self.table.clone().requires_grad_()
        fields = ["number", "prompt", "response", "rollout_log_probs", "reward"]
        for data, _meta in self.stream("actor", fields, self.rank // self.settings.tp):
            packed = bigram.log_probs(table, data["prompt"], data["response"])
            lengths = data["response"].offsets().diff()
            advantage = (data["reward"] - 0.5).repeat_interleave(lengths)
            loss = -(advantage * (packed - data["rollout_log_probs"].values()).exp()).mean()
            torch.autograd.backward(loss)
            log.add(data["number"], data["reward"].sum() + packed.detach().sum())
        return log


def run(hire: Hire, settings: Settings) -> None:
    """All workers at once, over one partition."""
    sizes = {Rollout: settings.rollouts, Reward: settings.rewards, Actor: settings.dp * settings.tp}
    tq.get_client().set_partition(PARTITION, size=settings.rows)  # so that the streams know their end
    groups = {kind: hire(kind, [(rank, settings) for rank in range(size)]) for kind, size in sizes.items()}
    for wait in [group.start("ready", [None] * sizes[kind]) for kind, group in groups.items()]:
        wait()
    waits = {kind: group.start("run", [None] * sizes[kind]) for kind, group in groups.items()}
    logs: dict[Any, list[Log]] = {kind: wait() for kind, wait in waits.items()}
    ranks = [logs[Actor][dp * settings.tp : (dp + 1) * settings.tp] for dp in range(settings.dp)]
    for dp, peers in enumerate(ranks):
        print(f"actor dp {dp}: {len(peers[0].rows()):4} rows in {len(peers[0].numbers):3} micro-batches")
    last_reward = max(log.times[-1] for log in logs[Reward] if log.times)
    early = sum(at < last_reward for peers in ranks for at in peers[0].times)
    total = sum(len(peers[0].times) for peers in ranks)
    print(f"{early} of {total} micro-batches were trained before the last reward was written")
    check(settings, ranks, logs[Reward])
    print(f"{settings.rows} rows: {settings.dp} dp ranks disjoint and complete, {settings.tp} tp peers each identical")


def check(settings: Settings, ranks: list[list[Log]], rewards: list[Log]) -> None:
    """AssertionError unless every row was scored once and trained once, by all tp peers of one dp rank alike."""
    everything = list(range(settings.rows))
    if sorted(row for log in rewards for row in log.rows()) != everything:
        raise AssertionError("reward: not every row exactly once")
    for dp, peers in enumerate(ranks):
        if any((peer.numbers, peer.sums) != (peers[0].numbers, peers[0].sums) for peer in peers):
            raise AssertionError(f"actor: the tp peers of dp rank {dp} saw different rows or values")
    if sorted(row for peers in ranks for row in peers[0].rows()) != everything:
        raise AssertionError("actor: the dp ranks' rows are not disjoint and complete")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"rows": 96, "dp": 2, "tp": 2, "rollouts": 2, "rewards": 1, "batch": 8, "micro-batch": 4, "max-len": 32}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--generate-s", type=float, default=0.05)
    parser.add_argument("--ray", action="store_true", help="workers are Ray actors")
    given = vars(parser.parse_args())
    on_ray = given.pop("ray")
    with hiring(on_ray) as hire:
        tq.init({"controller": {"sampler": "RankAwareSampler"}})
        try:
            run(hire, Settings(**given))
        finally:
            tq.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
