"""The asynchronous loop: sampling never stops, and new weights arrive between two tokens.

    python weights_in_flight.py [--steps 40] [--samplers 2] [--max-staleness 2]

Each update is staged and verified while the old weights serve. For the commit generation is frozen (pause keep), then
it goes on with the tokens it has. Samplers start no more than can be used in time (`admit`), and the trainer is given
nothing older than `--max-staleness` versions.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import transfer_queue as tq
from transfer_queue.weights import Control, Gate, ModuleSource, Receiver, Spans, Swap
from transfer_queue.weights.transport import registry

ROWS, LENGTH = 64, 64
DEADLINE_S = 10.0  # of an update of the weights
PATIENCE_S = 600  # how long samplers and the trainer wait for each other
TOKEN_S = 0.0005  # how long a token takes at least, as on a GPU
VOCABULARY = 16
FIELDS = ["prompt", "response", "log_probs"]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the tokens that follow."""
        logits: Tensor = self.table(tokens)
        return logits


class Sampler:
    """An inference server, without a network. `control` takes new weights, also while `sample` runs."""

    def __init__(self, seed: int) -> None:
        self.receiver = Receiver(Swap(Policy()))
        self.engine = registry.engine("shm")(self.receiver)
        self._gate = Gate()
        self.control = Control(self.engine, self.receiver, generation=self._gate)
        self._generator = torch.Generator().manual_seed(seed)
        self._numbers = itertools.count()

    @torch.inference_mode()
    def sample(self, count: int, length: int) -> tuple[TensorDict, list[dict[str, Any]]]:
        """Fields and tags of `count` rows. Between two tokens the weights may change; log-probs are as sampled."""
        prompt = torch.randint(VOCABULARY, (count,), generator=self._generator)
        tokens, log_probs, last, spans = [], [], prompt, Spans()
        with self._gate.request(f"request {next(self._numbers)}") as request:
            for _ in range(length):
                time.sleep(TOKEN_S)
                with request.step(), self.receiver.reading() as live:
                    chances = live.module(last).log_softmax(-1)
                    spans.add(live.tag)
                last = torch.multinomial(chances.exp(), 1, generator=self._generator).squeeze(1)
                tokens.append(last)
                log_probs.append(chances.gather(1, last[:, None]).squeeze(1))
        columns = {"prompt": prompt, "response": torch.stack(tokens, 1), "log_probs": torch.stack(log_probs, 1)}
        return TensorDict({name: column.clone() for name, column in columns.items()}, count), [spans.tag()] * count


def train(policy: Policy, optimizer: torch.optim.Optimizer, rows: TensorDict) -> float:
    """One step of the clipped policy gradient; the mean reward: the share of tokens one more than the one before.
    Ratios are to the log-probs that were recorded, so rows that several versions made are right."""
    prompt, response, old_log_probs = (rows[name] for name in FIELDS)
    before = torch.cat([prompt[:, None], response[:, :-1]], 1)
    reward = (response == (before + 1) % VOCABULARY).float()
    log_probs = policy(before).log_softmax(-1).gather(2, response[:, :, None]).squeeze(2)
    ratio = (log_probs - old_log_probs).exp()
    advantage = reward - reward.mean()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return float(reward.mean())


class Freezing:
    """Brings the trainer's calls to every sampler, and freezes them all around the commit."""

    def __init__(self, samplers: list[Sampler]) -> None:
        self._controls = [sampler.control for sampler in samplers]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for control in self._controls:
            control.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        for control in self._controls:
            control.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for control in self._controls:
            control.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        try:
            for control in self._controls:
                control.pause_generation("keep")
            for control in self._controls:
                control.finish_weight_update(weight_version)
        finally:
            for control in self._controls:
                control.resume_generation()


def produce(name: int, sampler: Sampler, max_staleness: int, ended: threading.Event) -> None:
    for number in itertools.count():
        tq.admit("trainer", ROWS, max_staleness - 1, rows_per_version=ROWS, timeout_s=PATIENCE_S)
        if ended.is_set():
            return
        fields, tags = sampler.sample(ROWS, LENGTH)
        keys = [f"{name}/{number}/{row}" for row in range(ROWS)]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)


def run(steps: int, num_samplers: int, max_staleness: int) -> None:
    torch.manual_seed(0)
    client, ended = tq.get_client(), threading.Event()
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    samplers = [Sampler(seed) for seed in range(num_samplers)]
    trainer = registry.trainer("shm").trainer_init({}, client=Freezing(samplers), source=ModuleSource(policy))
    trainer.send_weights(deadline_s=DEADLINE_S)
    tq.set_weight_version(trainer.version, trainer.run_id)
    threads = [
        threading.Thread(target=produce, args=(name, sampler, max_staleness, ended), daemon=True)
        for name, sampler in enumerate(samplers)
    ]
    for thread in threads:
        thread.start()
    mixed, ages, reward = 0, [0], 0.0
    sampling = {"max_staleness": max_staleness}
    try:
        for step in range(steps):
            rows = client.get_meta(
                FIELDS, ROWS, "train", task_name="trainer", sampling_config=sampling, timeout_s=PATIENCE_S
            )
            reward = train(policy, optimizer, client.get_data(rows, dense=True))
            mixed += sum(len(tag["weight_versions"]) > 1 for tag in rows.custom_meta)
            ages.append(max(trainer.version - tag["weight_version"] for tag in rows.custom_meta))
            client.clear_samples(rows)
            # Announced first: samplers may begin the next batch at once, and get the new weights while they are at it.
            tq.set_weight_version(trainer.version + 1, trainer.run_id)
            trainer.send_weights(deadline_s=DEADLINE_S)
            if step % 10 == 9:
                print(f"version {trainer.version}: reward {reward:.0%}, {mixed} rows by several versions so far")
    finally:
        ended.set()
        for _ in threads:
            tq.give_back("trainer", ROWS)  # lets them in, so that they see it
        for thread in threads:
            thread.join(DEADLINE_S)
    trainer.shutdown()
    print(f"{steps} versions, {steps * ROWS} rows: {mixed} made by several versions, the oldest {max(ages)} behind")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tq.init()
    try:
        run(arguments.steps, arguments.samplers, arguments.max_staleness)
    finally:
        tq.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
