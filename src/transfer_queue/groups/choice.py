"""Which groups may be handed out at the pool's version, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable

from transfer_queue.groups.group import SiblingGroup
from transfer_queue.groups.policy import GroupPolicy


def eligible(policy: GroupPolicy, version: int, groups: Iterable[SiblingGroup]) -> list[SiblingGroup]:
    """Of these groups, in order of arrival, those that may be handed out now, best first."""
    live = list(groups)
    sealed = [group for group in live if group.state == "sealed"]
    match policy.serve:
        case "target":
            return [group for group in sealed if group.target == version]
        case "dropless":
            if any(group.state == "open" and version - group.start >= _window(policy) for group in live):
                return []
        case "cohort":
            within = [group for group in live if _is_within(policy, version, group) and not group.is_held]
            first = min((group.judged_by(policy.judge) for group in within), default=0)
            sealed = [g for g in sealed if _is_within(policy, version, g) and g.judged_by(policy.judge) == first]
        case _:
            oldest, newest = _bounds(policy, version)
            sealed = [group for group in sealed if oldest <= group.judged_by(policy.judge) <= newest]
    if policy.order == "oldest":
        sealed.sort(key=lambda group: group.judged_by(policy.judge))
    elif policy.order == "freshest":
        sealed.sort(key=lambda group: -group.judged_by(policy.judge))
    return sealed


def due_groups(groups: Iterable[SiblingGroup]) -> list[SiblingGroup]:
    """Those that are to be handed out again, batch by batch, as they were."""
    return sorted((group for group in groups if group.state == "due"), key=lambda group: (group.batch, group.place))


def is_eligible(policy: GroupPolicy, version: int, group: SiblingGroup) -> bool:
    """Whether a sealed group of a policy that goes by priority may be handed out now."""
    oldest, newest = _bounds(policy, version)
    return oldest <= group.judged_by(policy.judge) <= newest


def may_serve(policy: GroupPolicy, version: int, group: SiblingGroup) -> bool:
    """Whether a sealed group is eligible now, or may be at a later version."""
    if policy.order == "weighted" and not group.priority:
        return False
    match policy.serve:
        case "target":
            return group.target is not None and group.target >= version
        case "cohort":
            return group.judged_by(policy.judge) >= version - _window(policy)
        case "window":
            return group.judged_by(policy.judge) >= _bounds(policy, version)[0]
    return True


def is_stale(policy: GroupPolicy, version: int, group: SiblingGroup) -> bool:
    """Whether no later version may use it. With `withhold`: whether none of its members may be used."""
    if policy.serve == "target":
        return group.target is not None and group.target < version
    if policy.window is None:
        return False
    if policy.stale == "withhold" and group.results:
        return len(withheld(policy, version, group)) == len(group.results)
    return group.judged_by(policy.judge) < version - policy.window


def withheld(policy: GroupPolicy, version: int, group: SiblingGroup) -> list[int]:
    """The slots whose rows are held back."""
    if policy.stale != "withhold":
        return []
    edge = version - _window(policy)
    return [number for number, slot in enumerate(group.slots) if slot.result is not None and slot.result.oldest < edge]


def _bounds(policy: GroupPolicy, version: int) -> tuple[float, int]:
    """The oldest and the newest version that a group may be judged by."""
    has_edge = policy.serve == "window" and policy.stale != "withhold"
    return version - _window(policy) if has_edge else -math.inf, version


def _window(policy: GroupPolicy) -> int:
    assert policy.window is not None
    return policy.window


def _is_within(policy: GroupPolicy, version: int, group: SiblingGroup) -> bool:
    return version - _window(policy) <= group.judged_by(policy.judge) <= version
