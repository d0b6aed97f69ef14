"""Counts and sizes of the service in the log of a training run, beside its losses.

from transfer_queue.integrations.loggers import log_metrics
log_metrics(step, run)                                                # a run of wandb, or wandb itself
log_metrics(step, SummaryWriter("logs"), tasks=["actor", "critic"])   # of TensorBoard

Neither library is imported: a writer is known by its methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import transfer_queue as tq
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.errors import InvalidInput
from transfer_queue.wire.messages.overview import PartitionOverview

PREFIX = "transfer_queue/"
NAMES = {  # of the service's counts here
    "rows": "rows", "partitions": "partitions", "clients": "clients", "waiting_requests": "waiting_requests",
    "stale_rows": "stale_rows", "dead_letters": "dead_letters", "weight_version": "weight_version",
    "arena_nbytes_used": "memory/used_bytes", "arena_nbytes_resident": "memory/resident_bytes",
    "spill_nbytes_used": "memory/spilled_bytes",
}  # fmt: skip


def log_metrics(
    step: int | np.integer[Any],
    writer: Any,
    *,
    client: TransferQueueClient | None = None,
    partitions: Sequence[str] | None = None,
    tasks: Sequence[str] = (),
    prefix: str = PREFIX,
) -> dict[str, float]:
    """Write `metrics` at `step` of a run, each under its name after `prefix`; returns them as written.

    `writer` has `add_scalar(name, value, step)`, as a SummaryWriter, else `log({name: value}, step=step)`, as a run of
    wandb. Raises `InvalidInput` for another one, or a step that is no number from 0, before the service is asked; what
    the writer raises goes through.
    """
    if (type(step) is not int and not isinstance(step, np.integer)) or step < 0:
        raise InvalidInput(f"step {step!r}: expected a number from 0")
    step = int(step)
    scalar, log = getattr(writer, "add_scalar", None), getattr(writer, "log", None)
    if not callable(scalar) and not callable(log):
        raise InvalidInput(f"a writer has add_scalar or log, got {type(writer).__qualname__}")
    values = {prefix + name: value for name, value in metrics(client, partitions, tasks).items()}
    if callable(scalar):
        for name, value in values.items():
            scalar(name, value, step)
    elif callable(log):
        log(dict(values), step=step)
    return values


def metrics(
    client: TransferQueueClient | None = None, partitions: Sequence[str] | None = None, tasks: Sequence[str] = ()
) -> dict[str, float]:
    """What the service counts now: rows, partitions, clients, requests that wait, rows that became too old, dead
    letters, the version of the weights (where one was announced), memory in bytes and as a share of the budget; of each
    of `partitions` (None: all) its rows, groups by state, and the share of rows that each of `tasks` consumed.

    Two requests. A partition that is not there is left out, and a task that is not there consumed none. `client`:
    default that of this process. Raises `NotInitialized`.
    """
    asked = tq.get_client() if client is None else client
    told = asked.stats()
    found = {name: float(told[key]) for key, name in NAMES.items() if told.get(key) is not None}
    found["memory/pinned_bytes"] = float(sum(told["pinned_nbytes"].values()))
    if told["arena_nbytes_budget"]:
        found["memory/used_share"] = told["arena_nbytes_used"] / told["arena_nbytes_budget"]
    for partition in asked.overview(0).partitions:
        if partitions is None or partition.name in partitions:
            of_partition = _of_partition(partition, tasks, told["groups"].get(partition.name, {}))
            found |= {f"partition/{partition.name}/{name}": value for name, value in of_partition}
    return found


def _of_partition(
    partition: PartitionOverview, tasks: Sequence[str], groups: dict[str, Any]
) -> Iterator[tuple[str, float]]:
    yield "rows", float(partition.rows)
    for state, count in groups.items():
        yield f"groups/{state}", float(count)
    consumed = {task.name: task.consumed for task in partition.tasks}
    for task in tasks if partition.rows else ():
        yield f"consumed_share/{task}", consumed.get(task, 0) / partition.rows
