"""What is wrong with a saved buffer. Everything is looked at before anything of it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import InvalidInput

KEYS = {"partition_id", "saved_capacity", "groups"}
GROUP_KEYS = {"meta", "start_weight", "end_weight", "target_step", "group_id", "fields_data"}


def groups_to_restore(
    state: Mapping[str, Any], *, max_groups: int, partition_id: str, group_size: int
) -> list[dict[str, Any]]:
    """The groups of a saved buffer that fit: where there are more than `max_groups`, those of the newest weights, in
    the order they were saved.

    Raises `InvalidInput` for a state of another partition or group size, for what is missing or twice, and where groups
    too many are each for a certain step: a step that lacks one would wait for ever.
    """
    if missing := KEYS - set(state):
        raise InvalidInput(f"a saved replay buffer lacks {sorted(missing)}")
    if state["partition_id"] != partition_id:
        raise InvalidInput(f"a replay buffer of partition {state['partition_id']!r}, expected {partition_id!r}")
    groups = list(state["groups"])
    for group in groups:
        if missing := GROUP_KEYS - set(group):
            raise InvalidInput(f"a group of a saved replay buffer lacks {sorted(missing)}")
        _check_size(group["group_id"], group["meta"], group_size)
    _check_distinct("group", [group["group_id"] for group in groups])
    _check_distinct("sample", [one for group in groups for one in group["meta"].sample_ids])
    if len(groups) <= max_groups:
        return groups
    if any(group["target_step"] is not None for group in groups):
        raise InvalidInput(f"{len(groups)} groups that are each for a certain step, and room for {max_groups}")
    freshest = sorted(range(len(groups)), key=lambda at: (groups[at]["start_weight"], at))[len(groups) - max_groups :]
    return [groups[at] for at in sorted(freshest)]


def _check_size(group_id: str, meta: Any, size: int) -> None:
    counts = [len(values or []) for values in (meta.sample_ids, meta.tags, meta.sequence_lengths)]
    if counts != [size] * 3:
        raise InvalidInput(f"group {group_id!r} has {counts} samples, tags and lengths, expected {size} of each")


def _check_distinct(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidInput(f"{what} {name!r} is in a saved replay buffer twice")
        seen.add(name)
