"""The steps of a training loop: marking them, what was taken for each, going back to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transfer_queue.client.describing import batch_meta
from transfer_queue.client.effects import Call, Operation
from transfer_queue.client.operations import rows as ops
from transfer_queue.client.session import Session
from transfer_queue.errors import InvalidInput
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler.base import whole_number
from transfer_queue.wire import messages as m

MAX_STEP = 1 << 62


class ResumedGroups(NamedTuple):
    """What is handed out once more: `groups` groups in `batches` batches. `lost`: groups that are not, for some of
    their rows were cleared."""

    batches: int
    groups: int
    lost: int


class Resumed(NamedTuple):
    """What is handed out once more: `rows` rows in `batches` batches. `lost`: batches that are not, for some of their
    rows were cleared; those that are left are offered like any others. `pools`: what each pool hands out once more."""

    batches: int
    rows: int
    lost: int
    pools: dict[str, ResumedGroups]


def checkpoint(
    session: Session, step: int, tasks: Sequence[str], used: BatchMeta | Sequence[BatchMeta], pools: Sequence[str]
) -> Operation[None]:
    metas = [used] if isinstance(used, BatchMeta) else used
    if not isinstance(metas, (list, tuple)) or not all(isinstance(meta, BatchMeta) for meta in metas):
        raise InvalidInput(f"used is a BatchMeta or a list of them, got {used!r}")
    leases = [ops.leased(meta) for meta in metas if len(meta)]
    if len({service_id for _, _, service_id in leases}) > 1:
        raise InvalidInput("the rows are of several lives of the service")
    service_id = leases[0][2] if leases else b""
    named: list[tuple[int, bytes | None]] = [(lease, rows) for lease, rows, _ in leases]
    marked, also = _names(tasks, pools)
    yield Call(m.MarkStep(session.next_rid(), step_number(step), marked, named, service_id, also))


def resume(session: Session, step: int, tasks: Sequence[str], pools: Sequence[str]) -> Operation[Resumed]:
    reply: m.StepResumed = (yield Call(m.ResumeStep(session.next_rid(), step_number(step), *_names(tasks, pools))))[0]
    groups = {partition: ResumedGroups(*found) for partition, found in reply.pools.items()}
    return Resumed(reply.batches, reply.rows, reply.lost, groups)


def step_number(step: int) -> int:
    """`InvalidInput` for what numbers no step."""
    number = whole_number(step, "step")
    if not 0 <= number < MAX_STEP:
        raise InvalidInput(f"step {step!r}: expected a whole number from 0")
    return number


def _names(tasks: Sequence[str], pools: Sequence[str]) -> tuple[list[str], list[str]]:
    for what, names in (("tasks", tasks), ("pools", pools)):
        if not isinstance(names, (list, tuple)) or not all(type(name) is str for name in names):
            raise InvalidInput(f"{what} is a list of names, got {names!r}")
    if not tasks and not pools:
        raise InvalidInput("name a task at least, or the partition of a pool")
    return list(tasks), list(pools)


def get_step(session: Session, task_name: str, step: int | None) -> Operation[list[BatchMeta]]:
    taken: m.StepTaken = (
        yield Call(m.GetStep(session.next_rid(), task_name, None if step is None else step_number(step)))
    )[0]
    return [batch_meta(session.service_id, batch.there, batch.partition) for batch in taken.batches]


def list_steps(session: Session, task_name: str) -> Operation[list[int]]:
    taken: m.StepTaken = (yield Call(m.GetStep(session.next_rid(), task_name, None, False)))[0]
    return taken.steps
