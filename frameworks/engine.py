"""The two ends that need a GPU, replaced: a language-model server's answers, a model's numbers. The rest is verl's."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.rollout.replica import TokenOutput

FIRST_WORD, EOS = 5, 1
LOG_PROB, ENTROPY, VALUE = -0.25, 0.5, 0.125


class Answers:
    """What an agent loop talks to: one to five words, by the prompt; an answer to a prompt with `poison` fails."""

    def __init__(self, poison: int | None = None) -> None:
        self.poison = poison
        self.asked = 0

    async def generate(self, request_id: str, *, prompt_ids: list[int], **options: Any) -> TokenOutput:
        self.asked += 1
        if self.poison in prompt_ids:
            raise RuntimeError("the server is gone")
        count = 1 + (sum(prompt_ids) + self.asked) % 5
        return TokenOutput(
            token_ids=[FIRST_WORD + number for number in range(count)] + [EOS],
            log_probs=[-0.5] * (count + 1),
            stop_reason="completed",
            extra_fields={"min_global_steps": 0, "max_global_steps": 0},
        )


class Replicas:
    """Inference servers and their managers: every request of the trainer does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: {}


def constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """A jagged column of `value` with the rows of `like`."""
    return torch.nested.nested_tensor_from_jagged(torch.full(like.values().shape[:1], value), like.offsets())


def model_numbers(data: TensorDict) -> TensorDict:
    """What a model's forward pass over a batch gives back."""
    ids = data["input_ids"]
    columns = {"log_probs": constant(LOG_PROB, ids), "entropy": constant(ENTROPY, ids)}
    return TensorDict(columns, batch_size=[len(data)])


def losses(data: TensorDict, column: str) -> TensorDict:
    """The metrics of a training step. Reads what a step reads: `column` as long as the responses."""
    assert data[column].offsets().tolist() == data["response_mask"].offsets().tolist()
    assert data["mini_batch_size"] > 0
    metrics = {"loss": [float(data[column].values().sum())], "grad_norm": [1.0], "mfu": [0.1]}
    return TensorDict({"metrics": NonTensorData(metrics)}, batch_size=[])


class Engine(Worker):
    """A training worker with verl's dispatch and collection, and the bridge to the queue that `register` adds."""

    def __init__(self) -> None:
        super().__init__()
        for mesh in ("actor", "ref", "train"):
            self._register_dispatch_collect_info(mesh, dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        return model_numbers(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict:
        return model_numbers(data).select("log_probs")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        return losses(data, "advantages")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def infer_batch(self, data: TensorDict) -> TensorDict:
        return TensorDict({"values": constant(VALUE, data["input_ids"])}, batch_size=[len(data)])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        return losses(data, "returns")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to save: there is no model."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""
