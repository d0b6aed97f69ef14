"""Rows and micro-batches of each rank, by the function with which vime and slime make them themselves."""

from __future__ import annotations

import importlib
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from transfer_queue.bridge import Schedule
from transfer_queue.errors import InvalidInput, NotSupported

log = logging.getLogger("transfer_queue")

FRAMEWORKS = ("vime", "slime")
KEPT_TOGETHER = {"group_indices": "group_ids", "rollout_indices": "rollout_ids"}  # the column, by the argument


def made_schedule(args: Namespace, train_data: Mapping[str, Any], config: Mapping[str, Any]) -> Schedule:
    """Of one rollout, for ranks that train as `config` says (see `parallel_config`). Raises `InvalidInput` where rows
    cannot be dealt, `NotSupported` where neither framework, or another version of it, is installed."""
    build, argument = _build_dp_schedule()
    name = next((one for one in KEPT_TOGETHER.values() if one in train_data), "sample_indices")  # as they fall back
    ids = [one.item() if hasattr(one, "item") else one for one in train_data[name]]  # tensors hash by identity
    global_batch_size = getattr(args, "global_batch_size", None) or len(set(ids))
    try:
        partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build(
            args, config, train_data["total_lengths"], global_batch_size=global_batch_size, **{argument: ids}
        )
    except AssertionError as error:  # as the function refuses what it cannot deal
        raise InvalidInput(f"no schedule for {len(ids)} rows in batches of {global_batch_size}: {error}") from error
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


def parallel_config(args: Namespace, dp_size: int) -> dict[str, Any]:
    """The `train_parallel_config` that a rollout manager has, by the flags of the run. Raises `InvalidInput` where they
    do not say it all."""
    if (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) > 1:
        raise InvalidInput("with virtual pipeline stages pass train_parallel_config, which the rollout manager has")
    cp_size = int(getattr(args, "context_parallel_size", 1))
    return {"dp_size": dp_size, "cp_size": cp_size, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
