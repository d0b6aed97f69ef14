"""Versions that get fewer groups than they were to have."""

from __future__ import annotations

from transfer_queue.errors import GroupsShort, InvalidInput
from transfer_queue.groups.pool import PoolCore


def needed(pool: PoolCore, least: int) -> int:
    """How many groups are enough for who asks for `least`: a version may be smaller, and a part of it be taken. Raises
    `GroupsShort`."""
    policy, version = pool.policy, pool.version
    excused = pool.state.excused.get(version, 0)
    if not excused:
        return least
    left = policy.groups_per_version - excused
    if left < policy.least:
        raise GroupsShort(
            f"version {version} has {left} groups left of {policy.groups_per_version}, its floor is {policy.least}"
        )
    return min(least, max(1, _to_come(pool, version))) if left else 0


def retarget(pool: PoolCore, name: str, target: int) -> None:
    """A group takes the place of one that its version lacks; another may be started in its own place.

    `InvalidInput` unless that version lacks one, and the group is of a later one.
    """
    group, state = pool.group(name), pool.state
    if pool.policy.serve != "target" or group.ticket is None or group.target is None:
        raise InvalidInput(f"group {name!r} is for no version")
    if group.is_held or not pool.version <= target < group.target:
        raise InvalidInput(f"group {name!r} of version {group.target} cannot be one of {target}")
    free = [one for one in state.returned if pool.target_of(one) == target]
    if free:
        state.returned.remove(free[0])
    elif state.excused.get(target):
        state.excused[target] -= 1
    else:
        raise InvalidInput(f"version {target} lacks no group")
    state.returned.append(group.ticket)
    group.ticket, group.target = free[0] if free else None, target


def _to_come(pool: PoolCore, target: int) -> int:
    """How many groups of a version nobody has or had: those that are there, and those that may be opened."""
    state, size = pool.state, pool.policy.groups_per_version
    there = sum(group.target == target and not group.is_held for group in pool.groups.values())
    if state.ended:
        return there
    first = (target - state.base) * size
    given = sum(pool.target_of(ticket) == target for ticket in (*state.returned, *state.reserved))
    return there + given + min(size, max(0, first + size - state.next_ticket))
