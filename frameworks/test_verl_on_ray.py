"""verl's training loop from its first line to its last, over this package, on a Ray of two processors.

Data set, tokenizer, agent loops, reward workers, replay buffer, dispatch to two data-parallel workers and back,
padding, balancing, advantages, metrics, validation, dumps: all verl's. Two ends are not: see `engine.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainer

import transfer_queue as tq
from frameworks.engine import ENTROPY

ON_RAY = True
Equip = Callable[[PPOTrainer], AgentLoopManagerTQ]
ASYNC = ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1")


def fitted(trainer: PPOTrainer, equip: Equip, log: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """What `fit` logged, by step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    manager = equip(trainer)
    trainer.fit(manager)
    trainer.logger.finish()
    found: dict[int, dict[str, Any]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["step"], {}).update(record["data"])
    return found


def dumped(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{step}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_synchronous_training(
    new_trainer: Callable[..., PPOTrainer], on_ray: Equip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = fitted(new_trainer("actor_rollout_ref.rollout.n=3"), on_ray, tmp_path / "log", monkeypatch)
    assert sorted(metrics) == [0, 1, 2]
    assert metrics[1]["actor/entropy"] == pytest.approx(ENTROPY)
    assert metrics[1]["critic/score/max"] > metrics[1]["critic/score/min"] > 0
    assert metrics[1]["critic/advantages/max"] > 0 > metrics[1]["critic/advantages/min"]
    assert metrics[2]["val-aux/sums/reward/mean@1"] > 0
    rows = dumped(tmp_path / "rollout", 1)
    assert len(rows) == 4 * 3
    assert len({row["uid"].split("_")[0] for row in rows}) == 4
    assert all(row["score"] == len(row["output"].split()) for row in rows)
    assert {row["input"] for row in rows} >= {"<user> what is 3 + 4 ? <assistant>"}
    assert len(dumped(tmp_path / "validation", 0)) == 4
    assert tq.kv_list() == {}


def test_asynchronous_training_with_critic_and_reference(
    new_trainer: Callable[..., PPOTrainer], on_ray: Equip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(
        *ASYNC, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "trainer.test_freq=-1",
        "trainer.val_before_train=False",
    )  # fmt: skip
    metrics = fitted(trainer, on_ray, tmp_path / "log", monkeypatch)
    assert sorted(metrics) == [1, 2]
    assert metrics[2]["critic/loss"] != 0
    assert metrics[2]["critic/values/mean"] == pytest.approx(0.125)
    assert metrics[2]["critic/rewards/mean"] == pytest.approx(metrics[2]["critic/score/mean"])  # the two models agree
    assert len(dumped(tmp_path / "rollout", 2)) == 4 * 2
    waiting = tq.kv_list("train")["train"]  # one batch is always ahead
    prompts = {key: tag for key, tag in waiting.items() if tag.get("is_prompt")}
    assert len(prompts) == 4
    assert {key.split("_")[0] for key in waiting} == set(prompts)


def test_training_resumes_from_a_checkpoint(
    new_trainer: Callable[..., PPOTrainer], on_ray: Equip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(*ASYNC, "trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=False")
    fitted(trainer, on_ray, tmp_path / "log", monkeypatch)
    ahead = tq.kv_list("train")["train"].keys()
    tq.get_client().clear_partition("train")
    trainer.config.trainer.resume_mode = "auto"
    trainer._load_checkpoint()
    assert trainer.global_steps == 2
    assert trainer._restored_tq_prompt_count == 4
    assert {key for key in tq.kv_list("train")["train"] if "_" not in key} == {key for key in ahead if "_" not in key}
