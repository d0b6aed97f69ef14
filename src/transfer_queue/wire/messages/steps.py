"""Messages about the steps of a training loop: what its tasks took in each, and going back to one."""

from __future__ import annotations

from typing import Any

import msgspec

from transfer_queue.wire.messages.base import Reply, Request
from transfer_queue.wire.messages.rows import RowSet


class MarkStep(Request):
    """What `tasks` used since their last mark is what they used for `step`. Before that the rows in `used`, (lease,
    rows or None for all), are acknowledged, without those that were given back. The pools of groups of the partitions
    `pools` are marked with them (`MarkPool`). All of it happens, or nothing."""

    step: int
    tasks: list[str]
    used: list[tuple[int, bytes | None]]
    service: bytes = b""
    pools: list[str] = msgspec.field(default_factory=list)


class ResumeStep(Request):
    """What `tasks` took after `step` is handed to them again, in the batches and the order of before, and so are the
    groups of `pools` (`ResumePool`). All of it happens, or nothing."""

    step: int
    tasks: list[str]
    pools: list[str] = msgspec.field(default_factory=list)


class StepResumed(Reply):
    """So many batches, with so many rows, are handed out again. `lost`: batches of which rows were cleared.
    `pools`: of each pool what `PoolResumed` says, (batches, groups, lost)."""

    batches: int
    rows: int
    lost: int
    pools: dict[str, tuple[int, int, int]] = msgspec.field(default_factory=dict)


class GetStep(Request):
    """What a task used for a step; None: what it took since its last mark. Without `with_batches`: which steps it has
    marks of."""

    task: str
    step: int | None
    with_batches: bool = True


class TakenBatch(msgspec.Struct, array_like=True):
    """One batch. `rows`: int64, in order; `there`: those of them that were not cleared, with their keys. `repeated` of
    the rows, at the end, are there once more for the sake of other ranks. `rewritten`: by field, int64 indexes of those
    `there` whose cell was written anew since; `retagged`: of those whose tags changed."""

    partition: str
    rows: bytes
    fields: list[str]
    batch_size: int
    sampling: dict[str, Any]
    repeated: int
    there: RowSet
    names: list[str | None]
    rewritten: dict[str, bytes] = {}
    retagged: bytes = b""


class StepTaken(Reply):
    """`steps`: all that the task has marks of, ascending. `batches` in the order in which they were taken."""

    steps: list[int]
    batches: list[TakenBatch]
