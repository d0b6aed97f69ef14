"""Messages about the steps of a training loop: what its tasks took in each, and going back to one."""

from __future__ import annotations

from typing import Any

import msgspec

from transfer_queue.wire.messages.base import Reply, Request
from transfer_queue.wire.messages.rows import RowSet


class MarkStep(Request):
    """What `tasks` used since their last mark is what they used for `step`. Before that the rows in `used`, (lease,
    rows or None for all), are acknowledged, without those that were given back: all of it happens, or nothing."""

    step: int
    tasks: list[str]
    used: list[tuple[int, bytes | None]]
    service: bytes = b""


class ResumeStep(Request):
    """What `tasks` took after `step` is handed to them again, in the batches and the order of before."""

    step: int
    tasks: list[str]


class StepResumed(Reply):
    """So many batches, with so many rows, are handed out again. `lost`: batches of which rows were cleared."""

    batches: int
    rows: int
    lost: int


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
