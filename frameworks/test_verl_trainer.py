"""The steps of verl's trainer that read and write the queue on the driver, one by one, in one process without Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from verl.protocol import BatchData, DataProto
from verl.trainer.ppo.v1 import PPOTrainer
from verl.utils.skip import SkipManager
from verl.utils.skip.rollout_skip import RolloutTqSkip
from verl.utils.tracking import RLInsightLogger
from verl.utils.transferqueue_utils import tqbridge

import transfer_queue as tq
from frameworks.engine import LOG_PROB, model_numbers

NewTrainer = Callable[..., PPOTrainer]


class Engines:
    """Two data-parallel ranks in this process: split, bridged and joined by verl."""

    _dispatch_info = {"actor": [0, 1]}  # noqa: RUF012

    def compute_log_prob(self, batch: tq.KVBatchMeta) -> tq.KVBatchMeta:
        chunks = BatchData(batch).chunk(chunks=2)
        return BatchData([tqbridge()(model_numbers)(chunk) for chunk in chunks]).concat()

    compute_ref_log_prob = compute_log_prob


class RewardModel:
    """A reward model in the trainer's processes: half a point a token."""

    reward_loop_worker_handles = None

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        lengths = batch.batch["attention_mask"].sum(dim=1)
        scores = torch.full(batch.batch["responses"].shape, 0.5)
        assert isinstance(batch.non_tensor_batch["raw_prompt"][0], list)
        kept = {"acc": np.array([bool(n % 2) for n in lengths], dtype=object)}
        return DataProto.from_dict({"rm_scores": scores}, kept, {"reward_extra_keys": ["acc"]})


@pytest.fixture
def sampled(new_trainer: NewTrainer) -> Callable[..., tuple[PPOTrainer, tq.KVBatchMeta]]:
    """A trainer that has rolled out one batch, and its scored rows."""

    def build(*overrides: str) -> tuple[PPOTrainer, tq.KVBatchMeta]:
        trainer = new_trainer(*overrides)
        trainer.actor_rollout_wg = trainer.ref_policy_wg = Engines()
        trainer.ref_in_actor = False
        trainer.reward_loop_manager = RewardModel()
        trainer.prepare_step()
        batch, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=4)
        return trainer, trainer._compute_reward_colocate(batch)

    return build


def column(batch: tq.KVBatchMeta, name: str) -> Any:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[name])[name]


def test_rewards_of_a_model_in_the_trainer(sampled: Any) -> None:
    _, batch = sampled()
    assert batch.size == 8
    scores = column(batch, "rm_scores")
    assert scores.offsets().diff().tolist() == [tag["response_len"] for tag in batch.tags]
    assert scores.values().unique().tolist() == [0.5]
    assert [bool(value) for value in column(batch, "acc")] == [tag["seq_len"] % 2 == 1 for tag in batch.tags]


def test_a_batch_is_padded_and_balanced(sampled: Any) -> None:
    trainer, batch = sampled("actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
    balanced = trainer._balance_batch(batch, metrics={})
    assert len(balanced) == 18  # 12 rows, to whole mini-batches of 9
    padding = [key for key, tag in zip(balanced.keys, balanced.tags, strict=True) if tag.get("is_padding")]
    assert len(padding) == 6
    td = tq.kv_batch_get(keys=padding, partition_id="train")
    assert td["input_ids"].offsets().diff().tolist() == [128] * 6
    assert td["response_mask"].values().tolist() == [0] * 6
    assert set(tq.kv_batch_get(keys=balanced.keys, partition_id="train").keys()) >= {
        "rm_scores",
        "prompts",
        "raw_prompt",
    }
    assert {key: tag["seq_len"] for key, tag in tq.kv_list("train")["train"].items()} == {
        key: tag["seq_len"] for key, tag in zip(balanced.keys, balanced.tags, strict=True)
    }


def test_from_log_probs_to_metrics(sampled: Any) -> None:
    trainer, batch = sampled("algorithm.use_kl_in_reward=True", "algorithm.rollout_correction.rollout_is=token")
    metrics: dict[str, Any] = {}
    batch = trainer._balance_batch(batch, metrics=metrics)
    batch = trainer._compute_old_log_prob(batch, metrics)
    assert batch.fields is not None
    assert {"old_log_probs", "entropy"} <= set(batch.fields)
    batch = trainer._compute_ref_log_prob(batch, metrics)
    batch = trainer._compute_advantage(batch, metrics)
    lengths = [tag["response_len"] for tag in batch.tags]
    for name in ("old_log_probs", "ref_log_prob", "advantages", "returns", "token_level_rewards", "rollout_is_weights"):
        assert column(batch, name).offsets().diff().tolist() == lengths, name
    assert column(batch, "old_log_probs").values().tolist() == [LOG_PROB] * sum(lengths)
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
    timing = {"step": 1.0, "gen": 0.5}
    metrics["actor/grad_norm"] = 1.0
    trainer._compute_metrics(batch, metrics, timing, global_steps=1, epoch=0)
    assert metrics["training/num_turns/mean"] == 2
    assert metrics["response_length/max"] == max(lengths)
    assert metrics["critic/rewards/mean"] == pytest.approx(np.mean(lengths) / 2)


def test_old_log_probs_taken_from_the_rollout(sampled: Any) -> None:
    trainer, batch = sampled("algorithm.rollout_correction.bypass_mode=True")
    trainer._compute_old_log_prob(batch, {})
    assert column(batch, "old_log_probs").values().unique().tolist() == [-0.5]


def test_rollouts_are_dumped(sampled: Any, tmp_path: Path) -> None:
    trainer, batch = sampled()
    trainer._log_rollout_data(batch, {}, str(tmp_path))
    trainer._shutdown_dump_executor()
    rows = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["uid"] for row in rows] == sorted(batch.keys)
    assert {row["gts"] for row in rows} == {"3", "7", "6", "4"}
    assert all(row["score"] == 0.5 * (1 + len(row["output"].split())) for row in rows)


def test_validation(new_trainer: NewTrainer, tmp_path: Path) -> None:
    trainer = new_trainer()
    trainer.reward_loop_manager = RewardModel()
    metrics = trainer._validate()
    trainer._shutdown_dump_executor()
    assert metrics["val-core/sums/reward/mean@1"] > 0
    assert tq.kv_list() == {}
    assert len((tmp_path / "validation" / "1.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_metrics_of_mixtures_of_experts_skip_a_field_that_is_missing(sampled: Any) -> None:
    from verl.trainer.ppo.metric_utils import get_metric_data_with_optional_routed_experts as read

    trainer, batch = sampled()
    accumulator = trainer._rollout_moe_lb_metrics_accumulator
    fields = ["prompts", "num_turns"]
    td = read(batch.keys, batch.partition_id, fields, 1, 1, accumulator, tq.kv_batch_get)
    assert sorted(td.keys()) == ["num_turns", "prompts"]
    assert td.pop("num_turns").tolist() == [2] * 8


@pytest.mark.parametrize("count", [4, 2])
def test_a_rollout_is_kept_and_replayed(
    new_trainer: NewTrainer, configure: Callable[..., DictConfig], count: int
) -> None:
    skip = ("skip.rollout_tq.enable=True", "skip.rollout_tq.steps=[1]", "skip.rollout_tq.action=repeat")
    trainer = new_trainer(*skip)
    SkipManager.init(trainer.config)
    SkipManager.set_step(1)
    try:
        trainer.prepare_step()
        first, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=4)
        before = tq.kv_batch_get(keys=first.keys, partition_id="train", select_fields=["responses", "uid"])
        tq.kv_clear(keys=first.keys, partition_id="train")
        instance = SkipManager.skip_instances["rollout_tq"]
        assert isinstance(instance, RolloutTqSkip)
        uids = [f"new{number}" for number in range(count)]
        assert instance.maybe_load_and_inject(1, uids)
        again, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=count)
    finally:
        SkipManager.skip_instances.clear()
    assert sorted(again.keys) == [f"{uid}_{session}_0" for uid in uids for session in range(2)]
    after = tq.kv_batch_get(keys=again.keys, partition_id="train", select_fields=["responses", "uid"])
    known = [row.tolist() for row in before["responses"].unbind()]
    assert all(row.tolist() in known for row in after["responses"].unbind())


def test_the_endpoint_of_metrics_is_registered(service: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(RLInsightLogger, "register_metrics", lambda *arguments: registered.append(arguments))
    RLInsightLogger.register_transfer_queue_metrics({"transfer_queue": {"metrics": {"enabled": True}}})
    endpoint = tq.get_metrics_endpoint()
    assert registered == ([([endpoint], "transfer_queue", None)] if endpoint else [])


def test_verls_configuration_is_taken_as_it_is(service: DictConfig, configure: Callable[..., DictConfig]) -> None:
    section = configure().transfer_queue
    assert (
        service.backend.SimpleStorage.total_storage_size == section.backend.SimpleStorage.total_storage_size == 100000
    )
    assert service.backend.MooncakeStore.protocol == "tcp"
    assert service.enable is False
    assert tq.init(section) is section
    assert tq.init() is None
