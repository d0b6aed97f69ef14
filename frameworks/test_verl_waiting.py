"""verl's replay buffer that waits for changes: as the one that polls, and at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
from verl.trainer.ppo.v1 import PPOTrainer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

import transfer_queue as tq
from frameworks.test_verl_rollout import output, write
from transfer_queue.integrations import verl_replay

NewTrainer = Callable[..., PPOTrainer]
ROUNDS = 20


@pytest.fixture(params=["polls", "waits"])
def waits(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether verl's buffer waits, or polls as it does by itself."""
    held = {name: getattr(ReplayBuffer, name) for name in (verl_replay.SYNC, verl_replay.WAIT)}
    if request.param == "waits":
        verl_replay.install()
        verl_replay.install()  # which changes nothing
    yield request.param == "waits"
    for name, method in held.items():
        setattr(ReplayBuffer, name, method)


def test_a_group_is_in_hand_when_its_last_sibling_is_written(new_trainer: NewTrainer, waits: bool) -> None:
    """The time from before the last tag is written to when `sample` returns. It includes what verl does in between."""
    trainer = new_trainer()
    trainer.replay_buffer.poll_interval = 2.0  # verl's own
    took = []
    for number in range(ROUNDS if waits else 3):
        found: list[Any] = []
        sampling = threading.Thread(
            target=lambda found=found: found.append(
                (trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=1), time.monotonic())
            )
        )
        write(trainer, f"u{number}", [[output(2)], [output(3)]], "running")
        sampling.start()
        time.sleep(0.03)  # it has looked, in vain
        began = time.monotonic()
        tq.kv_put(key=f"u{number}", partition_id="train", tag={"status": "finished"})
        sampling.join()
        (batch, _), ended = found[0]
        assert sorted(batch.keys) == [f"u{number}_0_0", f"u{number}_1_0"]
        tq.kv_clear(keys=batch.keys, partition_id="train")
        took.append(1e3 * (ended - began))
    way = "waits" if waits else "polls"
    print(f"\n{way}: last tag to batch, ms, median {median(took):.2f}, worst {max(took):.2f}")
    assert median(took) < (20 if waits else 2500)
