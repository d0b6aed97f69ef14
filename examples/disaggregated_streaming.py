"""RL without a controller: nobody is told what to do, every worker takes rows as soon as their fields are there.

    python disaggregated_streaming.py [--rows 96] [--dp 2] [--tp 2] [--rollouts 2] [--rewards 1] [--ray]

    worker    takes rows that have          writes, field by field
    rollout                                 number, prompt; then response; then rollout_log_probs
    reward    prompt, response              reward
    actor     rollout_log_probs, reward     (trains; dp x tp processes)

The processes of the actor iterate over a StreamingDataLoader. Its dp ranks share the rows of the partition between
them, and the tp peers of one dp rank get the same micro-batches, because RankAwareSampler remembers them. The policy is
a matrix: row i holds the logits of the token that follows token i.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import active_children, connection, get_context
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import transfer_queue as tq

PARTITION, VOCABULARY, PROMPT_LEN = "train_0", 16, 4
PAD = tq.Padding(mask=True)


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

    def add(self, numbers: Tensor, total: Tensor) -> None:
        self.numbers.append(numbers.tolist())
        self.sums.append(total.item())
        self.times.append(time.time())

    def rows(self) -> list[int]:
        return [number for micro_batch in self.numbers for number in micro_batch]


# The policy counts, most of the time


def new_table() -> Tensor:
    return torch.eye(VOCABULARY).roll(1, 1) * 3


def log_probs(table: Tensor, data: TensorDict) -> Tensor:
    return table.log_softmax(-1)[before(data), data["response"]]


def before(data: TensorDict) -> Tensor:
    """The token before each token of the padded responses."""
    return torch.cat([data["prompt"][:, -1:], data["response"][:, :-1]], 1)


def ragged(padded: Tensor, mask: Tensor) -> Tensor:
    """A column of rows of different length, to be put."""
    return torch.nested.as_nested_tensor([row[own] for row, own in zip(padded, mask, strict=True)], layout=torch.jagged)


# The workers


def rollout(rank: int, settings: Settings) -> Log:
    """Write this worker's share of the rows, one batch after the other."""
    log, client, table = Log(), tq.get_client(), new_table()
    share, size = settings.rows // settings.rollouts, settings.batch
    generator = torch.Generator().manual_seed(rank)
    for first in range(rank * share, (rank + 1) * share, size):
        numbers = torch.arange(first, first + size)
        prompt = torch.randint(VOCABULARY, (size, PROMPT_LEN), generator=generator)
        rows = client.put({"number": numbers, "prompt": prompt}, partition_id=PARTITION)
        tokens, last = [], prompt[:, -1]
        for _ in range(settings.max_len):
            last = torch.multinomial(table[last].softmax(-1), 1, generator=generator).squeeze(1)
            tokens.append(last)
        time.sleep(settings.generate_s)
        mask = torch.arange(settings.max_len) < torch.randint(1, settings.max_len + 1, (size, 1), generator=generator)
        data = TensorDict({"prompt": prompt, "response": torch.stack(tokens, 1)}, batch_size=size)
        client.put({"response": ragged(data["response"], mask)}, metadata=rows)
        chances = log_probs(table, data)
        client.put({"rollout_log_probs": ragged(chances, mask)}, metadata=rows)
        log.add(numbers, chances.sum())
    return log


def reward(rank: int, settings: Settings) -> Log:
    """Score rows as they come, together with the other reward workers: the share of tokens that count on."""
    log = Log()
    for data, meta in micro_batches("reward", ["number", "prompt", "response"], rank, settings):
        right = (data["response"] == (before(data) + 1) % VOCABULARY) & data["response_mask"]
        score = right.sum(1) / data["response_mask"].sum(1)
        tq.get_client().put({"reward": score}, metadata=meta)
        log.add(data["number"], score.sum())
    return log


def actor(rank: int, settings: Settings) -> Log:
    """Add up the gradient of every micro-batch of this dp rank."""
    log, table = Log(), new_table().requires_grad_()
    fields = ["number", "prompt", "response", "rollout_log_probs", "reward"]
    for data, _ in micro_batches("actor", fields, rank // settings.tp, settings):
        ratio = (log_probs(table, data) - data["rollout_log_probs"]).exp()
        loss = -((data["reward"][:, None] - 0.5) * ratio * data["response_mask"]).sum() / data["response_mask"].sum()
        torch.autograd.backward(loss)
        log.add(data["number"], data["reward"].sum() + data["rollout_log_probs"].sum())
    return log


def micro_batches(
    task: str, fields: list[str], dp_rank: int, settings: Settings
) -> Iterator[tuple[TensorDict, tq.BatchMeta]]:
    dataset = tq.StreamingDataset(
        None,  # the service of this process
        batch_size=settings.batch,
        micro_batch_size=settings.micro_batch,
        data_fields=fields,
        partition_id=PARTITION,
        task_name=task,
        dp_rank=dp_rank,
        should_check_consumption_status=True,
    )
    for data, meta in tq.StreamingDataLoader(dataset):
        yield tq.to_dense(data, PAD), meta


# Where they run

Work = Callable[[int, Settings], Log]


def worker(work: Work, rank: int, settings: Settings) -> Log:
    """Begin when all workers are up: each adds a row, and waits for those of all."""
    torch.set_num_threads(1)
    tq.init()
    everybody, task = settings.rollouts + settings.rewards + settings.dp * settings.tp, f"{work.__name__} {rank}"
    tq.get_client().put({"up": torch.zeros(1)}, partition_id="workers")
    place = {"dp_rank": 0, "batch_index": 0}  # which the sampler asks for
    tq.get_client().get_meta(["up"], everybody, "workers", task_name=task, sampling_config=place, timeout_s=100)
    return work(rank, settings)


def in_children(calls: Sequence[tuple[Work, int, Settings]]) -> list[Log]:
    """What each returned, in order. Raises EOFError as soon as one of them died."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tensordict", "transfer_queue"])  # imported once, not by every child
    pipes = []
    for call in calls:
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=report, args=(theirs, call), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    logs: dict[Any, Log] = {}
    while waiting := [pipe for pipe in pipes if pipe not in logs]:
        for pipe in connection.wait(waiting):
            logs[pipe] = pipe.recv()  # type: ignore[union-attr]
    return [logs[pipe] for pipe in pipes]


def report(pipe: connection.Connection, call: tuple[Work, int, Settings]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this process
    pipe.send(worker(*call))


def on_ray(calls: Sequence[tuple[Work, int, Settings]]) -> list[Log]:
    import ray

    remote = ray.remote(num_cpus=0)(worker)
    logs: list[Log] = ray.get([remote.remote(*call) for call in calls])
    return logs


# The driver


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
    parser.add_argument(
        "--ray", action="store_true", help="workers are Ray tasks, in the cluster of RAY_ADDRESS or a new one"
    )
    given = vars(parser.parse_args())
    run = on_ray if given.pop("ray") else in_children
    settings = Settings(**given)
    if run is on_ray:
        import ray

        ray.init(log_to_driver=False)
    tq.init({"controller": {"sampler": "RankAwareSampler"}})
    try:
        tq.get_client().set_partition(PARTITION, size=settings.rows)  # so that the streams know their end
        workers = {rollout: settings.rollouts, reward: settings.rewards, actor: settings.dp * settings.tp}
        logs = run([(work, rank, settings) for work, size in workers.items() for rank in range(size)])
    finally:
        for process in active_children():  # before the service, of whose end they would have something to say
            process.kill()
        tq.close()
    rewards, actors = logs[settings.rollouts :][: settings.rewards], logs[settings.rollouts + settings.rewards :]
    ranks = [actors[dp * settings.tp : (dp + 1) * settings.tp] for dp in range(settings.dp)]
    for dp, peers in enumerate(ranks):
        print(f"actor dp {dp}: {len(peers[0].rows()):4} rows in {len(peers[0].numbers):3} micro-batches")
    last_reward = max(log.times[-1] for log in rewards if log.times)
    times = [at for peers in ranks for at in peers[0].times]
    early = sum(at < last_reward for at in times)
    print(f"{early} of {len(times)} micro-batches were trained before the last reward was written")
    check(settings, ranks, rewards)
    print(f"{settings.rows} rows: {settings.dp} dp ranks disjoint and complete, {settings.tp} tp peers each identical")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
