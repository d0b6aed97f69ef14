"""Rows and micro-batches of each rank. vime's own function makes them where its driver says how ranks train; else rows
are dealt here, and micro-batches are the trainer's."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.bridge import Schedule
from transfer_queue.errors import InvalidInput


def made_schedule(
    args: Namespace, train_data: Mapping[str, Any], dp_size: int, train_parallel_config: Mapping[str, Any] | None
) -> Schedule:
    """Of one rollout, for `dp_size` ranks. Raises `InvalidInput` where rows cannot be dealt."""
    lengths: Sequence[int] = train_data["total_lengths"]
    if train_parallel_config is not None:
        return _of_vime(args, train_data, train_parallel_config)
    if len(lengths) < dp_size:
        raise InvalidInput(f"{len(lengths)} rows for {dp_size} ranks: every rank trains on one at least")
    if getattr(args, "balance_data", False):
        return Schedule(partitions=balanced(lengths, dp_size))
    return Schedule(partitions=[range(rank, len(lengths), dp_size) for rank in range(dp_size)])


def _of_vime(args: Namespace, train_data: Mapping[str, Any], config: Mapping[str, Any]) -> Schedule:
    build = importlib.import_module("vime.utils.dp_schedule").build_dp_schedule
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build(
        args,
        config,
        train_data["total_lengths"],
        global_batch_size=getattr(args, "global_batch_size", None) or len(train_data["tokens"]),
        rollout_indices=train_data.get("rollout_ids", train_data["sample_indices"]),
    )
    return Schedule(
        partitions=partitions, micro_batch_indices=micro_batch_indices, num_microbatches=num_microbatches,
        global_batch_sizes=global_batch_sizes,
    )  # fmt: skip


def balanced(lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    """As many rows for each rank as for any other, or one more, with about the same number of tokens: the longest rows
    first, each to the rank with the fewest tokens that has room."""
    most = -(-len(lengths) // dp_size)
    parts: list[list[int]] = [[] for _ in range(dp_size)]
    tokens = [0] * dp_size
    num_full = 0
    larger = len(lengths) - (most - 1) * dp_size  # so many ranks have the most rows
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        room = [rank for rank in range(dp_size) if len(parts[rank]) < (most if num_full < larger else most - 1)]
        rank = min(room, key=lambda rank: (tokens[rank], rank))
        parts[rank].append(row)
        tokens[rank] += lengths[row]
        num_full += len(parts[rank]) == most
    return [sorted(part) for part in parts]
