"""What requests change in a pool of groups alone: all that one asks, or it raises before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer_queue.controller.group_checks import check_slots, check_step
from transfer_queue.errors import InvalidInput
from transfer_queue.groups import PoolCore
from transfer_queue.groups.shortfall import retarget
from transfer_queue.wire import messages as m


def _unstart(pool: PoolCore, message: m.UnstartSlots) -> None:
    for one in message.attempts:
        pool.unstart(one.group, one.slot, one.attempt)


def _fail(pool: PoolCore, message: m.FailSlots) -> None:
    check_slots(pool, message.attempts)
    for one in message.attempts:
        pool.fail(one.group, one.slot, one.attempt, message.kind)


def _filter(pool: PoolCore, message: m.FilterGroups) -> None:
    pool.filter(message.groups)


def _prioritize(pool: PoolCore, message: m.PrioritizeGroups) -> None:
    if len(message.groups) != len(message.priorities):
        raise InvalidInput(f"{len(message.groups)} groups and {len(message.priorities)} priorities")
    pool.prioritize(dict(zip(message.groups, message.priorities, strict=True)))


def _retarget(pool: PoolCore, message: m.RetargetGroup) -> None:
    retarget(pool, message.group, message.target)


def _end(pool: PoolCore, message: m.EndPool) -> None:
    pool.end()


def _return(pool: PoolCore, message: m.ReturnTickets) -> None:
    pool.give_back(message.tickets)


def _unlend(pool: PoolCore, message: m.UnlendGroups) -> None:
    pool.release(message.groups)


def _mark(pool: PoolCore, message: m.MarkPool) -> None:
    check_step(message.step)
    pool.mark(message.step)


CHANGES: dict[type, Callable[[PoolCore, Any], None]] = {
    m.UnstartSlots: _unstart, m.FailSlots: _fail, m.FilterGroups: _filter, m.PrioritizeGroups: _prioritize,
    m.RetargetGroup: _retarget, m.EndPool: _end, m.ReturnTickets: _return, m.UnlendGroups: _unlend,
    m.MarkPool: _mark,
}  # fmt: skip
