"""What the columns of vime's train data are."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

import torch

from transfer_queue.bridge import Inferred, Numbers, Objects, Ragged, RolloutColumn, RolloutSchema
from transfer_queue.errors import InvalidInput

REQUIRED = ("tokens", "response_lengths", "loss_masks", "rewards")
COLUMNS: dict[str, RolloutColumn] = {
    "tokens": Ragged(dtype="int64", stored="int32"),
    "total_lengths": Numbers(dtype="int64"),
    "response_lengths": Numbers(dtype="int64"),
    "loss_masks": Ragged(dtype="int32"),
    "rewards": Numbers(dtype="float64"),  # Python's floats: what is computed of them is the same to the bit
    "raw_reward": Inferred(),
    "truncated": Numbers(dtype="int64"),
    "sample_indices": Numbers(dtype="int64"),
    "rollout_log_probs": Ragged(dtype="float32", optional=True),
    "teacher_log_probs": Ragged(dtype="float32", optional=True),
    "values": Ragged(dtype="float32", optional=True),
    "metadata": Objects(optional=True),
    "multimodal_train_inputs": Objects(optional=True),
    "prompt": Objects(optional=True),
}
SCHEMA = RolloutSchema(COLUMNS, others=Inferred(optional=True))
ARRAYS = ("rollout_routed_experts",)  # what vime hands to `torch.from_numpy`
FORWARDED = (  # what vime and slime give their ranks and leave out of their sums, whatever it is
    "multimodal_train_inputs", "prompt", "source_names", "sample_indices", "group_ids", "group_mask_sums",
    "rollout_ids", "rollout_mask_sums",
)  # fmt: skip
WHOLE = {
    "raw_reward": "raw_reward",
    "total_lengths": "seq_lens",
}  # columns that every rank gets of all rows, and as what
SCHEDULE = ("partition", "global_batch_sizes", "num_microbatches", "micro_batch_indices", *WHOLE.values())


def normalized(train_data: Mapping[str, Any]) -> dict[str, Any]:
    """`train_data` with `total_lengths`, and with defaults for what ranks ask for. Raises `InvalidInput`."""
    missing = [name for name in REQUIRED if train_data.get(name) is None]
    if missing:
        raise InvalidInput(f"rollout data is missing required fields: {missing}")
    found = {name: column for name, column in train_data.items() if column is not None}
    count = len(found["tokens"])
    found["total_lengths"] = [len(tokens) for tokens in found["tokens"]]
    found.setdefault("raw_reward", list(found["rewards"]))
    found.setdefault("truncated", [0] * count)
    found.setdefault("sample_indices", list(range(count)))
    return found


def default_fields(args: Namespace) -> list[str]:
    """What a rank needs, by the flags of the run."""
    fields = [
        "tokens", "total_lengths", "response_lengths", "loss_masks", "rewards", "raw_reward", "truncated",
        "sample_indices",
    ]  # fmt: skip
    if getattr(args, "use_rollout_logprobs", False):
        fields.append("rollout_log_probs")
    if getattr(args, "use_rollout_routing_replay", False):
        fields.append("rollout_routed_experts")
    if getattr(args, "multimodal_keys", None) is not None:
        fields.append("multimodal_train_inputs")
    if getattr(args, "use_opd", False) and getattr(args, "opd_type", None) == "sglang":
        fields.append("teacher_log_probs")
    extra = getattr(args, "transfer_queue_extra_data_fields", None) or []
    return list(dict.fromkeys([*fields, *extra]))


def as_rollout_batch(columns: Mapping[str, Any], named: Collection[str] = ()) -> dict[str, Any]:
    """Columns in the form that vime's actors take: lists of numbers, of tensors, of arrays for `torch.from_numpy`.

    Of columns of objects only those that vime forwards, or that are `named`: its log adds up whatever else there is.
    """
    found: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, torch.Tensor):
            found[name] = column.tolist()
        elif name in ARRAYS:
            found[name] = [row.numpy() for row in column]
        elif name in FORWARDED or name in named or all(isinstance(row, torch.Tensor) for row in column):
            found[name] = column
    return found
