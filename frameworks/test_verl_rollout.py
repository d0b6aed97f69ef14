"""verl's writer and its replay buffer, in one process without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import PPOTrainer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

import transfer_queue as tq
from frameworks.engine import Answers

NewTrainer = Callable[..., PPOTrainer]
FIELDS = {
    "prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "rollout_log_probs",
    "multi_modal_inputs", "extra_fields", "metrics", "num_turns", "uid", "raw_prompt", "reward_model", "data_source",
}  # fmt: skip


def output(length: int, reward: float | None = None, **extra: Any) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=[3, 7, 9], response_ids=[5] * length, response_mask=[1] * length, response_logprobs=[-0.5] * length,
        reward_score=reward, num_turns=2, metrics=AgentLoopMetrics(), extra_fields=extra,
    )  # fmt: skip


def write(trainer: PPOTrainer, uid: str, sessions: list[list[AgentLoopOutput]], status: str = "finished") -> None:
    """A prompt and its sessions, the way a worker writes them."""
    worker = trainer.agent_loop_manager.worker
    prompt = {"is_prompt": True, "status": "pending", "global_steps": trainer.global_steps}
    tq.kv_batch_put(keys=[uid], partition_id="train", tags=[prompt])

    async def run() -> None:
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "running"})
        for number, outputs in enumerate(sessions):
            known = {
                "uid": uid,
                "session_id": number,
                "global_steps": trainer.global_steps,
                "raw_prompt": [{"role": "user"}],
            }
            await worker._agent_loop_postprocess(outputs, False, **known)
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": status})

    asyncio.run(run())


def test_a_batch_of_prompts_becomes_rows(new_trainer: NewTrainer) -> None:
    trainer = new_trainer()
    trainer.prepare_step()
    tags = tq.kv_list("train")["train"]
    prompts = [key for key in tags if "_" not in key]
    rows = [key for key in tags if "_" in key]
    assert len(prompts) == 4
    assert len(rows) == 8
    assert all(tags[key] == {"is_prompt": True, "status": "finished", "global_steps": 1} for key in prompts)
    td = tq.kv_batch_get(keys=rows, partition_id="train")
    assert set(td.keys()) >= FIELDS
    assert td["input_ids"].offsets().diff().tolist() == [tags[key]["seq_len"] for key in rows]
    assert td["responses"].offsets().diff().tolist() == [tags[key]["response_len"] for key in rows]
    assert td["position_ids"].dtype == torch.int64
    assert td["rollout_log_probs"].dtype == torch.float32
    assert next(iter(td["raw_prompt"]))[0]["role"] == "user"
    assert td.pop("uid").tolist() == [key.split("_")[0] for key in rows]
    assert td[0]["data_source"] == "sums"


def test_the_prompts_of_an_async_trainer_carry_their_data(new_trainer: NewTrainer) -> None:
    trainer = new_trainer("trainer.v1.trainer_mode=colocate_async")
    batch = trainer._next_train_batch(4)
    trainer.agent_loop_manager.generate_sequences = lambda batch: None
    assert trainer._submit_batch_to_rollout(batch) == 4
    uids = list(batch["uid"])
    td = tq.kv_batch_get(keys=uids, partition_id="train")
    assert list(td["raw_prompt"]) == list(batch["raw_prompt"])
    assert td.pop("uid").tolist() == uids


def test_in_flight_prompts_are_issued_again(new_trainer: NewTrainer) -> None:
    trainer = new_trainer("trainer.v1.trainer_mode=colocate_async")
    rollout = trainer.agent_loop_manager.generate_sequences
    trainer.agent_loop_manager.generate_sequences = lambda batch: None
    trainer._submit_batch_to_rollout(trainer._next_train_batch(4))
    uid = next(iter(tq.kv_list("train")["train"]))
    tq.kv_put(f"{uid}_0_0", "train", {"half": torch.ones(2)}, {"status": "success"})
    trainer.global_steps = 7
    trainer.agent_loop_manager.generate_sequences = rollout
    assert trainer._reissue_inflight_prompts() == 4
    tags = tq.kv_list("train")["train"]
    assert {tag["global_steps"] for tag in tags.values()} == {7}
    assert len(tags) == 4 + 8
    assert "half" not in tq.kv_batch_get(keys=[f"{uid}_0_0"], partition_id="train")


def test_a_failed_session_fails_its_prompt(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(answers=Answers(poison=5 + 3))  # the word "3"
    trainer.prepare_step()
    tags = tq.kv_list("train")["train"]
    states = [tag["status"] for key, tag in tags.items() if "_" not in key]
    assert sorted(states) == ["failure", "finished", "finished", "finished"]
    assert len(tags) == 4 + 6


def test_sampling_takes_finished_groups_and_clears_their_prompts(new_trainer: NewTrainer) -> None:
    trainer = new_trainer()
    write(trainer, "late", [[output(2)]], "running")
    write(trainer, "a", [[output(2)], [output(3), output(4)]])
    write(trainer, "b", [[output(1)], [output(5)]])
    batch, metrics = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0", "a_1_1", "b_0_0", "b_1_0"]
    assert [tag["response_len"] for tag in batch.tags] == [
        {"a": [2, 3, 4], "b": [1, 5]}[k[0]][_nth(k)] for k in batch.keys
    ]
    assert metrics == {}
    assert set(tq.kv_list("train")["train"]) == {"late", "late_0_0", *batch.keys}


def _nth(key: str) -> int:
    _, session, index = key.split("_")
    return int(session) + int(index)


def test_groups_without_signal_are_evicted_and_replaced(new_trainer: NewTrainer) -> None:
    for metric in ("reward", "acc"):
        trainer = new_trainer(
            "trainer.v1.trainer_mode=colocate_async", "algorithm.filter_groups.enable=True",
            f"algorithm.filter_groups.metric={metric}",
        )  # fmt: skip
        asked: list[int] = []

        def refill(count: int, trainer: PPOTrainer = trainer, asked: list[int] = asked) -> None:
            asked.append(count)
            write(trainer, "new", [[scored(1.0)], [scored(2.0)]])

        trainer.replay_buffer.refill_fn = refill
        assert isinstance(trainer.replay_buffer, ReplayBufferAsync)
        write(trainer, "same", [[scored(1.0)], [scored(1.0)]])
        write(trainer, "mixed", [[scored(0.0)], [scored(1.0)]])
        batch, metrics = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
        assert sorted(batch.keys) == ["mixed_0_0", "mixed_1_0", "new_0_0", "new_1_0"]
        assert asked == [1]
        assert metrics["training/filter_groups/evicted_samples"] == 1
        assert sorted(tq.kv_list("train")["train"]) == sorted(batch.keys)
        tq.kv_clear(keys=batch.keys, partition_id="train")


def scored(value: float) -> AgentLoopOutput:
    return output(3, reward=value, reward_extra_info={"acc": value})


def test_stale_and_failed_groups_are_evicted(new_trainer: NewTrainer) -> None:
    trainer = new_trainer("trainer.v1.trainer_mode=colocate_async", "trainer.v1.sampler.max_off_policy_threshold=2")
    trainer.replay_buffer.refill_fn = lambda count: None
    write(trainer, "old", [[output(2)]])
    trainer.global_steps = 4
    write(trainer, "failed", [[output(2)]], "failure")
    write(trainer, "good", [[output(2)]])
    batch, metrics = trainer.replay_buffer.sample(global_steps=4, partition_id="train", batch_size=1)
    assert batch.keys == ["good_0_0"]
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    assert list(tq.kv_list("train")["train"]) == ["good_0_0"]
    assert trainer.replay_buffer.get_sampleable_count(4, "train") == 0


def test_a_synchronous_trainer_may_replace_failed_groups(new_trainer: NewTrainer) -> None:
    trainer = new_trainer("trainer.v1.sampler.sync_refill_failed_groups=True")
    assert type(trainer.replay_buffer) is ReplayBuffer
    trainer.replay_buffer.refill_fn = lambda count: write(trainer, "again", [[output(2)]])
    write(trainer, "bad", [], "failure")
    batch, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    assert batch.keys == ["again_0_0"]


def test_every_kind_of_value_of_a_trajectory(new_trainer: NewTrainer) -> None:
    trainer = new_trainer()
    worker = trainer.agent_loop_manager.worker
    pixels = {"pixel_values": torch.rand(4, 6), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    worker._compute_multi_modal_inputs = lambda output, ids: pixels
    positions = [torch.arange(4 * n).view(1, 4, n) for n in (5, 5, 9)]
    worker._compute_position_ids = lambda ids, mask, inputs, kwargs=None: positions[{5: 0, 9: 2}[ids.shape[1]]]
    first, second = output(2, reward=1.0), output(6, reward=2.0)
    first.routed_experts, second.routed_experts = torch.ones(5, 2, 3).tolist(), torch.ones(7, 2, 3).tolist()
    write(trainer, "a", [[first], [second]])
    td = tq.kv_batch_get(keys=["a_0_0", "a_1_0"], partition_id="train")
    assert [tuple(row.shape) for row in td["routed_experts"].unbind()] == [(5, 2, 3), (9, 2, 3)]
    assert td["routed_experts"].dtype == torch.int16
    assert [tuple(row.shape) for row in td["position_ids"].unbind()] == [(4, 5), (4, 9)]
    assert td["rm_scores"].sum(dim=1).tolist() == [1.0, 2.0]
    found = list(td["multi_modal_inputs"])
    assert torch.equal(found[1]["pixel_values"], pixels["pixel_values"])
    assert found[0]["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert isinstance(td, TensorDict)


def test_a_counter_of_groups(new_trainer: NewTrainer) -> None:
    from verl.trainer.ppo.v1.trainer_base import _count_tq_prompt_groups

    assert _count_tq_prompt_groups() == 0
    trainer = new_trainer()
    write(trainer, "a", [[output(2)]])
    write(trainer, "b", [[output(2)]])
    assert _count_tq_prompt_groups() == 2


@pytest.mark.parametrize("rows", [[5, 5], [5, 7]])
def test_positions_of_several_dimensions_keep_their_ragged_one(new_trainer: NewTrainer, rows: list[int]) -> None:
    columns = [torch.arange(4 * n).view(4, n) for n in (*rows, 9)]
    ragged = torch.nested.as_nested_tensor(columns, layout=torch.jagged)
    tq.kv_batch_put(
        keys=["a", "b", "c"], partition_id="train", fields=TensorDict({"position_ids": ragged}, batch_size=3)
    )
    found = tq.kv_batch_get(keys=["a", "b"], partition_id="train")["position_ids"]
    assert found._ragged_idx == 2
    assert [row.tolist() for row in found.unbind()] == [column.tolist() for column in columns[:2]]
