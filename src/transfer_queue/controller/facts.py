"""What lasts of what happens in a controller, as typed entries: a state and the facts after it make the state of later.

Facts say what came of things, not what was asked: who has a row on lease, waits or holds a lock is none. What can be
computed from the tables alone (rows, keys, tags, cells) is a request that is carried out again; what depends on who
asked when, such as which rows a task took, is said as it is afterwards.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from transfer_queue.controller.taken import SavedDeal, SavedTaken
from transfer_queue.wire import messages as m

USED, KEPT = 1, 2  # what a row is to a task, beside 0: free. Of an earlier release, what its sampler keeps is used


class Fact(msgspec.Struct, array_like=True, gc=False):
    """Base of all facts."""


class Applied(Fact, tag=0):
    """A request that was not refused. The next new row gets the number `next_index` after it."""

    message: m.ClientMessage
    next_index: int


class RowsTaken(Fact, tag=1):
    """What `rows` (int64 indexes) are to a task: one byte each, `USED`, `KEPT` by its sampler, or 0; and (position in
    `rows`, attempts, reason, dead) of those that came back to it, the others did not. `fates`: one byte each, as
    `readiness.Task.fates`; empty where none has any. `delays`: (position in `rows`, seconds) of those that are held
    back. `max_deliver`: what its requests asked for, 0 where none did. `stale`: its `num_stale`; -1: not said, as by an
    earlier release."""

    partition: str
    task: str
    rows: bytes
    used: bytes
    returned: list[tuple[int, int, str, bool]]
    fates: bytes = b""
    delays: list[tuple[int, float]] = []
    max_deliver: int = 0
    stale: int = -1


class Granted(Fact, tag=2):
    """How many rows producers may have started for a task (`AdmissionGrant`)."""

    task: str
    base: int
    rows: int


class BatchTaken(Fact, tag=3):
    """A task with steps got a batch."""

    task: str
    batch: SavedTaken


class BatchDealt(Fact, tag=4):
    """Ranks of a task with steps were dealt a batch."""

    task: str
    deal: SavedDeal


class BatchUndone(Fact, tag=5):
    """The batch with one of these rows (int64) reached nobody."""

    task: str
    rows: bytes


class StepMarked(Fact, tag=6):
    """A task marked a step. `lent` and `left` are not used yet and belong to the next one."""

    task: str
    step: int
    lent: list[SavedTaken]
    left: list[SavedDeal]


class HeldAgain(Fact, tag=7):
    """Of what a task takes once more: the numbers of the batches that are to come, and of those that it has now; the
    partitions of deals that are to come."""

    task: str
    again: list[int]
    served: list[int]
    deals: list[str]


class CellsMoved(Fact, tag=8):
    """See `Controller.relocate`."""

    block: int
    target: int
    rows: bytes


class CellsGathered(Fact, tag=9):
    """See `Controller.gather`."""

    target: int
    blocks: bytes
    rows: bytes


class SamplerIs(Fact, tag=10):
    """What the sampler remembers."""

    state: Any


class UnitGivenUp(Fact, tag=11):
    """See `Controller.lose`."""

    unit: int


class BlocksGivenUp(Fact, tag=12):
    """See `Controller.lose_blocks`."""

    blocks: list[int]


class LocksNumbered(Fact, tag=13):
    """Locks have numbers up to this one: see `locks.LockNumbers`."""

    last: int


ControllerFact: TypeAlias = (
    Applied | RowsTaken | Granted | BatchTaken | BatchDealt | BatchUndone | StepMarked | HeldAgain | CellsMoved
    | CellsGathered | SamplerIs | UnitGivenUp | BlocksGivenUp | LocksNumbered
)  # fmt: skip
