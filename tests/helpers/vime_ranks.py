"""What a Megatron rank of vime does with its rollout data, as far as its losses go: DP 2 x TP 2 over gloo.

`way` is "queue", where the data come from `TransferQueueBridge`, or "plain", where each rank has the list itself. It
prints the losses of each step, to the bit.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

STEPS, ROWS, DP, VOCABULARY = 3, 8, 2, 50


def rollout(step: int) -> dict[str, Any]:
    """Train data as vime's rollout manager has it."""
    rng = np.random.RandomState(step)
    lengths = rng.randint(3, 12, ROWS).tolist()
    return {
        "tokens": [rng.randint(0, VOCABULARY, length + 2).tolist() for length in lengths],
        "response_lengths": lengths,
        "rewards": rng.rand(ROWS).tolist(),
        "loss_masks": [rng.randint(0, 2, length).tolist() for length in lengths],
        "rollout_log_probs": [rng.randn(length).tolist() for length in lengths],
        "rollout_ids": [100 * step + row // 4 for row in range(ROWS)],
        "rollout_mask_sums": rng.rand(ROWS).tolist(),
        "rollout_routed_experts": [rng.randint(0, 8, (length + 1, 2, 2)).astype(np.int32) for length in lengths],
        "multimodal_train_inputs": [
            None if row % 2 else {"pixels": torch.full((2, 3), 1.0 * row)} for row in range(ROWS)
        ],
    }


def schedule(step: int) -> dict[str, Any]:
    """As the driver's function makes it: two micro-batches for each rank."""
    order = np.random.RandomState(1000 + step).permutation(ROWS).tolist()
    parts = [order[: ROWS // 2], order[ROWS // 2 :]]
    return {
        "partitions": parts, "micro_batch_indices": [[[0, 2], [1, 3]], [[3], [0, 1, 2]]], "num_microbatches": [2],
        "global_batch_sizes": [ROWS],
    }  # fmt: skip


def plain(step: int, dp_rank: int) -> dict[str, Any]:
    """The rank's part of the list, as without a queue."""
    data, plan = rollout(step), schedule(step)
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    part = plan["partitions"][dp_rank]
    found: dict[str, Any] = {name: [column[row] for row in part] for name, column in data.items()}
    found["micro_batch_indices"] = plan["micro_batch_indices"][dp_rank]
    found["global_batch_sizes"], found["num_microbatches"] = plan["global_batch_sizes"], plan["num_microbatches"]
    return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.head = torch.nn.Linear(8, VOCABULARY)


def trained(model: Model, optimizer: Any, batch: dict[str, Any], group: Any) -> float:
    """One step on what vime's actor makes of a batch; the loss over all ranks."""
    tokens = [torch.as_tensor(row, dtype=torch.long) for row in batch["tokens"]]
    masks = [torch.as_tensor(row, dtype=torch.int) for row in batch["loss_masks"]]
    old = [torch.as_tensor(row, dtype=torch.float32) for row in batch["rollout_log_probs"]]
    experts = [torch.from_numpy(np.asarray(row)) for row in batch["rollout_routed_experts"]]
    rewards = torch.tensor(batch["rewards"], dtype=torch.float32)
    sums = torch.tensor(batch["rollout_mask_sums"], dtype=torch.float32)
    optimizer.zero_grad()
    total = torch.zeros(())
    for indices in batch["micro_batch_indices"]:
        for row in indices:
            length = batch["response_lengths"][row]
            assert len(tokens[row]) == batch["total_lengths"][row]
            hidden = model.embedding(tokens[row][:-1])[-length:]
            logits = torch.log_softmax(model.head(hidden), dim=-1)
            new = logits.gather(1, tokens[row][-length:, None]).squeeze(1)
            image = batch["multimodal_train_inputs"][row]
            weight = 1.0 if image is None else 1.0 + float(image["pixels"].sum())
            ratio = torch.exp(new - old[row]) * masks[row] * (1 + experts[row].float().mean())
            total = total - (ratio.sum() * rewards[row] * weight + batch["rollout_ids"][row]) / (1 + sums[row])
    loss = total / batch["global_batch_sizes"][0]
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    optimizer.step()
    whole = loss.detach().clone()
    dist.all_reduce(whole, group=group)
    return float(whole)


def main(rank: int, store: str, args: Namespace, way: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    from megatron.core import parallel_state as mpu

    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    group = mpu.get_data_parallel_group(with_context_parallel=False)
    dp_rank = mpu.get_data_parallel_rank(with_context_parallel=False)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bridge = None
    if way == "queue":
        from transfer_queue.integrations.vime import TransferQueueBridge

        bridge = TransferQueueBridge.connect(args)
    losses = []
    for step in range(STEPS):
        if bridge is None:
            batch = plain(step, dp_rank)
        else:
            fields = bridge.actor_train_data_fields(args)
            batch, _ = bridge.get_data(step, task_name="actor_train", data_fields=fields, timeout_s=60)
        losses.append(trained(model, optimizer, batch, group).hex())
        dist.barrier()
        if bridge is not None and rank == 0:
            bridge.clear_partition(step)
    print(json.dumps(losses), flush=True)
    if bridge is not None:
        bridge.close()
    dist.destroy_process_group()


def ask(rank: int, store: str, args: Namespace, world: int, tp: int = 1) -> None:
    """A rank of `world` that fetches what each line of its input says, and prints it, or the name of the error."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import parallel_state as mpu

    from transfer_queue.errors import TransferQueueError
    from transfer_queue.integrations.vime import TransferQueueBridge

    mpu.initialize_model_parallel(tensor_model_parallel_size=tp)
    bridge = TransferQueueBridge.connect(args)
    batch: Any
    for line in sys.stdin:
        rollout_id, fields, timeout_s = json.loads(line)
        try:
            batch, _ = bridge.get_data(rollout_id, task_name="actor_train", data_fields=fields, timeout_s=timeout_s)
        except TransferQueueError as error:
            batch = type(error).__name__
        print(json.dumps(batch, default=lambda array: array.tolist()), flush=True)
    bridge.close()
    dist.destroy_process_group()
