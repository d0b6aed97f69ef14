"""The asynchronous loop: sampling never stops, and new weights arrive between two tokens.

    python -m examples.weights_in_flight [--steps 40] [--samplers 2] [--max-staleness 2]

Each update is staged and verified while the old weights serve. For the commit generation is frozen (pause keep), then
it goes on with the tokens it has. Samplers start no more than can be used in time (`admit`), and the trainer is given
nothing older than `--max-staleness` versions.
"""

from __future__ import annotations

import argparse
import itertools
import threading
from typing import Any

import torch

import transfer_queue as tq
from examples.counting import FIELDS, Policy, Sampler, train
from transfer_queue.weights import ModuleSource
from transfer_queue.weights.engines import registry

ROWS, LENGTH = 64, 64
DEADLINE_S = 10.0


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
        tq.admit("trainer", ROWS, max_staleness - 1, rows_per_version=ROWS)
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
    samplers = [Sampler("shm", seed) for seed in range(num_samplers)]
    trainer = registry.trainer("shm").trainer_init({}, client=Freezing(samplers), source=ModuleSource(policy))
    trainer.send_weights(deadline_s=DEADLINE_S)
    tq.set_weight_version(trainer.version, trainer.epoch)
    threads = [
        threading.Thread(target=produce, args=(name, sampler, max_staleness, ended))
        for name, sampler in enumerate(samplers)
    ]
    for thread in threads:
        thread.start()
    mixed, ages, reward = 0, [0], 0.0
    for step in range(steps):
        rows = client.get_meta(
            FIELDS, ROWS, "train", task_name="trainer", sampling_config={"max_staleness": max_staleness}
        )
        reward = train(policy, optimizer, client.get_data(rows))
        mixed += sum(len(tag["weight_versions"]) > 1 for tag in rows.custom_meta)
        ages.append(max(trainer.version - tag["weight_version"] for tag in rows.custom_meta))
        client.clear_samples(rows)
        # Announced first: samplers may begin the next batch at once, and get the new weights while they are at it.
        tq.set_weight_version(trainer.version + 1, trainer.epoch)
        trainer.send_weights(deadline_s=DEADLINE_S)
        if step % 10 == 9:
            print(f"version {trainer.version}: reward {reward:.0%}, {mixed} rows by several versions so far")
    ended.set()
    for _ in threads:
        tq.give_back("trainer", ROWS)
    for thread in threads:
        thread.join()
    trainer.shutdown()
    print(f"{steps} versions, {steps * ROWS} rows: {mixed} made by several versions, the oldest {max(ages)} behind")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=2)
    arguments = parser.parse_args()
    tq.init()
    try:
        run(arguments.steps, arguments.samplers, arguments.max_staleness)
    finally:
        tq.close()
