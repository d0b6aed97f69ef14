"""The synchronous loop: sample, train, send the weights, and only then sample again.

    python weights_synchronous.py [--steps 20]

The sampler takes every version between two batches; the queue refuses whatever an older one made.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import transfer_queue as tq
from transfer_queue.weights import Control, ModuleSource, Receiver, Spans, Swap
from transfer_queue.weights.transport import registry

ROWS, LENGTH = 64, 8
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
    """An inference server, without a network. Its control takes new weights between two batches."""

    def __init__(self) -> None:
        self.receiver = Receiver(Swap(Policy()))
        self.engine = registry.engine("shm")(self.receiver)
        self.control = Control(self.engine, self.receiver)
        self._generator = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def sample(self, count: int, length: int) -> tuple[TensorDict, list[dict[str, Any]]]:
        """Fields and tags of `count` rows: the tag says which version made them."""
        prompt = torch.randint(VOCABULARY, (count,), generator=self._generator)
        tokens, log_probs, last = [], [], prompt
        with self.receiver.reading() as live:
            for _ in range(length):
                chances = live.module(last).log_softmax(-1)
                last = torch.multinomial(chances.exp(), 1, generator=self._generator).squeeze(1)
                tokens.append(last)
                log_probs.append(chances.gather(1, last[:, None]).squeeze(1))
            spans = Spans()
            spans.add(live.tag)
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


def run(steps: int) -> None:
    torch.manual_seed(0)
    client = tq.get_client()
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    sampler = Sampler()
    trainer = registry.trainer("shm").trainer_init({}, client=sampler.control, source=ModuleSource(policy))
    print("version  made by  reward   pack  update  commit")
    for _ in range(steps):
        report = trainer.send_weights(deadline_s=10)
        tq.set_weight_version(report.version, report.run_id)
        fields, tags = sampler.sample(ROWS, LENGTH)
        keys = [f"{report.version}/{number}" for number in range(ROWS)]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)

        rows = client.get_meta(FIELDS, ROWS, "train", task_name="trainer", sampling_config={"max_staleness": 0})
        reward = train(policy, optimizer, client.get_data(rows, dense=True))
        made_by = {tag["weight_version"] for tag in rows.custom_meta}
        client.clear_samples(rows)
        times = "  ".join(f"{seconds * 1e3:3.1f} ms" for seconds in (report.pack_s, report.update_s, report.commit_s))
        print(f"{report.version:>7}  {made_by!s:>7}  {reward:>6.0%}  {times}")
    trainer.shutdown()
    sampler.engine.shutdown()
    print(f"{steps} versions, {steps * ROWS} rows, {client.stats()['stale_rows']} of them too old")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tq.init()
    try:
        run(arguments.steps)
    finally:
        tq.close()
