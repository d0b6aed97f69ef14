"""The synchronous loop: sample, train, send the weights, and only then sample again.

    python -m examples.weights_synchronous [--steps 20]

The sampler takes every version between two batches; the queue refuses whatever an older one made.
"""

from __future__ import annotations

import argparse

import torch

import transfer_queue as tq
from examples.counting import FIELDS, Policy, Sampler, train
from transfer_queue.weights import ModuleSource
from transfer_queue.weights.engines import registry

ROWS, LENGTH = 64, 8


def run(steps: int) -> None:
    torch.manual_seed(0)
    client = tq.get_client()
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    sampler = Sampler("shm")
    trainer = registry.trainer("shm").trainer_init({}, client=sampler.control, source=ModuleSource(policy))
    print("version  made by  reward   pack  update  commit")
    for _ in range(steps):
        report = trainer.send_weights(deadline_s=10)
        tq.set_weight_version(report.version, report.epoch)
        fields, tags = sampler.sample(ROWS, LENGTH)
        keys = [f"{report.version}/{number}" for number in range(ROWS)]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)

        rows = client.get_meta(FIELDS, ROWS, "train", task_name="trainer", sampling_config={"max_staleness": 0})
        reward = train(policy, optimizer, client.get_data(rows))
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
    tq.init()
    try:
        run(arguments.steps)
    finally:
        tq.close()
