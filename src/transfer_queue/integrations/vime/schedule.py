"""Rows and micro-batches of each rank. vime's or slime's own function makes them where its driver says how ranks train;
else rows are dealt here, and micro-batches are the trainer's."""

from __future__ import annotations

import importlib
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transfer_queue.bridge import Schedule
from transfer_queue.errors import InvalidInput, NotSupported

log = logging.getLogger("transfer_queue")

FRAMEWORKS = ("vime", "slime")
KEPT_TOGETHER = {"group_indices": "group_ids", "rollout_indices": "rollout_ids"}  # the column, by the argument


def made_schedule(
    args: Namespace, train_data: Mapping[str, Any], dp_size: int, train_parallel_config: Mapping[str, Any] | None
) -> Schedule:
    """Of one rollout, for `dp_size` ranks. Raises `InvalidInput` where rows cannot be dealt, and
    `NotSupported` where neither framework, or another version of it, is installed."""
    lengths: Sequence[int] = train_data["total_lengths"]
    if train_parallel_config is not None:
        return _of_framework(args, train_data, train_parallel_config)
    if len(lengths) < dp_size:
        raise InvalidInput(f"{len(lengths)} rows for {dp_size} ranks: every rank trains on one at least")
    if getattr(args, "balance_data", False):
        return Schedule(partitions=balanced(lengths, dp_size))
    return Schedule(partitions=[range(rank, len(lengths), dp_size) for rank in range(dp_size)])


def _of_framework(args: Namespace, train_data: Mapping[str, Any], config: Mapping[str, Any]) -> Schedule:
    build, argument = _build_dp_schedule()
    name = next((one for one in KEPT_TOGETHER.values() if one in train_data), "sample_indices")  # as they fall back
    ids = train_data[name]
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build(
        args,
        config,
        train_data["total_lengths"],
        global_batch_size=getattr(args, "global_batch_size", None) or len(set(ids)),
        **{argument: ids},
    )
    trained = {row for part in partitions for row in part}
    dropped = [row for row in range(len(ids)) if row not in trained]
    if dropped:
        log.info("%d of %d rows make no whole training step, and are dropped", len(dropped), len(ids))
    return Schedule(
        partitions=partitions, micro_batch_indices=micro_batch_indices, num_microbatches=num_microbatches,
        global_batch_sizes=global_batch_sizes, dropped=dropped,
    )  # fmt: skip


def _build_dp_schedule() -> tuple[Callable[..., Any], str]:
    """The framework's function, and the argument that says which rows it keeps together in one step."""
    for framework in FRAMEWORKS:
        try:
            build = importlib.import_module(f"{framework}.utils.dp_schedule").build_dp_schedule
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != framework:
                raise  # the framework is there, and lacks something
            continue
        argument = next((one for one in KEPT_TOGETHER if one in inspect.signature(build).parameters), None)
        if argument is None:
            raise NotSupported(f"{framework}'s build_dp_schedule takes none of {list(KEPT_TOGETHER)}: pass schedule=")
        return build, argument
    raise NotSupported(f"none of {list(FRAMEWORKS)} has utils.dp_schedule in this process: pass schedule=")


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
